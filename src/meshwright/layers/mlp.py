"""The dense MLP as pieces: up (and gate), activation, down, split by its inner width over tensor-parallel ranks."""

from __future__ import annotations

import msgspec

from meshwright.layers.kind import Kind
from meshwright.layers.pieces import Context, Piece, entering, linear, regather
from meshwright.layers.placed import enter, leave
from meshwright.spec.layers import Dense
from meshwright.work import Elementwise


def dense(c: Context, name: str, ffn: int, gated: bool, *, inside: bool = False, bias: bool = False) -> list[Piece]:
    """Up (and gate), activation, down: column- then row-parallel; `inside` a tensor-parallel region already."""
    e, hidden, width = c.element, c.hidden, ffn // c.tp
    entry, inner = entering(c), c.tokens * width * e
    parts = {"gate": width, "up": width} if gated else {"up": width}
    up = linear(c, f"{name} up", sum(parts.values()), hidden, targets=parts, bias=bias, saved=entry, held=entry)
    up = [msgspec.structs.replace(p, regather=regather(c)) if p.name == f"{name} up" else p for p in up]
    return [
        *([] if inside else enter(c, name)),
        *up,
        activation(f"{name} activation", inner, gated),
        *linear(c, f"{name} down", hidden, width, targets={"down": hidden}, bias=bias, saved=inner, held=inner),
        *leave(c, name),
    ]


def activation(name: str, inner: float, gated: bool) -> Piece:
    """Return the piece of an MLP's activation, which saves its input: one width of `inner` bytes, two where gated."""
    read = 2 * inner if gated else inner
    operator = "gated activation" if gated else "activation"
    return Piece(
        name=name,
        forward=Elementwise(num_bytes=read + inner, operator=operator),
        backward=Elementwise(num_bytes=read + inner + read, operator=f"{operator} backward"),
        saved=read,
    )


def pieces(c: Context, spec: Dense) -> list[Piece]:
    """The MLP of a block that has entered no tensor-parallel region yet."""
    return dense(c, "mlp", spec.ffn, spec.gated, bias=spec.bias)


def adapters(spec: Dense, hidden: int, target: str) -> int:
    """Inputs plus outputs of the projection up, down or of the gate."""
    return adapted(spec.ffn, spec.gated, hidden, target)


def adapted(ffn: int, gated: bool, hidden: int, target: str) -> int:
    """Inputs plus outputs of a matrix of an MLP of inner width `ffn`."""
    there = target in ("up", "down") or (target == "gate" and gated)
    return hidden + ffn if ffn and there else 0


KINDS = (Kind(name="mlp", record=Dense, pieces=pieces, adapters=adapters),)
