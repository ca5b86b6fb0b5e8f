"""Softmax attention as pieces: projections, rotary, core, and how its sequence is exchanged.

MHA to MQA share one projection; latent attention (DeepSeek-V2, 2405.04434) compresses first. Context parallelism
is a ring of key-value blocks (balanced zigzag), an all-to-all over heads, a gather of keys and values, or two rings
around stored scores (:mod:`.scores`). Attention over one dim of a video is exchanged where that is the dim that ranks
share: time, and under ``dsp`` always the other one.
"""

from __future__ import annotations

import msgspec

from meshwright.layers.kind import Cache, Flops, Held, Kind, Tokens
from meshwright.layers.pieces import Context, Piece, RingMoves, entering, linear, regather
from meshwright.layers.placed import HEADS, QUERIES, TOKENS, crossing, enter, moved
from meshwright.layers.scores import ringed_scores, stored_scores
from meshwright.spec.items import TIME, Item, along, num_tokens
from meshwright.spec.layers import Attention as Spec
from meshwright.work import (
    RING_MERGE,
    AttentionCore,
    Collective,
    Elementwise,
    VarlenAttention,
    attended_pairs,
    pairs,
)


def pieces(c: Context, spec: Spec) -> list[Piece]:
    """Projections, rotation, core and output of softmax attention, inside a tensor-parallel region."""
    heads, width = spec.heads // c.tp, c.hidden
    return [
        *enter(c, "attention"),
        *(_latent_projections(c, spec, heads) if spec.kv_lora_rank else _projections(c, spec, heads)),
        *_norm_sum(c, spec),
        *_rotary(c, spec, heads),
        *[piece for share in c.shares or (c,) for piece in _dim_core(share, spec, heads)],
        *_gate(c, spec, heads),
        *linear(
            c,
            "attention out",
            width,
            heads * spec.v_head_dim,
            targets={"o": width},
            bias=spec.out_bias,
            saved=c.tokens * heads * spec.v_head_dim * c.element,
            held=c.tokens * heads * spec.v_head_dim * c.element,
        ),
    ]


def cross_pieces(c: Context, source: Context, spec: Spec) -> list[Piece]:
    """Attention whose queries are this stream's tokens and whose keys and values those of `source`, all of them
    (Vaswani et al. 2017, section 3.2.3); the gradient of the source is added to what other layers left of it."""
    heads, kv, e = spec.heads // c.tp, kv_heads(c, spec), c.element
    entry, other = entering(c), entering(source)
    widths = {"k": kv * spec.head_dim, "v": kv * spec.v_head_dim}
    core = _core(c, spec, heads, kv, outer=1, ring=1, kv_bytes=0.0, source=source)
    out = c.tokens * heads * spec.v_head_dim * e
    size = source.shard_tokens * source.hidden * e
    targets = {"q": heads * spec.head_dim}
    return [
        *enter(c, "cross attention"),
        *linear(c, "cross q", targets["q"], c.hidden, targets=targets, bias=spec.qkv_bias, saved=entry, held=entry),
        *enter(source, "cross source"),
        *linear(
            source,
            "cross kv",
            sum(widths.values()),
            source.hidden,
            targets=widths,
            bias=spec.qkv_bias,
            saved=other,
            held=other,
        ),
        Piece(name="source gradient", backward=Elementwise(num_bytes=3 * size)),
        *[msgspec.structs.replace(piece, name=f"cross {piece.name}") for piece in core],
        *linear(
            c,
            "cross out",
            c.hidden,
            heads * spec.v_head_dim,
            targets={"o": c.hidden},
            bias=spec.out_bias,
            saved=out,
            held=out,
        ),
    ]


