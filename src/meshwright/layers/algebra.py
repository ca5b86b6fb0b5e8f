"""The algebra of placements: tensors on a mesh, the transfers from one placement to another, and the proof.

On every axis of a mesh a tensor is Shard(dim), Replicate or Partial (a sum that is still to be taken). Where a
producer's placement is not its consumer's, the difference *is* a collective; :func:`transfers` lists them and
:func:`prove` carries them out on simulated ranks and compares. Shards may be ragged, as ``numpy.array_split`` cuts.

    >>> mesh = Mesh.of(dp=2, tp=4)
    >>> for one in transfers(mesh, "S0 P", "S0 R", (8, 16)):
    ...     print(one)
    all_reduce over tp: 64 elements on each rank, 96 sent

A dim that several axes shard is cut by the first of them first. Xu et al., 2021 (GSPMD, arXiv 2105.04663) and Yuan et
al., 2021 (OneFlow, arXiv 2110.15032) have these placements, the latter under the names split, broadcast, partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import product
from math import prod

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError

#: A placement on one axis: a dim >= 0 that is sharded there, or one of these.
REPLICATE, PARTIAL = -1, -2
_NAMES = {"R": REPLICATE, "P": PARTIAL}
Placement = tuple[int, ...]
Coordinate = tuple[int, ...]


class AxisMesh(msgspec.Struct, frozen=True):
    """Named axes, the outermost first: ``Mesh.of(dp=2, tp=4)`` has 8 ranks."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **sizes: int) -> AxisMesh:
        return cls(tuple(sizes.items()))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def ranks(self) -> Iterator[Coordinate]:
        return product(*map(range, self.sizes))


class Transfer(msgspec.Struct, frozen=True):
    """One collective (or ``slice``, ``keep``: what a rank does alone) on one axis. ``elements`` is what the largest
    rank holds before, ``sent`` what it sends; the last two are the placements before and after."""

    op: str
    axis: str
    elements: int
    sent: float
    before: Placement
    after: Placement

    def __str__(self) -> str:
        return f"{self.op} over {self.axis}: {self.elements} elements on each rank, {self.sent:g} sent"


def placement(mesh: AxisMesh, text: str | Placement) -> Placement:
    """``S0 R P`` as numbers, a word for each axis.

    Raises:
        MeshwrightError: A001 for words that are no placement, or not one for each axis.
    """
    if not isinstance(text, str):
        return tuple(text)
    words = text.upper().split()
    read = [_NAMES.get(w, int(w[1:]) if w[:1] == "S" and w[1:].isdigit() else None) for w in words]
    if None in read or len(read) != len(mesh.axes):
        names = ", ".join(name for name, _ in mesh.axes)
        raise MeshwrightError.one(
            "A001",
            f"{text!r} is not a placement on {len(mesh.axes)} axes ({names})",
            help="a word for each axis: S0 (shard dim 0), R (replicate) or P (partial sum)",
        )
    return tuple(read)  # type: ignore[arg-type]


def words(place: Placement) -> str:
    """The text that :func:`placement` reads."""
    back = {number: name for name, number in _NAMES.items()}
    return " ".join(back.get(p, f"S{p}") for p in place)


def transfers(
    mesh: AxisMesh, source: str | Placement, target: str | Placement, shape: Sequence[int]
) -> tuple[Transfer, ...]:
    """Return the transfers that turn `source` into `target` for a tensor of `shape`: those that shrink it first,
    gathers last.

    Raises:
        MeshwrightError: A001 for a placement that is none.
    """
    now, goal = placement(mesh, source), placement(mesh, target)
    for place in (now, goal):
        if any(p >= len(shape) for p in place):
            raise MeshwrightError.one(
                "A001", f"{words(place)} shards a dim that a tensor of {len(shape)} has not", help="dims start at 0"
            )
    found: list[Transfer] = []
    while now != goal:
        after, op, axis = _next(now, goal)
        held = _largest(mesh, now, shape)
        if mesh.sizes[axis] > 1:
            sent = held * _SENT[op](mesh.sizes[axis])
            found.append(Transfer(op, mesh.axes[axis][0], held, sent, now, after))
        now = after
    return tuple(found)


#: What a rank sends of each element it holds, by the size of the group: rings, and direct messages for all_to_all.
_SENT: dict[str, Callable[[int], float]] = {
    "slice": lambda n: 0.0,
    "keep": lambda n: 0.0,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1.0,
}


