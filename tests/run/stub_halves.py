"""A divided engine without a model: both halves in this process, and a line between them that is driven by hand."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from fuzz.readers import Defect

from meshwright.run.serve.apart import DividedEngine, SecondHalf
from meshwright.run.serve.halves import DecodeEngine, PrefillEngine
from tests.run.stub_engine import counted, empty, engine_of


class HandLine:
    """An end of a line in one process: whoever waits for a message lets the other half have a turn."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes]):
        self.inbox, self.outbox = inbox, outbox
        self.other: SecondHalf | None = None

    def ready(self, wait_s: float | None) -> bool:
        if not self.inbox and wait_s and self.other is not None:
            self.other.turn(0.0)
        return bool(self.inbox)

    def receive(self) -> bytes:
        return self.inbox.popleft()

    def send(self, message: bytes) -> None:
        self.outbox.append(message)


def joined(prefill: PrefillEngine, decode: DecodeEngine) -> tuple[DividedEngine, SecondHalf]:
    """Return a divided engine of two halves, and the second, which is to have its turns."""
    to, back = deque(), deque()
    line = HandLine(back, to)
    line.other = SecondHalf(decode, HandLine(to, back))
    room = min(prefill.facts.room, decode.facts.room)
    return DividedEngine(prefill, line, msgspec.structs.replace(prefill.facts, room=room)), line.other


def halves_of(words: dict[str, Any]) -> tuple[DividedEngine, SecondHalf]:
    """Return the divided engine of an example, which computes nothing: a message is here at the so many-th look."""
    prefill = engine_of(words | {"guesses": 0}, PrefillEngine)
    decode = engine_of(words | {"blocks": words["beyond"]}, DecodeEngine)
    decode.executor.post, decode.executor.late = prefill.executor.post, words["late"]
    return joined(prefill, decode)


def both_counted(engine: DividedEngine, second: SecondHalf) -> None:
    """Check that blocks of both halves are where their deciders count them."""
    counted(engine.prefill)
    counted(second.decode)


def both_empty(engine: DividedEngine, second: SecondHalf) -> None:
    """Check that neither half holds anything once nobody is served and everything that was sent is here.

    Raises:
        Defect: one does.
    """
    for _ in range(100):
        second.turn(0.0)
    engine.step()
    for half in (engine.prefill, second.decode):
        empty(half)
        if half.state.parked or half.state.coming or half.state.offered or half.parked:
            raise Defect("a half keeps a request that nobody waits for")
    executor = second.decode.executor
    if second.coming or second.decode.offers or executor.post or executor.coming or second.decode.pulls:
        raise Defect("something is on its way that nobody waits for")
