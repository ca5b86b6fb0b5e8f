"""Attention groups in an engine's compiled loop: what :mod:`meshwright.serving.attention_groups` does, bit for bit,
over flat arrays.

``group_of`` [2 n] is the group of every request (-1: none yet), and behind them where each stood in the queue before
those who may come now were put first. ``group`` says how many requests and groups there are, and has a place and
another for each group, written anew wherever they are needed.
"""

from __future__ import annotations

from meshwright.native import Int64s, OutInt64s, part

#: Places of ``group``: the number of requests, that of groups, and where what is of each group begins.
REQUESTS, GROUPS, EACH = range(3)


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
    """Return 1 where prompts wait: somebody runs in every group, and some group has no prompt."""
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
    return 1 if asked < groups and busy == groups else 0


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
def back(head: int, open_to: int, seen: int, queue: OutInt64s, group_of: Int64s, group: Int64s) -> None:
    """Put those of the queue who might have come and did not where they stood."""
    stood = group[REQUESTS]
    for i in range(open_to - 1, head - 1, -1):
        r, j = queue[i], i
        while j + 1 < seen and group_of[stood + queue[j + 1]] < group_of[stood + r]:
            queue[j] = queue[j + 1]
            j += 1
        queue[j] = r
