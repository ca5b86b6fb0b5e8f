"""Exchanges of data parallelism are differences of placements: derived, and carried out on simulated ranks."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.layers.algebra import AxisMesh, assemble, carry_out, distribute, prove, transfers
from meshwright.sync.fragments import AGAIN, FOLDED, GATHERED, GRADIENTS, MOMENTS, PARAMETERS, PLACES, REFRESHED
from meshwright.sync.placed import OWN, STATE, TERMS, WHOLE, StateMoves, moves, places, product


def test_the_collectives_of_zero_follow_from_where_state_is_made_and_read():
    assert moves(TERMS, STATE) == StateMoves(within="reduce_scatter", across="all_reduce")
    assert moves(STATE, WHOLE) == StateMoves(within="all_gather", across="")
    assert moves(OWN, STATE) == StateMoves(within="", across="all_reduce")
    assert moves(STATE, STATE) == StateMoves(within="", across="")
    derived = {what: moves(*ways) for what, ways in PLACES.items()}
    assert derived[GRADIENTS] == derived[FOLDED] == moves(TERMS, STATE)
    assert derived[GATHERED] == derived[AGAIN] == derived[REFRESHED] == moves(STATE, WHOLE)
    assert derived[PARAMETERS] == derived[MOMENTS] == moves(OWN, STATE)


@pytest.mark.parametrize(("within", "across"), [(1, 4), (4, 1), (2, 3)])
def test_a_step_on_simulated_ranks_moves_state_as_derived(within, across):
    """Rows of a batch lie on all ranks, a matrix whole on each: terms of the matrix's gradient, exchanged as the
    placements say, are shards of the gradient of the whole batch, and updated shards make the matrix again."""
    mesh = AxisMesh.of(within=within, across=across)
    rng = np.random.default_rng(within)
    rows, matrix, seen = rng.standard_normal((12, 5)), rng.standard_normal((5, 3)), rng.standard_normal((12, 3))
    parts = distribute(mesh, (product().rows,) * 2, rows)
    behind = distribute(mesh, (product().result,) * 2, seen)
    held = {at: parts[at].T @ behind[at] for at in mesh.ranks}  # the gradient's terms
    for one in transfers(mesh, places()[TERMS], places()[STATE], matrix.shape):
        held = carry_out(mesh, one, held)
    whole = rows.T @ seen
    assert assemble(mesh, places()[STATE], held) == pytest.approx(whole, abs=1e-12)
    shards = distribute(mesh, places()[STATE], matrix)
    assert all(held[at].shape == shards[at].shape for at in mesh.ranks)
    updated = {at: shards[at] - 0.1 * held[at] for at in mesh.ranks}
    for one in transfers(mesh, places()[STATE], places()[WHOLE], matrix.shape):
        updated = carry_out(mesh, one, updated)
    for at in mesh.ranks:
        assert updated[at] == pytest.approx(matrix - 0.1 * whole, abs=1e-12)


def test_every_difference_of_places_is_what_the_algebra_proves():
    for made, read in set(PLACES.values()):
        assert prove(AxisMesh.of(within=4, across=2), places()[made], places()[read], (10, 3)) < 1e-12
