"""Pass 2: which layers each virtual stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from meshwright.plan import Plan
from meshwright.spec.layers import Moe
from meshwright.spec.model import Model

T = TypeVar("T")


def even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage as equal as they go; where they do not divide, the last and first stages, which also hold
    the head and the embedding, get one fewer, then the others from the end."""
    base, extra = divmod(num_layers, num_stages)
    counts = [base + 1] * num_stages if extra else [base] * num_stages
    if extra:
        spare = num_stages - extra
        order = [num_stages - 1, 0, *range(num_stages - 2, 0, -1)]
        for stage in order[:spare]:
            counts[stage] -= 1
    return tuple(counts)


def by_thresholds(model: Model, num_stages: int) -> tuple[int, ...]:
    """Layers per stage as nanotron cuts a model (``build_model`` in its models/base.py): in order, layers go to a stage
    until those so far cost more than its share and those before it, so that the first stage holds a layer more than its
    share and the last one less. A layer costs its projections, with keys and values of all heads, and three MLP
    matrices.

    Its code counts the head's matrix too. The memory of first stages and the times measured with it, over 2 to 32
    stages, are those of a layer more and not of the several that a wide vocabulary would add: the head is left out.
    """
    costs = [_cost(model, layer) for layer in range(model.num_layers)]
    total = sum(costs)
    counts, stage, spent = [0] * num_stages, 0, 0.0
    for cost in costs:
        counts[stage] += 1
        spent += cost
        if spent > total * (stage + 1) / num_stages:
            stage += 1
    return tuple(counts)


def _cost(model: Model, layer: int) -> float:
    block = model.block(layer)
    width = block.mlp.top_k * block.mlp.ffn if isinstance(block.mlp, Moe) else getattr(block.mlp, "ffn", 0)
    mixing = sum(4.0 * a.heads * a.head_dim * model.hidden for a in block.attentions)
    if block.mixer is not None:
        mixing += block.mixer.num_params(model.hidden)
    return mixing + 3.0 * width * model.hidden


def segments(layers: Sequence[T], before: Sequence[T] = (), after: Sequence[T] = ()) -> tuple[tuple[T, ...], ...]:
    """The layers of a stage as they are exchanged: one by one, with what stands before the first and after the last."""
    cuts = [(layer,) for layer in layers] or [()]
    cuts[0] = (*before, *cuts[0])
    cuts[-1] = (*cuts[-1], *after)
    return tuple(cuts)


def stage_layers(plan: Plan, model: Model) -> tuple[tuple[int, ...], ...]:
    """Return the layers of every virtual stage, in order."""
    counts = plan.layout.stages or even(model.num_layers, plan.num_stages)
    out, first = [], 0
    for count in counts:
        out.append(tuple(range(first, first + count)))
        first += count
    return tuple(out)
