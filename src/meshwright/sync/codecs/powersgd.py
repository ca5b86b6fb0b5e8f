"""PowerSGD (Vogels et al. 1905.13727): a matrix travels as two thin factors, one step of a power iteration.

P = M Q is summed over the ranks and made orthonormal, then Q = M' P is; the sum of all matrices is P Q'. Both sums are
plain all-reduces. The next step begins with this Q (warm start), and what the factors lost is added to the next values.
All values that are exchanged together are laid out as one nearly square matrix, as torch's ``batched_powerSGD_hook``
does; the paper makes a matrix of each layer, and leaves vectors as they are.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from math import isqrt
from typing import Any

import numpy as np

from meshwright.sync.codecs import Codec, Factors
from meshwright.sync.options import RuleOption

RANK = RuleOption(name="rank", what="the rank of the factors", default=4)
#: What a column's length is never divided below.
TINY = 1e-30


def factors(n: int, *, rank: int) -> Factors:
    """The least square of n values, without rows that hold none, and a rank that it can have."""
    columns = isqrt(max(n, 1) - 1) + 1
    rows = max(1, -(-n // columns))
    return Factors(rows, columns, min(rank, rows))


def orthonormal(p: Any) -> Any:
    """Make the columns of a matrix orthonormal in their order (Gram-Schmidt), in place; of numpy or of torch."""
    for i in range(p.shape[1]):
        column = p[:, i]
        for j in range(i):
            column -= (p[:, j] @ column) * p[:, j]
        column /= (column @ column) ** 0.5 + TINY
    return p


def summed(m: Any, q: Any) -> Generator[Any, Any, tuple[Any, Any]]:
    """One power iteration on the sum over ranks of matrices [rows, columns] like this rank's `m`, from `q` [columns,
    rank]. Yields what is to be summed, twice, and is sent the sum; returns the sum's approximation and the next q."""
    p = orthonormal((yield m @ q))
    q = yield m.T @ p
    return p @ q.T, q


def begun(columns: int, rank: int) -> np.ndarray:
    """The first q [columns, rank], which all ranks draw alike."""
    return np.random.default_rng(0).standard_normal((columns, rank))


def encode(x: np.ndarray, *, rank: int) -> np.ndarray:
    """Factor values [n] by themselves, from the first q: the bytes of P, then of Q."""
    rows, columns, rank = factors(len(x), rank=rank)
    m = np.zeros(rows * columns, x.dtype)
    m[: len(x)] = x
    m = m.reshape(rows, columns)
    p = orthonormal(m @ begun(columns, rank).astype(x.dtype))
    return np.concatenate((p.reshape(-1), (m.T @ p).reshape(-1))).view(np.uint8)


def decode(wire: np.ndarray, n: int, dtype: np.dtype, *, rank: int) -> np.ndarray:
    """Multiply the factors of such bytes."""
    rows, columns, rank = factors(n, rank=rank)
    values = wire.view(dtype)
    p, q = values[: rows * rank].reshape(rows, rank), values[rows * rank :].reshape(columns, rank)
    return (p @ q.T).reshape(-1)[:n]


def wire_bytes(n: int, element_bytes: int, *, rank: int) -> int:
    """Return the bytes of both factors."""
    rows, columns, rank = factors(n, rank=rank)
    return (rows + columns) * rank * element_bytes


def moved(n: int, element_bytes: int, *, rank: int) -> tuple[int, int]:
    """Bytes that adding what was lost before, making columns orthonormal and keeping what is lost now move besides the
    products."""
    wire = wire_bytes(n, element_bytes, rank=rank)
    return 3 * element_bytes * n + (2 + rank) * wire, 3 * element_bytes * n + wire


def made(values: dict[str, Any]) -> Codec:
    """Return the codec of a rank."""
    own = {"rank": values["rank"]}
    return Codec(
        name="powersgd",
        title="two thin factors",
        paper="Vogels et al., 2019, arXiv 1905.13727",
        exact=False,
        summed="stored",
        wire_bytes=partial(wire_bytes, **own),
        moved=partial(moved, **own),
        encode=partial(encode, **own),
        decode=partial(decode, **own),
        feedback=True,
        factors=partial(factors, **own),
        options=(RANK,),
        made=made,
    )


CODECS = (made({"rank": RANK.default}),)
