"""Tables of iteration costs in compiled loops, over flat arrays: what :class:`meshwright.simulate.iterations.\
IterationCosts` looks up, for engines whose tables lie behind one another."""

from __future__ import annotations

import numpy as np

from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, part
from meshwright.simulate.iterations import IterationCosts

#: Places of the row that says where an engine's tables begin (``at``) and how large they are.
LINEAR_AT, MOST_TOKENS, SAMPLED_AT, MOST_SAMPLED, DECODE_AT, CONTEXT_AT, NUM_CONTEXTS = range(7)
PREFILL_AT, BATCH_AT, NUM_BATCHES, QUERY_AT, NUM_QUERIES, PAST_AT, NUM_PASTS, OWN_AT, MOST_OWN, MOST_ROWS, TABLES = (
    range(7, 18)
)
#: Where a loop's counts have how many samples it took.
SAMPLES = 3
#: Longer than anything.
NEVER = 1e300
#: The tables, as loops take them, with where their beginnings and their sizes are written.
_FIELDS = (
    ("linear_s", LINEAR_AT, MOST_TOKENS, 1),
    ("sampled_s", SAMPLED_AT, MOST_SAMPLED, 1),
    ("decode_s", DECODE_AT, -1, 0),
    ("context_node", CONTEXT_AT, NUM_CONTEXTS, 0),
    ("prefill_s", PREFILL_AT, -1, 0),
    ("batch_node", BATCH_AT, NUM_BATCHES, 0),
    ("query_node", QUERY_AT, NUM_QUERIES, 0),
    ("past_node", PAST_AT, NUM_PASTS, 0),
    ("own_s", OWN_AT, MOST_OWN, 1),
)


