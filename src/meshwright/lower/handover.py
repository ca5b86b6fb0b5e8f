"""Handover of a request's keys and values from the ranks of one replica to those of another.

Every layer of a request lies on the ranks of a pipeline stage, split by heads among those of one attention group (and
by tokens, where context is parallel). Another layout wants other parts: each receiving rank gets what it keeps, and
the ranks that have a layer send equal shares of it.
"""

from __future__ import annotations

from meshwright.lower.forward import Forward
from meshwright.lower.partition import stage_layers
from meshwright.lower.place import Mesh
from meshwright.plan import Pool
from meshwright.work import Group


class KvCrossing:
    """The crossing of a cache from a replica to another: the ``stages`` of the two with layers in common, and the
    most ``layers`` of a stage of the source."""

    def __init__(self, source: Forward, target: Forward):
        self._target = target
        self._kinds = tuple(
            [[source.model.pattern[layer] for layer in stage] for stage in held]
            for held in (stage_layers(source.plan, source.model), stage_layers(target.plan, target.model))
        )
        first, second = (one.plan.layout for one in (source, target))
        self._copies = second.attention_tp * second.cp / (first.attention_tp * first.cp)
        self.layers = max(map(len, self._kinds[0]))
        self.stages = tuple(_overlaps(*(tuple(map(len, held)) for held in self._kinds)))

    def bytes_of(self, tokens: int) -> tuple[float, float]:
        """Return the bytes of so many tokens of a request that the busiest rank of the source sends, and the busiest
        of the target receives."""
        kinds = {kind for held in self._kinds for stage in held for kind in stage}
        each = {kind: self._target.layer_bytes(kind, tokens) for kind in kinds}
        sent, received = (max(sum(each[kind] for kind in stage) for stage in held) for held in self._kinds)
        return sent * self._copies, received


def _overlaps(first: tuple[int, ...], second: tuple[int, ...]) -> list[tuple[int, int]]:
    """The pairs of stages of two pipelines, of so many layers each, that have layers in common."""
    out, begin = [], 0
    for s, count in enumerate(first):
        other = 0
        for t, width in enumerate(second):
            if begin < other + width and other < begin + count:
                out.append((s, t))
            other += width
        begin += count
    return out


def pairs(source: Pool, target: Pool, between: KvCrossing, mesh: Mesh) -> dict[tuple[int, int], tuple[Group, ...]]:
    """Return for every replica of the source and every one of the target the pairs of ranks that send to each other, of
    each pair of stages that has layers in common. `mesh` is all devices of the cluster in a row."""
    starts = [_starts(pool) for pool in (source, target)]
    return {
        (i, j): tuple(dict.fromkeys(mesh.pair(first[s], second[t]) for s, t in between.stages))
        for i, first in enumerate(starts[0])
        for j, second in enumerate(starts[1])
    }


def _starts(pool: Pool) -> list[list[int]]:
    """The first rank of every stage of every replica of a pool, on the cluster: replicas lie next to one another."""
    layout = pool.plan.layout
    size = layout.num_ranks // layout.dp
    return [
        [pool.devices[0] + replica * size + stage * (size // layout.pp) for stage in range(layout.pp)]
        for replica in range(layout.dp)
    ]
