"""Answers for plans of pools that serve: prefill and decode apart, on equal and on unlike devices."""

import itertools

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.lower.forward import Forward
from meshwright.lower.handover import KvCrossing, pairs
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan, parse
from meshwright.spec.serve import parse as parse_serve
from meshwright.work import Collective

LLAMA = mw.load_model("llama3-8b")  # 32 layers of 8 heads of 128: 131,072 bytes a token
NODE = mw.load_cluster("8xh100")
WORDS = "rate=20,prompt=1024,output=64,requests=120"
SPLIT = "prefill=[tp2 dp2 on=0:4] + decode=[tp1 dp4 on=4:8] prefill->decode:kv"


#: An engine whose clients see a token when it is computed, so that records are those of the replicas and their links.
AT_ONCE = msgspec.structs.replace(engine_profile("default"), front_us=0.0, token_us=0.0, front_steps=0.0)


def answer(plan=SPLIT, words=WORDS, cluster=NODE, detail=False):
    return predict_serving(LLAMA, cluster, parse_serve(words), parse(plan), detail=detail, profile=AT_ONCE)


@pytest.fixture(scope="module")
def usual():
    return answer(words=f"{WORDS},ttft=1s,tpot=50ms", detail=True)


def records(prediction):
    return prediction.timeline.records["requests"]


def test_every_request_goes_from_a_prefill_to_a_decode_replica(usual):
    found = records(usual)
    assert set(found["replica"]) == {0, 1} and set(found["decode_replica"]) == {2, 3, 4, 5}
    order = ("arrival_s", "scheduled_s", "first_s", "pulled_s", "joined_s", "end_s")
    assert all((found[a] <= found[b]).all() for a, b in itertools.pairwise(order))
    assert [known.label for known in usual.timeline.ranks][1:3] == ["prefill 1", "decode 0"]
    assert {counter.rank for counter in usual.timeline.counters} == set(range(6))


def test_a_cache_takes_what_its_bytes_take_between_the_ranks_that_have_it(usual):
    # 1024 tokens of 131,072 bytes leave two ranks and arrive on one: 2^27 bytes through its port of NVLink
    group = Mesh(Plan(layout=Layout(dp=8)), NODE).pair(0, 4)
    alone = serving_costs().price(Collective(op="send", num_bytes=2.0**27, group=group), NODE.islands[0].device)
    found = records(usual)
    assert (found["joined_s"] - found["pulled_s"]).min() == pytest.approx(alone.seconds, rel=1e-9)
    assert usual.transfers.mean_bytes == 2**27 and usual.transfers.requests == 120


def test_the_stages_of_a_request_sum_to_its_whole_time(usual):
    assert sum(usual.transfers.stages_s.values()) == pytest.approx(usual.metrics.e2e_s.mean)


def test_causes_sum_to_the_time_of_the_replicas_and_of_the_links(usual):
    # a prefill replica is there until its last cache has gone, a decode replica until its last answer
    found, mine = dict(usual.attribution), records(usual)
    links = found.pop("kv links")
    assert 0 < links <= (mine["joined_s"] - mine["pulled_s"]).sum() * (1 + 1e-9)
    there = sum(mine["joined_s"][mine["replica"] == one].max() for one in (0, 1))
    there += sum(mine["end_s"][mine["decode_replica"] == one].max() for one in (2, 3, 4, 5))
    assert sum(found.values()) == pytest.approx(there, rel=1e-9) and found["idle"] > 0


def test_the_use_of_devices_is_that_of_all_pools(usual):
    # as on the same devices, alike and together: 120 answers of 64 tokens and their prompts need the same operations
    together = answer("tp1 dp8", detail=True)
    per_answer = [found.usage.mfu * span_of(found) for found in (usual, together)]
    assert per_answer[0] == pytest.approx(per_answer[1], rel=1e-3)
    assert usual.usage.power_w > 0 and 0 < usual.usage.busy < 1


def span_of(found):
    return records(found)["end_s"].max() - records(found)["arrival_s"].min()


def test_both_pools_are_in_the_memory_and_the_json(usual):
    found = usual.to_json()
    assert [(rank["rank"], rank["multiplicity"]) for rank in found["memory"]] == [
        ("prefill: every rank", 4),
        ("decode: every rank", 4),
    ]
    assert [(pool["name"], pool["role"], pool["replicas"], pool["devices"]) for pool in found["pools"]] == [
        ("prefill", "prefill", 2, 2),
        ("decode", "decode", 4, 1),
    ]
    assert found["transfers"]["moved_s"]["mean"] > 0 and found["num_devices"] == 8
    low, high = found["ttft_s"]["mean_interval"]
    assert low < found["ttft_s"]["mean"] < high and found["good"]


def test_layers_sent_one_by_one_arrive_sooner():
    whole, layerwise = answer(), answer(words=f"{WORDS},kv_send=layerwise")
    assert 0 < layerwise.transfers.stages_s["sending"] < 0.2 * whole.transfers.stages_s["sending"]


