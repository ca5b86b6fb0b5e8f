"""Signatures of operators: the placements of their inputs with which every rank computes its part of the result alone.

A signature is of one axis of a mesh (``layers/algebra.py``); gradients follow from it (:func:`dual`, :func:`wanted`).
Yuan et al., 2021 (OneFlow, arXiv 2110.15032), whose signatures these are.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.layers.algebra import PARTIAL, REPLICATE, Placement

R, P = REPLICATE, PARTIAL
#: Signatures of each kind of operator on one axis: a placement for every input, then the result's. Dims of activations
#: are sequences, tokens of one, width; of matrices input and output, of tables rows and width.
SIGNATURES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "lookup": ((R, 0), (R, 1), (1, 2), (0, P), (R, R)),
    "norm": ((0, R, 0), (1, R, 1), (R, R, R)),
    "product": ((0, R, 0), (1, R, 1), (R, 1, 2), (2, 0, P), (P, R, P), (R, R, R)),
    "scores": ((0, R, 0), (1, R, 1), (R, 0, 2), (2, 1, P), (P, R, P), (R, R, R)),
    "attention": ((0, 0, 0, 0), (2, 2, 2, 2), (1, R, R, 1), (R, R, R, R)),
    "sum": ((0, 0, 0), (1, 1, 1), (2, 2, 2), (P, P, P), (R, R, R)),
    "activation": ((0, 0), (1, 1), (2, 2), (R, R)),
    "gated activation": ((0, 0, 0), (1, 1, 1), (2, 2, 2), (R, P, P), (R, R, R)),
    "loss": ((0, P), (1, P), (R, R)),
    "relay": tuple((p, p) for p in (0, 1, 2, R, P)),
}


def dual(place: Placement, out: Placement) -> Placement:
    """Where an operator leaves the gradient of an input that lay at `place`, its result lying at `out`: a shard's with
    the shard; of a copy every rank has its part's term, or the whole where all computed the same; of a term the
    whole."""
    return tuple(p if p >= 0 else R if p == P or z == R else P for p, z in zip(place, out))


def wanted(home: Placement) -> Placement:
    """Where the gradient of a tensor is wanted that lies at `home`: with its shards, whole where there are copies, and
    where there are terms of a sum, whole as well."""
    return tuple(p if p >= 0 else R for p in home)
