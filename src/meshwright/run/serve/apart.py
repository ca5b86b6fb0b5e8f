"""An engine that is divided: prompts are computed in one pool of processes, answers generated in another.

The first rank of each decides for its pool, at its own pace, and the two talk over a line. Whoever has a first token is
offered; the other half asks for the blocks when it has room, and says when they are there, whereupon they are free
where they came from. A request that is cancelled leaves both halves; blocks of it that are on their way are received
and forgotten.
"""

from __future__ import annotations

import contextlib
from collections import deque
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from meshwright.endpoint.seam import EngineFacts, EngineFigures, Generated, Prompted
from meshwright.run.serve.halves import DecodeEngine, HandedOver, PrefillEngine
from meshwright.run.serve.ranks import RankProcesses

#: Seconds for which the first half waits for the second where it has nothing to compute itself; so long may a new
#: request wait.
WAIT_S = 0.002
#: Seconds between two looks at whether blocks are here, where nothing is computed meanwhile.
LOOK_S = 0.0005
#: How it is said that an engine lost its second half, which ends it.
GONE = "the process that generates answers ended"


class HandingOver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the second half: the prompts of these are computed."""

    requests: tuple[HandedOver, ...]


class Sending(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the second half: so many blocks of a request are being sent."""

    number: int
    blocks: int


class Cancelled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the second half: nobody waits for this answer."""

    number: int


class Ends(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the second half: the engine closes."""


class HalfProgress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the first half: requests whose blocks are asked for, those whose blocks are here, those that left as they were
    cancelled, pieces of answers, and the figures of the engine."""

    asked: tuple[int, ...]
    here: tuple[int, ...]
    left: tuple[int, ...]
    pieces: tuple[Generated, ...]
    figures: EngineFigures


class HalvesLine(Protocol):
    """One end of the line between the halves."""

    def ready(self, wait_s: float | None) -> bool:
        """Return whether there is a message, after waiting so long for one (None: until there is)."""

    def receive(self) -> bytes:
        """Return the next message."""

    def send(self, message: bytes) -> None:
        """Send a message."""


class PipeLine:
    """An end of a line between two processes."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def ready(self, wait_s: float | None) -> bool:
        """Return whether there is a message, or the other end is gone."""
        return self.connection.poll(wait_s)

    def receive(self) -> bytes:
        """Return the next message; raises EOFError where the other end is gone."""
        return self.connection.recv_bytes()

    def send(self, message: bytes) -> None:
        """Send a message."""
        self.connection.send_bytes(message)


_orders = msgspec.msgpack.Decoder(HandingOver | Sending | Cancelled | Ends)
_progress = msgspec.msgpack.Decoder(HalfProgress)


