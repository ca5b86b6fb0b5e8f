"""State off the device: which transfers a step has, how many bytes they move, and what every tier holds."""

import re
from functools import cache
from itertools import product

import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.answer.serving import predict_serving
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.lower import lower
from meshwright.lower.tier_sizes import rate_gb_s
from meshwright.lower.tiers import misses
from meshwright.plan import check, parse
from meshwright.report.facts import fit
from meshwright.report.remedies import remedies
from meshwright.spec.cluster import load
from meshwright.spec.cluster_names import share_of_node
from meshwright.spec.model import load as load_model
from meshwright.spec.serve import parse as parse_serve
from meshwright.spec.workload import parse as parse_train
from tests.random_plans import GPT, LLAMA

TRAIN = parse_train("batch=16,seq=128")
NODE = load("8xa100")
EVERYTHING = "params:nvme+grads:nvme+optimizer:nvme+activations:nvme"


@cache
def answer(words, cluster="8xa100", model=GPT):
    return predict(model, load(cluster), TRAIN, parse(words), detail=False)


def moved(words, cluster=NODE):
    """Bytes that one rank of the first class moves by (name of the transfer)."""
    lowered = lower(parse(words).on(cluster.num_devices), GPT, cluster, TRAIN)
    graph, out = lowered.graph, {}
    rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    for task in np.flatnonzero(rank == 0).tolist():
        program = lowered.programs[graph.cost_key[task]]
        if program.kind == "transfer":
            out[program.name] = out.get(program.name, 0.0) + program.work.num_bytes
    return out


def fewest(items, room):
    """The fewest fetches that any rule of eviction can have, tried one after the other."""

    @cache
    def from_here(place, held):
        if place == len(items):
            return 0
        if items[place] in held:
            return from_here(place + 1, held)
        kept = held | {items[place]}
        if len(kept) <= room:
            return 1 + from_here(place + 1, kept)
        return 1 + min(from_here(place + 1, kept - {one}) for one in held)

    return from_here(0, frozenset())


def test_no_rule_fetches_less_often_than_to_evict_what_is_used_next_last():
    rng = np.random.default_rng(0)
    for _ in range(40):
        items, room = rng.integers(0, 5, 12), int(rng.integers(1, 4))
        found = misses(items, room)
        assert len(found.use) == fewest(tuple(items.tolist()), room)
        assert np.all(found.after < found.use)  # what makes room was used before


def test_layers_at_the_turn_of_a_step_are_fetched_once_for_both_passes():
    # 12 layers forward and back, room for the one at work and two more: at the turn three are there already, and
    # evicting what is used next last keeps the first two from the end of one microbatch to the next
    uses = np.array([*range(12), *range(11, -1, -1)] * 2)
    assert len(misses(uses, 3).use) == 12 + 9 + 9 + 9
    # of a stack that is run forward and back nothing fetches less
    assert len(misses(uses, 3).use) == fewest(tuple(uses.tolist()), 3)


def test_every_rank_moves_its_own_shard_of_the_model_and_no_more():
    # 8 ranks of zero3: an eighth of 2 bytes a weight for the update's result, of 4 for a gradient, of 12 for AdamW's
    # two moments and the master, each way
    each = GPT.num_params / 8
    found = moved("dp8 zero3 mb2 offload=params:nvme+optimizer:nvme")
    assert found["gradients to the host"] == pytest.approx(4 * each, rel=1e-3)
    assert found["moments from drives"] == found["moments to drives"] == pytest.approx(12 * each, rel=1e-3)
    assert found["parameters to drives"] == pytest.approx(2 * each, rel=1e-3)
    fetched = found["parameters to the device"]
    assert fetched == found["parameters from drives"]
    assert 2 * each < fetched < 2 * 2 * each  # forward and backward, but for layers that are there from the forward


