"""FlexGen: keys and values on the host's drives, fetched for every next token (Sheng et al., ICML 2023, 2303.06865).

Nothing is left out, so that answers are those of the whole cache. How fast a rank reads its part of the node's drives,
or its link to the host where that is slower, bounds a next token.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.kv_budget import KvShares


class FlexGen(msgspec.Struct, frozen=True):
    """The budget: how much of a context lies on drives is what FlexGen's policy chooses, here all of it."""

    name: str = "flexgen"
    title: str = "keys and values on drives, fetched whole (FlexGen)"
    usual: float = 1.0
    wanted: str = "the share of tokens that lie on drives"
    counts: bool = False

    def shares(self, number: float, width: int) -> KvShares:
        """Return the shares: attention reads everything, and what lies on drives comes first."""
        return KvShares(1.0 - number, 1.0, number, on_drives=True)


POLICY = FlexGen()
