"""Top-k: the largest magnitudes alone travel, each with its place; the others wait and are added to the next values
(Stich et al. 1809.07599)."""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import Any

import numpy as np

from meshwright.sync.codecs import Codec
from meshwright.sync.options import RuleOption

SHARE = RuleOption(name="share", what="the part of the values that is sent", default=0.01, share=True)


def count(share: float, n: int) -> int:
    """Return how many of n values are sent: at least one."""
    return min(n, max(1, ceil(share * n - 1e-9)))


def encode(x: np.ndarray, *, share: float) -> np.ndarray:
    """Choose the largest of values [n]: their places as uint32, ascending, then themselves."""
    k = count(share, len(x))
    places = np.sort(np.argpartition(np.abs(x), len(x) - k)[len(x) - k :]) if k else np.empty(0, np.int64)
    return np.concatenate((places.astype(np.uint32).view(np.uint8), np.ascontiguousarray(x[places]).view(np.uint8)))


def decode(wire: np.ndarray, n: int, dtype: np.dtype, *, share: float) -> np.ndarray:
    """Put the values of such bytes in their places among n zeros."""
    k = count(share, n)
    out = np.zeros(n, dtype)
    out[wire[: 4 * k].copy().view(np.uint32)] = wire[4 * k :].copy().view(dtype)
    return out


def wire_bytes(n: int, element_bytes: int, *, share: float) -> int:
    """Return the bytes of the places and the values."""
    return count(share, n) * (4 + element_bytes)


def moved(n: int, element_bytes: int, *, share: float) -> tuple[int, int]:
    """Bytes that choosing moves, in two passes (one for the threshold, one for what lies above it), and that zeroing
    and placing do."""
    sent = wire_bytes(n, element_bytes, share=share)
    return 2 * element_bytes * n + sent, element_bytes * n + sent


def made(values: dict[str, Any]) -> Codec:
    """Return the codec that sends a share."""
    own = {"share": values["share"]}
    return Codec(
        name="topk",
        title="the largest values and their places",
        paper="Stich et al., 2018, arXiv 1809.07599",
        exact=False,
        summed="",
        wire_bytes=partial(wire_bytes, **own),
        moved=partial(moved, **own),
        encode=partial(encode, **own),
        decode=partial(decode, **own),
        feedback=True,
        options=(SHARE,),
        made=made,
    )


CODECS = (made({"share": SHARE.default}),)