def test_an_update_by_the_host_copies_gradients_out_and_weights_in():
    found = moved("dp8 zero1 mb2 offload=optimizer")
    each = GPT.num_params / 8
    assert found["gradients to the host"] == pytest.approx(4 * each, rel=1e-3)
    assert found["updated parameters to the device"] == pytest.approx(2 * each, rel=1e-3)
    assert found["update by the host"] == pytest.approx(
        34 * each, rel=1e-3
    )  # the norm's 4, 4 + 12 read, 12 + 2 written


def test_gradients_that_accumulate_on_the_host_leave_after_every_microbatch():
    last, every = (moved(f"dp8 zero2 mb1 offload=optimizer{more}") for more in ("", "+grads"))
    assert every["gradients to the host"] == pytest.approx(2 * last["gradients to the host"])
    assert "gradients added by the host" in every
    assert "gradients added by the host" not in last


def test_what_leaves_the_device_lies_in_the_tier_that_was_said():
    plain = answer("dp8 zero1 mb1").memory[0].alive
    there = answer("dp8 zero1 mb1 offload=optimizer")
    assert there.memory[0].alive["optimizer"] == 0
    (host,) = there.tiers
    assert host.alive["optimizer"] == pytest.approx(8 * plain["optimizer"])
    assert host.capacity_bytes == pytest.approx(0.95 * NODE.islands[0].node.host_memory_bytes)
    half = answer("dp8 zero1 mb1 offload=optimizer@0.5")
    assert half.memory[0].alive["optimizer"] + half.tiers[0].alive["optimizer"] / 8 == pytest.approx(plain["optimizer"])
    host, drives = answer(f"dp8 zero3 mb1 full offload={EVERYTHING}").tiers
    assert drives.alive["optimizer"] == pytest.approx(12 * GPT.num_params, rel=1e-3)
    assert drives.alive["parameters"] == pytest.approx(2 * GPT.num_params, rel=1e-3)
    assert set(host.alive) == {"buffers"}


def test_the_slowest_link_bounds_a_step_and_fast_ones_leave_no_trace():
    each = GPT.num_params / 8
    slow = answer("dp8 zero3 mb2 offload=optimizer", "8xa100,copy=0.1")
    assert slow.step_time_s > 4 * each / 0.1e9
    assert slow.attribution["offload"] > 0.9 * 4 * each / 0.1e9
    plain = answer("dp8 mb2 zero3")
    drives = answer("dp8 mb2 zero3 offload=optimizer:nvme", "8xa100,nvme=1tb@0.5/0.25")
    assert drives.step_time_s > plain.step_time_s + 12 * GPT.num_params / 0.5e9
    quick = answer("dp8 mb2 zero3 offload=activations", "8xa100,copy=9000")
    assert quick.attribution["offload"] < 0.01 * quick.step_time_s


def test_a_delayed_update_takes_no_time_of_its_own_while_the_next_step_is_longer():
    words, where = "dp8 zero1 mb1 offload=optimizer", "8xa100,host=1tb@20"
    now, late = (answer(words + more, where) for more in ("", " update=delayed"))
    by_host = 34 * GPT.num_params / 8 / (0.46 * 20e9 / 8)  # bytes of the update over a rank's share of memory
    assert late.step_time_s > by_host
    assert now.step_time_s - late.step_time_s == pytest.approx(by_host, rel=0.2)
    assert any("approximate" in said for said in late.cautions)
    # a memory so slow that the update is longer than the step: the period is the update's
    slow = answer("dp8 zero1 mb2 offload=optimizer update=delayed", "8xa100,host=1tb@1")
    assert slow.step_time_s == pytest.approx(34 * GPT.num_params / 8 / (0.46 * 1e9 / 8), rel=0.1)


def test_activations_of_few_layers_that_all_are_used_again_at_once_stay():
    layers = GPT.num_layers
    plain, near = (answer(f"dp8 mb2{words}") for words in ("", f" offload=activations prefetch={2 * layers}"))
    assert near.step_time_s == plain.step_time_s
    assert moved(f"dp8 mb2 offload=activations prefetch={2 * layers}") == {}


