"""Writing what a user names: a file whole or not at all, a pipe or a device as a stream.

A link is written through and stays a link; only a regular file is ever replaced.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from meshwright.errors import MeshwrightError

#: Links followed before the system, too, gives up on a circle.
LINKS = 40
#: Where a process finds its own open descriptors as files.
DESCRIPTORS = ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd")


class Obstacle(NamedTuple):
    """Why nothing can be written at a path, and what to do."""

    reason: str
    help: str


def obstacle(path: str | Path, *, such_as: str = "out") -> Obstacle | None:
    """Find what is in the way of writing to `path`, without touching it; None when nothing is. `such_as` is the name
    that the help gives a file."""
    try:
        number = _descriptor(path)
        if number is not None:
            os.fstat(number)  # says whether it is open
            return None
        mode, target = _mode(path), _behind(path)
    except (OSError, ValueError) as error:
        return Obstacle(_said(error), "name a file in a folder that exists")
    if mode is None:
        if not target.parent.is_dir():
            return Obstacle(f"there is no folder {target.parent}", f"make it first: mkdir -p {target.parent}")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            return Obstacle("permission denied", "choose a place you may write to")
        return None
    if stat.S_ISDIR(mode):
        return Obstacle("it is a folder", f"name a file in it, such as {Path(path) / such_as}")
    if stat.S_ISBLK(mode):
        return Obstacle("it is a disk", "name a file, a pipe or a character device such as /dev/null")
    if not os.access(path, os.W_OK):
        return Obstacle("permission denied", "choose a place you may write to")
    if stat.S_ISREG(mode) and not os.access(target.parent, os.W_OK | os.X_OK):
        return Obstacle(f"nothing can be added to its folder {target.parent}", "choose a folder you may write to")
    return None


def is_stream(path: str | Path) -> bool:
    """Whether what is written to `path` flows away: a pipe, a device or a descriptor of this process, no file."""
    try:
        mode = _mode(path)
        return _descriptor(path) is not None or not (mode is None or stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    except (OSError, ValueError):
        return False


def write_bytes(path: str | Path, data: bytes, *, mode: int | None = None) -> None:
    """Write `data` to `path`, as :func:`write_by` does.

    Raises:
        MeshwrightError: X104 when it cannot be written.
        BrokenPipeError: whoever read a pipe has gone.
    """
    write_by(path, lambda file: file.write(data), mode=mode)


def write_by(path: str | Path, write: Callable[[BinaryIO], Any], *, mode: int | None = None) -> None:
    """Write to `path` what a function writes into a file that is open; a regular file gets a `mode`, where it is said.

    A regular file appears or is replaced at once, with its mode and, where the system lets us, its owner: a reader
    sees the old one or the new one, and after an error the old one is whole. A link stays, and what it leads to is
    replaced, or made where that is missing. A pipe, a socket or a character device is written as a stream; a pipe
    that nobody reads yet is waited for.

    Raises:
        MeshwrightError: X104 when it cannot be written.
        BrokenPipeError: whoever read a pipe has gone.
    """
    blocked = obstacle(path)
    if blocked is not None:
        raise _refused(path, blocked)
    try:
        if is_stream(path):
            _stream(path, write)
        else:
            _replace(_behind(path), write, mode)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(path, Obstacle(_said(error), "name a file in a folder that exists and has room")) from None


def _stream(path: str | Path, write: Callable[[BinaryIO], Any]) -> None:
    number = _descriptor(path)
    if number is None:
        handle = os.open(path, os.O_WRONLY | os.O_NOCTTY)
    else:  # the descriptor itself, which has its place in a file already: opening it by name would cut the file off
        for printed in (sys.stdout, sys.stderr):
            if printed is not None:
                printed.flush()
        handle = os.dup(number)
    with os.fdopen(handle, "wb") as file:
        write(file)


def _replace(target: Path, write: Callable[[BinaryIO], Any], said: int | None) -> None:
    """A new file beside `target` that takes its place when all is written."""
    before = target.stat() if target.exists() else None
    mode = said or (0o666 if before is None else before.st_mode & 0o777)
    part = target.parent / f".meshwright.{os.urandom(8).hex()}.part"
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # less the process's mask
    try:
        with os.fdopen(handle, "wb") as file:
            if before is not None:
                with suppress(OSError):
                    os.fchown(handle, before.st_uid, before.st_gid)
                os.fchmod(handle, mode)
            write(file)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _descriptor(path: str | Path) -> int | None:
    """The number of the open descriptor that `path` names, as /dev/stdout and /dev/fd/63 do; None for any other."""
    place = os.path.abspath(path)  # noqa: PTH100 - a link must stay one
    for _ in range(LINKS):
        folder, name = os.path.split(place)
        if name.isdecimal() and folder in (*DESCRIPTORS, f"/proc/{os.getpid()}/fd"):
            return int(name)
        try:
            place = os.path.normpath(os.path.join(folder, os.readlink(place)))  # noqa: PTH115, PTH118
        except OSError:
            return None
    return None


def _behind(path: str | Path) -> Path:
    """The path that links lead to, which need not exist."""
    return Path(os.path.realpath(path))


def _mode(path: str | Path) -> int | None:
    """The file type and mode at `path`, behind links; None for nothing."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116
    except FileNotFoundError:
        return None


def _said(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _refused(path: str | Path, why: Obstacle) -> MeshwrightError:
    return MeshwrightError.one("X104", f"cannot write {path}: {why.reason}", help=why.help)
