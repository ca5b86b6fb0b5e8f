"""Units: the layers of a model as a plan runs them, and the stages composed of them."""

from __future__ import annotations

from functools import cached_property, lru_cache

import msgspec

from meshwright.lower.partition import segments


class Unit(msgspec.Struct, frozen=True, cache_hash=True):
    """A layer as it is run: ``kind`` is a block's index, ``"embedding"`` or ``"head"``; ``recompute`` its mode."""

    kind: int | str
    recompute: str


#: Passes that recompute nothing, so that they are the same under every recompute mode.
NEVER_AGAIN = ("F", "W")


@lru_cache(maxsize=256)
def unit_of(kind: int | str, recompute: str = "none") -> Unit:
    """The one object for a layer of a kind under a recompute mode."""
    return Unit(kind, recompute)


class Composition(msgspec.Struct, frozen=True, dict=True, cache_hash=True):
    """The units of a stage in order; ``segments`` groups them layer by layer (embedding and head join the layer
    next to them), which is how gradients and gathered parameters are exchanged."""

    units: tuple[Unit, ...]

    @cached_property
    def segments(self) -> tuple[tuple[Unit, ...], ...]:
        blocks = [i for i, u in enumerate(self.units) if not isinstance(u.kind, str)]
        first, last = (blocks[0], blocks[-1] + 1) if blocks else (0, 0)
        return segments(self.units[first:last], self.units[:first], self.units[last:])


@lru_cache(maxsize=4096)
def composition_of(units: tuple[Unit, ...]) -> Composition:
    """The one object for a stage of these layers."""
    return Composition(units)


@lru_cache(maxsize=4096)
def named(which: str, units: tuple[Unit, ...]) -> str:
    """A pass over some layers in words: ``BW 4 layers + head``."""
    ends = [str(u.kind) for u in units if isinstance(u.kind, str)]
    layers = [f"{sum(not isinstance(u.kind, str) for u in units)} layers"]
    head = [e for e in ends if e == "head"]
    return f"{which} " + " + ".join([e for e in ends if e == "embedding"] + layers + head)
