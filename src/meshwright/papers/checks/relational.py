"""Computations as joins: their backward derived, their placement chosen, and both carried out by processes."""

from __future__ import annotations

import msgspec

from meshwright.answer.joined import JoinedPrediction, placed_joins
from meshwright.assign.program import installed
from meshwright.cost import standard
from meshwright.errors import Infeasible
from meshwright.layers.derivative import derived
from meshwright.papers.outcome import Check, Fact, Figure, Outcome, at_most, by_processes
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.computation import JOIN, Computation
from meshwright.spec.computation_file import read

ROUNDING = 1e-9
#: Ways of a matrix product C[i,j] = A[i,k] B[k,j].
BROADCAST, CO_PARTITIONED = "cut along i, B copied", "co-partitioned on k, results summed"


def _own(steps: str, dims: dict[str, int], **inputs: str) -> Computation:
    """A computation from its steps; an input is its keys, with ``*`` behind them where it is trained, then a number of
    rows where it is sparse or a word for its values."""
    tables = {}
    for name, words in inputs.items():
        keys, *more = words.split()
        tables[name] = {"keys": keys.rstrip("*").split(","), "trained": keys.endswith("*")}
        for word in more:
            tables[name] |= {"nonzeros": int(word), "values": "uniform"} if word.isdecimal() else {"values": word}
    return read({"steps": steps, "dims": dims, "inputs": tables})


def _product(i: int, k: int, j: int) -> Computation:
    steps = "C[i,j] = A[i,k] * B[k,j]\nloss = C[i,j] * Y[i,j]"
    return _own(steps, {"i": i, "k": k, "j": j}, A="i,k", B="k,j*", Y="i,j")


FACTORISATION = """
here[u,v] = present(R[u,v])
P[u,v] = here[u,v] * U[u,r] * V[v,r]
E[u,v] = P[u,v] - R[u,v]
loss = 1/u * E[u,v] * E[u,v]
"""
GCN = """
XW[s,h] = X[s,f] * W1[f,h]
Z1[d,h] = A[d,s] * XW[s,h]
H[d,h] = relu(Z1[d,h])
HW[s,c] = H[s,h] * W2[h,c]
Z2[d,c] = A[d,s] * HW[s,c]
L[d,c] = log_softmax(Z2[d,c], c)
loss = -1/d * Y[d,c] * L[d,c]
"""
NETWORK = """
Z[b,h] = X[b,i] * W1[i,h]
Y1[b,h] = Z[b,h] + b1[h]
H[b,h] = gelu(Y1[b,h])
O[b,o] = H[b,h] * W2[h,o]
E[b,o] = O[b,o] - T[b,o] + b2[o]
S[b,o] = square(E[b,o])
loss = 1/b * S[b,o]
"""
ATTENTION = """
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
"""
_IHE = {"WQ": "i,h,e*", "WK": "i,h,e*", "WV": "i,h,e*", "WO": "h,e,i*"}
#: Small computations, of lengths that three ranks do not divide.
SMALL = {
    "factorisation": _own(FACTORISATION, {"u": 13, "v": 11, "r": 5}, U="u,r*", V="v,r*", R="u,v 37 normal"),
    "gcn": _own(
        GCN,
        {"d": 14, "s": 14, "f": 7, "h": 5, "c": 4},
        X="s,f",
        A="d,s* 41",
        Y="d,c one-hot",
        W1="f,h*",
        W2="h,c*",
    ),
    "network": _own(
        NETWORK, {"b": 10, "i": 7, "h": 11, "o": 5}, X="b,i", T="b,o", W1="i,h*", W2="h,o*", b1="h*", b2="o*"
    ),
    "attention": _own(ATTENTION, {"b": 4, "s": 5, "t": 5, "i": 7, "h": 4, "e": 4}, X="b,s,i*", T="b,s,i", **_IHE),
}
#: Keys of each along which all joins that have one are cut, one after the other.
KEYS = {"factorisation": "uvr", "gcn": "dshc", "network": "biho", "attention": "sthe"}
#: A graph as large as ogbn-papers100M (vertices, edges, features, classes), two convolutions of 128.
PAPERS = {"d": 111_059_956, "s": 111_059_956, "f": 128, "h": 128, "c": 172}


