"""Serving predictions: their parts add up, their bounds are physical, their directions are right."""

import json

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.latency import times_of
from meshwright.answer.replica import built
from meshwright.answer.serving import predict_serving
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.simulate.serve import simulate
from meshwright.spec.serve import parse
from tests.serving.costs import replica, requests

#: An engine whose clients see a token when it is computed.
AT_ONCE = EngineProfile(name="at once")


def asked(words, *, model="llama3-8b", on="1xh100", plan="tp1", **more):
    return predict_serving(mw.load_model(model), mw.load_cluster(on), parse(words), mw.parse_plan(plan), **more)


@pytest.fixture(scope="module")
def usual():
    return asked("rate=4,prompt=1024,output=128,requests=300,ttft=500ms,tpot=50ms@p90")


def test_times_of_a_request_are_those_of_its_records():
    # iterations of a second: arrival at 0.5 waits half a second, first token at 2, five more behind it
    many = requests((0.0, 8, 3), (0.5, 8, 6), (9.0, 8, 1))
    found = times_of(many, simulate(replica("vllm-v1"), many))
    assert found.ttft.tolist() == [1.0, 1.5, 1.0] and found.queue.tolist() == [0.0, 0.5, 0.0]
    assert found.tpot.tolist()[:2] == [1.0, 1.0] and np.isnan(found.tpot[2])  # one token has no time between tokens
    assert found.e2e.tolist() == [3.0, 6.5, 1.0]


def test_the_causes_sum_to_the_time_of_the_replica():
    found = asked("rate=4,prompt=1024,output=128,requests=300", profile=AT_ONCE)
    records = found.timeline.records["requests"]
    assert sum(found.attribution.values()) == pytest.approx(records["end_s"].max() - 0.0, rel=1e-6)


def test_tokens_are_not_decoded_faster_than_weights_are_read(usual):
    # 8.03e9 parameters less the embedding's 0.53e9, of 2 bytes, at the H100's 3.35 TB/s
    assert usual.metrics.tpot_s.p50 > 2 * 7.5e9 / 3.35e12


def test_intervals_hold_the_mean_and_objectives_are_judged(usual):
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        summary = getattr(usual.metrics, name)
        low, high = summary.mean_interval
        assert low < summary.mean < high and summary.p50 <= summary.p90 <= summary.p99, name
    assert [one.metric for one in usual.objectives] == ["ttft_s", "tpot_s"] and usual.good
    assert usual.metrics.goodput_req_per_s == usual.metrics.throughput_req_per_s * usual.metrics.attainment


def test_an_objective_that_is_missed_is_no():
    found = asked("rate=4,prompt=1024,output=128,requests=100,tpot=1ms")
    assert found.fits and not found.good and found.metrics.attainment == 0.0


def test_a_prefix_cache_that_nothing_can_be_found_in_is_said():
    model, cluster, plan = mw.load_model("llama3.2-1b"), mw.load_cluster("1xh100"), mw.parse_plan("tp1")
    words = "rate=8,prompt=64,output=4,requests=20,prefix_cache=yes"
    alone, shared = (
        predict_serving(model, cluster, parse(text), plan, detail=False) for text in (words, f"{words},prefix=32")
    )
    assert alone.hit_rate == 0 and any("finds nothing" in one for one in alone.warnings)
    assert shared.hit_rate > 0.3 and not shared.warnings


def test_more_requests_a_second_take_longer_each():
    slow, fast = (asked(f"rate={rate},prompt=512,output=64,requests=300", detail=False) for rate in (2, 20))
    assert fast.metrics.tpot_s.mean > slow.metrics.tpot_s.mean and fast.metrics.ttft_s.mean > slow.metrics.ttft_s.mean
    assert fast.peak_batch > slow.peak_batch


def test_tensor_parallel_ranks_answer_faster_and_have_more_cache():
    one, four = (
        asked("rate=1,prompt=512,output=64,requests=50", on=on, plan=plan, detail=False)
        for on, plan in (("1xh100", "tp1"), ("4xh100", "tp4"))
    )
    assert four.metrics.tpot_s.mean < 0.6 * one.metrics.tpot_s.mean and four.kv_blocks > 4 * one.kv_blocks


