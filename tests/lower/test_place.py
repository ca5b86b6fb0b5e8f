"""Where groups of ranks lie and what bandwidth they get, counted by hand; classes of equal ranks."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.cost import Costs
from meshwright.graph import KIND
from meshwright.lower import lower
from meshwright.lower.place import Mesh
from meshwright.plan import parse
from meshwright.simulate.step import simulate
from meshwright.spec import cluster
from meshwright.spec.workload import Train
from tests.random_plans import GPT


def hops(words, where, *axes, start=0):
    """(level, members, GB/s of one rank's share of its port) of a group, from the inside out."""
    found = cluster.load(where)
    mesh = Mesh(parse(words).on(found.num_devices), found)
    return [(h.name, h.members, h.gb_s) for h in mesh.group(*axes, start=start).hops]


def test_a_tensor_parallel_group_inside_a_node_has_the_nvlink_port_of_each_device():
    assert hops("tp8 dp8", "64xh100", "tp") == [("nvlink", 8, 450.0)]


def test_eight_data_parallel_groups_share_the_nics_of_a_node():
    # 8 x 400 Gbit/s = 400 GB/s a node, one rank of each of 8 groups in it: 50 GB/s each
    assert hops("tp8 dp8", "64xh100", "dp") == [("rail", 8, 50.0)]


def test_four_ranks_of_one_group_in_a_node_leave_two_groups_to_share_it():
    assert hops("tp2 dp32", "64xh100", "dp") == [("nvlink", 4, 450.0), ("rail", 8, 200.0)]


def test_one_group_of_all_devices_has_all_nics():
    assert hops("dp64", "64xh100", "dp") == [("nvlink", 8, 450.0), ("rail", 8, 400.0)]


def test_a_group_over_the_spine_shares_the_leafs_uplinks():
    # 32 nodes of 400 GB/s under a leaf give 12,800 GB/s; 8 groups share them
    assert hops("tp8 dp128", "1024xh100", "dp") == [("rail", 32, 50.0), ("spine", 4, 1600.0)]


def test_a_rack_that_is_one_nvlink_domain_needs_no_network():
    assert hops("tp8 dp9", "72xgb200", "dp") == [("nvlink", 9, 900.0)]


def test_unused_devices_take_no_share():
    # 4 ranks on 2 of the cluster's nodes of 8 would share nothing: one group of 4 neighbours, inside a node
    assert hops("dp4", "64xh100", "dp") == [("nvlink", 4, 450.0)]


def test_a_hybrid_scope_keeps_the_sharding_group_inside():
    where = cluster.load("64xh100")
    mesh = Mesh(parse("hsdp8 dp64"), where)
    shard, replicas = mesh.hybrid_groups(8, "cp", "dp")
    assert [(h.name, h.members) for h in shard.hops] == [("nvlink", 8)]
    assert [(h.name, h.members, h.gb_s) for h in replicas.hops] == [("rail", 8, 50.0)]


def test_experts_take_neighbouring_ranks_first():
    where = cluster.load("64xh100")
    mesh = Mesh(parse("tp2 dp32 ep8 etp1"), where)
    assert [(h.name, h.members) for h in mesh.expert_group("ep").hops] == [("nvlink", 8)]
    assert [(h.name, h.members) for h in mesh.expert_group("edp").hops] == [("rail", 8)]
    inside = Mesh(parse("tp2 dp32 ep4"), where)  # each expert split over tp, so ep strides by 2
    assert [(h.name, h.members, h.below) for h in inside.expert_group("ep").hops] == [("nvlink", 4, 1)]


def test_the_axis_order_decides_who_is_near():
    assert hops("tp4 pp2 dp8", "64xh100", "pp") == [("rail", 2, 50.0)]
    assert hops("tp4 pp2 dp8 order=tp-pp-cp-dp", "64xh100", "pp") == [("nvlink", 2, 450.0)]


MIXED = "32xa100-80 + 32xh100"


def slices(words):
    found = cluster.load(MIXED)
    mesh = Mesh(parse(words).on(found.num_devices), found)
    return [(s.multiplicity, [d.name for d in s.devices]) for s in mesh.slices]


def test_replicas_on_equal_devices_are_one_class():
    assert slices("tp8 dp8") == [(4, ["a100_80gb_sxm"]), (4, ["h100_sxm"])]
    # the pipeline axis outermost: every replica has its first stage on one island and its second on the other
    assert slices("tp8 pp2 dp4") == [(4, ["a100_80gb_sxm", "h100_sxm"])]
    assert slices("tp8 pp2 dp4 order=tp-cp-pp-dp") == [(2, ["a100_80gb_sxm"] * 2), (2, ["h100_sxm"] * 2)]


def test_a_group_over_unequal_devices_is_as_fast_as_the_slowest():
    assert slices("tp64") == [(1, ["a100_80gb_sxm"])]


@pytest.mark.parametrize("words", ["tp8 zero1", "tp2 pp4 interleaved vpp3", "fsdp", "tp8 pp2 zb-h1 overlap=none"])
def test_more_replicas_of_equal_devices_change_nothing_in_the_graph(words):
    found = []
    for count in (64, 512, 8192):
        where = cluster.load(f"{count}xh100")
        plan = parse(f"{words} mb1").on(count)
        lowered = lower(plan, GPT, where, Train(global_batch=plan.layout.dp * 8, seq_len=128))
        graph = lowered.graph
        # a message that goes further has another price, not another place
        shape = msgspec.structs.replace(graph, keys=(), cost_key=np.zeros_like(graph.cost_key))
        found.append((shape.digest(), len(graph.streams.ranks)))
        assert sum(graph.streams.multiplicity) == count
    assert found == found[:1] * 3


def test_the_slow_island_holds_up_the_fast_one():
    train, plan = Train(global_batch=64, seq_len=128), parse("tp8 dp8 mb1")
    fast, mixed = (predict(GPT, cluster.load(w), train, plan, detail=False) for w in ("64xh100", MIXED))
    assert mixed.step_time_s > fast.step_time_s
    assert {m.capacity_bytes for m in mixed.memory} == {
        float(cluster.load_device(d).memory_bytes) for d in ("a100-80", "h100")
    }
    # the fast island waits: that is its bubble
    assert mixed.attribution["bubble"] > fast.attribution["bubble"]


def test_two_islands_of_equal_devices_differ_by_their_link_only():
    whole, halves = cluster.load("64xh100"), cluster.load("32xh100 + 32xh100")
    train, plan = Train(global_batch=64, seq_len=128), parse("tp8 dp8 mb1")
    one, two = (predict(GPT, w, train, plan, detail=False) for w in (whole, halves))
    assert one.attribution["gemm"] == pytest.approx(two.attribution["gemm"])
    assert two.step_time_s >= one.step_time_s


def exchanges(words, kinds):
    """(task, streams' ranks, start, end) of the data-parallel tasks of some kinds on the mixed cluster."""
    where = cluster.load(MIXED)
    run = simulate(parse(words).on(64), GPT, where, Train(global_batch=64, seq_len=128), Costs())
    graph, out = run.lowered.graph, []
    for task in np.flatnonzero(np.isin(graph.kind, [KIND[k] for k in kinds])):
        members = graph.member[graph.member_ptr[task] : graph.member_ptr[task + 1]]
        out.append((graph.streams.rank[members].tolist(), run.start_s[task], run.end_s[task]))
    return out


def test_the_last_gather_waits_for_the_slower_islands_update():
    words = "tp8 dp8 mb1 zero1 overlap=none"
    updates, gathers = exchanges(words, ["optimizer"]), exchanges(words, ["all_gather"])
    assert [ranks for ranks, _, _ in gathers] == [[0, 1]]
    assert gathers[0][1] == max(end for _, _, end in updates)


def test_each_stage_exchanges_over_its_own_islands_links():
    # the first stage on A100 nodes of 8 x 200 Gbit/s, the second on H100 nodes of 8 x 400: 25 and 50 GB/s a rank
    where = cluster.load(MIXED)
    lowered = lower(parse("tp8 pp2 dp4 mb1").on(64), GPT, where, Train(global_batch=64, seq_len=128))
    graph = lowered.graph
    reduces = np.flatnonzero(graph.kind == KIND["reduce_scatter"])
    found = {}
    for task in reduces:
        (group,) = {move.group for move in lowered.programs[graph.cost_key[task]].moves}
        found.setdefault(graph.attribute("stage")[task], set()).add(group.hops[-1].gb_s)
    assert found == {0: {25.0}, 1: {50.0}}
