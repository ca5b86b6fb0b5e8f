"""Layers that make hidden states: a table of tokens split by vocabulary, patches of an image, bridges of stacks."""

from __future__ import annotations

import msgspec

from meshwright.layers.kind import Flops, Held, Kind, Tokens
from meshwright.layers.pieces import Context, Piece, linear, norm
from meshwright.layers.placed import LOOKED_UP, crossing, home, moved
from meshwright.spec.ends import Bridge, Embedding, Patches
from meshwright.work import Elementwise


def pieces(c: Context, spec: Embedding) -> list[Piece]:
    """Rows of a table split by vocabulary: a look-up, then a sum over the ranks that hold the rows."""
    size = c.tokens * c.hidden * c.element
    found = [
        Piece(
            name="embedding",
            forward=Elementwise(num_bytes=2 * size, operator="embedding"),
            weight=None
            if c.train.lora is not None
            else Elementwise(num_bytes=3 * size, kernels=3, operator="embedding backward"),
            saved=c.shard_tokens * c.hidden if c.train.dropout else 0.0,
        )
    ]
    summed = moved("embedding sum", "tp", crossing(LOOKED_UP.out, home(c)), size, c.tp_group)
    return [*found, *summed, *([norm(c, "embedding norm")] if spec.norm_vectors else [])]


def params(spec: Embedding, c: Context) -> Held:
    """The table is split by rows; positions, types, projection and norm are whole on every rank. A table that is
    another part's is there once where both are on one rank, else twice."""
    table = spec.rows * (spec.width or c.hidden)
    own = 0 if spec.borrows and c.plan.layout.pp == 1 else table
    whole = spec.num_params(c.hidden) - spec.table_params(c.hidden)
    return Held(split=own, whole=float(whole), low=False)


def tables(spec: Embedding, c: Context) -> tuple[tuple[int, int], ...]:
    """A rank's rows of the table, then positions, types and the projection."""
    own = [(-(-spec.rows // c.tp), spec.width or c.hidden)] if not (spec.borrows and c.plan.layout.pp == 1) else []
    return (*own, *((rows, c.hidden) for rows in (spec.positions, spec.types, spec.width) if rows))


def flops(spec: Embedding | Patches, tokens: Tokens) -> Flops:
    """Return the FLOPs of the weights, those of looked-up tables left out: a look-up multiplies nothing."""
    hidden = tokens.hidden
    return Flops(weights=2 * (spec.num_params(hidden) - spec.looked_up(hidden)) * tokens.count)


def patch_pieces(c: Context, spec: Patches) -> list[Piece]:
    """A product of all patches on every tensor-parallel rank, as towers are published (its width is that of three
    colours of a few pixels), and positions added. Nothing behind an image waits for a gradient."""
    size = c.shard_tokens * c.hidden * c.element
    inputs = c.tokens * spec.inner * c.element
    product = linear(c, "patches", c.hidden, spec.inner, bias=spec.bias, saved=inputs, held=inputs)
    product = [_forward_only(p) for p in product]
    added = Piece(name="positions", forward=Elementwise(num_bytes=3 * size), backward=Elementwise(num_bytes=size))
    return [*product, added, *([norm(c, "embedding norm")] if spec.norm_vectors else [])]


def _forward_only(piece: Piece) -> Piece:
    return msgspec.structs.replace(piece, backward=None)


def patch_params(spec: Patches, c: Context) -> Held:
    """All of it is whole on every tensor-parallel rank."""
    return Held(whole=float(spec.num_params(c.hidden)), low=False)


def bridge_pieces(c: Context, spec: Bridge) -> list[Piece]:
    """A final norm and projections of all tokens, or of one of each sequence, alike on every tensor-parallel rank."""
    found, width = [norm(c, "bridge norm")] if spec.norm_vectors else [], c.hidden
    at = c.sequences_only() if spec.pooled else c
    for number, out in enumerate(spec.widths, 1):
        inputs = at.tokens * width * c.element
        found += linear(at, f"bridge {number}", out, width, bias=spec.bias, saved=inputs, held=inputs)
        if number < len(spec.widths):
            size = at.tokens * out * c.element
            forward, backward = Elementwise(num_bytes=2 * size), Elementwise(num_bytes=3 * size)
            found.append(Piece(name=f"bridge activation {number}", forward=forward, backward=backward, saved=size))
        width = out
    return found


def bridge_params(spec: Bridge, c: Context) -> Held:
    """All of it is whole on every tensor-parallel rank."""
    return Held(whole=float(spec.num_params(c.hidden)))


def bridge_flops(spec: Bridge, tokens: Tokens) -> Flops:
    """Return the FLOPs of a bridge's weights: the norm of every token, and projections of the projected tokens."""
    norms = spec.norm_vectors * tokens.hidden
    projections = spec.num_params(tokens.hidden) - norms
    return Flops(weights=2 * (norms * tokens.count + projections * (tokens.rows if spec.pooled else tokens.count)))


KINDS = (
    Kind(name="embedding", record=Embedding, pieces=pieces, params=params, flops=flops, tables=tables),
    Kind(name="patches", record=Patches, pieces=patch_pieces, params=patch_params, flops=flops),
    Kind(name="bridge", record=Bridge, pieces=bridge_pieces, params=bridge_params, flops=bridge_flops),
)
