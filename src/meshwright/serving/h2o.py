"""H2O: of a context the recent tokens and the heavy hitters stay (Zhang et al., NeurIPS 2023, 2306.14048).

Half of the budget (rounded up) are the last tokens, half those that attention looked at most so far; each step drops
the one with the smallest sum of scores. With a budget of 20% of the tokens the paper finds the quality of the whole
cache.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.kv_budget import KvShares


class H2O(msgspec.Struct, frozen=True):
    """The budget."""

    name: str = "h2o"
    title: str = "recent tokens and heavy hitters stay (H2O)"
    usual: float = 0.2
    wanted: str = "the share of tokens that stay, or how many (819t)"
    counts: bool = True

    def shares(self, number: float, width: int) -> KvShares:
        """Return the shares: what is dropped is neither kept nor read."""
        return KvShares(number, number)


POLICY = H2O()
