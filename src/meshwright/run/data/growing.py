"""A tokenised corpus while it is written: tokens go to the disk as they come, and what is there survives the process.

Every so many bytes what was written is flushed and its sizes are noted in one rename, so that whoever builds the same
corpus again (its key is its content) goes on from the note and reads, without tokenising, past the documents before it.
One process writes a corpus at a time; others that want it wait for it, and find it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.atomic import write_bytes

#: Begins the name of the folder of a corpus that is being written, and of others that appear whole.
GROWING, BUILDING = ".growing-", ".building-"
LOCK, NOTE = "lock", "note.json"
#: Bytes of tokens after which what was written is noted.
EVERY = 1 << 26
#: Seconds between lines that say how far it is.
SAYS_S = 5.0
#: Seconds after which what nobody has gone on with is removed.
FORGOTTEN_S = 7 * 86400.0


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of what of a corpus is on the disk: documents that were ``read``, those of them that are
    ``documents`` (not empty), ``tokens``, and the largest id."""

    read: int = 0
    documents: int = 0
    tokens: int = 0
    largest: int = 0


class Growing:
    """The files of a corpus in a folder, appended to: ``tokens``, ``starts`` (int64) and, of conversations, ``learnt``
    (a byte a token). ``note`` says how far it is."""

    def __init__(
        self, folder: Path, names: tuple[str, str, str], width: int, *, chats: bool, say: Callable[[str], None]
    ):
        self.folder, self.kind, self.say = folder, np.dtype(f"<u{width}"), say
        self.note = _noted(folder)
        tokens, starts, learnt = names
        sizes = {tokens: self.note.tokens * width, starts: self.note.documents * 8}
        sizes |= {learnt: self.note.tokens} if chats else {}
        if any(_size(folder / name) < size for name, size in sizes.items()):
            self.note, sizes = Note(), dict.fromkeys(sizes, 0)  # the note outlived its files
        self.files = {name: _opened(folder / name, size) for name, size in sizes.items()}
        self.tokens, self.starts = self.files[tokens], self.files[starts]
        self.learnt = self.files.get(learnt)
        self._noted_tokens, self._said = self.note.tokens, time.monotonic()
        if self.note.read:
            say(f"tokenising goes on behind {_far(self.note)}")

    def add(self, runs: Iterator[NDArray[np.generic]], end: int, learnt: NDArray[np.bool_] | None = None) -> None:
        """Append a document: consecutive `runs` of its ids, and its `end`. One without ids is none; of conversations
        each is one, whose `learnt` tokens are marked."""
        count, largest = 0, self.note.largest
        for ids in runs:
            if len(ids):
                self.tokens.write(ids.astype(self.kind).tobytes())
                count, largest = count + len(ids), max(largest, int(ids.max()))
        before, there = self.note, count > 0 or learnt is not None
        if there:
            self.tokens.write(np.array([end]).astype(self.kind).tobytes())
            self.starts.write(np.array([before.tokens], "<i8").tobytes())
            count, largest = count + 1, max(largest, end)
        if learnt is not None:
            self.learnt.write(np.append(learnt, False).astype(np.uint8).tobytes())
        total = before.tokens + count
        self.note = Note(read=before.read + 1, documents=before.documents + there, tokens=total, largest=largest)
        if (total - self._noted_tokens) * self.kind.itemsize >= EVERY:
            self.keep()
        if time.monotonic() - self._said >= SAYS_S:
            self._said = time.monotonic()
            self.say(f"tokenised {_far(self.note)}")

    def keep(self) -> None:
        """Let what was written survive the process."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        write_bytes(self.folder / NOTE, msgspec.json.encode(self.note))
        self._noted_tokens = self.note.tokens

    def close(self) -> None:
        """Write what is left; nothing is appended any more."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


@contextmanager
def alone(folder: Path, there: Callable[[], bool], say: Callable[[str], None]) -> Iterator[bool]:
    """Hold a folder, made where it is not, that one process at a time may write in; wait for another that does. False
    where what it is for is `there` by then."""
    while not there():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process tokenises this text: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _same(folder / LOCK, lock):  # it was removed, or became the corpus, meanwhile
                continue
            if not there():
                yield True
                return
            shutil.rmtree(folder, ignore_errors=True)
    yield False


def sweep(cache: Path) -> None:
    """Remove what processes that ended left half written a week ago, and nobody has gone on with."""
    for folder in (f for name in (GROWING, BUILDING) for f in cache.glob(f"{name}*")):
        try:
            newest = max(f.stat().st_mtime for f in (folder, *folder.iterdir()))
            if time.time() - newest > FORGOTTEN_S and not _held(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another sweeps, or writes
            continue


def _held(file: Path) -> bool:
    if not file.exists():
        return False
    with file.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _same(path: Path, opened: BinaryIO) -> bool:
    """Whether a path is still the file that was opened by it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(opened.fileno()))
    except OSError:
        return False


def _noted(folder: Path) -> Note:
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=Note)
    except (OSError, msgspec.MsgspecError):
        return Note()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _opened(file: Path, size: int) -> BinaryIO:
    """A file to append to, without what was written behind its last note."""
    opened = file.open("ab")
    opened.truncate(size)
    return opened


def _far(note: Note) -> str:
    return f"{note.tokens:,} tokens of {note.documents:,} documents"
