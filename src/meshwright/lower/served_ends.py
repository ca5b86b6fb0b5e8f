"""Ends of a served model and the exchanges of its ranks, as the words of a plan change them.

The token table is split by rows, and partial results are summed; it may be whole on every rank, to which token ids are
sent (xFasterTransformer, 2407.00029), or on one that sends embeddings (TPI-LLM, 2410.00531). Scores over the vocabulary
are gathered, or the best of each rank alone. Sums may go over one rank in place of a ring or a tree.
"""

from __future__ import annotations

import msgspec

from meshwright import layers
from meshwright.layers.head import logits
from meshwright.layers.pieces import Context, Piece, linear
from meshwright.lower.entry import Entry
from meshwright.spec.ends import Head
from meshwright.work import Collective, Elementwise, Group

#: Bytes of a token's id.
ID_BYTES = 4.0
#: Candidates that each rank proposes for a token: an id and a score in fp32 of each. Samplers cut at 50 or so (the
#: default of top_k in Hugging Face's generation), and kernels sort powers of two.
CANDIDATES = 64


def alone(c: Context, group: Group) -> Context:
    """Return the same tokens on a rank by itself."""
    plan = msgspec.structs.replace(c.plan, layout=msgspec.structs.replace(c.plan.layout, tp=1))
    return msgspec.structs.replace(c, plan=plan, tp_group=group)


def embedding(c: Context, layer: msgspec.Struct, nobody: Group) -> list[Piece]:
    """Return the pieces of the token table; `nobody` is the group of a rank by itself."""
    tables = c.plan.serving.tables
    if tables == "split" or c.tp == 1:
        return layers.of(layer).pieces(c, layer)
    looked_up = layers.of(layer).pieces(alone(c, nobody), layer)
    each = ID_BYTES if tables == "whole" else c.hidden * c.element
    sent = Collective(op="broadcast", num_bytes=c.tokens * each, group=c.tp_group)
    told = Piece(name="token ids" if tables == "whole" else "embeddings", forward=sent, queue="tp")
    return [told, *looked_up] if tables == "whole" else [*looked_up, told]


def scores(c: Context, head: Head, nobody: Group) -> list[Piece]:
    """Return the pieces that make scores of the last hidden states, and tokens of them."""
    if c.tp > 1 and c.plan.serving.tables == "master":
        return logits(alone(c, nobody), head)
    pieces = logits(c, head)
    if c.tp == 1 or c.plan.serving.scores == "gathered":
        return pieces
    kept = [p for p in pieces if p.name not in ("scores gather", "sampling")]
    width, best = float(c.tokens) * -(-head.rows // c.tp), float(c.tokens) * c.tp * CANDIDATES * (4.0 + ID_BYTES)
    return [
        *kept,
        Piece(name="local best", forward=Elementwise(num_bytes=width * (c.element + 4 + 4), kernels=2, fused=True)),
        Piece(
            name="candidates gather",
            forward=Collective(op="all_gather", num_bytes=best, group=c.tp_group),
            queue="tp",
        ),
        Piece(name="sampling", forward=Elementwise(num_bytes=2 * best, kernels=4, fused=True)),
    ]


def joined(c: Context, streams: int) -> list[Piece]:
    """Return the pieces that join the streams of every token at the end: an MLP over all of them makes weights, by
    which they are summed (ParScale, 2505.10475, section 3)."""
    if streams == 1:
        return []
    size = float(c.tokens) * c.hidden * c.element
    return [
        *linear(c, "streams hidden", c.hidden, streams * c.hidden),
        *linear(c, "streams weights", streams, c.hidden),
        Piece(name="streams sum", forward=Elementwise(num_bytes=(streams + 1) * size, kernels=2)),
    ]


def joined_bytes(hidden: int, streams: int, element: float) -> float:
    """Return the bytes of the weights that join streams."""
    return (streams * hidden * hidden + hidden * streams) * element if streams > 1 else 0.0


def reordered(c: Context, pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of a dense MLP whose inner features are gathered, reordered and cut again between its two
    products, as rows of quantised weights in order of importance need (2402.04925, algorithm 2)."""
    if c.plan.serving.act_order == "aligned" or c.tp == 1:
        return pieces
    found: list[Piece] = []
    for piece in pieces:
        if piece.name in ("mlp activation", "shared experts activation"):
            found.append(piece)
            inner = piece.forward.num_bytes / (3 if piece.forward.operator.startswith("gated") else 2)
            whole = inner * c.tp
            gather = Collective(op="all_gather", num_bytes=whole, group=c.tp_group)
            found.append(Piece(name="mlp features gather", forward=gather, queue="tp"))
            moved = Elementwise(num_bytes=2 * whole + 2 * whole / c.tp, kernels=2, fused=True)
            found.append(Piece(name="mlp features reorder", forward=moved))
        else:
            found.append(piece)
    return found


def summed(entries: list[Entry], how: str) -> list[Entry]:
    """Return the entries with sums of tensor-parallel ranks as a plan says."""
    if how == "usual":
        return entries
    return [e._replace(work=_sum(e.work, how)) if isinstance(e.work, Collective) else e for e in entries]


def _sum(work: Collective, how: str) -> Collective:
    if work.op != "all_reduce":
        return work
    return msgspec.structs.replace(work, **({"op": "star"} if how == "star" else {"plain": True}))
