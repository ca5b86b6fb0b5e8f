"""A block as pieces: its parts one after the other, each behind a norm and added to what came in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright import layers
from meshwright.layers.attention import cross_pieces
from meshwright.layers.kind import Cache, Flops, Held, Kind, Tokens
from meshwright.layers.mlp import dense
from meshwright.layers.moe import around
from meshwright.layers.pieces import Context, Piece, norm, residual
from meshwright.layers.placed import leave
from meshwright.spec.layers import Block, Dense, Moe
from meshwright.spec.workload import Train
from meshwright.work import Collective

if TYPE_CHECKING:
    from meshwright.plan import Plan

#: Norms of a block whose two paths have one in front and one behind.
SANDWICH = 4


def pieces(c: Context, block: Block) -> list[Piece]:
    """All parts in order. In a parallel block the attention's output is added to the MLP's before both leave the
    tensor-parallel region together (Wang and Komatsuzaki's GPT-J; MegaScale 2402.15627, section 3.1)."""
    out: list[Piece] = []
    for part in block.before:
        out += layers.of(part).pieces(c.at(getattr(part, "stream", block.stream)), part)
    if block.ways > 1:
        return [*out, *_apart(c, block)]
    if block.mixer is not None:
        out += _mixed(c, "mixer", layers.of(block.mixer).pieces(c, block.mixer))
    if isinstance(block.mlp, Moe) and block.mlp.shortcut and block.attention is not None:
        inside = [norm(c, "attention norm"), *layers.of(block.attention).pieces(c, block.attention)]
        inside = [*inside, *leave(c, "attention"), residual(c, "attention residual")]
        return [
            *out,
            norm(c, "shortcut norm"),
            *around(c, block.mlp, inside, norm(c, "mlp norm")),
            residual(c, "mlp residual"),
        ]
    if block.attention is not None:
        body = layers.of(block.attention).pieces(c, block.attention)
        inside = [norm(c, "attention norm"), *body]
        out += inside if block.parallel else normed(c, block, "attention", [*body, *leave(c, "attention")])
    if block.cross is not None:
        out += _mixed(c, "cross attention", cross_pieces(c, c.at(block.source), block.cross))
    return out if block.mlp is None else [*out, *_mlp(c, block)]


def _apart(c: Context, block: Block) -> list[Piece]:
    """A block of parts with streams of their own, one a rank (Kraken, 2408.07802): attention and MLP of each exchange
    nothing. What the MLPs of the block before found is summed over all ranks beside attention, and read by the MLPs."""
    size = c.tokens * c.hidden * c.element
    total = Collective(op="all_reduce", num_bytes=size, group=c.tp_group)
    attention = [p for p in layers.of(block.attention).pieces(c, block.attention) if p.queue != "tp"]
    mlp = [p for p in dense(c, "mlp", block.mlp.ffn, block.mlp.gated, bias=block.mlp.bias) if p.queue != "tp"]
    added = residual(c, "sum of streams residual")
    return [
        Piece(name="sum of streams", forward=total, backward=total, queue="tp", opens="streams"),
        norm(c, "attention norm"),
        *attention,
        residual(c, "attention residual"),
        msgspec.structs.replace(added, closes="streams"),
        norm(c, "mlp norm"),
        *mlp,
        residual(c, "mlp residual"),
    ]


def _mixed(c: Context, name: str, body: list[Piece]) -> list[Piece]:
    return [norm(c, f"{name} norm"), *body, *leave(c, name), residual(c, f"{name} residual")]


def normed(c: Context, block: Block, path: str, body: list[Piece]) -> list[Piece]:
    """A path of a block between its norms, added to what came in: one in front of most, one behind as well in a
    sandwich (Gemma 2, 2408.00118), one behind alone (OLMo 2, 2501.00656), and those of a mixture's paths and of their
    sum behind it (Gemma 4)."""
    behind = int(block.norm_after)
    if block.norms >= SANDWICH:
        behind = 1 if path == "attention" else block.norms - SANDWICH + 1
    added = residual(c, f"{path} residual")
    if not behind:
        return [norm(c, f"{path} norm"), *body, added]
    # the first of them reads what a collective sums; without a norm in front, gradients are summed for the residual
    last = [norm(c, f"{path} post-norm") for _ in range(behind)]
    last = [msgspec.structs.replace(one, lands="" if number else "forward") for number, one in enumerate(last)]
    added = msgspec.structs.replace(added, lands="backward" if block.norm_after else "")
    return [*([] if block.norm_after else [norm(c, f"{path} norm")]), *body, *last, added]


def _mlp(c: Context, block: Block) -> list[Piece]:
    shared = block.parallel and block.norms < 2  # the attention's input, normalised and gathered already
    spec = block.mlp
    if isinstance(spec, Dense):
        body = dense(c, "mlp", spec.ffn, spec.gated, inside=shared, bias=spec.bias)
    else:
        body = layers.of(spec).pieces(c, spec)
    return [*body, residual(c, "mlp residual")] if shared else normed(c, block, "mlp", body)


def _parts(block: Block) -> Iterator[tuple[int, msgspec.Struct]]:
    """Every part with the stream whose width it has."""
    for number, part in enumerate(block.parts):
        yield getattr(part, "stream", block.stream) if number < len(block.before) else block.stream, part


def _norms(block: Block, hidden: int) -> int:
    return block.norms * block.norm_vectors * hidden + block.scale_params


def params(block: Block, c: Context) -> Held:
    """Return the parameters of the block's parts, and of the norms, which are whole on every rank."""
    held = Held(whole=float(_norms(block, c.hidden)))
    for stream, part in _parts(block):
        held = held + layers.of(part).params(part, c.at(stream))
    return held


def flops(block: Block, tokens: Tokens) -> Flops:
    """Return the FLOPs of the block's parts; by the convention of published MFU a norm's parameters count like any
    other."""
    found = Flops(weights=2 * _norms(block, tokens.hidden) * tokens.count)
    for stream, part in _parts(block):
        found = found + layers.of(part).flops(part, tokens.at(stream))
    if block.cross is not None:  # all pairs of both streams' rows, which no mask hides
        a, own = block.cross, layers.of(block.cross).flops(block.cross, tokens)
        pairs = float(tokens.count) * tokens.at(block.source).count / tokens.rows
        mixing = pairs * 2.0 * a.heads * (a.head_dim + a.v_head_dim)
        others = tokens.at(block.source).count - tokens.count if a.kv_inputs else 0  # tokens of another length
        weights = found.weights + 2 * a.kv_params(a.kv_inputs) * others
        found = msgspec.structs.replace(found, weights=weights, mixing=found.mixing - own.mixing + mixing)
    return found


def state(block: Block) -> Cache:
    """Return the elements that all parts of a block keep of a sequence for its next token, added up."""
    found = Cache()
    for _, part in _parts(block):
        found = found + layers.of(part).state(part)
    return found


def adapters(block: Block, hidden: int, target: str) -> int:
    """Return the adapter parameters of all parts of a block for a target matrix, at rank 1."""
    return sum(layers.of(part).adapters(part, hidden, target) for _, part in _parts(block))


def rules(block: Block, plan: Plan, train: Train) -> Iterator[tuple[str, ...]]:
    """Yield the violations of all parts of a block, (message, help) each."""
    if block.ways not in (1, plan.layout.tp):
        yield f"{block.ways} streams of a block are on as many ranks, and tp={plan.layout.tp}", f"say tp{block.ways}"
    if block.ways > 1 and plan.layout.cp > 1:
        yield "streams of their own share no sequence over cp", "say cp1"
    if block.ways > 1 and plan.overlap.tp:
        yield (
            "the sum of streams is beside attention already, and overlap=tp rewrites others",
            "leave tp out of overlap=",
        )
    for _, part in _parts(block):
        yield from layers.of(part).rules(part, plan, train)


KINDS = (
    Kind(
        name="block",
        record=Block,
        pieces=pieces,
        params=params,
        flops=flops,
        state=state,
        adapters=adapters,
        rules=rules,
    ),
)