def tables_of(several: list[IterationCosts]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return where each of several costs lies [costs * TABLES], and their tables behind one another."""
    shape, found = np.zeros((len(several), TABLES), np.int64), []
    for name, begin, size, last in _FIELDS:
        some = [np.ascontiguousarray(getattr(costs, name)).ravel() for costs in several]
        shape[:, begin] = np.cumsum([0, *(len(one) for one in some[:-1])])
        if size >= 0:
            shape[:, size] = [len(one) - last for one in some]
        found.append(np.concatenate(some) if len(some) > 1 else some[0])
    shape[:, MOST_ROWS] = [len(costs.decode_s) - 1 for costs in several]
    return shape.ravel(), tuple(found)


@part
def between(at: int, nodes: int, node: Float64s, value: float) -> int:
    """Return the node below a value, of so many from a place on; the last but one at most."""
    low, high = 0, nodes - 1
    while high - low > 1:
        middle = (low + high) // 2
        if node[at + middle] <= value:
            low = middle
        else:
            high = middle
    return low


@part
def noted(
    now: float,
    num_run: int,
    waiting: int,
    used: int,
    stride: int,
    most_samples: int,
    counts: OutInt64s,
    sample_s: OutFloat64s,
    sample_value: OutInt64s,
) -> int:
    """Write down who runs and waits and how many blocks are used, and return after how many runs of iterations the
    next sample is: where there are as many as may be, every second one goes."""
    if counts[SAMPLES] == most_samples:
        for i in range(most_samples // 2):
            sample_s[i] = sample_s[2 * i]
            for field in range(3):
                sample_value[3 * i + field] = sample_value[6 * i + field]
        counts[SAMPLES] = most_samples // 2
        stride *= 2
    place = 3 * counts[SAMPLES]
    sample_s[counts[SAMPLES]] = now
    sample_value[place], sample_value[place + 1], sample_value[place + 2] = num_run, waiting, used
    counts[SAMPLES] += 1
    return stride


@part
def fitting(steps: int, one: float, growth: float, wanted: float) -> int:
    """Return how many of so many iterations begin before somebody comes, after ``wanted`` seconds: the first takes
    ``one`` second, each ``growth`` more than the one before."""
    if one * steps + growth * steps * (steps - 1) / 2.0 <= wanted:
        return steps
    least = wanted / (one + growth * wanted / one / 2.0)  # of the steps that fit, closer each time
    least = wanted / (one + growth * wanted / (one + growth * least / 2.0) / 2.0)
    fit = int(least)
    fit = fit - 1 if fit > 1 else 1
    while fit < steps and one * fit + growth * fit * (fit - 1) / 2.0 < wanted:
        fit += 1
    return fit


@part
def bin_of(gap: float, gap_edge: Float64s, num_gaps: int) -> int:
    """Return the place of a gap between tokens in the histogram."""
    low, high = 0, num_gaps
    while high - low > 1:
        middle = (low + high) // 2
        if gap_edge[middle] <= gap:
            low = middle
        else:
            high = middle
    return low


@part
def decoding(
    of: int, shape: Int64s, decode_s: Float64s, context_node: Float64s, sequences: int, mean: float
) -> tuple[float, float, float]:
    """Return the seconds of attention of so many that decode behind so many tokens on average, how they grow with a
    token behind each, and for how many tokens they grow so."""
    at, nodes = shape[of + CONTEXT_AT], shape[of + NUM_CONTEXTS]
    low = between(at, nodes, context_node, mean)
    row = shape[of + DECODE_AT] + sequences * nodes + low
    slope = (decode_s[row + 1] - decode_s[row]) / (context_node[at + low + 1] - context_node[at + low])
    seconds = decode_s[row] + (mean - context_node[at + low]) * slope
    return seconds, slope, context_node[at + low + 1] - mean if low + 2 < nodes else NEVER


@part
def prefilling(
    of: int,
    shape: Int64s,
    prefill_s: Float64s,
    batch_node: Float64s,
    query_node: Float64s,
    past_node: Float64s,
    prompts: int,
    queries: float,
    past: float,
) -> float:
    """Return the seconds of attention of so many prompts, each of so many new tokens behind so many on average."""
    first, second, third = shape[of + BATCH_AT], shape[of + NUM_QUERIES], shape[of + NUM_PASTS]
    i = between(first, shape[of + NUM_BATCHES], batch_node, prompts)
    j = between(shape[of + QUERY_AT], second, query_node, queries)
    k = between(shape[of + PAST_AT], third, past_node, past)
    low_x, low_y, low_z = first + i, shape[of + QUERY_AT] + j, shape[of + PAST_AT] + k
    x = (prompts - batch_node[low_x]) / (batch_node[low_x + 1] - batch_node[low_x])
    y = (queries - query_node[low_y]) / (query_node[low_y + 1] - query_node[low_y])
    z = (past - past_node[low_z]) / (past_node[low_z + 1] - past_node[low_z])
    x, y, z = x if x > 0.0 else 0.0, y if y > 0.0 else 0.0, z if z > 0.0 else 0.0
    one = shape[of + PREFILL_AT] + (i * second + j) * third + k
    more = one + second * third
    near = (prefill_s[one] * (1.0 - x) + prefill_s[more] * x) * (1.0 - y)
    near += (prefill_s[one + third] * (1.0 - x) + prefill_s[more + third] * x) * y
    far = (prefill_s[one + 1] * (1.0 - x) + prefill_s[more + 1] * x) * (1.0 - y)
    far += (prefill_s[one + third + 1] * (1.0 - x) + prefill_s[more + third + 1] * x) * y
    return (near * (1.0 - z) + far * z) * queries


@part
def guessing(
    shape: Int64s,
    linear_s: Float64s,
    sampled_s: Float64s,
    decode_s: Float64s,
    context_node: Float64s,
    guessed: int,
    context: float,
) -> float:
    """Return the seconds of a guess of the next token of so many, behind so many tokens on average."""
    own, _, _ = decoding(TABLES, shape, decode_s, context_node, guessed, context)
    return own + linear_s[shape[TABLES + LINEAR_AT] + guessed] + sampled_s[shape[TABLES + SAMPLED_AT] + guessed]
