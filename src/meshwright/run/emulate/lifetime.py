"""A job on real processes: ranks train, save, are killed and start again as a decider says, on the real clock.

The decider (:mod:`meshwright.world.recovery`) is the one that ``simulate/job.py`` drives on a virtual clock. Here a
step is a step of the script on all ranks, a failure a SIGKILL of one of them (the others are then ended, as a launcher
does), a restart new processes that meet anew, and what is saved is what every rank says it has saved. Steps and
checkpoints that began take as long as they take; only the times of the world's events, and until when a restart or a
repair lasts at least, are given.
"""

from __future__ import annotations

import time
from bisect import insort
from pathlib import Path

import msgspec

from meshwright.causes import JOB
from meshwright.run.emulate.orders import Life, Lived, LogLine
from meshwright.run.emulate.processes import Processes
from meshwright.run.emulate.script import Script
from meshwright.run.emulate.wire import EmulatedWire
from meshwright.world.recovery import (
    Began,
    Decision,
    Ended,
    Event,
    Failed,
    Finish,
    Repaired,
    Restart,
    Restarted,
    TrainFrom,
    Wait,
)
from meshwright.world.trace import WorldEvent

#: Seconds between two steps, in which all ranks get ready for the next; a part of the step of an emulated job.
BETWEEN_S = 0.01
#: Time for all ranks to see that a step starts, and how often this process looks around.
NOTICE_S, LOOK_S = 0.002, 0.001


def live(order: Life, ranks_per_host: int, wire: EmulatedWire) -> None:
    """Carry out an order on hosts that are there, and write its outcome.

    Raises:
        RuntimeError: when a rank ends that nobody killed, or the job does not end in time.
    """
    script = msgspec.json.decode(Path(order.script).read_bytes(), type=Script)
    driver = _Clock(order, script, ranks_per_host, wire)
    try:
        Path(order.out).write_bytes(msgspec.json.encode(driver.run()))
    finally:
        driver.close()


