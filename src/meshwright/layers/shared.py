"""A transformer block whose weights several layers share (Zamba2, 2411.15242), as pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.layers.attention import flops as attention_flops
from meshwright.layers.attention import pieces as attention_pieces
from meshwright.layers.attention import state as attention_state
from meshwright.layers.kind import Cache, Flops, Held, Kind, Tokens
from meshwright.layers.mlp import dense
from meshwright.layers.pieces import Context, Piece, linear, norm
from meshwright.layers.placed import leave
from meshwright.spec.mixers import SharedTransformer
from meshwright.spec.workload import Train
from meshwright.work import Elementwise

if TYPE_CHECKING:
    from meshwright.plan import Plan


def pieces(c: Context, spec: SharedTransformer) -> list[Piece]:
    """Hidden states beside the embedding, norm, attention of twice the width, MLP with adapters, a projection back."""
    size = c.shard_tokens * c.hidden * c.element
    joined = Piece(
        name="concatenate", forward=Elementwise(num_bytes=4 * size), backward=Elementwise(num_bytes=4 * size)
    )
    wide = msgspec.structs.replace(c, hidden=2 * c.hidden)
    attention = attention_pieces(wide, spec.attention)
    (out,) = [i for i, piece in enumerate(attention) if piece.name == "attention out"]
    kept = c.tokens * spec.heads // c.tp * spec.head_dim * c.element
    projected = linear(c, "attention out", c.hidden, spec.heads // c.tp * spec.head_dim, saved=kept, held=kept)
    return [
        joined,
        norm(wide, "shared attention norm"),
        *attention[:out],
        *projected,
        *leave(c, "shared attention"),
        norm(c, "shared mlp norm"),
        *dense(c, "shared mlp", spec.ffn, True, bias=spec.bias),
        *_adapter(c, spec),
        *linear(c, "shared out", c.hidden, c.hidden, saved=size, held=size),
        Piece(name="shared sum", forward=Elementwise(num_bytes=3 * size), backward=Elementwise(num_bytes=2 * size)),
    ]


def _adapter(c: Context, spec: SharedTransformer) -> list[Piece]:
    """The place's own low-rank matrices beside the MLP's projection up and, where it has them, the attention's."""
    rank, e = spec.rank, c.element
    found = linear(c, "adapter down", rank, c.hidden) + linear(
        c, "adapter up", 2 * spec.ffn // c.tp, rank, saved=c.tokens * rank * e, held=c.tokens * rank * e
    )
    if spec.adapts_attention:
        wide = 2 * c.hidden
        size = 3 * c.tokens * rank * e
        found += linear(c, "attention adapters down", 3 * rank, wide)
        found += linear(c, "attention adapters up", 3 * wide // c.tp, rank, saved=size, held=size)
    return found


def params(spec: SharedTransformer, c: Context) -> Held:
    """Projections are split, norms and the projection back whole. What is borrowed is where it was first."""
    whole = c.hidden**2 + spec.rank * c.hidden + (0 if spec.borrows else 3 * c.hidden)
    return Held(split=spec.num_params(c.hidden) - whole, whole=float(whole))


def flops(spec: SharedTransformer, tokens: Tokens) -> Flops:
    """Shared weights multiply every token wherever they are borrowed."""
    used = spec.own_params(tokens.hidden) + spec.shared_params(tokens.hidden)
    return Flops(weights=2 * used * tokens.count, mixing=attention_flops(spec.attention, tokens).mixing)


def state(spec: SharedTransformer) -> Cache:
    """Keys and values of every place."""
    return attention_state(spec.attention)


def rules(spec: SharedTransformer, plan: Plan, train: Train) -> Iterator[tuple[str, ...]]:
    """Heads and inner width must divide; a weight that two pipeline stages share would have to be exchanged."""
    tp, cp = plan.layout.tp, plan.layout.cp
    for what, count in (("heads of the shared block", spec.heads), ("the shared block's MLP width", spec.ffn)):
        if count % tp:
            yield f"tp={tp} does not divide {what}={count}", "take a tp that divides them"
    if plan.head_swap > 1 and spec.heads // tp % plan.head_swap:
        yield f"ulysses splits {spec.heads // tp} heads of the shared block over {cp} ranks", "take another cp, or ring"
    if plan.layout.pp > 1:
        yield (
            "a block whose weights several layers share lies on several pipeline stages, and the exchange of its "
            "gradients between them is not modelled",
            "say pp1",
        )


KINDS = (
    Kind(
        name="shared transformer",
        record=SharedTransformer,
        pieces=pieces,
        params=params,
        flops=flops,
        state=state,
        rules=rules,
    ),
)