def test_more_layers_ahead_hide_more_and_need_more_room():
    few, many = (answer(f"dp8 zero3 mb2 offload=params prefetch={n}", "8xa100,copy=0.1") for n in (1, 6))
    assert many.step_time_s < few.step_time_s
    assert many.memory[0].alive["parameters"] > few.memory[0].alive["parameters"]


def test_a_layer_in_tiles_is_gathered_and_scattered_in_as_many_messages_of_a_share_of_its_bytes():
    whole, tiled = (answer(f"dp8 zero3 mb2 full{words}") for words in ("", " tiles=4"))
    one, other = whole.memory[0].alive, tiled.memory[0].alive
    assert other["gathered parameters"] == pytest.approx(one["gathered parameters"] / 4)
    assert other["gradients"] < one["gradients"]
    lowered = lower(parse("dp8 zero3 mb2 full tiles=4"), GPT, NODE, TRAIN)
    times = {m.times for program in lowered.programs for m in program.moves if m.op in ("all_gather", "reduce_scatter")}
    assert times == {4}
    assert tiled.step_time_s > whole.step_time_s  # three messages more of each begin


WORDS = [
    "dp8 mb1 zero0",
    "dp8 mb1 zero2",
    "dp8 mb1 zero3 full",
    "tp2 dp2 pp2 mb1 zero1",
    "tp2 dp2 pp2 mb1 zero2",
    "pp4 dp2 mb1 zero3",
    "pp2 vpp2 dp4 interleaved mb1 zero1",
    "cp2 dp4 mb1 zero3",
]
OFFLOADS = ["optimizer", "optimizer@0.3+activations@0.4", "params+optimizer:nvme", EVERYTHING]


@pytest.mark.parametrize("cluster", ["8xa100", "4xa100 + 4xh100"])
def test_every_step_ends_splits_into_its_causes_and_frees_what_it_holds(cluster):
    run = 0
    for words, offload in product(WORDS, OFFLOADS):
        plan = parse(f"{words} offload={offload}")
        if check(plan.on(8), LLAMA, load(cluster), TRAIN):
            continue
        found, plain = answer(plan.text(), cluster, LLAMA), answer(words, cluster, LLAMA)
        assert sum(found.attribution.values()) == pytest.approx(found.step_time_s)
        assert found.step_time_s > 0.98 * plain.step_time_s
        assert found.peak_memory_bytes < 1.001 * plain.peak_memory_bytes
        events = lower(plan.on(8), LLAMA, load(cluster), TRAIN).graph.memory
        left = np.bincount(events.rank, weights=events.num_bytes)
        assert np.abs(left).max() < 1e-3 * np.abs(events.num_bytes).max()
        run += 1
    assert run > 20


def test_all_tiers_that_are_too_small_are_told_with_the_numbers_at_once():
    # 8 billion parameters: 16 GB in 16 bits on the host, 96 GB of moments and masters on drives
    words = "dp8 zero3 mb1 full offload=params+optimizer:nvme"
    found = answer(words, "8xa100,host=40gb,nvme=80gb@5", load_model("llama3-8b"))
    assert not found.fits
    assert [tier.headroom_bytes < 0 for tier in found.tiers] == [True, True]
    said = fit(found)
    assert re.fullmatch(
        r"does not fit: [\d.]+ GiB over in the host of 8 ranks, [\d.]+ GiB over in the drives of 8 ranks", said
    )
    assert all(word in " ".join(remedies(found)) for word in ("the host of 8 ranks", "optimizer@0.5", ":nvme"))


