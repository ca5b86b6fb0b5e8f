"""The use of devices by a serving workload: operations and memory traffic against their peaks, energy, money.

Utilisation counts what answers need, not what was executed: two operations for each parameter of the matrix products
that a token passes, those of the head for tokens of answers alone, and pairs of tokens that attend (Chowdhery et al.
2204.02311, appendix B, forward only). Traffic counts what iterations have to read: the weights once each, of experts
those that some token is routed to, and the cached tokens behind every new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright import layers
from meshwright.answer.outlook import price_source
from meshwright.answer.prediction import RankMemory
from meshwright.answer.replica import BuiltReplica
from meshwright.cost.power import MEMORY_SHARE, MEMORY_SHARES, draw
from meshwright.cost.roofline import efficiency, peak_flops
from meshwright.layers.kind import Tokens
from meshwright.plan import Plan
from meshwright.simulate.served import ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Device
from meshwright.spec.layers import Attention, Moe
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.workload import Train


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a plan's devices from the first arrival to the last token.

    ``busy`` is the share of the time that they compute, ``mfu`` and ``mbu`` the shares of their peak operations and of
    their memory's rate that answers need. ``power_w`` is drawn by devices and hosts on average, by what devices do
    (:mod:`meshwright.cost.power`); energy and money are for tokens of answers. Intervals are of what kernels draw that
    wait for memory. None where the catalog has no power or price; ``source`` says which those are.
    """

    busy: float
    mfu: float
    mbu: float
    power_w: float | None
    joules_per_token: float | None
    usd_per_million_tokens: float | None
    source: str
    power_interval_w: tuple[float, float] | None = None
    joules_interval: tuple[float, float] | None = None


def usage(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    made: BuiltReplica,
    shares: list[Requests],
    served: list[ServedRequests],
    span: float | None = None,
) -> Usage:
    """Return the use of the devices of all replicas, each as it was `made`, that served these requests in `span`
    seconds (from the first arrival to the last token, unless said)."""
    device, devices = cluster.islands[0].device, plan.layout.num_ranks
    replicas = plan.layout.dp
    if span is None:
        span = float(max(one.end_s.max() for one in served) - min(one.arrival_s.min() for one in served))
    working = sum(float(one.spent_s.sum() - one.spent_s[4] - one.spent_s[5]) for one in served)
    busy = min(1.0, working / (span * replicas))
    answers = max(1, sum(int(share.output.sum()) for share in shares))
    compute = plan.precision.compute or Train(global_batch=1, seq_len=1).dtype
    needed = sum(_flops(model, share, one) for share, one in zip(shares, served))
    read = sum(_weights_read(model, one) for one in served) * _held(made.memory, "weights") / replicas
    cache_tokens = made.blocks * made.replica.limits.block
    if cache_tokens:
        pairs = sum(float(_pairs(share.prompt + 1, share.prompt + share.output - 1).sum()) for share in shares)
        read += pairs * _held(made.memory, "keys and values") / replicas / cache_tokens
    mfu = needed / (span * devices * peak_flops(device, compute))
    mbu = read / (span * devices * device.memory_gb_s * 1e9)
    watts, said = _watts(cluster, mfu, mbu)
    whole = devices * (cluster.pue or 1.0)
    drawn, between = (None, None) if watts is None else (watts[0] * whole, (watts[1] * whole, watts[2] * whole))
    hourly = cluster.total_price_usd_hour()
    usd = None if hourly is None else hourly * devices / cluster.num_devices / 3600 * span / answers * 1e6
    return Usage(
        busy=busy,
        mfu=mfu,
        mbu=mbu,
        power_w=drawn,
        power_interval_w=between,
        joules_per_token=None if drawn is None else drawn * span / answers,
        joules_interval=None if between is None else (between[0] * span / answers, between[1] * span / answers),
        usd_per_million_tokens=usd,
        source=f"{price_source(cluster)}; {said}"
        + (f", PUE {cluster.pue:g}" if cluster.pue else ", without the site's overhead (PUE not known)"),
    )


class PoolUsage(NamedTuple):
    """The use of one pool's devices: so many of a kind, in a precision, for so many tokens of answers."""

    used: Usage
    device: Device
    devices: int
    dtype: str
    answers: int


