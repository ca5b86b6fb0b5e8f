"""Samples, to which curves are fitted: the measured rows of one device, kind and precision as arrays."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwright.calibrate import imported, tables
from meshwright.calibrate.rows import MeasuredWork, measured
from meshwright.cost.bound import SHAPES
from meshwright.cost.curve import hardware
from meshwright.cost.points import point
from meshwright.cost.roofline import elementwise_seconds, peak_flops, supports
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.spec.hardware import Device

#: What ``--only`` may name, and the table behind it.
CLASSES = {
    "gemm": "ops_gemm",
    "attention": "ops_attention",
    "latent": "ops_mla",
    "moe": "ops_moe",
    "scan": "ops_ssm",
}
#: Public tables by the name of their source: where they were published and under which licence.
ATTRIBUTION = {
    "aiconfigurator": "NVIDIA AIConfigurator, ai-dynamo/aiconfigurator@095f58a5, Apache-2.0",
    "estimate_train_time_perlmutter": "DebarghaG/estimate-train-time@1ac4d5e4, MIT",
    "estimate_train_time_vista": "DebarghaG/estimate-train-time@1ac4d5e4, MIT",
    "neusight": "NeuSight, sitar-lab/NeuSight@6945927d, MIT",
    "apex_plus": "microsoft/apex_plus@87690965, MIT",
    "vidur": "Vidur, microsoft/vidur@7d475133, MIT",
}
#: A rate this far above the peak is a wrong row, not a fast kernel: clocks may boost a little.
IMPOSSIBLE = 1.05
#: A table whose typical row is this many times slower, or faster, than its two roofs allow is in other units.
TOO_SLOW, TOO_FAST = 300.0, 20.0
#: With fewer whole groups than this, rows are held out by (batch, keys) instead.
FEWEST_GROUPS = 5


class Sample(NamedTuple):
    """Rows of one curve. ``points``: one array [rows, dimensions] per kernel, of which a row has its first ``count``;
    ``around_s``: what else a row contains; ``groups``: the hash in [0, 1) of the group each row belongs to; ``works``:
    its kernels as work items; ``serving``, ``flash`` and ``library``: the setting they were measured in."""

    op: str
    dtype: str
    device: Device
    source: str
    points: tuple[np.ndarray, ...]
    count: np.ndarray
    around_s: np.ndarray
    seconds: np.ndarray
    flops: np.ndarray
    groups: np.ndarray
    grouped_by: str
    works: np.ndarray
    serving: bool
    flash: int
    library: str

    @property
    def hardware(self) -> tuple[float, ...]:
        return hardware(self.device, self.dtype)

    def where(self, mask: np.ndarray) -> Sample:
        """The rows of a mask."""
        return self._replace(
            points=tuple(p[mask] for p in self.points),
            **{
                name: getattr(self, name)[mask] for name in ("count", "around_s", "seconds", "flops", "groups", "works")
            },
        )


class LeftRows(NamedTuple):
    """Rows that no curve is fitted to, and why."""

    table: str
    what: str
    rows: int


def samples(folder: Path, classes: tuple[str, ...], device: str = "") -> tuple[list[Sample], list[LeftRows]]:
    """Every sample in the tables of a folder, in a fixed order.

    Raises:
        MeshwrightError: K001 to K006 for tables that are missing or cannot be measurements.
    """
    found, left = [], []
    for name in classes:
        own, skipped = _of_table(folder, CLASSES[name], device)
        found += own
        left += skipped
    return found, left


def _of_table(folder: Path, table: str, only: str) -> tuple[list[Sample], list[LeftRows]]:
    by_curve: dict[tuple[str, str, str], list[tuple[tables.TableRow, MeasuredWork]]] = {}
    skipped: dict[str, int] = {}
    path, rows = _rows(folder, table, only)
    for row in rows:
        device = load_device(row.text["hardware"]).name
        if only and device != only:
            continue
        work = measured(table, row)
        if work is None:
            what = f"{row.text['hardware']} {row.text['dtype']}: not a {_reason(table)} this package computes in"
            skipped[what] = skipped.get(what, 0) + 1
            continue
        by_curve.setdefault((device, work.op, work.dtype), []).append((row, work))
    for key, own in by_curve.items():
        by_curve[key], others = _one_library(own)
        if others:
            skipped[f"{key[0]} {key[1]}: kernels of other libraries than the one with most rows"] = others
    wrong = tables.Faults(path)
    made = [_sample(load_device(key[0]), key[1], key[2], own, wrong) for key, own in sorted(by_curve.items())]
    wrong.refuse()
    return made, [LeftRows(table, what, rows) for what, rows in sorted(skipped.items())]


def _one_library(
    rows: list[tuple[tables.TableRow, MeasuredWork]],
) -> tuple[list[tuple[tables.TableRow, MeasuredWork]], int]:
    """The rows of the library that has most of them, and how many others there are: one curve is of one kernel."""
    counts: dict[str, int] = {}
    for _, work in rows:
        counts[work.library] = counts.get(work.library, 0) + 1
    most = max(sorted(counts), key=counts.__getitem__)
    return [pair for pair in rows if pair[1].library == most], len(rows) - counts[most]


def _reason(table: str) -> str:
    return "kernel or phase" if table in ("ops_ssm", "ops_mla") else "precision"


def _rows(folder: Path, table: str, device: str) -> tuple[Path, list[tables.TableRow]]:
    """The rows of a table as CSV or, for one device that is named, as AIConfigurator's Parquet files."""
    path = tables.find(folder, table)
    if path is not None:
        return path, tables.read(path, table)
    files = imported.find(folder, table) if folder.is_dir() else []
    if files and device:
        return files[0], [row for file in files for row in imported.read(file, device)]
    if files:
        help = "the file does not say in our words what it was measured on: add --device NAME"
    else:
        help = "--data names the folder of the tables; --only fits some of them"
    raise MeshwrightError.one("K001", f"no table {table}.csv or {table}.csv.gz", place=str(folder), help=help)


