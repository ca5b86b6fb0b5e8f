"""Groups of ranks: every document once, no rank over its capacity, as good as the integer program nearly."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.assign import groups_apart
from meshwright.assign.groups import (
    GroupCosts,
    GroupProblem,
    RankGroup,
    form_groups,
    group_methods,
    least_seconds,
    rank_seconds,
)
from meshwright.plan.facets.sequence import GROUPS

QUICK = ("flexsp", "bytescale", "zeppelin")


def costs(ranks: int) -> GroupCosts:
    """Costs of some 7B model: a pass of 4,096 tokens takes a second on one rank, a fifth more where groups exchange."""
    degrees = tuple(1 << k for k in range(ranks.bit_length()) if 1 << k <= ranks)
    token = tuple(1 / 4096 if d == 1 else (1.15 if d <= 8 else 1.45) / 4096 for d in degrees)
    return GroupCosts(
        degrees=degrees,
        start_s=(0.02,) * len(degrees),
        token_s=token,
        pair_s=(7e-9,) * len(degrees),
        floor_s=0.3,
    )


def drawn(seed: int, count: int, ranks: int, **said) -> GroupProblem:
    """Log-normal lengths, the longest of them as long as all ranks hold."""
    lengths = np.random.default_rng(seed).lognormal(np.log(2500), 1.3, count).astype(np.int64) + 16
    return GroupProblem(
        lengths=np.minimum(lengths, 12288 * ranks), ranks=ranks, capacity=12288, costs=costs(ranks), **said
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from(QUICK),
    st.booleans(),
)
def test_every_document_is_in_one_group_and_no_rank_holds_more_than_it_can(seed, count, ranks, name, together):
    together = together or name == "zeppelin"
    problem = drawn(seed, count, ranks, together=together)
    found = form_groups(name, problem)
    assert sorted(d for groups in found.rounds for g in groups for d in g.documents) == list(range(count))
    for groups in found.rounds:
        held, inside = np.zeros(ranks), np.zeros(ranks, int)
        for first, size, numbers in groups:
            assert first % size == 0 and first + size <= ranks and numbers
            held[first : first + size] += problem.lengths[list(numbers)].sum() / size
            inside[first : first + size] += 1
        assert held.max() <= problem.capacity
        assert name == "zeppelin" or inside.max() == 1
    assert found.bound <= found.value * (1 + 1e-9) and least_seconds(problem) >= found.bound * (1 - 1e-9)


def test_costs_of_groups_by_hand():
    # a group of 2 has documents of 3 and 1 tokens: 1 + (2 * 4 + 0.5 * (9 + 1)) / 2 = 7.5; one rank beside it has one of
    # 2: 1 + 2 * 2 + 0.5 * 4 = 7
    hand = GroupCosts(degrees=(1, 2, 4), start_s=(1.0,) * 3, token_s=(2.0,) * 3, pair_s=(0.5,) * 3)
    problem = GroupProblem(lengths=np.array([3, 1, 2]), ranks=4, capacity=4, costs=hand)
    groups = (RankGroup(0, 2, (0, 1)), RankGroup(2, 1, (2,)))
    assert rank_seconds(problem, (groups,)).tolist() == [[7.5, 7.5, 7.0, 0.0]]
    # nested, rank 1 has half of the first document and all of the second: 1 + (6 + 4.5) / 2 + 2 + 0.5 = 8.75, and rank
    # 0 waits for it
    nested = (RankGroup(0, 2, (0,)), RankGroup(1, 1, (1,)))
    assert rank_seconds(problem, (nested,)).tolist() == [[8.75, 8.75, 0.0, 0.0]]


def test_a_long_document_is_shared_and_short_ones_are_not():
    # 8 ranks of 100 tokens: 400 tokens need 4 ranks, and the four of 100 one each
    hand = GroupCosts(degrees=(1, 2, 4, 8), start_s=(0.1,) * 4, token_s=(1.0, 1.1, 1.2, 1.3), pair_s=(0.0,) * 4)
    problem = GroupProblem(lengths=np.array([100, 400, 100, 100, 100]), ranks=8, capacity=100, costs=hand)
    for name in ("flexsp", "bytescale"):
        found = form_groups(name, problem)
        assert found.rounds == (
            (RankGroup(0, 4, (1,)), *(RankGroup(4 + i, 1, (d,)) for i, d in enumerate((0, 2, 3, 4)))),
        )
        assert found.value == pytest.approx(0.1 + 1.2 * 400 / 4)


def test_only_what_memory_needs_is_slower_where_time_asks_for_more_ranks():
    # two ranks, one document that fits one of them: shared it takes 0.1 + 1.1 * 100 / 2, alone 0.1 + 100
    hand = GroupCosts(degrees=(1, 2), start_s=(0.1,) * 2, token_s=(1.0, 1.1), pair_s=(0.0,) * 2)
    problem = GroupProblem(lengths=np.array([100]), ranks=2, capacity=100, costs=hand)
    assert form_groups("flexsp", problem).value == pytest.approx(0.1 + 1.1 * 50)
    assert form_groups("bytescale", problem).value == pytest.approx(0.1 + 100)


@pytest.mark.parametrize(("count", "seed"), [(8, 1), (10, 2), (16, 3)])
def test_groups_are_within_two_percent_of_the_integer_program(count, seed):
    pytest.importorskip("highspy")
    problem = drawn(seed, count, 8)
    some = np.flatnonzero(np.cumsum(problem.lengths) <= 0.9 * 8 * 12288)
    first = groups_apart.improved(problem, groups_apart.by_time(problem, some), 60)
    best = groups_apart.by_program(problem, some)
    assert groups_apart.slowest(problem, first) <= 1.02 * groups_apart.slowest(problem, best)


def test_a_batch_of_512_on_64_ranks_is_near_the_bound_of_all_groups():
    # ranks that meet once: the bound is the work of all documents where they need least, spread over all ranks
    found = form_groups("flexsp", drawn(0, 512, 64, together=False))
    assert found.gap < 0.025
    assert len(form_groups("flexsp", drawn(0, 512, 64)).degrees) > 3


def test_documents_beyond_the_largest_group_and_empty_batches():
    problem = GroupProblem(lengths=np.array([9]), ranks=2, capacity=4, costs=costs(2))
    with pytest.raises(ValueError, match="9 tokens, and 8 are the most"):
        form_groups("flexsp", problem)
    empty = GroupProblem(lengths=np.zeros(0, np.int64), ranks=2, capacity=4, costs=costs(2))
    assert form_groups("zeppelin", empty).rounds == ()


def test_the_words_of_a_plan_are_the_methods():
    assert set(GROUPS) == {"static", *group_methods()}


def test_a_pipeline_fills_with_its_costliest_round_and_begins_and_ends_with_its_cheapest():
    # one rank, no exchange: a document of n tokens takes n seconds
    hand = GroupCosts(degrees=(1,), start_s=(0.0,), token_s=(1.0,), pair_s=(0.0,))
    lengths = np.array([4, 9, 5, 8])
    one = GroupProblem(lengths=lengths, ranks=1, capacity=9, costs=hand)
    assert one.step_s([4.0, 9.0, 5.0, 8.0]) == 26.0
    piped = GroupProblem(lengths=lengths, ranks=1, capacity=9, costs=hand, stages=3)
    assert piped.step_s([4.0, 9.0, 5.0, 8.0]) == 26.0 + 2 * 9.0
    found = form_groups("bytescale", piped)
    # 4 and 5 tokens fill a row of 9
    assert sorted(int(lengths[list(g.documents)].sum()) for (g,) in found.rounds) == [8, 9, 9]
    assert [int(lengths[list(g.documents)].sum()) for (g,) in found.rounds] == [8, 9, 9]
    assert found.value == 26.0 + 2 * 9.0 and found.bound == 26.0 + 2 * 9.0
    four = GroupProblem(lengths=np.array([6, 9, 7, 8]), ranks=1, capacity=9, costs=hand, stages=3)
    rounds = form_groups("bytescale", four).rounds
    assert [int(four.lengths[g.documents[0]]) for (g,) in rounds] == [6, 8, 9, 7]


def test_long_documents_take_fewer_ranks_where_their_way_to_the_host_is_hidden():
    # ranks hold 10 tokens, and 20 of a document of 30 tokens or more
    hand = msgspec.structs.replace(costs(4), hidden_from=30)
    problem = GroupProblem(lengths=np.array([8, 25, 35, 70]), ranks=4, capacity=10, costs=hand, long=2)
    assert [hand.degrees[k] for k in problem.least] == [1, 4, 2, 4]
    assert problem.sizes.tolist() == [8, 25, 20, 40]  # of 35 and 70 all of the room of 2 and of 4 ranks
    plain = GroupProblem(lengths=problem.lengths, ranks=4, capacity=10, costs=hand)
    assert plain.least.tolist() == [0, 2, 2, 3] and plain.sizes.tolist() == [8, 25, 35, 70]
    with pytest.raises(ValueError, match="70 tokens, and 40 are the most"):
        form_groups("bytescale", plain)
    rounds = form_groups("bytescale", problem).rounds
    assert {(g.size, g.documents) for groups in rounds for g in groups if 3 in g.documents} == {(4, (3,))}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.sampled_from([2, 4, 8]), st.sampled_from([2, 4]), st.booleans())
def test_a_rank_holds_more_than_its_room_of_long_documents_alone(seed, count, ranks, long, together):
    hand = msgspec.structs.replace(costs(ranks), hidden_from=20_000)
    problem = msgspec.structs.replace(drawn(seed, count, ranks, together=together), costs=hand, long=long)
    found = form_groups("bytescale", problem)
    assert sorted(d for groups in found.rounds for g in groups for d in g.documents) == list(range(count))
    for _, size, numbers in (group for groups in found.rounds for group in groups):
        lengths = problem.lengths[list(numbers)]
        assert lengths.sum() <= size * problem.capacity * (long if lengths.max() >= hand.hidden_from else 1)