def test_replicas_share_requests():
    one, two = (asked("rate=30,prompt=512,output=64,requests=200", on=on, detail=False) for on in ("1xh100", "2xh100"))
    assert two.plan.layout.dp == 2 and two.metrics.tpot_s.mean < one.metrics.tpot_s.mean
    assert set(two.timeline.records) == set() or len(two.timeline.records["requests"]["replica"]) == 200


def test_routers_that_look_at_replicas_are_words_of_a_workload(tmp_path):
    # one answer in ten is fifty times as long: in turn, short ones queue behind long ones while the other is free
    (tmp_path / "l.csv").write_text("prompt_tokens,output_tokens\n" + "64,10\n" * 9 + "64,500\n")
    words = f"rate=8,lengths={tmp_path / 'l.csv'},requests=200,max_batch=2,routing="
    turns, looks = (asked(words + name, on="2xh100", detail=False).metrics for name in ("round-robin", "least-loaded"))
    assert looks.ttft_s.mean < 0.7 * turns.ttft_s.mean


def test_prompts_in_iterations_of_their_own_stall_answers_and_chunks_do_not():
    # Agrawal et al., 2403.02310, figure 1: vLLM V0's gaps between tokens have a tail that Sarathi's have not
    words = "rate=3,prompt=4000,output=200,requests=200,policy="
    whole, chunked = (asked(words + policy, profile=AT_ONCE, detail=False).metrics for policy in ("vllm-v0", "sarathi"))
    assert whole.itl_s.p99 > 3 * chunked.itl_s.p99 and whole.ttft_s.mean < chunked.ttft_s.mean


def test_a_closed_loop_keeps_so_many_requests_open():
    found = asked("concurrency=16,prompt=256,output=64,requests=100", detail=False)
    assert found.peak_batch == 16


def test_weights_that_leave_no_room_for_a_cache_do_not_fit():
    found = asked("rate=1,prompt=512,output=64", model="llama3-70b")
    assert not found.fits and not found.good and found.metrics is None and found.tightest.headroom_bytes < 0


def test_a_quantised_cache_has_twice_the_blocks():
    usual, half = (
        asked(f"rate=1,prompt=64,output=8,requests=10{kv}", detail=False).kv_blocks for kv in ("", ",kv=fp8")
    )
    assert half == pytest.approx(2 * usual, abs=1)


def test_blocks_that_are_said_are_those_that_are_used():
    found = asked("rate=9,prompt=512,output=64,requests=100,kv_blocks=100", detail=False)
    assert found.kv_blocks == 100 and found.peak_kv_blocks <= 100


def test_the_json_has_what_machines_read(usual):
    said = json.loads(msgspec.json.encode(usual.to_json()))
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        assert set(said[key]) == {"mean", "p50", "p90", "p99", "mean_interval"}
    wanted = {"fits", "throughput_tokens_per_s", "goodput_req_per_s", "attainment", "kv_blocks", "preemptions"}
    assert wanted | {"peak_memory_bytes", "attribution", "plan"} <= set(said)


@pytest.mark.parametrize(
    ("words", "model", "plan", "codes"),
    [
        ("rate=1,prompt=9000,output=64", "llama3-8b", "tp1", ["W012"]),
        ("rate=1,prompt=64,output=64,policy=orcca", "llama3-8b", "tp1", ["W013"]),
        ("rate=1,prompt=64,output=64,engine=vlm", "llama3-8b", "tp1", ["W013"]),
        ("rate=1,prompt=64,output=64", "llama3-8b", "tp1 zero1", ["W014"]),
        ("rate=1,prompt=64,output=64", "bert-base", "tp1", ["W014"]),
        ("rate=1,prompt=64,output=64", "llama3-8b", "tp3", ["P010", "P011"]),
        ("rate=1,prompt=2000,output=64,kv_blocks=10", "llama3-8b", "tp1", ["W012"]),
    ],
)
def test_what_serving_does_not_take_is_refused(words, model, plan, codes):
    with pytest.raises(MeshwrightError) as caught:
        asked(words, model=model, plan=plan)
    assert sorted({d.code for d in caught.value.diagnostics}) == codes


def test_blocks_that_do_not_fit_into_memory_are_said_not_to():
    found = asked("rate=9,prompt=512,output=64,requests=20,kv_blocks=1m", detail=False)
    assert not found.fits and found.tightest.headroom_bytes < 0 and found.metrics is not None


