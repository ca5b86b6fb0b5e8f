"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from meshwright.errors import MeshwrightError


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` beside `path` and rename it into place, so that a reader sees the old file or the new one.

    Raises:
        MeshwrightError: X104 when the folder is missing or the file cannot be written.
    """
    target = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise MeshwrightError.one(
            "X104",
            f"cannot write {target}: {error.strerror or error}",
            help="name a file in a folder that exists and may be written to",
        ) from None


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
