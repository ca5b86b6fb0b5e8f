"""Costs of serving iterations: tables of the programs of a forward pass, by what they depend on.

The time of an iteration is the sum of four parts, and of the host's. The token-wise part is a function of the tokens
alone, sampling of the tokens sampled. Decoding attention is a function of how many requests decode and of their mean
context: a kernel's requests share its time by their keys, which is linear in each context, so that the mean stands for
all. Prefill attention is a function of how many prompts there are, of their mean new tokens and of what is cached.
Between the nodes of a table the time is interpolated linearly; ``tests/simulate/test_iterations.py`` holds what that
leaves. With a pipeline of p stages the requests of an iteration are up to p microbatches that follow one another
through the stages: a round takes what the whole model takes for one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property, lru_cache
from math import ceil, sqrt

import msgspec
import numpy as np

from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs
from meshwright.cost.roofline import contention, streaming_share
from meshwright.lower.entry import Entry
from meshwright.lower.forward import Forward
from meshwright.simulate.layer import cost
from meshwright.spec.architecture import EMBEDDING
from meshwright.spec.hardware import Device

#: Causes whose exchanges may run beside products.
EXCHANGES = [CAUSE["tp"], CAUSE["ep"]]
#: Tokens of an iteration at which the token-wise part is priced: CUDA graphs' sizes, then ever fewer.
TOKEN_STEPS = ((1, 1, 8), (8, 8, 64), (64, 16, 256), (256, 64, 1024), (1024, 256, 4096), (4096, 1024, 16384))
#: Cached tokens in front of a prompt at which prefill is priced.
PASTS = (0.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)
#: Longest table of the token-wise part, in tokens.
MOST_TOKENS = 1 << 21
#: Forward passes whose prices are remembered for one chain of costs.
MOST_REMEMBERED = 64


class IterationCosts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Seconds of a replica's iterations on its devices.

    ``linear_s`` [tokens] and ``sampled_s`` [sampled tokens]; ``decode_s`` [requests, contexts]; ``prefill_s``
    [prompts, queries, cached] per new token of a prompt; of several attention groups ``own_s`` [tokens of a group], the
    token-wise part of what each computes of its own tokens alone. ``linear_parts`` and ``linear_spread`` [tokens,
    causes] split the token-wise part, ``sampled_parts`` [sampled, causes] the sampling. ``sigma`` is the relative error
    of the attention kernels.
    """

    linear_s: np.ndarray
    linear_parts: np.ndarray
    linear_spread: np.ndarray
    sampled_s: np.ndarray
    sampled_parts: np.ndarray
    sampled_spread: np.ndarray
    decode_s: np.ndarray
    context_node: np.ndarray
    prefill_s: np.ndarray
    batch_node: np.ndarray
    query_node: np.ndarray
    past_node: np.ndarray
    sigma: float
    own_s: np.ndarray = np.zeros(0)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest iteration in the table."""
        return len(self.linear_s) - 1

    def decoding(self, requests: int, context: float) -> float:
        """Return the attention of so many requests that decode behind so many tokens each on average."""
        node, seconds = self.nodes[0], self.decode_s.item
        at = min(max(bisect_right(node, context) - 1, 0), len(node) - 2)
        low, high = seconds(requests, at), seconds(requests, at + 1)
        return low + (context - node[at]) * ((high - low) / (node[at + 1] - node[at]))

    def evened(
        self, busiest: tuple[int, int, int], groups: int, tokens: int, prompts: int
    ) -> tuple[int, int, int, float]:
        """Return the tokens, the sequences that decode and the prompts of an iteration as if each of its attention
        groups had as much as the one with most, and the seconds that this takes longer. Graphs are filled up so; with
        prompts the others wait, and experts have the tokens that there are."""
        most, decoding, begun = busiest
        several = min(groups * decoding, len(self.decode_s) - 1), groups * begun
        if not prompts:
            return groups * most, *several, 0.0
        last = len(self.own_s) - 1
        mean = min(-(-tokens // groups), last)
        return tokens, *several, 0.0 if last < 0 else self.own_s.item(min(most, last)) - self.own_s.item(mean)

    @cached_property
    def nodes(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """The nodes of the tables as lists, to look up one place at a time: contexts, then the three of prefill."""
        return tuple(n.tolist() for n in (self.context_node, self.batch_node, self.query_node, self.past_node))

    def prefilling(self, prompts: int, queries: float, past: float) -> float:
        """Return the attention of so many prompts, each of so many new tokens behind so many on average."""
        (i, x), (j, y), (k, z) = map(_between, self.nodes[1:], (prompts, queries, past))
        one = self.prefill_s.item
        near = (one(i, j, k) * (1.0 - x) + one(i + 1, j, k) * x) * (1.0 - y)
        near += (one(i, j + 1, k) * (1.0 - x) + one(i + 1, j + 1, k) * x) * y
        far = (one(i, j, k + 1) * (1.0 - x) + one(i + 1, j, k + 1) * x) * (1.0 - y)
        far += (one(i, j + 1, k + 1) * (1.0 - x) + one(i + 1, j + 1, k + 1) * x) * y
        return (near * (1.0 - z) + far * z) * queries

    def beyond(self, tokens: int, factor: float) -> IterationCosts:
        """Return the costs with iterations of more than so many tokens, and attention of prompts, `factor` times as
        long."""
        each = np.where(np.arange(len(self.linear_s)) > tokens, factor, 1.0)
        return msgspec.structs.replace(
            self,
            linear_s=self.linear_s * each,
            linear_parts=self.linear_parts * each[: len(self.linear_parts), None],
            linear_spread=self.linear_spread * each[: len(self.linear_spread), None],
            prefill_s=self.prefill_s * factor,
            own_s=self.own_s * factor,
        )

    def scaled(self, factors: np.ndarray, attention: float) -> IterationCosts:
        """Return the costs with every cause's seconds times its factor [causes], and attention's times `attention`;
        they are not told by causes any more, which a table of many tokens is large for."""
        return msgspec.structs.replace(
            self,
            linear_s=np.ascontiguousarray(self.linear_parts @ factors),
            linear_parts=self.linear_parts[:0],
            linear_spread=self.linear_spread[:0],
            sampled_s=np.ascontiguousarray(self.sampled_parts @ factors),
            sampled_parts=self.sampled_parts[:0],
            sampled_spread=self.sampled_spread[:0],
            decode_s=self.decode_s * attention,
            prefill_s=self.prefill_s * attention,
            own_s=self.own_s * attention,
        )


def slowed(table: IterationCosts, factor: float) -> IterationCosts:
    """Return the costs with all kernels' seconds times one factor."""
    names = ("linear", "sampled")
    several = {f"{name}_{part}": getattr(table, f"{name}_{part}") * factor for name in names for part in _SPLIT}
    return msgspec.structs.replace(
        table,
        **several,
        decode_s=table.decode_s * factor,
        prefill_s=table.prefill_s * factor,
        own_s=table.own_s * factor,
    )


