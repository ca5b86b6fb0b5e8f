"""Programs as processes of their own, forked from this one: what they import is there already."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping


class Program:
    """A program in a child of this process, with an environment and outputs of its own; as `subprocess.Popen` is used.

    `main` returns the exit code, or ends by SystemExit or by `os._exit`.
    """

    def __init__(self, main: Callable[[], object], environment: Mapping[str, object]):
        self._outputs = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - communicate closes them
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number, file in enumerate(self._outputs, 1):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            os.environ |= {key: str(value) for key, value in environment.items()}
            os._exit(_code(main))

    def poll(self) -> int | None:
        """The exit code, -N for signal N; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what the program wrote to stdout and stderr, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            time.sleep(0.01)
        texts = []
        for file in self._outputs:
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return texts[0], texts[1]


def _code(main: Callable[[], object]) -> int:
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0 if code is None else 1
