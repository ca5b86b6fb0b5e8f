"""Flows between nodes on a described network: link loads against hand counts, brute force and papers."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.cost.fabric import shipped
from meshwright.cost.network import Network
from meshwright.lower.crossing import crowding, expected_largest, split_leftovers
from meshwright.lower.place import Mesh
from meshwright.spec.wiring import Tier, Wiring, bill, tiers
from meshwright.work import Collective


def wired(kind="fat-tree", radix=8, **words):
    return Wiring(
        kind=kind, radix=radix, routing=words.pop("routing", "adaptive" if kind == "dragonfly" else "spray"), **words
    )


def test_a_leaf_holds_half_its_ports_and_pods_come_where_spines_run_out_of_ports():
    # radix 8: 4 down, 4 up; nodes of one port: 8 leaves of 4 nodes is the most that spines of 8 ports join
    assert tiers(wired(), 1, 4) == ()
    assert tiers(wired(), 1, 32) == (Tier(4, 1, 4),)
    assert tiers(wired(), 1, 64) == (Tier(4, 1, 4), Tier(16, 1, 16))  # pods of 4 leaves
    # four ports a node: one node a leaf in a fat tree, four nodes a leaf on each rail
    assert tiers(wired(), 4, 8) == (Tier(1, 4, 4),)
    assert tiers(wired("rail"), 4, 8) == (Tier(4, 1, 4),)
    assert tiers(wired("rail-only"), 4, 8) == ()  # one switch a rail


def test_full_bisection_is_crowded_by_no_pattern_and_a_taper_by_all_that_leaves_a_leaf():
    rows = np.arange(32)[None, :]  # one ring and one all-to-all over all nodes
    assert crowding(wired(), 1, 32, rows) == (1.0, 1.0)
    # taper 3: 6 down, 2 up. A ring in order sends one flow out of each leaf; an all-to-all nearly all of six ports
    # through two links: node 0 has 26 of its 31 peers outside
    ringed, exchanged = crowding(wired(taper=3.0), 1, 32, rows)
    assert ringed == 1.0
    assert exchanged == pytest.approx(6 * 26 / 31 / 2)
    # rings over every sixth node cross at each step: six ports on two links
    apart = np.arange(36).reshape(6, 6).T
    assert crowding(wired(taper=3.0), 1, 36, apart)[0] == pytest.approx(3.0)


def test_the_busiest_link_under_hashing_is_the_mean_over_hashes():
    rng = np.random.default_rng(0)
    for flows, links, times in ((4, 4, 2), (16, 16, 8), (64, 32, 4)):
        drawn = [
            max(np.bincount(rng.integers(0, links, flows), minlength=links).max() for _ in range(times))
            for _ in range(4000)
        ]
        assert expected_largest(flows, links, times) == pytest.approx(np.mean(drawn), rel=0.05)


def test_planned_paths_have_equal_flows_and_split_leftovers_are_as_good_as_spraying():
    # 6 down, 2 up of radix 8 would split 6 flows 3 and 3; five nodes in a leaf of five (taper 5/3) over three links
    apart = np.arange(25).reshape(5, 5).T
    some = {
        routing: crowding(wired(taper=5 / 3, routing=routing), 1, 25, apart)[0]
        for routing in ("spray", "ethereal", "planned", "ecmp")
    }
    assert some["spray"] == pytest.approx(5 / 3) == some["ethereal"]  # arXiv 2407.00550: no more than ideal multipath
    assert some["planned"] == 2.0  # five whole flows on three links
    assert some["ecmp"] > some["planned"]
    more = crowding(wired(taper=5 / 3, routing="ecmp", connections=64), 1, 25, apart)[0]
    assert some["spray"] < more < some["ecmp"]  # many small flows even out


def test_whole_flows_and_split_leftovers_load_links_as_spraying_does():
    rng = np.random.default_rng(1)
    for _ in range(50):
        flows = rng.integers(0, 40, (6, 6))
        np.fill_diagonal(flows, 0)
        found = split_leftovers(flows, 4)
        assert found.busiest == pytest.approx(max(flows.sum(0).max(), flows.sum(1).max()) / 4)
        assert found.split == (flows % 4).sum() and (4 * found.whole + flows % 4 == flows).all()


def test_a_dragonfly_sends_between_two_groups_over_the_few_links_of_their_own():
    # radix 8: switches have 2 ports for nodes and 2 to other groups; a group is 4 switches: 8 nodes, 8 links out
    def on(routing, rows):
        return crowding(wired("dragonfly", routing=routing), 1, 24, rows)

    pairs = np.stack([np.arange(8), 8 + np.arange(8)], axis=1)  # group 0 with group 1: 8 flows each way
    assert on("minimal", pairs)[0] == 8 / 4  # two other groups share the 8 links
    assert on("valiant", pairs)[0] == 2.0  # twice the flows over all 8
    triples = np.stack([np.arange(8), 8 + np.arange(8), 16 + np.arange(8)], axis=1)
    assert on("adaptive", triples)[0] == 2.0


def test_a_rail_only_network_has_the_parts_that_its_paper_counts():
    # 32,768 devices in NVLink domains of 256, switches of 64 and of 128 ports: arXiv 2307.12169 finds its network 38%
    # to 77% cheaper. A three-tier Clos of n ports has 5 n / radix switches and 3 n cables
    clos = bill(wired("rail", 64), 256, 128, 400)
    assert (clos.switches, clos.links) == (5 * 32768 // 64, 3 * 32768)
    rails = bill(wired("rail-only", 64), 256, 128, 400)
    assert (rails.switches, rails.links) == (256 * 6, 2 * 32768)  # 4 leaves and 2 spines a rail
    one = bill(wired("rail-only", 128), 256, 128, 400)
    assert (one.switches, one.links) == (256, 32768)
    assert bill(wired("fat-tree", 64), 8, 4, 100).usd is None


def test_a_wired_cluster_round_trips_and_its_words_reach_the_prediction(tmp_path):
    cluster = mw.load_cluster("64xh100,rail-only,taper=2,routing=ecmp,qps=4,sharp")
    assert mw.load_cluster(cluster.name) == cluster
    file = tmp_path / "mine.toml"
    from meshwright.spec.cluster import template

    file.write_text(template(cluster))
    assert mw.load_cluster(str(file)).islands == cluster.islands


def asked(on, plan="fsdp", model="llama3-8b"):
    question = mw.load_model(model), mw.load_cluster(on), mw.parse_train("batch=512,seq=4096")
    return mw.predict(*question, mw.parse_plan(plan), detail=False)


def test_collisions_cost_time_and_a_rail_only_network_costs_none_to_dense_models():
    plain, rail_only = asked("512xh100,rail"), asked("512xh100,rail-only")
    assert rail_only.step_time_s == plain.step_time_s
    hashed = asked("512xh100,fat-tree,routing=ecmp")
    assert hashed.step_time_s > asked("512xh100,fat-tree,routing=planned").step_time_s
    assert asked("512xh100,fat-tree,routing=ethereal").step_time_s == pytest.approx(
        asked("512xh100,fat-tree").step_time_s
    )


@pytest.mark.parametrize(
    "words, said",
    [
        ("rail,radix=2,qps=0,routing=valiant", ("4 to 4,096 ports", "between 1 and 1,024", "no way through a rail")),
        ("taper=2", ("of what network is not said",)),
        ("rail,fat-tree", ("two ways to wire a network",)),
        ("rail,radix=4", ("more than three tiers",)),
        ("dragonfly,taper=2", ("a quarter of its ports",)),
        ("fat-tree,radix=x,routing=foo", ("not a whole number", "no way to route")),
    ],
)
def test_wiring_that_cannot_be_is_refused_with_all_that_is_wrong(words, said):
    with pytest.raises(mw.MeshwrightError) as raised:
        mw.load_cluster(f"4096xh100,{words}")
    for message in said:
        assert message in str(raised.value)


def test_the_answer_says_how_the_network_is_wired_and_where_its_prices_are_from():
    said = {a.name: a for a in asked("64xh100,rail-only").assumptions}
    assert "rail-only,radix=64" in said["rail links"].value
    parts = said["parts of the network"]
    assert "8 switches and 128 transceivers" in parts.value and parts.flagged and "yobitel" in parts.source
    assert "parts of the network" not in {a.name for a in asked("64xh100").assumptions}


def test_switches_that_add_up_pass_each_byte_once_where_a_ring_passes_it_nearly_twice():
    # one rank a node, 64 nodes, large enough for bytes alone: a ring's port carries 2 * 63 / 64 of the buffer
    device = mw.load_cluster("64xh100").islands[0].device

    def seconds(words):
        cluster = mw.load_cluster(f"512xh100,fat-tree{words}")
        mesh = Mesh(mw.parse_plan("tp8 mb1 full").on(512), cluster)
        return Network()(Collective(op="all_reduce", num_bytes=64e9, group=mesh.group("dp")), device).seconds

    constants = shipped().find(Mesh(mw.parse_plan("tp8").on(512), mw.load_cluster("512xh100")).group("dp").hops[0])[0]
    ring, switches = constants.constants.all_reduce, constants.constants.in_network
    assert seconds("") / seconds(",sharp") == pytest.approx(2 * 63 / 64 / ring * switches, rel=0.01)
