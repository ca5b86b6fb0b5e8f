"""The fast loop of engines that hand requests to one another: what :mod:`meshwright.simulate.serve_apart` does, bit for
bit, over flat arrays.

The clock goes from event to event: requests come, an engine's run of iterations is over, a transfer begins or is over.
What an event causes happens in the order of :class:`meshwright.simulate.serve_pool.ReplicaPool`, one thing at a time,
and whoever has nothing under way then decides what is next (:mod:`meshwright.simulate.apart_steps`).
"""

from __future__ import annotations

from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, native
from meshwright.simulate.apart_ends import leave, sample
from meshwright.simulate.apart_links import advance, next_change, part_over, settle
from meshwright.simulate.apart_steps import (
    BLOCK,
    BLOCKS,
    BUSY,
    CLOCKS,
    COMING,
    DECODE_S,
    ENDS,
    FIRST_NEW,
    FREE,
    GROWTH,
    HEAD,
    HOST_S,
    ITERATIONS,
    LIMITS,
    LINEAR_S,
    LOOKED,
    MAX_BATCH,
    NEVER,
    NOW,
    NUM_NEW,
    NUM_RUN,
    OFFER_TAIL,
    ONE,
    ORDER,
    PEAK_BATCH,
    PEAK_BLOCKS,
    POLL,
    PREFILL_S,
    RUNS,
    SAMPLED_S,
    SEEN_AT,
    SLOPE,
    STATES,
    TAIL,
    TIMES,
    TOKENS,
    cut,
    ends,
    give_up,
    look,
    plan,
    price,
    pull,
)
from meshwright.simulate.front_line import FRONTS, THROUGH, first_through, stand
from meshwright.simulate.loop_tables import bin_of
from meshwright.simulate.serve_loop import DECODE, HOST, IDLE, LINEAR, PREFILL, SAMPLED

#: Where the time of an engine goes, as :data:`meshwright.simulate.served.SPENT` names it.
SPENTS = 10
#: What moves: the caches that are over first leave where they were, then are where they go.
STILL, MOVING, LEAVING, JOINING = range(4)


