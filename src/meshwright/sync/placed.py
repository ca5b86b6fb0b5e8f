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

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meshwright.layers.algebra import Placement

#: How what is exchanged may lie: gradients as backwards leave them, state as it is kept (a shard of each copy),
#: parameters as passes read them, and values that every copy has made its own, which are a term of their mean.
TERMS, STATE, WHOLE, OWN = "terms", "state", "whole", "own"


class StateMoves(NamedTuple):
    """The collectives between two placements of state, over the ranks that share one copy and over the copies; "" where
    nothing is exchanged."""

    within: str
    across: str


class BatchProduct(NamedTuple):
    """The signature of a product of a batch's rows with a whole matrix along one axis: the placements of its rows, of
    the matrix and of the result."""

    rows: int
    matrix: int
    result: int


@cache
def product() -> BatchProduct:
    """Return how a product of the batch's rows lies along each axis of data parallelism."""
    from meshwright.layers.algebra import REPLICATE
    from meshwright.layers.signatures import SIGNATURES

    return next(BatchProduct(*one) for one in SIGNATURES["product"] if one[:2] == (0, REPLICATE))


@cache
def places() -> dict[str, Placement]:
    """Return the placements of :data:`TERMS` and the others, on the ranks that share a copy and on the copies. The
    algebra is loaded here, as the words of a plan are read without numpy."""
    from meshwright.layers.algebra import PARTIAL, REPLICATE
    from meshwright.layers.signatures import dual

    batch = product()
    whole, result = (batch.matrix,) * 2, (batch.result,) * 2
    return {WHOLE: whole, TERMS: dual(whole, result), STATE: (0, REPLICATE), OWN: (0, PARTIAL)}


@cache
def moves(made: str, read: str) -> StateMoves:
    """Return the collectives that bring state from where it is made to where it is read."""
    from meshwright.layers.algebra import AxisMesh, transfers

    # which collective it is depends neither on how many ranks there are nor on how long a tensor is
    mesh, lies = AxisMesh.of(within=2, across=2), places()
    found = transfers(mesh, lies[made], lies[read], (4,))
    ops = {one.axis: one.op for one in found if one.op not in ("slice", "keep")}
    return StateMoves(ops.get("within", ""), ops.get("across", ""))
