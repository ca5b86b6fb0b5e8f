"""Fit a framework's memory constants to measured peaks: copies of its activations, and what its allocator cannot use.

Two constants on a grid, against the mean absolute log error with every model's rows weighing the same: the copies, and
either the allocator's slack or the launch-ahead of the host in layers. Peaks are compared with the kind a row
states: tensors for ``allocated``, tensors and what else is reserved for ``reserved``. A job that ran out of memory
needed more than there is, and counts by how much less is predicted: without those, jobs near the limit would be the
ones that happened to need little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import msgspec
import numpy as np

from meshwright.answer.rank_memory import OVERHEAD, dynamic_copies, lead, rank_memory
from meshwright.cost import Costs, Framework
from meshwright.errors import MeshwrightError
from meshwright.plan import check
from meshwright.simulate.step import simulate
from meshwright.validate.cases import case
from meshwright.validate.steps import logging, room
from meshwright.validate.tables import find, number, rows

COPIES = tuple(round(1.0 + 0.1 * i, 1) for i in range(21))
AHEAD = tuple(2.0 * i for i in range(1, 13))
#: The allocator's slack where the host's launch-ahead is fitted, since a profile has six fitted constants at most, and
#: the least there is: every allocator hands out blocks that are larger than what was asked for.
USUAL_SLACK = Framework(name="").allocator_slack
SLACK = tuple(round(USUAL_SLACK + 0.01 * i, 2) for i in range(28))
MIN_ROWS = 20


class Peak(msgspec.Struct, frozen=True):
    """One measured peak, with the predicted parts of each rank's memory: (constant bytes, bytes that copies multiply,
    bytes in flight for each layer of the host's launch-ahead, layers).

    ``room`` is the most bytes that can be reserved, ``full`` those at which the allocator starts to give back.
    ``least``: the job ran out of memory, so ``num_bytes`` is the least it needed."""

    ranks: tuple[tuple[float, float, float, float], ...]
    num_bytes: float
    reserved: bool
    room: float
    full: float
    group: str
    least: bool = False


class PeakArrays(msgspec.Struct, frozen=True):
    """P peaks of at most R ranks as arrays: the fields of :class:`Peak`, one array each.

    ``ranks`` is [P, R, 4]: constant bytes, bytes that copies multiply, bytes in flight for each layer of launch-ahead,
    and layers, all 0 where a peak has fewer than R ranks. The others are [P]; by ``weight`` each model counts alike.
    """

    ranks: np.ndarray
    num_bytes: np.ndarray
    reserved: np.ndarray
    room: np.ndarray
    full: np.ndarray
    least: np.ndarray
    weight: np.ndarray


class MemoryConstants(msgspec.Struct, frozen=True):
    """The constants of the memory model, fitted to measured peaks."""

    activation_copies: float
    allocator_slack: float
    ahead_layers: float


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    """A framework's memory constants, with mean absolute errors in sample and with each model left out."""

    framework: str
    activation_copies: float
    allocator_slack: float | None
    ahead_layers: float = 0.0
    rows: int
    in_sample: float
    left_out: float | None


def fit_all(folder: Path, costs_of: Callable[[Framework], Costs]) -> Iterator[MemoryFit]:
    """Memory constants of every framework with enough measured peaks."""
    found: dict[str, list[Peak]] = {}
    for name, peak in _peaks(folder, costs_of):
        found.setdefault(name, []).append(peak)
    for name, peaks in sorted(found.items()):
        seen = [p for p in peaks if not p.least]
        if len(seen) < MIN_ROWS:
            continue
        at = _best(peaks)
        groups = sorted({p.group for p in seen})
        errors = []
        for group in groups if len(groups) > 1 else ():
            held = [p for p in seen if p.group == group]
            errors += list(_errors(held, _best([p for p in peaks if p.group != group])))
        yield MemoryFit(
            framework=name,
            activation_copies=at.activation_copies,
            allocator_slack=at.allocator_slack if any(p.reserved for p in seen) else None,
            ahead_layers=at.ahead_layers,
            rows=len(seen),
            in_sample=float(_errors(seen, at).mean()),
            left_out=float(np.mean(errors)) if errors else None,
        )


