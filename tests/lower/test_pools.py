"""A step of several pools: one graph, checked against plans of one pool, hand calculations and the rules of waves."""

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.flops import model_flops, step_flops
from meshwright.cost import standard_on
from meshwright.export import export
from meshwright.graph import KIND, QUEUE
from meshwright.lower import lower
from meshwright.lower.show import shown
from meshwright.lower.waves import rows, shared
from meshwright.papers.whatif import what_if
from meshwright.schedules import build, families
from meshwright.schedules.actions import F
from meshwright.simulate.step import simulate

LLAMA = mw.load_model("llama3-8b")
TRAIN = mw.parse_train("batch=16,seq=2048")


def step(plan: str, on: str, train=TRAIN, model=LLAMA):
    cluster = mw.load_cluster(on)
    found = mw.parse_plan(plan).on(cluster.num_devices)
    return simulate(found, model, cluster, train, standard_on(cluster))


@pytest.mark.parametrize(
    ("pools", "pipeline"),
    [
        ("a=[dp1 on=0:1 part=0:16] + b=[dp1 on=1:2 part=16:32]", "pp2"),
        ("a=[tp2 on=0:2 part=0:16] + b=[tp2 on=2:4 part=16:32]", "tp2 pp2"),
        ("a=[pp2 on=0:2 part=0:16] + b=[pp2 on=2:4 part=16:32]", "pp4 stages=8,8,8,8"),
        ("a=[dp1 on=0:1 part=:9] + b=[pp2 stages=9,6 on=1:3 part=9:24] + c=[dp1 part=24:]", "pp4 stages=9,9,6,8"),
        ("a=[gpipe on=0:1 part=0:16] + b=[gpipe on=1:2 part=16:32]", "pp2 gpipe"),
    ],
)
def test_pools_of_one_replica_each_are_the_pipeline_of_their_stages(pools, pipeline):
    devices = mw.parse_plan(pools).on(4).num_ranks
    joint, alone = step(pools, f"{devices}xh100"), step(pipeline, f"{devices}xh100")
    assert joint.step_time_s == pytest.approx(alone.step_time_s, rel=1e-6)
    assert sum(r.multiplicity for r in joint.lowered.graph.streams.ranks) == devices


def test_waves_of_other_sizes_share_what_overlaps():
    # waves of 8 against waves of 3 of 24 sequences, by hand
    found = list(shared((8, 3), (3, 8)))
    assert found[:4] == [(0, 0, 3), (0, 1, 3), (0, 2, 2), (1, 2, 1)]
    assert sum(n for _, _, n in found) == 24
    assert all(sum(n for m, _, n in found if m == wave) == 8 for wave in range(3))


def test_every_sequence_of_a_step_is_in_one_microbatch_of_one_replica():
    found = [row for number in range(4) for replica in range(3) for row in rows(3, 2, replica, number)]
    assert sorted(found) == list(range(24))
    assert list(rows(3, 2, 1, 2)) == [14, 15]  # (2 * 3 + 1) * 2


def sends(run):
    """(queue, bytes, count) of every kind of message between pools."""
    graph = run.lowered.graph
    links = np.flatnonzero(graph.kind == KIND["send"])
    queue = graph.streams.queue[graph.member[graph.member_ptr[links]]]
    out = {}
    for task, q in zip(links.tolist(), queue.tolist()):
        move = run.lowered.programs[graph.cost_key[task]].moves[0]
        if q in (QUEUE["link_forward"], QUEUE["link_backward"]):
            key = "back" if q == QUEUE["link_backward"] else "forward"
            out[key, move.num_bytes] = out.get((key, move.num_bytes), 0) + 1
    return out