def _op(before: int, after: int) -> str:
    if before == PARTIAL:
        return "all_reduce" if after == REPLICATE else "reduce_scatter"
    if after == PARTIAL:  # a shard among zeros, or one copy of many, is a term of a sum
        return "keep"
    if before == REPLICATE:
        return "slice"
    return "all_gather" if after == REPLICATE else "all_to_all"


def _next(now: Placement, goal: Placement) -> tuple[Placement, str, int]:
    """The next step: (placement after, operation, axis)."""
    order = list(_SENT)
    ways = []
    for axis, (before, after) in enumerate(zip(now, goal)):
        inside = _blocks(now, axis, before) or _blocks(now, axis, after)
        if before != after and not inside and not _waits(now, goal, axis, after):
            ways.append((order.index(_op(before, after)), axis))
    if ways:
        rank, axis = min(ways)
        return (*now[:axis], goal[axis], *now[axis + 1 :]), order[rank], axis
    # A dim cut by two axes opens from the inside: the innermost shard in the way is gathered, and cut again later.
    blocked = next(a for a, (before, after) in enumerate(zip(now, goal)) if before != after)
    inner = max(j for d in (now[blocked], goal[blocked]) for j in _blocks(now, blocked, d))
    return (*now[:inner], REPLICATE, *now[inner + 1 :]), "all_gather", inner


def _blocks(now: Placement, axis: int, dim: int) -> list[int]:
    """Axes inside `axis` that shard the same dim."""
    return [j for j in range(axis + 1, len(now)) if dim >= 0 and now[j] == dim]


def _waits(now: Placement, goal: Placement, axis: int, dim: int) -> bool:
    """Whether an axis outside `axis` has yet to open or cut the dim: it goes first, as it cuts first."""
    return dim >= 0 and any(now[i] != goal[i] and dim in (now[i], goal[i]) for i in range(axis))


