"""Computations carried out by real processes: forward, derived backward and descent against torch's autograd."""

import msgspec
import numpy as np
import pytest

from meshwright.answer import joined
from meshwright.answer.placed_prices import PlacedPrices
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.layers.algebra import AxisMesh
from meshwright.layers.derivative import derived
from meshwright.run.computed import start
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.computation_file import read

pytest.importorskip("highspy")


def own(steps, dims, **inputs):
    return read({"steps": steps, "dims": dims, "inputs": inputs})


#: Lengths that no number of ranks divides.
FACTORISATION = own(
    """
    here[u,v] = present(R[u,v])
    P[u,v] = here[u,v] * U[u,r] * V[v,r]
    E[u,v] = P[u,v] - R[u,v]
    loss = 1/u * E[u,v] * E[u,v]
    """,
    {"u": 13, "v": 11, "r": 5},
    U={"keys": ["u", "r"], "trained": True},
    V={"keys": ["v", "r"], "trained": True},
    R={"keys": ["u", "v"], "nonzeros": 37},
)
GCN = own(
    """
    XW[s,h] = X[s,f] * W1[f,h]
    Z1[d,h] = A[d,s] * XW[s,h]
    H[d,h] = relu(Z1[d,h])
    HW[s,c] = H[s,h] * W2[h,c]
    Z2[d,c] = A[d,s] * HW[s,c]
    L[d,c] = log_softmax(Z2[d,c], c)
    loss = -1/d * Y[d,c] * L[d,c]
    """,
    {"d": 14, "s": 14, "f": 7, "h": 5, "c": 3},
    A={"keys": ["d", "s"], "nonzeros": 41, "values": "uniform", "trained": True},
    X={"keys": ["s", "f"]},
    Y={"keys": ["d", "c"], "values": "one-hot"},
    W1={"keys": ["f", "h"], "trained": True},
    W2={"keys": ["h", "c"], "trained": True},
)
NETWORK = own(
    """
    Z[b,h] = X[b,i] * W1[i,h]
    Y1[b,h] = Z[b,h] + b1[h]
    H[b,h] = gelu(Y1[b,h])
    O[b,o] = H[b,h] * W2[h,o]
    E[b,o] = O[b,o] - T[b,o] + b2[o]
    S[b,o] = square(E[b,o])
    loss = 1/b * S[b,o]
    """,
    {"b": 9, "i": 7, "h": 11, "o": 5},
    X={"keys": ["b", "i"]},
    T={"keys": ["b", "o"]},
    W1={"keys": ["i", "h"], "trained": True},
    W2={"keys": ["h", "o"], "trained": True},
    b1={"keys": ["h"], "trained": True},
    b2={"keys": ["o"], "trained": True},
)
ATTENTION = own(
    """
    Q[b,s,h,e] = X[b,s,i] * WQ[i,h,e]
    K[b,t,h,e] = X[b,t,i] * WK[i,h,e]
    V[b,t,h,e] = X[b,t,i] * WV[i,h,e]
    G[b,h,s,t] = 0.5 * Q[b,s,h,e] * K[b,t,h,e]
    D[b,h,s,t] = softmax(G[b,h,s,t], t)
    M[b,s,h,e] = D[b,h,s,t] * V[b,t,h,e]
    O[b,s,i] = M[b,s,h,e] * WO[h,e,i]
    E[b,s,i] = O[b,s,i] + X[b,s,i]
    F[b,s,i] = tanh(E[b,s,i])
    loss = F[b,s,i] * T[b,s,i]
    """,
    {"b": 3, "s": 5, "t": 5, "i": 6, "h": 3, "e": 4},
    X={"keys": ["b", "s", "i"], "trained": True},
    T={"keys": ["b", "s", "i"]},
    WQ={"keys": ["i", "h", "e"], "trained": True},
    WK={"keys": ["i", "h", "e"], "trained": True},
    WV={"keys": ["i", "h", "e"], "trained": True},
    WO={"keys": ["h", "e", "i"], "trained": True},
)
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
ALL = {"factorisation": FACTORISATION, "gcn": GCN, "network": NETWORK, "attention": ATTENTION, "edges": EDGES}


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
    made = msgspec.structs.replace(ATTENTION, joins={"G": {"": "e"}})
    found = joined.placed_joins(made, load_cluster("3xh100"), standard(), ways=False)
    assert [(m.tensor, m.op) for m in found.moves if m.tensor == "G"] == [("G", "all_reduce")]
    assert start(found, 1).worst < 1e-9
