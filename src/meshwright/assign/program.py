"""Integer linear programs, by HiGHS (Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError


class LinearRow(msgspec.Struct, frozen=True):
    """A constraint ``low <= sum(factor * x[column]) <= high``."""

    columns: Sequence[int]
    factors: Sequence[float]
    low: float = -np.inf
    high: float = np.inf


class ProgramAnswer(msgspec.Struct, frozen=True):
    """``x`` float64 [columns], its ``value`` and the ``bound`` that no solution is below; None for ``x`` where none was
    found in time, and an infinite bound where there is none."""

    x: NDArray[np.float64] | None
    value: float
    bound: float


def installed() -> bool:
    """Return whether the solver is there."""
    return find_spec("highspy") is not None


@contextmanager
def _unsaid() -> Iterator[None]:
    """Nothing on standard output, which is an answer's: a solver says its version there before it can be asked not
    to."""
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def minimise(
    cost: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    whole: NDArray[np.bool_],
    rows: Sequence[LinearRow],
    *,
    limit_s: float = 10.0,
    gap: float = 1e-6,
    start: NDArray[np.float64] | None = None,
    nodes: int = 0,
) -> ProgramAnswer:
    """Minimise ``cost @ x`` over ``low <= x <= high`` [columns], of which those that are `whole` are whole numbers,
    under `rows`; for at most `limit_s`, or until value and bound are within `gap`. `start` is a solution to begin with.
    `nodes` of the search, where they are more than 0, are a limit by which every process finds the same.

    Raises:
        MeshwrightError: L003 where the solver is not installed.
    """
    if not installed():
        raise MeshwrightError.one(
            "L003",
            "integer programs need highspy, not installed here",
            place="method ilp",
            help='pip install "meshwright[ilp]", or the method local-search',
        )
    import highspy

    problem = highspy.HighsLp()
    problem.num_col_, problem.num_row_ = len(cost), len(rows)
    problem.col_cost_, problem.col_lower_, problem.col_upper_ = cost, low, high
    problem.row_lower_ = np.array([row.low for row in rows])
    problem.row_upper_ = np.array([row.high for row in rows])
    problem.integrality_ = [highspy.HighsVarType.kInteger if one else highspy.HighsVarType.kContinuous for one in whole]
    matrix = problem.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.concatenate([[0], np.cumsum([len(row.columns) for row in rows])])
    matrix.index_ = np.concatenate([np.asarray(row.columns, np.int64) for row in rows])
    matrix.value_ = np.concatenate([np.asarray(row.factors, np.float64) for row in rows])
    with _unsaid():
        solver = highspy.Highs()
        solver.silent()
    for name, value in (("time_limit", limit_s), ("mip_rel_gap", gap), ("threads", 1)):
        solver.setOptionValue(name, value)
    if nodes:
        solver.setOptionValue("mip_max_nodes", nodes)
    solver.passModel(problem)
    if start is not None:
        first = highspy.HighsSolution()
        first.col_value = list(map(float, start))
        solver.setSolution(first)
    solver.run()
    info = solver.getInfo()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return ProgramAnswer(None, np.inf, np.inf)
    bound = info.mip_dual_bound if whole.any() else info.objective_function_value
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return ProgramAnswer(None, np.inf, bound)
    return ProgramAnswer(np.array(solver.getSolution().col_value), info.objective_function_value, bound)
