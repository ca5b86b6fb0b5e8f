"""Drives: state of a rank in a file of its own, read and written beside the computation.

One thread reads and one writes, each in order, as the two directions of a link do. Requests go past the page cache
where the file system lets them (``O_DIRECT``), so that they take the drives' time and none of the memory that they are
to save. The file has no name: whatever ends the process frees it.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.errors import MeshwrightError
from meshwright.run.record import recorder

#: Requests past the page cache begin and end at multiples of this, and lie at such addresses: pages hold several of any
#: drive's blocks.
ALIGNED = 4096


class FileSlot(NamedTuple):
    """A place in a file: where it begins, and its bytes, a multiple of :data:`ALIGNED`."""

    start: int
    num_bytes: int


class Buffer:
    """Memory that requests read into and write from: ``values`` uint8 [bytes], at an address that they may have."""

    def __init__(self, num_bytes: int):
        self.memory = mmap.mmap(-1, num_bytes)
        self.values = torch.frombuffer(self.memory, dtype=torch.uint8)

    def view(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` values of a type from byte `start` on."""
        return self.values[start : start + count * dtype.itemsize].view(dtype)


class Drives:
    """The file of one rank, in `folder` ("": the system's for temporary files)."""

    def __init__(self, folder: str = ""):
        self.folder = folder or tempfile.gettempdir()
        try:
            self.file, path = tempfile.mkstemp(prefix="meshwright-", suffix=".state", dir=self.folder)
        except OSError as error:
            raise self._refused(error) from None
        with suppress(OSError, AttributeError):  # a file system without it, or another system: through the page cache
            direct = os.open(path, os.O_RDWR | os.O_DIRECT)
            os.close(self.file)
            self.file = direct
        Path(path).unlink()
        self._reader, self._writer = (ThreadPoolExecutor(1, thread_name_prefix=n) for n in ("read", "write"))
        self._free: dict[int, list[int]] = {}
        self._buffers: dict[int, list[Buffer]] = {}
        self._end = 0
        #: Bytes of slots in use and the most there were; the same of buffers.
        self.held_bytes = self.peak_bytes = self.buffer_bytes = 0

    def close(self) -> None:
        """Finish what is under way, and let the file go."""
        if self.file >= 0:
            self._reader.shutdown()
            self._writer.shutdown()
            os.close(self.file)
            self.file = -1

    def slot(self, num_bytes: int) -> FileSlot:
        """Return a place for so many bytes: one that was released, or new room at the end."""
        size = -(-num_bytes // ALIGNED) * ALIGNED
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        known = self._free.get(size)
        if known:
            return FileSlot(known.pop(), size)
        self._end += size
        return FileSlot(self._end - size, size)

    def release(self, slot: FileSlot) -> None:
        """Nothing reads the slot any more."""
        self.held_bytes -= slot.num_bytes
        self._free.setdefault(slot.num_bytes, []).append(slot.start)

    def buffer(self, num_bytes: int) -> Buffer:
        """Return memory for a request of so many bytes: given back before, or new."""
        size = -(-num_bytes // ALIGNED) * ALIGNED
        known = self._buffers.get(size)
        if known:
            return known.pop()
        self.buffer_bytes += size
        return Buffer(size)

    def give_back(self, buffer: Buffer) -> None:
        """Nothing uses the buffer any more."""
        self._buffers.setdefault(len(buffer.values), []).append(buffer)

    def write(self, slot: FileSlot, buffer: Buffer, **said: Any) -> Future:
        """Begin to write a buffer; what its future gives is nothing."""
        return self._begun(self._writer, self._write, slot, buffer, said)

    def read(self, slot: FileSlot, buffer: Buffer, **said: Any) -> Future:
        """Begin to read into a buffer, behind what is being written to the slot: whoever asks has waited for that."""
        return self._begun(self._reader, self._read, slot, buffer, said)

    def _begun(
        self, pool: ThreadPoolExecutor, do: Callable, slot: FileSlot, buffer: Buffer, said: dict[str, Any]
    ) -> Future:
        token = recorder().start("copy", "nvme", num_bytes=slot.num_bytes, **said)
        future = pool.submit(do, slot, buffer)
        recorder().watch(_Watched(future), token)
        return future

    def _write(self, slot: FileSlot, buffer: Buffer) -> None:
        view, at = memoryview(buffer.memory), 0
        while at < slot.num_bytes:
            try:
                at += os.pwrite(self.file, view[at : slot.num_bytes], slot.start + at)
            except OSError as error:
                raise self._refused(error) from None

    def _read(self, slot: FileSlot, buffer: Buffer) -> None:
        view, at = memoryview(buffer.memory), 0
        while at < slot.num_bytes:
            done = os.preadv(self.file, [view[at : slot.num_bytes]], slot.start + at)
            if not done:
                raise self._refused(OSError(errno.EIO, "the file ends before what was written to it"))
            at += done

    def _refused(self, error: OSError) -> MeshwrightError:
        return MeshwrightError.one(
            "X104",
            f"state cannot be kept on drives in {self.folder}: {error.strerror or error}",
            place="plan.offload",
            help="free room there, or name another folder (--drives DIR)",
        )


class _Watched:
    """A request as the recorder watches a collective: it may say when it is done."""

    def __init__(self, future: Future):
        self.future = future

    def get_future(self) -> _Watched:
        return self

    def then(self, done: Callable[[Any], None]) -> None:
        """Call `done` when the request is over, on whichever thread ends it."""
        self.future.add_done_callback(done)


def on_cores(device: torch.device, folder: str) -> Drives:
    """The file of a rank on a processor core.

    Raises:
        MeshwrightError: P033 on a GPU, X104 where there can be no file.
    """
    if device.type != "cpu":
        raise MeshwrightError.one(
            "P033",
            f"state off a device of type {device.type} is priced and not run",
            place="plan.offload",
            help="run it on processor cores: --device cpu",
        )
    return Drives(folder)
