"""The replay of a workload against a server: every request at its time, an open or a closed loop, and what was seen.

An open loop sends at the times that were drawn, whatever the server does; a closed one when an answer is over; a turn
of a conversation so long after the answer before it. Each request is a task that sleeps until its answer is over; what
its stream brings is taken apart where it arrives. How late requests were sent, and how busy this process was, is part
of what was measured: a client that is late or busy measures itself.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable
from itertools import islice, pairwise

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.requests import Requests
from meshwright.traffic.events import StreamedAnswer
from meshwright.traffic.handshake import ServerDialect
from meshwright.traffic.http import HttpClient, HttpFault
from meshwright.traffic.prompts import PromptMaker
from meshwright.traffic.record import WITHDRAWN, RequestRecord, Traffic

#: Prompts that are made ahead of the time at which they are sent.
AHEAD = 64
#: Requests one after the other to which no server answered, after which none does.
GONE = 20


class ReplayState(msgspec.Struct, kw_only=True):
    """How a replay stands: requests in all, over, open now and with errors, tokens of answers, seconds that it lasts on
    the workload's clock, and when the last request that has a time is due there."""

    total: int
    done: int = 0
    open: int = 0
    errors: int = 0
    tokens: int = 0
    now_s: float = 0.0
    begun_s: float = 0.0
    last_due_s: float = 0.0


class ReplayEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a replay: seconds that it took, the share of a core that this process used in them, and whether the
    server was ``gone``."""

    seconds: float
    busy: float
    gone: bool


class WorkloadReplay:
    """One run of a workload: ``add`` is called with the record of every request that is over, ``watch`` now and then
    with how it stands. What ``before`` holds of an earlier run is not asked again, unless it has an error."""

    def __init__(
        self,
        requests: Requests,
        prompts: PromptMaker,
        dialect: ServerDialect,
        client: HttpClient,
        *,
        add: Callable[[RequestRecord], None],
        watch: Callable[[ReplayState], None] = lambda state: None,
        before: Traffic | None = None,
        timeout_s: float = 600.0,
    ):
        self.requests, self.prompts, self.dialect, self.client = requests, prompts, dialect, client
        self.add, self.watch, self.timeout_s = add, watch, timeout_s
        done = {n: one for n, one in (before.records if before else {}).items() if not one.error}
        self.part = before.parts if before is not None and before.records else 0
        count = len(requests)
        self.ends: dict[int, float] = {n: one.end_s for n, one in done.items()}
        self.state = ReplayState(total=count, done=len(done))
        self._arrival = requests.arrival_s.tolist()
        self._after = requests.after.tolist() if len(requests.after) else [-1] * count
        self._program = requests.program.tolist() if len(requests.needed) else []
        self._needed = requests.needed.tolist()
        self._left = [n for n in range(count) if n not in done]
        self._followers: dict[int, list[int]] = {}
        self._due: list[tuple[float, int]] = []
        self._waiting: deque[int] = deque()
        self._bodies: dict[int, bytes] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, int] = {}
        self._wake = asyncio.Event()
        self._failed = 0
        self._fault: MeshwrightError | None = None
        for number in done:
            self._count_answer(number)
        self._line_up(before)

    def _line_up(self, before: Traffic | None) -> None:
        """Say which requests have a time, and when on the workload's clock this run begins."""
        closed = self.requests.concurrency
        last = max((one.end_s for one in before.records.values()), default=0.0) if before is not None else 0.0
        for number in self._left:
            earlier = self._after[number]
            if closed:
                self._waiting.append(number)
            elif earlier >= 0 and earlier not in self.ends:
                self._followers.setdefault(earlier, []).append(number)
            else:
                since = self.ends[earlier] if earlier >= 0 else 0.0
                heapq.heappush(self._due, (since + self._arrival[number], number))
        begin = min((due for due, _ in self._due), default=last) if before is not None and before.records else 0.0
        self.state.begun_s = last if closed and before is not None else begin
        for _ in range(min(closed, len(self._waiting))):  # the first of a loop come at their times
            number = self._waiting.popleft()
            heapq.heappush(self._due, (max(self._arrival[number], self.state.begun_s), number))
        self.state.last_due_s = max((due for due, _ in self._due), default=0.0)

    @property
    def clock_s(self) -> float:
        """The time on the workload's clock, once the run has begun."""
        return asyncio.get_running_loop().time() - self._zero

    async def run(self) -> ReplayEnd:
        """Send everything that is left; returns when the last answer is over, or the server is gone. A run that is
        cancelled hangs up and writes nothing of what is open.

        Raises:
            MeshwrightError: an answer cannot be kept, as what ``add`` raised says.
        """
        loop = asyncio.get_running_loop()
        self._zero = loop.time() - self.state.begun_s
        cpu, wall = time.process_time(), loop.time()
        try:
            while (self._due or self._tasks) and self._failed < GONE and self._fault is None:
                self._wake.clear()
                self._make_ahead(loop)
                now = loop.time() - self._zero
                while self._due and self._due[0][0] <= now + 1e-6:  # below what a clock tells apart
                    due, number = heapq.heappop(self._due)
                    self._begin(number, due, loop)
                self.state.now_s = now
                self.watch(self.state)
                await self._sleep(loop)
            if self._fault is not None:
                raise self._fault
        finally:
            for task in list(self._tasks.values()):
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self.client.close()
            self.state.now_s = loop.time() - self._zero
        took = max(loop.time() - wall, 1e-9)
        return ReplayEnd(seconds=took, busy=(time.process_time() - cpu) / took, gone=self._failed >= GONE)

    async def _sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the next request is due or one is over, and not longer than somebody wants to hear of it."""
        until = min(self._due[0][0] + self._zero if self._due else loop.time() + 0.25, loop.time() + 0.25)
        timer = loop.call_at(until, self._wake.set)
        await self._wake.wait()
        timer.cancel()

    def _make_ahead(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make bodies of requests that are next while there is time."""
        coming = [number for _, number in self._due[:AHEAD]]  # the first of a heap are about the next
        for number in (*coming, *islice(self._waiting, AHEAD // 4)):
            if len(self._bodies) >= AHEAD:
                return
            if number not in self._bodies:
                self._bodies[number] = self._body(number)
                if self._due and self._due[0][0] + self._zero - loop.time() < 0.005:
                    return

    def _body(self, number: int) -> bytes:
        prompt = self.prompts.prompt(self.requests, number)
        return self.dialect.body(prompt, int(self.requests.output[number]))

    def _begin(self, number: int, due_s: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_needless(number):
            now = loop.time() - self._zero
            said = {"prompt": int(self.requests.prompt[number]), "asked": int(self.requests.output[number])}
            self.add(RequestRecord(number=number, due_s=due_s, sent_s=now, finish=WITHDRAWN, part=self.part, **said))
            self.state.done += 1
            return
        self._tasks[number] = task = loop.create_task(self._one(number, due_s))
        task.add_done_callback(lambda _: self._gone(number))
        self.state.open += 1

    def _gone(self, number: int) -> None:
        """Take note of a task that was cancelled before it began."""
        if self._tasks.pop(number, None) is not None:
            self.state.open -= 1
            self._wake.set()

    async def _one(self, number: int, due_s: float) -> None:
        loop, zero, answer = asyncio.get_running_loop(), self._zero, StreamedAnswer(self.dialect.chat)
        sent: list[float] = []
        status, error, finish = 0, "", ""
        body = self._bodies.pop(number, None) or self._body(number)
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await self.client.ask(self.dialect.path, body, answer.feed, sent.append)
            status = reply.status
            if status == 200:
                answer.end()
                error = answer.error
            else:
                error = f"status {status}: {reply.body[:200].decode('utf-8', 'replace')}"
            self._failed = 0
        except HttpFault as fault:
            error = str(fault)
            self._failed = 0 if answer.at_s else self._failed + 1
        except TimeoutError:
            error = f"no whole answer within {self.timeout_s:g} s"
        except asyncio.CancelledError:
            if not self._is_needless(number):
                raise
            finish = WITHDRAWN
        record = self._record(number, due_s, sent[-1] if sent else loop.time(), answer, zero, loop.time())
        record = msgspec.structs.replace(record, status=status, error=error, finish=finish or answer.finish)
        if not error and record.first_s < 0 and not finish:
            record = msgspec.structs.replace(record, error="the answer has no tokens")
        try:
            self._over(number, record)
        except MeshwrightError as fault:  # its record cannot be kept: ``run`` ends with that
            self._fault = fault
            self._wake.set()

    def _record(
        self, number: int, due_s: float, sent_s: float, answer: StreamedAnswer, zero: float, now: float
    ) -> RequestRecord:
        at, usage = answer.at_s, answer.usage
        prompt = usage.prompt_tokens if usage is not None else None
        output = usage.completion_tokens if usage is not None else None
        return RequestRecord(
            number=number,
            due_s=round(due_s, 6),
            sent_s=round(sent_s - zero, 6),
            first_s=round(at[0] - zero, 6) if at else -1.0,
            end_s=round((at[-1] if at else now) - zero, 6),
            prompt=int(self.requests.prompt[number]) if prompt is None else prompt,
            output=len(at) if output is None else output,
            asked=int(self.requests.output[number]),
            cached=-1 if usage is None else usage.cached,
            counted=output is None,
            part=self.part,
            gaps_us=tuple(round((b - a) * 1e6) for a, b in pairwise(at)),
        )

    def _over(self, number: int, record: RequestRecord) -> None:
        """Take note that a request is over, and of who waits for that."""
        self._tasks.pop(number, None)
        self.add(record)
        state = self.state
        state.open -= 1
        state.done += 1
        state.errors += bool(record.error)
        state.tokens += record.output
        self.ends[number] = record.end_s
        for later in self._followers.pop(number, ()):
            due = record.end_s + self._arrival[later]
            heapq.heappush(self._due, (due, later))
            state.last_due_s = max(state.last_due_s, due)
        if self._waiting:
            heapq.heappush(self._due, (asyncio.get_running_loop().time() - self._zero, self._waiting.popleft()))
        if not record.error and record.finish != WITHDRAWN:
            self._count_answer(number)
            self._withdraw(number)
        self._wake.set()

    def _count_answer(self, number: int) -> None:
        if self._program:
            program = self._program[number]
            self._answers[program] = self._answers.get(program, 0) + 1

    def _is_needless(self, number: int) -> bool:
        """Whether a request's program has all the answers that it needs."""
        if not self._program or not self._needed[number]:
            return False
        return self._answers.get(self._program[number], 0) >= self._needed[number]

    def _withdraw(self, number: int) -> None:
        """Hang up on those whose answers nobody needs any more."""
        if self._is_needless(number):
            for other, task in list(self._tasks.items()):
                if self._program[other] == self._program[number]:
                    task.cancel()
