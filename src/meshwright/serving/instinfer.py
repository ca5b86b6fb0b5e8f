"""InstInfer: attention of next tokens inside the drives that hold the cache (Pan et al. 2024, 2409.04992).

Computational storage drives keep keys and values in flash and run sparse attention beside it; only a query and its
output cross PCIe. The device computes everything else, and how fast a drive reads its flash bounds a next token.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.kv_budget import KvShares


class InstInfer(msgspec.Struct, frozen=True):
    """The budget; an eighth is the compression of its sparse attention (SparF, section 4.2)."""

    name: str = "instinfer"
    title: str = "attention in computational storage (InstInfer)"
    usual: float = 0.125
    wanted: str = "the share of tokens that attention reads"
    counts: bool = False

    def shares(self, number: float, width: int) -> KvShares:
        """Return the shares: nothing stays on the device but what is computed at the moment."""
        return KvShares(0.0, number, 0.0, in_drive=True)


POLICY = InstInfer()
