"""Scoring: the only place that reads what was measured.

Definitions. Error is |predicted / measured - 1|; bias the mean of predicted / measured - 1. A group is the rows of
one source, hardware, framework, model, phase, dtype, device count, sequence length and global batch with at least
five timed rows; its regret is the measured time of the row predicted fastest over the best measured, minus one;
Spearman is the rank correlation in a group, averaged over groups. Memory is compared with the kind a row states.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from meshwright.validate.steps import StepAnswer
from meshwright.validate.tables import number

#: Flags of rows whose machine or software is known to have been at fault, with the reason. They are predicted and
#: printed apart; their time is not scored with the rest, their memory and OOM labels are.
FAULTS: dict[str, str] = {
    "pp_before_fix": "pipeline code later fixed by its authors; matched plans ran 2.6 to 40 times faster after it",
    "degraded_intranode_bw": "the job's own NVLink all-reduce reached a tenth of its bandwidth",
    "slow_outlier": "below 0.4 times the throughput of the same plan at a smaller microbatch",
    "suspect_slow_network": "between nodes 1 to 5 GB/s on a 100 GB/s network: sockets instead of RDMA",
    "slow_or_unstated_fabric": "network between nodes not stated or far below its rate",
}
GROUP = (
    "source",
    "hardware",
    "framework",
    "model",
    "phase",
    "dtype",
    "num_gpus",
    "seq_len",
    "global_batch_seqs",
)
MIN_GROUP = 5


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One row's prediction beside its measurement; None where the row measured nothing of the kind."""

    key: str
    group: tuple[str, ...]
    faulty: bool
    time: tuple[float, float] | None = None
    trivial: float | None = None
    inside: bool | None = None
    memory: tuple[float, float] | None = None
    oom: tuple[bool, bool] | None = None


def faulty(row: dict[str, str], column: str = "flags") -> bool:
    return any(flag in FAULTS for flag in (row.get(column) or "").split(";"))


def score_step(row: dict[str, str], answer: StepAnswer) -> Scored:
    """A training step's row against its answer."""
    measured, peak = number(row, "step_time_s"), number(row, "peak_memory_gb")
    timed = measured is not None and row["outcome"] == "ok" and "no_time_measured" not in row["flags"]
    kinds = {"allocated": answer.allocated_bytes, "reserved": answer.reserved_bytes}
    held = kinds.get(row["memory_kind"])
    return Scored(
        key=f"{row['source']}/{row['hardware']}",
        group=tuple(row[c] for c in GROUP),
        faulty=faulty(row),
        time=(measured, answer.step_s) if timed else None,
        trivial=answer.trivial_s if timed else None,
        inside=answer.low_s <= measured <= answer.high_s if timed else None,
        memory=(peak * 1e9, held) if peak and held is not None else None,
        oom=(row["outcome"] == "oom", not answer.fits),
    )


def summary(scored: Iterable[Scored]) -> dict[str, dict[str, float]]:
    """Metrics by ``source/hardware``, faulty rows under a key of their own, and over ``all``."""
    by_key: dict[str, list[Scored]] = {}
    everything: list[Scored] = []
    for s in scored:
        everything.append(s)
        by_key.setdefault(f"{s.key}/flagged" if s.faulty else s.key, []).append(s)
    out = {key: metrics(rows) for key, rows in sorted(by_key.items())}
    for key, rows in by_key.items():
        if key.endswith("/flagged"):
            main = [*by_key.get(key.removesuffix("/flagged"), []), *(_without_time(r) for r in rows)]
            out[key.removesuffix("/flagged")] = metrics(main)
    out["all"] = metrics([_without_time(s) if s.faulty else s for s in everything])
    return dict(sorted(out.items(), key=lambda item: (item[0] == "all", item[0])))


def _without_time(s: Scored) -> Scored:
    return msgspec.structs.replace(s, time=None, trivial=None, inside=None)


def metrics(rows: list[Scored]) -> dict[str, float]:
    """Every metric that applies to these rows; fractions, not percent."""
    out: dict[str, float] = {"rows": len(rows)}
    pairs = np.array([s.time for s in rows if s.time is not None]).reshape(-1, 2)
    if len(pairs):
        ratio = pairs[:, 1] / pairs[:, 0] - 1
        out |= {
            "timed_rows": len(pairs),
            "mean_ape": float(np.abs(ratio).mean()),
            "median_ape": float(np.median(np.abs(ratio))),
            "p90_ape": float(np.quantile(np.abs(ratio), 0.9)),
            "bias": float(ratio.mean()),
        }
        plain = np.array([s.trivial for s in rows if s.time is not None and s.trivial is not None])
        if len(plain) == len(pairs):
            out["trivial_mean_ape"] = float(np.abs(plain / pairs[:, 0] - 1).mean())
        covered = [s.inside for s in rows if s.inside is not None]
        if covered:
            out["coverage80"] = float(np.mean(covered))
        out |= _ranking(rows)
    held = np.array([s.memory for s in rows if s.memory is not None]).reshape(-1, 2)
    if len(held):
        out["memory_rows"] = len(held)
        out["memory_mean_ape"] = float(np.abs(held[:, 1] / held[:, 0] - 1).mean())
        out["memory_bias"] = float((held[:, 1] / held[:, 0] - 1).mean())
    labels = np.array([s.oom for s in rows if s.oom is not None], bool).reshape(-1, 2)
    if len(labels):
        ran_out = labels[:, 0]
        out["oom_rows"] = int(ran_out.sum())
        out["oom_accuracy"] = float((labels[:, 0] == labels[:, 1]).mean())
        if ran_out.any():
            out["oom_recall"] = float(labels[ran_out, 1].mean())
    return out


def _ranking(rows: list[Scored]) -> dict[str, float]:
    """Regret and rank correlation within groups."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for s in rows:
        if s.time is not None and s.group:
            groups.setdefault(s.group, []).append(s.time)
    kept = [np.array(pairs) for pairs in groups.values() if len(pairs) >= MIN_GROUP]
    if not kept:
        return {}
    regrets = [float(g[np.argmin(g[:, 1]), 0] / g[:, 0].min() - 1) for g in kept]
    correlations = [spearman(g[:, 0], g[:, 1]) for g in kept]
    return {
        "groups": len(kept),
        "regret_mean": float(np.mean(regrets)),
        "regret_median": float(np.median(regrets)),
        "regret_p90": float(np.quantile(regrets, 0.9)),
        "spearman": float(np.mean(correlations)),
    }


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
