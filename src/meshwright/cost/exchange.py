"""Token exchange of expert parallelism: dispatch of tokens to the ranks of their experts, and combine of the results.

Libraries send a token once to every rank that holds one of its experts (DeepEP's normal kernels; between nodes once
to each node, and on from there), or once for every expert (low-latency kernels). A phase takes a start, a time per
token and per copy sent, and the busier of NVLink and network; seven constants, fitted to published runs.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import log2

import msgspec

from meshwright import catalog
from meshwright.cost.chain import Estimate, Link
from meshwright.cost.fabric import shipped
from meshwright.errors import MeshwrightError, nearest
from meshwright.spec.hardware import Device
from meshwright.work import Collective, Group, Work

#: Bytes of one value on the wire: block-scaled formats send a 4-byte scale per 128 values (fp8, DeepEP) or one
#: byte per 16 (nvfp4). Results come back in bf16.
WIRE_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1 + 4 / 128, "nvfp4": 0.5 + 1 / 16}
PHASES = ("dispatch", "combine")
MODES = ("normal", "low_latency", "one_sided", "two_sided")


class MoeExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange: every rank's ``tokens`` of ``hidden`` values, each to ``top_k`` of ``experts`` spread evenly over
    the group; ``dtype`` is what is dispatched."""

    phase: str
    tokens: int
    hidden: int
    top_k: int
    experts: int
    group: Group
    dtype: str = "bf16"


