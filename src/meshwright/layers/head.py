"""Heads of a model: final norm, projection to a vocabulary or classes and its loss; a contrastive loss; features."""

from __future__ import annotations

import msgspec

from meshwright.layers.kind import Flops, Held, Kind, Tokens
from meshwright.layers.pieces import Context, Piece, RingMoves, entering, linear, norm, regather
from meshwright.layers.placed import REPLICATE, SCORED, TOKENS, crossing, enter, moved
from meshwright.spec.ends import Contrastive, Features, Head
from meshwright.work import Collective, Elementwise, Gemm

#: Products of a contrastive loss that are computed tile by tile and never stored.
TILES = "tiles"


def pieces(c: Context, spec: Head) -> list[Piece]:
    """Final norm, BERT's transform where there is one, then the projection and the loss of all tokens, or of one of
    each sequence (Dosovitskiy et al. 2020), which is too little to be split."""
    if not spec.pooled:
        first = [norm(c, "final norm")] if not spec.transform else _transform(c)
        return [*first, *enter(c, "head"), *loss(c, spec.rows), *_loss_sums(c)]
    at = c.sequences_only()
    return [norm(c, "final norm"), *loss(at, spec.rows, shared=False)]


def _transform(c: Context) -> list[Piece]:
    """A dense layer on every tensor-parallel rank's tokens, GELU and a LayerNorm (Devlin et al. 2018)."""
    size = c.shard_tokens * c.hidden * c.element
    product = linear(c, "head transform", c.hidden, c.hidden, bias=True, saved=size, held=size)
    forward, backward = Elementwise(num_bytes=2 * size), Elementwise(num_bytes=3 * size)
    activation = Piece(name="head activation", forward=forward, backward=backward, saved=size)
    return [*product, activation, norm(c, "head norm")]


