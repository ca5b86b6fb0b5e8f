"""How many copies of its activations a framework keeps, and what its allocator leaves unused, from measured peaks.

Two constants on a grid, against the mean absolute log error with every model's rows weighing the same. Peaks are
compared with the kind a row states: tensors for ``allocated``, tensors and slack for ``reserved``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from meshwright.cost import Costs, Framework
from meshwright.errors import MeshwrightError
from meshwright.plan import check
from meshwright.predict import OVERHEAD, dynamic_copies, rank_memory, simulate
from meshwright.validate.cases import case
from meshwright.validate.steps import logging, room
from meshwright.validate.tables import find, number, rows

COPIES = tuple(round(1.0 + 0.1 * i, 1) for i in range(21))
SLACK = tuple(round(0.01 * i, 2) for i in range(21))
MIN_ROWS = 20


class Peak(msgspec.Struct, frozen=True):
    """One measured peak with what is predicted for each rank: (constant bytes, bytes that copies multiply); ``room`` is
    what can be reserved at most."""

    ranks: tuple[tuple[float, float], ...]
    num_bytes: float
    reserved: bool
    room: float
    group: str


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    """A framework's memory constants, with mean absolute errors in sample and with each model left out."""

    framework: str
    activation_copies: float
    allocator_slack: float | None
    rows: int
    in_sample: float
    left_out: float | None


def fit_all(folder: Path, costs_of: Callable[[Framework], Costs]) -> Iterator[MemoryFit]:
    """Memory constants of every framework with enough measured peaks."""
    found: dict[str, list[Peak]] = {}
    for name, peak in _peaks(folder, costs_of):
        found.setdefault(name, []).append(peak)
    for name, peaks in sorted(found.items()):
        if len(peaks) < MIN_ROWS:
            continue
        copies, slack = _best(peaks)
        groups = sorted({p.group for p in peaks})
        errors = []
        for group in groups if len(groups) > 1 else ():
            held = [p for p in peaks if p.group == group]
            errors += list(_errors(held, *_best([p for p in peaks if p.group != group])))
        yield MemoryFit(
            framework=name,
            activation_copies=copies,
            allocator_slack=slack if any(p.reserved for p in peaks) else None,
            rows=len(peaks),
            in_sample=float(_errors(peaks, copies, slack).mean()),
            left_out=float(np.mean(errors)) if errors else None,
        )


def _peaks(folder: Path, costs_of: Callable[[Framework], Costs]) -> Iterator[tuple[str, Peak]]:
    path = find(folder, "training_steps")
    shared: dict[str, Costs] = {}
    for row in rows(path, "training_steps") if path is not None else ():
        size = number(row, "peak_memory_gb")
        if size is None or row["memory_kind"] not in ("reserved", "allocated"):
            continue
        try:
            asked = case(row)
        except MeshwrightError:
            continue
        if "recompute" in asked.assumed or check(asked.plan, asked.model, asked.cluster, asked.train):
            continue
        plain = msgspec.structs.replace(asked.framework, activation_copies=2.0, allocator_slack=0.0)
        costs = shared.setdefault(plain.name, costs_of(plain))
        run = simulate(asked.plan, asked.model, asked.cluster, asked.train, costs)
        ranks = []
        everyone = rank_memory(run, costs, asked.plan)
        whose = asked.framework.defaults.logs
        # which rank is the fullest depends on the constants, so all of them are kept where that is the one
        for rank in everyone if whose == "fullest" else logging(everyone, whose):
            copied = sum(rank.alive.get(c, 0.0) / 2.0 for c, n in dynamic_copies(costs, asked.plan).items() if n == 2.0)
            tensors = sum(v for c, v in rank.alive.items() if c not in OVERHEAD)
            ranks.append((tensors - 2.0 * copied, copied))
        reserved = row["memory_kind"] == "reserved"
        yield plain.name, Peak(tuple(ranks), size * 1e9, reserved, room(asked), row["model"])


def _best(peaks: list[Peak]) -> tuple[float, float]:
    """(copies, slack) with the least error; slack only where reserved bytes were measured."""
    counts: dict[str, int] = {}
    for p in peaks:
        counts[p.group] = counts.get(p.group, 0) + 1
    weight = np.array([1 / counts[p.group] for p in peaks])
    slacks = SLACK if any(p.reserved for p in peaks) else (0.0,)
    scored = [
        (float((np.abs(np.log(_predicted(peaks, copies, slack) / _measured(peaks))) * weight).sum()), copies, slack)
        for copies in COPIES
        for slack in slacks
    ]
    return min(scored)[1:]


def _predicted(peaks: list[Peak], copies: float, slack: float) -> np.ndarray:
    tensors = [max(c + copies * d for c, d in p.ranks) for p in peaks]
    return np.array([max(t, min(t * (1 + slack * p.reserved), p.room)) for t, p in zip(tensors, peaks, strict=True)])


def _measured(peaks: list[Peak]) -> np.ndarray:
    return np.array([p.num_bytes for p in peaks])


def _errors(peaks: list[Peak], copies: float, slack: float) -> np.ndarray:
    return np.abs(_predicted(peaks, copies, slack) / _measured(peaks) - 1)


def report(fits: list[MemoryFit]) -> list[str]:
    """One line a framework."""
    return [
        f"{f.framework}: {f.rows} peaks; in sample {f.in_sample:.1%}, "
        + ("no second model to leave out" if f.left_out is None else f"left out {f.left_out:.1%}")
        + f"; activation_copies {f.activation_copies:g}"
        + (f", allocator_slack {f.allocator_slack:g}" if f.allocator_slack is not None else "")
        for f in fits
    ]
