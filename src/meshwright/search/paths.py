"""Paths through a schedule: linear functions of the stages' times that no execution of it can beat.

The makespan of a schedule is the longest path through its dependencies (see ``schedules/timing.py``), so every path is
a lower bound, whatever the times are. Two kinds are kept for each schedule: the longest path under times that are
typical for the question, and for every rank the chain to its first action, all its work, and the chain back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from meshwright.native import Bytes, Float64s, Int32s, Int64s, OutFloat64s, OutInt64s, native
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.schedules.family import Family
from meshwright.schedules.timing import in_order_times, peak_in_flight
from meshwright.sync.due import rounds

#: Shares of an activation that stay until the weight gradient, for which the most in flight is worked out.
KEPT = (0.0, 0.25, 0.5, 0.75, 1.0)


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of counts for one schedule of S stages.

    ``passes`` [rows, 3, S]: how often a row goes through F, the backward (or B alone, where ``split``) and W of each
    stage; ``sends`` [rows]: messages between ranks on it. ``in_flight`` [levels, ranks]: activations a rank holds
    at most, when the share :data:`KEPT` of one stays from B to W. ``held`` [ranks, S]: 1 where a rank holds a stage.
    ``stage_ranks`` the same as a list. ``split``: backwards come as B and W. ``rounds`` [ranks, S]: how often a rank
    accumulates a stage's gradients without another between. The first ``timed`` rows are the longest paths under
    typical times.
    """

    passes: np.ndarray
    sends: np.ndarray
    in_flight: np.ndarray
    held: np.ndarray
    split: bool
    rounds: np.ndarray
    stage_ranks: tuple[tuple[int, ...], ...]
    timed: int = 1

    def timeless(self) -> Paths:
        """Return the rows without those of typical times."""
        return msgspec.structs.replace(self, passes=self.passes[self.timed :], sends=self.sends[self.timed :], timed=0)

    def of_any_order(self) -> Paths:
        """Return the rows that hold whatever order the ranks choose: their work and the chains to it, with one
        activation in flight."""
        return msgspec.structs.replace(
            self,
            passes=self.passes[1:],
            sends=self.sends[1:],
            in_flight=np.minimum(self.in_flight[:1], 1.0),
            rounds=np.minimum(self.rounds, 1.0),
            timed=0,
        )


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of P schedules one after the other, by the units U that their stages hold, without those of ranks that
    do no more of anything than another.

    ``units`` [4 U, R]: how often a row goes through F, BW, B (no slower than BW counts) and W of each unit; ``sends``
    and ``passes`` [R]: messages and passes on it. ``first`` [P]: the first row of each schedule; ``timed`` [R] marks
    the paths that were the longest under typical times. Of each schedule: whether it is ``split``, ``least`` blocks of
    its smallest stage, and ``scattered`` [P, 2]: blocks whose gradients the least and the most busy rank scatters.
    """

    units: np.ndarray
    sends: np.ndarray
    passes: np.ndarray
    first: np.ndarray
    timed: np.ndarray
    split: np.ndarray
    least: np.ndarray
    scattered: np.ndarray

    @classmethod
    def of(cls, found: Sequence[Paths], counts: Sequence[np.ndarray], kinds: int) -> Rows:
        """Schedules with the units [S, U] of their stages, of which the first `kinds` are blocks."""
        columns, timed, scattered = [], [], []
        for rows, held in zip(found, counts):
            passed = rows.passes @ held  # [rows, 3, U]
            nothing = np.zeros_like(passed[:, 0])
            back = (nothing, passed[:, 1]) if rows.split else (passed[:, 1], nothing)
            others = rows.sends[:, None], rows.passes.sum(axis=(1, 2))[:, None]
            mine = np.concatenate((passed[:, 0], *back, passed[:, 2], *others), axis=1)
            columns.append(np.concatenate((mine[: rows.timed], undominated(mine[rows.timed :]))))
            timed.append(np.arange(len(columns[-1])) < rows.timed)
            blocks = rows.rounds @ held[:, :kinds].sum(axis=1)
            scattered.append((blocks.min(), blocks.max()))
        together = np.concatenate(columns)
        return cls(
            units=np.ascontiguousarray(together[:, :-2].T),
            sends=together[:, -2],
            passes=together[:, -1],
            first=np.cumsum([0, *map(len, columns[:-1])]),
            timed=np.concatenate(timed),
            split=np.array([rows.split for rows in found]),
            least=np.array([max(1, int(held[:, :kinds].sum(axis=1).min())) for held in counts]),
            scattered=np.array(scattered),
        )

    def longest(self, times: np.ndarray, send: np.ndarray, host_s: float, *, work_only: bool = False) -> np.ndarray:
        """The longest row of every schedule [A, P] under `times` [4, A, U] of F, BW, B, W and messages of `send` [A]
        seconds; `work_only`: of the rows that go through all passes of a rank."""
        each = np.concatenate((times[0], times[1], np.minimum(times[2], times[1]), times[3]), axis=1)
        seconds = each @ self.units + send[:, None] * self.sends + host_s * self.passes
        if work_only:
            seconds[:, self.timed] = -np.inf
        return np.maximum.reduceat(seconds, self.first, axis=1)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the ranks of P schedules, counted without building them, in R rows.

    A row is one rank's passes, and the forwards and, where gradients go from stage to stage, whole backwards of the
    stages before its first. ``units`` [3 U, R]:
    how often a row goes through F, BW and any backward of each unit; ``passes`` [R]; ``first`` [P] as in
    :class:`Rows`."""

    units: np.ndarray
    passes: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, shapes: Iterable[tuple[Family, int, int, np.ndarray]], count: int, *, chain: bool = True) -> Work:
        """Schedules as (family, ranks, chunks, units [S, U] of the stages) under `count` microbatches; without a
        `chain` no backward waits for another stage's."""
        columns = []
        for family, num_ranks, vpp, units in shapes:
            ranks = family.rank_of_stage(num_ranks, vpp)
            if ranks is None:
                columns.append(np.zeros((1, 3 * units.shape[1] + 1)))
                continue
            held = np.array(ranks) == np.arange(num_ranks)[:, None]  # [ranks, S]
            before = np.arange(len(ranks)) < held.argmax(axis=1)[:, None]
            forward = count * held + before
            back = count * held if family.splits_backward or not chain else forward
            nothing = np.zeros((num_ranks, units.shape[1]))
            ways = (nothing, back @ units) if family.splits_backward else (back @ units, nothing)
            passes = (forward + back).sum(axis=1)[:, None]
            columns.append(undominated(np.concatenate((forward @ units, *ways, passes), axis=1)))
        together = np.concatenate(columns)
        return cls(
            units=np.ascontiguousarray(together[:, :-1].T),
            passes=together[:, -1],
            first=np.cumsum([0, *map(len, columns[:-1])]),
        )

    def longest(self, times: np.ndarray, host_s: float) -> np.ndarray:
        """Seconds [A, P] of the busiest rank under `times` [4, A, U] of F, BW, B, W."""
        each = np.concatenate((times[0], times[1], np.minimum(times[1], times[2] + times[3])), axis=1)
        return np.maximum.reduceat(each @ self.units + host_s * self.passes, self.first, axis=1)


