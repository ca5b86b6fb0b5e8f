"""Steps of engines that hand requests to one another, over flat arrays: what an engine decides, and what that takes.

They are what :mod:`meshwright.serving.batching` and :mod:`meshwright.simulate.serve_plain` do, bit for bit, for
policies that the loop of :mod:`meshwright.simulate.apart_loop` knows. An engine is a row of ``limit`` and of ``state``
(whole numbers), of ``host`` and of ``clock`` (seconds). A request is one number at the engine that computes its prompt
and another, by as many as there are requests more, at the one that goes on with it.
"""

from __future__ import annotations

from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, part
from meshwright.simulate.loop_tables import between
from meshwright.simulate.serve_loop import SARATHI, V0

#: Places of an engine's ``limit``. Those named ``at`` are where its tables begin among those of all engines.
POLICY, MAX_BATCH, BUDGET, BLOCK, BLOCKS, WATERMARK, STAGES, GRAPH_TOKENS = range(8)
POLL, HOLD, ENOUGH, PARKS = range(8, 12)
LINEAR_AT, MOST_TOKENS, SAMPLED_AT, DECODE_AT, CONTEXT_AT, NUM_CONTEXTS = range(12, 18)
PREFILL_AT, BATCH_AT, NUM_BATCHES, QUERY_AT, NUM_QUERIES, PAST_AT, NUM_PASTS, SEEN_AT = range(18, 26)
LIMITS = 26
#: Places of its ``state``: blocks, those who run, their places that have a share of the iteration.
FREE, NUM_RUN, FIRST_NEW, NUM_NEW = range(4)
#: Of those who wait: from the head to whom the engine has looked for, and on to the tail; those offered to it.
HEAD, LOOKED, TAIL, OFFER_HEAD, OFFER_TAIL, COMING, CAME = range(4, 11)
#: Of the iteration under way: whether there is one, how often it is repeated, its tokens, whether it has prompts.
BUSY, TIMES, TOKENS, PROMPTS, ORDER = range(11, 16)
#: Of the gate, and counts.
SINCE, HELD_BACK, CLOSED, ITERATIONS, RUNS, PEAK_BLOCKS, PEAK_BATCH, SAMPLES = range(16, 24)
STATES = 24
#: Places of its ``host``: seconds of an iteration, of a request in it, of one without CUDA graphs.
STEP, REQUEST, EAGER, HOSTS = range(4)
#: Places of its ``clock``: when the iteration under way began and is over, its seconds and how they grow, its parts.
NOW, ENDS, ONE, GROWTH, SLOPE, LINEAR_S, SAMPLED_S, DECODE_S, PREFILL_S, HOST_S, CLOCKS = range(11)
#: More iterations than any run of equal ones has, and longer than any of them lasts.
FOR_EVER, NEVER = 1 << 40, 1e300


@part
def look(w: int, limit: Int64s, state: OutInt64s, wide: int, queue: Int64s, target: Int64s, computed: Int64s) -> None:
    """Look for new requests if it is time to, and decide whether prompts are let in, as the engine's gate does."""
    of, at = w * LIMITS, w * STATES
    running = state[at + NUM_RUN]
    if state[at + SINCE] == 0 or running == 0:
        state[at + LOOKED] = state[at + TAIL]
    hold = limit[of + HOLD]
    if hold > 0:
        waiting = state[at + LOOKED] - state[at + HEAD]
        closed = 0
        if waiting > 0 and state[at + HELD_BACK] < hold and 1 <= running < limit[of + MAX_BATCH]:
            there = running
            for i in range(state[at + HEAD], state[at + LOOKED]):
                there += target[queue[w * wide + i]] - computed[queue[w * wide + i]]
            if there > limit[of + BUDGET]:
                there = limit[of + BUDGET]
            closed = 1 if there < limit[of + ENOUGH] else 0
        if closed == 0 and (waiting > 0 or state[at + HELD_BACK] >= hold or running == 0):
            state[at + HELD_BACK] = 0
        state[at + CLOSED] = closed


