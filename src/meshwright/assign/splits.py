"""Tasks onto groups of tasks that help each other: the split of all into so many groups that is worth most.

What a task is worth in a group is the mean affinity of the group's other tasks towards it; of one alone it is the mean
of its affinities from and towards all others, so that a task which neither gains nor gives is left alone (Zhuang et al.
2307.11285). Exact, by dynamic programming over sets of tasks: 3^n steps of n tasks.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

#: Tasks that can be split in a second.
MOST = 10


def split(affinity: NDArray[np.float64], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the best `count` groups of all tasks, each in order, that of task 0 first; of equally good ones the first
    found. `affinity` float64 [n, n]: of row i towards column j, by how much a step along task i lowers j's loss."""
    many = len(affinity)
    whole = (1 << many) - 1
    value = {group: worth(affinity, _members(group)) for group in range(1, whole + 1)}
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for _ in range(count):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for done, (total, groups) in best[-1].items():
            left = whole & ~done
            lowest = left & -left
            rest = left & ~lowest
            more = rest
            while left:  # every subset of what is left that holds its lowest task
                group = lowest | more
                now = total + value[group]
                if done | group not in found or now > found[done | group][0]:
                    found[done | group] = now, (*groups, group)
                if not more:
                    break
                more = (more - 1) & rest
        best.append(found)
    return tuple(_members(group) for group in best[-1][whole][1])


def worth(affinity: NDArray[np.float64], members: tuple[int, ...]) -> float:
    """Return what all tasks of a group are worth in it."""
    apart = ~np.eye(len(affinity), dtype=bool)
    if len(members) == 1:
        one = members[0]
        return float(np.concatenate([affinity[one][apart[one]], affinity[:, one][apart[one]]]).mean())
    some = affinity[np.ix_(members, members)]
    return float(some.sum() - np.trace(some)) / (len(members) - 1)


def even(many: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Groups of as many tasks each as can be, in order, the larger ones first."""
    size, more = divmod(many, count)
    ends = [group * size + min(group, more) for group in range(count + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends))


def _members(group: int) -> tuple[int, ...]:
    return tuple(i for i in range(group.bit_length()) if group >> i & 1)