def loss(c: Context, rows: int, *, shared: bool = True) -> list[Piece]:
    """Projection to a vocabulary (split over tp where `shared`), softmax cross-entropy in fp32.

    Separate loss kernels keep the fp32 probabilities: 4 bytes per token and vocabulary entry (Korthikanti et al.
    2205.05198, section 4.3). Their backward holds two gradients of as many bytes beside them, the loss's and the
    softmax's (12 bytes in all, which torch's profiler shows for ``cross_entropy``), or writes one over the
    probabilities and only casts it: then the most is held there (Megatron's vocab-parallel cross-entropy), or in the
    forward if that makes the probabilities beside the fp32 logits (nanotron's). A fused one reads the 16-bit logits
    for the maximum and again for the sum, and its backward writes their gradient over them.
    """
    ranks = c.tp if shared else 1
    width = -(-rows // ranks)
    entry = entering(c) if shared else c.tokens * c.hidden * c.element
    logits = float(c.tokens) * width
    e = c.element
    projection = linear(_wide(c), "head", width, c.hidden, saved=entry, held=entry)
    if shared:
        projection = [
            msgspec.structs.replace(p, regather=regather(c)) if isinstance(p.weight, Gemm) else p for p in projection
        ]
    if c.plan.memory.loss == "fused":
        forward = backward = Elementwise(num_bytes=logits * 2 * e, fused=True)
        kept, working = logits * e, logits * e
    else:
        # cast to fp32, maximum, difference, exponential, sum; normalise, scale, cast back
        name = "loss" if ranks == 1 else "sharded loss"
        forward = Elementwise(num_bytes=logits * ((e + 4) + 4 + 8 + 8 + 4), kernels=5, fused=True, operator=name)
        backward = Elementwise(num_bytes=logits * (8 + 8 + (4 + e)), kernels=3, fused=True, operator=f"{name} backward")
        kept = logits * 4.0
        working = logits * {"eager": 8.0, "copied": 4.0, "in-place": e}[c.plan.memory.loss]
    entropy = Piece(name="cross-entropy", forward=forward, backward=backward, saved=kept, logits=kept, working=working)
    return [*projection, entropy]


def _wide(c: Context) -> Context:
    """Return the same ranks with products of at least 16 bits: a head is not quantised."""
    precision = msgspec.structs.replace(c.plan.precision, compute=c.attention_dtype, weights="", params="bf16")
    return msgspec.structs.replace(c, plan=msgspec.structs.replace(c.plan, precision=precision))


def logits(c: Context, spec: Head) -> list[Piece]:
    """Forward of the tokens that are sampled, all of them on every rank: final norm, projection (split over tp), scores
    gathered, and the softmax in fp32 that the next token is drawn from."""
    width = -(-spec.rows // c.tp)
    pieces = [norm(c, "final norm"), *linear(_wide(c), "head", width, c.hidden)]
    scores = float(c.tokens) * spec.rows
    gathered = crossing(SCORED.out, REPLICATE)._replace(backward="")
    pieces += moved("scores gather", "tp", gathered, scores * c.element, c.tp_group)
    # cast to fp32; maximum; exponentials and their sum; draw
    sampling = Elementwise(num_bytes=scores * ((c.element + 4) + 4 + 8 + 4), kernels=4, fused=True)
    return [*pieces, Piece(name="sampling", forward=sampling)]


def _loss_sums(c: Context) -> list[Piece]:
    """Maximum, sum of exponentials and the target's logit, each a number per token, over the vocabulary's ranks."""
    if c.tp == 1:
        return []
    small = Collective(op="all_reduce", num_bytes=c.tokens * 4.0 * 3, group=c.tp_group)
    return [Piece(name="loss sums", forward=small, queue="tp")]


def params(spec: Head, c: Context) -> Held:
    """Return a head's parameters on a rank: projection and bias are split by rows, the others whole. A tied head on
    another rank than the embedding holds its own copy of the table."""
    norms, beside = spec.norm_params(c.hidden), spec.beside_params(c.hidden)
    split = spec.num_params(c.hidden) - norms - beside
    if spec.tied and not c.ends_meet:
        split += spec.matrix_params(c.hidden)
    if spec.pooled:
        return Held(whole=float(split + norms + beside), low=False)
    return Held(split=split, whole=float(norms + beside), low=False)


def flops(spec: Head, tokens: Tokens) -> Flops:
    """A projection, tied or not, multiplies every token; a pooled one, and a pooler, one of each sequence."""
    hidden = tokens.hidden
    pooler = (hidden + 1) * (hidden + spec.pooler) if spec.pooler >= 0 else 0
    own = spec.num_params(hidden) - pooler + (spec.matrix_params(hidden) if spec.tied else 0)
    norms = spec.norm_params(hidden) if spec.pooled else own
    return Flops(weights=2 * (norms * tokens.count + (own - norms + pooler) * tokens.rows))


def contrastive_pieces(c: Context, spec: Contrastive) -> list[Piece]:
    """Norm of all tokens, projection of one of each text, and the products of this rank's vectors with those of all
    (Radford et al. 2021): texts here against images of all replicas, and the other way round.

    The loss is of the whole batch at once, whatever the microbatches; a microbatch's pass is priced with its share.
    Vectors of others are gathered, and products stored in fp32 for the backward; or they come round in a ring, one
    replica's at a time, while sums of rows are merged, and products are computed again in the backward and never stored
    (Cheng et al. 2024, 2410.17243, sections 3.1 and 3.2).
    """
    at, width, ring = c.sequences_only(), spec.width, c.dp_group.size
    batch, inputs = c.train.global_batch, at.tokens * c.hidden * c.element
    tiled = c.plan.memory.similarities == TILES
    scores = float(at.tokens) * batch
    part = -(-batch // ring) if tiled else batch
    product = Gemm(m=at.tokens, n=part, k=width, batch=2, dtype=c.attention_dtype, out_bytes=c.element)
    first = [norm(c, "final norm"), *linear(at, "text projection", width, c.hidden, saved=inputs, held=inputs)]
    vectors = 2.0 * at.tokens * width * c.element  # of this microbatch's texts and images
    if tiled:
        back = Gemm(m=at.tokens, n=part, k=width, batch=6, dtype=c.attention_dtype, out_bytes=0.0)
        exchange = {}
        if ring > 1:
            there = Collective(op="send", num_bytes=vectors, group=c.dp_group)
            # vectors go on with their gradients, which come home at the end
            both = Collective(op="send", num_bytes=2 * vectors, group=c.dp_group)
            exchange = {
                "exchange": RingMoves(first=there, each=there, queue="dp"),
                "exchange_back": RingMoves(first=both, each=both, last=there, queue="dp"),
            }
        forward = msgspec.structs.replace(product, out_bytes=0.0)  # a tile of scores stays on the chip
        saved = _local_batch(c) / at.tokens * (vectors + 2 * at.tokens * 4.0)
        return [*first, Piece(name="pairs", forward=forward, backward=back, saved=saved, ring=ring, **exchange)]
    back = Gemm(m=at.tokens, n=width, k=batch, batch=4, dtype=c.attention_dtype, out_bytes=c.element)
    entropy = Elementwise(num_bytes=2 * scores * (c.element + 8), kernels=4, fused=True)
    stored = 2 * _local_batch(c) * float(batch) * 4.0
    return [
        *first,
        *moved("vectors gather", "dp", crossing(TOKENS, REPLICATE, TOKENS), ring * vectors, c.dp_group),
        Piece(name="pairs", forward=product, backward=back, saved=2 * batch * width * c.element),
        Piece(name="contrastive loss", forward=entropy, backward=entropy, saved=stored),
    ]


def _local_batch(c: Context) -> float:
    """Return the sequences of a step on one replica."""
    return c.train.global_batch / c.dp_group.size


def whole(spec: Contrastive | Features, c: Context) -> Held:
    """Return the parameters of a head that is whole on every tensor-parallel rank."""
    return Held(whole=float(spec.num_params(c.hidden)), low=False)


def pooled_flops(spec: Contrastive | Features, tokens: Tokens) -> Flops:
    """Return the FLOPs of a head on one token of each sequence, with the norm of every token; in a contrastive loss
    each sequence meets all others of the batch."""
    norms = spec.norm_params(tokens.hidden)
    rest = spec.num_params(tokens.hidden) - norms
    pairs = 4.0 * tokens.rows**2 * spec.width if isinstance(spec, Contrastive) else 0.0
    return Flops(weights=2 * (norms * tokens.count + rest * tokens.rows), mixing=pairs)


def feature_pieces(c: Context, spec: Features) -> list[Piece]:
    """Norm of all tokens; pooler or projection of one."""
    at, found = c.sequences_only(), [norm(c, "final norm")] if spec.norm_vectors else []
    inputs = at.tokens * c.hidden * c.element
    if spec.pooler:
        found += linear(at, "pooler", c.hidden, c.hidden, bias=True, saved=inputs, held=inputs)
    if spec.width:
        found += linear(at, "projection", spec.width, c.hidden, saved=inputs, held=inputs)
    return found


KINDS = (
    Kind(name="head", record=Head, pieces=pieces, params=params, flops=flops),
    Kind(name="contrastive", record=Contrastive, pieces=contrastive_pieces, params=whole, flops=pooled_flops),
    Kind(name="features", record=Features, pieces=feature_pieces, params=whole, flops=pooled_flops),
)
