"""Collectives priced from the catalog's network profiles: the link of the cost chain behind ``network``.

A profile is looked up by device and level; a fabric nobody measured gets its kind's constants, scaled by the
port's bandwidth and latency, with the spread that fabrics of a kind show when one is left out. All-reduce kernels
of serving engines (vLLM, SGLang, TensorRT-LLM: one shot for small buffers, two shots for larger) are a choice of
library, in a CUDA graph or eager.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from meshwright.cost.chain import EXTRAPOLATED, Estimate
from meshwright.cost.collectives import Line, envelope, lines
from meshwright.cost.fabric import Constants, Custom, FabricProfile, Fabrics, shipped, uncontended
from meshwright.cost.reached import GATHERS, on_this
from meshwright.spec.hardware import Device
from meshwright.work import Collective, Group, Hop, Work

LIBRARIES = ("nccl", "vllm", "sglang", "trtllm")
#: Relative spread added to a kind's for each factor of ten beyond the sizes or ranks that were measured.
SPREAD_PER_DECADE = 0.05
#: Relative spread of a collective on a network whose bus bandwidth was measured: jobs of one size and kind differ by 1
#: to 9% (a robust standard deviation; the nanotron sweep's bandwidths over 16 to 512 ranks).
REACHED_SIGMA = 0.1


class CollectiveCurve(NamedTuple):
    """One collective at every size: its lines, and where they come from."""

    lines: tuple[Line, ...]
    source: str
    sigma: float
    bytes_range: tuple[float, float]
    custom: Custom | None
    custom_lines: tuple[Line, ...]
    custom_limit: float


class Network:
    """Prices collectives with one set of profiles and one library. Callable as a link of the chain."""

    def __init__(self, fabrics: Fabrics | None = None, *, library: str = "nccl", eager: bool = False):
        self.fabrics = fabrics or shipped()
        self.library, self.eager = library, eager
        self._curves: dict[tuple[str, str, Group, bool], CollectiveCurve] = {}

    def __call__(self, work: Work, device: Device) -> Estimate | None:
        """Seconds of a collective on each of its ranks; None for other work."""
        if not isinstance(work, Collective):
            return None
        group, num_bytes = work.group, work.num_bytes
        if group.size <= 1 or num_bytes <= 0:
            return Estimate(0.0, "network", "fitted", 0.0)
        key = (device.name, work.op, group, work.plain)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self._curve(work.op, group, device, plain=work.plain)
        seconds = envelope(curve.lines, num_bytes)
        if curve.custom is not None:
            seconds = self._custom(curve, num_bytes, seconds, device)
        low, high = curve.bytes_range
        if low <= num_bytes <= high or not high:
            return Estimate(seconds, "network", curve.source, curve.sigma)
        beyond = curve.source.removesuffix(EXTRAPOLATED) + EXTRAPOLATED
        decades = log2(low / num_bytes if num_bytes < low else num_bytes / high) / log2(10)
        return Estimate(seconds, "network", beyond, curve.sigma + SPREAD_PER_DECADE * decades)

    def _curve(self, op: str, group: Group, device: Device, *, plain: bool = False) -> CollectiveCurve:
        found = [self.fabrics.find(hop, device.name, device.scale_up) for hop in group.hops]
        constants = tuple(on_this(profile.constants, hop) for (profile, _), hop in zip(found, group.hops))
        profile, only_kind = found[-1]
        sigma = _sigma(profile, op, group.hops[-1])
        known = not any(kind for _, kind in found) and op in profile.sigma and not only_kind
        measured = (*profile.ranks, *(hop.reached.ranks for hop in group.hops if _told(op, hop)))
        beyond = max(1.0, group.size / max(measured, default=group.size))
        one_node = op == "all_reduce" and len(group.hops) == 1 and not plain
        custom = profile.custom.get(self.library) if one_node else None
        return CollectiveCurve(
            lines=lines(op, group, constants),
            source=_source(profile, op, group.hops[-1]) + ("" if known and beyond == 1.0 else EXTRAPOLATED),
            sigma=max(sigma, *(_sigma(profile, op, hop) for (profile, _), hop in zip(found, group.hops)))
            + SPREAD_PER_DECADE * log2(beyond) / log2(10),
            bytes_range=profile.bytes_range,
            custom=custom,
            custom_lines=custom_lines(group, profile.constants, custom) if custom else (),
            custom_limit=largest(custom, group) if custom else 0.0,
        )

    def _custom(self, curve: CollectiveCurve, num_bytes: float, nccl: float, device: Device) -> float:
        """An engine's own kernel up to its limit, NCCL beyond, never faster than at the limit."""
        limit = curve.custom_limit
        if num_bytes <= limit:
            seconds = envelope(curve.custom_lines, num_bytes)
        elif limit > 0:
            seconds = max(nccl, envelope(curve.custom_lines, limit))
        else:
            seconds = nccl
        if not self.eager:
            return seconds
        copied = seconds + 2 * num_bytes / (device.memory_gb_s * 1e9)
        host = curve.custom.eager_us
        return max(copied, host.get(device.name, host["*"]) * 1e-6)


def _told(op: str, hop: Hop) -> bool:
    """Whether a level's measurements cover an operation; gathers and scatters stand for each other."""
    known = {name for name, _ in hop.reached.busbw_gb_s} if hop.reached is not None else set()
    return op in known or (op in GATHERS and not known.isdisjoint(GATHERS))


def _sigma(profile: FabricProfile, op: str, hop: Hop) -> float:
    """A fabric's relative spread, less where the very network was measured."""
    usual = profile.sigma.get(op, profile.sigma["*"])
    return min(usual, REACHED_SIGMA) if _told(op, hop) else usual


def _source(profile: FabricProfile, op: str, hop: Hop) -> str:
    if not _told(op, hop):
        return f"{profile.name} profile, {profile.source}"
    told = ", ".join(f"{op} {value:g} GB/s" for op, value in hop.reached.busbw_gb_s)
    return f"{profile.name} profile, {profile.source}; as measured on this cluster over {hop.reached.ranks}: {told}"


def largest(custom: Custom, group: Group) -> float:
    """The largest buffer an engine's kernel is used for, that of the nearest group size measured; engines leave
    more than two ranks without NVLink to NCCL."""
    if group.hops[0].topology == "pcie" and group.size > 2:
        return 0.0
    nearest = min(custom.max_bytes, key=lambda n: (abs(log2(n / group.size)), n), default=None)
    return 0.0 if nearest is None else custom.max_bytes[nearest]


def custom_lines(group: Group, constants: Constants, custom: Custom) -> tuple[Line, ...]:
    """One shot: every rank reads all buffers. Two shots: its share of each, a barrier, then the others' sums."""
    n, hop = group.size, group.hops[0]
    port = hop.gb_s * 1e9 * uncontended(hop, constants)
    start = custom.start_us * 1e-6
    one = (start, (n - 1) / (port * custom.one_shot))
    return one, (start + custom.barrier_us * 1e-6, 2 * (n - 1) / n / (port * custom.two_shot))


_nccl: Network | None = None


def link(work: Work, device: Device) -> Estimate | None:
    """The link of the cost chain: NCCL, from the shipped profiles."""
    global _nccl
    if _nccl is None:
        _nccl = Network()
    return _nccl(work, device)
