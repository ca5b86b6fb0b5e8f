"""The end of a run of equal iterations of an engine that hands requests to others, over flat arrays as those of
:mod:`meshwright.simulate.apart_steps`: what is kept of it as a sample, and how the engine moves on behind it."""

from __future__ import annotations

from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, part
from meshwright.simulate.apart_steps import (
    BLOCK,
    CLOCKS,
    CLOSED,
    FIRST_NEW,
    FREE,
    HEAD,
    HELD_BACK,
    HOLD,
    LIMITS,
    LOOKED,
    NOW,
    NUM_NEW,
    NUM_RUN,
    PARKS,
    POLL,
    PROMPTS,
    SAMPLES,
    SINCE,
    STATES,
    TIMES,
)


@part
def sample(
    w: int,
    running: int,
    used: int,
    state: OutInt64s,
    clock: Float64s,
    most_samples: int,
    sample_s: OutFloat64s,
    sample_value: OutInt64s,
) -> None:
    """Keep when a run began, who ran, who waited and the blocks in use; every second where they are too many."""
    at = w * STATES
    line = w * (2 * most_samples + 1)
    place = line + state[at + SAMPLES]
    sample_s[place] = clock[w * CLOCKS + NOW]
    sample_value[3 * place] = running
    sample_value[3 * place + 1] = state[at + LOOKED] - state[at + HEAD]
    sample_value[3 * place + 2] = used
    state[at + SAMPLES] += 1
    if state[at + SAMPLES] > 2 * most_samples:
        for i in range(most_samples + 1):
            sample_s[line + i] = sample_s[line + 2 * i]
            for field in range(3):
                sample_value[3 * (line + i) + field] = sample_value[3 * (line + 2 * i) + field]
        state[at + SAMPLES] = most_samples + 1


@part
def leave(
    w: int,
    num_done: int,
    limit: Int64s,
    state: OutInt64s,
    places: int,
    run: OutInt64s,
    new: Int64s,
    target: OutInt64s,
    computed: OutInt64s,
    generated: Int64s,
    held: OutInt64s,
    answer: Int64s,
    output: Int64s,
) -> None:
    """Move an engine on behind its run of iterations, without the requests that are done or go on elsewhere."""
    at, of = w * STATES, w * LIMITS
    times, block = state[at + TIMES], limit[of + BLOCK]
    if limit[of + POLL] > 1:
        state[at + SINCE] = 0 if state[at + PROMPTS] == 1 else (state[at + SINCE] + times) % limit[of + POLL]
    if limit[of + HOLD] > 0 and state[at + CLOSED] == 1:
        state[at + HELD_BACK] += times
    begin = w * places + state[at + FIRST_NEW]
    for i in range(begin, begin + state[at + NUM_NEW]):
        r = run[i]
        samples = computed[r] + new[i] == target[r]
        computed[r] += new[i] + times - 1
        if samples:
            target[r] += times
        if times > 1:
            blocks = (computed[r] + block - 1) // block
            if blocks > held[r]:
                state[at + FREE] -= blocks - held[r]
                held[r] = blocks
    if num_done > 0:
        kept = w * places
        for i in range(w * places, w * places + state[at + NUM_RUN]):
            r = run[i]
            if generated[r] < output[r]:
                run[kept] = r
                kept += 1
            elif limit[of + PARKS] == 0 or answer[r] == 1:
                state[at + FREE] += held[r]
                held[r] = 0
        state[at + NUM_RUN] = kept - w * places