def _made(computation: Computation, cluster: Cluster, **along: str) -> JoinedPrediction:
    """The placement; joins that are named are cut along these keys."""
    said = {join: {"": key} for join, key in along.items()}
    return placed_joins(msgspec.structs.replace(computation, joins=said), cluster, standard(), ways=False)


def _taken(computation: Computation, cluster: Cluster, join: str) -> str:
    return next(way.way for way in _made(computation, cluster).ways if way.join == join)


def _along(computation: Computation, key: str) -> dict[str, str]:
    """All joins that have a key, forward and backward, to be cut along it."""
    steps = derived(computation).steps
    return {step.output: key for step in steps if step.kind == JOIN and key in (*step.keys, *step.summed)}


def ra_autodiff() -> Outcome:
    """Choices by size, as its introduction has an optimiser make them; a graph that no device holds; and four
    computations whose derived backward processes carry out."""
    if not installed():
        return Outcome(unchecked=("choices of joins: highspy is not installed",))
    cluster = load_cluster("8xh100")
    small, large = _product(4_000_000, 256, 64), _product(2048, 8_000_000, 64)
    ratios = [
        Figure(
            "4,000,000 x 256 by 256 x 64 on 8 H100: both cut on the shared key, over the small side copied",
            None,
            _made(small, cluster, C="k").step_s / _made(small, cluster, C="i").step_s,
            "x",
        ),
        Figure(
            "2,048 x 8,000,000 by 8,000,000 x 64 on 8 H100: the smaller side copied, over both cut on the shared key",
            None,
            _made(large, cluster, C="i").step_s / _made(large, cluster, C="k").step_s,
            "x",
        ),
    ]
    graph = _own(GCN, PAPERS, X="s,f", A="d,s 1615685872", Y="d,c", W1="f,h*", W2="h,c*")
    fits = _made(graph, load_cluster("4x8xh100"))
    found = Outcome(
        figures=(
            *ratios,
            Figure("a step of two convolutions over 1.6 billion edges, 32 H100", None, fits.step_s, "s"),
        ),
        facts=(
            Fact("a matrix that is small is broadcast", _taken(small, cluster, "C") == BROADCAST),
            Fact("two large ones are co-partitioned on the join's key", _taken(large, cluster, "C") == CO_PARTITIONED),
            Fact("nothing is faster than what is chosen for the graph, by the solver's bound", fits.gap == 0.0),
            Fact(
                "a graph that no device holds is placed", not _holds(graph) and fits.held_bytes <= fits.capacity_bytes
            ),
        ),
        baseline="the other way of making the same join, all else chosen anew; one process with torch's autograd",
        missing=(
            "that it is competitive with systems made for one purpose, of which its abstract gives no figure: none of "
            "those runs here",
        ),
        assumptions=("rows of a sparse relation are spread evenly over its keys, and nothing is overlapped",),
    )

    def real() -> Outcome:
        from meshwright.run.computed import start

        three = load_cluster("3xh100")
        worst = [
            start(_made(computation, three, **_along(computation, key)), 2).worst
            for name, computation in SMALL.items()
            for key in KEYS[name]
        ]
        what = (
            f"{len(SMALL)} computations on 3 processes, all joins that have a key cut along it, {len(worst)} keys: "
            "forward, derived backward and descent, furthest from one process with torch's autograd"
        )
        return Outcome(figures=(at_most(what, max(worst), ROUNDING, headline=True),))

    return by_processes(found, "derived backwards of real processes", real)


def _holds(computation: Computation) -> bool:
    """Whether one device has room for a step."""
    try:
        _made(computation, load_cluster("1xh100"))
    except Infeasible:
        return False
    return True


CHECKS = {"ra_autodiff": Check(ra_autodiff)}
