"""A run whose processes are killed as a world's trace says, and taken up again as the decider of a simulated job says.

The decider (:mod:`meshwright.world.recovery`) is the one that ``simulate/job.py`` drives on a virtual clock; here the
clock is real: training is a start of :mod:`meshwright.run.loop`, a failure a SIGKILL of one of its processes, and what
is saved are the checkpoints in the run's folder. Afterwards the same world is simulated with the times that this run
took, and laid beside them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from threading import Timer
from typing import Any

import msgspec

from meshwright.run import launch, loop
from meshwright.run.checkpoint.format import complete
from meshwright.run.world import RankDied
from meshwright.simulate.job import JobSizes, run_job
from meshwright.world.decider import LogEntry
from meshwright.world.recovery import (
    Began,
    Ended,
    Event,
    Failed,
    Finish,
    Recovery,
    Repaired,
    Restarted,
    TrainFrom,
    Wait,
)
from meshwright.world.trace import WorldEvent


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was interrupted: its last start's ``summary``, seconds and failures in all, where its seconds went
    (``lost`` is what its steps, restarts and waits leave of them), the decider's ``log``, and the seconds of the same
    world simulated with the step time and the restart time of this run."""

    summary: dict[str, Any]
    seconds: float
    failures: int
    by_cause: dict[str, float]
    log: tuple[LogEntry, ...]
    simulated_s: float
    step_s: float
    restart_s: float


def recovered(
    job: loop.Job, decider: Recovery, trace: Iterable[WorldEvent], *, repair_s: float, device: str = "auto"
) -> Recovered | None:
    """Train `job` to its last step while processes are killed at the times of the `trace`, in seconds from now; None
    when it was asked to end before. Checkpoints go to ``job.out``, which has to be said.

    Raises:
        MeshwrightError: what a start of the run raises that no failure of the trace is the cause of.
    """
    return _Driver(job, decider, tuple(trace), repair_s, device).run()


class _Driver:
    """The real clock: seconds since the run began, what has failed, and what its starts took."""

    def __init__(self, job: loop.Job, decider: Recovery, trace: tuple[WorldEvent, ...], repair_s: float, device: str):
        self.job, self.decider, self.trace, self.device = job, decider, trace, device
        self.failures = tuple(one.at_s for one in trace)
        self.repairs = sorted(one.at_s + repair_s if one.back_s is None else one.back_s for one in trace)
        self.repair_s = repair_s
        self.begun = time.monotonic()
        self.failed = self.repaired = 0
        self.summary: dict[str, Any] = {}
        self.starts: list[float] = []  # seconds from the beginning of a start to its first step's
        self.deaths: list[float] = []  # seconds from a kill to the end of the last process
        self.spent = dict.fromkeys(("lost", "restarts", "waiting"), 0.0)
        self.log: list[LogEntry] = []

    def now(self) -> float:
        return time.monotonic() - self.begun

    def run(self) -> Recovered | None:
        state, event = self.decider.begin(), Began()
        while True:
            state, decisions = self.decider.decide(state, event)
            self.log.append(LogEntry(event, decisions, self.now()))
            for decision in decisions:
                if isinstance(decision, Finish):
                    return None if self.summary["stopped"] else self._said()
                event = self._done(decision)

    def _done(self, decision: Any) -> Event:
        """Do what was decided; what came of it."""
        if isinstance(decision, TrainFrom):
            return self._train(decision)
        if isinstance(decision, Wait):
            due = self.repairs[self.repaired]
            self.repaired += 1
            waited = max(0.0, due - self.now())
            self.spent["waiting"] += waited
            time.sleep(waited)
            return Repaired()
        return Restarted()  # a start is a restart: nothing else has to be done

    def _train(self, decision: TrainFrom) -> Event:
        job = msgspec.structs.replace(self.job, resume=decision.first_step > 0, save_every=decision.save_every)
        began, timers = self.now(), []

        def watch(children: list[Any]) -> None:
            if self.failed < len(self.failures):
                node = self.trace[self.failed].node
                victim = children[node if node >= 0 else self.failed % len(children)]
                timer = Timer(max(0.0, self.failures[self.failed] - self.now()), _kill, (victim,))
                timer.daemon = True
                timers.append(timer)
                timer.start()

        try:
            self.summary = launch.start(
                loop.train, job, num_ranks=job.plan.num_ranks, device=self.device, stops=True, begun=watch
            )
        except RankDied:
            if self.failed >= len(self.failures) or self.now() < self.failures[self.failed]:
                raise  # it died of something else
            return self._fails()
        finally:
            for timer in timers:
                timer.cancel()
        self.starts.append(self.now() - began - sum(self.summary["step_s"]))
        return Ended()

    def _fails(self) -> Failed:
        at_s = self.failures[self.failed]
        self.deaths.append(self.now() - at_s)
        self.failed += 1
        saved = saved_steps(self.job.out)
        if not self.job.quiet:
            print(f"killed a process {at_s:.1f} s into the run: goes on from step {saved}", file=sys.stderr)
        return Failed(saved)

    def _said(self) -> Recovered:
        """The run beside the same world simulated."""
        whole = self.now()
        step_s = median(self.summary["step_s"]) if self.summary["step_s"] else 0.0
        start_s = self.starts[-1]
        restart_s = start_s + (fmean(self.deaths) if self.deaths else 0.0)
        sizes = JobSizes(
            num_steps=self.job.steps, step_s=step_s, save_s=0.0, restart_s=restart_s, repair_s=self.repair_s
        )  # checkpoints are written beside training
        # the first start takes its time before the first step, as a restart does
        world = (
            msgspec.structs.replace(
                one,
                at_s=max(0.0, one.at_s - start_s),
                back_s=None if one.back_s is None else max(0.0, one.back_s - start_s),
            )
            for one in self.trace
        )
        simulated = run_job(sizes, self.decider, world)
        self.spent["restarts"] = restart_s * self.failed
        steps = self.job.steps * step_s
        self.spent["lost"] = max(0.0, whole - start_s - steps - self.spent["restarts"] - self.spent["waiting"])
        return Recovered(
            summary=self.summary,
            seconds=whole,
            failures=self.failed,
            by_cause={"start": start_s, "steps": steps, **self.spent},
            log=tuple(self.log),
            simulated_s=start_s + simulated.seconds,
            step_s=step_s,
            restart_s=restart_s,
        )


def saved_steps(out: str) -> int:
    """Steps in the newest complete checkpoint of a run's folder, which is where it goes on; 0 without one."""
    found = complete(Path(out))
    return found[-1][0] if found else 0


def _kill(process: Any) -> None:
    """End a process as a node ends whose power fails; it may have ended already."""
    if process.pid is not None and process.exitcode is None:
        os.kill(process.pid, signal.SIGKILL)
