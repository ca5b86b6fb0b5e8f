"""A deterministic engine without a model: tokens follow from prompt, seed and place alone, KV blocks are counted.

It keeps the protocol of :mod:`meshwright.endpoint.seam`, so that what is checked of the front is the front. As a
process (``python -m fuzz.fake_engine DESCRIPTOR``) it is what a supervisor starts in place of the real one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from zlib import crc32

from meshwright.endpoint.driving import work
from meshwright.endpoint.front import Front
from meshwright.endpoint.seam import EngineFacts, EngineFigures, EngineSpec, Generated, Prompted, TokenScore
from meshwright.errors import MeshwrightError

VOCABULARY, END, BLOCK = 266, 1, 4
#: A prompt that begins with these ids ends the engine's process; with these, the engine hangs; with these, it answers
#: with what is no token.
DEADLY, HANGING, MUMBLED = (0, 255, 255, 255), (0, 254, 254, 254), (0, 253, 253, 253)


def token(prompt: tuple[int, ...], place: int, seed: int) -> int:
    """The token at a place of the answer to a prompt: seldom the end, mostly bytes of ASCII."""
    drawn = crc32(repr((prompt, place, seed)).encode())
    return END if drawn % 97 == 0 else 2 + drawn % (VOCABULARY - 2)


class FakeEngine:
    """At most `batch` requests run, each with the blocks of its whole length, and `step_s` passes in an iteration."""

    def __init__(self, *, blocks: int = 256, batch: int = 16, context: int = 512, step_s: float = 0.0):
        self.facts = EngineFacts(
            context=context,
            vocabulary=VOCABULARY,
            room=blocks * BLOCK,
            block=BLOCK,
            end_ids=(END,),
            adapters=("tuned",),
        )
        self._batch, self._step_s, self._blocks = batch, step_s, blocks
        self._waiting: deque[Prompted] = deque()
        self._running: dict[int, tuple[Prompted, int]] = {}
        self._free = blocks
        self._iterations = self._tokens = 0
        self.seen: list[Prompted] = []
        self.answer: tuple[int, ...] = ()  # of every prompt, where it is said

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def submit(self, asked: Prompted) -> None:
        self.seen.append(asked)
        del self.seen[:-64]
        if asked.prompt[:4] == DEADLY:
            os._exit(9)
        if asked.prompt[:4] == HANGING:
            time.sleep(3600)
        self._waiting.append(asked)

    def cancel(self, number: int) -> None:
        self._waiting = deque(one for one in self._waiting if one.number != number)
        if number in self._running:
            self._release(number)

    def step(self) -> list[Generated]:
        if self._step_s and not self.idle:
            time.sleep(self._step_s)
        self._admit()
        self._iterations += bool(self._running)
        if any(asked.prompt[:4] == MUMBLED for asked, _ in self._running.values()):
            return [Generated(number=number, tokens=("a word",)) for number in self._running]
        return [self._one(number) for number in list(self._running)]

    def figures(self) -> EngineFigures:
        return EngineFigures(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_used=self._blocks - self._free,
            blocks=self._blocks,
            iterations=self._iterations,
            tokens=self._tokens,
        )

    def close(self) -> None:
        self._running.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._batch and _need(self._waiting[0]) <= self._free:
            asked = self._waiting.popleft()
            self._free -= _need(asked)
            self._running[asked.number] = (asked, 0)

    def _release(self, number: int) -> None:
        self._free += _need(self._running.pop(number)[0])

    def _one(self, number: int) -> Generated:
        asked, done = self._running[number]
        place, sampling = asked.answered + done, asked.sampling
        prompt = asked.prompt[: len(asked.prompt) - asked.answered]
        new = token(prompt, place, sampling.seed if sampling.temperature else 0)
        new = self.answer[place] if place < len(self.answer) else new
        ends = (*sampling.stop_ids, *(() if sampling.ignore_eos else (END,)))
        if new in ends and place < sampling.min_tokens:
            new = 70
        finish = "stop" if new in ends and place >= sampling.min_tokens else ""
        finish = finish or ("length" if done + 1 == asked.limit else "")
        if finish:
            self._release(number)
        else:
            self._running[number] = (asked, done + 1)
        self._tokens += 1
        scores = () if sampling.logprobs is None else (_score(new, sampling.logprobs),)
        first = {}
        if not done and sampling.prompt_logprobs is not None:
            first = {"prompt_scores": (None, *(_score(id, sampling.prompt_logprobs) for id in asked.prompt[1:]))}
        return Generated(number=number, tokens=(new,), scores=scores, finish=finish, **first)


def _need(asked: Prompted) -> int:
    return -(-(len(asked.prompt) + asked.limit) // BLOCK)


def _score(id: int, others: int) -> TokenScore:
    return TokenScore(-0.5, tuple(((id + i) % VOCABULARY, -0.5 - i) for i in range(others)))


class Inside:
    """A fake engine in this very process and event loop, which computes as soon as there is work."""

    def __init__(self, engine: FakeEngine):
        self.engine, self.closed = engine, False
        self._front: Front | None = None
        self._loop = None

    async def open(self, front: Front) -> None:
        import asyncio

        self._front, self._loop = front, asyncio.get_running_loop()
        self._due = False
        front.built(self.engine.facts)

    async def close(self, grace_s: float = 0.0) -> None:
        self.engine.close()
        self.closed = True

    def order(self, asked: tuple[Prompted, ...] = (), cancelled: tuple[int, ...] = ()) -> None:
        for number in cancelled:
            self.engine.cancel(number)
        for one in asked:
            self.engine.submit(one)
        if not self._due:
            self._due = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._front.arrived(self.engine.step(), self.engine.figures())
        self._due = not self.engine.idle
        if self._due:
            self._loop.call_soon(self._step)


def build(spec: EngineSpec) -> FakeEngine:
    """Build the engine of a process: ``spec.serve`` says its seconds an iteration; that of Orca cannot be built."""
    if spec.serve == "policy=orca":
        raise MeshwrightError.one("L005", "this engine cannot be", place="--serve policy=orca", help="say another")
    return FakeEngine(step_s=float(spec.serve or 0))


if __name__ == "__main__":
    sys.exit(work(int(sys.argv[1]), build))
