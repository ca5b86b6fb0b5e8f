"""Divide: compute some columns of each product on the host, where weights lie, and the others on the device.

HeteGen (Zhao et al. 2403.01164). The device's columns come over the host's link while the processor multiplies its own,
so that neither the link nor the processor takes all weights. Exact: a column is computed on one of the two, and what
reads the product waits for both. Weights of the next layer come as soon as the product before has used theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.lower.entry import MOVES, Entry
from meshwright.lower.rewrites.slice import COLUMNS, Rewriter
from meshwright.work import Gemm, HostProduct, TierCopy, weight_bytes

#: Queues of what comes to the device, what leaves it, and results that come beside weights.
WEIGHTS, INPUTS, HOST, RESULTS = "h2d", "d2h", "host", "copy"
#: Columns of the device and of the host, as parts of a product.
DEVICE_PART, HOST_PART = (COLUMNS, 0, 2), (COLUMNS, 1, 2)
#: Bytes of a number that is sent between the two.
SENT_BYTES = 2.0
AUTO = "auto"


class HostRates(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a host that a rank has: ``copy_gb_s`` of its link, ``read_gb_s`` of the memory, ``flops`` of the
    processors per second, and ``latency_us`` until a copy begins."""

    copy_gb_s: float
    read_gb_s: float
    flops: float
    latency_us: float

    @property
    def left_gb_s(self) -> float:
        """Bandwidth that the processors have of the memory while copies to the device read it; a twentieth at least."""
        return max(self.read_gb_s - self.copy_gb_s, 0.05 * self.read_gb_s)

    def balanced(self, work: Gemm) -> float:
        """The share of a product's columns for which the processors take as long as the other columns on their way."""
        link = work.k * work.n * weight_bytes(work) / (self.copy_gb_s * 1e9)
        return link / (link + HostProduct(product=work, gb_s=self.left_gb_s, flops_s=self.flops).seconds)


def share_of(said: str, work: Gemm, host: HostRates) -> float:
    """The share of a product's columns that the host computes: as it was said, or where both take equally long."""
    return host.balanced(work) if said == AUTO else float(said)


def divided(entries: Sequence[Entry], ends: tuple[int, ...], said: str, host: HostRates) -> list[Entry]:
    """Return a pass whose products are divided between host and device; `ends` are the entries that the next layer
    waits for, and `said` the host's share."""
    out = Rewriter(entries)
    begins: list[int] = []
    for i, entry in enumerate(entries):
        start = len(out.entries)
        after = out.waits(entry.after)
        out.at[i] = _product(out, i, after, said, host) if isinstance(entry.work, Gemm) else (out.put(i, after=after),)
        if not entry.after:
            begins += [n for n in range(start, len(out.entries)) if not out.entries[n].after]
    late = out.waits(ends)
    for n in begins:
        if out.entries[n].queue != WEIGHTS:
            out.entries[n] = out.entries[n]._replace(late=late)
    return out.entries


def _product(out: Rewriter, i: int, after: tuple[int, ...], said: str, host: HostRates) -> tuple[int, ...]:
    """Put the parts of a product; return those that what reads it waits for."""
    work = out.before[i].work
    share = share_of(said, work, host)
    ours = min(work.n - 1, max(1, round(work.n * share)))
    theirs = work.n - ours
    stored, name = work.k * weight_bytes(work), out.before[i].name

    def copy(what: str, num_bytes: float, queue: str, waits: tuple[int, ...], way: str) -> int:
        moved = TierCopy(num_bytes=num_bytes, gb_s=host.copy_gb_s, latency_us=host.latency_us, way=way)
        out.entries.append(Entry(f"{name} {what}", queue, moved, waits, role=MOVES))
        return len(out.entries) - 1

    weights = copy("weights", stored * theirs, WEIGHTS, (), "h2d")
    inputs = copy("input to the host", SENT_BYTES * work.m * work.k, INPUTS, after, "d2h")
    columns = msgspec.structs.replace(work, n=ours)
    product = HostProduct(product=columns, gb_s=host.left_gb_s, flops_s=host.flops)
    mine = out.put(i, cut=HOST_PART, queue=HOST, after=(inputs,), work=product)
    result = copy("result of the host", work.out_bytes * work.m * ours, RESULTS, (mine,), "h2d")
    rest = msgspec.structs.replace(work, n=theirs)
    other = out.put(i, cut=DEVICE_PART, after=(*after, weights), work=rest)
    # room for the weights of one product is free again when it is computed
    out.entries[weights] = out.entries[weights]._replace(late=(other,))
    return other, result
