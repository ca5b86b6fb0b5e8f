"""Latent attention in a serving iteration: its projections, and the indexer of sparse attention.

The projections of a hidden state to the latents of queries and of keys are one product, as their weights lie next to
each other (``fused_qkv_a_proj`` of SGLang and vLLM, ``fused_a`` of TensorRT-LLM). An indexer says which earlier tokens
each query attends to.

DeepSeek-V3.2 (2512.02556, section 2.1) scores every earlier token for a query t: the sum over indexer heads j of
w[t, j] ReLU(q[t, j] k[s]), and attends to the best few of them. Queries come from the latent that attention's come
from, keys and weights from the hidden state; scores are products of 8 bits. Engines have the indexer whole on every
tensor-parallel rank (SGLang, srt/layers/attention/nsa/nsa_indexer.py: replicated products), as each needs all choices.
"""

from __future__ import annotations

import msgspec

from meshwright.layers.pieces import Context, Piece, linear
from meshwright.spec.layers import Attention, Block
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.work import Collective, Elementwise, Gemm, Work

#: Kernels between an indexer's products and its scores, of queries and keys each: rotary positions, a Hadamard
#: transform and a cast to 8 bits (the keys' into the cache); and the layer norm of keys.
TURNED, NORMED = 3, 1
#: Passes of a kernel that finds the best of a row of scores over it: a histogram of digits, then what lies in the last
#: bucket (radix select; SGLang's sgl-kernel topk.cu reads rows twice).
SELECT_PASSES = 2
#: Bytes of a score, which is kept in fp32, and of the place of a token in its context.
SCORE_BYTES, PLACE_BYTES = 4.0, 4.0


def beside(c: Context, block: Block, pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of a block as engines compute latent attention, with those of its indexer, if it has one, in
    front of the attention that it chooses for."""
    pieces = _joined(pieces)
    if block.attention is None or not block.attention.index_heads:
        return pieces
    at = next(i for i, piece in enumerate(pieces) if piece.name == "attention core")
    return [*pieces[:at], *projections(c, block.attention), *pieces[at:]]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces with both down-projections of a layer as one product of the hidden state."""
    named = {piece.name: piece for piece in pieces}
    if "q down" not in named or "kv down" not in named:
        return pieces
    first, second = named["q down"], named["kv down"]
    both = msgspec.structs.replace(
        first,
        forward=msgspec.structs.replace(first.forward, n=first.forward.n + second.forward.n),
        outputs=(*first.outputs, *second.outputs),
    )
    rest = (piece for piece in pieces if not piece.name.startswith("kv down"))
    return [both if piece is first else piece for piece in rest]


def projections(c: Context, spec: Attention) -> list[Piece]:
    """Return the pieces of an indexer on the tokens of a rank of `c`."""
    width = spec.index_heads * spec.index_head_dim
    size = c.tokens * (width + spec.index_head_dim) * c.element
    weights = Gemm(m=int(c.tokens), n=spec.index_heads, k=c.hidden, dtype=c.attention_dtype, out_bytes=SCORE_BYTES)
    turned = Elementwise(num_bytes=2 * size * TURNED, kernels=2 * TURNED + NORMED, fused=True)
    return [
        *linear(c, "index q", width, spec.q_lora_rank or c.hidden),
        *linear(c, "index k", spec.index_head_dim, c.hidden),
        Piece(name="index weights", forward=weights),
        Piece(name="index rotary", forward=turned),
    ]


def choice(
    c: Context, spec: Attention, batch: int, new: int, past: int, pairs: float, low: str
) -> list[tuple[str, str, Work]]:
    """Return the tasks by which a rank chooses for `batch` requests of `new` tokens behind `past` others, whose queries
    have so many `pairs` with tokens before them, by products in `low` precision. A prompt that has no more tokens than
    a query attends to has nothing to choose from; decoding is one graph for any length. Context-parallel ranks share
    work as attention does: queries of prompts, behind all keys that are gathered, and keys of decoded tokens, whose
    best of every rank are gathered."""
    if not spec.index_heads or (new > 1 and past + new <= spec.index_top_k):
        return []
    cp, group = c.plan.layout.cp, c.cp_outer
    tokens = -(-new // cp)
    seen = max(1, round(pairs / cp / tokens))
    # a kernel multiplies and sums over heads, so that a score is written once for all of them
    scores = Gemm(
        m=tokens * spec.index_heads,
        n=seen,
        k=spec.index_head_dim,
        batch=batch,
        dtype=low,
        out_bytes=SCORE_BYTES / spec.index_heads,
    )
    best = Elementwise(num_bytes=SELECT_PASSES * SCORE_BYTES * batch * tokens * seen, fused=True)
    tasks: list[tuple[str, str, Work]] = [("index scores", "compute", scores), ("index choice", "compute", best)]
    if cp == 1:
        return tasks
    rows = new + past if new > 1 else spec.index_heads
    size = batch * rows * spec.index_head_dim * DTYPE_BYTES[low]
    name = "index keys gather" if new > 1 else "index queries gather"
    tasks.insert(0, (name, "cp", Collective(op="all_gather", num_bytes=size, group=group)))
    if new == 1:
        size = batch * cp * spec.index_top_k * (SCORE_BYTES + PLACE_BYTES)
        tasks.append(("index candidates gather", "cp", Collective(op="all_gather", num_bytes=size, group=group)))
    return tasks
