"""Costs of iterations from published times, in place of priced kernels.

A prompt's own part is quadratic in its length, so that of several in one iteration their number times the square of
their mean length stands for the sum of squares; it is a few per cent of a prompt of two thousand tokens.
"""

from __future__ import annotations

import numpy as np

from meshwright.causes import CAUSE, PRICED
from meshwright.cost.engine import PublishedIterations
from meshwright.simulate.iterations import IterationCosts


def table(times: PublishedIterations, *, tokens: int, batch: int, context: int, split: bool = True) -> IterationCosts:
    """Return the costs of iterations of up to `tokens` tokens, `batch` requests and `context` tokens of context. A part
    of a prompt behind others of it takes what the whole takes more than those: q tokens behind p are (p + q)^2 - p^2.
    Without `split` times are not told by causes."""
    tokens, batch = max(tokens, batch, 2), max(batch, 2)
    start, each, square = (ms * 1e-3 for ms in times.prefill_ms)
    linear = start + each * np.arange(tokens + 1.0)
    contexts = np.array([1.0, max(float(context), 2.0)])
    decode = np.array([_decoding(times, n, contexts) - linear[n] for n in range(batch + 1)])
    prompts, queries = np.array([1.0, float(batch)]), np.array([1.0, float(tokens)])
    pasts = np.array([0.0, contexts[1]])
    parts = np.zeros((tokens + 1 if split else 0, len(PRICED)))
    parts[:, CAUSE["gemm"]] = linear[: len(parts)]
    return IterationCosts(
        linear_s=linear,
        linear_parts=parts,
        linear_spread=np.zeros_like(parts),
        sampled_s=np.zeros(batch + 1),
        sampled_parts=np.zeros((batch + 1, len(PRICED))),
        sampled_spread=np.zeros((batch + 1, len(PRICED))),
        decode_s=decode,
        context_node=contexts,
        prefill_s=square * prompts[:, None, None] * (queries[:, None] + 2.0 * pasts),
        batch_node=prompts,
        query_node=queries,
        past_node=pasts,
        sigma=0.0,
    )


def _decoding(times: PublishedIterations, sequences: int, contexts: np.ndarray) -> np.ndarray:
    """Seconds of an iteration of sequences that decode behind each of these mean contexts."""
    start, each, sequence = times.decode_ms if sequences < times.large_from else times.large_decode_ms
    return 1e-3 * (start + each * sequences * contexts + sequence * sequences)