def _largest(mesh: AxisMesh, place: Placement, shape: Sequence[int]) -> int:
    """Elements of the largest rank: the first parts of ragged cuts are the largest."""
    local = list(shape)
    for size, p in zip(mesh.sizes, place):
        if p >= 0:
            local[p] = -(-local[p] // size)
    return prod(local)


# ---- the proof: ranks simulated on numpy arrays


def distribute(
    mesh: AxisMesh, place: str | Placement, tensor: np.ndarray, seed: int = 0
) -> dict[Coordinate, np.ndarray]:
    """Return the part of `tensor` on every rank. On a partial axis they are random terms that sum to it."""
    held = {(): tensor}
    rng = np.random.default_rng(seed)
    for size, p in zip(mesh.sizes, placement(mesh, place)):
        cut: dict[Coordinate, np.ndarray] = {}
        for at, part in held.items():
            if p >= 0:
                pieces = np.array_split(part, size, axis=p)
            elif p == PARTIAL:
                terms = [rng.standard_normal(part.shape) for _ in range(size - 1)]
                pieces = [part - sum(terms, np.zeros_like(part)), *terms]
            else:
                pieces = [part] * size
            cut |= {(*at, i): piece for i, piece in enumerate(pieces)}
        held = cut
    return held


def carry_out(mesh: AxisMesh, one: Transfer, held: dict[Coordinate, np.ndarray]) -> dict[Coordinate, np.ndarray]:
    """Return the part of a tensor on every rank after a transfer, `held` being those before."""
    axis = [name for name, _ in mesh.axes].index(one.axis)
    before, after, size = one.before[axis], one.after[axis], mesh.sizes[axis]
    out = {}
    for at in mesh.ranks:
        peers = [held[(*at[:axis], i, *at[axis + 1 :])] for i in range(size)]
        me = at[axis]
        if one.op == "slice":
            out[at] = np.array_split(held[at], size, axis=after)[me]
        elif one.op == "keep":
            out[at] = _term(peers, me, before)
        elif one.op == "all_gather":
            out[at] = np.concatenate(peers, axis=before)
        elif one.op == "all_reduce":
            out[at] = reduce(np.add, peers)
        elif one.op == "reduce_scatter":
            out[at] = reduce(np.add, [np.array_split(p, size, axis=after)[me] for p in peers])
        else:
            out[at] = np.concatenate([np.array_split(p, size, axis=after)[me] for p in peers], axis=before)
    return out


def _term(peers: list[np.ndarray], me: int, before: int) -> np.ndarray:
    """A rank's part of a sum: its copy on the first rank only, or its shard among zeros."""
    if before == REPLICATE:
        return peers[me] if me == 0 else np.zeros_like(peers[me])
    return np.concatenate([p if i == me else np.zeros_like(p) for i, p in enumerate(peers)], axis=before)


def assemble(mesh: AxisMesh, place: str | Placement, held: dict[Coordinate, np.ndarray]) -> np.ndarray:
    """The tensor that the ranks hold together."""
    parts = dict(held)
    for axis in range(len(mesh.axes) - 1, -1, -1):
        p, joined = placement(mesh, place)[axis], {}
        for at in {at[:axis] for at in parts}:
            pieces = [parts[(*at, i)] for i in range(mesh.sizes[axis])]
            if p >= 0:
                joined[at] = np.concatenate(pieces, axis=p)
            else:
                joined[at] = reduce(np.add, pieces) if p == PARTIAL else pieces[0]
        parts = joined
    return parts[()]


def prove(
    mesh: AxisMesh, source: str | Placement, target: str | Placement, shape: Sequence[int], seed: int = 0
) -> float:
    """Return the largest difference, over ranks and elements, between the result of the transfers and the placement
    `target`: 0 up to rounding when they are right."""
    tensor = np.random.default_rng(seed).standard_normal(tuple(shape))
    held = distribute(mesh, source, tensor, seed + 1)
    for one in transfers(mesh, source, target, shape):
        held = carry_out(mesh, one, held)
    worst = float(np.abs(assemble(mesh, target, held) - tensor).max())
    if PARTIAL in placement(mesh, target):
        return worst
    wanted = distribute(mesh, target, tensor)
    same = [held[at].shape == wanted[at].shape for at in mesh.ranks]
    if not all(same):
        return float("inf")
    return max(worst, *(float(np.abs(held[at] - wanted[at]).max(initial=0.0)) for at in mesh.ranks))


#: Legal placements of a matrix product on one axis: of [m, k], of [k, n], and of what comes out.
SIGNATURES = (
    (0, REPLICATE, 0),
    (REPLICATE, 1, 1),
    (1, 0, PARTIAL),
    (PARTIAL, REPLICATE, PARTIAL),
    (REPLICATE, PARTIAL, PARTIAL),
    (REPLICATE, REPLICATE, REPLICATE),
)


class Product(msgspec.Struct, frozen=True):
    """The layout of a matrix product: the placements its operands are moved to, that of the result, and the moves."""

    left: Placement
    right: Placement
    out: Placement
    moves: tuple[Transfer, ...]

    @property
    def sent(self) -> float:
        return sum(one.sent for one in self.moves)


def matmul(
    mesh: AxisMesh,
    left: str | Placement,
    right: str | Placement,
    m: int,
    k: int,
    n: int,
    out: str | Placement | None = None,
) -> Product:
    """The legal layout of ``[m, k] @ [k, n]`` that moves least from where the operands lie, and to `out` if it is
    said (its moves then include the result's); of equals, the one that computes least on each rank."""
    a, b = placement(mesh, left), placement(mesh, right)
    best: tuple[tuple[float, float], Product] | None = None
    for chosen in product(SIGNATURES, repeat=len(mesh.axes)):
        x, y, z = (tuple(s[i] for s in chosen) for i in range(3))
        moves = transfers(mesh, a, x, (m, k)) + transfers(mesh, b, y, (k, n))
        if out is not None:
            moves += transfers(mesh, z, out, (m, n))
        flops = float(_largest(mesh, x, (m, k)) * _largest(mesh, y, (k, n)) / max(1, _inner(mesh, x, k)))
        found = Product(x, y, z if out is None else placement(mesh, out), moves)
        if best is None or (found.sent, flops) < best[0]:
            best = ((found.sent, flops), found)
    assert best is not None
    return best[1]


def _inner(mesh: AxisMesh, x: Placement, k: int) -> int:
    """Return a rank's part of the dim that a product sums over, in elements."""
    for size, p in zip(mesh.sizes, x):
        k = -(-k // size) if p == 1 else k
    return k
