"""The next batch of each policy, worked out by hand on an engine whose iterations take a second each."""

import numpy as np
import pytest

from meshwright import serving
from meshwright.cost.engine import engines
from meshwright.errors import MeshwrightError
from meshwright.serving.batching import Arrived, Batching, Computed, Evict, Iterate, Withdrawn
from meshwright.serving.cache import EngineLimits
from meshwright.serving.engine_request import EngineRequest, NewRequest
from meshwright.serving.past_future import future_peak, left_to_generate
from meshwright.simulate.serve_pool import served_alone as simulate
from meshwright.simulate.serve_pool import served_logged as simulate_logged
from meshwright.spec.serve import parse
from meshwright.world.decider import replayed
from tests.serving.costs import replica, requests

NAMES = serving.names("batching")


def computed(decisions):
    """The (request, new tokens) of the next iteration, and who generates a token in it."""
    for d in decisions:
        if isinstance(d, Iterate):
            parts = [(number, 1) for number in d.decoding] + [(s.number, s.new) for s in d.shares]
            return parts, [*d.decoding, *(s.number for s in d.shares if s.samples)]
    return [], []


def plans(policy, arrivals, *, iterations, answers=None, **limits):
    """The (request, new tokens) of every iteration, where requests end after so many answers."""
    decider = Batching(policy=serving.get("batching", policy), limits=EngineLimits(**limits))
    state, made, found = decider.begin(), {}, []
    event = Arrived(tuple(NewRequest(*one) for one in arrivals))
    for _ in range(iterations):
        state, decisions = decider.decide(state, event)
        parts, sampled = computed(decisions)
        found.append(parts)
        for number in sampled:
            made[number] = made.get(number, 0) + 1
        ends = answers or {number: limit for number, _, limit in arrivals}
        event = Computed(tuple(number for number in sampled if made[number] == ends[number]))
    return found


def test_static_batching_takes_the_next_batch_when_the_longest_answer_is_there():
    # batch of 2: request 0 ends after 1 token and keeps its place for 2 more iterations; then request 2 comes
    found = plans(
        "static",
        ((0, 5, 1), (1, 5, 3), (2, 5, 1)),
        iterations=4,
        max_batch=2,
        budget=0,
        block=4,
        blocks=100,
    )
    assert found == [[(0, 5), (1, 5)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(2, 5)]]


def test_orca_lets_a_request_join_in_the_iteration_after_another_has_left():
    found = plans("orca", ((0, 5, 1), (1, 5, 3), (2, 5, 1)), iterations=3, max_batch=2, budget=0, block=4, blocks=100)
    assert found == [[(0, 5), (1, 5)], [(1, 1), (2, 5)], [(1, 1)]]


def test_orca_reserves_the_longest_answer_so_that_fewer_are_admitted():
    # 5 + 11 tokens are 4 blocks of 4: of 7 blocks one request takes 4, and the second waits although its prompt fits
    found = plans("orca", ((0, 5, 11), (1, 5, 11)), iterations=2, max_batch=8, budget=0, block=4, blocks=7)
    assert found == [[(0, 5)], [(0, 1)]]


def test_vllm_v0_computes_prompts_apart_from_next_tokens():
    decider = Batching(
        policy=serving.get("batching", "vllm-v0"), limits=EngineLimits(max_batch=8, budget=100, block=4, blocks=100)
    )
    state, first = decider.decide(decider.begin(), Arrived((NewRequest(0, 60, 9),)))
    state, nothing = decider.decide(state, Arrived((NewRequest(1, 60, 9), NewRequest(2, 60, 9))))
    state, second = decider.decide(state, Computed())  # 60 + 60 tokens exceed the budget of 100
    state, third = decider.decide(state, Computed())
    state, fourth = decider.decide(state, Computed())
    assert nothing == ()
    shares = [computed(one)[0] for one in (first, second, third, fourth)]
    assert shares == [[(0, 60)], [(1, 60)], [(2, 60)], [(0, 1), (1, 1), (2, 1)]]


def test_vllm_v1_cuts_a_prompt_to_what_decoding_leaves_of_the_budget():
    # 16 tokens an iteration: the first prompt of 10 leaves 6 of the second's 20, then 1 + 14 and the rest
    found = plans("vllm-v1", ((0, 10, 9), (1, 20, 9)), iterations=3, max_batch=8, budget=16, block=4, blocks=100)
    assert found == [[(0, 10), (1, 6)], [(0, 1), (1, 14)], [(0, 1), (1, 1)]]