class DividedEngine:
    """A serving engine (:class:`~meshwright.endpoint.seam.ServingEngine`) of two halves: the first is this process's,
    the second is at the other end of a line. ``going`` are the requests whose answers go on there, ``leaving`` those
    that it is yet to cancel."""

    def __init__(
        self, prefill: PrefillEngine, line: HalvesLine, facts: EngineFacts, processes: RankProcesses | None = None
    ):
        self.prefill, self.line, self.facts, self.processes = prefill, line, facts, processes
        prefill.facts = facts
        self.going: set[int] = set()
        self.leaving: set[int] = set()
        self.beyond = EngineFigures()

    def submit(self, asked: Prompted) -> None:
        """Let a request come; what is wrong with it is told in a piece."""
        if asked.number in self.going:
            text = f"request {asked.number} is being served already"
            self.prefill.pieces.append(Generated(number=asked.number, finish="error", error=text))
        else:
            self.prefill.submit(asked)

    def cancel(self, number: int) -> None:
        """Let a request leave both halves; nothing more is told of it."""
        self.prefill.cancel(number)
        if number in self.going:
            self.going.remove(number)
            self.leaving.add(number)
            self._send(Cancelled(number))

    def step(self) -> list[Generated]:
        """Compute an iteration of prompts, where there are some; returns what is new of all answers."""
        pieces = self._heard(0.0)
        pieces += self.prefill.step()
        handed = self.prefill.handed()
        if handed:
            self.going.update(one.asked.number for one in handed)
            self._send(HandingOver(tuple(handed)))
        if not pieces and (self.going or self.leaving) and not self.prefill.computes:
            pieces += self._heard(WAIT_S)
        return pieces

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return self.prefill.idle and not self.going and not self.leaving

    def figures(self) -> EngineFigures:
        """Return the figures of both halves together."""
        mine, theirs = self.prefill.figures(), self.beyond
        names = EngineFigures.__struct_fields__
        return EngineFigures(**{name: getattr(mine, name) + getattr(theirs, name) for name in names})

    def close(self) -> None:
        """Let all requests go, and have both halves end."""
        with contextlib.suppress(OSError):  # it may be gone
            self.line.send(msgspec.msgpack.encode(Ends()))
        self.prefill.close()
        if self.processes is not None:
            self.processes.close()

    def _send(self, message: HandingOver | Sending | Cancelled | Ends) -> None:
        try:
            self.line.send(msgspec.msgpack.encode(message))
        except OSError as error:
            raise RuntimeError(GONE) from error

    def _received(self) -> HalfProgress:
        try:
            return _progress.decode(self.line.receive())
        except (EOFError, OSError) as error:
            raise RuntimeError(GONE) from error

    def _heard(self, wait_s: float) -> list[Generated]:
        """Do what the second half asks for; returns its pieces of answers that somebody waits for."""
        pieces = []
        while self.line.ready(wait_s):
            wait_s, said = 0.0, self._received()
            for number in said.here:
                self.prefill.release(number)
            self.leaving.difference_update(said.left)
            for number in said.asked:
                if blocks := self.prefill.send(number):
                    self._send(Sending(number, blocks))
            for piece in said.pieces:
                if piece.number in self.going:
                    pieces.append(piece)
                    if piece.finish:
                        self.going.remove(piece.number)
            self.beyond = said.figures
        return pieces


class SecondHalf:
    """The second half of an engine, obeying the first over a line. ``coming`` are the requests whose blocks are being
    received."""

    def __init__(self, decode: DecodeEngine, line: HalvesLine):
        self.decode, self.line = decode, line
        self.coming: deque[int] = deque()
        self.left: list[int] = []
        self.ended = False

    def serve(self) -> None:
        """Go on until the first half says to end.

        Raises:
            EOFError: the first half is gone.
        """
        while not self.ended:
            self.turn(0.0 if self.decode.computes else LOOK_S if self.coming else None)
        self.decode.close()

    def turn(self, wait_s: float | None) -> None:
        """Do what the first half says, for which to wait so long, then compute an iteration where there is something to
        compute."""
        while self.line.ready(wait_s):
            wait_s = 0.0
            self._obey(_orders.decode(self.line.receive()))
        here = self._joined()
        pieces = self.decode.step() if self.decode.computes else []
        asked = self.decode.pulled()
        if here or pieces or asked or self.left:
            left, self.left = tuple(self.left), []
            said = HalfProgress(tuple(asked), tuple(here), left, tuple(pieces), self.decode.figures())
            self.line.send(msgspec.msgpack.encode(said))

    def _obey(self, said: HandingOver | Sending | Cancelled | Ends) -> None:
        match said:
            case HandingOver(requests=requests):
                for one in requests:
                    self.decode.offer(one)
            case Sending(number=number, blocks=blocks):
                self.decode.executor.expect(number, blocks)
                self.coming.append(number)
            case Cancelled(number=number):
                self.decode.cancel(number)
                self.left.append(number)
            case Ends():
                self.ended = True

    def _joined(self) -> list[int]:
        """Let the requests go on whose blocks came; returns them."""
        found = []
        while self.coming and self.decode.executor.here(self.coming[0]):
            number = self.coming.popleft()
            room = self.decode.room(number)
            self.decode.executor.place(number, room)
            if room:
                self.decode.join(number)
                found.append(number)
        return found
