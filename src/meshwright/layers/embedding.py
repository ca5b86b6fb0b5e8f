"""The embedding: tokens become hidden states by rows of a table that is split by vocabulary."""

from __future__ import annotations

from meshwright.layers.pieces import Context, Piece
from meshwright.work import Collective, Elementwise


def embedding(c: Context) -> list[Piece]:
    """Rows of a table split by vocabulary: a look-up, then a sum over the ranks that hold the rows."""
    size = c.tokens * c.hidden * c.element
    pieces = [
        Piece(
            name="embedding",
            forward=Elementwise(num_bytes=2 * size, operator="embedding"),
            weight=None
            if c.train.lora is not None
            else Elementwise(num_bytes=3 * size, kernels=3, operator="embedding backward"),
            saved=c.shard_tokens * c.hidden if c.train.dropout else 0.0,
        )
    ]
    if c.tp > 1:
        ops = ("reduce_scatter", "all_gather") if c.sp else ("all_reduce", None)
        forward, backward = (Collective(op=op, num_bytes=size, group=c.tp_group) if op else None for op in ops)
        pieces.append(Piece(name="embedding sum", forward=forward, backward=backward, queue="tp"))
    return pieces
