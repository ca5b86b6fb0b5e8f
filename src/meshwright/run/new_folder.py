"""New folders: what is written appears when it is complete, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.run import safetensors_file


@contextmanager
def new_folder(folder: Path, *, over: bool = False) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `folder` when all is written: one that is new or empty or, where it
    is put `over` another, in that one's place.

    Raises:
        MeshwrightError: H008 when it cannot be written.
    """
    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.part"
    old = temporary.with_suffix(".old")
    try:
        if not over and folder.exists() and any(folder.iterdir()):
            raise unwritten(folder, os.strerror(errno.ENOTEMPTY))
        temporary.mkdir(parents=True)
        yield temporary
        safetensors_file.sync_folder(temporary)
        if over and folder.exists():
            folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    except OSError as error:
        raise unwritten(folder, error.strerror or str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def refuse(folder: Path) -> None:
    """Refuse a folder to write into, before anything is read of a checkpoint that may be large.

    Raises:
        MeshwrightError: H008 when the folder has something in it, or cannot be made.
    """
    try:
        full = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise unwritten(folder, error.strerror or str(error)) from None
    if full:
        raise unwritten(folder, os.strerror(errno.ENOTEMPTY))
    there = next(above for above in folder.absolute().parents if above.exists())
    if not there.is_dir():
        raise unwritten(folder, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        raise unwritten(folder, os.strerror(errno.EACCES))


def unwritten(folder: Path, why: str) -> MeshwrightError:
    return MeshwrightError.one("H008", f"cannot write weights: {why}", place=str(folder), help="name a new folder")