def test_unlike_devices_compute_prompts_and_answers():
    # the same pools on H100s alone: prompts take the same there, answers longer on A100s, caches longer between nodes
    mixed = mw.load_cluster("8xh100+8xa100")
    plan = "prefill=[tp2 dp2 on=0:4] + decode=[dp4 on=8:12] prefill->decode:kv"
    both, alike = answer(plan, cluster=mixed), answer()
    assert both.metrics.ttft_s.mean == pytest.approx(alike.metrics.ttft_s.mean, rel=1e-6)
    assert both.metrics.tpot_s.mean > 1.2 * alike.metrics.tpot_s.mean
    assert both.transfers.moved_s.mean > 5 * alike.transfers.moved_s.mean


def test_a_pool_without_links_serves_from_end_to_end():
    found = answer("p=[dp1 on=0:1] + d=[dp1 on=1:2] + w=[dp1 on=2:3] p->d:kv", detail=True)
    mine = records(found)
    whole = mine["replica"] == 2
    assert (
        0 < whole.sum() < 120 and (mine["decode_replica"][whole] == 2).all() and (mine["joined_s"][whole] == -1).all()
    )
    assert [one.role for one in found.pools] == ["prefill", "decode", "prefill and decode"]


def crossing(first, second, model=LLAMA, cluster=NODE):
    made = [Forward(model, parse(text).on(1), Mesh(parse(text).on(1), cluster)) for text in (first, second)]
    return KvCrossing(*made)


@pytest.mark.parametrize(
    ("first", "second", "sent", "received", "stages"),
    [
        ("tp2", "tp1", 65536, 131072, [(0, 0)]),
        ("tp1", "tp2", 131072, 65536, [(0, 0)]),
        ("pp2", "tp2", 65536, 65536, [(0, 0), (1, 0)]),  # a stage sends 16 layers, half of each to each of two ranks
        ("pp2", "pp4", 65536, 32768, [(0, 0), (0, 1), (1, 2), (1, 3)]),
    ],
)
def test_ranks_send_their_layers_and_receive_their_heads(first, second, sent, received, stages):
    found = crossing(first, second)
    assert found.bytes_of(1) == (sent, received) and list(found.stages) == stages


def test_heads_that_several_ranks_keep_are_sent_to_each():
    # 8 key-value heads on 16 ranks: each keeps a whole one of 16,384 bytes a token, and one rank sends them all
    wide = mw.load_cluster("2x8xh100")
    assert crossing("tp1", "tp16", cluster=wide).bytes_of(1) == (16 * 16384, 16384)


def test_stages_in_two_nodes_meet_over_the_network():
    pools = parse("p=[tp4 dp2 on=0:8] + d=[tp4 dp2 on=8:16] p->d:kv").on(16).pools
    wide = mw.load_cluster("2x8xh100")
    mesh = Mesh(Plan(layout=Layout(dp=16)), wide)
    found = pairs(*pools, crossing("tp4", "tp4", cluster=wide), mesh)
    assert set(found) == {(0, 0), (0, 1), (1, 0), (1, 1)} and all(g.hops[-1].scale_out for (g,) in found.values())


def test_a_prompt_that_a_pool_can_never_hold_is_refused():
    with pytest.raises(MeshwrightError, match="W012"):
        answer(words=f"{WORDS},kv_blocks=10")


def test_a_pool_whose_weights_leave_no_room_does_not_fit():
    model = mw.load_model("llama3-70b")
    found = predict_serving(model, NODE, parse_serve(WORDS), parse("p=[tp4 on=0:4] + d=[dp4 on=4:8] p->d:kv"))
    assert not found.fits and found.metrics is None and found.tightest.rank == "d: every rank"


def test_requests_of_one_token_stay_where_their_prompt_is_computed():
    found = answer(words="rate=20,prompt=1024,output=1,requests=20")
    assert found.transfers.requests == 0 and found.transfers.mean_bytes == 0.0
    assert np.array_equal(
        records(answer(words="rate=20,prompt=512,output=1,requests=4", detail=True))["joined_s"], [-1] * 4
    )


def test_the_workload_says_how_caches_are_sent():
    serve = parse_serve(f"{WORDS},kv_send=layerwise")
    assert serve.engine.kv_send == "layerwise" and parse_serve(serve.text()) == serve
    assert msgspec.structs.replace(serve.engine, kv_send="whole") == parse_serve(WORDS).engine


def test_clients_of_pools_see_tokens_as_late_as_those_of_replicas_that_do_both():
    """A prompt alone takes the same on a device of either; the engine's front is behind both."""
    words = "rate=0.2,prompt=512,output=32,requests=20"
    apart, both = (
        predict_serving(mw.load_model("llama3-8b"), mw.load_cluster("2xh100"), parse_serve(words), mw.parse_plan(plan))
        for plan in ("prefill=[tp1 on=0:1] + decode=[tp1 on=1:2] prefill->decode:kv", "dp2")
    )
    assert apart.metrics.ttft_s.mean == pytest.approx(both.metrics.ttft_s.mean, rel=0.05)
    assert sum(apart.transfers.stages_s.values()) == pytest.approx(apart.metrics.e2e_s.mean, rel=1e-9)


def test_the_cache_of_an_answer_is_that_of_the_fullest_pool(usual):
    shares = {pool.name: pool.peak_kv_blocks / pool.kv_blocks for pool in usual.pools}
    assert usual.peak_kv_blocks / usual.kv_blocks == max(shares.values()) <= 1
