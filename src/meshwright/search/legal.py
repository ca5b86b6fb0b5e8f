"""Legality of combinations of a core's parts: schedules with ZeRO stages, batch shares and recompute with schedules."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from meshwright import schedules
from meshwright.plan import Layout
from meshwright.plan.facets.overlap import AS_DECIDED, overlapped, usual_of
from meshwright.search.space import EVEN, Core, Inner, Piped, State
from meshwright.sync.record import USUAL as EVERY_STEP


def together(pp: int, piped: Piped, state: State, among: Collection[State]) -> bool:
    """Whether a schedule goes with a ZeRO stage: what two ranks hold whole cannot be sharded, and with one stage a rank
    ZeRO-2 is ZeRO-1 in other words, if that is `among` the state parts."""
    if pp == 1 or state.zero < 2:
        return True
    if schedules.get(piped.schedule).placement == "bidirectional":
        return False
    return state.zero == 3 or piped.vpp > 1 or state._replace(zero=1) not in among


def most_layers(core: Core, piped: Piped, num_layers: int) -> int:
    """Layers that every plan of a schedule has in some chunk: of balanced stages, what even ones would have."""
    if isinstance(piped.stages, tuple):
        return max(piped.stages)
    return -(-num_layers // (core.pp * piped.vpp))


@lru_cache(maxsize=4096)
def runs(pp: int, piped: Piped, shares: str | tuple[int, ...]) -> bool:
    """Whether a schedule can run as many microbatches as every kind of slices has; assigned ones it can."""
    family = schedules.get(piped.schedule)
    return isinstance(shares, str) or not any(family.legality(pp, share, piped.vpp) for share in shares)


def legal(core: Core, inner: Inner, piped: Piped, state: State, among: Collection[State], num_layers: int) -> bool:
    """Whether the parts of a point go together; `among` are the state parts of its core."""
    apart = inner.shares == EVEN or exchanges_once(core, state)
    deep = inner.recompute_layers <= most_layers(core, piped, num_layers)
    goes = as_decided(core.ep, inner.overlap, piped.schedule) and runs(core.pp, piped, inner.shares)
    whole = max(inner.recompute_portions, inner.loss_portions) == 1
    return apart and deep and goes and together(core.pp, piped, state, among) and (whole or not splits(piped))


def splits(piped: Piped) -> bool:
    """Whether a schedule puts weight gradients off, which nothing that is computed in portions does."""
    return schedules.get(piped.schedule).splits_backward


def as_decided(ep: int, overlap: tuple[str, ...], schedule: str) -> bool:
    """Whether a schedule goes with what overlaps: of what is left to schedules, with what this one decides."""
    return AS_DECIDED not in overlap or overlapped(usual_of(ep, schedule)) == overlap[:-1]


def exchanges_once(core: Core, state: State) -> bool:
    """Whether slices with other numbers of microbatches can exchange gradients: not where they do in every one, nor
    where they average parameters instead."""
    return (
        state.sync == EVERY_STEP
        and not Layout(cp=core.cp, pp=core.pp, dp=core.dp, zero=state.zero, shard=state.shard).shards_gradients
    )
