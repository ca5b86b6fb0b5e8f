"""PowerSGD (Vogels et al. 1905.13727): a matrix travels as two thin factors, one step of a power iteration.

P = M Q is summed over the ranks and made orthonormal, then Q = M' P is; the sum of all matrices is P Q'. Both sums are
plain all-reduces. The next step begins with this Q (warm start), and what the factors lost is added to the next values.
Each weight is a matrix of its own; vectors, and matrices that two factors would not make smaller, travel as they are.
Values of no known shape, such as a shard that cuts through weights, are one nearly square matrix, as those of torch's
``batched_powerSGD_hook`` are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from math import isqrt
from typing import Any

import numpy as np

from meshwright.sync.codecs import Codec, Factors, Tensor
from meshwright.sync.options import RuleOption

RANK = RuleOption(name="rank", what="the rank of the factors", default=4)
#: What a column's length is never divided below.
TINY = 1e-30


def factors(n: int, tensors: tuple[Tensor, ...] = (), *, rank: int) -> tuple[Factors, ...]:
    """The matrices among n values that factors make smaller; of values of no known shape the least square, without rows
    that hold none."""
    if not tensors:
        columns = isqrt(max(n, 1) - 1) + 1
        rows = max(1, -(-n // columns))
        return (Factors(0, rows, columns, 1, min(rank, rows)),)
    found, at = [], 0
    for one in tensors:
        cut = min(one.rank or rank, one.rows, one.columns)
        if (one.rows + one.columns) * cut < one.rows * one.columns:
            found.append(Factors(at, one.rows, one.columns, one.times, cut))
        at += one.size
    return tuple(found)


def orthonormal(p: Any) -> Any:
    """Make the columns of matrices [..., rows, rank] orthonormal in their order (Gram-Schmidt), in place; of numpy or
    of torch."""
    for i in range(p.shape[-1]):
        column = p[..., i]
        for j in range(i):
            column -= (p[..., j] * column).sum(-1)[..., None] * p[..., j]
        column /= ((column * column).sum(-1) ** 0.5 + TINY)[..., None]
    return p


def summed(
    matrices: list[Any],
    qs: list[Any],
    orthonormals: Callable[[list[Any]], list[Any]] = lambda ps: [orthonormal(p) for p in ps],
) -> Generator[list[Any], list[Any], tuple[list[Any], list[Any]]]:
    """One power iteration on the sums over ranks of matrices [times, rows, columns] like this rank's, each from its q
    [times, columns, rank]. Yields what is to be summed, twice, and is sent the sums; returns ps and the next qs, whose
    products p q' are approximations of the sums. `orthonormals` makes the columns of all ps orthonormal."""
    ps = yield [m @ q for m, q in zip(matrices, qs)]
    ps = orthonormals(ps)
    qs = yield [m.swapaxes(-1, -2) @ p for m, p in zip(matrices, ps)]
    return ps, qs


def begun(one: Factors) -> np.ndarray:
    """The first q [times, columns, rank], which all ranks draw alike."""
    return np.random.default_rng(0).standard_normal((one.times, one.columns, one.rank))


def encode(x: np.ndarray, *, rank: int) -> np.ndarray:
    """Factor values [n] of no known shape by themselves, from the first q: the bytes of P, then of Q."""
    (one,) = factors(len(x), rank=rank)
    m = np.zeros(one.end, x.dtype)
    m[: len(x)] = x
    m = m.reshape(1, one.rows, one.columns)
    p = orthonormal(m @ begun(one).astype(x.dtype))
    return np.concatenate((p.reshape(-1), (m.swapaxes(-1, -2) @ p).reshape(-1))).view(np.uint8)


def decode(wire: np.ndarray, n: int, dtype: np.dtype, *, rank: int) -> np.ndarray:
    """Multiply the factors of such bytes."""
    (one,) = factors(n, rank=rank)
    values = wire.view(dtype)
    p, q = values[: one.left].reshape(one.rows, one.rank), values[one.left :].reshape(one.columns, one.rank)
    return (p @ q.T).reshape(-1)[:n]


def wire_bytes(n: int, element_bytes: int, *, rank: int) -> int:
    """Return the bytes of both factors of values of no known shape."""
    (one,) = factors(n, rank=rank)
    return (one.left + one.right) * element_bytes


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
