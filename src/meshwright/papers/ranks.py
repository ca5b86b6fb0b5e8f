"""Ranks simulated on numpy arrays: attention over a cut sequence, in the ways that papers cut it, with what is sent.

Every function takes whole tensors, cuts them over ranks, does what each rank does, and counts the numbers that every
rank sends to others (a :class:`Sent`). The result is put together again, so that it can be compared with the plain
computation. Shapes: q, k, v are [heads, tokens, head dim].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Output rows, their running maximum and their running sum: what rings carry on and merge.
State = tuple[np.ndarray, np.ndarray, np.ndarray]


class Sent:
    """Numbers sent by each rank."""

    def __init__(self, ranks: int):
        self.by_rank = np.zeros(ranks)

    def add(self, rank: int, *tensors: np.ndarray) -> None:
        self.by_rank[rank] += sum(t.size for t in tensors)

    @property
    def most(self) -> float:
        return float(self.by_rank.max())


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = True) -> np.ndarray:
    """Plain softmax attention, [heads, tokens, head dim]."""
    tokens = np.arange(q.shape[1])
    out, _, total = block(q, k, v, tokens, tokens, causal)
    return out / total[..., None]


def block(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: np.ndarray, columns: np.ndarray, causal: bool = True
) -> State:
    """One block of attention, not normalised: sums of values, row maxima and row sums of exponentials. `rows` and
    `columns` are the tokens' places in the sequence."""
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(rows[:, None] >= columns[None, :], scores, -np.inf)
    top = scores.max(axis=-1)
    grown = np.exp(scores - np.where(np.isfinite(top), top, 0.0)[..., None])
    return grown @ v, top, grown.sum(axis=-1)


def merge(a: State, b: State) -> State:
    """Two blocks of the same rows as one: the associative step of every ring (Milakov and Gimelshein, 2018,
    1805.02867)."""
    top = np.maximum(a[1], b[1])
    still = np.where(np.isfinite(top), top, 0.0)
    left, right = np.exp(a[1] - still), np.exp(b[1] - still)
    return a[0] * left[..., None] + b[0] * right[..., None], top, a[2] * left + b[2] * right


def contiguous(tokens: int, ranks: int) -> list[np.ndarray]:
    """Each rank's tokens, one run each."""
    return np.array_split(np.arange(tokens), ranks)


def zigzag(tokens: int, ranks: int) -> list[np.ndarray]:
    """Each rank's tokens: a piece from the front and its mirror from the back, so that a causal mask leaves every
    rank the same work."""
    pieces = np.array_split(np.arange(tokens), 2 * ranks)
    return [np.concatenate((pieces[r], pieces[2 * ranks - 1 - r])) for r in range(ranks)]


def pairs(cut: Sequence[np.ndarray]) -> list[int]:
    """Query-key pairs that a causal mask leaves each rank."""
    return [int((rows + 1).sum()) for rows in cut]


def ring(q: np.ndarray, k: np.ndarray, v: np.ndarray, cut: Sequence[np.ndarray], sent: Sent) -> np.ndarray:
    """Keys and values go round, each rank merges what passes (Liu et al., 2023, 2310.01889)."""
    n, out = len(cut), np.empty_like(q)
    for rank, rows in enumerate(cut):
        state: State | None = None
        for step in range(n):
            at = cut[(rank - step) % n]
            state_here = block(q[:, rows], k[:, at], v[:, at], rows, at)
            state = state_here if state is None else merge(state, state_here)
            if step < n - 1:  # hand on what came in
                sent.add(rank, k[:, at], v[:, at])
        assert state is not None
        out[:, rows] = state[0] / state[2][..., None]
    return out


