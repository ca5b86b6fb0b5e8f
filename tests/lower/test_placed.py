"""Collectives derived from placements, against the pairs of the papers and against products of whole tensors."""

import numpy as np
import pytest

from meshwright.layers.algebra import PARTIAL, REPLICATE, AxisMesh, assemble, carry_out, distribute, transfers
from meshwright.layers.placed import (
    COLUMNS,
    HEADS,
    LOOKED_UP,
    QUERIES,
    ROWS_CUT,
    SCORED,
    TOKENS,
    CollectivePair,
    crossing,
    split,
)
from meshwright.layers.signatures import SIGNATURES, dual, wanted

MESH = AxisMesh.of(axis=2)


def test_pairs_of_collectives_are_those_that_the_papers_write_down():
    into, out = COLUMNS.inputs[0], ROWS_CUT.out
    # Shoeybi et al. 1909.08053, section 3: f is an identity and an all-reduce, g an all-reduce and an identity
    assert crossing(REPLICATE, into, COLUMNS.out) == CollectivePair("", "all_reduce")
    assert crossing(out, REPLICATE) == CollectivePair("all_reduce", "")
    # Korthikanti et al. 2205.05198, section 4.2.2: g a gather and a reduce-scatter, its conjugate the other way round
    assert crossing(TOKENS, into, COLUMNS.out) == CollectivePair("all_gather", "reduce_scatter")
    assert crossing(out, TOKENS) == CollectivePair("reduce_scatter", "all_gather")
    # a table cut by rows leaves terms of a sum when it is looked up in, and is a product by columns for scores
    assert (LOOKED_UP.out, SCORED.inputs[0], SCORED.out) == (PARTIAL, REPLICATE, COLUMNS.out)
    # Jacobs et al. 2309.14509, section 3: all-to-alls around attention, the same ones for gradients
    assert crossing(TOKENS, HEADS.inputs[0], HEADS.out) == CollectivePair("all_to_all", "all_to_all")
    assert crossing(HEADS.out, TOKENS) == CollectivePair("all_to_all", "all_to_all")
    # keys and values gathered for queries that are shared; terms of their gradients are summed where they came from
    assert crossing(TOKENS, QUERIES.inputs[1], QUERIES.out) == CollectivePair("all_gather", "reduce_scatter")


@pytest.mark.parametrize("signature", SIGNATURES["product"])
@pytest.mark.parametrize("home", [0, TOKENS, 2, REPLICATE, PARTIAL])
def test_a_product_of_parts_behind_what_is_derived_is_that_of_whole_tensors(home, signature):
    read, matrix, out = signature
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(shape) for shape in ((2, 4, 6), (6, 8), (2, 4, 8)))
    shape, cut = x.shape, {-1: -1, 0: 0, 1: 1}[matrix]

    def moved(parts, source, target, size):
        ops = transfers(MESH, (source,), (target,), size)
        for one in ops:
            parts = carry_out(MESH, one, parts)
        return parts, "".join(one.op for one in ops if one.op not in ("slice", "keep"))

    parts, forward = moved(distribute(MESH, (home,), x), home, read, shape)
    weights = distribute(MESH, (cut,), w)
    made = {at: parts[at] @ weights[at] for at in MESH.ranks}
    assert assemble(MESH, (out,), made) == pytest.approx(x @ w, rel=1e-12, abs=1e-12)

    gradients = distribute(MESH, wanted((out,)), g)
    left = dual((read,), (out,))[0]
    back = {at: gradients[at] @ weights[at].T for at in MESH.ranks}
    back, backward = moved(back, left, wanted((home,))[0], shape)
    assert assemble(MESH, wanted((home,)), back) == pytest.approx(g @ w.T, rel=1e-12, abs=1e-12)
    assert crossing(home, read, out) == CollectivePair(forward, backward)


def test_an_operator_that_has_no_such_signature_is_not_split():
    with pytest.raises(LookupError, match="no norm has input 0 at 2"):
        split("norm", 0, 2)
