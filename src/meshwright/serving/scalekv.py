"""ScaleKV: budgets by layer for visual autoregressive models (Li et al. 2025, 2505.19602).

Layers whose attention is spread over many tokens (drafters) keep many, those that look at few (refiners) keep few; over
all layers that is a tenth of the cache for the paper's models.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.kv_budget import KvShares


class ScaleKV(msgspec.Struct, frozen=True):
    """The budget."""

    name: str = "scalekv"
    title: str = "budgets by layer, drafters and refiners (ScaleKV)"
    usual: float = 0.1
    wanted: str = "the share of tokens that stay, over all layers"
    counts: bool = False

    def shares(self, number: float, width: int) -> KvShares:
        """Return the shares: what is dropped is neither kept nor read."""
        return KvShares(number, number)


POLICY = ScaleKV()