def ring_self_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cut: Sequence[np.ndarray], sent: Sent
) -> tuple[np.ndarray, int]:
    """Two trips, keys and then values, with whole rows of scores kept (Li et al., 2021, 2105.13120). Also the scores
    that a rank holds."""
    n, out, held = len(cut), np.empty_like(q), 0
    for rank, rows in enumerate(cut):
        scores = np.empty((q.shape[0], len(rows), q.shape[1]))
        for step in range(n):
            at = cut[(rank - step) % n]
            scores[:, :, at] = q[:, rows] @ k[:, at].swapaxes(1, 2) / np.sqrt(q.shape[-1])
            if step < n - 1:
                sent.add(rank, k[:, at])
        scores = np.where(rows[:, None] >= np.arange(q.shape[1])[None, :], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        held = max(held, weights.size)
        total = np.zeros_like(q[:, rows])
        for step in range(n):
            at = cut[(rank - step) % n]
            total += weights[:, :, at] @ v[:, at]
            if step < n - 1:
                sent.add(rank, v[:, at])
        out[:, rows] = total
    return out, held


def ring_of_queries(q: np.ndarray, k: np.ndarray, v: np.ndarray, cut: Sequence[np.ndarray]) -> tuple[np.ndarray, dict]:
    """Keys and values stay; queries go one way while blocks of output return the other (TokenRing, 2412.20501). Also
    the most numbers a rank sends in one step each way."""
    n, out, most = len(cut), np.empty_like(q), {"forth": 0, "back": 0}
    for owner, rows in enumerate(cut):
        state: State | None = None
        for step in range(n):
            at = cut[(owner + step) % n]
            here = block(q[:, rows], k[:, at], v[:, at], rows, at)
            if step:
                most["back"] = max(most["back"], here[0].size + here[1].size)
            if step < n - 1:
                most["forth"] = max(most["forth"], q[:, rows].size)
            state = here if state is None else merge(state, here)
        assert state is not None
        out[:, rows] = state[0] / state[2][..., None]
    return out, most


def unified(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, rings: int, sent: Sent) -> np.ndarray:
    """A mesh: all-to-all over `heads` ranks, a ring over `rings` of them (USP, 2405.07719;
    Jacobs et al., 2023, 2309.14509, for the all-to-all)."""
    mine = np.array_split(np.arange(q.shape[0]), heads)
    cut = zigzag(q.shape[1], rings)
    out = np.empty_like(q)
    for h in range(heads):
        inner = Sent(rings)
        out[mine[h]] = ring(q[mine[h]], k[mine[h]], v[mine[h]], cut, inner)
        for r in range(rings):
            sent.by_rank[h * rings + r] += inner.by_rank[r]
            # what a rank of this row owns before: all heads of its share of the row's tokens
            own = np.array_split(cut[r], heads)[h]
            swapped = [t[mine[o]][:, own] for t in (q, k, v) for o in range(heads) if o != h]
            sent.add(h * rings + r, *swapped)
            back = [out[mine[h]][:, np.array_split(cut[r], heads)[o]] for o in range(heads) if o != h]
            sent.add(h * rings + r, *back)
    return out


def linear_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention without a softmax: every row is q times the sum of k' v so far."""
    return np.einsum("hid,hide->hie", q, np.cumsum(np.einsum("hid,hie->hide", k, v), axis=1))


def passed_states(q: np.ndarray, k: np.ndarray, v: np.ndarray, cut: Sequence[np.ndarray], sent: Sent) -> np.ndarray:
    """Linear attention with chunks on ranks: only the head dim x head dim state is handed on (LASP, 2404.02882)."""
    out = np.empty_like(q)
    state = np.zeros((q.shape[0], q.shape[-1], v.shape[-1]))
    for rank, rows in enumerate(cut):
        inside = np.tril(q[:, rows] @ k[:, rows].swapaxes(1, 2)) @ v[:, rows]
        out[:, rows] = inside + q[:, rows] @ state
        state = state + k[:, rows].swapaxes(1, 2) @ v[:, rows]
        if rank < len(cut) - 1:
            sent.add(rank, state)
    return out


def attention_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, grad: np.ndarray, cut: Sequence[np.ndarray], sent: Sent
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of causal attention with the queries' side going round (BurstAttention, 2403.09347): a rank keeps its
    keys and values and their gradients, and hands on q, dq, do and two numbers a row."""
    n, scale = len(cut), 1 / np.sqrt(q.shape[-1])
    out, top, total = block(q, k, v, np.arange(q.shape[1]), np.arange(q.shape[1]))
    out = out / total[..., None]
    lse = top + np.log(total)
    delta = (grad * out).sum(axis=-1)
    dq, dk, dv = (np.zeros_like(t) for t in (q, k, v))
    for rank, columns in enumerate(cut):
        for step in range(n):
            rows = cut[(rank - step) % n]
            scores = q[:, rows] @ k[:, columns].swapaxes(1, 2) * scale
            weights = np.where(rows[:, None] >= columns[None, :], np.exp(scores - lse[:, rows][..., None]), 0.0)
            inner = weights * (grad[:, rows] @ v[:, columns].swapaxes(1, 2) - delta[:, rows][..., None])
            dv[:, columns] += weights.swapaxes(1, 2) @ grad[:, rows]
            dk[:, columns] += inner.swapaxes(1, 2) @ q[:, rows] * scale
            dq[:, rows] += inner @ k[:, columns] * scale
            if step < n - 1:
                sent.add(rank, q[:, rows], dq[:, rows], grad[:, rows], lse[:, rows], delta[:, rows])
    return dq, dk, dv


def logsumexp_ring(images: np.ndarray, texts: np.ndarray, ranks: int) -> tuple[float, int]:
    """The contrastive loss of paired rows, tile by tile with texts going round (Inf-CL, 2410.17243); and the most
    similarities that are held at once."""
    cut, held, losses = contiguous(len(images), ranks), 0, []
    for rank, rows in enumerate(cut):
        top, total = np.full(len(rows), -np.inf), np.zeros(len(rows))
        for step in range(ranks):
            tile = images[rows] @ texts[cut[(rank + step) % ranks]].T
            held = max(held, tile.size)
            higher = np.maximum(top, tile.max(axis=1))
            total = total * np.exp(top - higher) + np.exp(tile - higher[:, None]).sum(axis=1)
            top = higher
        losses.append(top + np.log(total) - (images[rows] * texts[rows]).sum(axis=1))
    return float(np.concatenate(losses).mean()), held