@native("num_requests", "weight")
def apart_loop(
    num_requests: int,
    weight: int,
    num_engines: int,
    num_doors: int,
    known: int,
    limit: Int64s,
    state: OutInt64s,
    host: Float64s,
    clock: OutFloat64s,
    door: Int64s,
    target_of: Int64s,
    num_targets: Int64s,
    answer: Int64s,
    output: Int64s,
    arrival: Float64s,
    prompt: Int64s,
    serial_s: Float64s,
    front: OutInt64s,
    free_s: OutFloat64s,
    line: OutInt64s,
    entry_s: OutFloat64s,
    linear_s: Float64s,
    sampled_s: Float64s,
    decode_s: Float64s,
    context_node: Float64s,
    prefill_s: Float64s,
    batch_node: Float64s,
    query_node: Float64s,
    past_node: Float64s,
    gap_edge: Float64s,
    num_gaps: int,
    wide: int,
    queue: OutInt64s,
    offered: OutInt64s,
    places: int,
    run: OutInt64s,
    new: OutInt64s,
    turn_of: OutInt64s,
    order: OutInt64s,
    target: OutInt64s,
    computed: OutInt64s,
    generated: OutInt64s,
    held: OutInt64s,
    evicted: OutInt64s,
    went: OutInt64s,
    came_s: OutFloat64s,
    scheduled_s: OutFloat64s,
    first_s: OutFloat64s,
    last_s: OutFloat64s,
    end_s: OutFloat64s,
    pulled_s: OutFloat64s,
    joined_s: OutFloat64s,
    path_of: Int64s,
    latency_s: Float64s,
    work_s: Float64s,
    out_port: Int64s,
    in_port: Int64s,
    out_share: Float64s,
    in_share: Float64s,
    num_ports: int,
    room: OutFloat64s,
    load: OutFloat64s,
    rising: OutInt64s,
    asked: OutInt64s,
    flows: OutInt64s,
    over: OutInt64s,
    way: OutInt64s,
    flowing: OutInt64s,
    left: OutFloat64s,
    rate: OutFloat64s,
    ready_s: OutFloat64s,
    done: OutInt64s,
    gaps: OutInt64s,
    seen: OutFloat64s,
    spent_s: OutFloat64s,
    most_samples: int,
    sample_s: OutFloat64s,
    sample_value: OutInt64s,
) -> float:
    """Serve requests [n], which come to the engines of their ``door`` [n]; return the seconds of work of all links.

    Engines have ``num_targets``, which are ``target_of`` [engine, turn], that go on with the prompts they compute.
    ``output`` [2 n] are the tokens that a request makes at the first engine and has at the end of the second, and
    ``answer`` [n] those of all. The first ``known`` come at their ``arrival``, the others when one is answered."""
    n = num_requests
    now = busy_s = links_s = 0.0
    due = NEVER
    coming, following, turn = 0, known, 0
    lo = hi = num_done = num_asked = num_flows = num_over = 0
    ending, finished_at, moves, entered = -1, -1, STILL, -1
    while True:
        who = -1
        if lo < hi and lo != entered and serial_s[2 * door[lo]] + serial_s[2 * door[lo] + 1] > 0.0:
            # ---- who comes stands at the front of its door
            came_s[lo] = now
            stand(door[lo], lo, now, n, serial_s, prompt, front, free_s, line, entry_s)
            lo += 1
        elif lo < hi:
            # ---- somebody comes: all at once to the one door there is, else one after the other
            d = door[lo]
            last = hi if num_doors == 1 else lo + 1
            at = d * STATES
            if state[at + BUSY] == 0:
                spent_s[d * SPENTS + IDLE] += now - clock[d * CLOCKS + NOW]
                clock[d * CLOCKS + NOW] = now
                who = d
            elif d != ending and state[at + NUM_RUN] < limit[d * LIMITS + MAX_BATCH]:
                turn = cut(d, now, state, clock, turn)
            for r in range(lo, last):
                came_s[r] = now if r != entered else came_s[r]
                queue[d * wide + state[at + TAIL]] = r
                state[at + TAIL] += 1
            if limit[d * LIMITS + POLL] <= 1:
                state[at + LOOKED] = state[at + TAIL]
            lo, entered = last, -1
        elif ending >= 0:
            # ---- the engine moves on behind its iterations, without those that leave
            w, at = ending, ending * STATES
            leave(w, num_done, limit, state, places, run, new, target, computed, generated, held, answer, output)
            state[at + BUSY] = 0
            who, finished_at, ending = w, w, -1
        elif finished_at >= 0:
            # ---- those whose prompts were computed are offered to who goes on with them
            w, finished_at = finished_at, -1
            if num_targets[w] > 0:
                for i in range(num_done):
                    r = done[i]
                    if answer[r] == 1:
                        continue
                    t = target_of[w * num_engines + turn_of[w] % num_targets[w]]
                    turn_of[w] += 1
                    went[r] = t
                    times = 1
                    if state[t * STATES + BUSY] == 0:
                        spent_s[t * SPENTS + IDLE] += now - clock[t * CLOCKS + NOW]
                        clock[t * CLOCKS + NOW] = now
                    else:
                        turn = cut(t, now, state, clock, turn)
                        times = state[t * STATES + TIMES]
                    offered[t * wide + state[t * STATES + OFFER_TAIL]] = n + r
                    state[t * STATES + OFFER_TAIL] += 1
                    num_asked = pull(
                        t, times, limit, state, wide, offered, places, run, new, computed, held, order, asked, num_asked
                    )
            moves = MOVING
        elif moves == MOVING and num_asked == 0 and now < due:
            moves = STILL
        elif moves == MOVING:
            # ---- transfers go on until now
            changed, worked = advance(links_s, now, num_flows, flows, flowing, ready_s, left, rate)
            busy_s += worked
            links_s = now
            if changed == 1:
                settle(
                    num_flows,
                    flows,
                    flowing,
                    left,
                    rate,
                    way,
                    out_port,
                    in_port,
                    out_share,
                    in_share,
                    num_ports,
                    room,
                    load,
                    rising,
                )
            num_flows, num_over = part_over(num_flows, flows, flowing, left, over)
            moves = LEAVING
        elif moves >= LEAVING:
            # ---- those that are over: each engine that had some gives up their blocks, then each that has some now
            w = -1
            for i in range(num_over):
                r = over[i]
                if flowing[r] != (1 if moves == LEAVING else 2):
                    continue
                here = door[r] if moves == LEAVING else went[r]
                if w < 0:
                    w = here
                    at = w * STATES
                    if state[at + BUSY] == 0:
                        spent_s[w * SPENTS + IDLE] += now - clock[w * CLOCKS + NOW]
                        clock[w * CLOCKS + NOW] = now
                        who = w
                    elif moves == LEAVING or state[at + NUM_RUN] < limit[w * LIMITS + MAX_BATCH]:
                        turn = cut(w, now, state, clock, turn)
                if here != w:
                    continue
                flowing[r] += 1
                if moves == LEAVING:
                    state[w * STATES + FREE] += held[r]
                    held[r] = 0
                else:
                    joined_s[r] = now
                    came_s[n + r], last_s[n + r] = now, first_s[r]
                    queue[w * wide + state[w * STATES + TAIL]] = n + r
                    state[w * STATES + TAIL] += 1
                    state[w * STATES + LOOKED] = state[w * STATES + TAIL]
                    state[w * STATES + COMING] -= 1
            if w < 0 and moves == LEAVING:
                moves = JOINING
            elif w < 0:
                # ---- transfers that were asked for begin
                began = num_asked
                for t in range(num_engines if num_asked > 0 else 0):
                    for i in range(num_asked):
                        r = asked[i] - n
                        if went[r] != t:
                            continue
                        pulled_s[r] = now
                        way[r] = door[r] * num_engines + t
                        path = path_of[way[r]] * n + r
                        ready_s[r] = now + latency_s[path]
                        left[r] = work_s[path]
                        flowing[r] = 1 if ready_s[r] <= now else 0
                        flows[num_flows] = r
                        num_flows += 1
                num_asked = 0
                if began > 0:
                    settle(
                        num_flows,
                        flows,
                        flowing,
                        left,
                        rate,
                        way,
                        out_port,
                        in_port,
                        out_share,
                        in_share,
                        num_ports,
                        room,
                        load,
                        rising,
                    )
                moves = MOVING
                due = next_change(links_s, num_flows, flows, flowing, ready_s, left, rate)
        else:
            # ---- the next event
            now, w = due, -1
            for i in range(num_engines):
                if state[i * STATES + BUSY] == 1:
                    then = clock[i * CLOCKS + ENDS]
                    if then < now or (then == now and (w < 0 or state[i * STATES + ORDER] < state[w * STATES + ORDER])):
                        now, w = then, i
            through = first_through(num_engines, n, front, line, entry_s, came_s)
            if coming < known and arrival[coming] <= now and (through < 0 or arrival[coming] <= entry_s[through]):
                now, w = arrival[coming], -1
                lo = coming
                while coming < known and arrival[coming] == now:
                    coming += 1
                hi = coming
            elif through >= 0 and entry_s[through] <= now:
                now, w, entered = entry_s[through], -1, through
                front[door[through] * FRONTS + THROUGH] += 1
                lo, hi = through, through + 1
            elif now >= NEVER:
                return busy_s
            moves = MOVING
            if w >= 0:
                # ---- a run of iterations is over
                at, on, of, to = w * STATES, w * CLOCKS, w * LIMITS, w * SPENTS
                times, one = state[at + TIMES], clock[on + ONE]
                used = limit[of + BLOCKS] - state[at + FREE]
                running = state[at + NUM_RUN]
                state[at + PEAK_BATCH] = max(state[at + PEAK_BATCH], running)
                sample(w, running, used, state, clock, most_samples, sample_s, sample_value)
                end, series = ends(w, times, clock), times * (times - 1) / 2.0
                slope, growth = clock[on + SLOPE], clock[on + GROWTH]
                spent_s[to + LINEAR] += times * clock[on + LINEAR_S]
                spent_s[to + SAMPLED] += times * clock[on + SAMPLED_S]
                spent_s[to + DECODE] += times * clock[on + DECODE_S]
                spent_s[to + PREFILL] += times * clock[on + PREFILL_S]
                spent_s[to + HOST] += times * clock[on + HOST_S]
                spent_s[to + DECODE] += slope * series
                spent_s[to + HOST] -= (slope - growth) * series
                seen[limit[of + SEEN_AT] + state[at + TOKENS]] += times
                state[at + ITERATIONS] += times
                state[at + RUNS] += 1
                first, block = clock[on + NOW] + one, limit[of + BLOCK]
                counted = num_done = answers = usual_bin = 0
                usual_gap = -1.0
                begin = w * places + state[at + FIRST_NEW]
                for i in range(begin, begin + state[at + NUM_NEW]):
                    r = run[i]
                    if times > 1:
                        used += (computed[r] + times + block - 1) // block - (computed[r] + block) // block
                    if computed[r] + new[i] != target[r]:
                        continue
                    was = generated[r]
                    made = min(was + times, output[r])
                    generated[r] = made
                    if was == 0:
                        first_s[r] = first
                    elif last_s[r] >= 0.0:
                        gap = first - last_s[r]
                        if gap != usual_gap:
                            usual_gap, usual_bin = gap, bin_of(gap, gap_edge, num_gaps)
                        gaps[w * num_gaps + usual_bin] += 1
                    last_s[r] = end
                    counted += 1
                    if made >= output[r]:
                        end_s[r] = end
                        done[num_done] = r
                        num_done += 1
                        if num_targets[w] == 0 or answer[r] == 1:
                            answers += 1
                if times > 1:
                    gap = one + growth * times / 2.0
                    gaps[w * num_gaps + bin_of(gap, gap_edge, num_gaps)] += counted * (times - 1)
                if used > limit[of + BLOCKS]:
                    used = limit[of + BLOCKS]
                state[at + PEAK_BLOCKS] = max(state[at + PEAK_BLOCKS], used)
                clock[on + NOW] = end
                lo = following
                following = min(following + answers, n)
                hi, ending = following, w
        if who >= 0:
            # ---- an engine decides what is next
            at = who * STATES
            look(who, limit, state, wide, queue, target, computed)
            state[at + NUM_NEW] = alike = 0
            if state[at + NUM_RUN] > 0 or state[at + LOOKED] > state[at + HEAD]:
                lost = 1
                while lost == 1:
                    alike = plan(
                        who,
                        limit,
                        state,
                        wide,
                        queue,
                        places,
                        run,
                        new,
                        target,
                        computed,
                        held,
                        evicted,
                        scheduled_s,
                        clock[who * CLOCKS + NOW],
                    )
                    lost = 0
                    if state[at + NUM_NEW] == 0 and state[at + NUM_RUN] == 0:
                        lost = give_up(who, limit, state, wide, queue, order, computed, held, evicted)
            num_asked = pull(
                who, 1, limit, state, wide, offered, places, run, new, computed, held, order, asked, num_asked
            )
            if state[at + NUM_NEW] > 0:
                price(
                    who,
                    alike,
                    limit,
                    state,
                    host,
                    clock,
                    places,
                    run,
                    new,
                    target,
                    computed,
                    generated,
                    output,
                    linear_s,
                    sampled_s,
                    decode_s,
                    context_node,
                    prefill_s,
                    batch_node,
                    query_node,
                    past_node,
                )
                state[at + BUSY] = 1
                clock[who * CLOCKS + ENDS] = ends(who, state[at + TIMES], clock)
                state[at + ORDER] = turn
                turn += 1