def undominated(rows: np.ndarray) -> np.ndarray:
    """Return the rows [R, ...] that no other row dominates, of equal ones the first."""
    no_more = (rows[:, None] <= rows[None]).all(axis=2)  # [R, R]: i is nowhere above j
    equal_first = no_more & no_more.T & (np.arange(len(rows))[:, None] <= np.arange(len(rows)))
    return rows[~(no_more & ~equal_first).any(axis=1)]


def paths(
    actions: Actions,
    forward: np.ndarray,
    backward: np.ndarray,
    weight: np.ndarray,
    send: float,
    *,
    chain: bool = True,
) -> Paths:
    """The rows of a schedule under typical seconds of each stage [S]; `backward` is the input gradient's. Without a
    `chain` no backward waits for another stage's."""
    split = bool(np.any(actions.kind == W))
    start, end = in_order_times(actions, forward, backward, weight, send)
    longest, sent = _longest(actions, start, end, send)
    held = np.zeros((actions.num_ranks, actions.num_stages))
    for stage, ranks in enumerate(actions.stage_ranks):
        held[list(ranks), stage] = 1.0
    work, crossed = _work(actions, held, split or not chain)
    found = Paths(
        passes=np.concatenate([longest[None], work]),
        sends=np.concatenate([[sent], crossed]),
        in_flight=np.array([peak_in_flight(actions, share) for share in (KEPT if split else KEPT[:1])]),
        held=held,
        split=split,
        rounds=_rounds(actions),
        stage_ranks=actions.stage_ranks,
    )
    return found if chain else found.timeless()