def kv_heads(c: Context, spec: Spec) -> int:
    """Key-value heads a rank holds: at least one, replicated when tp exceeds them."""
    return max(1, spec.kv_heads // c.tp)


def _projections(c: Context, spec: Spec, heads: int) -> list[Piece]:
    kv, entry = kv_heads(c, spec), entering(c)
    parts = {"q": heads * spec.head_dim * (2 if spec.gated else 1), "k": kv * spec.head_dim}
    if not spec.key_as_value:
        parts["v"] = kv * spec.v_head_dim
    bias = spec.qkv_bias
    pieces = linear(c, "qkv", sum(parts.values()), c.hidden, targets=parts, bias=bias, saved=entry, held=entry)
    return [_with_regather(c, p) if p.name == "qkv" else p for p in pieces]


def _with_regather(c: Context, piece: Piece) -> Piece:
    return msgspec.structs.replace(piece, regather=regather(c))


def _latent_projections(c: Context, spec: Spec, heads: int) -> list[Piece]:
    """Down-projections are computed on every tensor-parallel rank, up-projections are split by heads."""
    e, hidden = c.element, c.hidden
    entry = c.shard_tokens * hidden * e
    kv_down = spec.kv_lora_rank + spec.rope_head_dim
    nope = spec.head_dim - spec.rope_head_dim
    pieces = []
    if spec.q_lora_rank:
        latent = c.tokens * spec.q_lora_rank * e
        pieces += linear(
            c, "q down", spec.q_lora_rank, hidden, targets={"q": spec.q_lora_rank}, saved=entry, held=entry
        )
        pieces.append(_latent_norm(c, "q latent norm", spec.q_lora_rank))
        width = heads * spec.head_dim
        pieces += linear(c, "q up", width, spec.q_lora_rank, targets={"q_up": width}, saved=latent, held=latent)
    else:
        width = heads * spec.head_dim
        pieces += linear(c, "q", width, hidden, targets={"q": width}, saved=entry, held=entry)
    latent = c.tokens * spec.kv_lora_rank * e
    pieces += linear(c, "kv down", kv_down, hidden, targets={"k": kv_down})
    pieces.append(_latent_norm(c, "kv latent norm", spec.kv_lora_rank))
    width = heads * (nope + spec.v_head_dim)
    pieces += linear(c, "kv up", width, spec.kv_lora_rank, targets={"kv_up": width}, saved=latent, held=latent)
    return pieces


def _latent_norm(c: Context, name: str, width: int) -> Piece:
    size = c.tokens * width * c.element
    return Piece(
        name=name, forward=Elementwise(num_bytes=2 * size), backward=Elementwise(num_bytes=3 * size), saved=size
    )


def _norm_sum(c: Context, spec: Spec) -> list[Piece]:
    """The sum over tensor-parallel ranks in norms of queries and keys over all their heads: two numbers of each token
    in fp32."""
    if not spec.normed_over_all or c.tp == 1:
        return []
    total = Collective(op="all_reduce", num_bytes=c.tokens * 2 * 4.0, group=c.tp_group)
    return [Piece(name="qk norm sum", forward=total, backward=total, queue="tp")]


def _rotary(c: Context, spec: Spec, heads: int) -> list[Piece]:
    """Rotation of queries and keys, with their norms where the model has them."""
    if not spec.rotary and not spec.qk_norm:
        return []
    rotated = spec.rope_head_dim or spec.head_dim
    keys = 1 if spec.kv_lora_rank else kv_heads(c, spec)
    size = c.tokens * (heads + keys) * rotated * c.element
    passes = int(spec.rotary) + int(spec.qk_norm)
    return [
        Piece(
            name="rotary",
            forward=Elementwise(num_bytes=2 * size * passes, kernels=2 * passes, operator="rotary"),
            backward=Elementwise(
                num_bytes=2 * size * passes + (size if spec.qk_norm else 0.0),
                kernels=2 * passes,
                operator="rotary backward",
            ),
            saved=size if spec.qk_norm else 0.0,
        )
    ]


def _dim_core(c: Context, spec: Spec, heads: int) -> list[Piece]:
    """The core over the dims that the attention is over. Ranks share the frames of a video, so that attention over
    space needs nothing of other ranks; under ``dsp`` they share whichever dim it is not over (2403.10266)."""
    if not spec.over:
        return _exchanged_core(c, spec, heads)
    if spec.over == TIME and not c.plan.sequence.switches:
        return _exchanged_core(c.along(TIME), spec, heads)
    alone = c.along(spec.over, c.plan.layout.cp)
    return _core(alone, spec, heads, kv_heads(c, spec), outer=1, ring=1, kv_bytes=0.0)


def _exchanged_core(c: Context, spec: Spec, heads: int) -> list[Piece]:
    """The core and, under context parallelism, the exchanges around or inside it: a swap of heads for tokens, and
    inside it a ring or a gather of keys and values between the groups that have swapped (Fang & Zhao 2405.07719)."""
    e, swap = c.element, c.plan.head_swap
    outer, kv = c.plan.layout.cp // swap, kv_heads(c, spec)
    into, out = [], []
    # a latent is of all heads: it travels round as it is, and where heads are swapped its keys and values do
    width = _kv_width(spec, kv)
    if swap > 1:
        kv = heads if spec.kv_lora_rank else kv * copies(heads, kv, swap)
        width = kv * (spec.head_dim + spec.v_head_dim)
        back = c.tokens * heads * spec.v_head_dim * e
        forth = c.tokens * (heads * spec.head_dim + width) * e
        # the sequence is shared in front of attention and behind it, and heads inside
        swapped = crossing(TOKENS, HEADS.inputs[0], HEADS.out)
        into = moved("heads to sequence", "cp", swapped, forth, c.cp_inner)
        out = moved("sequence to heads", "cp", crossing(HEADS.out, TOKENS), back, c.cp_inner)
        heads, kv = heads // swap, max(1, kv // swap)
        width = kv * (spec.head_dim + spec.v_head_dim)
    kv_bytes = c.tokens * swap * width * e
    ring, halo = outer, c.plan.denoising.halo
    if halo and outer > 1:  # a part of each neighbour's patch, and nothing of the others
        sides = min(2, outer - 1)
        part = Collective(op="send", num_bytes=sides * halo * kv_bytes, group=c.cp_outer)
        piece = Piece(name="neighbours' keys and values", forward=part, queue="cp")
        seen = (1.0 + sides * halo) / outer
        return [piece, *_core(c, spec, heads, kv, outer=outer, ring=1, kv_bytes=kv_bytes, share=seen)]
    if c.plan.sequence.algorithm == "allgather" and outer > 1:
        ring = 1
        gathered = crossing(TOKENS, QUERIES.inputs[1], QUERIES.out)
        into += moved("kv gather", "cp", gathered, kv_bytes * outer, c.cp_outer)
    return [*into, *_core(c, spec, heads, kv, outer=outer, ring=ring, kv_bytes=kv_bytes), *out]


def copies(heads: int, kv: int, ranks: int) -> int:
    """Return the copies of each key-value head that are sent so that all `ranks` get those their query heads read."""
    return next(n for n in range(1, heads // kv + 1) if heads // kv % n == 0 and kv * n % ranks == 0)


def _kv_width(spec: Spec, kv: int) -> int:
    if spec.kv_lora_rank:
        return spec.kv_lora_rank + spec.rope_head_dim
    return kv * (spec.head_dim + spec.v_head_dim)


def _core(
    c: Context,
    spec: Spec,
    heads: int,
    kv: int,
    *,
    outer: int,
    ring: int,
    kv_bytes: float,
    source: Context | None = None,
    share: float = 1.0,
) -> list[Piece]:
    """A rank's queries, one in `outer` of every item's, against all of the item's keys, which have `kv` heads. Balanced
    over context-parallel ranks: each has its share of the causal triangle. Or every row's queries against all keys of
    its row in another stream, `source`; of the item's keys a `share` is attended to."""
    if ring > 1 and c.plan.sequence.algorithm == "ring-self-attention":
        return ringed_scores(c, spec, heads, heads if spec.kv_lora_rank else min(heads, kv), ring)
    if c.plan.memory.attention == "unfused":
        return stored_scores(c, spec, heads, c.seq_len // outer, (source or c).seq_len)
    window = min(spec.window, spec.index_top_k) if spec.window and spec.index_top_k else spec.window or spec.index_top_k
    kv = heads if spec.kv_lora_rank else min(heads, kv)

    def work(backward: bool) -> AttentionCore | VarlenAttention:
        groups = []
        if source is not None:
            return _row(c, source, spec, heads, kv, backward)
        for item, count in c.batch:
            seq, queries = item.new_tokens, item.new_tokens // outer
            seen = _seen(item, c.causal, window, spec.chunked)
            if outer > 1 and seq * 2 * outer <= c.seq_len:  # shorter than a rank's piece of a row: whole on one rank
                many, rows, keys = count / outer / ring, seq, seq
            else:
                # of a causal ring's blocks a rank works on all queries and half of the keys, or half of them and all
                halves = 2 if ring > 1 and c.causal else 1
                many, rows, keys = count, max(1, queries), max(1, max(seq, int(item.context)) // ring // halves)
                seen = seen * max(1, queries) / seq / ring * share
                keys = max(1, round(keys * share))
            groups.append(
                AttentionCore(
                    batch=many,
                    q_len=rows,
                    kv_len=keys,
                    heads=heads,
                    kv_heads=kv,
                    head_dim=spec.head_dim,
                    v_head_dim=spec.v_head_dim,
                    pairs=seen,
                    dtype=c.attention_dtype,
                    backward=backward,
                )
            )
        return groups[0] if len(groups) == 1 else VarlenAttention(groups=tuple(groups))

    queries = num_tokens(c.batch) // outer
    inputs = queries * (heads * spec.head_dim + kv * (spec.head_dim + spec.v_head_dim)) * c.element
    # the core's backward needs its 16-bit output; below 16 bits the projection behind it saves another copy
    lower = c.low < c.element
    own_output = queries * heads * spec.v_head_dim * c.element if lower or c.train.lora is not None else 0.0
    exchange = {}
    if ring > 1:
        rows = queries * heads
        exchange = _ring_moves(
            c, kv_bytes, rows * spec.head_dim * c.element, rows * spec.v_head_dim * c.element, 4.0 * rows
        )
        exchange |= _merges(c, spec, heads, kv, queries)
    return [
        Piece(
            name="attention core",
            forward=work(False),
            backward=work(True),
            core=True,
            saved=inputs + own_output,
            core_saved=queries * heads * 4.0,
            outputs=(queries * heads * (spec.v_head_dim * c.element + 4.0),),
            ring=ring,
            **exchange,
        )
    ]


def _ring_moves(c: Context, kv: float, q: float, out: float, row: float) -> dict[str, RingMoves]:
    """Return the messages of a ring forward and backward, of bytes of a rank's keys and values, its queries, its
    outputs, and a number in fp32 for each query and head."""

    def send(size: float, back: float = 0.0) -> Collective:
        return Collective(op="send", num_bytes=max(size, back), back_bytes=min(size, back), group=c.cp_outer)

    algorithm = c.plan.sequence.algorithm
    forward = RingMoves(first=send(kv), each=send(kv))
    # keys and values go on, followed by their gradients, which come home at the end
    backward = RingMoves(first=send(2 * kv), each=send(2 * kv), last=send(kv))
    asked = q + out + 2 * row  # queries, the gradients of their outputs, and two sums of each
    if algorithm == "burstattention":
        backward = RingMoves(first=send(asked + q), each=send(asked + q), last=send(q))
    if algorithm == "tokenring":
        # what was found for the block before returns to where its queries are from, while the next ones go on
        forward = RingMoves(first=send(q), each=send(q, out + row), last=send(out + row))
        backward = RingMoves(first=send(asked), each=send(asked, q), last=send(q))
    return {"exchange": forward, "exchange_back": backward}


def _merges(c: Context, spec: Spec, heads: int, kv: int, queries: int) -> dict[str, Elementwise]:
    """Merges of a block of a ring with the results before it. Outputs are weighted by their softmax's sums, in fp32 so
    that they can be weighted again; gradients of queries, keys and values are sums. Each value is read as the kernel
    left it and added to one that is read and written in fp32. Of a causal ring's blocks, each of half the queries or
    half the keys, three quarters of the values are touched on average."""
    value = (0.75 if c.causal else 1.0) * (c.element + 8.0)
    gradients = heads * spec.head_dim + kv * (spec.head_dim + spec.v_head_dim)
    return {
        "merge": Elementwise(num_bytes=queries * heads * spec.v_head_dim * value, operator=RING_MERGE),
        "merge_back": Elementwise(num_bytes=queries * gradients * value, operator=RING_MERGE),
    }


def _row(c: Context, source: Context, spec: Spec, heads: int, kv: int, backward: bool) -> AttentionCore:
    """Return the core of all rows of a microbatch against the rows of another stream."""
    queries = c.seq_len // c.plan.layout.cp
    return AttentionCore(
        batch=c.rows,
        q_len=queries,
        kv_len=source.seq_len,
        heads=heads,
        kv_heads=kv,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        pairs=float(queries) * source.seq_len,
        dtype=c.attention_dtype,
        backward=backward,
    )


def _seen(item: Item, causal: bool, window: int, chunked: bool) -> float:
    """Return the (query, key) pairs of an item per head; keys of a cache are seen by all of its queries."""
    if item.context > item.new_tokens:
        return pairs(item.new_tokens, item.context, causal=causal, window=window)
    return attended_pairs(item.new_tokens, item.context, causal=causal, window=window, chunked=chunked)


def _gate(c: Context, spec: Spec, heads: int) -> list[Piece]:
    """The sigmoid of a gate as wide as the queries times the core's output, which both stay for the backward."""
    if not spec.gated:
        return []
    size = c.tokens * heads * spec.v_head_dim * c.element
    forward, backward = Elementwise(num_bytes=3 * size, kernels=2), Elementwise(num_bytes=5 * size, kernels=3)
    return [Piece(name="attention gate", forward=forward, backward=backward, saved=2 * size)]


def params(spec: Spec, c: Context) -> Held:
    """Heads are split; latent down-projections and their norms are whole on every tensor-parallel rank."""
    whole = 0
    if spec.kv_lora_rank:
        down = spec.q_lora_rank + spec.kv_lora_rank + spec.rope_head_dim
        whole = c.hidden * down + spec.q_lora_rank + spec.kv_lora_rank
    per_head = _repeated_head(spec, c)
    extra = per_head * (1 - spec.kv_heads / c.tp)
    among = {"common" if spec.kv_heads == 1 else "repeated": float(per_head)}
    return Held(split=spec.num_params(c.hidden) - whole, whole=float(whole), extra=extra, **among)


def _repeated_head(spec: Spec, c: Context) -> int:
    """The projections of a key-value head, where tp exceeds the heads and every rank holds a whole one."""
    if spec.kv_lora_rank or spec.kv_heads >= c.tp:
        return 0
    return (c.hidden + int(spec.qkv_bias)) * (spec.head_dim + (0 if spec.key_as_value else spec.v_head_dim))


def flops(spec: Spec, tokens: Tokens) -> Flops:
    """Every parameter multiplies every token; scores and weighted sums of the pairs that the mask leaves."""
    runs = along(tokens.items, spec.over)
    seen = sum(count * _seen(item, tokens.causal, spec.window, spec.chunked) for item, count in runs)
    weights = 2 * spec.num_params(tokens.hidden) * tokens.count
    return Flops(weights=weights, mixing=seen * 2.0 * spec.heads * (spec.head_dim + spec.v_head_dim))


def state(spec: Spec) -> Cache:
    """Keys and values, or the latent in place of them."""
    return Cache(per_token=spec.kv_width)


def adapters(spec: Spec, hidden: int, target: str) -> int:
    """Inputs plus outputs of the projection of queries, keys, values or results; of latent attention those down to the
    latents are meant, one for keys and values, and those up to heads have words of their own."""
    if target == "q_up":
        return spec.q_lora_rank + spec.heads * spec.head_dim if spec.q_lora_rank else 0
    if target == "kv_up":
        width = spec.head_dim - spec.rope_head_dim + spec.v_head_dim
        return spec.kv_lora_rank + spec.heads * width if spec.kv_lora_rank else 0
    if spec.kv_lora_rank:
        q = spec.q_lora_rank or spec.heads * spec.head_dim
        down = {"q": q, "k": spec.kv_lora_rank + spec.rope_head_dim, "o": spec.heads * spec.v_head_dim}
        return hidden + down[target] if target in down else 0
    out = {
        "q": spec.heads * spec.head_dim,
        "k": spec.kv_heads * spec.head_dim,
        "v": spec.kv_heads * spec.v_head_dim,
        "o": spec.heads * spec.v_head_dim,
    }
    return hidden + out[target] if target in out else 0


KINDS = (
    Kind(
        name="attention",
        record=Spec,
        pieces=pieces,
        params=params,
        flops=flops,
        state=state,
        adapters=adapters,
    ),
)
