"""The serving simulator against hand calculations, and its fast loop against the plain one."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.errors import MeshwrightError, remarking
from meshwright.serving.cache import CacheRules
from meshwright.serving.speculative import Drafts
from meshwright.simulate.guessing import Guesses
from meshwright.simulate.serve import SLOWLY, simulate
from meshwright.simulate.serve_loop import serve_loop
from meshwright.simulate.serve_pool import served_alone
from meshwright.simulate.served import GAP_EDGES, HostTimes
from tests.serving.costs import linear_costs, replica, requests

TIMES = ("arrival_s", "scheduled_s", "first_s", "end_s")


def plainly(one, asked):
    """Every iteration by itself."""
    return served_alone(one, asked, skips=False)


COSTS = linear_costs(base=5e-3, token=2e-5, sampled=1e-5, decode=3e-7, prefill=1e-5, tokens=1 << 17)


def test_a_request_alone_takes_its_prompt_and_its_tokens_one_after_the_other():
    # 10 ms an iteration, 1 ms a token of the prompt's 20; then 4 tokens of 10 + 1 ms, with 0.1 ms per token of context:
    # 21, 22, 23, 24 of them. First token after 30 ms, the last after 30 + 4 * 11 + 0.1 * 90 = 83 ms
    costs = linear_costs(base=0.010, token=0.001, decode=0.0001)
    served = simulate(replica("vllm-v1", costs), requests((2.0, 20, 5)))
    assert served.first_s[0] - 2.0 == pytest.approx(0.030)
    assert served.end_s[0] - 2.0 == pytest.approx(0.083)
    assert served.spent_s.tolist() == pytest.approx([0.030 + 4 * 0.011, 0.0, 0.009, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0])


def test_what_arrives_in_an_iteration_joins_the_next_one():
    # iterations of a second each: the request of 0.5 s waits until 1 s, and has its token at 2 s
    served = simulate(replica("vllm-v1"), requests((0.0, 8, 3), (0.5, 8, 1)))
    assert served.scheduled_s.tolist() == [0.0, 1.0] and served.first_s.tolist() == [1.0, 2.0]


def test_a_closed_loop_asks_the_next_when_one_is_answered():
    # iterations of a second each, two open at a time: the third comes at 2 s, when the first two are answered
    served = simulate(replica("vllm-v1"), requests((0, 8, 2), (0, 8, 2), (0, 8, 2), concurrency=2))
    assert served.arrival_s.tolist() == [0.0, 0.0, 2.0] and served.end_s.tolist() == [2.0, 2.0, 4.0]


def test_a_pipeline_of_two_stages_computes_two_requests_in_the_time_of_one():
    # a second for each token: alone a request's token takes a second; of two, each is a microbatch of a round
    costs = linear_costs(token=1.0)
    one = simulate(replica("vllm-v1", costs, stages=2), requests((0.0, 1, 3)))
    two = simulate(replica("vllm-v1", costs, stages=2), requests((0.0, 1, 3), (0.0, 1, 3)))
    assert one.end_s.tolist() == [3.0] and two.end_s.tolist() == [3.0, 3.0]


def test_without_graphs_an_iteration_takes_what_its_host_does_at_least():
    host = HostTimes(step_s=0.001, request_s=0.002, eager_s=0.050, graph_tokens=1)
    served = simulate(replica("vllm-v1", linear_costs(base=0.010), host=host), requests((0.0, 8, 3)))
    # the prompt: 50 ms of host instead of 10 of device; two next tokens from graphs; 1 + 2 ms each
    assert served.end_s[0] == pytest.approx(0.053 + 2 * 0.013)


def test_a_wave_of_requests_waits_at_the_front_one_after_the_other():
    # 10 ms a request and 0.1 ms a token of its prompt: the k-th is through when the one before it is, and its own time
    # is over (Lindley); whoever comes to an empty line waits for itself alone
    host = HostTimes(serial_s=0.01, serial_token_s=1e-4)
    asked = requests((0.0, 100, 1), (0.0, 200, 1), (0.0, 50, 1), (1.0, 100, 1))
    one = replica("vllm-v1", linear_costs(base=1e-3), host=host)
    served = simulate(one, asked)
    assert served.scheduled_s == pytest.approx([0.02, 0.05, 0.065, 1.02])
    assert served.arrival_s.tolist() == [0.0, 0.0, 0.0, 1.0]
    # in a closed loop the next one comes when one is answered
    loop = simulate(
        replica("vllm-v1", linear_costs(base=1e-3), host=host), requests(*[(0.0, 100, 1)] * 3, concurrency=1)
    )
    assert loop.scheduled_s == pytest.approx([0.02, 0.041, 0.062]) and loop.arrival_s == pytest.approx(
        [0, 0.021, 0.042]
    )


def test_tokens_leave_an_engine_one_after_the_other_and_bound_how_many_come_a_second():
    # iterations of 10 ms whose two tokens take 2 * 8 ms to leave: those of the k-th are out at 10 + 16 k ms, though the
    # engine is done with 4 of them at 40 ms; who waits for an answer comes at 74 ms, with its tokens at 84 + 16 k ms
    host = HostTimes(stream_s=8e-3)
    asked = requests(*[(0.0, 1, 4)] * 4, concurrency=2)
    served = simulate(replica("vllm-v1", linear_costs(base=0.01), host=host), asked)
    assert served.first_s == pytest.approx([0.026, 0.026, 0.1, 0.1])
    assert served.end_s == pytest.approx([0.074, 0.074, 0.148, 0.148])
    assert served.arrival_s == pytest.approx([0, 0, 0.074, 0.074])
    # where they leave in less time than an iteration takes, they are that much later
    quick = replica("vllm-v1", linear_costs(base=0.01), host=HostTimes(stream_s=2e-3))
    assert simulate(quick, requests(*[(0.0, 1, 4)] * 2)).end_s == pytest.approx([0.044, 0.044])


@pytest.mark.parametrize("policy", serving.names("batching"))
@pytest.mark.parametrize("concurrency", [0, 20])
@pytest.mark.parametrize(
    ("blocks", "stages", "eager", "serial_s", "stream_s"),
    [(400, 1, 0.0, 0.0, 0.0), (400, 3, 9e-3, 0.02, 4e-4), (4000, 1, 9e-3, 0.0, 1e-3), (4000, 3, 0.0, 0.02, 0.0)],
)
def test_the_fast_loop_equals_the_plain_one(policy, concurrency, blocks, stages, eager, serial_s, stream_s):
    rng = np.random.default_rng(blocks + stages + concurrency)
    at = np.arange(90) * 0.05 if concurrency else np.cumsum(rng.exponential(1 / 30, 90))
    asked = requests(*zip(at, rng.integers(1, 1500, 90), rng.integers(1, 120, 90)), concurrency=concurrency)
    front = {"serial_s": serial_s, "serial_token_s": 1e-3 * serial_s, "stream_s": stream_s}
    host = HostTimes(step_s=1e-3, request_s=1e-5, eager_s=eager, graph_tokens=16, **front)
    one = replica(policy, COSTS, blocks=blocks, stages=stages, host=host, budget=700)
    fast, plain = simulate(one, asked), plainly(one, asked)
    for name in TIMES:
        assert getattr(fast, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    assert fast.evicted.tolist() == plain.evicted.tolist()
    assert (fast.iterations, fast.peak_blocks, fast.peak_batch) == (
        plain.iterations,
        plain.peak_blocks,
        plain.peak_batch,
    )
    assert fast.spent_s == pytest.approx(plain.spent_s, rel=1e-9)
    assert np.array_equal(fast.tokens_seen, plain.tokens_seen)
    middle = [np.searchsorted(np.cumsum(s.gaps), s.gaps.sum() / 2) for s in (fast, plain)]
    assert abs(middle[0] - middle[1]) <= 2  # of edges 2% apart: a skipped run counts its mean


@pytest.mark.parametrize("policy", ["vllm-v1", "sarathi", "trtllm"])
@pytest.mark.parametrize(
    ("concurrency", "blocks", "gate"), [(0, 400, {}), (20, 4000, {}), (20, 4000, {"batch_wait": 5, "groups": 4})]
)
def test_the_fast_loop_guesses_as_the_plain_one(policy, concurrency, blocks, gate):
    rng = np.random.default_rng(blocks + concurrency)
    at = np.zeros(70) if concurrency else np.cumsum(rng.exponential(1 / 30, 70))
    asked = requests(*zip(at, rng.integers(1, 1500, 70), rng.integers(1, 120, 70)), concurrency=concurrency)
    one = replica(
        policy, COSTS, blocks=blocks, stages=2, host=HostTimes(step_s=1e-3, eager_s=9e-3, stream_s=8e-4), budget=700
    )
    # more tokens of prompts in an iteration than the draft model's table has
    draft = linear_costs(base=5e-4, token=2e-6, sampled=1e-6, decode=3e-8, prefill=1e-6, tokens=1 << 9)
    guessing = Guesses(policy=serving.get("speculation", "speculative"), accept=0.6, draft=draft)
    limits = msgspec.structs.replace(one.limits, **gate)
    one = msgspec.structs.replace(one, limits=limits, drafts=Drafts(count=3), guessing=guessing)
    fast, plain = simulate(one, asked), plainly(one, asked)
    assert one.compiled
    for name in TIMES:
        assert getattr(fast, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    assert (fast.iterations, fast.evictions, fast.gaps.tolist()) == (
        plain.iterations,
        plain.evictions,
        plain.gaps.tolist(),
    )
    assert fast.spent_s == pytest.approx(plain.spent_s, rel=1e-9)


def test_runs_of_equal_iterations_are_skipped():
    served = simulate(replica("vllm-v1", COSTS), requests((0.0, 500, 20_000)))
    assert served.iterations == 20_000 and served.runs < 10


def test_the_compiled_loop_equals_itself_run_by_python():
    rng = np.random.default_rng(1)
    asked = requests(*zip(np.cumsum(rng.exponential(0.03, 60)), rng.integers(1, 900, 60), rng.integers(1, 60, 60)))
    one = replica("sarathi", COSTS, blocks=300)
    expected = plainly(one, asked)
    compiled, serve_loop._call = serve_loop._call, None
    try:
        load, serve_loop._load = serve_loop._load, lambda arguments: False
        alone = simulate(one, asked)
    finally:
        serve_loop._call = compiled
        serve_loop._load = load
    assert alone.end_s == pytest.approx(expected.end_s, rel=1e-9)


def test_what_the_cache_can_never_hold_is_refused_by_its_line():
    asked = requests((0.0, 8, 8), (0.0, 100, 60), (0.0, 8, 8), (0.0, 300, 1))
    with pytest.raises(MeshwrightError) as caught:
        simulate(replica("vllm-v1", block=16, blocks=9), asked)  # 144 tokens
    (found,) = caught.value.diagnostics
    assert found.code == "W012" and "2 of 4 requests" in found.message and "144" in found.message


def test_gaps_between_tokens_fall_into_their_bins():
    served = simulate(replica("vllm-v1", linear_costs(base=0.02)), requests((0.0, 8, 101)))
    (bins,) = np.nonzero(served.gaps)
    assert len(bins) == 1 and GAP_EDGES[bins[0]] <= 0.02 < GAP_EDGES[bins[0] + 1] and served.gaps.sum() == 100


def shared_sessions():
    """Sessions, priorities, tenants and shared prefixes."""
    rng = np.random.default_rng(8)
    asked = requests(*zip(np.cumsum(rng.exponential(0.04, 80)), rng.integers(20, 900, 80), rng.integers(1, 90, 80)))
    chains = [np.concatenate([np.arange(6) + 100 * (i % 3), 10_000 + 100 * i + np.arange(60)]) for i in range(80)]
    return msgspec.structs.replace(
        asked,
        priority=rng.integers(0, 3, 80),
        tenant=rng.integers(0, 3, 80),
        after=np.where(np.arange(80) % 5 == 4, np.arange(80) - 2, -1),
        hashes=np.concatenate(chains),
        hash_ptr=np.arange(81) * 66,
    )


RULES = {
    "plain": CacheRules(),
    "prefix": CacheRules(prefix=True, unit=16),
    "host": CacheRules(prefix=True, unit=16, host_blocks=60),
    "swap": CacheRules(swap=True, host_blocks=40),
}


@pytest.mark.parametrize(
    ("policy", "order"),
    [*((name, "fcfs") for name in serving.names("batching")), *(("vllm-v1", name) for name in serving.names("order"))],
)
def test_runs_of_equal_iterations_and_sequences_advanced_together_change_nothing(policy, order):
    # every rule of the cache with every policy and order: what is skipped is what its iterations are, one by one
    asked = shared_sessions()
    for name, rules in RULES.items():
        one = msgspec.structs.replace(
            replica(policy, COSTS, blocks=180, budget=300),
            order=serving.get("order", order),
            rules=rules,
            block_s=1e-4,
        )
        skipped, plain = served_alone(one, asked), plainly(one, asked)
        assert skipped.runs < skipped.iterations == plain.iterations or not getattr(one.policy, "steady", True)
        for time in TIMES:
            assert getattr(skipped, time) == pytest.approx(getattr(plain, time), rel=1e-9), (name, time)
        assert skipped.spent_s == pytest.approx(plain.spent_s, rel=1e-9)
        for count in ("evictions", "swaps", "peak_blocks", "peak_batch"):
            assert getattr(skipped, count) == getattr(plain, count), (name, count)
        assert skipped.evicted.tolist() == plain.evicted.tolist()
        assert skipped.cached.tolist() == plain.cached.tolist()
        assert skipped.gaps.sum() == plain.gaps.sum() == (asked.output - 1).sum()
        if policy == "vllm-v1" and order == "fcfs":
            assert skipped.evictions > 0
            assert (skipped.cached.sum() > 0) == (name in ("prefix", "host")) and (skipped.swaps > 0) == (
                name == "swap"
            )


@pytest.mark.parametrize("seed", [47, 112, 205])
def test_who_waits_for_a_full_cache_of_shared_prefixes_ends_a_run_of_equal_iterations(seed):
    # as blocks that nobody holds leave, the first who waits finds less of its prefix, and a chunk of it may fit
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(rng.choice([0.02, 0.05, 0.1]), 60))
    asked = requests(*zip(at, rng.integers(20, 700, 60), rng.integers(1, 120, 60)))
    group = rng.integers(0, 4, 60)
    shared = [np.arange(int(rng.integers(0, 20))) + 100 * group[i] for i in range(60)]
    chains = [np.concatenate([part, 10_000 + 100 * i + np.arange(60)]) for i, part in enumerate(shared)]
    ptr = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])])
    asked = msgspec.structs.replace(asked, hashes=np.concatenate(chains), hash_ptr=ptr)
    blocks, budget = int(rng.integers(60, 200)), int(rng.choice([200, 400, 2000]))
    one = replica("vllm-v1", COSTS, blocks=blocks, budget=budget)
    one = msgspec.structs.replace(one, rules=CacheRules(prefix=True, unit=16))
    assert served_alone(one, asked).end_s == pytest.approx(plainly(one, asked).end_s, rel=1e-9)


def test_many_requests_outside_of_the_compiled_loop_are_said_to_take_long(monkeypatch):
    told = []
    monkeypatch.setattr("meshwright.simulate.serve.PATIENCE_TOKENS", 10)
    one = replica("vllm-v1")
    ngram = Guesses(policy=serving.get("speculation", "speculative"), accept=0.6, draft=None)
    slow = msgspec.structs.replace(one, drafts=Drafts(count=3), guessing=ngram)
    with remarking(told.append):
        simulate(one, requests((0.0, 8, 20)))
        simulate(slow, requests((0.0, 8, 9)))
        assert one.compiled and not slow.compiled and told == []
        simulate(slow, requests((0.0, 8, 20)))
    assert told == [SLOWLY] and "requests=1000" in SLOWLY
