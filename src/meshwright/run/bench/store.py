"""Kept: parts of a measurement that have ended, in a file, so that one that is interrupted goes on from there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.atomic import write_bytes
from meshwright.errors import MeshwrightError


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file: ``of`` says of which machine, software and sizes the ``parts`` are.
    ``refused``: all are there, and what was fitted to them could not be believed."""

    of: dict[str, Any]
    parts: dict[str, Any]
    refused: bool = False


class KeptParts:
    """Parts by name, plain values. `file` None keeps nothing; a file of another machine, software or other sizes is as
    good as none."""

    def __init__(self, file: Path | None, of: dict[str, Any]):
        self.file, self.of = file, msgspec.to_builtins(of)
        self.parts: dict[str, Any] = {}
        if file is not None:
            with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                found = msgspec.json.decode(file.read_bytes(), type=Parts)
                if msgspec.json.encode(found.of) == msgspec.json.encode(self.of):
                    self.parts = found.parts
        self.found = tuple(self.parts)

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """The part called `name`: as it was kept, else measured now and kept."""
        if name not in self.parts:
            self.parts[name] = msgspec.json.decode(msgspec.json.encode(measure()))
            if self.file is not None:
                with contextlib.suppress(OSError, MeshwrightError):  # then it is measured again
                    self.file.parent.mkdir(parents=True, exist_ok=True)
                    write_bytes(self.file, msgspec.json.encode(Parts(of=self.of, parts=self.parts)))
        return self.parts[name]


def num_kept(file: Path) -> int:
    """Parts that a file holds."""
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
        return len(msgspec.json.decode(file.read_bytes(), type=Parts).parts)
    return 0


def refuse(file: Path) -> None:
    """Say of what is kept that what was fitted to it could not be believed."""
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError, MeshwrightError):
        found = msgspec.json.decode(file.read_bytes(), type=Parts)
        write_bytes(file, msgspec.json.encode(msgspec.structs.replace(found, refused=True)))


def is_refused(file: Path) -> bool:
    """Whether what a file keeps was refused."""
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=Parts).refused
    return False


def forget(file: Path) -> None:
    """Remove what is kept: the measurement is whole and written elsewhere."""
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)


__all__ = ["KeptParts", "Parts", "forget", "is_refused", "num_kept", "refuse"]
