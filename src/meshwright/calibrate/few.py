"""A device's curve from a few measured products: which ones to measure, and the rest carried over from known devices.

What CDMPP (Hu et al., 2311.09690) learns with a network is here a regression on the ratio of the device's times to
those that the curves of its relatives predict for it. The shapes to measure are those nearest to the middles of
clusters of shapes (k-means, as CDMPP chooses programs). The log of the ratio is a Gaussian process over the powers of
two of a product's dims (Rasmussen and Williams, 2006, chapter 2): how far it strays is what curves carried to devices
left out strayed (``cost/carried.py``), half of it the same for all products and half of it local; how far single
measurements lie off is what the curve's own rows held out did; to take two or four times that where measurements make
it likelier came out better on some devices left out and worse on more. The mean is added to the curve's table.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.atomic import write_bytes
from meshwright.calibrate.kernels import NORMAL_80, median_ape, p90_ape
from meshwright.calibrate.samples import Sample, samples
from meshwright.cost.bound import KIN, SHAPES, BoundCurve
from meshwright.cost.carried import Spreads
from meshwright.cost.curve import RESIDUAL_UNIT, SIGMA_CLASSES, CurveProfile, Fit
from meshwright.cost.fitted import Fitted
from meshwright.cost.points import point
from meshwright.cost.roofline import supports
from meshwright.errors import MeshwrightError
from meshwright.spec.hardware import Device
from meshwright.work import Gemm

OP = "gemm"
#: Octaves of a product's dims over which ratios are alike: an assumption, and declared as one. Of 2, 4 and 8 the one
#: that measurements make likeliest came out no better on devices left out.
ALIKE_OCTAVES = 4.0
#: Passes of k-means over the shapes.
PASSES = 20
#: Most rows of a table that shapes are chosen among.
MOST_ROWS = 2000
#: Precisions that are asked for, those of them that a device computes in.
ASKED = ("bf16", "fp8", "fp32")
#: Dims of products to choose from: powers of four of rows, and of two of weights, within what was measured elsewhere.
ROWS_OF, WEIGHTS_OF = range(0, 17, 2), range(6, 16)
COLUMNS = ("source", "hardware", "backend", "backend_version", "kernel", "dtype", "pass", "batch", "m", "n", "k")


class Learned(NamedTuple):
    """A device's curve: the ``fit``, whose curve is the nearest it was made ``of``, how many ``measured`` products it
    saw, and relative errors (median, 90th percentile) on ``rows`` it did not see, before and after; 0 where there are
    none."""

    fit: Fit
    of: str
    measured: int
    rows: int
    before: tuple[float, float]
    after: tuple[float, float]


def chosen(features: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return which rows of `features` [rows, axes] to measure: those nearest to the middles of `count` clusters, found
    by k-means from rows far from each other. The same rows always give the same choice."""
    if len(features) <= count:
        return np.arange(len(features))
    first = [int(((features - features.mean(0)) ** 2).sum(1).argmin())]
    far = ((features - features[first[0]]) ** 2).sum(1)
    while len(first) < count:
        first.append(int(far.argmax()))
        far = np.minimum(far, ((features - features[first[-1]]) ** 2).sum(1))
    middles = features[first].copy()
    for _ in range(PASSES):
        of = ((features[:, None] - middles[None]) ** 2).sum(2).argmin(1)
        for cluster in set(of.tolist()):
            middles[cluster] = features[of == cluster].mean(0)
    found: list[int] = []
    for middle in middles:
        near = ((features - middle) ** 2).sum(1)
        near[found] = np.inf
        found.append(int(near.argmin()))
    return np.sort(np.array(found))


def shapes(relatives: Relatives, count: int) -> list[tuple[int, int, int]]:
    """Return `count` products (m, n, k) to measure, of powers of two."""
    grid = [(2**m, 2**n, 2**k) for m, n, k in product(ROWS_OF, WEIGHTS_OF, WEIGHTS_OF)]
    works = [(Gemm(m=m, n=n, k=k, dtype=relatives.dtype),) for m, n, k in grid]
    points = np.array([(*sizes, 1) for sizes in grid])
    return [grid[i] for i in chosen(_features(points, relatives.seconds(works)), count)]