@part
def plan(
    w: int,
    limit: Int64s,
    state: OutInt64s,
    wide: int,
    queue: OutInt64s,
    places: int,
    run: OutInt64s,
    new: OutInt64s,
    target: Int64s,
    computed: OutInt64s,
    held: OutInt64s,
    evicted: OutInt64s,
    scheduled_s: OutFloat64s,
    now: float,
) -> int:
    """Decide who is computed, evicted and admitted; returns 1 where the iteration after it may be the same."""
    of, at = w * LIMITS, w * STATES
    policy, block, max_batch = limit[of + POLICY], limit[of + BLOCK], limit[of + MAX_BATCH]
    row, line = w * places, w * wide
    free, num_run, head = state[at + FREE], state[at + NUM_RUN], state[at + HEAD]
    open_to = head if state[at + CLOSED] == 1 else state[at + LOOKED]
    left, first_new, num_new, admitted, evictions = limit[of + BUDGET], 0, 0, 0, 0
    if policy == V0:
        first_new = num_run
        while head < open_to and num_run < max_batch:
            r = queue[line + head]
            need = target[r] - computed[r]
            blocks = (target[r] + block - 1) // block - held[r]
            if (need > left and admitted > 0) or blocks + limit[of + WATERMARK] > free:
                break
            head += 1
            if blocks > 0:
                free -= blocks
                held[r] += blocks
            if scheduled_s[r] < 0.0:
                scheduled_s[r] = now
            run[row + num_run] = r
            new[row + num_run] = need
            num_run += 1
            admitted += 1
            left -= need
            if left <= 0:
                break
        num_new = admitted
        if admitted == 0:
            first_new, left = 0, num_run
    if policy != V0 or admitted == 0:
        place = 0
        while place < num_run and left > 0:
            r = run[row + place]
            need = target[r] - computed[r]
            if need > left:
                need = left
            blocks = (computed[r] + need + block - 1) // block
            gone = 0
            while blocks - held[r] > free:
                num_run -= 1
                victim = run[row + num_run]
                free += held[victim]
                held[victim] = 0
                computed[victim] = 0
                evicted[victim] += 1
                evictions += 1
                head -= 1
                queue[line + head] = victim
                if victim == r:
                    gone = 1
                    break
            if gone == 1:
                break
            if blocks > held[r]:
                free -= blocks - held[r]
                held[r] = blocks
            new[row + place] = need
            left -= need
            place += 1
        num_new = place
        if policy != V0 and evictions == 0:
            while head < open_to and left > 0 and num_run < max_batch:
                r = queue[line + head]
                need = target[r] - computed[r]
                share = need if need < left else left
                whole = target[r] if policy == SARATHI else computed[r] + share
                blocks = (whole + block - 1) // block - held[r]
                if blocks + (limit[of + WATERMARK] if policy == SARATHI else 0) > free:
                    break
                head += 1
                if blocks > 0:
                    free -= blocks
                    held[r] += blocks
                if scheduled_s[r] < 0.0:
                    scheduled_s[r] = now
                run[row + num_run] = r
                new[row + num_run] = share
                num_run += 1
                num_new += 1
                admitted += 1
                left -= share
    state[at + FREE], state[at + NUM_RUN], state[at + HEAD] = free, num_run, head
    state[at + FIRST_NEW], state[at + NUM_NEW] = first_new, num_new
    return 1 if admitted == 0 and evictions == 0 and num_new == num_run else 0


@part
def give_up(
    w: int,
    limit: Int64s,
    state: OutInt64s,
    wide: int,
    queue: Int64s,
    order: Int64s,
    computed: OutInt64s,
    held: OutInt64s,
    evicted: OutInt64s,
) -> int:
    """Take the blocks of whoever came last of those who wait with some; returns 1 where there is one."""
    at, last = w * STATES, -1
    for i in range(state[at + HEAD], state[at + LOOKED]):
        r = queue[w * wide + i]
        if held[r] > 0 and (last < 0 or order[r] > order[last]):
            last = r
    if last < 0:
        return 0
    state[at + FREE] += held[last]
    held[last] = 0
    computed[last] = 0
    evicted[last] += 1
    return 1


