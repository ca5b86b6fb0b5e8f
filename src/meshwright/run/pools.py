"""A rank of a plan of several pools: which of them it is in, what that holds and does, and its links to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from meshwright.lower import order
from meshwright.lower.pools import orders
from meshwright.plan import Plan, Pool
from meshwright.plan.pool import held
from meshwright.run.links import End, Link
from meshwright.run.mesh import LINKS, ProcessMesh
from meshwright.schedules.actions import Actions
from meshwright.spec.model import Model


class Place(NamedTuple):
    """The pool of a rank: ``layers`` of the model (first, end) and the ``actions`` of its ranks. ``begins`` and
    ``ends`` say whether it holds the embedding and the head."""

    pool: Pool
    layers: tuple[int, int]
    actions: Actions
    begins: bool = True
    ends: bool = True

    @property
    def frozen(self) -> bool:
        return self.pool.frozen


class Places(NamedTuple):
    """All pools of a plan, and the one of this rank."""

    plan: Plan
    every: tuple[Place, ...]
    own: Place

    def links(
        self, mesh: ProcessMesh, *, length: int, hidden: int, dtype: torch.dtype, backward: bool = True
    ) -> tuple[Link | None, Link | None]:
        """This rank's side of the link before its pool and of the one after it, of sequences of `length` tokens; None
        where there is none, or another rank has it. Without a `backward` gradients do not come back over it."""
        before = after = None
        by_name = {place.pool.name: place for place in self.every}
        for link in self.plan.links:
            source, target = by_name[link.source], by_name[link.target]
            last = End(source.pool, source.actions, source.actions.num_stages - 1)
            first = End(target.pool, target.actions, 0)
            for own, other, is_source in ((last, first, True), (first, last, False)):
                here = own.pool is self.own.pool and mesh["pp"].index == own.actions.stage_ranks[own.stage][0]
                if not here:
                    continue
                groups = tuple(mesh[f"{way}{link.source}:{link.target}"] for way in LINKS)
                made = Link(
                    own, other, mesh, groups, source=is_source, back=backward and not source.frozen,
                    length=length, hidden=hidden, dtype=dtype,
                )  # fmt: skip
                before, after = (before, made) if is_source else (made, after)
        return before, after


def places(
    plan: Plan, model: Model, rank: int, global_batch: int, params: Mapping[str, Any], passes: int = 1
) -> Places:
    """The pools of a legal, executable plan, on the rank `rank` of the job. `params` are those of its schedule, or of
    each pool's by its name. Of one pool each microbatch has so many `passes`."""
    if not plan.several:
        actions = order(plan, passes * plan.num_microbatches(global_batch), dict(params))
        own = Place(plan.pools[0], (0, model.num_layers), actions)
        return Places(plan, (own,), own)
    every = []
    for pool, layers, actions in zip(plan.pools, held(plan.pools, model), orders(plan, global_batch, params)):
        ends = layers[1] == model.num_layers
        every.append(Place(pool, layers, actions, begins=layers[0] == 0, ends=ends))
    own = next(place for place in every if rank in range(*place.pool.devices))
    return Places(plan, tuple(every), own)
