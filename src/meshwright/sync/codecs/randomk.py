"""Random-k: values at places that all ranks draw alike, so that no place travels and sums are taken on the way.

Either what is left out waits for the next time (Stich et al. 1809.07599), or what is sent is scaled so that its mean is
right."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from meshwright.sync.codecs import Codec
from meshwright.sync.codecs.topk import SHARE, count
from meshwright.sync.options import RuleOption

YES, NO = "yes", "no"
FEEDBACK = RuleOption(
    name="feedback", what="whether what is left out is added to the next values", default=YES, choices=lambda: (YES, NO)
)


def places(n: int, share: float, seed: int) -> np.ndarray:
    """Draw the places of n values that are sent."""
    return np.random.default_rng(seed).choice(n, count(share, n), replace=False, shuffle=False)


def encode(x: np.ndarray, seed: int, *, share: float, scaled: bool) -> np.ndarray:
    """Choose of values [n] those at the drawn places."""
    chosen = x[places(len(x), share, seed)]
    return (chosen * x.dtype.type(len(x) / max(1, len(chosen))) if scaled else chosen).view(np.uint8)


def decode(wire: np.ndarray, n: int, dtype: np.dtype, seed: int, *, share: float) -> np.ndarray:
    """Put the values of such bytes in the drawn places among n zeros."""
    out = np.zeros(n, dtype)
    out[places(n, share, seed)] = wire.view(dtype)
    return out


def made(values: dict[str, Any]) -> Codec:
    """Return the codec that sends a share, with what it leaves out fed back or not."""
    share, feedback = values["share"], values["feedback"] == YES
    return Codec(
        name="randomk",
        title="values at random places",
        paper="Stich et al., 2018, arXiv 1809.07599",
        exact=False,
        summed="stored",
        wire_bytes=lambda n, element_bytes: count(share, n) * element_bytes,
        moved=lambda n, element_bytes: (2 * count(share, n) * element_bytes, (n + count(share, n)) * element_bytes),
        encode=partial(encode, share=share, scaled=not feedback),
        decode=partial(decode, share=share),
        drawn="shared",
        unbiased=not feedback,
        feedback=feedback,
        options=(SHARE, FEEDBACK),
        made=made,
    )


CODECS = (made({"share": SHARE.default, "feedback": YES}),)
