"""Partial softmax sums that are merged: over tiles of a contrastive loss, over instances, over a shared prefix."""

from __future__ import annotations

import numpy as np

from meshwright.papers import ranks, trained
from meshwright.papers.checks.sequence import DIM, HEADS, PROVEN, RANKS, ROUNDING, TOKENS, as_plain, tensors
from meshwright.papers.outcome import Check, Outcome, at_most, below, equal


def inf_cl() -> Outcome:
    rng = np.random.default_rng(3)
    images, texts = rng.standard_normal((2, 64, 16))
    found, held = ranks.logsumexp_ring(images, texts, 8)
    scores = images @ texts.T
    top = scores.max(axis=1, keepdims=True)
    wanted = float((top[:, 0] + np.log(np.exp(scores - top).sum(axis=1)) - np.diag(scores)).mean())
    return Outcome(
        figures=(
            at_most("difference from the loss of the whole matrix", abs(found - wanted), ROUNDING),
            equal("similarities held at once, of the whole matrix: 1 / N^2", 64 * 64 / 64, held, restated=True),
        ),
        baseline="a loss that stores the whole matrix of similarities",
        assumptions=("64 pairs on 8 simulated ranks, float64",),
    )


def infinite_llm() -> Outcome:
    """Attention of one new token over keys and values that lie on other instances."""
    t = tensors(4)
    last = np.array([TOKENS - 1])
    parts = [ranks.block(t.q[:, last], t.k[:, at], t.v[:, at], last, at) for at in ranks.contiguous(TOKENS, RANKS)]
    state = parts[0]
    for part in parts[1:]:
        state = ranks.merge(state, part)
    found = state[0] / state[2][..., None]
    sent = t.q[:, last].size + parts[0][0].size + parts[0][1].size + parts[0][2].size
    moved = 2 * HEADS * TOKENS // RANKS * DIM
    return Outcome(
        figures=(
            as_plain(found, ranks.attention(*t)[:, last]),
            equal(
                "numbers a remote block costs: q there, output and two numbers a head back",
                HEADS * (2 * DIM + 2),
                sent,
                restated=True,
            ),
            below("of moving the block's keys and values", sent / moved),
        ),
        baseline="keys and values moved to the query's instance",
        assumptions=(PROVEN,),
        missing=("the throughputs of its 18 datasets",),
    )


def hydragen() -> Outcome:
    """A batch of queries over one shared prefix and a suffix of each."""
    t = tensors(6)
    prefix, batch = np.arange(64), 6
    rows = np.array([TOKENS - 1])
    suffixes = [tensors(10 + b) for b in range(batch)]
    worst = 0.0
    for one in suffixes:
        k = np.concatenate((t.k[:, prefix], one.k[:, 64:]), axis=1)
        v = np.concatenate((t.v[:, prefix], one.v[:, 64:]), axis=1)
        far = np.arange(64, TOKENS)
        both = ranks.merge(
            ranks.block(one.q[:, rows], t.k[:, prefix], t.v[:, prefix], rows, prefix),
            ranks.block(one.q[:, rows], one.k[:, 64:], one.v[:, 64:], rows, far),
        )
        whole = ranks.block(one.q[:, rows], k, v, rows, np.arange(TOKENS))
        worst = max(worst, float(np.abs(both[0] / both[2][..., None] - whole[0] / whole[2][..., None]).max()))
    return Outcome(
        figures=(at_most("largest difference from attention over both", worst, ROUNDING),),
        baseline="attention that reads every sequence's own copy of the prefix",
        assumptions=(PROVEN,),
    )


CHECKS = {
    "inf-cl": Check(lambda: trained.cut_over_processes(inf_cl(), "inf-cl")),
    "infinite-llm": Check(infinite_llm),
    "hydragen": Check(hydragen),
}
