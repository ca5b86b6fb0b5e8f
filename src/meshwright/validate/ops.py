"""Predicting measured kernels and collectives: one price per row from the cost chain, nothing simulated.

A row is priced in the setting it was measured in: attention of serving engines also writes a cache, attention of
training scripts is FlashAttention-2, all-reduce belongs to a library that runs it in a CUDA graph or not. What a
row took passes through unread, to be scored and to refuse tables that cannot be measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import hypot
from pathlib import Path
from statistics import median
from typing import NamedTuple

from meshwright.calibrate import rows as kernel_rows
from meshwright.calibrate import tables as kernel_tables
from meshwright.calibrate.network import rows as network_rows
from meshwright.cost import Estimate, fitted, network
from meshwright.cost.chain import Link, roofline_estimate
from meshwright.cost.roofline import peak_flops, supports
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.spec.hardware import Device
from meshwright.work import Collective, Elementwise, Work

#: What residuals are shown against, by table.
VARIABLES: dict[str, tuple[str, ...]] = {
    "ops_gemm": ("m", "n", "k", "batch", "flops", "bytes", "dtype", "pass", "hardware"),
    "ops_attention": (
        *("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "flops", "bytes"),
        *("dtype", "phase", "hardware"),
    ),
    "ops_mla": ("batch", "kv_len", "heads", "flops", "bytes", "scope", "phase", "kv_dtype", "hardware"),
    "ops_moe": ("tokens", "hidden", "ffn", "experts", "top_k", "ep", "flops", "bytes", "dtype", "hardware"),
    "ops_ssm": (
        *("batch", "seq_len", "num_v_heads", "num_k_heads", "flops", "bytes"),
        *("op", "kernel", "phase", "backend", "hardware"),
    ),
    "collectives": ("bytes", "ranks", "nodes", "op", "library", "hardware"),
}
#: A rate this far above the peak is a wrong row: clocks may boost a little.
IMPOSSIBLE_RATE = 1.05
#: A table whose typical row is that many times off its prediction, either way, is in other units.
UNITS_OFF = 100.0
#: One row in so many is predicted with its device left out too.
LEFT_OUT_EVERY = 20
#: Fewer rows of one device and precision than this say nothing about units.
ENOUGH = 20


class OpAnswer(NamedTuple):
    """One row's answer and what it measured. ``seconds`` are predicted, ``sigma`` their relative spread; ``roofline``
    is what the ideal device would take; ``unsupported`` says why there is none of these. ``carried``: seconds and
    spread as if nobody had measured the device, of one row in :data:`LEFT_OUT_EVERY`."""

    line: int
    source: str
    hardware: str
    flag: str
    shape: str
    at: tuple[float | str, ...] = ()
    measured: float = 0.0
    seconds: float = 0.0
    sigma: float = 0.0
    roofline: float | None = None
    extrapolated: bool = False
    unsupported: str = ""
    carried: tuple[float, float] | None = None


def kernels(path: Path, name: str, progress: Callable[[int, int], None]) -> Iterator[OpAnswer]:
    """Every row of a kernel table with its answer.

    Raises:
        MeshwrightError: K001 to K003 for tables that cannot be read, V005 for rates no device reaches.
    """
    rows = kernel_tables.read(path, name)
    wrong, off = kernel_tables.Faults(path), _Units()
    for i, row in enumerate(rows):
        progress(i, len(rows))
        answer = _kernel(name, row, wrong, left_out=i % LEFT_OUT_EVERY == 0)
        if not answer.unsupported:
            off.add((answer.hardware, row.text["dtype"]), row.line, answer.measured / answer.seconds)
        yield answer
    off.refuse(wrong)


def _kernel(name: str, row: kernel_tables.TableRow, wrong: kernel_tables.Faults, *, left_out: bool) -> OpAnswer:
    text = row.text
    shape = " ".join([*(v for k, v in text.items() if k in SHAPE_WORDS), *(f"{k}{v:g}" for k, v in _sizes(row))])
    head = (row.line, text["source"], text["hardware"], "", shape)
    try:
        device = load_device(text["hardware"])
    except MeshwrightError as error:
        return OpAnswer(*head, unsupported=_reason(error))
    found = kernel_rows.asked(name, row)
    if found is None:
        what = " ".join(text[word] for word in KIND_WORDS if word in text)
        return OpAnswer(*head, unsupported=f"V010: {what} is not computed in here")
    work = (*found.kernels, *found.around)
    flops, moved = sum(k.flops for k in found.kernels), sum(w.num_bytes for w in work)
    rate, peak = flops / found.seconds, peak_flops(device, found.dtype)
    if rate > IMPOSSIBLE_RATE * peak and supports(device, found.dtype):
        wrong.add("V005", row.line, f"{rate / 1e12:.4g} TFLOP/s; the {device.name} has {peak / 1e12:.4g}")
    estimates = [price(w, device, _links(found)) for w in work]
    unknown = [price(w, device, _links(found, device.name)) for w in work] if left_out else []
    known = {**row.number, **text, "flops": flops, "bytes": moved}
    return OpAnswer(
        *head,
        at=tuple(known[v] for v in VARIABLES[name]),
        measured=found.seconds,
        seconds=sum(e.seconds for e in estimates),
        sigma=_spread(estimates),
        roofline=sum(_ideal(w, device, found.dtype) for w in work),
        extrapolated=any("extrapolated" in e.source for e, w in zip(estimates, work) if not isinstance(w, Elementwise)),
        carried=(sum(e.seconds for e in unknown), _spread(unknown)) if unknown else None,
    )


#: Text columns that are part of a row's shape.
SHAPE_WORDS = ("op", "kernel", "scope", "pass", "phase", "dtype", "kv_dtype", "distribution")
#: Text columns that say what a row of its table is.
KIND_WORDS = ("op", "kernel", "scope", "dtype", "phase")


def _sizes(row: kernel_tables.TableRow) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in row.number.items() if name != "latency_us")


@cache
def _curves(serving: bool, flash: int, without: str, library: str) -> Link:
    return fitted.link(serving=serving, flash=flash, without=without, library=library)


def _links(found: kernel_rows.MeasuredWork, without: str = "") -> tuple[Link, ...]:
    """The links that answer for a kernel in the setting it was measured in, `without` the curves of a device."""
    return (_curves(found.serving, found.flash, without, found.library),)


def price(work: Work, device: Device, links: tuple[Link, ...]) -> Estimate:
    """The first answer of the links, else the roofline's."""
    for link in links:
        answer = link(work, device)
        if answer is not None:
            return answer
    return roofline_estimate(work, device)


