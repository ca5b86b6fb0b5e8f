"""The record of a plan: its facets, or its pools with what flows between them."""

from __future__ import annotations

import msgspec

from meshwright.plan.facets import facets as _table
from meshwright.plan.facets.overlap import gathers_once
from meshwright.plan.facets.passes import FIXED
from meshwright.plan.pool import Elsewhere, Pool, PoolLink
from meshwright.plan.pool import settled as settled_pools
from meshwright.plan.written import write, write_pools
from meshwright.sync.policy import read

#: The facets of a pool.
FACETS = tuple(_table())

_Facets = msgspec.defstruct(
    "_Facets", [(name, facet.record, facet.record()) for name, facet in _table().items()], frozen=True, kw_only=True
)


class Plan(_Facets, frozen=True, kw_only=True):
    """Pools of ranks and everything that is decided about them; a record of every facet (``plan/facets/``).

    The facets are those of the only pool. Where there are ``several``, each has its own, the plan's are errors for
    whom asks, and ``links`` say what flows between them (``plan/pool.py``).
    """

    several: tuple[Pool, ...] = ()
    links: tuple[PoolLink, ...] = ()

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools: the plan itself where it is one."""
        return self.several or (Pool(plan=self),)

    @property
    def num_ranks(self) -> int:
        """Ranks of all pools together, with peers beside them."""
        if self.several:
            return sum(pool.plan.layout.num_ranks for pool in self.several)
        return self.layout.num_ranks + self.passes.peers

    @property
    def asks_peers(self) -> bool:
        """Whether peers do passes that whoever trains asks them for."""
        return not self.several and self.passes.policy != FIXED

    @property
    def num_stages(self) -> int:
        """Virtual stages: chunks over the whole pipeline."""
        return self.layout.pp * self.pipeline.vpp

    @property
    def etp(self) -> int:
        return self.experts.etp or self.layout.tp

    @property
    def edp(self) -> int:
        """Replicas of an expert: data parallelism of the expert mesh."""
        return self.layout.tp * self.layout.cp * self.layout.dp // (self.experts.ep * self.etp)

    @property
    def head_swap(self) -> int:
        """Context-parallel ranks that swap heads for tokens: all, some next to each other, or 1."""
        return self.layout.cp if self.sequence.algorithm == "ulysses" else self.sequence.ulysses

    @property
    def gathers_after(self) -> bool:
        """Whether all parameters are gathered together, between the update and the next forward."""
        return self.overlap.gather == "after" and gathers_once(self.layout.zero, self.layout.pp)

    def num_microbatches(self, global_batch: int) -> int:
        """Microbatches a pipeline runs per step, the most of any where they differ; exact once :func:`check` has
        passed."""
        return max(self.layout.shares, default=global_batch // (self.trainers * self.pipeline.microbatch))

    @property
    def trainers(self) -> int:
        """Replicas that have a part of the batch, the first ones; all but those that help others to sum."""
        return max(1, self.layout.dp - read(self.sync.policy).helpers)

    def text(self) -> str:
        """The shortest words that ``parse`` turns back into this plan."""
        return write_pools(self.several, self.links) if self.several else write(self)

    def __str__(self) -> str:
        return self.text()

    def on(self, num_devices: int) -> Plan:
        """This plan with ``dp`` filled in to use `num_devices`, when it was left open; pools on devices."""
        if self.several:
            return msgspec.structs.replace(self, several=settled_pools(self.several, num_devices))
        layout = self.layout
        if layout.dp:
            return self
        other = layout.tp * layout.pp * layout.cp
        dp = max(1, (num_devices - self.passes.peers) // other)
        return msgspec.structs.replace(self, layout=msgspec.structs.replace(layout, dp=dp))


def joined(pools: tuple[Pool, ...], links: tuple[PoolLink, ...]) -> Plan:
    """The plan of several pools."""
    names = tuple(pool.name for pool in pools)
    return Plan(**dict.fromkeys(FACETS, Elsewhere(names)), several=pools, links=links)
