"""Wire: messages between the front's process and the engine's, as MessagePack in frames of four bytes of length.

The two processes share one end each of a socket pair that has no name, so that nobody else can speak on it. When either
process dies the other reads the end of the stream at once.
"""

from __future__ import annotations

import select
import socket
import struct

import msgspec

from meshwright.endpoint.seam import EngineFacts, EngineFigures, EngineSpec, Generated, Prompted
from meshwright.errors import Diagnostic

LENGTH = struct.Struct(">I")
#: Bytes read at a time.
CHUNK = 1 << 18


class Start(msgspec.Struct, frozen=True, tag=True):
    """To the engine's process, as its first message: the engine to build."""

    spec: EngineSpec


class Orders(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """To the engine's process: requests that came, and numbers that nobody waits for any more."""

    asked: tuple[Prompted, ...] = ()
    cancelled: tuple[int, ...] = ()


class Built(msgspec.Struct, frozen=True, tag=True):
    """From the engine's process: the engine is built."""

    facts: EngineFacts


class Unbuilt(msgspec.Struct, frozen=True, tag=True):
    """From the engine's process, as its last message: the engine cannot be built, and why."""

    wrong: tuple[Diagnostic, ...]


class Iterated(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """From the engine's process after an iteration: its pieces, and now and then its figures."""

    pieces: list[Generated] = []
    figures: EngineFigures | None = None


ToEngine = Start | Orders
FromEngine = Built | Unbuilt | Iterated
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()
read_answer = _from_engine.decode


def frame(message: ToEngine | FromEngine) -> bytes:
    """Return a message as one frame."""
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


class EngineSide:
    """The engine's end of the socket: what arrived is read between two iterations, without waiting for more."""

    def __init__(self, end: socket.socket):
        self.end, self.pending = end, bytearray()

    def send(self, message: FromEngine) -> None:
        """Send a message, and wait until the system took it."""
        self.end.sendall(frame(message))

    def received(self, *, wait: bool) -> list[ToEngine]:
        """Return the messages that arrived; with `wait` at least one.

        Raises:
            EOFError: the other process is gone.
        """
        found: list[ToEngine] = []
        while True:
            ready, _, _ = select.select([self.end], [], [], None if wait and not found else 0.0)
            if not ready:
                return found
            data = self.end.recv(CHUNK)
            if not data:
                raise EOFError
            self.pending += data
            found += self._complete()

    def _complete(self) -> list[ToEngine]:
        """Take the whole frames out of what is pending."""
        found, at = [], 0
        while len(self.pending) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.pending, at)
            end = at + LENGTH.size + length
            if len(self.pending) < end:
                break
            found.append(_to_engine.decode(bytes(self.pending[at + LENGTH.size : end])))
            at = end
        del self.pending[:at]
        return found