def _spread(estimates: list[Estimate]) -> float:
    """Relative spread of a sum: errors of one cause move together, causes apart."""
    by_cause: dict[str, float] = {}
    for e in estimates:
        by_cause[e.cause] = by_cause.get(e.cause, 0.0) + e.seconds * e.sigma
    total = sum(e.seconds for e in estimates)
    return hypot(*by_cause.values()) / total if total else 0.0


def _ideal(work: Work, device: Device, dtype: str) -> float:
    """Peak arithmetic or full bandwidth, whichever takes longer."""
    flops = 0.0 if isinstance(work, Elementwise) else work.flops
    return max(flops / peak_flops(device, dtype), work.num_bytes / (device.memory_gb_s * 1e9))


def collectives(path: Path, progress: Callable[[int, int], None]) -> Iterator[OpAnswer]:
    """Every row of ``collectives`` with its answer.

    Raises:
        MeshwrightError: N003 when columns are missing or rows cannot be, all of them; V005 for units.
    """
    wrong, off = kernel_tables.Faults(path), _Units()
    table = network_rows.checked(path)
    for i, (line, row, num_bytes, seconds) in enumerate(table):
        progress(i, len(table))
        answer = _collective(line, row, num_bytes, seconds)
        if not answer.unsupported and not answer.flag:
            off.add((answer.hardware, row["op"]), line, answer.measured / answer.seconds)
        yield answer
    off.refuse(wrong)


def _collective(line: int, row: dict[str, str], num_bytes: float, seconds: float) -> OpAnswer:
    library, eager = network_rows.library_of(row)
    shape = f"{row['op']} {num_bytes:g} B, {row['gpus']} ranks on {row['nodes']} nodes, {row['library']}"
    head = (line, row["source"], row["hardware"], row.get("flag") or "", f"{shape} {row['variant']}".rstrip())
    try:
        group, device = network_rows.group_of(row)
    except MeshwrightError as error:
        return OpAnswer(*head, unsupported=_reason(error))
    if "not stated" in row["network"]:
        group = network_rows.unstated(group)
    work = Collective(op=network_rows.OPS.get(row["op"], row["op"]), num_bytes=num_bytes, group=group)
    estimate = price(work, device, (_network(library, eager),))
    engine = f"{library} eager" if eager else library
    return OpAnswer(
        *head,
        at=(num_bytes, float(row["gpus"]), float(row["nodes"]), row["op"], engine, row["hardware"]),
        measured=seconds,
        seconds=estimate.seconds,
        sigma=estimate.sigma,
        extrapolated="extrapolated" in estimate.source,
    )


@cache
def _network(library: str, eager: bool) -> Link:
    return network.Network(library=library, eager=eager)


def _reason(error: MeshwrightError) -> str:
    return f"{error.diagnostics[0].code}: {error.diagnostics[0].message}"


class _Units:
    """Measured over predicted by device and precision: when the middle one is far off, the units are."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, str], list[float]] = {}
        self._first: dict[tuple[str, str], int] = {}

    def add(self, key: tuple[str, str], line: int, ratio: float) -> None:
        self._ratios.setdefault(key, []).append(ratio)
        self._first.setdefault(key, line)

    def refuse(self, wrong: kernel_tables.Faults) -> None:
        """Raise everything that is wrong with the table, these and what was found before."""
        for key, ratios in self._ratios.items():
            typical = median(ratios)
            if len(ratios) >= ENOUGH and not 1 / UNITS_OFF < typical < UNITS_OFF:
                why = f"{' '.join(key)}: the typical latency_us is {typical:.3g} times what is predicted; units off?"
                wrong.add("V005", self._first[key], why, "latency_us is in microseconds")
        wrong.refuse()
