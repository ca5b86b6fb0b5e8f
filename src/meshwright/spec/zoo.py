"""A zoo of blocks: tuned models cut into blocks, of which they share those that are the base's: ``zoo=8:own=2``."""

from __future__ import annotations

import msgspec

#: Most blocks of a model.
MOST_BLOCKS = 4096


class Zoo(msgspec.Struct, frozen=True):
    """Every tuned model as a chain of so many ``blocks`` of layers. Its last ``own`` ones are its own; those before are
    the base model's, or equivalent to them, and lie there once for all tenants."""

    blocks: int
    own: int = 1

    def text(self) -> str:
        """Return the form that :func:`zoo` reads back."""
        return f"{self.blocks}" + (f":own={self.own}" if self.own != 1 else "")

    def chain(self, tuned: int) -> tuple[tuple[int, int], ...]:
        """Return the chain of a tuned model (-1: the base) as (owner, place in the chain); shared blocks are owned by
        -1."""
        shared = self.blocks - self.own if tuned >= 0 else self.blocks
        return tuple((-1 if i < shared else tuned, i) for i in range(self.blocks))


def zoo(text: str) -> Zoo | None:
    """Read ``8`` or ``8:own=2``: no more own blocks than there are, 0 where tuned models differ in nothing."""
    count, *options = text.split(":")
    own = "1"
    for option in options:
        key, _, own = option.partition("=")
        if key != "own" or len(options) > 1:
            return None
    if not all(part.isdecimal() and len(part) < 6 for part in (count, own)):
        return None
    found = Zoo(int(count), int(own))
    return found if 0 < found.blocks <= MOST_BLOCKS and found.own <= found.blocks else None
