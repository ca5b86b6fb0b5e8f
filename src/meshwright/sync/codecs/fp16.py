"""IEEE half precision: 16 bits, of which 10 are the fraction. Sums beyond 65504 are infinite, as mixed precision's."""

from __future__ import annotations

import numpy as np

from meshwright.sync.codecs import Codec


def encode(x: np.ndarray) -> np.ndarray:
    """Round values [n] to half precision: uint8 [2n]."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float16).view(np.uint8)


FP16 = Codec(
    name="fp16",
    title="half precision",
    paper="Micikevicius et al., 2017, arXiv 1710.03740",
    exact=False,
    summed="fp16",
    wire_bytes=lambda n, element_bytes: 2 * n,
    moved=lambda n, element_bytes: ((element_bytes + 2) * n, (element_bytes + 2) * n),
    encode=encode,
    decode=lambda wire, n, dtype: wire.view(np.float16)[:n].astype(dtype),
    each=True,
)

CODECS = (FP16,)