class _Clock:
    """The real clock: seconds since the job began, its ranks' processes, and what has become of it."""

    def __init__(self, order: Life, script: Script, ranks_per_host: int, wire: EmulatedWire):
        self.order, self.sizes, self.script, self.hosts = order, order.sizes, script, (ranks_per_host, wire)
        self.changes = [*order.changes, WorldEvent(float("inf"))]
        self.slowdown, self.repairs, self.ranks = 1.0, [], None
        self.doing: type = Restart
        self.spent = {cause.name: 0.0 for cause in JOB}
        self.log: list[LogLine] = []
        self.step_s: list[float] = []
        self.start_s: list[float] = []
        self.killed: list[int] = []

    def now(self) -> float:
        return time.monotonic() - self.begun

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.__exit__()
            self.ranks = None

    def run(self) -> Lived:
        self.begun = self.due = time.monotonic()
        self._fork(0)
        while not self._met():  # the job begins when its ranks have met for the first time
            self._look()
        self.begun = time.monotonic()
        state, event, at_s = self.order.decider.begin(), Began(), 0.0
        while True:
            state, decisions = self.order.decider.decide(state, event)
            self.log.append(LogLine(event, decisions, at_s))
            for decision in decisions:
                if isinstance(decision, Finish):
                    return Lived(
                        seconds=at_s, by_cause=self.spent, log=tuple(self.log), step_s=tuple(self.step_s),
                        start_s=tuple(self.start_s), killed=tuple(self.killed),
                    )  # fmt: skip
                self._start(decision, at_s)
            event, at_s = self._happens()

    def _fork(self, first_step: int) -> None:
        """New processes for the steps from `first_step` on."""
        self.forked_s, self.has_met, self.first_step = time.monotonic(), False, first_step
        self.ranks = Processes(self.script, self.sizes.num_steps - first_step, *self.hosts)
        self.ranks.board.slower[:] = self.slowdown

    def _met(self) -> bool:
        """Whether the ranks' processes have met, and wait for their first step."""
        if not self.has_met and self.ranks.ready(0):
            self.has_met = True
            self.start_s.append(time.monotonic() - self.forked_s)
        return self.has_met

    def _start(self, decision: Decision, at_s: float) -> None:
        self.begun_s, self.doing = at_s, type(decision)
        if isinstance(decision, Restart):
            self.due = self.begun + at_s + self.sizes.restart_s
            self._fork(self.first_step)
        elif isinstance(decision, TrainFrom):
            if decision.first_step != self.first_step:
                raise RuntimeError(f"told to train from {decision.first_step}, and {self.first_step} steps are saved")
            self.ranks.board.save[:] = decision.save_every, self.sizes.save_s
            self.step, self.kept, self.kept_s, self.saving_s = -1, 0, at_s, 0.0

    def _happens(self) -> tuple[Event, float]:
        """Let time pass until the decider has to be told something, and say when that was."""
        while True:
            at_s = self.now()
            if self.repairs and self.repairs[0] <= min(at_s, self.changes[0].at_s):
                self.repairs.pop(0)
                if self.doing is Wait:
                    self.spent["waiting"] += at_s - self.begun_s
                    self.begun_s = at_s
                return Repaired(), at_s
            if self.changes[0].at_s <= at_s:
                change = self.changes.pop(0)
                if change.slowdown is not None:
                    self._slow(change.slowdown)
                elif self.doing is not Wait:  # as in a simulation, the nodes of a job that waits do not fail
                    return self._fails(change), self.failed_s
            elif self.doing is TrainFrom and self._trained():
                return self._ended(), self.kept_s
            elif self.doing is Restart and self._met() and time.monotonic() >= self.due:
                at_s = self.now()
                self.spent["restarts"] += at_s - self.begun_s
                return Restarted(), at_s
            self._look()

    def _look(self) -> None:
        if time.monotonic() > self.begun + self.order.timeout_s:
            raise RuntimeError(f"the job has not ended after {self.order.timeout_s:.0f} s")
        time.sleep(LOOK_S)

    def _slow(self, slowdown: float) -> None:
        self.slowdown = slowdown
        if self.ranks is not None:
            self.ranks.board.slower[:] = slowdown

    def _trained(self) -> bool:
        """Start the next step if all ranks are ready for it; whether the last is done and saved."""
        self._keep()
        board = self.ranks.board
        if not self.ranks.ready(self.step + 1):
            return False
        if self.step >= 0:
            self.step_s.append(self._end_s(self.step) - float(board.go[self.step]) + self.begun)
        self.step += 1
        if self.step == self.ranks.steps:
            return True
        after_s = self.begun_s if self.step == 0 else max(self._end_s(self.step - 1), self.kept_s)
        pause_s = 0.0 if self.step == 0 else BETWEEN_S
        board.go[self.step] = max(self.begun + after_s + pause_s, time.monotonic() + NOTICE_S)
        return False

    def _end_s(self, step: int) -> float:
        """When the last rank was done with a step of these processes."""
        return float(self.ranks.board.times[step, :, 1].max()) - self.begun

    def _keep(self) -> None:
        """Note a checkpoint that every rank has written."""
        saved = self.ranks.board.saved
        steps = int(saved[:, 0].min())
        if steps > self.kept:
            self.kept, self.kept_s = steps, float(saved[:, 1].max()) - self.begun
            self.saving_s += self.kept_s - self._end_s(steps - 1)

    def _count(self) -> None:
        """Book what counts of the training that is over: its steps in checkpoints."""
        self._keep()
        self.first_step += self.kept
        self.spent["checkpoints"] += self.saving_s
        self.spent["steps"] += self.kept_s - self.begun_s - self.saving_s

    def _ended(self) -> Ended:
        self._count()
        self.close()
        return Ended()

    def _fails(self, change: WorldEvent) -> Failed:
        """Kill the rank that the failure names, else another one at each failure, in turn."""
        victim = change.node if change.node >= 0 else len(self.killed) % len(self.script.ranks)
        self.ranks.kill(victim)
        self.failed_s = self.now()
        self.killed.append(victim)
        if self.doing is TrainFrom:
            self._count()
            self.spent["lost"] += self.failed_s - self.kept_s
        else:
            self.spent["restarts"] += self.failed_s - self.begun_s
        self.close()
        insort(self.repairs, self.failed_s + self.sizes.repair_s if change.back_s is None else change.back_s)
        return Failed(self.first_step)
