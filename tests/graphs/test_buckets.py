"""Orders of buckets against all orders, lock servers and grids against their definitions."""

import heapq
from itertools import combinations

import pytest

from meshwright.assign.buckets import (
    EdgeBucket,
    LockServer,
    grid,
    inside_out,
    loads,
    locked,
    moved,
    needed,
    orthogonal,
    stays,
    tournament,
)


def fewest_loads(partitions, apart):
    """The fewest loads of any order of all buckets with room for two, by the shortest way through all states (buckets
    that are done, what is held)."""
    buckets = [EdgeBucket(i, j) for i in range(partitions) for j in range(partitions)]
    wanted = [needed(bucket, partitions, apart) for bucket in buckets]
    best, queue = {(0, frozenset()): 0}, [(0, 0, ())]
    while queue:
        cost, done, held = heapq.heappop(queue)
        if done == 2 ** len(buckets) - 1:
            return cost
        if best[done, frozenset(held)] < cost:
            continue
        for number, one in enumerate(wanted):
            if done >> number & 1:
                continue
            old = sorted(set(held) - one)
            kept = [set(some) for size in range(3 - len(one)) for some in combinations(old, size)]
            for some in kept:
                state = done | 1 << number, frozenset(one | some)
                price = cost + len(one - set(held))
                if price < best.get(state, 10**9):
                    best[state] = price
                    heapq.heappush(queue, (price, state[0], tuple(sorted(state[1]))))
    raise AssertionError


@pytest.mark.parametrize(("partitions", "apart"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_the_order_loads_as_seldom_as_the_best_of_all_orders(partitions, apart):
    order = inside_out(partitions, apart)
    assert sorted(order) == sorted(EdgeBucket(i, j) for i in range(partitions) for j in range(partitions))
    assert loads(order, partitions, apart) == fewest_loads(partitions, apart)


@pytest.mark.parametrize("partitions", [2, 5, 16, 33])
def test_loads_are_those_that_every_pair_of_partitions_needs(partitions):
    """Each load into room for two brings one new pair together: one table has P (P - 1) / 2, two have P^2."""
    assert loads(inside_out(partitions), partitions) == partitions * (partitions - 1) // 2 + 1
    assert loads(inside_out(partitions, True), partitions, True) == partitions**2 + 1


@pytest.mark.parametrize("partitions", [3, 8])
def test_every_bucket_but_the_first_has_a_partition_that_was_trained_before(partitions):
    seen = set(inside_out(partitions)[0])
    for bucket in inside_out(partitions)[1:]:
        assert seen & set(bucket)
        seen |= set(bucket)


@pytest.mark.parametrize(
    ("partitions", "machines", "apart"), [(4, 2, False), (8, 4, False), (7, 3, False), (4, 4, True)]
)
def test_a_lock_server_trains_all_buckets_and_none_at_a_time_that_overlap(partitions, machines, apart):
    rounds = locked(partitions, machines, apart)
    trained = sorted(bucket for one in rounds for bucket in one if bucket is not None)
    assert trained == sorted(EdgeBucket(i, j) for i in range(partitions) for j in range(partitions))
    assert orthogonal(rounds, partitions, apart)
    assert len(rounds) >= -(-(partitions**2) // machines)


def test_a_lock_server_prefers_what_a_machine_has():
    server = LockServer(4)
    first = server.acquire(0)
    second = server.acquire(1)
    assert not set(first) & set(second)
    server.release(first)
    assert set(server.acquire(0, first)) == set(first)  # the other direction of the same two partitions
    while server.acquire(2) is not None:  # what is free is handed out
        pass
    assert server.left and all(set(bucket) & {*first, *second} for bucket in server.left)


def test_a_lock_server_hands_out_many_buckets_as_one_that_looks_at_each_would():
    """All buckets one by one, the definition, against the arrays of the lock server."""
    partitions, machines = 12, 3
    left, held, before = list(inside_out(partitions)), {}, [None] * machines
    for one in locked(partitions, machines):
        for machine, bucket in enumerate(one):
            mine = needed(before[machine], partitions, False) if before[machine] else frozenset()
            free = [b for b in left if not needed(b, partitions, False) & held.keys()]
            best = max(free, key=lambda b: len(needed(b, partitions, False) & mine), default=None)
            assert bucket == best
            if best is not None:
                left.remove(best)
                held |= dict.fromkeys(needed(best, partitions, False), machine)
                before[machine] = best
        held.clear()
    assert not left


def test_a_grid_trains_diagonals_on_which_machines_keep_their_tails():
    rounds = grid(4, 2)
    assert rounds[:2] == ((EdgeBucket(0, 0), EdgeBucket(1, 1)), (EdgeBucket(1, 0), EdgeBucket(0, 1)))
    assert orthogonal(rounds, 4, True)
    assert len({bucket for one in rounds for bucket in one}) == 16 and len(rounds) == 8
    assert all(len({b.head for b in one}) == len({b.tail for b in one}) == 2 for one in rounds)
    mine = stays(grid(4, 4), 4, True)
    # each machine loads a head and a tail, then one head a turn; the last bucket stores both
    assert [len(stay.loads) for stay in mine[0]] == [2, 1, 1, 1]
    assert [len(stay.stores) for stay in mine[0]] == [1, 1, 1, 2]
    with pytest.raises(ValueError, match="do not divide"):
        grid(5, 2)


@pytest.mark.parametrize(("partitions", "machines"), [(6, 1), (6, 3)])
def test_what_is_loaded_is_there_and_what_another_trains_is_stored_before(partitions, machines):
    rounds = locked(partitions, machines) * 2
    held = [set() for _ in range(machines)]
    due = {
        (machine, stay.round): stay for machine, mine in enumerate(stays(rounds, partitions, False)) for stay in mine
    }
    for number, one in enumerate(rounds):
        for machine, bucket in enumerate(one):
            if bucket is None:
                continue
            stay = due[machine, number]
            assert not any(set(stay.loads) & other for other in held)
            held[machine] |= set(stay.loads)
            assert set(bucket) <= held[machine] and len(held[machine]) <= 2
        for machine in range(machines):
            if (machine, number) in due:
                assert set(due[machine, number].stores) <= held[machine]
                held[machine] -= set(due[machine, number].stores)
    assert held == [set()] * machines
    if machines == 1:
        assert moved(stays(rounds[: len(rounds) // 2], partitions, False)) == 2 * (15 + 1)


@pytest.mark.parametrize(("partitions", "machines"), [(4, 2), (8, 2), (16, 8)])
def test_a_tournament_leaves_no_machine_without_a_bucket(partitions, machines):
    rounds = tournament(partitions, machines)
    assert sorted(b for one in rounds for b in one) == sorted(
        EdgeBucket(i, j) for i in range(partitions) for j in range(partitions)
    )
    assert orthogonal(rounds, partitions, False) and len(rounds) == partitions**2 // machines
    assert len(rounds) <= len(locked(partitions, machines))
    with pytest.raises(ValueError, match="do not share"):
        tournament(partitions + 1, machines)