def test_the_same_question_has_the_same_answer():
    first, again = (asked("rate=8,prompt=1024,output=256,requests=500", detail=False).to_json() for _ in range(2))
    assert first == again


def test_replicas_lie_apart_so_that_their_number_changes_no_price():
    # ranks of a replica are neighbours: four of one device each serve a quarter each, as one replica serves it
    # alone, but for nodes of tables, which depend on the largest batch
    many = asked("batch=40,prompt=256,output=16", on="8xh100", plan="tp2 dp4")
    alone = asked("batch=10,prompt=256,output=16", on="2xh100", plan="tp2")
    assert many.metrics.e2e_s.p99 == pytest.approx(alone.metrics.e2e_s.p99, rel=1e-4)
    far = asked("batch=40,prompt=256,output=16", on="4x8xh100", plan="tp4 pp2 dp4")  # a replica is a node
    near = asked("batch=10,prompt=256,output=16", on="8xh100", plan="tp4 pp2")
    assert far.metrics.e2e_s.p99 == pytest.approx(near.metrics.e2e_s.p99, rel=1e-4)


def test_a_plan_of_fewer_replicas_leaves_devices_free():
    found = asked("batch=20,prompt=256,output=16", on="8xh100", plan="tp2 dp2")
    assert found.good and found.to_json()["num_devices"] == 4 and found.memory[0].multiplicity == 4
    with pytest.raises(MeshwrightError, match="needs 16 ranks"):
        asked("batch=20,prompt=256,output=16", on="8xh100", plan="tp2 dp8")


def test_a_trace_that_names_its_blocks_is_served_by_the_fast_loop_unless_they_are_shared():
    many = msgspec.structs.replace(parse("batch=8,prompt=64,output=4").drawn(), hash_block=512)
    asked_of = (mw.load_model("llama3-8b"), mw.load_cluster("1xh100"))
    for words, fast in (("", True), (",prefix_cache=yes", False)):
        serve = parse(f"batch=8,prompt=64,output=4{words}")
        made = built(*asked_of, serve, mw.parse_plan("tp1 dp1"), many, serving_costs(), engine_profile())
        assert made.replica.compiled is fast


def test_clients_see_tokens_later_than_they_are_computed_by_the_engine_s_front():
    # 20 ms a request, 5 us a token of 512, and 2 iterations later: the time per token and the gaps are the same
    front = msgspec.structs.replace(AT_ONCE, front_us=20000.0, token_us=5.0, front_steps=2.0)
    words = "batch=1,prompt=512,output=64"
    bare, seen = (asked(words, profile=one, detail=False).metrics for one in (AT_ONCE, front))
    later = 0.020 + 512 * 5e-6 + 2 * bare.tpot_s.mean
    assert seen.ttft_s.mean - bare.ttft_s.mean == pytest.approx(later, rel=1e-6)
    assert seen.e2e_s.mean - bare.e2e_s.mean == pytest.approx(later, rel=1e-6)
    assert seen.tpot_s == bare.tpot_s


def test_iterations_beyond_graphs_have_a_pace_of_their_own():
    slow = msgspec.structs.replace(AT_ONCE, prompts=2.0, layer_us=0.0)
    words = "batch=1,prompt=4096,output=32"
    usual, slower = (asked(words, profile=one, detail=False).metrics for one in (AT_ONCE, slow))
    assert slower.ttft_s.mean > 1.8 * usual.ttft_s.mean and slower.tpot_s.mean == pytest.approx(usual.tpot_s.mean)


def test_layers_with_experts_or_latent_attention_take_the_host_longer_to_issue():
    from meshwright.answer.replica import host_times

    profile = msgspec.structs.replace(AT_ONCE, layer_us=100.0, experts_us=50.0, latent_us=30.0)
    serve = parse("batch=1,prompt=8,output=2")
    # Mixtral has experts in all of its 32 layers, Llama-3-8B in none; DeepSeek-V3 in 58 of 61, all of latent attention
    names = ("mixtral-8x7b", "llama3-8b", "deepseek-v3")
    times = [host_times(profile, mw.load_model(name), serve).eager_s for name in names]
    assert times == pytest.approx([32 * 150e-6, 32 * 100e-6, 61 * 130e-6 + 58 * 50e-6])