def test_a_window_larger_than_its_tier_is_refused_with_both_sizes():
    cluster = load("8xa100,host=0.1gb")
    with pytest.raises(MeshwrightError) as caught:
        predict(LLAMA, cluster, parse_train("batch=16,seq=128"), parse("dp8 mb1 offload=params:nvme prefetch=64"))
    (said,) = caught.value.diagnostics
    assert said.code == "P054"
    assert "on the host of 8 ranks" in said.message and "0.1 GiB" in said.message and said.help


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("dp8 prefetch=3", "P052", "none is moved"),
        ("dp8 zero2 offload=grads", "P052", "add optimizer"),
        ("dp8 zero1 offload=grads+optimizer", "P052", "zero2 or zero3"),
        ("pp2 dp4 fsdp overlap=pp offload=grads+optimizer", "P052", "say overlap=dp"),
        ("dp8 zero2 offload=params", "P052", "zero3, of which each rank fetches its shard"),
        ("pp4 dp2 zb-h1 offload=activations", "P052", "splits the backward"),
        ("dp8 offload=optimizer sync=diloco:h=8", "P052", "drop sync="),
        ("dp8 offload=optimizer sync=local:h=8", "P052", "move activations alone"),
        ("dp8 zero1 tiles=4", "P052", "zero3 and pp1"),
        ("dp8 update=delayed", "P052", "the update is by the devices"),
    ],
)
def test_state_that_cannot_be_moved_is_refused_with_the_way_out(words, code, said):
    found = [d for d in check(parse(words), LLAMA, NODE, TRAIN) if d.code == code]
    assert found and any(said in f"{d.message} {d.help}" for d in found)


def test_cores_of_a_host_have_its_memory_and_drives_whole_and_share_their_rates():
    node, cores = NODE.islands[0].node, share_of_node(NODE.islands[0].node, 2, whole=True)
    assert share_of_node(node, 2).nvme_gb_s == node.nvme_gb_s / 4
    assert (cores.nvme_gb_s, cores.nvme_bytes) == (node.nvme_gb_s, node.nvme_bytes)
    assert cores.host_memory_bytes == node.host_memory_bytes
    assert rate_gb_s(cores, 2, "nvme_read") == node.nvme_gb_s / 2


def test_the_host_time_of_a_step_is_the_same_whoever_updates():
    # a profile with time of a step outside of its passes, and updates of a rank's layers one by one
    costs = standard().first(lambda work, device: None, host_us_per_step=50_000.0)
    host = {
        words: predict(GPT, NODE, TRAIN, parse(f"dp8 zero1 mb2{words}"), costs=costs, detail=False).step_time_s
        - answer(f"dp8 zero1 mb2{words}").step_time_s
        for words in ("", " offload=optimizer")
    }
    assert host[""] == pytest.approx(0.05 - 1e-6 * standard().framework.host_us_per_step)
    assert host[" offload=optimizer"] == pytest.approx(host[""], rel=0.1)


def test_a_plan_that_serves_moves_no_state_of_training():
    with pytest.raises(MeshwrightError, match="the plan says offload"):
        predict_serving(
            load_model("llama3-8b"), NODE, parse_serve("rate=1,prompt=64,output=8"), parse("tp8 offload=optimizer")
        )


def test_drives_that_the_nodes_have_not_are_refused():
    found = check(parse("dp8 zero3 offload=optimizer:nvme"), LLAMA, load("8x4090"), TRAIN)
    assert [d.code for d in found] == ["P053"]
    assert "nvme=28tb@25/20" in found[0].help


@pytest.mark.parametrize("text", ["params:nvme+grads+optimizer@0.25+activations:nvme@0.5", "optimizer", "none"])
def test_the_words_of_offload_read_back(text):
    plan = parse(f"dp8 offload={text}")
    assert parse(plan.text()) == plan
    assert (f"offload={text}" in plan.text()) == (text != "none")


@pytest.mark.parametrize("text", ["kv", "params@0.5", "optimizer+optimizer", "optimizer:tape"])
def test_words_that_say_no_state_or_tier_are_told_what_there_is(text):
    with pytest.raises(MeshwrightError, match="params grads optimizer activations"):
        parse(f"dp8 offload={text}")
