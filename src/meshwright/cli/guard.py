"""How commands end: exit codes, errors as text or JSON, and no traceback for what a user did."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import MeshwrightError, remarking

FORMAT_VERSION = 1
INTERRUPTED, BROKEN_PIPE, INTERNAL, UNWRITTEN = 130, 141, 70, 74
"""128 + SIGINT, 128 + SIGPIPE, EX_SOFTWARE and EX_IOERR of sysexits.h."""
#: What the system says when stdout or a file takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def guarded(command: Callable[[], int], *, as_json: bool) -> int:
    """The exit code of `command`, whatever happens in it. MESHWRIGHT_DEBUG=1 shows tracebacks of our own faults."""
    if sys.stdout is None:  # closed by the caller (`>&-`): the exit code is the answer
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a word has that the terminal's encoding has not is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    from meshwright.cli.output import JsonOutput

    JsonOutput.printed = False
    try:
        with remarking(lambda text: print(f"note: {text}", file=sys.stderr)):
            code = command()
        sys.stdout.flush()
        return code
    except MeshwrightError as error:
        show(error, as_json=as_json)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # The reader (`| head`) has gone; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            return _fault(error)
        print(f"cannot write the answer: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNWRITTEN
    except Exception as fault:
        # A compiled function that Ctrl-C fell into answers with a SystemError of its own.
        return _interrupted() if _was_interrupted(fault) else _fault(fault)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _was_interrupted(fault: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt is what an exception was raised from or while handling."""
    while fault is not None and not isinstance(fault, KeyboardInterrupt):
        fault = fault.__cause__ or fault.__context__
    return fault is not None


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM is as Ctrl-C while this lasts: what is half written is taken back before the process ends."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say what signals do
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fault(fault: Exception) -> int:
    """Our own fault: a line that says so, or the traceback where it is asked for."""
    if os.environ.get("MESHWRIGHT_DEBUG") == "1":
        raise fault
    print(
        f"meshwright failed: {type(fault).__name__}: {fault}\n"
        "  this is a fault of Meshwright, please report it; MESHWRIGHT_DEBUG=1 shows where it happened",
        file=sys.stderr,
    )
    return INTERNAL


def show(error: MeshwrightError, *, as_json: bool) -> None:
    """Every violation: as the one JSON object on stdout, or on stderr where the answer has been printed already."""
    from meshwright.cli.output import JsonOutput, print_json

    if as_json and not JsonOutput.printed:
        errors = [{"code": d.code, "message": d.message, "place": d.place, "help": d.help} for d in error.diagnostics]
        print_json({"format_version": FORMAT_VERSION, "errors": errors})
        return
    print("\n\n".join(map(str, error.diagnostics)), file=sys.stderr)
    first, *others = sorted({d.code for d in error.diagnostics})
    more = f" (or {', '.join(others)})" if others else ""
    print(f"\nmeshwright explain {first}{more} says more", file=sys.stderr)