class ExchangeConstants(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted constants of one library's kernels for the exchange of tokens between experts.

    Attributes:
        start_us: launch, notification and first byte. token_ns: each of a rank's tokens. copy_ns: each copy sent.
        expert_us: each expert of the layer (counts are exchanged). node_us: each doubling of nodes.
        fraction, network_fraction: of an NVLink port and of a rank's NIC that large exchanges reach.
    """

    start_us: float
    token_ns: float
    copy_ns: float
    expert_us: float
    node_us: float
    fraction: float
    network_fraction: float


class ExchangeProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one fabric, mode and phase, what they were fitted to, and the spread of groups held out."""

    fabric: str
    mode: str
    phase: str
    source: str
    constants: ExchangeConstants
    sigma: float
    median_error: float
    rows: int
    tokens_range: tuple[float, float]
    ranks: tuple[int, ...]


@lru_cache(maxsize=4096)
def reached(parts: int, experts: int, top_k: int) -> float:
    """Chance that one of `parts` equal shares of the experts holds one of a token's, chosen without repetition."""
    missed, others = 1.0, experts - experts // parts
    for i in range(top_k):
        missed *= max(0, others - i) / (experts - i)
    return 1 - missed


def flows(item: MoeExchange, *, each_expert: bool) -> tuple[float, float, float]:
    """(copies sent, bytes through a rank's NVLink port, bytes through its share of the NICs) of one rank."""
    group, k, experts = item.group, item.top_k, item.experts
    n, inside = group.size, 1
    for hop in group.hops:
        inside *= 1 if hop.scale_out else hop.members
    nodes = n // inside
    if each_expert:
        copies, near, far = float(k), k * (inside - 1) / n, k * (n - inside) / n
    else:
        to_rank = reached(n, experts, k)
        copies, near = n * to_rank, (n if nodes > 1 else n - 1) * to_rank
        far = (nodes - 1) * reached(nodes, experts, k) if nodes > 1 else 0.0
    value = WIRE_BYTES[item.dtype] if item.phase == "dispatch" else WIRE_BYTES["bf16"]
    sent = item.tokens * item.hidden * value
    return item.tokens * copies, sent * near, sent * far


def exchange_seconds(item: MoeExchange, constants: ExchangeConstants, *, each_expert: bool) -> float:
    """Seconds of one exchange on each of its ranks; 0 in a group of one."""
    if item.group.size <= 1:
        return 0.0
    copies, near, far = flows(item, each_expert=each_expert)
    seconds = constants.start_us * 1e-6 + item.experts * constants.expert_us * 1e-6
    seconds += (item.tokens * constants.token_ns + copies * constants.copy_ns) * 1e-9
    moving = 0.0
    for hop in item.group.hops:
        if hop.scale_out:
            seconds += constants.node_us * 1e-6 * log2(hop.members)
            carried = far * hop.carried * hop.below * hop.exchanged
            moving = max(moving, carried / (hop.gb_s * 1e9 * constants.network_fraction))
        else:
            moving = max(moving, near * hop.carried / (hop.gb_s * 1e9 * constants.fraction))
    return seconds + moving


def price(item: MoeExchange, device: Device, *, mode: str = "normal") -> Estimate:
    """Return the seconds of one exchange of tokens between experts with a library's kernels, and their spread.

    `mode` is DeepEP's ``normal`` or ``low_latency``, or TensorRT-LLM NVLink's ``one_sided`` or ``two_sided``. A fabric
    without measurements gets the constants of one that has them; the estimate is then marked as extrapolated, with
    twice the spread.

    Raises:
        MeshwrightError: N004 for a mode nobody measured.
    """
    if mode not in MODES:
        raise MeshwrightError.one("N004", f"unknown exchange {mode!r}", help=nearest(mode, MODES))
    if item.group.size <= 1:
        return Estimate(0.0, "network", "fitted", 0.0)
    fabric = shipped().find(item.group.hops[0], device.name, device.scale_up)[0].name
    known = {p.fabric: p for p in profiles() if p.mode == mode and p.phase == item.phase}
    profile = known.get(fabric) or next(iter(known.values()))
    low, high = profile.tokens_range
    inside = profile.fabric == fabric and low <= item.tokens <= high and item.group.size <= max(profile.ranks)
    seconds = exchange_seconds(item, profile.constants, each_expert=mode == "low_latency")
    return Estimate(seconds, "network", "fitted" if inside else "extrapolated", profile.sigma * (1 if inside else 2))


def link(mode: str, fewest: int = 2) -> Link:
    """Token exchange in training by kernels of a `mode`, where experts are on other nodes and on `fewest` ranks or
    more. Inside a node, for values that are not sent in 16 bits, and for a mode of "", this link does not answer."""

    def answer(work: Work, device: Device) -> Estimate | None:
        if not mode or not isinstance(work, Collective) or work.routed is None:
            return None
        group, routed = work.group, work.routed
        if group.size < fewest or not any(hop.scale_out and hop.members > 1 for hop in group.hops):
            return None
        if work.num_bytes > WIRE_BYTES["bf16"] * routed.tokens * routed.top_k * routed.hidden:
            return None
        item = MoeExchange(
            phase=routed.phase, tokens=routed.tokens, hidden=routed.hidden, top_k=routed.top_k,
            experts=routed.experts, group=group,
        )  # fmt: skip
        return price(item, device, mode=mode)

    return answer


def served(work: Work, device: Device) -> Estimate | None:
    """Price the exchange of tokens between experts while serving, where an engine takes the fastest kernels that its
    fabric has for so many tokens (SGLang's ``deepep-mode auto``): those measured on it, else DeepEP's two."""
    if not isinstance(work, Collective) or work.routed is None or work.group.size <= 1:
        return None
    routed = work.routed
    item = MoeExchange(
        phase=routed.phase, tokens=routed.tokens, hidden=routed.hidden, top_k=routed.top_k,
        experts=routed.experts, group=work.group,
    )  # fmt: skip
    fabric = shipped().find(work.group.hops[0], device.name, device.scale_up)[0].name
    measured = {p.mode for p in profiles() if p.fabric == fabric} or {"normal", "low_latency"}
    modes = sorted(measured - {"low_latency"} if _too_many(item, fabric) else measured)
    return min((price(item, device, mode=mode) for mode in modes), key=lambda found: found.seconds)


def _too_many(item: MoeExchange, fabric: str) -> bool:
    """Whether a rank has more tokens than the buffers of low-latency kernels were ever made for."""
    limits = [p.tokens_range[1] for p in profiles() if p.mode == "low_latency" and p.fabric == fabric]
    return item.tokens > max(limits, default=0.0)


@cache
def profiles() -> tuple[ExchangeProfile, ...]:
    """The shipped profiles."""
    file = catalog.folder("profiles").joinpath("network", "exchange", "profiles.json")
    return tuple(msgspec.json.decode(file.read_bytes(), type=list[ExchangeProfile]))
