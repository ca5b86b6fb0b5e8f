"""Prompts that have iterations of their own in an engine's compiled loop: who of those that wait is let in, as
:mod:`meshwright.serving.vllm_v0` says it, bit for bit, over flat arrays."""

from __future__ import annotations

from meshwright.native import Int64s, OutFloat64s, OutInt64s, part


@part
def enters(
    now: float,
    r: int,
    place: int,
    tokens: int,
    blocks: int,
    run: OutInt64s,
    new: OutInt64s,
    held: OutInt64s,
    scheduled_s: OutFloat64s,
) -> None:
    """Let a request in at a place of those that run, with so many tokens of this iteration and blocks of the cache."""
    held[r] = blocks
    if scheduled_s[r] < 0.0:
        scheduled_s[r] = now
    run[place] = r
    new[place] = tokens


@part
def in_full(
    now: float,
    head: int,
    open_to: int,
    num_run: int,
    max_batch: int,
    budget: int,
    block: int,
    free: int,
    watermark: int,
    queue: Int64s,
    run: OutInt64s,
    new: OutInt64s,
    prompt: Int64s,
    generated: Int64s,
    computed: Int64s,
    held: OutInt64s,
    scheduled_s: OutFloat64s,
) -> tuple[int, int, int]:
    """Let prompts in that fit whole into the budget, the first one whatever its length; return the head of the queue,
    how many run, and the free blocks (vLLM V0)."""
    left, first = budget, num_run
    while head < open_to and num_run < max_batch:
        r = queue[head]
        need = prompt[r] + generated[r] - computed[r]
        blocks = (prompt[r] + generated[r] + block - 1) // block
        if (need > left and num_run > first) or free - blocks < watermark:
            break
        enters(now, r, num_run, need, blocks, run, new, held, scheduled_s)
        head += 1
        free -= blocks
        num_run += 1
        left -= need
        if left <= 0:
            break
    return head, num_run, free
