"""Scoring: predictions against what was measured, which nothing but this module and ``measured.py`` reads.

Definitions. Error is |predicted / measured - 1|; bias the mean of predicted / measured - 1. A group is the rows of
one source, hardware, framework, model, phase, dtype, device count, sequence length and global batch with at least
five timed rows; its regret is the measured time of the row predicted fastest over the best measured, minus one;
Spearman is the rank correlation in a group, averaged over groups. Memory is compared with the kind a row states.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp

import msgspec
import numpy as np

from meshwright.validate.faults import faulty
from meshwright.validate.measured import MeasuredStep
from meshwright.validate.ops import OpAnswer
from meshwright.validate.steps import StepAnswer
from meshwright.validate.tables import number

GROUP = ("source", "hardware", "framework", "model", "phase", "dtype", "num_gpus", "seq_len", "global_batch_seqs")
MIN_GROUP = 5
#: The memory kinds that are predicted; a peak of another kind is not scored.
KINDS = ("allocated", "reserved")
#: Standard deviations of a normal from its middle to the ends of its central 80%.
REACH80 = 1.2815515655446004


class Scored(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row's prediction beside its measurement; None where the row measured nothing of the kind. ``at``: the
    values of its table's variables, ``what``: the plan or shape it ran; both for residuals. ``p_fit`` and
    ``predicted_s`` are said of rows that ran out of memory too. ``trivial`` is the plain formula for a step,
    ``roofline`` the ideal one for a kernel; ``width``: the interval's high over its low end."""

    id: str
    key: str
    group: tuple[str, ...] = ()
    faulty: bool = False
    time: tuple[float, float] | None = None
    trivial: float | None = None
    roofline: float | None = None
    inside: bool | None = None
    width: float | None = None
    memory: tuple[float, float] | None = None
    memory_kind: str = ""
    oom: tuple[bool, bool] | None = None
    p_fit: float = 1.0
    predicted_s: float = 0.0
    at: tuple[float | str, ...] = ()
    what: str = ""

    def without_time(self) -> Scored:
        """The row with its memory and labels only."""
        return msgspec.structs.replace(self, time=None, trivial=None, roofline=None, inside=None, width=None)


