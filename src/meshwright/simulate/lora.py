"""Costs of LoRA adapters in an iteration: products of low rank beside the model's own, a group of tokens for each.

The query, key, value and output projections have adapters, as S-LoRA's evaluation has (2311.03285, section 7.1): tokens
are taken to the rank and back, in kernels that gather the weights of as many adapters as the batch has. A product of
rank r does r operations for each byte it moves, so that memory bounds it at all ranks in use. Under tensor
parallelism both are split as the projections are, and what stands between the two products is gathered over the ranks
(its section 6).
"""

from __future__ import annotations

import msgspec

from meshwright.cost import Costs
from meshwright.lower.forward import Forward
from meshwright.spec.hardware import Device
from meshwright.work import Collective, Elementwise

#: Bytes of an adapter's numbers.
ELEMENT = 2.0


def projections(forward: Forward) -> list[tuple[int, int, int]]:
    """Return (inputs, outputs, layers) of the projections that have adapters, whole."""
    model, found = forward.model, []
    hidden = model.hidden
    of_layers = [(spec, n) for kind, n in enumerate(model.layers_by_kind) for spec in model.blocks[kind].attentions]
    for spec, layers in of_layers:
        keys = spec.kv_heads * spec.head_dim
        found += [
            (hidden, spec.heads * spec.head_dim, layers),
            (hidden, keys, layers),
            (hidden, spec.kv_heads * spec.v_head_dim, layers),
            (spec.heads * spec.v_head_dim, hidden, layers),
        ]
    return found


def adapter_bytes(forward: Forward, rank: float) -> float:
    """Return the bytes of an adapter on a rank of the replica."""
    tp = forward.plan.layout.tp
    return sum((a + b) * layers for a, b, layers in projections(forward)) * rank * ELEMENT / tp


class LoraCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters of a replica: ``load_s`` to bring one to the device, which is hidden behind the iteration before
    where they are ``prefetched``; ``merge_s`` to put one into the model's weights in place of another, after which
    they cost nothing; nor do those that are ``whole`` models, beside which there is nothing. ``prices`` are the seconds
    of an iteration by (tokens, adapters)."""

    forward: Forward
    device: Device
    costs: Costs
    rank: int
    load_s: float
    prefetched: bool = False
    merge_s: float = 0.0
    whole: bool = False
    prices: dict[tuple[int, int], float] = {}

    def seconds(self, tokens: int, adapters: int) -> float:
        """Return what so many tokens with so many different adapters add to an iteration; both are rounded up, tokens
        to an eighth of a power of two and adapters to a power of two."""
        if not tokens or self.merge_s or self.whole:
            return 0.0
        step = max(1, 1 << max(tokens.bit_length() - 4, 0))
        key = -(-tokens // step) * step, 1 << (adapters - 1).bit_length()
        found = self.prices.get(key)
        if found is None:
            found = self.prices[key] = self._priced(*key)
        return found

    def loading(self, loads: int, before_s: float) -> float:
        """Return the seconds that an iteration waits for so many adapters, behind one that took `before_s`."""
        if self.merge_s:
            return loads * (self.load_s + self.merge_s)
        return max(0.0, loads * self.load_s - (before_s if self.prefetched else 0.0))

    def _priced(self, tokens: int, adapters: int) -> float:
        tp, group, total = self.forward.plan.layout.tp, self.forward.mesh.group("tp"), 0.0
        groups = min(adapters, tokens)
        for inputs, outputs, layers in projections(self.forward):
            whole = inputs == self.forward.model.hidden
            down, up = (inputs, self.rank / tp) if whole else (inputs / tp, self.rank), (outputs / tp, self.rank)
            moved = ELEMENT * sum(groups * wide * low + tokens * (wide + low) for wide, low in (down, up))
            each = self.costs.price(Elementwise(num_bytes=moved, kernels=2, fused=True), self.device).seconds
            if tp > 1:
                between = Collective(op="all_gather", num_bytes=tokens * self.rank * ELEMENT, group=group)
                each += self.costs.price(between, self.device).seconds
            total += each * layers
        return total