@part
def pull(
    w: int,
    times: int,
    limit: Int64s,
    state: OutInt64s,
    wide: int,
    offered: Int64s,
    places: int,
    run: Int64s,
    new: Int64s,
    computed: Int64s,
    held: OutInt64s,
    order: OutInt64s,
    asked: OutInt64s,
    num_asked: int,
) -> int:
    """Hold blocks for those offered, in order, that find room and a place in the batch, and write them behind those
    ``asked`` for; returns how many these are then. The iteration under way is meant to be the `times`-th."""
    of, at = w * LIMITS, w * STATES
    if state[at + OFFER_HEAD] == state[at + OFFER_TAIL]:
        return num_asked
    block, spare = limit[of + BLOCK], limit[of + WATERMARK]
    if times > 1:
        for i in range(state[at + FIRST_NEW], state[at + FIRST_NEW] + state[at + NUM_NEW]):
            r = run[w * places + i]
            spare += (computed[r] + times + block - 1) // block - (computed[r] + 1 + block - 1) // block
    while state[at + OFFER_HEAD] < state[at + OFFER_TAIL]:
        r = offered[w * wide + state[at + OFFER_HEAD]]
        taken = state[at + NUM_RUN] + state[at + LOOKED] - state[at + HEAD] + state[at + COMING]
        blocks = (computed[r] + 1 + block - 1) // block
        if taken >= limit[of + MAX_BATCH] or blocks + spare > state[at + FREE]:
            break
        state[at + OFFER_HEAD] += 1
        order[r] = state[at + CAME]
        state[at + CAME] += 1
        state[at + FREE] -= blocks
        held[r] = blocks
        state[at + COMING] += 1
        asked[num_asked] = r
        num_asked += 1
    return num_asked


