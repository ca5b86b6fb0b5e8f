"""Orders to the process that holds emulated hosts, one a line of JSON, and the outcome of a job.

The script, which is large, and what comes of an order go through files that the order names.
"""

from __future__ import annotations

import msgspec

from meshwright.simulate.job import JobRun, JobSizes
from meshwright.world.decider import LogEntry
from meshwright.world.recovery import Decision, Event, Recovery
from meshwright.world.trace import WorldEvent


class Steps(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a script for some steps, each when all ranks are ready; the times go to ``out``, an .npz file."""

    script: str
    steps: int
    out: str
    timeout_s: float


class Life(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a script as a job of ``sizes``, of which its ``num_steps``, ``save_s``, ``restart_s`` and ``repair_s`` count,
    while ``changes`` happen; ``decider`` says what is done about them. The outcome goes to ``out``, a file of JSON."""

    script: str
    sizes: JobSizes
    decider: Recovery
    changes: tuple[WorldEvent, ...]
    out: str
    timeout_s: float


class Lived(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it went on real processes: ``log``, seconds ``by_cause``, ``step_s`` of every step that was done (those
    that were lost too), ``start_s`` from every fork of the ranks until they had met, and the ranks that were
    ``killed``, in order."""

    seconds: float
    by_cause: dict[str, float]
    log: tuple[LogLine, ...]
    step_s: tuple[float, ...]
    start_s: tuple[float, ...]
    killed: tuple[int, ...]

    @property
    def run(self) -> JobRun:
        """The job as a simulation says it."""
        log = tuple(LogEntry(line.event, line.decisions, line.at_s) for line in self.log)
        return JobRun(seconds=self.seconds, by_cause=self.by_cause, failures=len(self.killed), log=log)


class LogLine(msgspec.Struct, frozen=True):
    """A :class:`LogEntry` of a recovering job, whose events and decisions can be read back."""

    event: Event
    decisions: tuple[Decision, ...]
    at_s: float
