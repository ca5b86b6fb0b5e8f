"""Five runs of one's own: every stack of the tables as one that nobody knows, updated by a few of its own rows.

The rows of a source that one stack ran are asked as of unknown software; five of them, drawn with a fixed seed, are
given to :func:`meshwright.calibrate.runs.fit`, whose known stacks are those of other sources; the others are predicted
with what comes out. Everything that is chosen there is chosen from the five.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from meshwright.calibrate.runs import OwnRun, errors, fit, known_stacks
from meshwright.cost import Costs, Framework, load_framework
from meshwright.errors import MeshwrightError
from meshwright.plan import check
from meshwright.validate.cases import UNKNOWN, Case, case, unnamed
from meshwright.validate.faults import faulty
from meshwright.validate.measured import measured
from meshwright.validate.steps import settled

#: Runs that are given, draws of them, rows that a stack needs, and at most so many of the others that are predicted.
GIVEN, DRAWS, FEWEST, OTHERS = 5, 3, 30, 24
#: Rows of models so small that launches decide: nobody's own runs.
TINY = "launch-bound model"


class OwnRuns(msgspec.Struct, frozen=True, kw_only=True):
    """A stack of a source: its rows, and over the draws the mean absolute error and the bias of rows that were not
    given, under the default (``before``) and with five runs given (``after``)."""

    key: str
    rows: int
    before: float
    after: float
    bias: float


class TimedRow(msgspec.Struct, frozen=True):
    """A row as a question about unknown software, the seconds it took, and the stack whose profile is not known."""

    case: Case
    seconds: float
    stack: str


def asked(rows: Iterable[dict[str, str]]) -> dict[str, list[TimedRow]]:
    """Return the timed rows of a table that can be predicted, by source and stack."""
    found: dict[str, list[TimedRow]] = {}
    for row in rows:
        seconds = measured(row, 0.0).seconds
        if not seconds or row["outcome"] != "ok" or faulty(row) or TINY in row["notes"]:
            continue
        try:
            own, unknown = case(row), case(unnamed(row))
        except MeshwrightError:
            continue
        if "framework" in own.assumed or check(unknown.plan, unknown.model, unknown.cluster, unknown.train):
            continue
        stack = own.framework.constants_of or own.framework.name
        found.setdefault(f"{row['source']}/{stack}", []).append(TimedRow(unknown, seconds, stack))
    return {key: own for key, own in sorted(found.items()) if len(own) >= FEWEST}


def protocol(
    rows: Iterable[dict[str, str]],
    costs_of: Callable[[Framework], Costs],
    progress: Callable[[str], None] = lambda key: None,
) -> list[OwnRuns]:
    """Return every stack of enough rows with the errors of the rest when five of its runs are given."""
    shared: dict[Framework, Costs] = {}
    by_stack = asked(rows)
    stacks: dict[str, set[str]] = {}
    for key, own in by_stack.items():
        stacks.setdefault(key.partition("/")[0], set()).update(one.stack for one in own)
    out = []
    for key, own in by_stack.items():
        progress(key)
        base = load_framework(UNKNOWN)
        costs = shared.setdefault(base, costs_of(base))
        kinds = known_stacks(tuple(stacks[key.partition("/")[0]]))
        drawn = [_draw(own, base, kinds, costs, costs_of, seed) for seed in range(DRAWS)]
        before, after = (np.concatenate([pair[i] for pair in drawn]) for i in (0, 1))
        out.append(
            OwnRuns(
                key=key,
                rows=len(own),
                before=float(np.abs(np.expm1(before)).mean()),
                after=float(np.abs(np.expm1(after)).mean()),
                bias=float(np.expm1(after).mean()),
            )
        )
    return out


def _draw(
    own: list[TimedRow],
    base: Framework,
    kinds: list[Framework],
    costs: Costs,
    costs_of: Callable[[Framework], Costs],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of predicted over measured seconds of rows that were not given, before and after."""
    picked = random.Random(seed).sample(range(len(own)), min(len(own), GIVEN + OTHERS))
    runs = [_run(i, own[i], costs) for i in picked]
    given, rest = runs[:GIVEN], runs[GIVEN:]
    updated = fit(given, base, costs_of, kinds=kinds, left_out=False).framework
    return errors(rest, base, costs_of), errors(rest, updated, costs_of)


def _run(line: int, one: TimedRow, costs: Costs) -> OwnRun:
    """A row as a run, under the recompute mode that it is predicted under where none was recorded."""
    found = settled(one.case, costs) if "recompute" in one.case.assumed else one.case
    words = found.plan.text()
    return OwnRun(line, found.model, found.cluster, found.train, found.plan, one.seconds, words)