def test_a_message_is_the_share_of_the_rank_that_sends_or_receives_most():
    run = step("a=[dp2 mb4 on=0:2 part=0:8] + b=[tp2 pp3 on=2:8 part=8:32]", "8xh100")
    # two waves of 2 x 4 sequences against 16 of one: each message is one sequence, 2048 x 4096 bf16 numbers, which one
    # rank of a sends whole and two tensor-parallel ranks of b receive by halves
    sequence = 2048 * 4096 * 2
    assert sends(run) == {("forward", sequence): 16, ("back", sequence): 16}
    run = step("a=[tp2 mb2 on=0:2 part=0:8] + b=[dp2 mb2 pp3 on=2:8 part=8:32]", "8xh100")
    # one replica sends two sequences in halves, 8 times; of a wave of b, four, each replica receives two whole
    assert sends(run) == {("forward", 2 * sequence): 8, ("back", 2 * sequence): 8}


def test_a_frozen_pool_has_no_backward_no_gradients_and_keeps_no_activations():
    run = step("a=[dp2 mb4 on=0:2 part=0:8 frozen] + b=[tp2 pp3 on=2:8 part=8:32]", "8xh100")
    graph = run.lowered.graph
    first = graph.streams.rank[graph.member[graph.member_ptr[:-1]]] == 0
    assert set(graph.kind[first].tolist()) == {KIND["F"], KIND["send"]}
    assert {key for key, _ in sends(run)} == {"forward"}
    a, b = run.lowered.parts
    assert a.static_bytes[0]["gradients"] == a.static_bytes[0]["optimizer"] == 0.0
    trained = step("a=[dp2 mb4 on=0:2 part=0:8] + b=[tp2 pp3 on=2:8 part=8:32]", "8xh100")
    assert run.step_time_s < trained.step_time_s
    assert b.static_bytes == trained.lowered.parts[1].static_bytes
    events = graph.memory
    kept = events.categories.index("activations")
    assert not np.any((events.rank == 0) & (events.category == kept))


def test_activations_wait_at_their_pool_and_every_byte_is_given_back():
    run = step("a=[dp2 mb4 on=0:2 part=0:8 frozen] + b=[tp2 pp3 on=2:8 part=8:32]", "8xh100")
    events = run.lowered.graph.memory
    between = events.category == events.categories.index("activations between pools")
    for rank in (0, 1):
        assert events.num_bytes[between & (events.rank == rank)].sum() == pytest.approx(0.0, abs=1.0)
    made = events.num_bytes[between & (events.rank == 0) & events.at_end & (events.num_bytes > 0)]
    # each replica makes 8 of the 16 sequences; every message is counted as one, the most that a rank sends
    assert made.tolist() == [2048 * 4096 * 2.0] * 16


@pytest.mark.parametrize("schedule", [n for n, f in families().items() if f.placement != "bidirectional"])
def test_a_schedule_run_ahead_keeps_the_order_of_its_forwards_and_backwards(schedule):
    actions = build(schedule, 4, 8)
    for count in (1, 3, 8):
        moved = actions.ahead(count)
        for kind in (True, False):
            for column in ("stage", "microbatch", "kind"):
                a, b = (getattr(x, column)[(x.kind == F) == kind] for x in (actions, moved))
                assert np.array_equal(a, b)
    everything = actions.ahead(8)
    first = everything.kind[: everything.rank_ptr[1]]
    assert np.all(np.diff((first == F).astype(int)) <= 0)  # all forwards, then all backwards
    assert len(actions.forwards()) == np.sum(actions.kind == F)


@pytest.mark.parametrize("first", ["1f1b", "gpipe", "zb-h1", "interleaved vpp2"])
@pytest.mark.parametrize("second", ["1f1b", "interleaved vpp2", "zb-h1", "zb-auto", "hanayo vpp2"])
def test_no_pair_of_schedules_deadlocks(first, second):
    # waves of 4 against waves of 2, and of 2 against 4
    for mine, theirs in (("mb2", "mb1"), ("mb1", "mb2")):
        plan = f"a=[dp2 pp2 {mine} {first} on=0:4 part=0:8] + b=[dp2 pp2 {theirs} {second} on=4:8 part=8:32]"
        run = step(plan, "8xh100")
        graph = run.lowered.graph
        assert np.all(graph.dep < np.repeat(np.arange(graph.num_tasks), np.diff(graph.dep_ptr)))
        assert run.step_time_s > 0


