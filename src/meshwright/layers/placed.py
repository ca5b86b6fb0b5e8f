"""Collectives of a layer, derived from placements: an operator reads a tensor otherwise than it was made.

Along one axis of a mesh a tensor is sharded on a dim, replicated, or a term of a sum (``layers/algebra.py``). The
signature of an operator (``layers/signatures.py``) says how its inputs must lie for every rank to do its part alone,
and how its result then lies. Where a tensor lies otherwise, the difference is a collective, and its gradient is moved
by the same rule the other way. So nobody writes down that a product split by columns sums its input's gradient: its
signature says so (Xu et al., 2021, GSPMD, arXiv 2105.04663; Yuan et al., 2021, OneFlow, arXiv 2110.15032).

    >>> crossing(TOKENS, REPLICATE, COLUMNS.out)  # into a product split by columns, from a sharded sequence
    CollectivePair(forward='all_gather', backward='reduce_scatter')
    >>> crossing(REPLICATE, REPLICATE, COLUMNS.out)
    CollectivePair(forward='', backward='all_reduce')
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.layers.algebra import REPLICATE, AxisMesh, transfers
from meshwright.layers.pieces import Context, Piece
from meshwright.layers.signatures import SIGNATURES, dual, wanted
from meshwright.work import Collective, Group

#: Dims of activations: sequences, tokens of each, width.
ROWS, TOKENS, WIDTH = 0, 1, 2
#: A tensor on two ranks, as long as it can be cut everywhere: which collective it is does not depend on either.
_AXIS, _SHAPE = AxisMesh.of(axis=2), (2, 2, 2)


class OperatorSplit(NamedTuple):
    """A signature of an operator along an axis: a placement for each of its inputs, and that of its result."""

    inputs: tuple[int, ...]
    out: int


class CollectivePair(NamedTuple):
    """The collectives that take a tensor from one placement to another, and its gradient back; "" where a rank needs
    nothing of others."""

    forward: str
    backward: str


def split(kind: str, number: int, placement: int) -> OperatorSplit:
    """Return the signature of a ``kind`` of operator whose input of this number lies at a placement, the first that
    has one.

    Raises:
        LookupError: the operator cannot be split so.
    """
    for *inputs, out in SIGNATURES[kind]:
        if inputs[number] == placement:
            return OperatorSplit(tuple(inputs), out)
    raise LookupError(f"no {kind} has input {number} at {placement}")


#: A product whose matrix is cut by columns (it reads all of its input), and by rows (it leaves terms of a sum); a table
#: cut by rows that is looked up in, and that scores are taken with.
COLUMNS, ROWS_CUT = split("product", 1, 1), split("product", 1, 0)
LOOKED_UP, SCORED = split("lookup", 0, 0), split("scores", 1, 0)
#: Attention whose heads are shared, and whose queries are.
HEADS, QUERIES = split("attention", 0, WIDTH), split("attention", 1, REPLICATE)


@lru_cache(maxsize=256)
def crossing(made: int, read: int, result: int | None = None) -> CollectivePair:
    """Return the collectives of a tensor that is `made` at one placement and `read` at another by an operator whose
    result lies at `result`; None: its gradient is whole where the tensor is read, as behind a last operator."""
    left = wanted((read,)) if result is None else dual((read,), (result,))
    return CollectivePair(_op(made, read), _op(left[0], wanted((made,))[0]))


def _op(source: int, target: int) -> str:
    """Return the one collective between two placements on an axis; "" where there is none to wait for."""
    ops = [one.op for one in transfers(_AXIS, (source,), (target,), _SHAPE) if one.op not in ("slice", "keep")]
    return "".join(ops)


def home(c: Context) -> int:
    """Where hidden states lie between the parts of a layer along tensor parallelism: with tokens of their own on every
    rank under sequence parallelism (Korthikanti et al. 2205.05198), else whole on each."""
    return TOKENS if c.sp else REPLICATE


def moved(
    name: str, queue: str, crossed: CollectivePair, num_bytes: float, group: Group, *, joins: bool = False
) -> list[Piece]:
    """Return the piece of a crossing; none for a group of one rank, or where nothing is exchanged either way.

    `num_bytes` are those of the whole tensor on the group: what a gather leaves on a rank, what a scatter begins with.
    """
    if group.size == 1 or crossed == CollectivePair("", ""):
        return []
    ways = (Collective(op=op, num_bytes=num_bytes, group=group) if op else None for op in crossed)
    forward, backward = ways
    return [Piece(name=name, forward=forward, backward=backward, queue=queue, joins=joins)]


#: The last word of a piece's name, by its collective forward, else backward.
_WORDS = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "all-reduce", "all_to_all": "all-to-all"}


def _across(c: Context, name: str, crossed: CollectivePair) -> list[Piece]:
    """Hidden states of a microbatch over the tensor-parallel group."""
    word = _WORDS.get(crossed.forward or crossed.backward, "")
    size = c.tokens * c.hidden * c.element
    return moved(f"{name} {word}", "tp", crossed, size, c.tp_group, joins=True)


def enter(c: Context, name: str) -> list[Piece]:
    """Into a tensor-parallel region, to products split by columns."""
    return _across(c, name, crossing(home(c), COLUMNS.inputs[0], COLUMNS.out))


def leave(c: Context, name: str) -> list[Piece]:
    """Out of a tensor-parallel region, behind a product split by rows."""
    return _across(c, name, crossing(ROWS_CUT.out, home(c)))
