"""Asking a machine: commands without a shell and with a time limit, files of ``/sys`` and ``/proc``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

#: Seconds that a command may take; nvidia-smi on a machine whose driver starts up takes some.
LIMIT_S = 20.0
#: Bytes that are read of one file at most.
MOST_BYTES = 4_000_000


class MachineAnswer(msgspec.Struct, frozen=True):
    """An answer of the machine to one command: the text, or why there is none."""

    asked: str
    text: str = ""
    missing: str = ""


class Here:
    """The machine this process runs on."""

    def run(self, *command: str) -> MachineAnswer:
        """Run a command and return its stdout, or why there is none; never through a shell."""
        asked = " ".join(command)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LIMIT_S,
                check=False,
                env={**os.environ, "LC_ALL": "C"},
            )
        except FileNotFoundError:
            return MachineAnswer(asked, missing="not installed")
        except subprocess.TimeoutExpired:
            return MachineAnswer(asked, missing=f"no answer in {LIMIT_S:g} s")
        except OSError as error:
            return MachineAnswer(asked, missing=f"cannot be run: {error.strerror}")
        text = done.stdout.decode("utf-8", "replace")
        if done.returncode:
            said = (done.stderr.decode("utf-8", "replace").strip() or text.strip()).splitlines()
            return MachineAnswer(
                asked, missing=f"failed with exit code {done.returncode}" + (f": {said[0]}" if said else "")
            )
        return MachineAnswer(asked, text)

    def read(self, path: str) -> MachineAnswer:
        """The text of a file."""
        try:
            with Path(path).open("rb") as file:
                return MachineAnswer(path, file.read(MOST_BYTES).decode("utf-8", "replace"))
        except OSError as error:
            return MachineAnswer(path, missing=error.strerror or "cannot be read")

    def names(self, path: str) -> tuple[str, ...]:
        """The entries of a folder, sorted; empty where there is none."""
        try:
            return tuple(sorted(entry.name for entry in Path(path).iterdir()))
        except OSError:
            return ()
