"""Attention that stores its scores: separate kernels for scores, softmax and weighted sum, on one rank or round a ring.

Ring Self-Attention (Li et al. 2105.13120): each rank keeps whole rows of scores of its queries. Keys go round for them,
then values for the outputs; backward both go round again, and gradients of all keys and values are summed over the
ranks.
"""

from __future__ import annotations

from meshwright.layers.pieces import Context, Piece, RingMoves
from meshwright.spec.layers import Attention
from meshwright.work import Collective, Elementwise, Gemm, Scores


def stored_scores(c: Context, spec: Attention, heads: int, queries: int, keys: int) -> list[Piece]:
    """Scores, softmax, (dropout), weighted sum as separate kernels that store the score matrix: 2 bytes per score
    for the softmax, 1 for the dropout mask and 2 for its output (Korthikanti et al. 2205.05198, section 4.1)."""
    batch, e = c.rows * heads, c.element
    kv = batch * queries * spec.head_dim * e

    def product(n: int, k: int, times: int = 1) -> Gemm:
        return Gemm(m=queries, n=n, k=k, batch=batch * times, dtype=c.attention_dtype, out_bytes=e)

    return [
        Piece(
            name="attention scores",
            forward=product(keys, spec.head_dim),
            backward=product(spec.head_dim, keys, 2),
            core=True,
            saved=2 * kv,
        ),
        _softmax(c, batch, queries, keys),
        Piece(
            name="attention weighted sum",
            forward=product(spec.v_head_dim, keys),
            backward=product(keys, spec.v_head_dim, 2),
            core=True,
            saved=kv,
        ),
    ]


def _softmax(c: Context, batch: int, queries: int, keys: int) -> Piece:
    e, masked, scores = c.element, c.train.dropout, float(batch) * queries * keys

    def work(passes: int, backward: bool) -> Elementwise:
        return Elementwise(
            num_bytes=scores * (passes * e + (2 * e + 1 if masked else 0)),
            kernels=2 if masked else 1,
            scores=Scores(batch=batch, queries=queries, keys=keys, backward=backward),
        )

    return Piece(
        name="attention softmax",
        forward=work(2, False),
        backward=work(3, True),
        core=True,
        core_saved=scores * (e + (1 + e if masked else 0.0)),
    )


def ringed_scores(c: Context, spec: Attention, heads: int, kv: int, ring: int) -> list[Piece]:
    """The same of one in `ring` of every row's queries against all of its keys, of `kv` heads, in two rings. Every pair
    is computed, masked ones too."""
    batch, queries, keys, e = c.rows * heads, c.seq_len // ring, c.seq_len, c.element

    def product(n: int, k: int, times: int = 1) -> Gemm:
        return Gemm(m=queries, n=n, k=k, batch=batch * times, dtype=c.attention_dtype, out_bytes=e)

    def round_of(name: str, what: str, width: int, forward: Gemm, backward: Gemm, saved: float) -> list[Piece]:
        one = Collective(op="send", num_bytes=c.rows * queries * kv * width * e, group=c.cp_outer)
        moves = RingMoves(first=one, each=one)
        summed = Collective(op="all_reduce", num_bytes=c.rows * keys * kv * width * e, group=c.cp_outer)
        exchange = {"ring": ring, "exchange": moves, "exchange_back": moves}
        return [
            Piece(name=f"{what} gradient sum", backward=summed, queue="cp"),
            Piece(name=name, forward=forward, backward=backward, core=True, saved=saved, **exchange),
        ]

    d, v, block = spec.head_dim, spec.v_head_dim, keys // ring
    own_keys = c.rows * queries * kv * d * e
    return [
        *round_of(
            "attention scores", "keys", d, product(block, d), product(d, block, 2), own_keys + batch * queries * d * e
        ),
        _softmax(c, batch, queries, keys),
        *round_of(
            "attention weighted sum",
            "values",
            v,
            product(v, block),
            product(block, v, 2),
            c.rows * queries * kv * v * e,
        ),
    ]