def test_sarathi_admits_a_prompt_only_where_all_of_it_has_blocks():
    # 30 tokens are 8 blocks of 4; of 10 blocks the first prompt holds 3, so that 7 are free
    found = plans("sarathi", ((0, 10, 9), (1, 30, 9)), iterations=2, max_batch=8, budget=16, block=4, blocks=10)
    assert found == [[(0, 10)], [(0, 1)]]
    chunked = plans("vllm-v1", ((0, 10, 9), (1, 30, 9)), iterations=1, max_batch=8, budget=16, block=4, blocks=10)
    assert chunked == [[(0, 10), (1, 6)]]


def test_tensorrt_llm_computes_prompts_whole_beside_decoding():
    # 16 tokens an iteration: the first prompt of 10 leaves 6, too few for the second's 12; then 1 + 12
    found = plans("trtllm", ((0, 10, 9), (1, 12, 9)), iterations=3, max_batch=8, budget=16, block=4, blocks=100)
    assert found == [[(0, 10)], [(0, 1), (1, 12)], [(0, 1), (1, 1)]]
    # a prompt that no iteration has tokens for is computed alone, and those behind it wait for it
    asked = ((0, 4, 2), (1, 20, 9), (2, 4, 9))
    long = plans("trtllm", asked, iterations=4, max_batch=8, budget=16, block=4, blocks=100)
    assert long == [[(0, 4)], [(0, 1)], [(1, 20)], [(1, 1), (2, 4)]]


def test_an_engine_has_its_own_policy_where_none_is_said():
    load = "concurrency=4,requests=8,prompt=10,output=10,engine="
    for name, profile in engines().items():
        assert parse(load + name).engine.policy == profile.policy
    assert parse(load + "trtllm,policy=sarathi").engine.policy == "sarathi"


def test_tensorrt_llm_reserves_the_longest_answer():
    # 5 + 11 tokens are 4 blocks of 4: of 7 blocks one request takes 4, and the second waits although its prompt fits
    found = plans("trtllm", ((0, 5, 11), (1, 5, 11)), iterations=2, max_batch=8, budget=16, block=4, blocks=7)
    assert found == [[(0, 5)], [(0, 1)]]


@pytest.mark.parametrize("policy", ["vllm-v0", "vllm-v1", "sarathi"])
def test_the_request_admitted_last_is_evicted_where_blocks_run_out_and_computed_again(policy):
    # two prompts of 8 hold 2 blocks of 4 each; of 4 blocks (no whole percent of which is a watermark) none is left for
    # the first next token, so that the second request goes and comes back when the first is answered
    decider = Batching(
        policy=serving.get("batching", policy), limits=EngineLimits(max_batch=8, budget=100, block=4, blocks=4)
    )
    state, _ = decider.decide(decider.begin(), Arrived((NewRequest(0, 8, 2), NewRequest(1, 8, 2))))
    state, decisions = decider.decide(state, Computed())
    assert decisions[0] == Evict(1) and [(s.number, s.new) for s in decisions[1].shares] == [(0, 1)]
    state, (_, again) = decider.decide(state, Computed((0,)))
    assert [(s.number, s.new, s.past) for s in again.shares] == [(1, 9, 0)]  # the token it had is computed again too


def test_the_fullest_cache_to_come_is_that_of_the_requests_that_have_not_ended():
    # tokens held 10, 20, 30 with 4, 8, 2 left. Before the first ends (2 left): 60 + 3 * 2 = 66; before the second
    # (4 left): 30 + 2 * 4 = 38 of the two that are there; before the last (8 left): 20 + 8 = 28
    past = [4, 8, 2]
    running = [EngineRequest(NewRequest(i, tokens, left)) for i, (tokens, left) in enumerate(zip((10, 20, 30), past))]
    assert future_peak(running, []) == 66


