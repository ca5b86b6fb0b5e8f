"""The memory of a GPU's host: state of a rank in pinned memory, copied there and back beside the computation.

Two streams copy, one each way, as the two directions of a link do. What uses a copy waits for it on the device: the
host goes on issuing kernels meanwhile. On a processor core, whose memory is the host's, copies are made at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from meshwright.run.record import recorder


class HostSlot(NamedTuple):
    """A place in the host's memory, ``values`` uint8 [bytes]."""

    values: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the place."""
        return len(self.values)


class DeviceBuffer(NamedTuple):
    """Memory of the device that is copied from and into: ``values`` uint8 [bytes]."""

    values: torch.Tensor

    def view(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` values of a type from byte `start` on."""
        return self.values[start : start + count * dtype.itemsize].view(dtype)


class Copied:
    """A copy that was begun: :meth:`result` has the device wait for it, :meth:`wait` the host."""

    def __init__(self, event: torch.cuda.Event | None):
        self.event = event

    def done(self) -> bool:
        """Whether the copy is over."""
        return self.event is None or self.event.query()

    def result(self) -> None:
        """Have what the current stream computes from now on come behind the copy."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def wait(self) -> None:
        """The host may read what was copied."""
        if self.event is not None:
            self.event.synchronize()


class HostLink:
    """The way between a device and its host's memory: a stream in each direction."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {way: torch.cuda.Stream(device) for way in ("d2h", "h2d")}

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host for so many values [count], from which and to which the device copies by itself."""
        return torch.empty(count, dtype=dtype, pin_memory=bool(self._streams))

    def copy(self, to: torch.Tensor, values: torch.Tensor, way: str, **said: Any) -> Copied:
        """Begin to copy values, behind what the current stream has been given; `way` is ``d2h`` or ``h2d``."""
        size = to.numel() * to.element_size()
        if not self._streams:
            with recorder().span("copy", way, num_bytes=size, **said):
                to.copy_(values)
            return Copied(None)
        stream = self._streams[way]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            token = recorder().start("copy", way, num_bytes=size, **said)
            to.copy_(values, non_blocking=True)
            recorder().stop(token)
            event = torch.cuda.Event()
            event.record()
        return Copied(event)


class HostMemory:
    """Memory of the host for one rank's state, with the duties of :class:`~meshwright.run.drives.Drives`."""

    def __init__(self, device: torch.device):
        self.device, self.link = device, HostLink(device)
        self._free: dict[int, list[torch.Tensor]] = {}
        self._buffers: dict[int, list[DeviceBuffer]] = {}
        #: Bytes of slots in use and the most there were; the bytes of buffers.
        self.held_bytes = self.peak_bytes = self.buffer_bytes = 0

    def close(self) -> None:
        """Let the memory go."""
        self._free.clear()
        self._buffers.clear()

    def slot(self, num_bytes: int) -> HostSlot:
        """Return a place for so many bytes: one that was released, or new memory."""
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        known = self._free.get(num_bytes)
        return HostSlot(known.pop() if known else self.link.pinned(num_bytes, torch.uint8))

    def release(self, slot: HostSlot) -> None:
        """Nothing reads the slot any more."""
        self.held_bytes -= slot.num_bytes
        self._free.setdefault(slot.num_bytes, []).append(slot.values)

    def buffer(self, num_bytes: int) -> DeviceBuffer:
        """Return memory of the device for so many bytes: given back before, or new."""
        known = self._buffers.get(num_bytes)
        if known:
            return known.pop()
        self.buffer_bytes += num_bytes
        return DeviceBuffer(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))

    def give_back(self, buffer: DeviceBuffer) -> None:
        """Take the buffer back: all that uses it was given to the current stream."""
        self._buffers.setdefault(len(buffer.values), []).append(buffer)

    def write(self, slot: HostSlot, buffer: DeviceBuffer, **said: Any) -> Copied:
        """Begin to copy a buffer to the host."""
        return self.link.copy(slot.values, buffer.values, "d2h", **said)

    def read(self, slot: HostSlot, buffer: DeviceBuffer, **said: Any) -> Copied:
        """Begin to copy into a buffer what was written: whoever asks has waited for that."""
        return self.link.copy(buffer.values, slot.values, "h2d", **said)
