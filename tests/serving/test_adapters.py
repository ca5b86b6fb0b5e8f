"""LoRA adapters: who may run beside whom, what they take of the cache, and what they cost."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from meshwright import parse_plan
from meshwright.answer.lora import stored_bytes
from meshwright.answer.replica import built
from meshwright.answer.serving import predict_serving
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.serving.adapters import AdapterPool, AdapterRules
from meshwright.serving.batching import Iterate
from meshwright.serving.cache import CacheRules
from meshwright.serving.engine_request import EngineRequest, NewRequest
from meshwright.simulate.serve_pool import served_alone, served_logged
from meshwright.spec import cluster, model
from meshwright.spec.serve import parse
from meshwright.world.decider import replayed
from tests.serving.costs import replica, requests


def asking(number, adapter):
    return EngineRequest(NewRequest(number, 8, 4, adapter=adapter))


def adapted(rows, adapters, *, rules, **limits):
    one = replica("vllm-v1", **limits)
    one = msgspec.structs.replace(one, rules=CacheRules(adapters=rules))
    return one, msgspec.structs.replace(requests(*rows), adapter=np.array(adapters))


def test_two_slots_let_no_third_adapter_run_until_one_is_free():
    pool = AdapterPool(AdapterRules(slots=2))
    a, b, c, again, none = asking(0, 7), asking(1, 8), asking(2, 9), asking(3, 7), asking(4, -1)
    assert pool.allows(a) and pool.use(a) == 0 and pool.use(b) == 0
    assert not pool.allows(c) and pool.allows(again) and pool.allows(none)
    pool.release(a)
    assert pool.allows(c) and pool.loaded() == 2


def test_who_needs_a_free_slot_is_overtaken_by_those_who_do_not():
    # iterations of a second; one slot: request 1 waits for request 0's adapter to be free, request 2 has none
    one, asked = adapted([(0, 8, 3)] * 3, [0, 1, -1], rules=AdapterRules(slots=1))
    assert served_alone(one, asked).end_s.tolist() == [3.0, 6.0, 3.0]


def test_a_merged_adapter_runs_alone():
    one, asked = adapted([(0, 8, 3)] * 3, [0, 1, -1], rules=AdapterRules(slots=1, merged=True))
    assert served_alone(one, asked).end_s.tolist() == [3.0, 6.0, 9.0]


def test_adapters_in_the_cache_take_blocks_until_these_are_needed():
    # 8 blocks of 16 tokens; an adapter takes 3, a request of 8 + 3 tokens one: two with adapters of their own fill the
    # cache, and the third waits for them to leave, though its adapter is there
    one, asked = adapted([(0, 8, 3)] * 3, [0, 1, 0], rules=AdapterRules(blocks=3), blocks=8)
    served, log = served_logged(one, asked)
    assert served.end_s.tolist() == [3.0, 3.0, 6.0] and served.peak_blocks == 8
    assert sum(d.loads for entry in log for d in entry.decisions if isinstance(d, Iterate)) == 2


@pytest.mark.parametrize("rules", [AdapterRules(blocks=2), AdapterRules(slots=3), AdapterRules(slots=1, merged=True)])
@pytest.mark.parametrize("prefix", [False, True])
def test_all_are_answered_and_nothing_is_lost(rules, prefix):
    rng = np.random.default_rng(6)
    rows = list(zip(np.cumsum(rng.exponential(1.5, 60)), rng.integers(1, 90, 60), rng.integers(1, 25, 60)))
    one, asked = adapted(rows, rng.integers(-1, 6, 60), rules=rules, blocks=20)
    one = msgspec.structs.replace(one, rules=msgspec.structs.replace(one.rules, prefix=prefix))
    served, log = served_logged(one, asked)
    assert (served.end_s > 0).all() and served.gaps.sum() == (asked.output - 1).sum()
    assert served_alone(one, asked, skips=False).end_s == pytest.approx(served.end_s)
    decider = one.decider()
    assert replayed(decider, log) == log
    state = decider.begin()
    for entry in log:
        state, _ = decider.decide(state, entry.event)
    assert state.free == 20 and not state.cache.adapters.used


def a_replica(words, plan="tp1", name="llama3-8b"):
    serve = parse(f"rate=4,requests=50,prompt=512,output=64,{words}")
    parts = model.load(name), cluster.load("4xa100"), serve, parse_plan(plan).on(4), serve.drawn()
    return built(*parts, serving_costs(), engine_profile())


def test_an_adapter_of_rank_16_has_the_bytes_of_its_matrices():
    # q, o: 4096 x 4096; k, v: 4096 x 1024 (8 heads of 128): 16 (2 * 8192 + 2 * 5120) numbers in each of 32 layers
    lora = a_replica("adapters=9,adapter_rank=16").replica.lora
    assert stored_bytes(parse("rate=1,prompt=8,output=8,adapters=9"), lora.forward) == 16 * 26624 * 32 * 2
    split = a_replica("adapters=9,adapter_rank=16", "tp4").replica.lora
    assert split.load_s == pytest.approx(lora.load_s / 4)


def test_products_of_adapters_cost_more_with_rank_tokens_and_how_many_they_are():
    small, large = (a_replica(f"adapters=9,adapter_rank={rank}").replica.lora for rank in (8, 64))
    assert small.seconds(16, 1) < small.seconds(16, 16) < large.seconds(16, 16) < large.seconds(4096, 16)
    # 16 adapters of rank 64 and 16 tokens: 16 * 64 * 26624 * 2 bytes a layer at 2 TB/s at most
    assert large.seconds(16, 16) >= 16 * 64 * 26624 * 2 * 32 / 2.039e12


def test_slots_take_memory_from_the_cache_and_a_pool_less_of_it():
    words = "adapters=99,adapter_rank=64,lora=slots"
    usual, many, pooled = (
        a_replica(f"{words},{more}").blocks
        for more in ("adapter_slots=4", "adapter_slots=64", "adapter_slots=64,adapter_pool=8")
    )
    assert many < pooled < usual


def test_adapters_of_latent_attention_and_of_static_batches_are_refused():
    serve = parse("rate=4,requests=5,prompt=64,output=8,adapters=4,policy=static")
    with pytest.raises(MeshwrightError) as caught:
        predict_serving(model.load("deepseek-v2-lite"), cluster.load("1xh100"), serve, parse_plan("tp1"))
    assert [d.code for d in caught.value.diagnostics] == ["W014", "W014"]


def test_models_that_ran_last_stay_and_one_runs_at_a_time():
    pool = AdapterPool(AdapterRules(slots=2, merged=True, alone=True))
    a, b, c, again, last = (asking(number, adapter) for number, adapter in enumerate((7, 8, 9, 7, 8)))
    assert pool.allows(a) and pool.use(a) == 0 and not pool.allows(b)
    for before, then in ((a, b), (b, c)):
        pool.release(before)
        assert pool.allows(then) and pool.use(then) == 0
    assert pool.loaded() == 3 and list(pool.idle) == [8]  # the third took the place of the first, used longest ago
    pool.release(c)
    pool.use(last)
    assert pool.loaded() == 0
    pool.release(last)
    pool.use(again)
    assert pool.loaded() == 1 and list(pool.idle) == [8]


def asked_of_models(slots, *, models="3", on="8xsn40l,copy=125,host=12tb", more=""):
    words = f"concurrency=1,prompt=64,output=2,requests=12,adapters={models},lora=models,adapter_slots={slots}{more}"
    return predict_serving(model.load("llama2-7b"), cluster.load(on), parse(words), parse_plan("tp8"), detail=False)


def test_a_request_waits_for_its_model_over_the_link_unless_it_is_there():
    # 6.74e9 parameters of 2 bytes over eight links of 125 GB/s; with room for all three each comes once
    comes = 6_738_415_616 * 2 / 8 / 125e9
    none, all_ = (asked_of_models(slots).metrics.ttft_s for slots in (1, 3))
    drawn = parse("concurrency=1,prompt=64,output=2,requests=12,adapters=3,lora=models").drawn().adapter.tolist()
    switches = 1 + sum(a != b for a, b in pairwise(drawn))
    assert switches > len(set(drawn))
    assert 12 * (none.mean - all_.mean) == pytest.approx((switches - len(set(drawn))) * comes, rel=0.02)


def test_models_that_the_host_has_no_room_for_are_refused_and_slots_take_the_cache_s_memory():
    with pytest.raises(MeshwrightError, match=r"200 models of 12\.6 GiB do not fit"):
        asked_of_models(2, models="200", on="8xh100,host=2tb")
    with pytest.raises(MeshwrightError, match="models have no rank"):
        asked_of_models(2, more=",adapter_rank=8")
    assert asked_of_models(2).kv_blocks > asked_of_models(3).kv_blocks
    assert not asked_of_models(60, models="100").fits
