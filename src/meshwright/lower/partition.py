"""Pass 2: which layers each virtual stage holds."""

from __future__ import annotations

from meshwright.plan import Plan
from meshwright.spec.model import Model


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


def stage_layers(plan: Plan, model: Model) -> tuple[tuple[int, ...], ...]:
    """For every virtual stage, the layers it holds, in order."""
    counts = plan.layout.stages or even(model.num_layers, plan.num_stages)
    out, first = [], 0
    for count in counts:
        out.append(tuple(range(first, first + count)))
        first += count
    return tuple(out)
