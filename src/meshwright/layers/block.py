"""A block as pieces: its parts one after the other, each behind a norm and added to what came in."""

from __future__ import annotations

from meshwright.layers.attention import attention
from meshwright.layers.mlp import dense
from meshwright.layers.moe import experts
from meshwright.layers.pieces import Context, Piece, leave, norm, residual
from meshwright.spec.layers import Block, Dense


def block(c: Context, block: Block) -> list[Piece]:
    """Attention and MLP. In a parallel block the attention's output is added to the MLP's before both leave the
    tensor-parallel region together (Wang and Komatsuzaki's GPT-J; MegaScale 2402.15627, section 3.1)."""
    out = [norm(c, "attention norm"), *attention(c, block.attention)]
    if not block.parallel:
        out += [*leave(c, "attention"), residual(c, "attention residual")]
    shared = block.parallel and block.norms < 2  # the attention's input, normalised and gathered already
    if not shared:
        out.append(norm(c, "mlp norm"))
    spec = block.mlp
    if isinstance(spec, Dense):
        out += dense(c, "mlp", spec.ffn, spec.gated, inside=shared, bias=spec.bias)
    else:
        out += experts(c, spec)
    return [*out, residual(c, "mlp residual")]
