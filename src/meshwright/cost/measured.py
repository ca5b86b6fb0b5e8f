"""Measured tables as the first link of the cost chain: what ``meshwright calibrate --here`` timed on this machine.

A table has a grid of log-spaced sizes and seconds at each; between them the logarithm of the time is interpolated
linearly, beyond them the time grows with the work, and the answer says so. Tables answer for the device ``here`` alone.
"""

from __future__ import annotations

import itertools
from functools import cache
from math import log
from pathlib import Path

import msgspec

from meshwright import catalog
from meshwright.cost.chain import EXTRAPOLATED, Estimate
from meshwright.errors import MeshwrightError
from meshwright.spec.hardware import Device
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.work import AttentionCore, Collective, Elementwise, Gemm, GroupedGemm, Staging, Work

FORMAT_VERSION = 3


class GridTable(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds`` at every point of the grid ``axes`` (each ascending), the last axis fastest; ``spread`` the relative
    interquartile range of the repeats, in the median over the points. ``busy``, of collectives: the seconds of a rank's
    processor at every point."""

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]
    spread: float = 0.0
    busy: tuple[float, ...] = ()

    def at(self, x: tuple[float, ...]) -> tuple[float, bool]:
        """(seconds, inside the grid?) at a point; a coordinate outside is moved to the edge."""
        low, share, inside = [], [], True
        for axis, value in zip(self.axes, x):
            clamped = min(max(value, axis[0]), axis[-1])
            inside &= 0.5 * axis[0] <= value <= 2 * axis[-1]
            i = max(0, min(len(axis) - 2, next((j - 1 for j, v in enumerate(axis) if v >= clamped), 0)))
            low.append(i)
            width = log(axis[i + 1] / axis[i]) if len(axis) > 1 else 1.0
            share.append(log(clamped / axis[i]) / width if len(axis) > 1 else 0.0)
        total = 0.0
        for corner in itertools.product((0, 1), repeat=len(low)):
            weight, index = 1.0, 0
            for axis, i, s, c in zip(self.axes, low, share, corner):
                weight *= s if c else 1 - s
                index = index * len(axis) + min(i + c, len(axis) - 1)
            if weight:
                total += weight * log(self.seconds[index])
        return 2.718281828459045**total, inside


class MeasuredTables(msgspec.Struct, frozen=True, kw_only=True):
    """Everything timed on a machine: ``gemm`` (m, n, k), ``attention`` and ``attention_backward`` (batch * heads,
    tokens, head width; causal), ``elementwise`` (bytes of one kernel) by dtype, and ``collectives`` (bytes) by
    operation and ranks (``all_reduce 2``), between processes that share ``cores``; ``staging`` (bytes) of a ``gather``
    and a ``reduce`` of fully sharded parameters, and of what surrounds the update of a ``step`` that moves so many;
    ``operators`` (bytes) of memory-bound operators by their name, with
    what issuing them costs the host where ``issued`` (on a GPU that goes on beside them). ``pace`` are the seconds of
    the reference probe meanwhile, a ``product`` and a ``copy``; ``made`` is when, "" where that is not known."""

    format_version: int
    source: str
    gemm: dict[str, GridTable]
    attention: dict[str, GridTable]
    attention_backward: dict[str, GridTable]
    elementwise: GridTable
    operators: dict[str, GridTable] = {}
    collectives: dict[str, GridTable] = {}
    staging: dict[str, GridTable] = {}
    cores: int = 1
    issued: bool = True
    pace: dict[str, float] = {}
    made: str = ""


class MeasuredLink:
    """Prices work on the device ``here``."""

    def __init__(self, tables: MeasuredTables):
        self.tables = tables

    def __call__(self, work: Work, device: Device) -> Estimate | None:
        """Seconds of a work item; None for another device or what was not measured."""
        if device.name != "here":
            return None
        match work:
            case Gemm():
                return self._gemm(work)
            case GroupedGemm():
                return self._grouped(work)
            case AttentionCore():
                return self._attention(work)
            case Elementwise():
                return self._elementwise(work)
            case Collective():
                return self._collective(work)
            case Staging():
                return self._staging(work)
        return None

    def _answer(self, table: GridTable, point: tuple[float, ...], cause: str, times: float = 1.0) -> Estimate:
        """The table's time at a point, `times` as often; beyond its edge in proportion to the size."""
        seconds, inside = table.at(point)
        for axis, value in zip(table.axes, point):
            seconds *= max(1.0, value / axis[-1]) * min(1.0, max(value / axis[0], 0.25))
        source = f"measured here: {self.tables.source}" + ("" if inside else EXTRAPOLATED)
        return Estimate(seconds * times, cause, source, max(0.03, table.spread) if inside else 0.3)

    def _gemm(self, work: Gemm) -> Estimate | None:
        table = self.tables.gemm.get(work.dtype)
        if table is None or work.weights:
            return None
        found = self._answer(table, (work.m, work.n, work.k), "gemm", work.batch)
        return self._with_bias(work, found) if work.bias else found

    def _with_bias(self, work: Gemm, found: Estimate) -> Estimate:
        """A product and its bias, which torch adds with a kernel of its own: read and written once, and read once for
        the bias's gradient."""
        element = DTYPE_BYTES[work.dtype]
        if work.bias == "summed":
            added = Elementwise(num_bytes=work.k * work.n * element, operator="bias backward", fused=True)
        else:
            added = Elementwise(num_bytes=2 * work.m * work.n * element, operator="bias", fused=True)
        return found._replace(seconds=found.seconds + self._elementwise(added).seconds)

    def _grouped(self, work: GroupedGemm) -> Estimate | None:
        table = self.tables.gemm.get(work.dtype)
        if table is None or work.weights:
            return None
        rows = max(1.0, work.rows * work.imbalance / work.groups)
        point = (work.k, work.n, rows) if work.weight_gradient else (rows, work.n, work.k)
        return self._answer(table, point, "gemm", work.groups)

    def _attention(self, work: AttentionCore) -> Estimate | None:
        tables = self.tables.attention_backward if work.backward else self.tables.attention
        table = tables.get(work.dtype)
        if table is None:
            return None
        # measured with a causal mask and as many keys as queries; another mask is another number of pairs
        tokens = max(1.0, (2.0 * work.pairs) ** 0.5)
        return self._answer(table, (work.batch * work.heads, tokens, work.head_dim), "attention")

    def _elementwise(self, work: Elementwise) -> Estimate:
        table = self.tables.operators.get(work.operator)
        if table is not None:
            found = self._answer(table, (max(1.0, work.num_bytes),), "elementwise")
            return found._replace(as_run=True, issued=self.tables.issued)
        each = max(1.0, work.num_bytes / max(1, work.kernels))
        return self._answer(self.tables.elementwise, (each,), "elementwise", max(1, work.kernels))

    def _collective(self, work: Collective) -> Estimate | None:
        """The seconds of a collective between processes of this machine; None where it leaves it, as what was measured
        never went over a network."""
        ranks = work.group.size
        if any(hop.scale_out for hop in work.group.hops):
            return None
        if ranks <= 1 or work.num_bytes <= 0:
            return Estimate(0.0, "network", "measured here", 0.0)
        known = sorted(int(k.split()[1]) for k in self.tables.collectives if k.split()[0] == work.op)
        if not known:
            return None
        nearest = min(known, key=lambda n: (abs(log(n / ranks)), n))
        table = self.tables.collectives[f"{work.op} {nearest}"]
        found = self._answer(table, (work.num_bytes,), "network")
        if table.busy:
            found = self._apart(found, table, work.num_bytes, nearest)
        if nearest == ranks:
            return found
        more = ranks / nearest
        return found._replace(seconds=found.seconds * more, wait=found.wait * more, sigma=0.3)

    def _apart(self, found: Estimate, table: GridTable, num_bytes: float, ranks: int) -> Estimate:
        """A collective as it is for ranks with a core each: what its processor does, and what it waits for. Of more
        ranks than cores the processors' seconds came one after the other when it was timed."""
        busy = self._answer(msgspec.structs.replace(table, seconds=table.busy), (num_bytes,), "network").seconds
        wait = max(0.0, found.seconds - busy * max(1.0, ranks / self.tables.cores))
        return found._replace(seconds=busy + wait, wait=wait)

    def _staging(self, work: Staging) -> Estimate | None:
        table = self.tables.staging.get(work.what)
        return None if table is None else self._answer(table, (work.num_bytes,), "host")


@cache
def _read(path: Path) -> MeasuredLink | None:
    if not path.is_file():
        return None
    try:
        tables = msgspec.json.decode(path.read_bytes(), type=MeasuredTables)
    except msgspec.DecodeError as wrong:
        tables, reason = None, str(wrong)
    if tables is None or tables.format_version != FORMAT_VERSION:
        what = reason if tables is None else f"format_version {tables.format_version} is not {FORMAT_VERSION}"
        help = "measure again: meshwright calibrate --here"
        raise MeshwrightError.one("K008", f"not measurements of a machine: {what}", place=str(path), help=help)
    return MeasuredLink(tables)


def link() -> MeasuredLink | None:
    """Return the cost link of tables measured on this machine, None where nothing was measured.

    Raises:
        MeshwrightError: K008 when the file is damaged.
    """
    return _read(catalog.measured_here() / "here.json")


def price(work: Work, device: Device) -> Estimate | None:
    """The link of this machine: read when something runs ``here``, so that a damaged file stops nothing else.

    Raises:
        MeshwrightError: K008 when the file is damaged.
    """
    if device.name != "here":
        return None
    tables = link()
    return None if tables is None else tables(work, device)


def forget() -> None:
    """Read the tables anew: they were written just now."""
    _read.cache_clear()
