"""The launcher of an elastic run: the real clock of the decider of :mod:`meshwright.world.elastic`.

It sees at once when a process ends, tells the decider, and forms the hosts that are left, with spares or repaired ones
that have just been started, into ranks under the plan for so many. It holds no training state.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from bisect import insort
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.run import launch
from meshwright.run.ahead import load_ahead
from meshwright.run.elastic import host, worker
from meshwright.run.elastic.formation import Begin, Born, Leave, Order, Over, Settled, Stepped, Stop, Word
from meshwright.run.job import Job
from meshwright.run.world import RankDied, died
from meshwright.world.decider import LogEntry
from meshwright.world.elastic import Elastic, Regroup
from meshwright.world.recovery import Began, Ended, Event, Failed, Finish, Repaired, Restarted, Wait
from meshwright.world.trace import WorldEvent

#: A run whose ranks die so many times one after the other without a step between them does not get anywhere.
MOST_DEATHS = 100
#: A host that is back joins within this part of a round from its beginning: what was done of it is done again.
SOON = 10
#: A worker whose host has died ends within this.
WORKER_ENDS_S = 2.0


class Formed(msgspec.Struct, frozen=True):
    """How the hosts of a formation train: their plan, the microbatches of each data-parallel rank where they are not
    as many on all, and the parameters of the plan's schedule."""

    plan: Plan
    counts: tuple[int, ...] = ()
    params: dict[str, Any] = {}


