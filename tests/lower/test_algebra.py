"""Placements and the collectives between them, proven on simulated ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.layers.algebra import (
    PARTIAL,
    REPLICATE,
    AxisMesh,
    assemble,
    carry_out,
    distribute,
    matmul,
    placement,
    prove,
    transfers,
    words,
)

SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def on(axes):
    return AxisMesh(tuple(zip("abc", axes)))


@settings(max_examples=150)
@given(SIZES, st.data(), st.integers(3, 9), st.integers(3, 9))
def test_transfers_leave_what_the_target_asks_for(axes, data, rows, columns):
    places = st.lists(st.sampled_from((0, 1, REPLICATE, PARTIAL)), min_size=len(axes), max_size=len(axes))
    source, target = tuple(data.draw(places)), tuple(data.draw(places))
    assert prove(on(axes), source, target, (rows, columns)) < 1e-9


@given(SIZES, st.data())
def test_what_is_distributed_comes_back(axes, data):
    place = tuple(data.draw(st.sampled_from((0, 1, REPLICATE, PARTIAL))) for _ in axes)
    tensor = np.arange(35.0).reshape(5, 7)
    assert np.allclose(assemble(on(axes), place, distribute(on(axes), place, tensor)), tensor)


@pytest.mark.parametrize(
    ("source", "target", "ops", "sent"),
    [
        # By hand, 8 x 8 on 4 ranks: a ring sends 3/4 of what it reduces, gathers 3 shards of 16.
        ("P", "R", ["all_reduce"], 96),
        ("P", "S0", ["reduce_scatter"], 48),
        ("S0", "R", ["all_gather"], 48),
        ("S0", "S1", ["all_to_all"], 12),
        ("R", "S1", ["slice"], 0),
        ("S0", "P", ["keep"], 0),
        ("S1", "S1", [], 0),
    ],
)
def test_the_collective_between_two_placements(source, target, ops, sent):
    found = transfers(AxisMesh.of(tp=4), source, target, (8, 8))
    assert [t.op for t in found] == ops
    assert sum(t.sent for t in found) == sent


def test_a_dim_that_two_axes_cut_opens_from_the_inside():
    found = transfers(AxisMesh.of(dp=2, tp=2), "S0 S0", "R S0", (8, 8))
    assert [(t.op, t.axis) for t in found] == [("all_gather", "tp"), ("all_gather", "dp"), ("slice", "tp")]


def test_what_shrinks_a_tensor_comes_before_what_grows_it():
    found = transfers(AxisMesh.of(dp=2, tp=2), "S0 P", "R S1", (8, 8))
    assert [t.op for t in found] == ["reduce_scatter", "all_gather"]


def test_an_axis_of_one_rank_moves_nothing():
    assert transfers(AxisMesh.of(tp=1), "P", "R", (4, 4)) == ()


def test_column_then_row_cut_leave_one_reduction():
    # Megatron's pair, Shoeybi et al. 2019 (1909.08053), section 3.
    mesh = AxisMesh.of(tp=4)
    first = matmul(mesh, "R", "S1", 32, 16, 64)
    second = matmul(mesh, first.out, "S0", 32, 64, 16, out="R")
    assert first.moves == () and words(first.out) == "S1"
    assert [t.op for t in second.moves] == ["all_reduce"]


def test_a_product_moves_the_smaller_operand():
    mesh = AxisMesh.of(tp=4)
    small = matmul(mesh, "S0", "S0", 4096, 8, 8, out="S0")
    assert [(t.op, t.elements) for t in small.moves] == [("all_gather", 16)]


@given(st.sampled_from(("S0", "S1", "R", "P")), st.sampled_from(("S0", "S1", "R", "P")))
def test_a_product_laid_out_is_the_product(left, right):
    mesh, rng = AxisMesh.of(tp=3), np.random.default_rng(0)
    a, b = rng.standard_normal((6, 7)), rng.standard_normal((7, 5))
    chosen = matmul(mesh, left, right, 6, 7, 5)
    x, y = distribute(mesh, left, a), distribute(mesh, right, b, seed=1)
    for one in transfers(mesh, left, chosen.left, a.shape):
        x = carry_out(mesh, one, x)
    for one in transfers(mesh, right, chosen.right, b.shape):
        y = carry_out(mesh, one, y)
    assert np.allclose(assemble(mesh, chosen.out, {at: x[at] @ y[at] for at in mesh.ranks}), a @ b)


def test_words_round_trip():
    assert words(placement(AxisMesh.of(a=2, b=2, c=2), "s0 R p")) == "S0 R P"


@pytest.mark.parametrize("text", ["S", "S0 R", "X", "", "Sx"])
def test_what_is_no_placement_is_refused(text):
    with pytest.raises(MeshwrightError, match="A001"):
        placement(AxisMesh.of(tp=2), text)


def test_a_dim_that_the_tensor_has_not_is_refused():
    with pytest.raises(MeshwrightError, match="A001"):
        transfers(AxisMesh.of(tp=2), "S2", "R", (4, 4))