def _sample(device: Device, op: str, dtype: str, rows: list, wrong: tables.Faults) -> Sample:
    most = max(len(work.kernels) for _, work in rows)
    width = len(_x(rows[0][1], 0))
    points = [np.ones((len(rows), width)) for _ in range(most)]
    count = np.array([len(work.kernels) for _, work in rows])
    seconds = np.array([work.seconds for _, work in rows])
    flops = np.array([sum(k.flops for k in work.kernels) for _, work in rows])
    around = np.array([sum((elementwise_seconds(e, device) for e in work.around), 0.0) for _, work in rows])
    for i, (_, work) in enumerate(rows):
        for c in range(len(work.kernels)):
            points[c][i] = _x(work, c)
    _refuse_impossible(device, dtype, rows, flops, seconds, wrong)
    groups, grouped_by = _groups(op, rows)
    works = np.empty(len(rows), object)
    works[:] = [work.kernels for _, work in rows]
    source = "; ".join(sorted({_source(row) for row, _ in rows}))
    head = (op, dtype, device, source, tuple(points), count, around, seconds, flops, groups, grouped_by, works)
    one = rows[0][1]
    return Sample(*head, one.serving, one.flash, one.library)


def _x(work: MeasuredWork, kernel: int) -> tuple[float, ...]:
    found = point(work.kernels[kernel], serving=work.serving, library=work.library)
    return found.x


def _source(row: tables.TableRow) -> str:
    text = row.text
    what = " ".join(word for word in (text["hardware"], text["backend"], text["backend_version"]) if word)
    return f"{what} ({ATTRIBUTION.get(text['source'], text['source'])})"


def _groups(op: str, rows: list) -> tuple[np.ndarray, str]:
    names = {"gemm": "(n, k)", "grouped_gemm": "(experts per rank, hidden, ffn per rank)"}
    names |= {"scan": "(heads, key heads)", "scan_flashinfer": "(heads, key heads)", "step": "(heads, key heads)"}
    names |= dict.fromkeys(("convolution", "convolution_blocks", "convolution_step"), "(channels)")
    names |= {"latent": "(heads)", "expanded": "(heads)"}
    keys, by = [work.group for _, work in rows], names.get(op, "(heads, head dim)")
    if len(set(keys)) < FEWEST_GROUPS and op not in names:
        keys, by = [(work.kernels[0].batch, work.kernels[0].kv_len) for _, work in rows], "(batch, keys)"
    hashed = {key: zlib.crc32(",".join(map(str, key)).encode()) / 2**32 for key in set(keys)}
    return np.array([hashed[key] for key in keys]), by


def _refuse_impossible(
    device: Device, dtype: str, rows: list, flops: np.ndarray, seconds: np.ndarray, wrong: tables.Faults
) -> None:
    """K004 when the whole sample is off by a factor of units, K005 for single rows above the peak."""
    peak = peak_flops(device, dtype)
    moved = np.array([sum(k.num_bytes for k in work.kernels) for _, work in rows])
    roof = np.maximum(flops / peak, moved / (device.memory_gb_s * 1e9)) + 2e-6
    typical = float(np.median(seconds / roof))
    first = rows[0][0].line
    if typical > TOO_SLOW or typical < 1 / TOO_FAST:
        ratio = f"{typical:.3g} times what the hardware allows"
        help = "latency_us is in microseconds: divide nanoseconds by 1000, multiply milliseconds by 1000"
        wrong.add("K004", first, f"{device.name} {dtype}: the typical latency is {ratio}; units off?", help)
        return
    if not supports(device, dtype):
        return
    for i in np.flatnonzero(flops / seconds > IMPOSSIBLE * peak):
        rate = f"{flops[i] / seconds[i] / 1e12:.4g} TFLOP/s of {peak / 1e12:.4g} at most"
        wrong.add("K005", rows[i][0].line, f"{device.name} {dtype}: {rate}", "drop the row; it cannot be measured so")


def shape_of(sample: Sample):
    """The formula of a sample's curve."""
    return SHAPES[sample.op]
