"""No code: values travel as they are stored."""

from __future__ import annotations

import numpy as np

from meshwright.sync.codecs import Codec

NONE = Codec(
    name="none",
    title="as stored",
    paper="",
    exact=True,
    summed="stored",
    wire_bytes=lambda n, element_bytes: n * element_bytes,
    moved=lambda n, element_bytes: (0, 0),
    encode=lambda x: np.ascontiguousarray(x).view(np.uint8),
    decode=lambda wire, n, dtype: wire.view(dtype)[:n],
)

CODECS = (NONE,)
