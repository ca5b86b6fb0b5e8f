"""The benchmark beside torch's own parts: its intervals, and that both sides train the same."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from bench import executor, overhead
from bench.executor import KINDS, ROWS, measure
from bench.turns import orders, ratio

from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

#: A short batch and a narrow model: what is shown is of orders and of what is trained, and not how long it takes.
SHORT = Train(global_batch=8, seq_len=32, dtype="fp32")
NARROW = transformer(layers=4, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=256, max_seq_len=32, gated=True)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for bench in (executor, overhead):
        monkeypatch.setattr(bench, "TRAIN", SHORT)
        monkeypatch.setattr(bench, "small_llama", lambda: NARROW)


@pytest.mark.parametrize(("rounds", "from_the_end"), [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4)])
def test_intervals_of_a_median_are_order_statistics(rounds, from_the_end):
    """By hand: the largest k with 2 sum C(n, i) / 2^n, i < k, within 5%: n = 12 has 2 (1 + 12 + 66) / 4096 = 3.9%."""
    found = ratio([float(i) for i in range(rounds, 0, -1)], [1.0] * rounds)
    assert (found.low, found.high) == (from_the_end, rounds + 1 - from_the_end)
    assert found.middle == (rounds + 1) / 2


@pytest.mark.parametrize(("count", "least"), [(2, 2), (3, 6), (4, 4), (5, 10), (6, 6)])
def test_every_kind_comes_at_every_place_and_after_every_other_equally_often(count, least):
    kinds = "abcdef"[:count]
    found = orders(kinds)
    assert len(found) == len(set(found)) == least
    places = Counter((i, kind) for row in found for i, kind in enumerate(row))
    pairs = Counter(pair for row in found for pair in pairwise(row))
    assert (len(places), len(pairs)) == (count**2, count * (count - 1))
    assert set(places.values()) == set(pairs.values()) == {least // count}


@pytest.mark.slow
def test_the_overhead_is_measured_of_whole_rounds_of_orders():
    row = overhead.measure(overhead.PLANS[0], 1)
    assert all(len(row.seconds[kind]) == 1 for kind in overhead.KINDS)


def test_few_rounds_give_their_ends():
    found = ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    assert (found.low, found.middle, found.high) == (2.0, 3.0, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if name != "transformers-fsdp"])
def test_both_sides_train_the_same(name):
    """``measure`` raises when a loss or a norm of theirs departs from ours, in the steps of warm-up too."""
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    row = measure(name, 1)
    assert all(len(row.seconds[kind]) == 1 for kind in KINDS)