class Relatives(NamedTuple):
    """Curves of other devices that price a device's products in a precision; the ``nearest`` of them."""

    link: Fitted
    device: Device
    dtype: str
    nearest: BoundCurve

    def seconds(self, works: Iterable[tuple[Gemm, ...]]) -> NDArray[np.float64]:
        """Seconds of the products in each of `works`."""
        return np.array([sum(self.link(one, self.device).seconds for one in some) for some in works])


def learn(sample: Sample, count: int, profiles: dict[str, CurveProfile], spreads: Spreads) -> Learned:
    """The curve of a sample's device from `count` of its rows (all, if it has no more) and others of `profiles`.

    Raises:
        MeshwrightError: K014 where no device of the same vendor has a curve.
    """
    base = relatives(sample.device, sample.dtype, profiles, spreads)
    part = sample.where(np.arange(len(sample.seconds)) % max(1, len(sample.seconds) // MOST_ROWS) == 0)
    points = part.points[0]
    predicted = base.seconds(part.works)
    ratio = np.log(part.seconds / (predicted + part.around_s))
    seen = chosen(_features(points, predicted), count)
    fit = next(f for f in profiles[base.nearest.owner].curves if (f.op, f.dtype) == (OP, base.nearest.dtype))
    spread = float(np.sqrt(np.mean(np.square(spreads.of(OP, base.nearest.distance, sample.dtype)))))
    process = _Process(_axes(points)[seen], ratio[seen], spread, float(np.mean(fit.sigma)))
    made = _with_ratio(fit, base, process, _axes(points)[seen], sample, part.works[0][0])
    rest = np.ones(len(ratio), bool)
    rest[seen] = False
    own = BoundCurve(made, sample.device, sample.device, sample.dtype)
    errors, true = [], part.seconds[rest]
    for found in (predicted, _by_curve(own, part)):
        errors.append(
            (median_ape(found[rest] + part.around_s[rest], true), p90_ape(found[rest] + part.around_s[rest], true))
            if rest.any()
            else (0.0, 0.0)
        )
    return Learned(made, base.nearest.owner, len(seen), int(rest.sum()), *errors)


def relatives(device: Device, dtype: str, profiles: dict[str, CurveProfile], spreads: Spreads) -> Relatives:
    """Return what other devices' curves say of a device.

    Raises:
        MeshwrightError: K014 where no device of the same vendor has one.
    """
    link = Fitted({name: p for name, p in profiles.items() if name != device.name}, spreads, serving=True)
    found = link.bound(device, (OP,), dtype)
    if not found:
        raise MeshwrightError.one(
            "K014", f"no {device.vendor} device has a curve of {dtype} products to carry over", place="--few",
            help="measure a whole table: meshwright calibrate --data DIR --device NAME",
        )  # fmt: skip
    return Relatives(link, device, dtype, found[0])


class _Process:
    """The log of a ratio at points [rows, axes], from measurements of it."""

    def __init__(self, at: NDArray[np.float64], ratio: NDArray[np.float64], spread: float, noise: float):
        self.at, self.variance, self.noise = at, spread**2 / 2, noise
        self.inverse = np.linalg.inv(self._alike(at, at) + noise**2 * np.eye(len(at)))
        self.weights = self.inverse @ ratio

    def _alike(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        apart = ((a[:, None] - b[None]) ** 2).sum(2) / ALIKE_OCTAVES**2
        return self.variance * (1.0 + np.exp(-0.5 * apart))

    def mean(self, at: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._alike(at, self.at) @ self.weights

    def left_out(self) -> float:
        """Return the standard deviation that covers 80% of the measurements, each predicted from the others (Rasmussen
        and Williams, equation 5.12)."""
        return float(np.quantile(np.abs(self.weights / np.diag(self.inverse)), 0.8)) / NORMAL_80

    def sigma(self, at: NDArray[np.float64]) -> float:
        """Return one standard deviation of a measurement, in the root of the mean over points."""
        cross = self._alike(at, self.at)
        left = 2 * self.variance - ((cross @ self.inverse) * cross).sum(1)
        return float(np.sqrt(np.maximum(left, 0.0).mean() + self.noise**2))


def _with_ratio(
    fit: Fit, base: Relatives, process: _Process, seen: NDArray[np.float64], sample: Sample, like: Gemm
) -> Fit:
    """Return a curve of the sample's device: the formula of a fit, and in its table what the relatives say over it,
    with the ratio added, on the nodes of both; of products `like` the sample's."""
    low, high = np.minimum(fit.low, seen.min(0)), np.maximum(fit.high, seen.max(0))
    nodes = []
    for own, usual, a, b in zip(fit.nodes, SHAPES[OP].nodes, low, high):
        inside = {x for x in usual if a - 2.0 < x < b + 2.0}
        nodes.append(tuple(sorted({*own, *inside})) if len(own) > 1 else own)
    grid = np.array(list(product(*nodes)))
    sizes = [dict(zip(("m", "n", "k", "batch"), map(int, np.round(2.0**at)))) for at in grid]
    works = [msgspec.structs.replace(like, **at) for at in sizes]
    bare = msgspec.structs.replace(fit, dtype=sample.dtype, nodes=((0.0,),) * len(nodes), residual=(0,))
    curve = BoundCurve(bare, sample.device, sample.device, sample.dtype)
    own_s = np.array([curve.price(point(one, serving=True).x).seconds for one in works])
    table = np.log(base.seconds((one,) for one in works) / own_s) + process.mean(grid)
    return Fit(
        op=OP,
        dtype=sample.dtype,
        source=f"{sample.source}; the rest by the ratio to {fit.source} and others",
        rows=len(seen),
        constants=fit.constants,
        nodes=tuple(nodes),
        residual=tuple(int(v) for v in np.round(table / RESIDUAL_UNIT)),
        low=tuple(round(float(v), 2) for v in low),
        high=tuple(round(float(v), 2) for v in high),
        sigma=(round(max(process.sigma(grid), process.left_out()), 4),) * len(SIGMA_CLASSES),
    )


def _axes(points: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log2(points[:, :4])


def _features(points: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Powers of two of a product's dims, and of the seconds that are predicted."""
    return np.column_stack([_axes(points), np.log2(seconds)])


def _by_curve(curve: BoundCurve, part: Sample) -> NDArray[np.float64]:
    found = np.zeros(len(part.seconds))
    for c, points in enumerate(part.points):
        found += np.where(part.count > c, [curve.price(tuple(x)).seconds for x in points.tolist()], 0.0)
    return found


def to_measure(device: Device, count: int, profiles: dict[str, CurveProfile], spreads: Spreads) -> bytes:
    """Return the table of products to measure on a device, its column of latencies empty.

    Raises:
        MeshwrightError: K014 where no device of the same vendor has a curve.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, "latency_us"])
    asked = [name for name in ASKED if supports(device, name)]
    for dtype in [name for name in asked if _related(device, name, profiles)] or asked[:1]:
        for m, n, k in shapes(relatives(device, dtype, profiles, spreads), count):
            writer.writerow(["own", device.name, "own", "1", "own", dtype, "fwd", 1, m, n, k, ""])
    return out.getvalue().encode()


def learned(
    folder: Path, device: Device, count: int, profiles: dict[str, CurveProfile], spreads: Spreads
) -> list[Learned]:
    """A device's curves of products from a few rows of the table in `folder`.

    Raises:
        MeshwrightError: K codes for a table that cannot be measurements, K013 where it has nothing of the device.
    """
    found, _ = samples(folder, (OP,), device.name)
    if not found:
        raise MeshwrightError.one(
            "K013", f"no products of {device.name} in the table", place=f"--data {folder}",
            help=f"meshwright calibrate --device {device.name} --few {count} --out DIR writes which to measure",
        )  # fmt: skip
    if len(found) > 1:  # precisions that no relative computes in are left to whole tables
        found = [one for one in found if _related(device, one.dtype, profiles)] or found
    return [learn(sample, count, profiles, spreads) for sample in found]


def _related(device: Device, dtype: str, profiles: dict[str, CurveProfile]) -> bool:
    """Whether another device's products in a precision were measured."""
    link = Fitted({name: p for name, p in profiles.items() if name != device.name}, Spreads(()), serving=True)
    return any(one.dtype in KIN.get(dtype, (dtype,)) for one in link.bound(device, (OP,), dtype))


def write_table(text: bytes, folder: Path) -> Path:
    """Write the table of what to measure, for `--data`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ops_gemm.csv"
    write_bytes(path, text)
    return path
