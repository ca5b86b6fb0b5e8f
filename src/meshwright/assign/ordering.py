"""The cheapest order of steps of which some have to come before others, and some may be done together.

A state is the set of steps that are done, and what is left after it does not depend on their order, so that the
cheapest way to each set is the shortest path over the sets that can be reached: Held and Karp's dynamic program (1962)
over the ideals of the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Transitions that are looked at, at most.
MOST_TRANSITIONS = 3_000_000


class OrderedSteps(NamedTuple):
    """Steps in their order, those that are done together in one tuple; their ``cost``, and whether no other order is
    cheaper (``proved``), or only none that was tried."""

    groups: tuple[tuple[int, ...], ...]
    cost: float
    proved: bool


def cheapest(
    before: Sequence[int],
    units: Sequence[tuple[int, ...]],
    cost: Callable[[int, tuple[int, ...]], float],
) -> OrderedSteps:
    """Return the cheapest order of steps: ``before[i]`` is the set (bits) of those that have to come before step i,
    `units` the tuples of steps that may be done together, single ones included, and ``cost(done, unit)`` what a unit
    costs after a set of steps, in whichever order these were done. Too many sets to look at: greedily, of two units the
    one that had better come first."""
    whole = (1 << len(before)) - 1
    masks = [sum(1 << step for step in unit) for unit in units]
    needs = []
    for unit, mask in zip(units, masks):
        need = 0
        for step in unit:
            need |= before[step]
        needs.append(need & ~mask)
    # steps that wait for the same others come in any order: each subset of n of them is a state, and has those of the
    # others after it
    alike = max(Counter(need for unit, need in zip(units, needs) if len(unit) == 1).values(), default=1)
    if alike << (alike - 1) > MOST_TRANSITIONS:
        return _greedy(whole, units, masks, needs, cost)
    best: dict[int, tuple[float, int, int]] = {0: (0.0, 0, -1)}
    layers: list[set[int]] = [set() for _ in range(len(before) + 1)]
    layers[0].add(0)
    looked = 0
    for layer in layers:
        for done in layer:
            spent = best[done][0]
            for number, (mask, need) in enumerate(zip(masks, needs)):
                if mask & done or need & ~done:
                    continue
                looked += 1
                after, total = done | mask, spent + cost(done, units[number])
                if after not in best or total < best[after][0]:
                    best[after] = (total, done, number)
                    layers[after.bit_count()].add(after)
            if looked > MOST_TRANSITIONS:
                return _greedy(whole, units, masks, needs, cost)
    groups, at = [], whole
    while at:
        _, before_it, number = best[at]
        groups.append(units[number])
        at = before_it
    return OrderedSteps(tuple(reversed(groups)), best[whole][0], True)


def _greedy(
    whole: int,
    units: Sequence[tuple[int, ...]],
    masks: Sequence[int],
    needs: Sequence[int],
    cost: Callable[[int, tuple[int, ...]], float],
) -> OrderedSteps:
    done, total, groups = 0, 0.0, []
    while done != whole:
        free = [i for i, (mask, need) in enumerate(zip(masks, needs)) if not mask & done and not need & ~done]
        number = free[0]
        for other in free[1:]:
            costs = [cost(done, units[i]) for i in (number, other)]
            if masks[number] & masks[other]:  # one of them alone is done
                later = costs[1] / len(units[other]) < costs[0] / len(units[number])
            else:
                ahead = costs[0] + cost(done | masks[number], units[other])
                later = costs[1] + cost(done | masks[other], units[number]) < ahead
            number = other if later else number
        total += cost(done, units[number])
        groups.append(units[number])
        done |= masks[number]
    return OrderedSteps(tuple(groups), total, False)
