"""Attention over a sequence that is cut across ranks: each algorithm of ``plan.Sequence``, exact in all of them.

``ring`` passes keys and values round (Liu et al. 2310.01889), ``allgather`` collects them first (Llama 3, 2407.21783);
for both, causal sequences are assigned in a zigzag so that every rank has the same work (ibid., section 3.3.2).
``burstattention`` and ``tokenring`` are rings in which queries travel (:mod:`.query_ring`), ``ring-self-attention`` two
rings around stored scores (:mod:`.score_ring`).
``ulysses`` swaps a rank's share of the tokens for its share of the heads (Jacobs et al. 2309.14509). An inner swap of
heads inside an outer ring or gather is their union (USP, Fang & Zhao 2405.07719).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from meshwright.plan.facets.sequence import ONE_PIECE, RINGS, STORING
from meshwright.run.collect import all_gather, reduce_scatter
from meshwright.run.exchange import swap
from meshwright.run.mesh import AxisGroup
from meshwright.run.query_ring import by_queries
from meshwright.run.ring import Hops, blockwise
from meshwright.run.score_ring import by_scores, hidden_pairs
from meshwright.run.visible import MaskBlock, MaskRule, TokenRun, blocks, document_blocks, runs_of

_ALONE = AxisGroup(name="alone", ranks=(0,), index=0)


def local_positions(
    seq_len: int, cp_size: int, cp_index: int, algorithm: str, causal: bool, *, ulysses: int = 1
) -> torch.Tensor:
    """Positions in the sequence of a rank's tokens, in their local order: int64 [seq_len / cp_size].

    `ulysses` ranks in a row share what one rank of the outer exchange holds.

    Raises:
        ValueError: the sequence does not divide.
    """
    outer = cp_size // ulysses
    held = runs_of(seq_len, outer, cp_index // ulysses, balanced=is_balanced(algorithm, causal))
    positions = torch.cat([torch.arange(*run) for run in held])
    if len(positions) % ulysses:
        raise ValueError(f"a sequence of {seq_len} tokens does not divide into {cp_size} pieces")
    return positions.chunk(ulysses)[cp_index % ulysses].clone()


def is_balanced(algorithm: str, causal: bool) -> bool:
    """Return whether ranks hold an early and a late piece of each sequence."""
    return algorithm not in ONE_PIECE and causal


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cp: AxisGroup,
    algorithm: str,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    cap: float = 0.0,
    documents: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    inner: AxisGroup | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v of this rank's tokens over the whole sequence, with its gradients.

    Args:
        q: [b, n, heads, d]: the tokens that :func:`local_positions` gives this rank.
        k: [b, n, kv_heads, d]; v: [b, n, kv_heads, dv]; kv_heads divides heads.
        cp: the ranks that share the sequence by `algorithm` (``ring``, ``ulysses``, ``allgather``); with `inner`, the
            outer ones: the ranks at this one's place of every inner group.
        causal: a query sees no later key.
        window: > 0: nor one at that distance or beyond.
        scale: 1 / sqrt(d) when None.
        cap: > 0: scores are cap * tanh(score / cap) before the mask (Gemma 2).
        documents: [b, S], the number of the document of each position of the whole sequence, or None; attention does
            not leave a document.
        sinks: [heads], learned logits that join each head's softmax and have no value, or None.
        inner: the ranks that swap heads inside `cp`, or None.

    Returns:
        [b, n, heads, dv]

    Raises:
        ValueError: heads that do not divide over the ranks that swap them, or an unknown algorithm.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rule = MaskRule(causal, window)
    if algorithm == "ulysses":
        cp, inner, algorithm = _ALONE, cp, "ring"
    if inner is not None and not inner.alone:
        q, k, v = _to_sequence(q, k, v, inner)
        if sinks is not None:
            sinks = sinks.chunk(inner.size)[inner.index]
        out = attend(
            q,
            k,
            v,
            cp=cp,
            algorithm=algorithm,
            causal=causal,
            window=window,
            scale=scale,
            cap=cap,
            documents=documents,
            sinks=sinks,
        )
        return _to_heads(out, inner)
    seq_len = q.shape[1] * cp.size
    held = _held(seq_len, cp.size, is_balanced(algorithm, causal))
    if algorithm == STORING and not cp.alone:
        hidden = hidden_pairs(q.shape[1], cp, rule, documents, q.device)
        return by_scores(q, k, v, hidden=hidden, group=cp, scale=scale, cap=cap, sinks=sinks)
    if algorithm in ("burstattention", "tokenring") and not cp.alone:
        hops = Hops(_around(held, cp.index, rule, documents), rule, cap)
        queries = Hops(_around_queries(held, cp.index, rule, documents), rule, cap)
        back = algorithm == "tokenring"
        return by_queries(q, k, v, hops=hops, queries=queries, group=cp, scale=scale, returned=back, sinks=sinks)
    if algorithm in (*RINGS, STORING):
        around = _around_whole(held, cp.index, rule) if documents is None else _around(held, cp.index, rule, documents)
        hops = Hops(around, rule, cap)
        return blockwise(q, k, v, hops=hops, group=cp, scale=scale, sinks=sinks)
    if algorithm != "allgather":
        raise ValueError(f"no context-parallel algorithm {algorithm!r}")
    k, v = _gathered(k, v, held, cp)
    everything = (TokenRun(0, seq_len),)
    hops = Hops((_visible(held[cp.index], everything, rule, documents),), rule, cap)
    return blockwise(q, k, v, hops=hops, group=_ALONE, scale=scale, sinks=sinks)


def attend_portion(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    start: int,
    rule: MaskRule,
    scale: float,
    cap: float = 0.0,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries [b, n, heads, d] at the positions from `start` on to the keys and values
    [b, start + n, kv_heads, d or dv] of all positions up to theirs: [b, n, heads, dv]. It does not leave a document of
    `documents` [b, S]."""
    stop = start + q.shape[1]
    hops = Hops((_visible((TokenRun(start, stop),), (TokenRun(0, stop),), rule, documents),), rule, cap)
    return blockwise(q, k, v, hops=hops, group=_ALONE, scale=scale)


