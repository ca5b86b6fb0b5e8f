"""The fast loop of the serving simulator: what :mod:`meshwright.simulate.serve_plain` does, over flat arrays.

It decides as the policies of :mod:`meshwright.serving` do, by their ``code``. Where an iteration computes nothing but
next tokens, and nobody is answered, evicted or admitted before the k-th one, these k iterations are one: the context
grows by a token each, so that their times are an arithmetic series (:mod:`meshwright.simulate.iterations` says why).
"""

from __future__ import annotations

from meshwright.native import Bytes, Float64s, Int64s, OutFloat64s, OutInt64s, native
from meshwright.simulate.front_line import OUT, STREAM, enter, follow, made_of, next_entry, streamed
from meshwright.simulate.group_loop import SETTLE, SETTLED, SETTLING, back, busiest, chosen, evened, place, wait
from meshwright.simulate.loop_tables import (
    LINEAR_AT,
    MOST_SAMPLED,
    MOST_TOKENS,
    NEVER,
    TABLES,
    bin_of,
    decoding,
    fitting,
    guessing,
    noted,
    prefilling,
)
from meshwright.simulate.prompt_loop import enters, in_full

#: Places of ``limits``.
POLICY, MAX_BATCH, BUDGET, BLOCK, BLOCKS, WATERMARK, CONCURRENCY, PIPELINE, GRAPH_TOKENS = range(9)
POLL, HOLD, GROUPS, ENOUGH = range(9, 13)  # of the engine's gate
GUESSES = 13  # next tokens that are guessed of a sequence
#: Places of ``fixed_s``: what an iteration takes on the host, a request in it, the host of an iteration without graphs.
STEP, REQUEST, EAGER = range(3)
#: Places of ``spent_s``: where the time of a replica goes.
LINEAR, SAMPLED, DECODE, PREFILL, HOST, IDLE = range(6)
#: Places of ``counts``.
ITERATIONS, RUNS, EVICTIONS, SAMPLES, STRIDE, PEAK_BLOCKS, PEAK_BATCH = range(7)
#: Codes of policies.
STATIC, ORCA, V0, V1, SARATHI, TRTLLM = range(1, 7)


