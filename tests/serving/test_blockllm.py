"""Blocks that tuned models share: where they lie, where requests go, what is computed together."""

from itertools import product

import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.errors import MeshwrightError
from meshwright.serving.blockllm import BlockInstance, BlockLoad, ChosenInstance, Queued, batched, chosen, placed
from meshwright.spec.serve import parse
from meshwright.spec.zoo import Zoo, zoo


def test_the_last_blocks_of_a_chain_are_a_models_own():
    assert zoo("4:own=2") == Zoo(4, 2) and zoo("4:own=2").text() == "4:own=2" and zoo("4").text() == "4"
    assert Zoo(4, 2).chain(7) == ((-1, 0), (-1, 1), (7, 2), (7, 3)) and Zoo(4, 2).chain(-1)[3] == (-1, 3)
    assert [zoo(text) for text in ("0", "4:own=5", "4:far=1", "x", "4:own=1:own=1")] == [None] * 5


def _busiest(loads, where, places):
    each = [
        sum(one.work / sum(b in some for some in where) for b, one in enumerate(loads) if b in place) for place in where
    ]
    assert len(each) == places
    return max(each)


def test_places_are_as_even_as_of_all_placements_of_one_instance_and_better_where_instances_are_added():
    loads = [BlockLoad(1.0, work) for work in (0.4, 0.25, 0.2, 0.1, 0.05)]
    alone = placed(loads, 2, 3.0)  # room for one more instance
    best = min(
        max(sum(w.work for w, at in zip(loads, where) if at == p) for p in range(2))
        for where in product(range(2), repeat=5)
    )
    assert _busiest(loads, alone, 2) <= best * 1.05 + 1e-9
    assert all(sum(loads[b].num_bytes for b in some) <= 3.0 for some in alone)
    assert placed(loads, 2, 2.0) == ()  # five blocks, and room for four


def test_chains_stay_where_they_are_as_long_as_places_stay_even():
    loads = [BlockLoad(1.0, 0.25), BlockLoad(1.0, 0.25, (0,)), BlockLoad(1.0, 0.25), BlockLoad(1.0, 0.25, (2,))]
    assert placed(loads, 2, 2.0) == ((0, 1), (2, 3))


def test_a_request_leaves_its_keys_and_values_only_where_it_is_computed_sooner_elsewhere():
    here, there = BlockInstance(0, 0.5, holds=True), BlockInstance(1, 0.1, move_s=0.5, again_s=0.6)
    assert chosen([here, there]) == ChosenInstance(0)
    assert chosen([here, there._replace(move_s=0.3)]) == ChosenInstance(1, move=True)
    assert chosen([here, there._replace(again_s=0.2)]) == ChosenInstance(1, again=True)
    assert chosen([here._replace(wait_s=0.6), there]) == ChosenInstance(0)  # as soon there, and nothing to send


def test_next_tokens_come_first_and_prompts_as_far_as_there_is_room():
    one = [Queued(3, 3, 0, 100, 10.0, False), Queued(1, 1, 0, 1, 1.0, True), Queued(2, 2, 5, 1, 1.0, True)]
    assert batched(one, {}, 11.0, 8, 200).numbers == (1, 3)
    assert batched(one, {}, 5.0, 8, 200).numbers == (1,)
    assert batched(one, {}, 11.0, 1, 200).numbers == (1,)
    # nothing free: whoever came last gives way to who came first, and never the other way round
    assert batched(one[1:], {2: (2, 1.0), 9: (9, 3.0)}, 0.0, 8, 200) == ((1,), (9,))
    assert batched([one[0]], {1: (1, 50.0)}, 0.0, 8, 200) == ((), ())


def ask(words, plan="dp4", on="4xa100-80", detail=False):
    model, cluster = mw.load_model("llama2-7b"), mw.load_cluster(on)
    return predict_serving(model, cluster, parse(words), mw.parse_plan(plan), detail=detail)


def test_one_block_at_one_place_is_the_plain_engine_where_one_request_runs_at_a_time():
    words = "concurrency=1,prompt=700,output=20,requests=5,budget=2048"
    plain, block = ask(words, "dp1"), ask(words + ",adapters=3,zoo=1:own=0", "dp1")
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert getattr(block.metrics, name).mean == pytest.approx(getattr(plain.metrics, name).mean, rel=1e-9)


def test_shared_blocks_lie_once_and_batch_the_requests_of_all_models():
    words = "rate=6,prompt=512,output=16,requests=40,adapters=12:zipf=1"
    whole, blocks = ask(words + ",zoo=1:own=1"), ask(words + ",zoo=8:own=2", detail=True)
    weights = [sum(rank.alive["weights"] for rank in found.memory) for found in (whole, blocks)]
    one = 6.74e9 * 2  # bytes of Llama 2 7B
    assert weights[0] >= 12 * one * 0.99 and weights[1] >= one * 0.99
    assert blocks.peak_batch > whole.peak_batch and blocks.fits and blocks.good
    low, high = blocks.metrics.tpot_s.mean_interval
    assert low <= blocks.metrics.tpot_s.mean <= high
    # twelve models on one device of 80 GB: 162 GB whole, 13.5 + 12 * 3.4 = 54 GB in blocks
    with pytest.raises(MeshwrightError, match="do not fit"):
        ask(words + ",zoo=1:own=1", "dp1")
    assert ask(words.replace("rate=6", "rate=1") + ",zoo=8:own=2", "dp1").fits


def test_who_lacks_room_begins_again_and_everybody_is_answered():
    # 33.7 GB of blocks leave 10 GB: 20,000 tokens of 0.5 MB, and 40 requests of 660 want 26,400
    words = "batch=40,prompt=600,output=60,requests=40,adapters=4,zoo=2:own=1,memory=0.53"
    found = ask(words, "dp1")
    assert found.preemptions > 0 and found.metrics.e2e_s.p99 > 0 and found.num_requests == 40


def test_what_blocks_cannot_do_is_said_at_once():
    with pytest.raises(MeshwrightError) as raised:
        ask("rate=1,prompt=100,output=10,requests=5,zoo=64:own=2,prefix_cache=yes,policy=orca")
    assert [d.code for d in raised.value.diagnostics] == ["W014"] * 4
