"""Front: requests on their way through the engine, each with where its tokens go, what it waited for, and its retries.

It lives in one event loop and is told of everything by calls: ``ask`` by the HTTP handlers, ``arrived`` and ``lost`` by
the engine's process. An answer that an engine's death broke off goes on at the next engine from the tokens that are
there; its random numbers follow from seed and place, so that it is the answer it would have been.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec

from meshwright.endpoint.figures import FrontFigures
from meshwright.endpoint.inquiry import Inquiry
from meshwright.endpoint.refusal import Refused
from meshwright.endpoint.seam import EngineFacts, EngineFigures, Generated, Prompted

#: Engines that may die under a request before it is taken for the cause.
RETRIES = 2
#: Finished requests by which the rate is judged that Retry-After follows from.
RECENT = 64
MOST_RETRY_S = 60


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a server: requests that run and wait at a time, seconds of a request from arrival to end (0: none),
    seconds that a reader may take no byte of its answer, bytes of a body, and seconds for a body to come."""

    running: int = 256
    queue: int = 1024
    timeout_s: float = 600.0
    slow_s: float = 30.0
    body_bytes: int = 8 << 20
    body_s: float = 30.0


class Ordering(Protocol):
    """How orders reach an engine."""

    def order(self, asked: tuple[Prompted, ...] = (), cancelled: tuple[int, ...] = ()) -> None: ...


