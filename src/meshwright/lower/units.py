"""Units: the layers of a model as a plan runs them, and the stages composed of them."""

from __future__ import annotations

from functools import cached_property, lru_cache

import msgspec

from meshwright.lower.partition import segments
from meshwright.spec.architecture import EMBEDDING, HEAD


class Unit(msgspec.Struct, frozen=True, cache_hash=True):
    """A layer as it is run: ``kind`` is its place in the model's kinds of layers, ``recompute`` its mode.
    ``plain``: its gradients travel in no code where those of others do. ``level``: whose modules it is of, where
    replicas' models are made of modules. ``lowered``: for each kind of slices, the words of the operators in fewer
    bits, () where no kind has any."""

    kind: int
    recompute: str
    plain: bool = False
    level: int = 0
    lowered: tuple[tuple[str, ...], ...] = ()

    @property
    def is_block(self) -> bool:
        """Whether the unit is a block of the stack, not the embedding or the head."""
        return self.kind >= 0


#: Passes that recompute nothing, so that they are the same under every recompute mode.
NEVER_AGAIN = ("F", "W")


@lru_cache(maxsize=1024)
def unit_of(
    kind: int,
    recompute: str = "none",
    *,
    plain: bool = False,
    level: int = 0,
    lowered: tuple[tuple[str, ...], ...] = (),
) -> Unit:
    """The one object for a layer of a kind and a level under a recompute mode, whose gradients may be ``plain`` and
    some of whose operators may be ``lowered``."""
    return Unit(kind, recompute, plain, level, lowered)


class Composition(msgspec.Struct, frozen=True, dict=True, cache_hash=True):
    """The units of a stage in order; ``segments`` groups them layer by layer (embedding and head join the layer
    next to them), which is how gradients and gathered parameters are exchanged."""

    units: tuple[Unit, ...]

    @cached_property
    def segments(self) -> tuple[tuple[Unit, ...], ...]:
        blocks = [i for i, u in enumerate(self.units) if u.is_block]
        first, last = (blocks[0], blocks[-1] + 1) if blocks else (0, 0)
        return segments(self.units[first:last], self.units[:first], self.units[last:])


@lru_cache(maxsize=4096)
def composition_of(units: tuple[Unit, ...]) -> Composition:
    """The one object for a stage of these layers."""
    return Composition(units)


@lru_cache(maxsize=4096)
def named(which: str, units: tuple[Unit, ...]) -> str:
    """A pass over some layers in words: ``BW 4 layers + head``."""
    first = ["embedding" for u in units if u.kind == EMBEDDING]
    last = ["head" for u in units if u.kind == HEAD]
    return f"{which} " + " + ".join([*first, f"{sum(u.is_block for u in units)} layers", *last])
