"""The report of a fit of the network: errors on groups held out, in sample, and on devices left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import floor, log10
from typing import NamedTuple

import numpy as np

from meshwright.calibrate.network.rows import FLAGS, Series
from meshwright.cost.fabric import FabricProfile, Fabrics
from meshwright.cost.network import Network
from meshwright.work import Collective


class Score(NamedTuple):
    """Errors of a class of rows, as fractions; `coverage80`: rows inside the 80% interval."""

    rows: int
    median_ape: float
    p90_ape: float
    bias: float
    coverage80: float


class Predicted(NamedTuple):
    """One row: its series, bytes, measured and predicted seconds, and the prediction's relative spread."""

    series: Series
    num_bytes: float
    measured_s: float
    predicted_s: float
    sigma: float


class FitReport(NamedTuple):
    """Errors with the accuracy that counts first: groups held out, then in sample, then each device left out."""

    held_out: list[Predicted]
    in_sample: list[Predicted]
    device_out: list[Predicted]
    profiles: tuple[FabricProfile, ...]

    def text(self) -> str:
        parts = [
            ("groups held out", self.held_out),
            ("in sample", self.in_sample),
            ("each device left out", self.device_out),
        ]
        lines = ["collectives: median |error|, 90th percentile, bias, share inside the 80% interval"]
        for title, rows in parts:
            if rows:
                lines += ["", *_table(title, rows, lambda r: "all")]
        lines += ["", *_table("groups held out, by source, device, operation", self.held_out, _class)]
        lines += ["", *_table("in sample, by fitted size in bytes", self.in_sample, _decade)]
        lines += ["", *_table("each device left out, by device", self.device_out, lambda r: r.series.hardware)]
        return "\n".join(lines)


def _class(row: Predicted) -> str:
    return f"{row.series.source}/{row.series.hardware}/{row.series.op}/{row.series.group.size}"


def _decade(row: Predicted) -> str:
    return f"1e{floor(log10(row.num_bytes))}"


def _table(title: str, rows: list[Predicted], by: Callable[[Predicted], str]) -> list[str]:
    lines = [title]
    for name, score in scores(rows, by).items():
        lines.append(
            f"  {name:<58} {score.rows:>6} {score.median_ape:7.1%} {score.p90_ape:7.1%} "
            f"{score.bias:+7.1%} {score.coverage80:6.0%}"
        )
    return lines


def scores(rows: Iterable[Predicted], by: Callable[[Predicted], str]) -> dict[str, Score]:
    """Errors of each class of rows."""
    classes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        classes[by(row)].append((row.predicted_s / row.measured_s, row.sigma))
    return {name: _score(np.array(found)) for name, found in sorted(classes.items())}


def _score(found: np.ndarray) -> Score:
    ratio, sigma = found[:, 0], found[:, 1]
    error = np.abs(ratio - 1)
    inside = np.abs(np.log(ratio)) <= 1.2816 * sigma
    return Score(len(ratio), *map(float, (np.median(error), np.quantile(error, 0.9), ratio.mean() - 1, inside.mean())))


def predict(profiles: tuple[FabricProfile, ...], series: Iterable[Series]) -> list[Predicted]:
    """Every row of some series, known faults of the measured machine left out."""
    networks: dict[tuple[str, bool], Network] = {}
    fabrics = Fabrics(profiles)
    found = []
    for one in series:
        if any(flag in one.flag for flag in FLAGS):
            continue
        key = one.library, one.eager
        network = networks.setdefault(key, Network(fabrics, library=one.library, eager=one.eager))
        for num_bytes, seconds in zip(one.num_bytes, one.seconds):
            guess = network(Collective(op=one.op, num_bytes=num_bytes, group=one.group), one.device)
            found.append(Predicted(one, num_bytes, seconds, guess.seconds, guess.sigma))
    return found
