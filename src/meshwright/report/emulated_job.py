"""A job replayed on emulated hosts beside its simulation: where the time went, and event by event."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.text import Text

from meshwright.causes import JOB
from meshwright.quantity import seconds
from meshwright.report.compare_text import percent
from meshwright.report.page import Page
from meshwright.world.decider import LogEntry
from meshwright.world.history import in_words

if TYPE_CHECKING:
    from meshwright.run.emulate.days import EmulatedJob

FORMAT_VERSION = 1
HEAD = ("simulated", "measured")


def to_json(done: EmulatedJob) -> dict[str, Any]:
    """The replayed job as plain values, times in seconds of the emulation."""
    whole, lived = done.whole.job, done.lived
    return {
        "format_version": FORMAT_VERSION,
        "plan": done.prediction.plan.text(),
        "cluster": done.prediction.cluster.name,
        "scale": done.scale,
        "job_seconds_per_second": done.faster,
        "job": msgspec.to_builtins(whole) | {"save_every": done.whole.save_every, "simulated_s": done.whole_s},
        "small_job": msgspec.to_builtins(done.sizes) | {"save_every": done.decider.save_every},
        "simulated": msgspec.to_builtins(done.simulated),
        "measured": msgspec.to_builtins(lived.run),
        "step_s": list(lived.step_s),
        "start_s": list(lived.start_s),
        "killed": list(lived.killed),
        "error": done.error,
        "tolerance": done.tolerance,
        "agrees": done.agrees,
        "identity": done.prediction.identity.said(),
    }


def render(done: EmulatedJob, console: Console) -> None:
    """Print the replayed job beside its simulation."""
    job, small, steps = done.whole.job, done.sizes, done.lived.step_s
    with Page(console) as page:
        page.print(
            Text(
                f"{done.prediction.model.name} under {done.prediction.plan.text()} on {done.prediction.cluster.name}",
                "bold",
            )
        )
        page.quiet(
            f"{small.num_steps:,} steps stand for {job.num_steps:,}, and a second for {seconds(done.faster)} of the job"
        )
        page.title("Where the time went")
        by_cause = [
            (cause.words, done.simulated.by_cause[cause.name], done.lived.by_cause[cause.name]) for cause in JOB
        ]
        rows = [row for row in by_cause if any(row[1:])]
        rows.append(("in all", done.simulated.seconds, done.lived.seconds))
        page.rows(
            [_head("", "error"), *(_times(*row, percent(row[1] / row[2] - 1 if row[2] else None)) for row in rows)]
        )
        page.title("Event by event")
        page.rows([_head("", ""), *(_event(*pair) for pair in done.pairs)])
        if done.lived.killed:
            page.quiet(f"killed when a node failed: rank {', '.join(map(str, done.lived.killed))}")
        page.quiet(
            f"{seconds(done.simulated.seconds * done.faster)} of the job simulated, "
            f"{seconds(done.lived.seconds * done.faster)} measured; {seconds(done.whole_s)} with all its steps"
        )
        page.quiet(
            f"a step is predicted to take {seconds(small.step_s)} with the pause after it, and took "
            f"{seconds(median(steps) + done.pause_s) if steps else 'nothing'}"
        )
        within = f"within {done.tolerance:.0%} of the job's length at the same event, decided alike"
        page.print(Text(f"all events {within}" if done.agrees else f"not all events {within}", "bold"))


def _head(*around: str) -> tuple[Text, ...]:
    first, last = around
    return (Text(first), *(Text(word, "dim", justify="right") for word in HEAD), Text(last, "dim", justify="right"))


def _times(words: str, simulated_s: float | None, measured_s: float | None, last: str) -> tuple[Text, ...]:
    cells = ("-" if at_s is None else seconds(at_s) for at_s in (simulated_s, measured_s))
    return (Text(words), *(Text(cell, justify="right") for cell in cells), Text(last, justify="right"))


def _event(simulated: LogEntry | None, measured: LogEntry | None) -> tuple[Text, ...]:
    """When an event came, and the decisions on it; both sides' words where they part."""
    words = [
        f"{in_words(e.event)}: {', '.join(map(in_words, e.decisions)) or 'nothing'}" for e in (simulated, measured) if e
    ]
    times = (None if entry is None else entry.at_s for entry in (simulated, measured))
    return _times(" | ".join(dict.fromkeys(words)), *times, "")
