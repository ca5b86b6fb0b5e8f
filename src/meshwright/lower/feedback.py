"""Direct feedback as a rewrite of the passes of layers: the edge from a layer's backward to the one behind it is gone,
and the output's error through a fixed random matrix stands in its place (Launay et al. 2020, 2006.12878).

What is computed changes, so it is approximate. The error leaves with the forward of the head: its loss and its backward
are one pass, and nothing of it is kept. Where all places that the error enters share one matrix, that pass ends with
the product and all get its result; else each multiplies the error itself.
"""

from __future__ import annotations

from meshwright.layers.pieces import Context, Piece
from meshwright.lower.entry import Entry
from meshwright.lower.layer import losing, program
from meshwright.plan.facets.feedback import Direct
from meshwright.work import Gemm

#: The piece of a block behind which its attention ends.
ATTENTION_ENDS = "attention residual"


def projection(c: Context) -> Gemm:
    """The error of a microbatch's tokens on a rank through a matrix of the width of hidden states."""
    m = max(1, round(c.shard_tokens))
    return Gemm(m=m, n=c.hidden, k=c.hidden, dtype=c.attention_dtype, out_bytes=c.element, fixed=True)


def entered(pieces: list[Piece], c: Context, direct: Direct) -> list[Piece]:
    """Return the pieces of a block with those where the error enters it, which have a backward alone; the same where
    it has been multiplied before."""
    if direct.shared:
        return pieces
    place = Piece(name="feedback", backward=projection(c))
    out = []
    for piece in pieces:
        out += [piece, place] if direct.micro and piece.name == ATTENTION_ENDS else [piece]
    return [*out, place]


def answered(pieces: list[Piece], portions: list[list[Piece]], c: Context, direct: Direct) -> list[Entry]:
    """The entries of a forward of head and loss with its backward, from which the error comes; in `portions` of the
    sequence where there are any."""
    if portions:
        found = losing(portions, "BW")
    else:
        forward, back = program(pieces, "F"), program(pieces, "BW")
        first = len(forward)
        found = [*forward, *(_behind(entry, first) for entry in back)]
    if direct.shared:
        found.append(Entry("feedback", "compute", projection(c), (len(found) - 1,)))
    return found


def _behind(entry: Entry, first: int) -> Entry:
    """An entry of a pass that follows one of `first` entries."""
    return entry._replace(after=tuple(first + a for a in entry.after) or (first - 1,))