@native("num_requests", "weight")
def serve_loop(
    num_requests: int,
    weight: int,
    limits: Int64s,
    fixed_s: Float64s,
    serial_s: Float64s,
    arrival: OutFloat64s,
    prompt: Int64s,
    output: Int64s,
    right_at: Int64s,
    right: Bytes,
    shape: Int64s,
    linear_s: Float64s,
    sampled_s: Float64s,
    decode_s: Float64s,
    context_node: Float64s,
    prefill_s: Float64s,
    batch_node: Float64s,
    query_node: Float64s,
    past_node: Float64s,
    own_s: Float64s,
    gap_edge: Float64s,
    num_gaps: int,
    front: OutInt64s,
    free_s: OutFloat64s,
    line: OutInt64s,
    entry_s: OutFloat64s,
    queue: OutInt64s,
    run: OutInt64s,
    new: OutInt64s,
    computed: OutInt64s,
    generated: OutInt64s,
    held: OutInt64s,
    group_of: OutInt64s,
    group: OutInt64s,
    last_s: OutFloat64s,
    scheduled_s: OutFloat64s,
    first_s: OutFloat64s,
    end_s: OutFloat64s,
    evicted: OutInt64s,
    gaps: OutInt64s,
    tokens_seen: OutFloat64s,
    spent_s: OutFloat64s,
    counts: OutInt64s,
    most_samples: int,
    sample_s: OutFloat64s,
    sample_value: OutInt64s,
) -> None:
    """Serve the requests [n], of which tokens may be ``computed`` and ``generated`` when they come, the last of these
    at ``last``. Write down when each was ``scheduled``, had its ``first`` token and its last (``end``), how often it
    was ``evicted``, the histogram of gaps between tokens, and samples of the state over time.

    Tables lie as ``shape`` says; with guesses behind those of the model those of what guesses. So many guesses are
    ``right`` behind so many tokens of an answer, from ``right_at`` [n] on."""
    policy, max_batch, budget, block = limits[POLICY], limits[MAX_BATCH], limits[BUDGET], limits[BLOCK]
    free, watermark, concurrency, pipeline = limits[BLOCKS], limits[WATERMARK], limits[CONCURRENCY], limits[PIPELINE]
    graph_tokens, poll, hold = limits[GRAPH_TOKENS], limits[POLL], limits[HOLD]
    groups, enough, guesses = limits[GROUPS], limits[ENOUGH], limits[GUESSES]
    apart, quota = groups > 1 and hold > 0, budget // groups if budget > 0 else 1 << 40
    most_tokens, most_sampled = shape[MOST_TOKENS], shape[MOST_SAMPLED]
    reserves = policy <= ORCA or policy == TRTLLM  # blocks of the whole answer at once
    seen = unpolled = held_back = 0  # requests that the engine knows of; iterations since it looked, and of who waits
    head = tail = coming = answered = num_run = since = 0
    now, stride, n = 0.0, 1, num_requests
    known = n if concurrency == 0 or concurrency > n else concurrency
    following = known  # in a closed loop the others come when one is answered
    while answered < num_requests:
        coming, tail = enter(
            now, coming, known, tail, num_requests, arrival, serial_s, prompt, front, free_s, line, entry_s, queue
        )
        if num_run == 0 and head == tail:
            wanted = next_entry(coming, known, arrival, serial_s, prompt, front, free_s, line, entry_s)
            spent_s[IDLE] += wanted - now
            now = wanted
            continue
        # ---- who is computed, and who is admitted: of those before `open_to`, as the engine's gate decides
        if poll <= 1 or unpolled == 0 or num_run == 0:
            seen = tail
        open_to, closed, group[SETTLING] = seen, 0, 0
        takes = num_run < max_batch
        regroups = apart and takes
        if regroups:
            place(head, seen, queue, num_run, run, prompt, group_of, group)
        if hold > 0 and held_back < hold and takes and groups <= num_run and seen > head:
            if apart:
                closed = wait(head, seen, queue, num_run, run, group_of, group)
            else:
                there = num_run
                for i in range(head, seen):
                    there += prompt[queue[i]] + generated[queue[i]] - computed[queue[i]]
                closed = 1 if there < enough or budget < enough else 0
            open_to = head if closed == 1 else seen
        if group[SETTLING] == 1 or (closed == 0 and ((takes and seen > head) or held_back >= hold or num_run < groups)):
            held_back = 0
        # places of `run` that have a share: the first so many, or those from `first_new` on
        num_new = first_new = evictions = 0
        if regroups and ORCA <= policy <= V0:
            open_to = chosen(head, open_to, quota, 0, queue, run, new, prompt, generated, computed, group_of, group)
        if policy <= ORCA:
            if policy == STATIC and num_run == 0:
                count = longest = 0
                while head + count < open_to and count < max_batch:
                    r = queue[head + count]
                    blocks = (prompt[r] + output[r] + block - 1) // block
                    length = blocks if blocks > longest else longest
                    if (count + 1) * length > free:
                        break
                    count += 1
                    longest = length
                for _ in range(count):
                    r = queue[head]
                    head += 1
                    held[r] = longest
                    free -= longest
                    scheduled_s[r] = now
                    run[num_run] = r
                    num_run += 1
            if policy == ORCA:
                while head < open_to and num_run < max_batch:
                    r = queue[head]
                    blocks = (prompt[r] + output[r] + block - 1) // block
                    if blocks > free:
                        break
                    head += 1
                    held[r] = blocks
                    free -= blocks
                    scheduled_s[r] = now
                    run[num_run] = r
                    num_run += 1
                if regroups:
                    back(head, open_to, seen, queue, group_of, group)
            for i in range(num_run):
                r = run[i]
                new[i] = prompt[r] + generated[r] - computed[r]
            num_new = num_run
        else:
            left = budget
            if policy == V0:
                first_new = num_run
                head, num_run, free = in_full(
                    now, head, open_to, num_run, max_batch, budget, block, free, watermark,
                    queue, run, new, prompt, generated, computed, held, scheduled_s,
                )  # fmt: skip
                if regroups:
                    back(head, open_to, seen, queue, group_of, group)
                num_new = num_run - first_new
                if num_new == 0:
                    first_new = 0
                    left = num_run
            if policy != V0 or num_new == 0:
                spot = 0
                while spot < num_run and left > 0:
                    r = run[spot]
                    need = prompt[r] + generated[r] - computed[r]
                    if guesses > 0 and need == 1 and computed[r] > 0:
                        rest = output[r] - generated[r] - 1
                        need += guesses if guesses < rest else rest if rest > 0 else 0
                    if need > left:
                        if policy == TRTLLM:
                            break
                        need = left
                    blocks = (computed[r] + need + block - 1) // block
                    gone = False
                    while blocks - held[r] > free:
                        num_run -= 1
                        victim = run[num_run]
                        free += held[victim]
                        held[victim] = 0
                        computed[victim] = 0
                        evicted[victim] += 1
                        evictions += 1
                        head -= 1
                        queue[head] = victim
                        if victim == r:
                            gone = True
                            break
                    if gone:
                        break
                    if blocks > held[r]:
                        free -= blocks - held[r]
                        held[r] = blocks
                    new[spot] = need
                    left -= need
                    spot += 1
                num_new = spot
                if policy != V0 and evictions == 0:
                    if regroups:
                        open_to = chosen(
                            head, open_to, quota, spot, queue, run, new, prompt, generated, computed, group_of, group
                        )
                    while head < open_to and left > 0 and num_run < max_batch:
                        r = queue[head]
                        need = prompt[r] + generated[r] - computed[r]
                        share = need if need < left else left
                        whole = computed[r] + (need if policy == SARATHI else share)
                        if policy == TRTLLM:
                            if need > left and num_new > 0:
                                break
                            share, whole = need, prompt[r] + output[r]
                        blocks = (whole + block - 1) // block
                        if free - blocks < (watermark if policy == SARATHI else 0):
                            break
                        enters(now, r, num_run, share, blocks, run, new, held, scheduled_s)
                        head += 1
                        free -= blocks
                        num_run += 1
                        num_new += 1
                        left -= share
                    if regroups:
                        back(head, open_to, seen, queue, group_of, group)
        # ---- what that takes
        num_decode = num_prefill = tokens = sampled = context = queries = past = 0
        longest = guessed = behind = read = reading = before = 0  # of guesses, and of prompts that who guesses reads
        steps = num_requests + 1 << 40
        for i in range(first_new, first_new + num_new):
            r = run[i]
            need = prompt[r] + generated[r] - computed[r]
            drafted = new[i] - need if new[i] > need else 0
            tokens += new[i]
            if new[i] - drafted == 1 and computed[r] > 0:
                num_decode += 1
                context += computed[r] + 1
            else:
                num_prefill += 1
                queries += new[i]
                past += computed[r]
            if drafted > 0:
                longest = drafted if drafted > longest else longest
                guessed += 1
                behind += computed[r] + 1
            elif new[i] > 1:
                read += 1
                reading += new[i]
                before += computed[r]
            if new[i] >= need:
                sampled += 1 + drafted
                rest = output[r] - generated[r]
                if rest > 0 and rest < steps:
                    steps = rest
        parts = pipeline if pipeline < num_new else num_new
        at, rows, fullest, longer = tokens, num_decode, num_prefill, 0.0
        if apart:
            at, rows, fullest = busiest(first_new, num_new, run, new, prompt, generated, computed, group_of, group)
            at, rows, fullest, longer = evened(at, rows, fullest, groups, tokens, num_prefill, shape, own_s)
        at = (at + parts - 1) // parts
        linear = linear_s[at if at < most_tokens else most_tokens] + longer
        heads = (sampled + parts - 1) // parts
        head_s = sampled_s[heads if heads < most_sampled else most_sampled]
        if heads > most_sampled:
            head_s *= heads / most_sampled
        decode = slope = prefill = 0.0
        room = NEVER
        if num_decode > 0:
            rows = (rows + parts - 1) // parts
            decode, slope, room = decoding(0, shape, decode_s, context_node, rows, context / num_decode)
        if num_prefill > 0:
            fullest = (fullest + parts - 1) // parts
            q, p = queries / (parts if parts > num_prefill else num_prefill), past / num_prefill
            prefill = prefilling(0, shape, prefill_s, batch_node, query_node, past_node, fullest, q, p)
        device = linear + head_s + decode + prefill
        eager = fixed_s[EAGER] if num_prefill > 0 or tokens > graph_tokens else 0.0
        host = fixed_s[STEP] + fixed_s[REQUEST] * num_new + (eager - device if eager > device else 0.0)
        if guesses > 0 and num_prefill > 0 and read > 0:
            most = min(reading, shape[TABLES + MOST_TOKENS])
            host += linear_s[shape[TABLES + LINEAR_AT] + most] * reading / most
            q, p = reading / read, before / read
            host += prefilling(TABLES, shape, prefill_s, batch_node, query_node, past_node, read, q, p)
        if guessed > 0:
            host += longest * guessing(shape, linear_s, sampled_s, decode_s, context_node, guessed, behind / guessed)
        if eager > device:
            slope_now = 0.0
            bound = (eager - device) / slope if slope > 0.0 else 1e18
            room = bound if bound < room else room
        else:
            slope_now = slope
        one = device + host
        # ---- how often the same again
        if num_prefill > 0 or guessed > 0 or evictions > 0 or num_new < num_run or sampled < num_new:
            steps = 1
        steps = poll - unpolled if 1 < poll < steps + unpolled else steps
        steps = group[SETTLE] - group[SETTLED] if group[SETTLING] * steps > group[SETTLE] - group[SETTLED] else steps
        if hold > 0 and closed == 0 and head < seen and num_run < max_batch:
            steps = 1  # there is no room for who was let in, and the gate closes
        elif hold > 0 and (closed == 1 or groups > 1) and steps > hold - held_back:
            steps = hold - held_back
        if steps > 1:
            steps = int(room) + 1 if room < steps - 1 else steps
            if not reserves:
                slack = free // num_run * block + 1
                if slack < steps:
                    steps = slack
            if num_run < max_batch and (policy != STATIC or apart):
                wanted = next_entry(coming, known, arrival, serial_s, prompt, front, free_s, line, entry_s) - now
                steps = fitting(steps, one, slope_now, wanted)
            steps = max(steps, 1)
        more = slope_now * steps * (steps - 1) / 2.0
        end = now + (one * steps + more)
        # ---- afterwards
        unpolled = 0 if num_prefill > 0 or poll <= 1 else (unpolled + steps) % poll
        if closed == 1 or groups > 1:
            held_back = 1 if group[SETTLING] == 1 else held_back + steps
            group[SETTLED] += group[SETTLING] * steps
        spent_s[LINEAR] += linear * steps
        spent_s[SAMPLED] += head_s * steps
        spent_s[DECODE] += decode * steps + slope * steps * (steps - 1) / 2.0
        spent_s[PREFILL] += prefill * steps
        spent_s[HOST] += host * steps - (slope - slope_now) * steps * (steps - 1) / 2.0
        tokens_seen[at if at < most_tokens else most_tokens] += steps
        counts[ITERATIONS] += steps
        counts[RUNS] += 1
        counts[EVICTIONS] += evictions
        used = limits[BLOCKS] - free
        counts[PEAK_BLOCKS] = used if used > counts[PEAK_BLOCKS] else counts[PEAK_BLOCKS]
        counts[PEAK_BATCH] = num_run if num_run > counts[PEAK_BATCH] else counts[PEAK_BATCH]
        since += 1
        if since >= stride:
            since = 0
            stride = noted(now, num_run, tail - head, used, stride, most_samples, counts, sample_s, sample_value)
        # whoever came meanwhile stands before those who come at its end
        coming, tail = enter(
            end, coming, known, tail, num_requests, arrival, serial_s, prompt, front, free_s, line, entry_s, queue
        )
        usual_gap, usual_bin = -1.0, 0
        first_at, end_at, usual = now + one, end, one + slope_now * steps / 2.0
        if serial_s[STREAM] > 0.0:
            made = made_of(first_new, num_new, run, new, prompt, output, computed, generated, right_at, right)
            first_at, end_at = streamed(steps, made, first_at, end, serial_s[STREAM], free_s[OUT])
            free_s[OUT], usual = end_at, (end_at - first_at) / max(steps - 1, 1)
        leaving = unanswered = 0
        for i in range(first_new, first_new + num_new):
            r = run[i]
            need = prompt[r] + generated[r] - computed[r]
            if new[i] < need:
                computed[r] += new[i]
                continue
            was = generated[r]
            made, drafted = steps, new[i] - need
            if drafted > 0:
                come = right[right_at[r] + was]
                made = 1 + (come if come < drafted else drafted)
                gaps[0] += made - 1  # they come together
            computed[r] += need + made - 1
            generated[r] = was + made
            if was >= output[r]:
                continue
            if was == 0:
                first_s[r] = first_at
            else:
                gap = first_at - last_s[r]
                if gap != usual_gap:
                    usual_gap, usual_bin = gap, bin_of(gap, gap_edge, num_gaps)
                gaps[usual_bin] += 1
            last_s[r] = end_at
            if was + made >= output[r]:
                end_s[r] = end_at
                answered += 1
                leaving += 1
                if following < num_requests:
                    coming = follow(
                        following, end_at, coming, known, n, arrival, serial_s, prompt, front, free_s, line, entry_s
                    )
                    following += 1
        if steps > 1:
            low = bin_of(usual, gap_edge, num_gaps)
            counted = num_new
            if policy == STATIC:
                counted = 0
                for i in range(num_run):
                    r = run[i]
                    if generated[r] - steps < output[r]:
                        counted += 1
            gaps[low] += counted * (steps - 1)
            if not reserves:
                for i in range(num_run):
                    r = run[i]
                    blocks = (computed[r] + block - 1) // block
                    if blocks > held[r]:
                        free -= blocks - held[r]
                        held[r] = blocks
                used = limits[BLOCKS] - free
                counts[PEAK_BLOCKS] = used if used > counts[PEAK_BLOCKS] else counts[PEAK_BLOCKS]
        if leaving > 0:
            if policy == STATIC:
                unanswered = 0
                for i in range(num_run):
                    if generated[run[i]] < output[run[i]]:
                        unanswered += 1
            kept = 0
            for i in range(num_run):
                r = run[i]
                if generated[r] >= output[r] and unanswered == 0:
                    free += held[r]
                    held[r] = 0
                else:
                    run[kept] = r
                    kept += 1
            num_run = kept
        now = end
    counts[STRIDE] = stride