def test_the_operations_of_a_frozen_pool_are_its_forwards():
    cluster = mw.load_cluster("8xh100")
    text = "a=[dp2 mb4 on=0:2 part=0:8{}] + b=[tp2 pp3 on=2:8 part=8:32]"
    frozen, trained = (lower(mw.parse_plan(text.format(w)).on(8), LLAMA, cluster, TRAIN) for w in (" frozen", ""))
    assert step_flops(trained) == pytest.approx(model_flops(LLAMA, TRAIN), rel=1e-12)
    a = model_flops(trained.parts[0].stages.model, TRAIN)
    assert step_flops(frozen) == pytest.approx(step_flops(trained) - a * 2 / 3, rel=1e-12)


def test_pools_hold_the_parameters_of_the_model_between_them():
    lowered = lower(
        mw.parse_plan("a=[on=0:1 part=0:8] + b=[pp3 on=1:4]").on(4), LLAMA, mw.load_cluster("4xh100"), TRAIN
    )
    assert sum(held["parameters"] for held in lowered.static_bytes) == 2 * LLAMA.num_params
    assert [r.name for r in lowered.graph.streams.ranks] == ["a rank 0", "b rank 0", "b rank 1", "b rank 2"]


def test_all_trained_pools_wait_for_one_gradient_norm():
    run = step("a=[dp2 mb4 on=0:2 part=0:8] + b=[tp2 pp3 on=2:8 part=8:32]", "8xh100")
    graph = run.lowered.graph
    norms = [i for i, p in enumerate(run.lowered.programs) if any(move.num_bytes == 4 for move in p.moves)]
    (task,) = np.flatnonzero(np.isin(graph.cost_key, norms))
    members = graph.streams.rank[graph.member[graph.member_ptr[task] : graph.member_ptr[task + 1]]]
    assert sorted(members.tolist()) == [0, 1, 2, 3]  # one class of a, three of b
    updates = np.flatnonzero(graph.kind == KIND["optimizer"])
    assert np.all(run.start_s[updates] >= run.end_s[task])


def test_pools_on_unequal_devices_have_their_own_speed():
    plan = f"a=[dp2 mb2 on=0:2 part=0:{16} frozen] + b=[tp2 pp3 on=2:8 part={16}:]"
    slow = step(plan, "2xa100-80 + 6xh100")
    fast = step(plan, "2xh100 + 6xh100")
    a, b = (run.lowered.parts[0] for run in (slow, fast))
    assert a.mesh.slices[0].devices[0].name.startswith("a100") and b.mesh.slices[0].devices[0].name.startswith("h100")
    busy = [
        run.end_s[run.lowered.graph.streams.rank[run.lowered.graph.member[run.lowered.graph.member_ptr[:-1]]] == 0]
        for run in (slow, fast)
    ]
    assert busy[0].max() > 1.5 * busy[1].max()


def test_a_prediction_says_which_pool_the_others_wait_for(capsys):
    predict = lambda part: mw.predict(  # noqa: E731
        LLAMA,
        mw.load_cluster("8xh100"),
        TRAIN,
        mw.parse_plan(f"a=[dp2 mb4 on=0:2 part=0:{part}] + b=[tp2 pp3 on=2:8 part={part}:]"),
    )
    small, large = predict(4), predict(24)
    assert [pool.bottleneck for pool in small.pools] == [False, True]
    assert [pool.bottleneck for pool in large.pools] == [True, False]
    assert small.pools[0].busy < small.pools[1].busy and sum(pool.num_ranks for pool in small.pools) == 8
    assert {r.rank for r in small.memory} == {"a rank 0", "b rank 0", "b rank 1", "b rank 2"}
    low, high = small.step_time_interval_s
    assert low < small.step_time_s < high
    assert sum(small.attribution.values()) == pytest.approx(small.step_time_s)
    assert small.timeline.pools == ("a", "b", "b", "b") or {r.pool for r in small.timeline.ranks} == {"a", "b"}
    assert [pool["name"] for pool in small.to_json()["pools"]] == ["a", "b"]
    assert small.stage_layers[1] == tuple(range(4, 13))