def together(pools: Sequence[PoolUsage], answers: int) -> Usage:
    """Return the use of the devices of several pools, which made so many tokens of answers in all."""

    def weighted(name: str, weights: list[float]) -> float:
        return sum(getattr(one.used, name) * weight for one, weight in zip(pools, weights)) / sum(weights)

    def summed(name: str) -> float | None:
        values = [getattr(one.used, name) for one in pools]
        return None if None in values else sum(v * one.answers for v, one in zip(values, pools)) / answers

    def both(name: str, weight: Callable[[PoolUsage], float]) -> tuple[float, float] | None:
        found = [getattr(one.used, name) for one in pools]
        if None in found:
            return None
        low, high = (sum(pair[end] * weight(one) for pair, one in zip(found, pools)) for end in (0, 1))
        return low, high

    power = [one.used.power_w for one in pools]
    return Usage(
        busy=weighted("busy", [float(one.devices) for one in pools]),
        mfu=weighted("mfu", [one.devices * peak_flops(one.device, one.dtype) for one in pools]),
        mbu=weighted("mbu", [one.devices * one.device.memory_gb_s for one in pools]),
        power_w=None if None in power else sum(power),
        power_interval_w=both("power_interval_w", lambda one: 1.0),
        joules_per_token=summed("joules_per_token"),
        joules_interval=both("joules_interval", lambda one: one.answers / answers),
        usd_per_million_tokens=summed("usd_per_million_tokens"),
        source="; ".join(dict.fromkeys(one.used.source for one in pools)),
    )


def _held(memory: tuple[RankMemory, ...], what: str) -> float:
    """Bytes of a kind on all ranks."""
    return sum(rank.alive.get(what, 0.0) * rank.multiplicity for rank in memory)


def _pairs(first: np.ndarray, last: np.ndarray, window: int = 0) -> np.ndarray:
    """Return how many tokens are seen by those at positions `first` to `last` (counted from 1) together [n]."""

    def until(n: np.ndarray) -> np.ndarray:
        n = np.maximum(n, 0).astype(np.float64)
        if not window:
            return n * (n + 1) / 2
        inside = np.minimum(n, window)
        return inside * (inside + 1) / 2 + (n - inside) * window

    return until(last) - until(first - 1)


def _flops(model: Model, requests: Requests, served: ServedRequests) -> float:
    """The operations that the answers of a replica need."""
    last = requests.prompt + requests.output - 1  # the last token of an answer is never computed on
    tokens, answers = float((last - served.cached).sum()), float(requests.output.sum())
    train, total = Train(global_batch=1, seq_len=1), 0.0
    for count, layer in model.all_layers:
        one = Tokens(model=model, batch=train.microbatch(1), rows=1, stream=layer.stream)
        each = float(layers.of(layer).flops(layer, one).weights)
        total += count * each * (answers if layer == model.head else tokens)
    for kind, count in enumerate(model.layers_by_kind):
        for spec in model.blocks[kind].attentions:
            pairs = float(_pairs(served.cached + 1, last, _seen(spec)).sum())
            total += count * pairs * 2.0 * spec.heads * (spec.head_dim + spec.v_head_dim)
    return total


def _seen(spec: Attention) -> int:
    """The most tokens that one attends to, 0 for all."""
    return min(filter(None, (spec.window, spec.index_top_k)), default=0)


def _weights_read(model: Model, served: ServedRequests) -> float:
    """Return how many times a replica's weights are read: once an iteration, of experts those with any token."""
    count = served.tokens_seen
    mixtures = [(n, b) for n, b in zip(model.layers_by_kind, model.blocks) if isinstance(b.mlp, Moe)]
    found = float(count.sum())
    for layers_of_kind, block in mixtures:
        moe = block.mlp
        share = layers_of_kind * moe.experts * moe.expert_params(model.width(block.stream)) / model.num_params
        unread = (1.0 - moe.top_k / moe.experts) ** np.arange(len(count))
        found -= share * float(count @ unread)
    return found


def _watts(cluster: Cluster, mfu: float, mbu: float) -> tuple[tuple[float, float, float] | None, str]:
    """The mean power of a device with its part of the host, and what it lies between, and where that is from; None
    where no vendor says. Large products are taken to draw the rated power at the rate that they reach."""
    device, node = cluster.islands[0].device, cluster.islands[0].node
    operations, traffic = mfu / efficiency(device, "gemm")[0], mbu / efficiency(device, "memory")[0]
    found = [draw(device, share) for share in (MEMORY_SHARE, *MEMORY_SHARES)]
    if found[0] is None:
        return None, "rated power of the device not known"
    said = "power by what devices do: rated while they multiply, less while they wait for memory, idle power when not"
    said += " (a share of the rated one: idle power not known)" if found[0].assumed else ""
    host_w = node.power_w / node.devices
    return tuple(one.watts(operations, traffic) + host_w for one in found if one is not None), said