class Ticket:
    """The answers to one inquiry as they come: ``next`` returns the pieces since the last call, each with the index of
    its choice."""

    def __init__(self, front: Front, inquiry: Inquiry):
        self.inquiry, self._front = inquiry, front
        self.numbers: set[int] = set()
        self._pieces: deque[tuple[int, Generated]] = deque()
        self._news = asyncio.Event()
        self._refusal: Refused | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def next(self) -> list[tuple[int, Generated]]:
        """Wait for the next pieces.

        Raises:
            Refused: the engine failed, or time is up.
        """
        while not self._pieces:
            if self._refusal is not None:
                raise self._refusal
            self._news.clear()
            await self._news.wait()
        found = list(self._pieces)
        self._pieces.clear()
        return found

    def put(self, index: int, piece: Generated) -> None:
        """Take a piece of the choice `index`."""
        self._pieces.append((index, piece))
        self._news.set()

    def fail(self, refusal: Refused) -> None:
        """End with an error."""
        self._refusal = self._refusal or refusal
        self.close()
        self._news.set()

    def stop(self, number: int) -> None:
        """The answer `number` needs no more tokens: a stop string ended it."""
        self._front.stop(number)

    def close(self) -> None:
        """Nobody waits any more: what still runs is cancelled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._front.cancel(self.numbers)

    def expires_in(self, seconds: float) -> None:
        """End with an error after so many seconds."""
        message = f"the answer takes longer than the {seconds:g} s that this server gives one"
        refusal = Refused(504, message, code="timeout")
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, refusal)


class _Flight:
    """One request of the engine under way."""

    __slots__ = ("asked", "began_s", "deaths", "first_s", "index", "last_s", "scored", "ticket", "tokens")

    def __init__(self, asked: Prompted, ticket: Ticket, index: int, now_s: float):
        self.asked, self.ticket, self.index = asked, ticket, index
        self.began_s = self.last_s = now_s
        self.first_s = 0.0
        self.tokens: list[int] = []
        self.deaths = 0
        self.scored = False

    def again(self) -> Prompted:
        """Return what is still to be done, for another engine."""
        done, sampling = len(self.tokens), self.asked.sampling
        if self.scored:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.asked,
            prompt=self.asked.prompt + tuple(self.tokens),
            limit=self.asked.limit - done,
            answered=self.asked.answered + done,
            sampling=sampling,
        )


class Front:
    """All requests under way, and whether more are taken."""

    def __init__(self, engine: Ordering, limits: Limits, figures: FrontFigures):
        self.engine, self.limits, self.figures = engine, limits, figures
        self.facts: EngineFacts | None = None
        self.ready = self.draining = False
        self.dead = ""
        self._flights: dict[int, _Flight] = {}
        self._number = 0
        self._ended: deque[float] = deque(maxlen=RECENT)
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def under_way(self) -> int:
        """Requests of the engine that are not finished."""
        return len(self._flights)

    def check_open(self) -> None:
        """Raise the refusal of a server that takes no request now.

        Raises:
            Refused: it drains, or its engine cannot be had any more.
        """
        if self.draining:
            raise Refused(503, "the server finishes what it has and takes no more", code="draining", retry_s=5)
        if self.dead:
            raise Refused(503, f"the engine is gone: {self.dead}", code="engine_dead")

    def ask(self, inquiry: Inquiry) -> Ticket:
        """Send an inquiry to the engine.

        Raises:
            Refused: 429 when too many wait, 503 when no request is taken.
        """
        self.check_open()
        wanted = inquiry.asked()
        most = self.limits.running + self.limits.queue
        if len(self._flights) + len(wanted) > most:
            message = f"{len(self._flights):,} requests run or wait here, and {most:,} may"
            raise Refused(429, message, code="overloaded", retry_s=self._retry_s(len(wanted)))
        ticket, now_s, asked = Ticket(self, inquiry), time.monotonic(), []
        for index, one in enumerate(wanted):
            self._number += 1
            one = msgspec.structs.replace(one, number=self._number)
            self._flights[self._number] = _Flight(one, ticket, index, now_s)
            ticket.numbers.add(self._number)
            asked.append(one)
        self._empty.clear()
        if self.limits.timeout_s:
            ticket.expires_in(self.limits.timeout_s)
        if self.ready:
            self.engine.order(tuple(asked))
        return ticket

    def cancel(self, numbers: set[int]) -> None:
        """Nobody waits for these any more."""
        gone = tuple(number for number in numbers if self._flights.pop(number, None) is not None)
        numbers -= set(gone)
        if gone:
            self.figures.finished.labels(self.figures.model, "abort").inc(len(gone))
            if self.ready:
                self.engine.order((), gone)
            self._settle()

    def stop(self, number: int) -> None:
        """An answer is complete, and the engine need not go on with it."""
        flight = self._flights.get(number)
        if flight is not None:
            self._finish(number, flight, "stop", time.monotonic())
            if self.ready:
                self.engine.order((), (number,))

    def arrived(self, pieces: list[Generated], figures: EngineFigures | None) -> None:
        """The engine's process reports an iteration."""
        if figures is not None:
            self.figures.reported(figures)
        now_s = time.monotonic()
        for piece in pieces:
            flight = self._flights.get(piece.number)
            if flight is None:
                continue  # cancelled while the piece was on its way
            self._time(flight, piece, now_s)
            flight.tokens += piece.tokens
            flight.scored |= bool(piece.prompt_scores)
            if piece.finish in ("error", "cancelled"):
                self._fail(piece.number, flight, piece.error or "the engine gave the request up", "engine_error")
                continue
            flight.ticket.put(flight.index, piece)
            if piece.finish:
                self._finish(piece.number, flight, piece.finish, now_s)

    def built(self, facts: EngineFacts) -> None:
        """An engine is there: what waited for it, or was broken off, goes to it."""
        self.facts, self.ready = facts, True
        waiting = tuple(flight.again() for flight in self._flights.values())
        if waiting:
            self.engine.order(waiting)

    def lost(self, numbers: Iterable[int] | None = None, *, goes_on: bool = False) -> None:
        """The engine's process died, and another is on its way. Of several, one that had these `numbers`: where the
        others are there (`goes_on`), those go on at them at once."""
        self.ready = goes_on
        if numbers is None:
            self.figures.lost()
        else:
            self.figures.restarts.inc()
        again = []
        for number in list(self._flights if numbers is None else numbers):
            flight = self._flights.get(number)
            if flight is None:
                continue
            flight.deaths += 1
            if flight.asked.limit <= len(flight.tokens):  # all of it is here, but for the word that it is
                flight.ticket.put(flight.index, Generated(number=number, finish="length"))
                self._finish(number, flight, "length", time.monotonic())
            elif flight.deaths > RETRIES:
                self._fail(number, flight, f"{flight.deaths} engine processes died under it", "engine_died")
            else:
                self.figures.retried.inc()
                again.append(flight.again())
        if goes_on and again:
            self.engine.order(tuple(again))

    def die(self, why: str) -> None:
        """No engine can be had any more."""
        self.ready, self.dead = False, why
        for number, flight in list(self._flights.items()):
            self._fail(number, flight, f"the engine is gone: {why}", "engine_dead")

    async def drained(self) -> None:
        """Take no more requests, and wait until those under way are finished."""
        self.draining = True
        await self._empty.wait()

    def _time(self, flight: _Flight, piece: Generated, now_s: float) -> None:
        count = len(piece.tokens)
        if not count:
            return
        if flight.first_s:
            for _ in range(count):  # tokens that come together share the time since the last ones
                self.figures.itl_s.observe((now_s - flight.last_s) / count)
        else:
            flight.first_s = now_s
            self.figures.ttft_s.observe(now_s - flight.began_s)
        flight.last_s = now_s
        self.figures.generated.inc(count)

    def _finish(self, number: int, flight: _Flight, reason: str, now_s: float) -> None:
        del self._flights[number]
        flight.ticket.numbers.discard(number)
        figures, made = self.figures, len(flight.tokens)
        figures.finished.labels(figures.model, reason).inc()
        figures.e2e_s.observe(now_s - flight.began_s)
        figures.prompt_tokens.inc(len(flight.asked.prompt))
        figures.prompt_lengths.observe(len(flight.asked.prompt))
        figures.answer_lengths.observe(made)
        if made > 1:
            figures.tpot_s.observe((flight.last_s - flight.first_s) / (made - 1))
        self._ended.append(now_s)
        self._settle()

    def _fail(self, number: int, flight: _Flight, why: str, code: str) -> None:
        """End a request, and with it all answers to its inquiry, with an error."""
        self._flights.pop(number, None)
        flight.ticket.numbers.discard(number)
        self.figures.finished.labels(self.figures.model, "error").inc()
        flight.ticket.fail(Refused(500, f"the answer broke off: {why}", code=code))
        self._settle()

    def _settle(self) -> None:
        if not self._flights:
            self._empty.set()

    def _retry_s(self, wanted: int) -> int:
        """Seconds until so many requests will be finished, at the rate of the last ones."""
        if len(self._ended) < 2 or self._ended[-1] <= self._ended[0]:
            return 1
        rate = (len(self._ended) - 1) / (self._ended[-1] - self._ended[0])
        return min(MOST_RETRY_S, max(1, round(wanted / rate)))
