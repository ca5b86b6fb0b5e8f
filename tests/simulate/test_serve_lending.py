"""Cache blocks in other replicas' memory: hand calculations, every skipped run against its iterations, conservation of
blocks, and what is equal to replicas by themselves."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.serving.cache import CacheRules
from meshwright.serving.lending import BlockReport, Lend, LendingManager, Reported
from meshwright.simulate.serve_lending import AwayPath, LentPool
from meshwright.simulate.serve_pool import pooled
from meshwright.world.decider import replayed
from tests.serving.costs import linear_costs, replica, requests

COSTS = linear_costs(base=5e-3, token=2e-5, sampled=1e-5, decode=3e-7, prefill=1e-5, tokens=1 << 17)
TIMES = ("arrival_s", "scheduled_s", "first_s", "end_s")
FREE = AwayPath(lambda tokens: 0.0, lambda tokens: 0.0)


def lends(policy="vllm-v1", costs=COSTS, **limits):
    return msgspec.structs.replace(replica(policy, costs, **limits), rules=CacheRules(borrow=True))


def lent(one, asked, replicas=2, path=FREE, *, routing="round-robin", **how):
    paths = {(i, j): path for i in range(replicas) for j in range(replicas) if i != j}
    return LentPool(one, replicas, asked, serving.get("routing", routing), paths, **how)


def test_a_request_longer_than_a_cache_by_hand():
    # blocks of 16 tokens, two of them a replica. A prompt of 40 tokens takes three blocks, one of them away (and a
    # fourth is asked for with 41 tokens; it is in the third): 10 ms and 40 * 1 ms, and 8 new tokens are kept there
    # meanwhile. Then 41 tokens of context, 9 of which are away, but for the new one: 33 at home take 3.3 ms, and 8 away
    # 2 ms on their way and 0.8 ms: what is at home takes longer. The last two: 42 and 43 of context, 3.3 ms likewise
    costs = linear_costs(base=0.010, token=0.001, decode=0.0001)
    path = AwayPath(lambda tokens: 0.002 * tokens, lambda tokens: 0.003 * tokens)
    pool = lent(lends("vllm-v1", costs, blocks=2), requests((0.0, 40, 4)), path=path)
    _, (found,) = pool.served()
    assert found.first_s[0] == pytest.approx(0.050)
    assert found.end_s[0] == pytest.approx(0.050 + 3 * (0.010 + 0.001 + 0.0033))
    assert found.peak_blocks == 3


@pytest.mark.parametrize(
    ("asks", "keeps", "step"),
    [
        (0.020, 0.0, 0.011 + 0.020 + 0.0008),  # queries go there for longer than 3.3 ms at home
        (0.0, 0.100, 0.100),  # the new token's keys and values are longer under way than all layers are computed
    ],
)
def test_messages_are_waited_for_where_they_take_longer(asks, keeps, step):
    costs = linear_costs(base=0.010, token=0.001, decode=0.0001)
    path = AwayPath(lambda tokens: asks * tokens, lambda tokens: keeps * tokens)
    _, (found,) = lent(lends("vllm-v1", costs, blocks=2), requests((0.0, 40, 2)), path=path).served()
    prompt = max(0.050, 8 * keeps)
    assert found.first_s[0] == pytest.approx(prompt) and found.end_s[0] == pytest.approx(prompt + step)


def test_a_creditor_pays_for_the_attention_of_what_it_lends():
    # the long request needs 10 blocks of two times 6, and the short one a block of the other replica. Its iterations
    # of 10 + 1 ms and 0.1 ms a token of context take 1 / (1 - share) times as long, where share is the attention over
    # what is away of an iteration of 10 + 1 ms and 9.7 over the 96 at home and the new one
    costs = linear_costs(base=0.010, token=0.001, decode=0.0001)
    pool = lent(lends("vllm-v1", costs, blocks=6), requests((0.0, 158, 3), (0.1805, 1, 2)))
    _, (_, short) = pool.served()
    # the first's prompt takes 168 ms, its next tokens 11 + 9.7 ms each, from 0.168 to 0.1887 and 0.2094
    share = 6.2e-3 / 20.7e-3  # behind 158 tokens 62 are away beside the new one
    first = 0.011 / (1 - share) + 0.1805
    assert short.first_s[0] == pytest.approx(first)
    share = 6.3e-3 / 20.7e-3
    assert short.end_s[0] == pytest.approx(first + 0.0112 / (1 - share))


def test_blocks_come_back_and_are_never_more_than_there_are():
    rng = np.random.default_rng(3)
    asked = workload(rng, 60, longest=900)
    one = lends(blocks=60)
    pool = lent(one, asked, 4)
    move = pool.lending.move

    def moved(now):
        due = move(now)
        caches = [clock.state.cache for clock in pool.pool.clocks]
        held = [sum(run.blocks for run in clock.state.running) for clock in pool.pool.clocks]
        cohorts = [clock.state.cohort for clock in pool.pool.clocks]
        assert sum(cache.total for cache in caches) == 4 * 60
        assert sum(cache.borrowed for cache in caches) == sum(cache.lent for cache in caches)
        assert all(cache.bare >= 0 and cache.away >= 0 for cache in caches)
        for cache, blocks, cohort in zip(caches, held, cohorts):
            assert len(cohort) or cache.free + blocks == cache.total
        seen.append(sum(cache.lent for cache in caches))
        return due

    seen = []
    pool.lending.move = moved
    pool.served()
    assert max(seen) > 0 and seen[-1] == 0
    assert not pool.lending.loans.lent and not pool.lending.loans.wanted


def workload(rng, count, longest):
    at = np.sort(rng.uniform(0, 4, count)).tolist()
    prompt = np.where(rng.random(count) < 0.2, rng.integers(1, 2 * longest, count), rng.integers(1, 200, count))
    return requests(*zip(at, prompt.tolist(), rng.integers(1, 80, count).tolist()))


@pytest.mark.parametrize("policy", ["static", "orca", "vllm-v0", "vllm-v1", "sarathi", "past-future", "flover"])
@pytest.mark.parametrize("routing", ["round-robin", "least-loaded"])
def test_a_run_that_is_skipped_equals_its_iterations(policy, routing):
    rng = np.random.default_rng(len(policy))
    asked = workload(rng, 40, longest=1500)
    one = lends(policy, blocks=90, max_batch=12)
    assert max(asked.prompt) > 90 * 16  # longer than the cache of a replica
    path = AwayPath(lambda tokens: 1e-3 + 1e-6 * tokens, lambda tokens: 1e-5 * tokens)
    shares, found = lent(one, asked, 3, path, routing=routing).served()
    others, plain = lent(one, asked, 3, path, routing=routing, skips=False).served()
    steady = getattr(one.policy, "steady", True)
    assert not steady or sum(a.runs for a in found) < sum(b.runs for b in plain)
    for a, b, mine, theirs in zip(found, plain, shares, others, strict=True):
        assert mine.prompt.tolist() == theirs.prompt.tolist()
        for name in TIMES:
            assert getattr(a, name).tolist() == pytest.approx(getattr(b, name).tolist(), rel=1e-9, abs=1e-9)
        assert a.iterations == b.iterations and a.peak_blocks == b.peak_blocks
        assert a.evicted.tolist() == b.evicted.tolist()
        assert a.spent_s.tolist() == pytest.approx(b.spent_s.tolist())


def test_with_room_for_all_nobody_borrows_and_nothing_changes():
    asked = workload(np.random.default_rng(5), 60, longest=300)
    router = serving.get("routing", "least-loaded")
    pool = lent(lends(blocks=4000), asked, 3, routing="least-loaded")
    _, found = pool.served()
    _, apart = pooled(replica("vllm-v1", COSTS, blocks=4000), 3, asked, router)
    assert not pool.lending.log
    for a, b in zip(found, apart, strict=True):
        for name in TIMES:
            assert getattr(a, name).tolist() == pytest.approx(getattr(b, name).tolist())


def test_the_logs_replay():
    asked = workload(np.random.default_rng(6), 40, longest=600)
    one = lends(blocks=80)
    pool = lent(one, asked, 3, logs=True)
    pool.served()
    assert any(entry.decisions for entry in pool.lending.log)
    assert replayed(LendingManager(), pool.lending.log) == pool.lending.log
    for clock in pool.pool.clocks:
        again = replayed(one.decider(), clock.log)
        assert [entry.decisions for entry in again] == [entry.decisions for entry in clock.log]


def test_the_oldest_request_has_all_it_lacks_or_nothing():
    manager = LendingManager()
    state = manager.begin()
    first = (
        BlockReport(0, wanted=10, oldest=7),
        BlockReport(1, wanted=4, oldest=3),
        BlockReport(2, spare=6),
        BlockReport(3, spare=5),
    )
    state, lent = manager.decide(state, Reported(first))
    assert lent == (Lend(2, 1, 4),)  # whoever lends to one does not lend to another: 5 are left, of 10
    assert state.wanted == {0: (7, 10)}
    # four come back, but a younger request has to wait until the older one has its ten
    told = BlockReport(0, 10, 7), BlockReport(1, 1, 9, 0, 4), BlockReport(2, spare=4), BlockReport(3, spare=5)
    state, lent = manager.decide(state, Reported(told))
    assert lent == (Lend(2, 1, -4),) and not state.lent
    told = BlockReport(0, 10, 7), BlockReport(1, 1, 9), BlockReport(2, spare=6), BlockReport(3, spare=5)
    state, lent = manager.decide(state, Reported(told))
    assert lent == (Lend(2, 0, 6), Lend(3, 0, 4)) and state.wanted == {1: (9, 1)}


def test_two_that_cannot_both_be_held_are_answered_one_after_the_other():
    # each needs all blocks of both replicas but one: 31 of 32 for 481 to 496 tokens
    one = lends("vllm-v1", blocks=16, budget=64)
    _, found = lent(one, requests((0.0, 470, 20), (0.0, 470, 20))).served()
    assert all(each.end_s[0] > 0 for each in found)
