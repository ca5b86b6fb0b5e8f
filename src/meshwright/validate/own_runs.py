"""Five runs of one's own: every stack of the tables as one that nobody knows, updated by a few of its own rows.

The rows of a source that one stack ran are asked as of unknown software, all profiles of its family left out; five of
them, drawn with a fixed seed, are given to :func:`meshwright.calibrate.runs.fit`, which knows the other families; the
others are predicted with what comes out. Everything that is chosen there is chosen from the five.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from meshwright.calibrate.runs import OwnRun, errors, fit, known_stacks
from meshwright.cost import Costs, Framework
from meshwright.errors import MeshwrightError
from meshwright.plan import check
from meshwright.validate.cases import Case, case, families_of, unknown_case
from meshwright.validate.faults import faulty
from meshwright.validate.measured import measured
from meshwright.validate.software import software_name
from meshwright.validate.steps import settled

#: Runs that are given, draws of them, rows that a stack needs, and at most so many of the others that are predicted.
#: Which five are given moves a stack's error by 1 to 6 points (a standard deviation), the mean of twelve draws by up
#: to 2.
GIVEN, DRAWS, FEWEST, OTHERS = 5, 12, 30, 24
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
    """A row as a question about unknown software, the seconds it took, and the profiles that are not known."""

    case: Case
    seconds: float
    family: frozenset[str]


def asked(rows: Iterable[dict[str, str]]) -> dict[str, list[TimedRow]]:
    """Return the timed rows of a table that can be predicted, by source and stack."""
    table = list(rows)
    families, found = families_of(table), {}
    for row in table:
        seconds = measured(row, 0.0).seconds
        if not seconds or row["outcome"] != "ok" or faulty(row) or TINY in row["notes"]:
            continue
        family = families.get(software_name(row), frozenset())
        try:
            own, unknown = case(row), unknown_case(row, family)
        except MeshwrightError:
            continue
        if not family or check(unknown.plan, unknown.model, unknown.cluster, unknown.train):
            continue
        stack = own.framework.constants_of or own.framework.name
        found.setdefault(f"{row['source']}/{stack}", []).append(TimedRow(unknown, seconds, family))
    return {key: own for key, own in sorted(found.items()) if len(own) >= FEWEST}


def protocol(
    rows: Iterable[dict[str, str]],
    costs_of: Callable[[Framework], Costs],
    progress: Callable[[str], None] = lambda key: None,
) -> list[OwnRuns]:
    """Return every stack of enough rows with the errors of the rest when five of its runs are given."""
    out = []
    for key, own in asked(rows).items():
        progress(key)
        drawn = [_draw(own, costs_of, seed) for seed in range(DRAWS)]
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


def _draw(own: list[TimedRow], costs_of: Callable[[Framework], Costs], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of predicted over measured seconds of rows that were not given, before and after."""
    picked = random.Random(seed).sample(range(len(own)), min(len(own), GIVEN + OTHERS))
    base = own[picked[0]].case.framework  # what is said of unknown software by the facts of a run that is given
    runs = [_run(i, own[i], costs_of(base)) for i in picked]
    given, rest = runs[:GIVEN], runs[GIVEN:]
    kinds = known_stacks(tuple(frozenset().union(*(own[i].family for i in picked))))
    learnt = fit(given, base, costs_of, kinds=kinds, left_out=False).framework
    return errors(rest, base, costs_of), errors(rest, learnt, costs_of)


def _run(line: int, one: TimedRow, costs: Costs) -> OwnRun:
    """A row as a run, under the recompute mode that it is predicted under where none was recorded."""
    found = settled(one.case, costs) if "recompute" in one.case.assumed else one.case
    words = found.plan.text()
    return OwnRun(line, found.model, found.cluster, found.train, found.plan, one.seconds, words)
