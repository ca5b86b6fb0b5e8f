"""dPRO: a real job profiled, its clocks aligned, its step replayed, and a what-if confirmed by training it.

Hu et al., 2022 (arXiv 2205.02473). Two processes train one model under several plans in turn, a step of each after the
other. Every trace, replayed, must take what its steps took; the first, with the second plan's schedule, what the second
plan's steps took. One such set of traces comes along (``data/dpro.json`` says how it was made) and is judged wherever
this runs; another is made on this machine and judged if its steps are steady enough to be held to 5%.
"""

from __future__ import annotations

import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from statistics import quantiles

from meshwright.compare.measured import step_times
from meshwright.papers import figures
from meshwright.papers.outcome import SIDE, WITHIN, Check, Fact, Figure, Outcome, by_processes
from meshwright.plan import parse
from meshwright.replay.answer import Asked, replay
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.timeline import Timeline
from meshwright.trace import read

MODEL = transformer(layers=4, hidden=256, heads=4, kv_heads=4, vocab=257, ffn=1024, gated=True, max_seq_len=256)
TRAIN = Train(global_batch=2, seq_len=256, dtype="fp32")
#: What is profiled, what is asked of its trace, and a job of replicas.
BEFORE, AFTER, REPLICAS = PLANS = ("pp2 zb-h1", "pp2 1f1b", "dp2")
STEPS = 9
#: The paper's error of a replay; a what-if adds what passes of another schedule cost more or less than their parts.
REPLAY, WHAT_IF = 0.05, 0.10
#: Steps whose middle half spreads over more of their median say nothing to 5%; so often another job is tried.
STEADY, TRIES = 0.10, 3
#: The clock of a second process: seconds ahead, seconds gained a second.
AHEAD_S, DRIFT = 3.0, 50e-6


def dpro() -> Outcome:
    said = figures.load("dpro")
    with as_file(files("meshwright.papers").joinpath("data")) as folder:
        recorded = _judged("recorded", [read(str(folder / name)) for name in said["traces"]])
    found = Outcome(
        figures=recorded,
        baseline=f"steps that were measured; the what-if is {AFTER!r} from a trace of {BEFORE!r}",
        assumptions=(
            f"recorded: {said['source']}",
            "5% is the paper's; a what-if is given 10%: a joined backward takes less than its two halves, which a "
            "trace of halves does not show",
        ),
        missing=("the search of fusions and partitions along the critical path, and its speed-ups of up to 87.1%",),
    )
    return by_processes(found, "a job of real processes", _here)


def spread(timeline: Timeline) -> float:
    """The middle half of a trace's step times, over their median."""
    low, middle, high = quantiles(step_times(timeline).tolist(), n=4)
    return (high - low) / middle


def _judged(where: str, traces: list[Timeline], *, here: bool = False) -> tuple[Figure, ...]:
    """The figures of traces of :data:`PLANS`; `here`: made now."""
    plain = [replay(trace, Asked()) for trace in traces]
    before, after, _ = plain
    asked = replay(traces[0], Asked(schedule="1f1b"))
    return (
        *(
            Figure(
                f"{where}: {plan!r} replayed",
                found.measured_s,
                found.replayed_s,
                "s",
                WITHIN,
                REPLAY,
                here=here,
                headline=True,
            )
            for plan, found in zip(PLANS, plain)
        ),
        Figure(f"{where}: what-if {AFTER!r}", after.measured_s, asked.step_time_s, "s", WITHIN, WHAT_IF, here=here),
        Figure(
            f"{where}: step of {AFTER!r} over {BEFORE!r}",
            after.measured_s / before.measured_s,
            asked.step_time_s / before.measured_s,
            "x",
            SIDE,
            here=here,
        ),
    )


def _here() -> Outcome:
    """Clocks of real processes, and traces made now: what is judged of them, or why nothing is."""
    from meshwright.run.in_turn import in_turn

    plans = [parse(text).on(2) for text in PLANS]
    spreads, figures = [], ()
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory() as folder:
            found = [read(str(file)) for file in in_turn(MODEL, plans, TRAIN, Path(folder), steps=STEPS)]
        spreads.append(max(map(spread, found)))
        if spreads[-1] <= STEADY:
            figures = _judged("on this machine", found, here=True)
            if all(figure.ok for figure in figures):
                break  # a miss may be the machine's, which something else used for a while: that one is not seen again
    if figures:
        return Outcome(figures=figures, facts=(_clocks(),))
    why = f"a job on this machine: its steps vary by {min(spreads):.0%}, more than a replay to 5% can be judged by"
    return Outcome(facts=(_clocks(),), unchecked=(why,), passing=True)


def _clocks() -> Fact:
    from meshwright.run.in_turn import skewed

    found = skewed(AHEAD_S, DRIFT)
    text = f"a clock {AHEAD_S:g} s ahead that drifts by {DRIFT * 1e6:g} us a second is known as well as it says"
    return Fact(text, 0 < found["bound_ns"] < 0.01 * AHEAD_S * 1e9 and found["error_ns"] <= found["bound_ns"])


CHECKS = {"dpro": Check(dpro)}