class Regrouped(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the ranks: when a loss, or a host that joins, was seen; seconds from then until every rank held the
    state and its copies again; the ranks that went on, the step after which they did, how many of the steps that had
    been done were repeated, where the state came from (``memory``, ``disk`` or ``nowhere``), and the cause."""

    at_s: float
    seconds: float
    ranks: int
    step: int
    repeated: int
    source: str
    cause: str


class ElasticRun(msgspec.Struct, frozen=True, kw_only=True):
    """An elastic run: the ``summary`` of its last formation, the loss and norm of every step as it counted, how it
    recovered, and the decider's log. Of replicas that differ within a round the losses are the first one's, and those
    of another where it was killed before it told."""

    summary: dict[str, Any]
    seconds: float
    losses: list[float]
    grad_norms: list[float]
    failures: int
    recoveries: tuple[Regrouped, ...]
    log: tuple[LogEntry, ...]


class _Host(NamedTuple):
    """A host as the launcher knows it: its process, the orders it takes and the words it says, and the steps that its
    workers have done, which they say past it, so that a host that is killed takes none of them along."""

    number: int
    process: Any
    orders: Connection
    done: Connection


def run(
    job: Job,
    decider: Elastic,
    formed: Callable[[int], Formed],
    *,
    repair_s: float = 0.0,
    trace: Iterable[WorldEvent] = (),
    whole: Callable[[dict[int, int]], None] | None = None,
) -> ElasticRun:
    """Train `job` to its last step, whatever processes of it are killed meanwhile. `formed` says how so many ranks
    train. A lost host is back after `repair_s`, where no spare took its place. Hosts are killed at the times of a
    `trace`, in seconds from the first step. `whole` is called whenever all ranks have come to hold the state, with the
    processes there are: that of each host, and of its worker.

    Raises:
        MeshwrightError: what a worker raised that no death was the cause of.
        RankDied: processes die over and over without a step between.
    """
    load_ahead()  # every new worker is forked from here
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        driver = _Driver(job, decider, formed, repair_s, tuple(trace), whole, Path(folder))
        return driver.run()


class _Driver:
    def __init__(
        self,
        job: Job,
        decider: Elastic,
        formed: Callable[[int], Formed],
        repair_s: float,
        kills: tuple[WorldEvent, ...],
        whole: Callable[[dict[int, int]], None] | None,
        folder: Path,
    ):
        self.job, self.decider, self.formed, self.repair_s = job, decider, formed, repair_s
        self.kills, self.whole, self.folder = list(kills), whole, folder
        self.context = multiprocessing.get_context("fork")
        self.train = worker.of_job(job)
        self.hosts: list[_Host] = []
        self.started = 0
        self.epoch = -1
        self.size = 0
        self.workers: dict[int, int] = {}  # rank -> its worker's process
        self.settled: dict[int, Settled] = {}
        self.over: dict[int, Over] = {}
        self.repairs: list[float] = []
        self.back_s: float | None = None  # when the host that is being killed is back, where the trace says so
        self.steps: dict[int, Stepped] = {}
        self.furthest = 0  # the last step that a formation before this one is known to have done
        self.failures = self.barren = 0
        self.raised = ""  # what a worker raised since the last step
        self.changed_at: float | None = None
        self.cause = ""
        self.recoveries: list[Regrouped] = []
        self.log: list[LogEntry] = []
        self.begun = time.monotonic()
        self.first_step_at: float | None = None
        self.stopping = False

    def now(self) -> float:
        return time.monotonic() - self.begun

    def run(self) -> ElasticRun:
        before = {number: signal.signal(number, self._asked) for number in launch.ASKING}
        try:
            self._form(max(self.decider.sizes))
            state, event = self.decider.begin(), Began()
            while True:
                state, decisions = self.decider.decide(state, event)
                self.log.append(LogEntry(event, decisions, self.now()))
                for decision in decisions:
                    if isinstance(decision, Finish):
                        return self._said()
                    if isinstance(decision, Regroup):
                        self._form(decision.nodes)
                    elif isinstance(decision, Wait):
                        self._disband()
                event = self._next()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._end()

    # -- hosts

    def _start(self) -> None:
        ours, theirs = self.context.Pipe()
        done, says_done = self.context.Pipe(duplex=False)  # a pipe: one write of a few bytes is whole or not there
        inherited = [ours, done, *(one for host in self.hosts for one in (host.orders, host.done))]
        words = (theirs, says_done, os.getpid(), self.train, inherited)
        process = self.context.Process(target=host.live, args=words, name=f"host {self.started}")
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, launch.ASKING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        says_done.close()
        self.hosts.append(_Host(self.started, process, ours, done))
        self.started += 1

    def _form(self, ranks: int) -> None:
        """Begin a formation of so many ranks, on hosts that are there and new ones."""
        if self.epoch >= 0 and ranks > self.size:
            self._because("a host joined")
        self.epoch += 1
        self.size = ranks
        self.workers, self.settled, self.over = {}, {}, {}
        self.furthest = max(self.steps, default=0)
        while len(self.hosts) < ranks:
            self._start()
        how = self.formed(ranks)
        for rank, one in enumerate(self.hosts[:ranks]):
            store = str(self.folder / f"store-{self.epoch}")
            words = {"plan": how.plan.text(), "counts": how.counts, "params": how.params}
            self._order(one, Begin(epoch=self.epoch, rank=rank, size=ranks, store=store, **words))

    def _disband(self) -> None:
        """Too few hosts are left: they keep what they hold, and wait."""
        self.size = 0

    def _order(self, one: _Host, order: Order) -> None:
        with contextlib.suppress(OSError):  # it has died, which is seen when the next word is waited for
            one.orders.send_bytes(msgspec.json.encode(order))

    def _end(self) -> None:
        for one in self.hosts:
            self._order(one, Leave())
        for one in self.hosts:
            one.process.join(2.0)
            if one.process.exitcode is None:
                one.process.kill()
                one.process.join()
            one.orders.close()
            one.done.close()

    def _asked(self, number: int, frame: Any) -> None:
        """SIGINT or SIGTERM: end in order; the second time, at once."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True

    # -- what happens

    def _next(self) -> Event:
        """The next thing that the decider is told."""
        asked = False
        while True:
            if self.stopping and not asked:
                asked = True
                for one in self.hosts:
                    self._order(one, Stop())
            due = self._due()
            timeout = 0.5 if due is None else min(0.5, max(0.0, due - self.now()))
            ready = wait([way for h in self.hosts for way in (h.orders, h.done, h.process.sentinel)], timeout)
            self._hear_steps()
            for one in list(self.hosts):
                if one.orders in ready or one.process.sentinel in ready:
                    event = self._of(one)
                    if event is not None:
                        return event
            if self.repairs and self.repairs[0] <= self.now() and self._takes_up():
                self.repairs.pop(0)
                return Repaired()
            self._kill()

    def _takes_up(self) -> bool:
        """Whether a host may join now: once those that train hold the state, while they have something to do, and where
        all go back to the end of a round, soon after one."""
        every = self.decider.save_every
        soon = max(self.steps, default=0) % every * SOON <= every
        return not self.size or (len(self.settled) == self.size and not self.over and soon)

    def _due(self) -> float | None:
        """When the world is to be looked at again, whatever anybody says."""
        times = self.repairs[:1] if self._takes_up() else []
        if self.kills and self.first_step_at is not None:
            times.append(self.first_step_at + self.kills[0].at_s)
        return min(times, default=None)

    def _kill(self) -> None:
        """Kill a host if the trace says so: the one that it names, else those with ranks in turn."""
        if not self.kills or self.first_step_at is None or self.now() < self.first_step_at + self.kills[0].at_s:
            return
        change = self.kills.pop(0)
        if not self.size:
            return
        self.back_s = None if change.back_s is None else self.first_step_at + change.back_s
        named = change.node if 0 <= change.node < len(self.hosts) else self.failures % self.size
        os.kill(self.hosts[named].process.pid, signal.SIGKILL)

    def _of(self, one: _Host) -> Event | None:
        """Take up what a host says, or that it has died."""
        try:
            while one.orders.poll():
                said = one.orders.recv_bytes()
                self._hear_steps()  # those that were done before this was said
                event = self._hear(one, msgspec.json.decode(said, type=Word))
                if event is not None:
                    return event
        except (EOFError, OSError):
            one.process.join()
        if one.process.exitcode is None:
            return None
        rank = self.hosts.index(one)
        self._hear_steps(one)  # to the end of its worker, which it takes along
        self.hosts.remove(one)
        one.orders.close()
        one.done.close()
        if rank >= self.size:
            return None  # it had no rank
        return self._lost(f"host {one.number}", node=True)

    def _hear_steps(self, ended: _Host | None = None) -> None:
        """Take up the steps that workers have done; to the end, those of a host that has died. What a formation does
        anew counts in place of what one before it did, and may be heard before all its ranks have said where they
        began."""
        for one in self.hosts:
            with contextlib.suppress(EOFError, OSError):
                while one.done.poll(WORKER_ENDS_S if one is ended else 0.0):
                    word = msgspec.json.decode(one.done.recv_bytes(), type=Stepped)
                    self.barren, self.raised = 0, ""
                    self.first_step_at = self.now() if self.first_step_at is None else self.first_step_at
                    if word.epoch < self.epoch:
                        self.furthest = max(self.furthest, word.step)
                    known = self.steps.get(word.step)
                    # of replicas that differ the first one's counts
                    if known is None or (word.epoch, -word.rank) > (known.epoch, -known.rank):
                        self.steps[word.step] = word

    def _hear(self, one: _Host, word: Word) -> Event | None:
        if word.epoch != self.epoch or not self.size:
            return None
        rank = self.hosts.index(one)
        event = None
        match word:
            case Born(pid=pid):
                self.workers[rank] = pid
            case Settled():
                self.settled[rank] = word
                event = self._all_settled() if len(self.settled) == self.size else None
            case Over():
                event = self._is_over(rank, word)
        return event

    def _is_over(self, rank: int, word: Over) -> Event | None:
        report = word.report
        if report is not None and report.cause and not report.consequence:
            if self.raised == report.cause:  # and no step was done between: it would raise it again
                raise died(rank, "this host", report.cause)
            self.raised = report.cause
        if report is None or (report.exit_code and not report.diagnostics):
            why = report.cause if report else _ended(word.code)
            return self._lost(f"the worker of rank {rank} ({why})", node=False)
        if report.diagnostics:
            kind = MeshwrightError if report.exit_code == MeshwrightError.exit_code else RankDied
            raise kind(report.diagnostics)
        self.over[rank] = word
        return Ended() if len(self.over) == self.size else None

    def _lost(self, what: str, *, node: bool) -> Event | None:
        """A process has died: the decider is told of a node; a worker alone is begun again where it was."""
        if not self.size or len(self.over) == self.size:
            return None
        self.failures += 1
        self.barren += 1
        if self.barren > MOST_DEATHS:
            raise died(0, "this host", f"{MOST_DEATHS} processes died and no step was done between; last {what}")
        self._because(f"lost {what}")
        if not node:
            self._form(self.size)
            return None
        if self.decider.spares is not None:
            insort(self.repairs, self.now() + self.repair_s if self.back_s is None else self.back_s)
            self.back_s = None
        return Failed(max(self.steps, default=0))

    def _because(self, what: str) -> None:
        """Ranks are formed anew, for this reason among others that came since they last held a state."""
        if self.changed_at is None:
            self.changed_at = self.now()
        self.cause = f"{self.cause}, {what}" if self.cause else what

    def _all_settled(self) -> Event | None:
        """Every rank holds the state, twice."""
        if self.whole is not None:
            self.whole({self.hosts[rank].process.pid: pid for rank, pid in self.workers.items()})
        first = self.settled[0]
        newest = max(first.newest, self.furthest, first.step)
        undone = [n for n, done in self.steps.items() if n > first.step and done.epoch < self.epoch]
        for step in undone:
            del self.steps[step]
        if self.changed_at is None:
            return None
        found = Regrouped(
            at_s=self.changed_at,
            seconds=self.now() - self.changed_at,
            ranks=self.size,
            step=first.step,
            repeated=newest - first.step,
            source=first.source,
            cause=self.cause,
        )
        self.recoveries.append(found)
        self.changed_at, self.cause = None, ""
        if not self.job.quiet:
            print(
                f"{found.cause}: {found.ranks} ranks go on from step {found.step} after {found.seconds:.2f} s, "
                f"{found.repeated} repeated",
                file=sys.stderr,
            )
        return Restarted()

    def _said(self) -> ElasticRun:
        done = [self.steps[step] for step in sorted(self.steps)]
        return ElasticRun(
            summary=self.over[0].report.result,
            seconds=self.now(),
            losses=[one.loss for one in done],
            grad_norms=[one.grad_norm for one in done],
            failures=self.failures,
            recoveries=tuple(self.recoveries),
            log=tuple(self.log),
        )


def _ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
