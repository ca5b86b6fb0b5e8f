"""Computations carried out by real processes: forward, derived backward and descent against torch's autograd."""

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.answer import joined
from meshwright.answer.placed_prices import PlacedPrices
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.layers.algebra import AxisMesh
from meshwright.layers.derivative import derived
from meshwright.papers.checks.relational import SMALL
from meshwright.run.computed import start
from meshwright.run.relations import einsum
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.computation_file import read

pytest.importorskip("highspy")


def own(steps, dims, **inputs):
    return read({"steps": steps, "dims": dims, "inputs": inputs})


#: Attention of edges, without a softmax of their own: exp, a sum over sources, its reciprocal, a join.
EDGES = own(
    """
    G[d,s] = A[d,s] * Q[d,e] * K[s,e]
    X[d,s] = exp(G[d,s])
    N[d] = sum(s) X[d,s]
    M[d] = reciprocal(N[d])
    Z[d,e] = X[d,s] * V[s,e]
    O[d,e] = Z[d,e] * M[d]
    T[d] = sum(e) O[d,e]
    C = sum(d) T[d]
    loss = C + B
    B = sum(s, e) V[s,e] * V[s,e]
    """,
    {"d": 9, "s": 9, "e": 4},
    A={"keys": ["d", "s"], "nonzeros": 60, "values": "uniform"},
    Q={"keys": ["d", "e"], "trained": True},
    K={"keys": ["s", "e"], "trained": True},
    V={"keys": ["s", "e"], "trained": True},
)
ALL = {**SMALL, "edges": EDGES}


def at_random(computation, mesh, seed):
    """Signatures and homes drawn at random, and the copies that they need: by the same program with costs that are
    drawn."""
    ranks = int(np.prod(mesh.sizes))
    prices = PlacedPrices(mesh, load_cluster(f"{ranks}xh100"), "fp32", standard())
    program = joined._JoinProgram(derived(computation), prices, 1e12)
    drawn = np.random.default_rng(seed).random(program.num_chosen)
    rest = np.full(len(program.cost) - program.num_chosen, 1e-3)
    return program.read(program.solve([], 60.0, [*drawn, *rest]), ways=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALL)
def test_any_placement_on_three_ranks_computes_what_one_process_does(name, seed):
    found = at_random(ALL[name], AxisMesh.of(x=3), seed)
    assert len(set(found.homes.values())) > 2 and found.moves
    trained = start(found, 2)
    assert trained.worst < 1e-9 and trained.losses[1] != trained.losses[0]


@pytest.mark.parametrize("name", ["factorisation", "gcn", "network"])
def test_any_placement_on_two_axes_computes_what_one_process_does(name):
    found = at_random(ALL[name], AxisMesh.of(a=2, b=2), 5)
    assert any(len({p for p in place if p >= 0}) == 2 for place in found.homes.values())
    assert start(found, 2).worst < 1e-9


@pytest.mark.parametrize("name", ALL)
def test_the_placement_that_is_chosen_computes_what_one_process_does(name):
    found = joined.placed_joins(ALL[name], load_cluster("2xh100"), standard(), ways=False)
    assert start(found, 3).worst < 1e-9


def test_numbers_that_are_none_are_no_agreement():
    """Logarithms of normal numbers are none on either side."""
    sides = {"X": {"keys": ["i"]}, "W": {"keys": ["i"], "trained": True}}
    made = own("Y[i] = log(X[i])\nloss = Y[i] * W[i]", {"i": 12}, **sides)
    with pytest.raises(MeshwrightError, match="the loss of step 0 is nan"):
        start(joined.placed_joins(made, load_cluster("2xh100"), standard(), ways=False), 1)


def test_terms_of_a_sum_are_added_by_their_places_where_ranks_have_them_in_another_order():
    """Of 4 numbers of a head's width, 3 ranks have 2, 1 and 1, and torch's product leaves its dims otherwise for 1."""
    made = msgspec.structs.replace(SMALL["attention"], joins={"G": {"": "e"}})
    found = joined.placed_joins(made, load_cluster("3xh100"), standard(), ways=False)
    assert [(m.tensor, m.op) for m in found.moves if m.tensor == "G"] == [("G", "all_reduce")]
    assert start(found, 1).worst < 1e-9


def test_of_three_tensors_the_pair_that_leaves_the_least_is_joined_first():
    """The values of 5 x 6 pairs, of vectors of 700 numbers each: their products are summed before they are masked."""

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.most = max(self.most, out.numel())
            return out

    here, u, v = (torch.rand(shape, dtype=torch.float64) for shape in ((5, 6), (5, 700), (6, 700)))
    with Largest() as seen:
        made = einsum(("uv", "ur", "vr"), "uv", (here, u, v))
    assert torch.allclose(made, here * (u @ v.T)) and seen.most == 6 * 700
