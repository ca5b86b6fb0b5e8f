"""Attention groups in an engine's compiled loop: what :mod:`meshwright.serving.attention_groups` does, bit for bit,
over flat arrays.

``group_of`` [2 n] is the group of every request (-1: none yet), and behind them where each stood in the queue before
those who may come now were put first. ``group`` says how many requests and groups there are, and has three places for
each group, written anew wherever they are needed.
"""

from __future__ import annotations

from meshwright.native import Float64s, Int64s, OutInt64s, part
from meshwright.simulate.loop_tables import MOST_OWN, MOST_ROWS

#: Places of ``group``: the number of requests, that of groups, iterations that prompts wait once each group has one and
#: those that they have waited, whether they do now, and where what is of each group begins.
REQUESTS, GROUPS, SETTLE, SETTLED, SETTLING, EACH = range(6)


@part
def place(
    head: int,
    seen: int,
    queue: Int64s,
    num_run: int,
    run: Int64s,
    prompt: Int64s,
    group_of: OutInt64s,
    group: OutInt64s,
) -> None:
    """Give every request that waits a group, if it has none: the one with the fewest tokens of prompts among those with
    less requests than the fullest will have."""
    new, running, most, tokens = 0, 0, 0, EACH + group[GROUPS]
    for i in range(head, seen):
        if group_of[queue[i]] < 0:
            new += 1
    if new == 0:
        return
    for g in range(EACH, tokens + group[GROUPS]):
        group[g] = 0
    for i in range(head - num_run, seen):
        r = run[i - head + num_run] if i < head else queue[i]
        g = group_of[r]
        if g >= 0:
            running += 1
            group[EACH + g] += 1
            group[tokens + g] += prompt[r]
    for g in range(EACH, tokens):
        if group[g] > most:
            most = group[g]
    even = (running + new + group[GROUPS] - 1) // group[GROUPS]
    if even > most:
        most = even
    for i in range(head, seen):
        r = queue[i]
        if group_of[r] < 0:
            best = -1
            for g in range(group[GROUPS]):
                if group[EACH + g] < most and (best < 0 or group[tokens + g] < group[tokens + best]):
                    best = g
            group_of[r] = best
            group[EACH + best] += 1
            group[tokens + best] += prompt[r]


@part
def wait(head: int, seen: int, queue: Int64s, num_run: int, run: Int64s, group_of: Int64s, group: OutInt64s) -> int:
    """Return 1 where prompts wait: somebody runs in every group, and some group has no prompt, or they wait for more
    since each has one."""
    busy, asked, groups = 0, 0, group[GROUPS]
    for g in range(EACH, EACH + 2 * groups):
        group[g] = 0
    for i in range(num_run):
        g = EACH + group_of[run[i]]
        if group[g] == 0:
            group[g] = 1
            busy += 1
    for i in range(head, seen):
        g = EACH + groups + group_of[queue[i]]
        if group[g] == 0:
            group[g] = 1
            asked += 1
    if busy < groups:
        return 0
    if asked < groups:
        return 1
    group[SETTLING] = 1 if group[SETTLED] < group[SETTLE] else 0
    if group[SETTLING] == 0:
        group[SETTLED] = 0
    return group[SETTLING]


@part
def chosen(
    head: int,
    open_to: int,
    each: int,
    num_new: int,
    queue: OutInt64s,
    run: Int64s,
    new: Int64s,
    prompt: Int64s,
    generated: Int64s,
    computed: Int64s,
    group_of: OutInt64s,
    group: OutInt64s,
) -> int:
    """Put those who may come into the iteration before those of the queue who may not, and return where these begin. So
    many places of ``run`` have tokens in it already, of which each group has room for ``each``."""
    prompts, count = EACH + group[GROUPS], 0
    for g in range(group[GROUPS]):
        group[EACH + g], group[prompts + g] = each, 0  # the latter: 1 where it has a prompt, 2 where it takes no more
    for i in range(num_new):
        group[EACH + group_of[run[i]]] -= new[i]
    for i in range(head, open_to):
        r = queue[i]
        g, need = group_of[r], prompt[r] + generated[r] - computed[r]
        group_of[group[REQUESTS] + r] = i
        if group[prompts + g] == 0 or (group[prompts + g] == 1 and need <= group[EACH + g]):
            group[EACH + g] -= need
            group[prompts + g] = 1
            for j in range(i, head + count, -1):
                queue[j] = queue[j - 1]
            queue[head + count] = r
            count += 1
        else:
            group[prompts + g] = 2
    return head + count


@part
def busiest(
    first_new: int,
    num_new: int,
    run: Int64s,
    new: Int64s,
    prompt: Int64s,
    generated: Int64s,
    computed: Int64s,
    group_of: Int64s,
    group: OutInt64s,
) -> tuple[int, int, int]:
    """Return the most tokens, next tokens and prompts that any group has in the iteration."""
    groups = group[GROUPS]
    for g in range(EACH, EACH + 3 * groups):
        group[g] = 0
    for i in range(first_new, first_new + num_new):
        r = run[i]
        g, need = EACH + group_of[r], prompt[r] + generated[r] - computed[r]
        group[g] += new[i]
        drafted = new[i] - need if new[i] > need else 0
        group[g + (groups if new[i] - drafted == 1 and computed[r] > 0 else 2 * groups)] += 1
    tokens = decoding = prompts = 0
    for g in range(EACH, EACH + groups):
        tokens = group[g] if group[g] > tokens else tokens
        decoding = group[g + groups] if group[g + groups] > decoding else decoding
        prompts = group[g + 2 * groups] if group[g + 2 * groups] > prompts else prompts
    return tokens, decoding, prompts


@part
def evened(
    most: int, decoding: int, begun: int, groups: int, tokens: int, prompts: int, shape: Int64s, own_s: Float64s
) -> tuple[int, int, int, float]:
    """Return the tokens, the sequences that decode and the prompts of an iteration as if each group had as much as the
    one with most, and how much longer that takes (:meth:`meshwright.simulate.iterations.IterationCosts.evened`)."""
    decoding = groups * decoding if groups * decoding < shape[MOST_ROWS] else shape[MOST_ROWS]
    if prompts == 0:
        return groups * most, decoding, groups * begun, 0.0
    last, mean, longer = shape[MOST_OWN], (tokens + groups - 1) // groups, 0.0
    if last >= 0:
        longer = own_s[most if most < last else last] - own_s[mean if mean < last else last]
    return tokens, decoding, groups * begun, longer


@part
def back(head: int, open_to: int, seen: int, queue: OutInt64s, group_of: Int64s, group: Int64s) -> None:
    """Put those of the queue who might have come and did not where they stood."""
    stood = group[REQUESTS]
    for i in range(open_to - 1, head - 1, -1):
        r, j = queue[i], i
        while j + 1 < seen and group_of[stood + queue[j + 1]] < group_of[stood + r]:
            queue[j] = queue[j + 1]
            j += 1
        queue[j] = r
