"""Groups: which replicas meet when they exchange, as graphs with the weights of what each takes.

A graph is a cycle of *turns*, one for each exchange. In a turn every replica sends to some others and puts a weighted
mean of its own values and those that arrive in place of its own. All weights are doubly stochastic: no replica counts
more than another, so the mean over all of them stays as it is (Xiao and Boyd, 2004). A graph is one that neighbours
have for good (a ring, a torus, a regular one drawn by a seed), or one whose neighbours change from turn to turn
(one-peer exponential, Assran et al. 1811.10792; pairs of a tournament).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from math import isqrt
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshwright.errors import MeshwrightError, nearest
from meshwright.sync.options import RuleOption, read_options

if TYPE_CHECKING:
    import numpy as np


class Heard(NamedTuple):
    """A replica that another hears from, and the weight of what it says."""

    source: int
    weight: float


#: Turns of a graph whose neighbours are drawn, at most.
MOST_TURNS = 32
#: What every replica hears in one exchange, by its number; the rest of the weight is its own.
Turn = tuple[tuple[Heard, ...], ...]


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """Who meets whom among ``num_replicas``: the ``turns`` of as many exchanges, over and over."""

    name: str
    num_replicas: int
    turns: tuple[Turn, ...]

    def at(self, exchange: int) -> Turn:
        """The turn of an exchange, counted from 0."""
        return self.turns[exchange % len(self.turns)]

    @property
    def changes(self) -> bool:
        """Whether a replica's neighbours are others from turn to turn."""
        return len(self.turns) > 1

    @property
    def mutual(self) -> bool:
        """Whether every replica is heard in a turn by those that it hears."""
        return all(
            any(back.source == i for back in turn[one.source])
            for turn in self.turns
            for i, heard in enumerate(turn)
            for one in heard
        )

    @property
    def messages(self) -> tuple[int, ...]:
        """The messages of all replicas together in each turn."""
        return tuple(sum(map(len, turn)) for turn in self.turns)


class GraphKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of graph by name. ``turns`` (replicas, options) gives its cycle; ``wrong`` what of these sizes cannot be,
    as (reason, the nearest that can); both are said where the graph exists and is connected, or is not."""

    name: str
    title: str
    paper: str
    turns: Callable[[int, dict[str, Any]], tuple[Turn, ...]]
    options: tuple[RuleOption, ...] = ()
    wrong: Callable[[int, dict[str, Any]], tuple[str, str] | None] = lambda n, values: None


def metropolis(neighbours: Sequence[Iterable[int]]) -> Turn:
    """Weights of an undirected graph, from the neighbours of every replica: 1 / (1 + the larger number of neighbours)
    of both ends of an edge (Metropolis-Hastings), which is symmetric and doubly stochastic."""
    known = [sorted(set(some)) for some in neighbours]
    return tuple(
        tuple(Heard(j, 1.0 / (1 + max(len(known[i]), len(known[j])))) for j in some) for i, some in enumerate(known)
    )


def shifted(n: int, hops: Iterable[int]) -> Turn:
    """Every replica hears those so many places before it, all alike: a circulant, which is doubly stochastic."""
    distinct = sorted({hop % n for hop in hops} - {0})
    weight = 1.0 / (1 + len(distinct))
    return tuple(tuple(Heard((i - hop) % n, weight) for hop in distinct) for i in range(n))


def _ring(n: int, values: dict[str, Any]) -> tuple[Turn, ...]:
    return (metropolis([{(i - 1) % n, (i + 1) % n} - {i} for i in range(n)]),)


def _torus(n: int, values: dict[str, Any]) -> tuple[Turn, ...]:
    rows = _rows(n, values)
    columns = n // rows
    sides = []
    for i in range(n):
        row, column = divmod(i, columns)
        near = {(row + d) % rows * columns + column for d in (-1, 1)}
        sides.append((near | {row * columns + (column + d) % columns for d in (-1, 1)}) - {i})
    return (metropolis(sides),)


def _rows(n: int, values: dict[str, Any]) -> int:
    """Rows of a torus: as said, else the nearest to a square."""
    return values["rows"] or next(d for d in range(isqrt(n), 0, -1) if n % d == 0)


def _no_torus(n: int, values: dict[str, Any]) -> tuple[str, str] | None:
    rows = _rows(n, values)
    legal = [d for d in range(2, n // 2 + 1) if n % d == 0]
    if n % rows == 0 and 1 < rows < n:
        return None
    near = min(legal, key=lambda d: abs(d - rows), default=0)
    reason = f"{n} replicas are no torus of {rows} row{'s' * (rows > 1)}"
    return reason, f"rows={near}" if near else "graph=ring"


def _hops(n: int) -> list[int]:
    """The powers of two below n."""
    return [1 << t for t in range((n - 1).bit_length())]


def _tournament(n: int, values: dict[str, Any]) -> tuple[Turn, ...]:
    """Pairs of a tournament in which each meets every other once (the circle method), its rounds in a random order; the
    first :data:`MOST_TURNS` of them where there are more. Of an odd number one rests in each turn."""
    draws = Random(values["seed"])
    seats = _drawn(list(range(n)), draws)
    seats += [-1] * (n % 2)
    last = len(seats) - 1
    turns = []
    for number in _drawn(list(range(last)), draws)[:MOST_TURNS]:
        places = [seats[0], *(seats[1 + (i + number) % last] for i in range(last))]
        met: list[tuple[Heard, ...]] = [()] * n
        for a, b in zip(places[: len(places) // 2], reversed(places)):
            if min(a, b) >= 0:
                met[a], met[b] = (Heard(b, 0.5),), (Heard(a, 0.5),)
        turns.append(tuple(met))
    return tuple(turns)


def _random(n: int, values: dict[str, Any]) -> tuple[Turn, ...]:
    """A graph in which all have as many neighbours: ends of edges joined at random, anew where they got stuck (Steger
    and Wormald, 1999); of many neighbours, those who are none are drawn."""
    degree, draws = values["degree"], Random(values["seed"])
    if 2 * degree >= n:
        (others,) = _random(n, values | {"degree": n - 1 - degree})
        strangers = [{i, *(one.source for one in heard)} for i, heard in enumerate(others)]
        return (metropolis([set(range(n)) - some for some in strangers]),)
    while True:
        ends = [i for i in range(n) for _ in range(degree)]
        found: list[set[int]] = [set() for _ in range(n)]
        while ends:
            ends = _drawn(ends, draws)
            left = []
            for a, b in zip(ends[::2], ends[1::2]):
                if a == b or b in found[a]:
                    left += [a, b]
                else:
                    found[a].add(b)
                    found[b].add(a)
            if len(left) == len(ends) and not any(a != b and b not in found[a] for a in left for b in left):
                break
            ends = left
        if not ends:
            return (metropolis(found),)


def _drawn(values: list[int], draws: Random) -> list[int]:
    """The values in a random order (Fisher and Yates), the same on every rank and machine."""
    out = list(values)
    for i in range(len(out) - 1, 0, -1):
        j = int(draws.random() * (i + 1))
        out[i], out[j] = out[j], out[i]
    return out


def _not_regular(n: int, values: dict[str, Any]) -> tuple[str, str] | None:
    degree = values["degree"]
    legal = [d for d in range(1 if n == 2 else 2, n) if n * d % 2 == 0]
    if degree < n and n * degree % 2 == 0:
        return None
    near = min(legal, key=lambda d: abs(d - degree))
    reason = (
        f"{n} replicas have no {degree} others to meet"
        if degree >= n
        else f"{n} replicas of {degree} edges each are {n * degree} ends, which is odd"
    )
    return reason, f"degree={near}"


_SEED = RuleOption(name="seed", what="the seed that the graph is drawn by", default=1, least=0)

RING = GraphKind(name="ring", title="a ring", paper="Lian et al., 2017, arXiv 1705.09056", turns=_ring)
TORUS = GraphKind(
    name="torus",
    title="a torus",
    paper="Koloskova et al., 2019, arXiv 1902.00340",
    turns=_torus,
    options=(RuleOption(name="rows", what="rows of the torus; 0: the nearest to a square", default=0, least=0),),
    wrong=_no_torus,
)
EXPONENTIAL = GraphKind(
    name="exponential",
    title="one-peer exponential",
    paper="Assran et al., 2018, arXiv 1811.10792",
    turns=lambda n, values: tuple(shifted(n, (hop,)) for hop in _hops(n)),
)
STATIC_EXPONENTIAL = GraphKind(
    name="static-exponential",
    title="exponential, all hops in every turn",
    paper="Ying et al., 2021, arXiv 2110.13363",
    turns=lambda n, values: (shifted(n, _hops(n)),),
)
RANDOM = GraphKind(
    name="random",
    title="random regular",
    paper="Steger and Wormald, 1999",
    turns=_random,
    options=(RuleOption(name="degree", what="neighbours of each replica", default=3), _SEED),
    wrong=_not_regular,
)
MATCHING = GraphKind(
    name="matching",
    title="pairs, others in every turn",
    paper="Boyd et al., 2006, Randomized gossip algorithms",
    turns=_tournament,
    options=(_SEED,),
)

KINDS = (RING, TORUS, EXPONENTIAL, STATIC_EXPONENTIAL, RANDOM, MATCHING)


@cache
def graphs() -> dict[str, GraphKind]:
    """Every kind of graph by its name."""
    return {kind.name: kind for kind in KINDS}


@lru_cache(maxsize=256)
def graph(text: str, num_replicas: int) -> Graph:
    """The graph of a name with options, such as ``ring`` or ``random:degree=3,seed=2``, over so many replicas.

    Raises:
        MeshwrightError: Y001 when none has the name; names the nearest. Y002 for an option that it has not, and where
            so many replicas have no such graph.
    """
    kind, values = _kind(text)
    wrong = kind.wrong(num_replicas, values)
    if wrong is not None:
        raise MeshwrightError.one("Y002", wrong[0], help=f"take {wrong[1]}")
    return Graph(name=text, num_replicas=num_replicas, turns=kind.turns(num_replicas, values))


@lru_cache(maxsize=256)
def most_heard(text: str, num_replicas: int) -> int:
    """The most replicas that one hears in a turn of a graph."""
    return max(len(heard) for turn in graph(text, num_replicas).turns for heard in turn)


def _kind(text: str) -> tuple[GraphKind, dict[str, Any]]:
    name, _, rest = text.partition(":")
    known = graphs()
    if name not in known:
        raise MeshwrightError.one("Y001", f"no graph is called {name!r}", help=nearest(name, list(known)))
    kind = known[name]
    return kind, {o.name: o.default for o in kind.options} | read_options(name, kind.options, rest)


def refusal(text: str, num_replicas: int) -> tuple[str, str] | None:
    """The reason why so many replicas cannot meet by a graph, and the nearest that they can meet by; None where they
    can."""
    kind, values = _kind(text)
    wrong = kind.wrong(num_replicas, values)
    if wrong is not None:
        return wrong
    parts = list(components(graph(text, num_replicas)))
    if len(parts) == 1:
        return None
    sizes = " and ".join(map(str, sorted(map(len, parts), reverse=True)))
    reason = f"the graph is not connected: {len(parts)} parts, of {sizes} replicas, would never meet"
    return reason, _connected(kind, num_replicas, values)


def pairless(text: str, num_replicas: int) -> tuple[str, str] | None:
    """The reason why replicas have no neighbours that stay and hear each other, and a graph of such; None where they
    have."""
    found = refusal(text, num_replicas)
    if found is not None:
        return found
    met = graph(text, num_replicas)
    if not met.changes and met.mutual:
        return None
    what = "neighbours are others in every exchange" if met.changes else "replicas hear some that do not hear them"
    return what, f"graph={RING.name}, graph={TORUS.name} or graph={RANDOM.name}"


def _connected(kind: GraphKind, num_replicas: int, values: dict[str, Any]) -> str:
    """The nearest options with which a graph is connected: the next seeds, then more neighbours."""
    for more in range(num_replicas):
        degree = values["degree"] + more
        for seed in range(values["seed"], values["seed"] + 16):
            said = values | {"degree": degree, "seed": seed}
            if kind.wrong(num_replicas, said) is None:
                found = Graph(name="", num_replicas=num_replicas, turns=kind.turns(num_replicas, said))
                if len(list(components(found))) == 1:
                    return f"seed={seed}" if not more else f"degree={degree}"
    return f"graph={RING.name}"


def components(some: Graph) -> Iterator[list[int]]:
    """The sets of replicas that hear of each other, over all turns. Weights are doubly stochastic, so who is heard
    hears back, by others if not at once."""
    near: list[set[int]] = [set() for _ in range(some.num_replicas)]
    for turn in some.turns:
        for i, heard in enumerate(turn):
            for one in heard:
                near[i].add(one.source)
                near[one.source].add(i)
    left = set(range(some.num_replicas))
    while left:
        found, edge = [], [min(left)]
        left -= set(edge)
        while edge:
            found += edge
            edge = sorted({j for i in edge for j in near[i]} & left)
            left -= set(edge)
        yield found


def messages(turn: Turn) -> Iterator[tuple[int, int, float]]:
    """Messages of a turn, as (from, to, share of all values): all of them."""
    return ((one.source, i, 1.0) for i, heard in enumerate(turn) for one in heard)


def matrix(turn: Turn) -> np.ndarray:
    """The weights of a turn [replicas, replicas]: row i is the mean that replica i takes."""
    import numpy as np

    out = np.zeros((len(turn), len(turn)))
    for i, heard in enumerate(turn):
        for one in heard:
            out[i, one.source] += one.weight
        out[i, i] = 1.0 - sum(one.weight for one in heard)
    return out


@lru_cache(maxsize=64)
def spectral_gap(some: Graph) -> float:
    """One minus the factor by which an exchange shrinks the distance of all replicas from their mean, in the geometric
    mean over the turns: 1 where all hold the mean after a cycle, 0 where they never do."""
    import numpy as np

    n = some.num_replicas
    product = np.eye(n) - 1.0 / n
    for turn in some.turns:
        product = matrix(turn) @ product
    kept = float(np.linalg.norm(product, 2))
    return 1.0 - (kept ** (1.0 / len(some.turns)) if kept > n * np.finfo(float).eps else 0.0)
