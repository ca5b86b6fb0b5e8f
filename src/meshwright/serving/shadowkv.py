"""ShadowKV: keys of low rank on the device, values in the host's memory (Sun et al., ICML 2025, 2410.21465).

Of every token the device keeps its key as ``RANK`` numbers, and of every chunk of ``CHUNK`` tokens one mean key
(landmark); chunks that a landmark stands badly for (outliers) stay whole. A next token scores the landmarks, rebuilds
the keys of the best chunks and fetches their values over PCIe, but for those that the step before had fetched: behind
the scores of its layer, before the layer's attention, and beside nothing but the keys that are rebuilt.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.kv_budget import KvShares

#: Rank of the keys and tokens of a chunk (section 4.1), and the share of chosen chunks that the step before had already
#: (section 4.2: "over 60%").
RANK, CHUNK, KEPT = 160, 8, 0.6
#: Share of the tokens in outliers, which every next token reads: 48 chunks of 8 of 122K; unverified.
OUTLIERS = 0.003


class ShadowKV(msgspec.Struct, frozen=True):
    """The budget; 1.56% is the paper's sparse budget (section 5.1)."""

    name: str = "shadowkv"
    title: str = "low-rank keys on the device, values in host memory (ShadowKV)"
    usual: float = 0.0156
    wanted: str = "the share of tokens that attention reads"
    counts: bool = False

    def shares(self, number: float, width: int) -> KvShares:
        """Return the shares, of keys and values of twice `width` numbers; what is read is a context at most."""
        both = 2.0 * width
        landmarks = width / CHUNK / both
        keys = min(RANK, width) / both
        read, fetched = landmarks + number + OUTLIERS, number * 0.5 * (1 - KEPT)
        return KvShares(keys + landmarks + OUTLIERS, min(read, 1.0), fetched, chosen=True)


POLICY = ShadowKV()