def _rounds(actions: Actions) -> np.ndarray:
    begins = rounds(actions)[0]
    shape = actions.num_ranks, actions.num_stages
    where = actions.rank_of()[begins] * actions.num_stages + actions.stage[begins]
    return np.bincount(where, minlength=shape[0] * shape[1]).reshape(shape).astype(float)


def _work(actions: Actions, held: np.ndarray, there: bool) -> tuple[np.ndarray, np.ndarray]:
    """For every rank: forwards down to its first stage, its own actions, full backwards up from it unless only the way
    `there` is known to be waited for."""
    num_ranks, num_stages = held.shape
    rank = actions.rank_of()
    kind = np.where(actions.kind == BW, B, actions.kind)
    where = (rank * 3 + kind) * num_stages + actions.stage
    rows = np.bincount(where, minlength=num_ranks * 3 * num_stages).reshape(num_ranks, 3, num_stages).astype(float)
    if any(len(r) > 1 for r in actions.stage_ranks):
        return rows, np.zeros(num_ranks)  # microbatches come from both ends
    first = held.argmax(axis=1)
    before = np.arange(num_stages) < first[:, None]
    owners = np.array([ranks[0] for ranks in actions.stage_ranks])
    crossings = np.append(0, np.cumsum(owners[1:] != owners[:-1]))[first]
    rows[:, F] += before
    if not there:
        rows[:, B] += before
    return rows, crossings * (1.0 if there else 2.0)


def _longest(actions: Actions, start: np.ndarray, end: np.ndarray, lag: float) -> tuple[np.ndarray, int]:
    """Counts [3, S] of the passes on the path that ends last, followed back, and the messages on it."""
    counts, sends = np.zeros((3, actions.num_stages)), np.zeros(1, np.int64)
    _follow(
        actions.rank_ptr,
        actions.kind,
        actions.stage,
        actions.microbatch,
        end,
        actions.num_stages,
        actions.num_microbatches,
        actions.num_ranks,
        len(actions),
        int(np.argmax(end)),
        lag,
        np.full(3 * actions.num_stages * actions.num_microbatches, -1),
        np.empty(len(actions), np.int64),
        counts.ravel(),
        sends,
    )
    return counts, int(sends[0])


@native("n")
def _follow(
    rank_ptr: Int64s,
    kind: Bytes,
    stage: Int32s,
    microbatch: Int32s,
    end: Float64s,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int,
    n: int,
    last: int,
    lag: float,
    at: OutInt64s,
    rank: OutInt64s,
    counts: OutFloat64s,
    sends: OutInt64s,
) -> None:
    """Write ``counts`` [3, S] and ``sends`` [1] of the path that ends with action ``last``; ``at`` [3, S, microbatches]
    is -1 before, ``rank`` [n] is room to work in."""
    whole = num_stages * num_microbatches
    for r in range(num_ranks):
        for j in range(rank_ptr[r], rank_ptr[r + 1]):
            rank[j] = r
            way = B if kind[j] == BW else kind[j]
            at[way * whole + stage[j] * num_microbatches + microbatch[j]] = j
    i = last
    while i >= 0:
        s, m, k = stage[i], microbatch[i], kind[i]
        way = B if k == BW else k
        counts[way * num_stages + s] += 1
        best, latest, sent = -1, -1.0, 0
        if i > rank_ptr[rank[i]]:
            best, latest = i - 1, end[i - 1]
        here = s * num_microbatches + m
        for choice in range(2):
            j = -1
            if k == F and choice == 0 and s > 0:
                j = at[here - num_microbatches]
            elif k == W and choice == 0:
                j = at[whole + here]
            elif k in (B, BW):
                if choice == 0:
                    j = at[here]
                elif s + 1 < num_stages:
                    j = at[whole + here + num_microbatches]
            if j >= 0:
                crosses = 1 if rank[j] != rank[i] else 0
                if end[j] + crosses * lag > latest:
                    best, latest, sent = j, end[j] + crosses * lag, crosses
        sends[0] += sent
        i = best