_SPLIT = ("s", "parts", "spread")


def _between(node: list[float], value: float) -> tuple[int, float]:
    """The node below a value and how far it is to the next one, as a share; beyond the last one further."""
    at = min(max(bisect_right(node, value) - 1, 0), len(node) - 2)
    return at, max((value - node[at]) / (node[at + 1] - node[at]), 0.0)


class ForwardPrices:
    """The prices of one forward pass on one device, each found once: token-wise parts by tokens, sampling by sampled
    tokens, attention by (requests, new tokens, cached ones)."""

    def __init__(self, forward: Forward, device: Device, costs: Costs):
        self.forward, self.device, self.costs = forward, device, costs
        self._linear: dict[int | tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._sampled: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._mixed: dict[tuple[int, int, int], float] = {}

    def linear(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds by cause of all layers' token-wise part, and those times their relative errors."""
        found = self._linear.get(tokens)
        if found is None:
            parts = min(self.forward.plan.serving.nano, tokens)
            whole = _tokenwise(self.forward, self.device, self.costs, -(-tokens // parts))
            found = self._linear[tokens] = whole if parts == 1 else self._overlapped(*whole, parts)
        return found

    def _overlapped(self, parts: np.ndarray, spread: np.ndarray, times: int) -> tuple[np.ndarray, np.ndarray]:
        """Return those of an iteration in so many nano-batches: exchanges of one run beside products of another, and
        keep a part of the device from them."""
        parts, spread = parts * times, spread * times
        hidden = _hidden(float(parts[EXCHANGES].sum()), float(parts[CAUSE["gemm"]]), contention(self.device))
        left = 1.0 - hidden / max(float(parts[EXCHANGES].sum()), 1e-30)
        parts[EXCHANGES] *= left
        spread[EXCHANGES] *= left
        return parts, spread

    def decoding(self, requests: int, context: int) -> float:
        """Return seconds of what mixes the next tokens of so many requests. Of nano-batches it runs beside products of
        another one as far as these last, and takes the share of the device that reading memory needs; the products of
        these tokens alone are counted, though prompts bring more."""
        found, nano = self.mixed(requests, 1, context - 1), self.forward.plan.serving.nano
        if min(nano, requests) == 1:
            return found
        parts, _ = self.linear(requests)
        products = max(0.0, float(parts[CAUSE["gemm"]] - parts[EXCHANGES].sum()))
        return found - _hidden(found, products, streaming_share(self.device))

    def sampled(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the same of the head on so many sampled tokens."""
        found = self._sampled.get(tokens)
        if found is None:
            found = self._sampled[tokens] = _parts(self.forward.head(tokens), self.device, self.costs)
        return found

    def mixed(self, batch: int, new: int, past: int) -> float:
        """Return seconds of what mixes the tokens of requests in all layers."""
        key = batch, max(new, 1), past
        found = self._mixed.get(key)
        if found is None:
            found = self._mixed[key] = sum(
                self._seconds(self.forward.cores(mixing, *key)) * mixing.layers for mixing in self.forward.mixing
            )
        return found

    def _seconds(self, entries: list[Entry]) -> float:
        if all(entry.queue == "compute" for entry in entries):
            return sum(self.costs.price(entry.work, self.device).seconds for entry in entries)
        return float(_parts(entries, self.device, self.costs)[0].sum())

    def own(self, tokens: int) -> float:
        """Return seconds of what an attention group computes of so many tokens of its own alone, in all layers: by how
        much one with these takes longer than one with a single token, experts being alike."""
        groups = self.forward.plan.layout.adp
        found = _tokenwise(self.forward, self.device, self.costs, groups, tokens)
        return float(found[0].sum() - self.linear(groups)[0].sum())

    def prompts(self, batch: int, new: int, past: int) -> float:
        """Return seconds of what mixes the tokens of prompts, and of the tokens by which the attention group with most
        of them has more than its part: a prompt is one group's."""
        found, groups = self.mixed(batch, new, past), self.forward.plan.layout.adp
        if groups > 1 and batch % groups:
            most = -(-batch // groups) * new
            known = self._linear.get((batch * new, most))
            if known is None:
                known = _tokenwise(self.forward, self.device, self.costs, batch * new, most)
                self._linear[batch * new, most] = known
            found += max(0.0, float(known[0].sum() - self.linear(batch * new)[0].sum()))
        return found

    def sigma(self, batch: int, context: int) -> float:
        """Return the relative error of decoding attention for a batch and a context of middle size, geometrically."""
        middle = max(1, int(sqrt(batch))), 1, max(16, int(sqrt(context) * 4))
        entries = [entry for mixing in self.forward.mixing for entry in self.forward.cores(mixing, *middle)]
        return max((self.costs.price(entry.work, self.device).sigma for entry in entries), default=0.0)


def _hidden(seconds: float, products: float, share: float) -> float:
    """Return the seconds that other work saves by running beside so many of products, on a share of the device that it
    keeps from them all the while."""
    return min(seconds, products) * (1.0 - share)


def forward_prices(forward: Forward, device: Device, costs: Costs) -> ForwardPrices:
    """Return the prices of a forward pass, which questions of one model, plan and cluster share while they share their
    `costs`."""
    known = costs.remembered
    where = msgspec.msgpack.encode((forward.mesh.cluster, device))
    key = forward.model, forward.plan, forward.unfused, forward.kv, forward.shared, forward.routing, where
    found = known.pop(key, None) or ForwardPrices(forward, device, costs)
    known[key] = found  # the last one asked for is forgotten last
    if len(known) > MOST_REMEMBERED:
        del known[next(iter(known))]
    return found


def priced(
    forward: Forward, device: Device, costs: Costs, *, tokens: int, batch: int, context: int, split: bool = True
) -> IterationCosts:
    """Return the costs of iterations of up to `tokens` tokens, `batch` requests and `context` tokens of context. Where
    they are not `split`, the token-wise part is not told by causes, which a table of many tokens is large for."""
    price = forward_prices(forward, device, costs)
    tokens = min(max(tokens, batch, 2), MOST_TOKENS)
    node = token_nodes(tokens)
    linear = [price.linear(int(n)) for n in node]
    sample_node = token_nodes(max(batch, 2))
    sampled = [price.sampled(int(n)) for n in sample_node]
    common = forward.shared if forward.plan.serving.prefix == "once" else 0  # nobody decodes behind less
    contexts = common + doubling(16.0, max(float(context - common), 32.0), 2.0)
    requests = _halving(batch)
    decode = np.array([[price.decoding(n, int(c)) for c in contexts] for n in requests])
    prompts, queries = doubling(1.0, min(max(batch, 2.0), 64.0), 1.0), doubling(1.0, float(max(tokens, 2)), 2.0)
    pasts = np.array([p for i, p in enumerate(PASTS) if i < 2 or PASTS[i - 1] < context])
    prefill = [[[price.prompts(int(b), round(q), int(p)) / q for p in pasts] for q in queries] for b in prompts]
    whole = np.arange(tokens + 1)
    alone = np.arange(max(batch, 2) + 1)
    return IterationCosts(
        linear_s=_filled(node, np.array([p.sum() for p, _ in linear]), whole),
        linear_parts=_filled(node, np.array([p for p, _ in linear]), whole if split else whole[:0]),
        linear_spread=_filled(node, np.array([s for _, s in linear]), whole if split else whole[:0]),
        sampled_s=_filled(sample_node, np.array([p.sum() for p, _ in sampled]), alone),
        sampled_parts=_filled(sample_node, np.array([p for p, _ in sampled]), alone),
        sampled_spread=_filled(sample_node, np.array([s for _, s in sampled]), alone),
        decode_s=_filled(np.array(requests), decode, np.arange(batch + 1)),
        context_node=contexts,
        prefill_s=np.array(prefill),
        batch_node=prompts,
        query_node=queries,
        past_node=pasts,
        sigma=price.sigma(batch, context),
        own_s=_own(price, tokens, forward.plan.layout.adp),
    )


def _own(price: ForwardPrices, tokens: int, groups: int) -> np.ndarray:
    """Return seconds of a group's own tokens [tokens of a group]; none where there is one group."""
    if groups == 1:
        return np.zeros(0)
    most = -(-tokens // groups)
    node = token_nodes(max(most, 2))
    return _filled(node, np.array([price.own(int(n)) for n in node]), np.arange(most + 1))


@lru_cache(maxsize=64)
def token_nodes(most: int) -> np.ndarray:
    """Return the numbers of tokens at which costs are priced, up to `most`."""
    found = [n for first, step, last in TOKEN_STEPS for n in range(first, last, step) if n <= most]
    n = TOKEN_STEPS[-1][2]
    while n < most:
        found.append(n)
        n = ceil(n * 1.25)
    return np.unique([*found, most])


def doubling(first: float, last: float, each: float) -> np.ndarray:
    """Return nodes from `first` until `last` is covered, `each` of them for a factor of two."""
    found = [first]
    while found[-1] < last or len(found) < 2:
        found.append(first * 2 ** (len(found) / each))
    return np.array(found)


def _halving(batch: int) -> list[int]:
    """Return numbers of requests up to `batch`, four for a factor of two."""
    found = {1, 2, 3, max(batch, 2)}
    n = 4.0
    while n < batch:
        found.add(round(n))
        n *= 2**0.25
    return sorted(found)


def _filled(node: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return values [at, ...] between those [node, ...], linearly; below the first node the first."""
    flat = values.reshape(len(node), -1)
    columns = [np.interp(at, node, column) for column in flat.T]
    return np.ascontiguousarray(np.stack(columns, axis=1).reshape(len(at), *values.shape[1:]))


def _parts(entries: list[Entry], device: Device, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    found = cost(entries, "F", device, costs)
    return found.parts, found.spread


def _tokenwise(
    forward: Forward, device: Device, costs: Costs, tokens: int, most: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds by cause of all layers' token-wise part, and those times their relative errors, where `most` of the
    tokens are one attention group's (0: equal parts)."""
    parts, spread, drain = np.zeros(len(PRICED)), np.zeros(len(PRICED)), 0.0
    kinds = [(EMBEDDING, 1), *enumerate(forward.model.layers_by_kind)]
    for kind, count in kinds:
        here = 1.0 if kind == EMBEDDING else forward.resident
        ways = [(forward.tokenwise(kind, int(tokens), most), here)] if here else []
        ways += [(forward.divided(kind, int(tokens)), 1.0 - here)] if here < 1.0 else []
        for entries, share in ways:
            found = cost(entries, "F", device, costs)
            parts += found.parts * count * share
            spread += found.spread * count * share
            drain = max(drain, found.drain)
    parts[CAUSE["tp"]] += drain  # what nothing hides behind the last layer
    message = forward.send(int(tokens))
    if message is not None:
        sent = costs.price(message, device)
        stages = forward.plan.layout.pp - 1
        parts[CAUSE["pp"]] += sent.seconds * stages
        spread[CAUSE["pp"]] += sent.seconds * sent.sigma * stages
    return parts, spread
