"""Groups of a common prefix of a whole batch: by hand, and against every way to group small ones."""

import random

from meshwright.serving.batchllm import arranged, groups
from meshwright.serving.engine_request import EngineRequest, NewRequest
from tests.serving.test_orders import order_of


def saved(found, chains):
    """The blocks that groups need not compute: those of their common beginning, for every member but the first."""
    total = 0
    for group in found:
        common = 0
        while all(len(chains[i]) > common and chains[i][common] == chains[group[0]][common] for i in group):
            common += 1
        total += common * (len(group) - 1)
    return total


def most_saved(chains, members, depth=0):
    """The most that grouping below a place of the tree saves: all of it together, or each branch by itself."""
    branches = {}
    for i in members:
        if len(chains[i]) > depth:
            branches.setdefault(chains[i][depth], []).append(i)
    return max(depth * (len(members) - 1), sum(most_saved(chains, some, depth + 1) for some in branches.values()))


def test_a_longer_prefix_of_few_goes_before_a_short_one_of_many_where_it_saves_more():
    # all four share a block (3 saved); two pairs share three (2 x 3 saved)
    chains = [(1, 2, 3), (1, 7, 8), (1, 2, 3), (1, 7, 8)]
    assert sorted(map(sorted, groups(chains))) == [[0, 2], [1, 3]]
    # with two blocks in common and only one more in pairs it is 3 x 2 together and 2 x 3 in pairs: together
    assert sorted(map(sorted, groups([(1, 2, 3), (1, 2, 8), (1, 2, 3), (1, 2, 8)]))) == [[0, 1, 2, 3]]


def test_groups_save_the_most_that_one_prefix_for_each_request_can():
    rng = random.Random(1)
    for _ in range(400):
        chains = [tuple(10 * d + rng.randint(0, 1) for d in range(rng.randint(0, 4))) for _ in range(rng.randint(1, 8))]
        found = groups(chains)
        assert sorted(i for group in found for i in group) == list(range(len(chains)))
        assert saved(found, chains) == most_saved(chains, range(len(chains))), chains


def test_groups_that_generate_most_for_what_they_read_go_first_and_stay_together():
    asked = [
        NewRequest(0, 8, 2, hashes=(1, 2)),
        NewRequest(1, 8, 8, hashes=(5, 6)),
        NewRequest(2, 8, 4, hashes=(1, 2)),
        NewRequest(3, 8, 6, hashes=(5, 6)),
        NewRequest(4, 8, 7),
    ]
    # ratios: (2 + 4) / 16, (8 + 6) / 16, 7 / 8 and of the last two equal ones the group that came first
    assert [one.number for one in arranged([EngineRequest(a, i) for i, a in enumerate(asked)])] == [1, 3, 4, 2, 0]
    assert order_of("batchllm", asked, prefix=True) == [1, 3, 4, 2, 0]
