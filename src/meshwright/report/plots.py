"""Plots of predictions against measurements as SVG geometry: scatter on two logarithmic axes, and residuals.

Points are rounded to the plot's grid and drawn once per place, so that a plot has a bounded size however many rows
it stands for; of very many rows an even share is drawn. Medians and bands are always of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log2, log10
from typing import Any

import numpy as np

from meshwright.quantity import big

#: The plotting area in the SVG's own units; labels stand left of it and below.
WIDTH, HEIGHT = 320, 240
#: Residuals are drawn between a quarter and four times what was measured; further ones at the edge.
REACH = 2.0
#: Bins of a variable with many values, and values up to which each has its own.
BINS, FEW = 12, 16


def thin(count: int, most: int) -> np.ndarray:
    """Indices of at most `most` of `count` rows, evenly spread over their order."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).astype(np.int64))


def dots(x: np.ndarray, y: np.ndarray) -> str:
    """Points as one path of round caps; each place of the grid once."""
    places = np.unique(np.stack([np.rint(x), np.rint(HEIGHT - y)], 1).astype(np.int64), axis=0)
    return "".join(f"M{a} {b}h0" for a, b in places.tolist())


def scatter(measured: np.ndarray, predicted: np.ndarray, faulty: np.ndarray, most: int) -> dict[str, Any]:
    """Measured across, predicted up, both in seconds on one logarithmic scale; faulty rows apart."""
    low = floor(min(np.log10(measured).min(), np.log10(predicted).min()) * 2) / 2
    high = max(ceil(max(np.log10(measured).max(), np.log10(predicted).max()) * 2) / 2, low + 0.5)
    chosen = thin(len(measured), most)
    across = (np.log10(measured[chosen]) - low) / (high - low) * WIDTH
    up = (np.log10(predicted[chosen]) - low) / (high - low) * HEIGHT
    bad = faulty[chosen]
    ticks = [((log10(t) - low) / (high - low), _time(t)) for t in _round_times(low, high)]
    near = log10(1.25) / (high - low)
    wide, tall = WIDTH * near, HEIGHT * near
    return {
        "dots": dots(across[~bad], up[~bad]),
        "faulty": dots(across[bad], up[bad]),
        "across": [(round(f * WIDTH, 1), label) for f, label in ticks],
        "up": [(round(HEIGHT - f * HEIGHT, 1), label) for f, label in ticks],
        "near": f"M0 {HEIGHT - tall:.1f}L{WIDTH - wide:.1f} 0M{wide:.1f} {HEIGHT}L{WIDTH} {tall:.1f}",
        "drawn": len(chosen),
        "rows": len(measured),
    }


def _round_times(low: float, high: float) -> list[float]:
    """Powers of ten between two exponents, with twos and fives when there are few."""
    decades = range(floor(low), ceil(high) + 1)
    steps = (1.0,) if high - low > 2.0 else (1.0, 2.0, 5.0)
    found = [k * 10.0**d for d in decades for k in steps if low - 1e-9 <= log10(k) + d <= high + 1e-9]
    return found[:: ceil(len(found) / 5)]


def _time(value: float) -> str:
    scale, unit = (1e6, "us") if value < 0.999e-3 else (1e3, "ms") if value < 0.999 else (1.0, "s")
    return f"{value * scale:g} {unit}"


def residuals(values: Sequence[float | str], ratio: np.ndarray, most: int) -> dict[str, Any] | None:
    """log2 of predicted over measured against one variable; None when that has fewer than two values."""
    known = [i for i, v in enumerate(values) if v != ""]
    if len({values[i] for i in known}) < 2:
        return None
    numeric = all(isinstance(values[i], float) for i in known)
    bins = _numeric_bins(values, known) if numeric else _named_bins(values, known)
    at = _positions(values, known, bins, numeric)
    y = np.clip(np.log2(ratio[known]), -REACH, REACH)
    chosen = thin(len(known), most)
    rows, line, upper, lower = [], [], [], []
    for label, middle, members in bins:
        own = ratio[members]
        low, mid, high = np.quantile(own, [0.1, 0.5, 0.9])
        rows.append((label, len(members), f"{mid - 1:+.1%}", f"{low - 1:+.1%}", f"{high - 1:+.1%}"))
        line.append((middle, _up(mid)))
        upper.append((middle, _up(high)))
        lower.append((middle, _up(low)))
    return {
        "dots": dots(at[chosen], (y[chosen] + REACH) / (2 * REACH) * HEIGHT),
        "line": _points(line),
        "band": _points(upper + lower[::-1]),
        "marks": [(round(x, 1), round(y, 1)) for x, y in line],
        "numeric": numeric,
        "across": _labels([(round(middle, 1), label) for label, middle, _ in bins]),
        "up": [(round(_up(2.0**p), 1), f"{2.0**p:g}x") for p in (-2, -1, 0, 1, 2)],
        "bins": rows,
        "drawn": len(chosen),
        "rows": len(known),
    }


def _up(ratio: float) -> float:
    return HEIGHT - (min(max(log2(max(ratio, 1e-9)), -REACH), REACH) + REACH) / (2 * REACH) * HEIGHT


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _labels(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """As many labels as fit side by side."""
    shown: list[tuple[float, str]] = []
    end = -WIDTH
    for at, label in ticks:
        half = len(label) * 3.2 + 4
        if at - half >= end:
            shown.append((at, label))
            end = at + half
    return shown


def _scale(value: float) -> float:
    return log2(value) if value > 0 else -1.0


def _numeric_bins(values: Sequence, known: list[int]) -> list[tuple[str, float, list[int]]]:
    """(label, position, rows) of each value, or of quantiles when there are many."""
    order = sorted(known, key=lambda i: values[i])
    distinct = sorted({values[i] for i in known})
    low, high = _scale(distinct[0]), _scale(distinct[-1])

    def place(value: float) -> float:
        return WIDTH * (0.04 + 0.92 * (_scale(value) - low) / (high - low))

    if len(distinct) <= FEW:
        return [(_plain(v), place(v), [i for i in order if values[i] == v]) for v in distinct]
    found = []
    for part in np.array_split(np.array(order), BINS):
        middle = values[int(part[len(part) // 2])]
        if found and found[-1][0] == _plain(middle):
            found[-1][2].extend(part.tolist())
        else:
            found.append((_plain(middle), place(middle), part.tolist()))
    return found


def _named_bins(values: Sequence, known: list[int]) -> list[tuple[str, float, list[int]]]:
    names = sorted({str(values[i]) for i in known})
    members: dict[str, list[int]] = {name: [] for name in names}
    for i in known:
        members[str(values[i])].append(i)
    return [(name, WIDTH * (k + 0.5) / len(names), members[name]) for k, name in enumerate(names)]


def _positions(values: Sequence, known: list[int], bins: list, numeric: bool) -> np.ndarray:
    """Where each known row stands: at its value, or beside its name, spread so that rows do not hide each other."""
    if numeric:
        scaled = np.array([_scale(values[i]) for i in known])
        low, high = scaled.min(), scaled.max()
        return WIDTH * (0.04 + 0.92 * (scaled - low) / (high - low))
    place = {name: middle for name, middle, _ in bins}
    width = WIDTH / len(bins) * 0.7
    golden = np.arange(len(known)) * 0.6180339887 % 1.0 - 0.5
    return np.array([place[str(values[i])] for i in known]) + golden * width


def _plain(value: float) -> str:
    return f"{value:g}" if value < 100_000 else big(value)