def _peaks(folder: Path, costs_of: Callable[[Framework], Costs]) -> Iterator[tuple[str, Peak]]:
    path = find(folder, "training_steps")
    shared: dict[str, Costs] = {}
    for row in rows(path, "training_steps") if path is not None else ():
        size, ended = number(row, "peak_memory_gb"), row["outcome"] == "oom"
        if not ended and (size is None or row["memory_kind"] not in ("reserved", "allocated")):
            continue
        try:
            asked = case(row)
        except MeshwrightError:
            continue
        if {"framework", "recompute"} & set(asked.assumed) or check(
            asked.plan, asked.model, asked.cluster, asked.train
        ):
            continue
        plain = msgspec.structs.replace(asked.framework, activation_copies=2.0, allocator_slack=0.0, ahead_layers=0.0)
        costs = shared.setdefault(plain.name, costs_of(plain))
        run = simulate(asked.plan, asked.model, asked.cluster, asked.train, costs)
        ranks = []
        everyone = rank_memory(run, costs)
        whose = asked.framework.defaults.logs
        found = lead(run.lowered)
        leads = {rank.rank: found[i % len(found)] for i, rank in enumerate(everyone)}
        # which rank is the fullest depends on the constants, so all of them are kept where that is the one
        for rank in everyone if whose == "fullest" or ended else logging(everyone, whose):
            copied = sum(rank.alive.get(c, 0.0) / 2.0 for c, n in dynamic_copies(costs, asked.plan).items() if n == 2.0)
            tensors = sum(v for c, v in rank.alive.items() if c not in OVERHEAD)
            each, layers = leads[rank.rank]
            ranks.append((tensors - 2.0 * copied, copied, 0.0 if ended else each, layers))
        reserved, most = row["memory_kind"] == "reserved", room(asked)
        full = most - everyone[0].alive["communication buffers"]
        if ended:
            yield plain.name, Peak(tuple(ranks), full, True, inf, full, row["model"], least=True)
        else:
            yield plain.name, Peak(tuple(ranks), size * 1e9, reserved, most, full, row["model"])


def _known(peaks: list[Peak]) -> PeakArrays:
    counts: dict[str, int] = {}
    for p in peaks:
        counts[p.group] = counts.get(p.group, 0) + 1
    ranks = np.zeros((len(peaks), max(len(p.ranks) for p in peaks), 4))
    for i, p in enumerate(peaks):
        ranks[i, : len(p.ranks)] = p.ranks
    fields = ("num_bytes", "reserved", "room", "full", "least")
    columns = (np.array([getattr(p, field) for p in peaks]) for field in fields)
    return PeakArrays(ranks, *columns, np.array([1 / counts[p.group] for p in peaks]))


def _best(peaks: list[Peak]) -> MemoryConstants:
    """Return the constants with the least error; slack and launch-ahead only where reserved bytes were measured."""
    known = _known(peaks)
    tried = [MemoryConstants(copies, 0.0, 0.0) for copies in COPIES]
    if (known.reserved & ~known.least).any():
        tried = [MemoryConstants(copies, slack, 0.0) for copies in COPIES for slack in SLACK]
        if known.ranks[:, :, 2].any():
            tried += [MemoryConstants(copies, USUAL_SLACK, ahead) for copies in COPIES for ahead in AHEAD]
    return min(tried, key=lambda at: float((_off(known, at) * known.weight).sum()))


def _off(known: PeakArrays, at: MemoryConstants) -> np.ndarray:
    """Absolute log errors [P]; none where more is predicted than the least that was needed."""
    found = np.log(_predicted(known, at) / known.num_bytes)
    return np.where(known.least, np.maximum(0.0, -found), np.abs(found))


def _predicted(known: PeakArrays, at: MemoryConstants) -> np.ndarray:
    """Bytes of every peak [P], of the fullest of its ranks."""
    constant, copied, each, layers = np.moveaxis(known.ranks, 2, 0)
    tensors = constant + at.activation_copies * copied
    slack = at.allocator_slack * known.reserved[:, None]
    held = np.maximum(tensors, np.minimum(tensors * (1 + slack), known.room[:, None]))
    ahead = each * np.minimum(at.ahead_layers, layers) * known.reserved[:, None]
    return (held + np.maximum(0.0, np.minimum(ahead, known.full[:, None] - held))).max(axis=1)


def _errors(peaks: list[Peak], at: MemoryConstants) -> np.ndarray:
    known = _known(peaks)
    return np.abs(_predicted(known, at) / known.num_bytes - 1)


def report(fits: list[MemoryFit]) -> list[str]:
    """One line a framework."""
    return [
        f"{f.framework}: {f.rows} peaks; in sample {f.in_sample:.1%}, "
        + ("no second model to leave out" if f.left_out is None else f"left out {f.left_out:.1%}")
        + f"; activation_copies {f.activation_copies:g}"
        + (f", allocator_slack {f.allocator_slack:g}" if f.allocator_slack is not None else "")
        + (f", ahead_layers {f.ahead_layers:g}" if f.ahead_layers else "")
        for f in fits
    ]
