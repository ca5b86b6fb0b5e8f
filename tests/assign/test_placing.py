"""Experts onto ranks: exact where one layer moves, near the optimum on all, bounds below, and fast."""

from __future__ import annotations

import time
from itertools import permutations, product

import numpy as np
import pytest

from meshwright.assign.clusters import clustered, cost_of, gap_of, ordered
from meshwright.assign.placing import PLACEMENTS, place, placed, told
from meshwright.assign.transport import transported
from meshwright.errors import MeshwrightError
from meshwright.spec.routing import read


def choices(experts, ranks):
    """Every way to lay as many experts on each rank."""
    return {
        p for p in product(range(ranks), repeat=experts) if all(p.count(r) == experts // ranks for r in range(ranks))
    }


def tables(seed, layers, experts):
    """Loads [layers, experts] and what follows what, consistent with each other."""
    rng = np.random.default_rng(seed)
    after = rng.dirichlet(np.full(experts, 0.3), (layers - 1, experts)) * rng.random((layers - 1, experts, 1))
    return np.vstack([after[0].sum(1)[None], after.sum(1)]), after


def test_one_layer_between_two_that_stay_is_placed_at_the_least_cost():
    rng = np.random.default_rng(0)
    for items, bins, room in ((6, 3, 2), (6, 2, 3), (4, 4, 1), (5, 3, 2)):
        for _ in range(25):
            cost = rng.random((items, bins))
            found = transported(cost, room)
            best = min(
                sum(cost[i, b] for i, b in enumerate(p))
                for p in product(range(bins), repeat=items)
                if max(map(p.count, range(bins))) <= room
            )
            assert np.bincount(found, minlength=bins).max() <= room
            assert cost[np.arange(items), found].sum() == pytest.approx(best)


@pytest.mark.parametrize("seed", range(6))
def test_balanced_loads_are_within_two_percent_of_the_best_of_all_placements(seed):
    """Brute force over all 35 halves of 8 experts."""
    loads, after = tables(seed, 3, 8)
    found = place(loads, after, method="balanced", ranks=2, node=2)
    best = np.mean(
        [min(max(row[np.array(p) == r].sum() for r in (0, 1)) for p in choices(8, 2)) / row.sum() * 2 for row in loads]
    )
    assert found.busiest <= best * 1.02
    assert found.busiest_bound <= best


@pytest.mark.parametrize("seed", range(6))
def test_affinity_leaves_ranks_within_five_percent_of_the_best_of_all_placements(seed):
    """Brute force over both later layers; the first may stay, as names of equal ranks mean nothing."""
    loads, after = tables(seed, 3, 4)
    found = place(loads, after, method="exflow", ranks=2, node=2)
    ways = [np.array(p) for p in choices(4, 2)]
    best = min(
        told(loads, after, np.stack([a, b, c]), ranks=2, node=2).leave_rank for a in ways for b in ways for c in ways
    )
    assert found.leave_rank <= best * 1.05 + 1e-12
    assert found.leave_rank_bound <= best + 1e-12


def test_moetuner_keeps_the_loads_of_balanced_clusters_and_sends_less_between_layers():
    loads, after = tables(3, 6, 16)
    even, near = (place(loads, after, method=m, ranks=8, node=4) for m in ("balanced", "moetuner"))
    assert near.busiest == pytest.approx(even.busiest)
    assert near.leave_node < even.leave_node
    assert near.leave_node >= near.leave_node_bound


def test_clusters_go_to_the_ranks_that_every_order_of_them_could_not_better():
    """Two layers, four clusters of one expert: all 24 orders, by tokens that leave a rank (1) or a node (9)."""
    loads, after = tables(1, 2, 4)
    found = place(loads, after, method="moetuner", ranks=4, node=2)

    def cost(rank_of):
        at = told(loads, after, np.stack(rank_of), ranks=4, node=2)
        return at.leave_rank + 8 * at.leave_node

    first = found.rank_of[0]
    assert cost(found.rank_of) == pytest.approx(min(cost([first, np.array(p)]) for p in permutations(range(4))))


@pytest.mark.parametrize("experts, ranks", [(6, 2), (6, 3), (8, 2)])
def test_clusters_of_programs_are_those_that_no_placement_could_even_out_more(experts, ranks):
    """Brute force over all ways to lay as many experts on each rank, on loads that steps do not even out at once."""
    for seed in range(4):
        loads = np.random.default_rng(seed).random((2, experts)) ** 2
        steps = np.tile(np.arange(experts) // (experts // ranks), (2, 1))
        found = clustered(loads, steps, ranks)
        assert found.solved
        for each, of, bound in zip(loads, found.of, found.bound, strict=True):
            assert (np.bincount(of) == experts // ranks).all()
            ways = (max(each[np.array(p) == r].sum() for r in range(ranks)) for p in choices(experts, ranks))
            assert np.bincount(of, weights=each).max() == pytest.approx(min(ways)) == pytest.approx(bound)


@pytest.mark.parametrize("ranks, node", [(3, 2), (4, 1), (4, 2), (4, 3), (4, 4)])
def test_the_order_of_clusters_is_the_shortest_of_all_orders_of_all_layers(ranks, node):
    """Brute force over every order of every layer, layer after layer."""
    between = np.random.default_rng(ranks * node).dirichlet(np.full(ranks, 0.3), (4, ranks))
    orders = [np.array(p) for p in permutations(range(ranks))]
    least = np.zeros(len(orders))
    for table in between:
        ways = [[cost_of(table[None], np.stack([a, b]), node) for a in orders] for b in orders]
        least = (np.array(ways) + least).min(axis=1)
    found = ordered(between, ranks, node)
    assert (np.sort(found, axis=1) == np.arange(ranks)).all()
    assert cost_of(between, found, node) == pytest.approx(least.min())
    assert 1 + gap_of(between, found[:, ::-1], node) >= cost_of(between, found[:, ::-1], node) / least.min() - 1e-12


def test_an_answer_says_which_of_programs_and_steps_placed_experts():
    routing = read("zipf:s=0.8;affinity=0.5")
    small, large = placed(routing, 8, 8, "moetuner", 4, 2), placed(routing, 8, 128, "moetuner", 16, 8)
    assert (small.clusters_by, small.order_by, small.order_gap) == ("integer programs", "dynamic programming", 0.0)
    assert small.busiest == pytest.approx(small.busiest_bound)
    assert (large.clusters_by, large.order_by) == ("steps", "steps")
    assert large.order_gap > 0
    assert "their ranks by steps (at most" in large.solved


@pytest.mark.parametrize("method", PLACEMENTS)
def test_256_experts_of_60_layers_are_placed_within_two_seconds(method):
    placed.cache_clear()
    begun = time.process_time()
    found = placed(read("zipf:s=0.8;affinity=0.5"), 60, 256, method, 64, 8)
    assert time.process_time() - begun < 2.0
    assert (np.sort(found.rank_of, axis=1) == np.arange(256) // 4).all()  # none left out, four on each rank
    assert found.busiest >= found.busiest_bound
    assert found.leave_rank >= found.leave_rank_bound
    assert found.leave_node >= found.leave_node_bound


def test_a_placement_that_is_none_is_refused():
    with pytest.raises(MeshwrightError, match="no placement 'best'"):
        place(*tables(0, 2, 4), method="best", ranks=2, node=2)