def test_one_pool_is_lowered_as_before():
    cluster = mw.load_cluster("8xh100")
    lowered = lower(mw.parse_plan("tp2 pp4").on(8), LLAMA, cluster, TRAIN)
    assert lowered.parts == (lowered,) and lowered.pool == ""
    assert not mw.predict(LLAMA, cluster, TRAIN, mw.parse_plan("tp2 pp4")).pools
    assert msgspec.structs.replace(lowered, first=0).graph.digest() == lowered.graph.digest()


def test_images_flow_from_a_tower_to_its_language_model():
    llava = mw.load_model("llava-1.5-7b")  # 24 layers of an image tower of width 1,024, then 32 of text
    train = mw.parse_train("batch=112,seq=2048")
    run = step("image=[dp1 mb16 on=0:1 part=image frozen] + text=[dp7 fsdp mb2]", "8xh100", train, llava)
    # 577 image tokens of bf16 a sequence; each of seven replicas receives two sequences, the tower sends what a wave of
    # its 16 and one of their 14 share: 14 at most
    image = 577 * 1024 * 2
    found = {size for way, size in sends(run) if way == "forward"}
    assert max(found) == 14 * image and all(size % image == 0 for size in found)
    assert {way for way, _ in sends(run)} == {"forward"}
    assert [len(part.stages.layers[0]) for part in run.lowered.parts] == [24, 32]


def test_a_technique_is_put_over_every_pool_that_has_what_it_works_on():
    cluster = mw.load_cluster("8xh100")
    plan = mw.parse_plan("a=[dp2 mb4 on=0:2 part=0:8 frozen] + b=[tp2 pp3 on=2:8 part=8:32]")
    found = what_if(("zero-bubble",), LLAMA, cluster, TRAIN, plan)
    assert found.after.plan.pools[0].plan == plan.on(8).pools[0].plan  # no pipeline there
    assert found.after.plan.pools[1].plan.pipeline.schedule == "zb-h1"
    with pytest.raises(mw.MeshwrightError, match="J004"):
        what_if(("zero-bubble",), LLAMA, cluster, TRAIN, mw.parse_plan("a=[tp4 on=0:4 part=0:8] + b=[tp4]"))


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "deepspeed", "accelerate"])
def test_an_export_refuses_several_pools_by_their_names(target):
    plan = mw.parse_plan("a=[tp2 on=0:2 part=0:8] + b=[tp2 pp3]")
    with pytest.raises(mw.MeshwrightError, match=r"P046.*pools \(a, b\)") as caught:
        export(target, LLAMA, mw.load_cluster("8xh100"), TRAIN, plan)
    assert caught.value.exit_code == 2


def test_lowering_shows_every_pool_after_its_passes_and_the_graph_of_all_after_the_last():
    plan = mw.parse_plan("a=[dp2 mb4 part=0:8 frozen] + b=[tp2 pp3 part=8:32]").on(8)
    asked = plan, LLAMA, mw.load_cluster("8xh100"), TRAIN
    assert [line for line in shown(*asked, "schedule") if line.endswith(":")] == ["a:", "b:"]
    assert "F0 F1" in shown(*asked, "schedule")  # a pool that is not trained goes forward alone
    lines = shown(*asked)
    assert any("link_forward@a rank 0" in line for line in lines) and any("compute@b rank 2" in line for line in lines)
