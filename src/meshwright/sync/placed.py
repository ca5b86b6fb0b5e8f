"""Exchanges of data parallelism derived from placements: state lies one way where it is made, another where it is read.

Along two axes of data parallelism, the ranks that share one copy of the state and the copies, the rows of a batch are
cut and every rank holds the parameters whole while it computes. The signature of a product (``layers/signatures.py``)
then leaves a term of their gradient on every rank. The update reads gradients as the state lies that it changes, and
passes read parameters whole; each difference is a collective (``layers/algebra.py``).

    >>> moves(TERMS, STATE)
    StateMoves(within='reduce_scatter', across='all_reduce')
    >>> moves(STATE, WHOLE)
    StateMoves(within='all_gather', across='')
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.layers.algebra import PARTIAL, REPLICATE, AxisMesh, Placement, transfers
from meshwright.layers.signatures import SIGNATURES, dual

#: Ranks that share one copy and copies, as axes; which collective it is does not depend on how many there are.
AXES = AxisMesh.of(within=2, across=2)
#: A product of rows of the batch with a whole matrix: the placements of rows, matrix and result on one axis.
ROWS, MATRIX, RESULT = next(one for one in SIGNATURES["product"] if one[:2] == (0, REPLICATE))
#: Parameters as passes read them; their gradients as backwards leave them; state as it is kept, a shard of each copy;
#: and values that every copy has made its own, which are a term of their mean.
WHOLE: Placement = (MATRIX, MATRIX)
TERMS: Placement = dual(WHOLE, (RESULT, RESULT))
STATE: Placement = (0, REPLICATE)
OWN: Placement = (0, PARTIAL)


class StateMoves(NamedTuple):
    """The collectives between two placements of state, over the ranks that share one copy and over the copies; "" where
    nothing is exchanged."""

    within: str
    across: str


@lru_cache(maxsize=64)
def moves(made: Placement, read: Placement) -> StateMoves:
    """Return the collectives that bring state from where it is made to where it is read."""
    ops = {one.axis: one.op for one in transfers(AXES, made, read, (4,)) if one.op not in ("slice", "keep")}
    return StateMoves(ops.get("within", ""), ops.get("across", ""))