class Unsupported(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row that is not predicted, and why."""

    id: str
    key: str
    faulty: bool
    reason: str


def score_step(
    row: dict[str, str], found: MeasuredStep, answer: StepAnswer, at: tuple[float | str, ...] = ()
) -> Scored:
    """A training step's row against its answer."""
    timed = found.seconds is not None
    held = {"allocated": answer.allocated_bytes, "reserved": answer.reserved_bytes}.get(found.memory_kind)
    return Scored(
        id=row["id"],
        key=f"{row['source']}/{row['hardware']}",
        group=tuple(_value(row, column) for column in GROUP),
        faulty=faulty(row),
        time=(found.seconds, answer.step_s) if timed else None,
        trivial=answer.trivial_s if timed else None,
        inside=answer.low_s <= found.seconds <= answer.high_s if timed else None,
        width=answer.high_s / answer.low_s if timed else None,
        memory=(found.peak_bytes, held) if found.peak_bytes and held is not None else None,
        memory_kind=found.memory_kind,
        oom=None if found.oom is None else (found.oom, not answer.fits),
        p_fit=answer.p_fit,
        predicted_s=answer.step_s,
        at=at,
        what=answer.plan,
    )


def score_op(row_id: str, key: str, answer: OpAnswer, faulty: bool) -> Scored:
    """A kernel's or collective's row against its answer."""
    low, high = interval(answer.seconds, answer.sigma)
    return Scored(
        id=row_id,
        key=key,
        faulty=faulty,
        time=(answer.measured, answer.seconds),
        roofline=answer.roofline,
        inside=low <= answer.measured <= high,
        at=answer.at,
        what=answer.shape,
    )


def _value(row: dict[str, str], column: str) -> str:
    """A cell as groups compare it: ``32`` and ``32.0`` are equal."""
    value = number(row, column)
    return row[column] if value is None else f"{value:g}"


def interval(seconds: float, sigma: float) -> tuple[float, float]:
    """The central 80% of a log-normal around a price."""
    return seconds * exp(-REACH80 * sigma), seconds * exp(REACH80 * sigma)


def summary(scored: Iterable[Scored], unsupported: Iterable[Unsupported] = ()) -> dict[str, dict[str, float]]:
    """Metrics by ``source/hardware``, faulty rows under ``source/hardware/flagged`` too, and over ``all``."""
    rows: dict[str, list[Scored]] = {}
    lost: dict[str, int] = {}
    everything: list[Scored] = []
    for s in scored:
        if s.faulty:
            rows.setdefault(f"{s.key}/flagged", []).append(s)
            s = s.without_time()
        rows.setdefault(s.key, []).append(s)
        everything.append(s)
    for u in unsupported:
        for key in (u.key, "all", *([f"{u.key}/flagged"] if u.faulty else ())):
            lost[key] = lost.get(key, 0) + 1
    out = {key: metrics(rows.get(key, []), lost.get(key, 0)) for key in sorted((rows.keys() | lost.keys()) - {"all"})}
    return out | {"all": metrics(everything, lost.get("all", 0))}


def metrics(rows: list[Scored], unsupported: int = 0) -> dict[str, float]:
    """Every metric that applies to these rows; fractions, not percent. ``rows`` are those predicted."""
    return {"rows": len(rows), **_times(rows), **_memory(rows), **_labels(rows), "unsupported": unsupported}


def _times(rows: list[Scored]) -> dict[str, float]:
    timed = [s for s in rows if s.time is not None]
    if not timed:
        return {}
    pairs = np.array([s.time for s in timed])
    ratio = pairs[:, 1] / pairs[:, 0] - 1
    out = {
        "timed_rows": len(timed),
        "mean_ape": float(np.abs(ratio).mean()),
        "median_ape": float(np.median(np.abs(ratio))),
        "p90_ape": float(np.quantile(np.abs(ratio), 0.9)),
        "bias": float(ratio.mean()),
    }
    if plain := [abs(s.trivial / s.time[0] - 1) for s in timed if s.trivial is not None]:
        out["trivial_mean_ape"] = float(np.mean(plain))
    if ideal := [abs(s.roofline / s.time[0] - 1) for s in timed if s.roofline is not None]:
        out |= {"roofline_mean_ape": float(np.mean(ideal)), "roofline_median_ape": float(np.median(ideal))}
    covered = [s.inside for s in timed if s.inside is not None]
    if covered:
        out["coverage80"] = float(np.mean(covered))
    if widths := [s.width for s in timed if s.width is not None]:
        out["width_median"] = float(np.median(widths))
    return out | _ranking(timed)


def _memory(rows: list[Scored]) -> dict[str, float]:
    """Errors of peak memory: of all rows that state a kind, and of each kind."""
    out: dict[str, float] = {}
    held = [s for s in rows if s.memory is not None]
    for name, kinds in (("memory", KINDS), *((f"memory_{kind}", (kind,)) for kind in KINDS)):
        pairs = np.array([s.memory for s in held if s.memory_kind in kinds]).reshape(-1, 2)
        if len(pairs):
            ratio = pairs[:, 1] / pairs[:, 0] - 1
            out |= {
                f"{name}_rows": len(pairs),
                f"{name}_mean_ape": float(np.abs(ratio).mean()),
                f"{name}_bias": float(ratio.mean()),
            }
    return out


def _labels(rows: list[Scored]) -> dict[str, float]:
    """Whether rows that fit were told from rows that ran out of memory."""
    labels = np.array([s.oom for s in rows if s.oom is not None], bool).reshape(-1, 2)
    if not len(labels):
        return {}
    ran_out = labels[:, 0]
    out = {"oom_rows": int(ran_out.sum()), "oom_accuracy": float((labels[:, 0] == labels[:, 1]).mean())}
    if ran_out.any():
        out["oom_recall"] = float(labels[ran_out, 1].mean())
    return out


def _ranking(timed: list[Scored]) -> dict[str, float]:
    """Regret and rank correlation within groups."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for s in timed:
        if s.group:
            groups.setdefault(s.group, []).append(s.time)
    kept = [np.array(pairs) for pairs in groups.values() if len(pairs) >= MIN_GROUP]
    if not kept:
        return {}
    regrets = [regret(g[:, 0], g[:, 1]) for g in kept]
    return {
        "groups": len(kept),
        "regret_mean": float(np.mean(regrets)),
        "regret_median": float(np.median(regrets)),
        "regret_p90": float(np.quantile(regrets, 0.9)),
        "spearman": float(np.mean([spearman(g[:, 0], g[:, 1]) for g in kept])),
    }


def regret(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Measured time of the row predicted fastest over the best measured, minus one; of rows predicted equally fast
    their mean, as any of them might be taken."""
    first = measured[predicted == predicted.min()]
    return float(first.mean() / measured.min() - 1)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, ties given their mean rank; 0 when one side is constant."""
    ra, rb = _ranks(a), _ranks(b)
    sa, sb = ra - ra.mean(), rb - rb.mean()
    scale = float(np.sqrt((sa**2).sum() * (sb**2).sum()))
    return float((sa * sb).sum() / scale) if scale else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, back, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[back]