@cache
def _held(seq_len: int, size: int, balanced: bool) -> tuple[tuple[TokenRun, ...], ...]:
    """The runs of every rank."""
    return tuple(runs_of(seq_len, size, i, balanced=balanced) for i in range(size))


@cache
def _around_whole(
    held: tuple[tuple[TokenRun, ...], ...], index: int, rule: MaskRule
) -> tuple[tuple[MaskBlock, ...], ...]:
    return _around(held, index, rule, None)


def _visible(
    queries: tuple[TokenRun, ...], keys: tuple[TokenRun, ...], rule: MaskRule, documents: torch.Tensor | None
) -> tuple[MaskBlock, ...]:
    return blocks(queries, keys, rule) if documents is None else document_blocks(queries, keys, rule, documents)


def _around_queries(
    held: Sequence[tuple[TokenRun, ...]], index: int, rule: MaskRule, documents: torch.Tensor | None
) -> tuple[tuple[MaskBlock, ...], ...]:
    """The blocks of each hop of queries past the keys of a rank, up to the last hop in which any rank has work."""
    size = len(held)
    every = [[_visible(held[(i - hop) % size], held[i], rule, documents) for i in range(size)] for hop in range(size)]
    last = max(hop for hop in range(size) if hop == 0 or any(every[hop]))
    return tuple(every[hop][index] for hop in range(last + 1))


def _around(
    held: Sequence[tuple[TokenRun, ...]], index: int, rule: MaskRule, documents: torch.Tensor | None
) -> tuple[tuple[MaskBlock, ...], ...]:
    """The blocks of each hop of the ring, up to the last hop in which any rank has work."""
    size = len(held)
    last = 0
    for hop in range(size - 1, 0, -1):
        if any(_visible(held[i], held[(i - hop) % size], rule, documents) for i in range(size)):
            last = hop
            break
    return tuple(_visible(held[index], held[(index - hop) % size], rule, documents) for hop in range(last + 1))


def _to_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: AxisGroup) -> tuple[torch.Tensor, ...]:
    """A share of the tokens with all heads for all tokens of the group with a share of the heads, in one message."""
    size, heads, kv_heads = group.size, q.shape[2], k.shape[2]
    if heads % size:
        raise ValueError(f"ulysses splits {heads} heads over {size} ranks, which does not divide")
    # fewer key-value heads than ranks: every rank gets those that its query heads read
    copies = next(n for n in range(1, heads // kv_heads + 1) if kv_heads * n % size == 0 and heads // kv_heads % n == 0)
    if copies > 1:
        k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
    sent = [x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4) for x in (q, k, v)]
    received = swap(torch.cat([x.reshape(size, -1) for x in sent], 1), group, queue="cp")
    parts = received.split([x[0].numel() for x in sent], 1)
    return tuple(part.view(x.shape).transpose(0, 1).flatten(1, 2) for part, x in zip(parts, sent, strict=True))


def _to_heads(out: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """All tokens with a share of the heads back for this rank's tokens with all heads."""
    sent = out.unflatten(1, (group.size, -1)).transpose(0, 1)
    received = swap(sent.reshape(group.size, -1), group, queue="cp").view(sent.shape)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Gather(torch.autograd.Function):
    """[m] of every rank as [size, m]; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x.unsqueeze(0), group, queue="cp")

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad.contiguous(), ctx.group, queue="cp").squeeze(0), None


def _gathered(
    k: torch.Tensor, v: torch.Tensor, held: Sequence[tuple[TokenRun, ...]], group: AxisGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole sequence, in its order; they travel in one message."""
    if group.alone:
        return k, v
    whole = _Gather.apply(torch.cat([k.reshape(-1), v.reshape(-1)]), group)
    keys, values = whole.split([k.numel(), v.numel()], 1)
    return _in_order(keys.reshape(-1, *k.shape), held), _in_order(values.reshape(-1, *v.shape), held)


def _in_order(ranks: torch.Tensor, held: Sequence[tuple[TokenRun, ...]]) -> torch.Tensor:
    """[ranks, b, n, heads, d] of tokens in these runs as [b, S, heads, d]."""
    pieces = {
        run: piece
        for runs, tokens in zip(held, ranks, strict=True)
        for run, piece in zip(runs, tokens.split([r.stop - r.start for r in runs], 1), strict=True)
    }
    return torch.cat([pieces[run] for run in sorted(pieces)], 1)