def test_the_past_says_how_long_an_answer_is_likely_to_be():
    past = [5, 10, 20, 30, 40]
    one = EngineRequest(NewRequest(0, 8, 100))
    assert left_to_generate(one, past) == 20  # the median of all
    assert left_to_generate(EngineRequest(NewRequest(0, 8, 100, generated=15)), past) == 30 - 15  # of 20, 30, 40
    assert (
        left_to_generate(EngineRequest(NewRequest(0, 8, 100, generated=50)), past) == 50
    )  # none was as long: its limit
    assert left_to_generate(EngineRequest(NewRequest(0, 8, 12)), past) == 12


def test_past_future_evicts_fewer_than_admission_by_what_is_free_now():
    # answers are four times as long as prompts, so that a cache filled by admission alone overflows later
    asked = requests(*((0.01 * i, 32, 128) for i in range(40)))
    usual, past = (simulate(replica(policy, blocks=60), asked) for policy in ("vllm-v1", "past-future"))
    assert usual.evictions > 40 and past.evictions == 0


@pytest.mark.parametrize("policy", NAMES)
def test_every_request_is_answered_once_and_in_order_of_its_times(policy):
    rng = np.random.default_rng(5)
    asked = requests(*((at, int(rng.integers(1, 90)), int(rng.integers(1, 30))) for at in np.arange(40) * 0.7))
    served = simulate(replica(policy, blocks=24), asked)
    assert (served.arrival_s <= served.scheduled_s).all() and (served.scheduled_s < served.first_s).all()
    assert (served.first_s <= served.end_s).all()
    assert served.gaps.sum() == (asked.output - 1).sum()  # a gap before every token but the first


@pytest.mark.parametrize("policy", NAMES)
def test_the_log_of_a_decider_replays(policy):
    asked = requests((0.0, 30, 4), (0.5, 40, 8), (3.2, 20, 3))
    one = replica(policy, blocks=6)
    _, log = simulate_logged(one, asked)
    assert replayed(Batching(policy=one.policy, limits=one.limits), log) == log


def test_an_unknown_policy_is_refused_with_the_nearest():
    with pytest.raises(MeshwrightError) as caught:
        serving.get("batching", "vlm-v1")
    assert caught.value.diagnostics[0].code == "W013" and "vllm-v1" in caught.value.diagnostics[0].help


def test_a_policy_of_ones_own_is_found_by_its_name_and_served():
    class OneByOne:
        name, title, code, budget, reserves, watermark = "one-by-one", "one request at a time", 0, 0, False, False

        def plan(self, plan, limits):
            one = plan.next()
            if not plan.running and one is not None:
                plan.admit(one, one.prompt + one.limit)
            for one in plan.running:
                plan.compute(one, one.need)

        def keeps(self, finished, others):
            return not finished

    serving.register("batching", OneByOne())
    try:
        from meshwright.simulate.serve import simulate as serve

        served = serve(replica("one-by-one"), requests((0.0, 8, 2), (0.0, 8, 2)))
        assert served.end_s.tolist() == [2.0, 4.0]  # two iterations of a second each, one request behind the other
    finally:
        serving._OWN["batching"].clear()


def test_answered_requests_of_a_static_batch_leave_when_the_last_other_one_is_withdrawn():
    decider = Batching(
        policy=serving.get("batching", "static"), limits=EngineLimits(max_batch=2, budget=0, block=4, blocks=100)
    )
    state, _ = decider.decide(decider.begin(), Arrived((NewRequest(0, 8, 1), NewRequest(1, 8, 9), NewRequest(2, 8, 1))))
    state, _ = decider.decide(state, Computed((0,)))
    state, _ = decider.decide(state, Withdrawn((1,)))
    state, decisions = decider.decide(state, Computed())
    assert computed(decisions)[0] == [(2, 8)]


def test_flover_computes_one_prompt_at_a_time_and_fuses_it_into_the_next_tokens_of_all():
    found = plans("flover", ((0, 5, 9), (1, 6, 9), (2, 7, 9)), iterations=4, max_batch=2, budget=0, block=4, blocks=100)
    assert found == [[(0, 5)], [(1, 6)], [(0, 1), (1, 1)], [(0, 1), (1, 1)]]


def test_flover_waits_for_a_buffer_of_the_longest_answer():
    # 5 + 11 tokens are 4 blocks of 4: of 7 blocks one request takes 4, and the second waits although its prompt fits
    found = plans("flover", ((0, 5, 11), (1, 5, 11)), iterations=2, max_batch=8, budget=0, block=4, blocks=7)
    assert found == [[(0, 5)], [(0, 1)]]