@part
def price(
    w: int,
    alike: int,
    limit: Int64s,
    state: OutInt64s,
    host: Float64s,
    clock: OutFloat64s,
    places: int,
    run: Int64s,
    new: Int64s,
    target: Int64s,
    computed: Int64s,
    generated: Int64s,
    output: Int64s,
    linear_s: Float64s,
    sampled_s: Float64s,
    decode_s: Float64s,
    context_node: Float64s,
    prefill_s: Float64s,
    batch_node: Float64s,
    query_node: Float64s,
    past_node: Float64s,
) -> None:
    """Write down what the iteration that was planned takes, and how often it is repeated if nobody comes; `alike`: as
    far as the plan goes it may be."""
    of, at, on = w * LIMITS, w * STATES, w * CLOCKS
    num_new, first_new = state[at + NUM_NEW], state[at + FIRST_NEW]
    num_decode = num_prefill = tokens = sampled = context = queries = past = 0
    steps, each = FOR_EVER, 1
    for i in range(w * places + first_new, w * places + first_new + num_new):
        r = run[i]
        tokens += new[i]
        if new[i] == 1 and computed[r] > 0:
            num_decode += 1
            context += computed[r] + 1
        else:
            num_prefill += 1
            queries += new[i]
            past += computed[r]
        if computed[r] + new[i] == target[r]:
            sampled += 1
            rest = output[r] - generated[r]
            if 0 < rest < steps:
                steps = rest
        else:
            each = 0
    parts = limit[of + STAGES] if limit[of + STAGES] < num_new else num_new
    count = (tokens + parts - 1) // parts
    if count > limit[of + MOST_TOKENS]:
        count = limit[of + MOST_TOKENS]
    linear = linear_s[limit[of + LINEAR_AT] + count]
    head_s = sampled_s[limit[of + SAMPLED_AT] + (sampled + parts - 1) // parts]
    decode = slope = prefill = 0.0
    room = NEVER
    if num_decode > 0:
        mean, first = context / num_decode, limit[of + CONTEXT_AT]
        low = between(first, limit[of + NUM_CONTEXTS], context_node, mean)
        row = limit[of + DECODE_AT] + (num_decode + parts - 1) // parts * limit[of + NUM_CONTEXTS] + low
        decode = decode_s[row]
        slope = (decode_s[row + 1] - decode) / (context_node[first + low + 1] - context_node[first + low])
        decode += (mean - context_node[first + low]) * slope
        if low + 2 < limit[of + NUM_CONTEXTS]:
            room = context_node[first + low + 1] - mean
    if num_prefill > 0:
        b, q = (num_prefill + parts - 1) // parts, queries / (parts if parts > num_prefill else num_prefill)
        p, second, third = past / num_prefill, limit[of + NUM_QUERIES], limit[of + NUM_PASTS]
        i = between(limit[of + BATCH_AT], limit[of + NUM_BATCHES], batch_node, b)
        j = between(limit[of + QUERY_AT], second, query_node, q)
        k = between(limit[of + PAST_AT], third, past_node, p)
        low_x, low_y, low_z = limit[of + BATCH_AT] + i, limit[of + QUERY_AT] + j, limit[of + PAST_AT] + k
        x = (b - batch_node[low_x]) / (batch_node[low_x + 1] - batch_node[low_x])
        y = (q - query_node[low_y]) / (query_node[low_y + 1] - query_node[low_y])
        z = (p - past_node[low_z]) / (past_node[low_z + 1] - past_node[low_z])
        x, y, z = x if x > 0.0 else 0.0, y if y > 0.0 else 0.0, z if z > 0.0 else 0.0
        one = limit[of + PREFILL_AT] + (i * second + j) * third + k
        more = one + second * third
        near = (prefill_s[one] * (1.0 - x) + prefill_s[more] * x) * (1.0 - y)
        near += (prefill_s[one + third] * (1.0 - x) + prefill_s[more + third] * x) * y
        far = (prefill_s[one + 1] * (1.0 - x) + prefill_s[more + 1] * x) * (1.0 - y)
        far += (prefill_s[one + third + 1] * (1.0 - x) + prefill_s[more + third + 1] * x) * y
        prefill = (near * (1.0 - z) + far * z) * q
    device = linear + head_s + decode + prefill
    eager = host[w * HOSTS + EAGER] if num_prefill > 0 or tokens > limit[of + GRAPH_TOKENS] else 0.0
    growth = slope
    if eager > device:
        growth = 0.0
        if slope > 0.0 and (eager - device) / slope < room:
            room = (eager - device) / slope
    longer = eager - device if eager > device else 0.0
    added = host[w * HOSTS + STEP] + host[w * HOSTS + REQUEST] * num_new + longer
    clock[on + LINEAR_S], clock[on + SAMPLED_S], clock[on + DECODE_S] = linear, head_s, decode
    clock[on + PREFILL_S], clock[on + HOST_S] = prefill, added
    clock[on + ONE], clock[on + SLOPE], clock[on + GROWTH] = device + added, slope, growth
    state[at + TOKENS], state[at + PROMPTS] = count, 1 if num_prefill > 0 else 0
    # ---- how often the same again
    times = 1
    if alike == 1 and num_prefill == 0 and each == 1:
        times = FOR_EVER
        if limit[of + POLL] > 1:
            times = limit[of + POLL] - state[at + SINCE]
        hold, waiting = limit[of + HOLD], state[at + LOOKED] - state[at + HEAD]
        if hold > 0 and state[at + CLOSED] == 1:
            times = min(times, max(hold - state[at + HELD_BACK], 1))
        if hold > 0 and state[at + CLOSED] == 0 and waiting > 0 and state[at + NUM_RUN] < limit[of + MAX_BATCH]:
            times = 1  # there is no room for who was let in
        times = max(min(times, state[at + FREE] // state[at + NUM_RUN] * limit[of + BLOCK] + 1), 1)
    if times > 1:
        first_done = steps if steps < FOR_EVER else 1
        times = min(times, first_done)
        if room < first_done and room + 1.0 < times:
            times = int(room + 1.0)
        times = max(times, 1)
    state[at + TIMES] = times


@part
def ends(w: int, times: int, clock: Float64s) -> float:
    """Return when so many of the iterations under way are over."""
    on = w * CLOCKS
    return clock[on + NOW] + times * clock[on + ONE] + clock[on + GROWTH] * times * (times - 1) / 2.0


@part
def cut(w: int, now: float, state: OutInt64s, clock: OutFloat64s, turn: int) -> int:
    """End the run of iterations behind the one under way, if it is not that anyway, as somebody comes; returns the
    number of the next end that is written down."""
    at = w * STATES
    if state[at + TIMES] <= 1:
        return turn
    low, high = 1, state[at + TIMES]
    while low < high:
        middle = (low + high) // 2
        if ends(w, middle, clock) >= now:
            high = middle
        else:
            low = middle + 1
    state[at + TIMES] = low
    clock[w * CLOCKS + ENDS] = ends(w, low, clock)
    state[at + ORDER] = turn
    return turn + 1
