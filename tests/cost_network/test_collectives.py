"""Collectives: limits by hand, and what must hold of any fabric."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.collectives import collective_seconds
from meshwright.cost.fabric import shipped, uncontended
from meshwright.cost.network import Network, link
from meshwright.lower.place import Mesh
from meshwright.plan import parse
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.cluster import load_device
from meshwright.work import Collective, Gemm, Group, Hop

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")
H100 = load_device("h100_sxm")


def hop(members: int, gb_s: float = 450.0, **more) -> Hop:
    fields = {"name": "nvlink", "latency_us": 0.6, "below": 1, "topology": "switch"} | more
    return Hop(members=members, gb_s=gb_s, **fields)


def node(members: int, gb_s: float = 450.0, **more) -> Group:
    return Group(size=members, hops=(hop(members, gb_s, **more),))


def cluster(ranks: int, nodes: int, nic_gb_s: float = 50.0) -> Group:
    rail = hop(nodes, nic_gb_s * ranks, name="rail", latency_us=2.7, below=ranks, topology="fat_tree", scale_out=True)
    return Group(size=ranks * nodes, hops=(hop(ranks), rail) if ranks > 1 else (rail,))


def seconds(op: str, num_bytes: float, group: Group) -> float:
    return link(Collective(op=op, num_bytes=num_bytes, group=group), H100).seconds


groups = st.one_of(
    st.builds(node, st.integers(2, 16)),
    st.builds(node, st.integers(2, 8), topology=st.sampled_from(["mesh", "ring", "torus", "pcie"])),
    st.builds(cluster, st.sampled_from([1, 2, 4, 8]), st.integers(2, 64)),
)


@given(st.sampled_from(OPS), groups, st.floats(1, 1e11), st.floats(1, 1e3))
def test_more_bytes_never_take_less(op, group, num_bytes, factor):
    assert seconds(op, num_bytes * factor, group) >= seconds(op, num_bytes, group) * (1 - 1e-12)


@given(st.sampled_from(OPS), groups, st.floats(1, 1e11), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(op, group, num_bytes, factor):
    hops = tuple(msgspec.structs.replace(h, gb_s=h.gb_s * factor) for h in group.hops)
    faster = Group(size=group.size, hops=hops)
    for price in (seconds, lambda *a: collective_seconds(Collective(op=a[0], num_bytes=a[1], group=a[2]))):
        assert price(op, num_bytes, faster) <= price(op, num_bytes, group) * (1 + 1e-12)


@given(st.sampled_from(OPS), groups, st.floats(0.1, 10))
def test_more_latency_is_never_faster(op, group, more_us):
    hops = tuple(msgspec.structs.replace(h, latency_us=h.latency_us + more_us) for h in group.hops)
    assert seconds(op, 1e6, Group(size=group.size, hops=hops)) >= seconds(op, 1e6, group)


@pytest.mark.parametrize("op", OPS)
def test_a_group_of_one_and_no_bytes_are_free(op):
    alone = Collective(op=op, num_bytes=1e9, group=Group(size=1, hops=()))
    assert link(alone, H100).seconds == 0.0
    assert collective_seconds(alone) == 0.0
    assert seconds(op, 0.0, node(8)) == 0.0


def test_other_work_is_left_to_other_links():
    assert link(Gemm(m=1, n=1, k=1), H100) is None


def test_a_small_all_gather_pays_the_start_and_a_step_for_every_other_rank():
    constants = shipped().profiles["nvlink4"].constants
    by_hand = constants.start_ll_us + 7 * 0.6 * constants.step_ll
    assert seconds("all_gather", 1.0, node(8)) == pytest.approx(by_hand * 1e-6, rel=1e-3)


def test_a_large_all_reduce_by_a_ring_moves_twice_n_minus_1_over_n_through_every_port():
    constants = shipped().profiles["nvlink4"].constants
    port = 450e9 * constants.all_reduce * (2 / 4) ** constants.contention
    assert seconds("all_reduce", 1e13, node(4)) == pytest.approx(2 * 3 / 4 * 1e13 / port, rel=1e-3)


def test_an_all_reduce_that_switches_add_up_moves_the_buffer_and_a_share_through_every_port():
    constants = shipped().profiles["nvlink4"].constants
    port = 450e9 * constants.in_network * (2 / 8) ** constants.contention
    assert seconds("all_reduce", 1e13, node(8, reduces=True)) == pytest.approx(9 / 8 * 1e13 / port, rel=1e-3)


def test_a_large_all_to_all_over_nodes_is_bound_by_what_leaves_a_node():
    constants = shipped().profiles["network"].constants
    port = 400e9 * constants.all_to_all * (2 / 16) ** constants.contention
    leaving = 8 * (1 - 8 / 128) * 1e12
    assert seconds("all_to_all", 1e12, cluster(8, 16)) == pytest.approx(leaving / port, rel=1e-2)


@pytest.mark.parametrize("group", [node(4), node(8), cluster(8, 8)])
def test_a_large_all_reduce_by_a_ring_is_a_reduce_scatter_and_an_all_gather(group):
    apart = seconds("reduce_scatter", 1e10, group) + seconds("all_gather", 1e10, group)
    assert seconds("all_reduce", 1e10, group) == pytest.approx(apart, rel=0.25)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all"])
def test_a_group_over_nodes_lies_between_one_node_and_ranks_that_share_no_node(op):
    inside, over, apart = node(16), cluster(8, 2), cluster(1, 16)
    assert seconds(op, 1e9, inside) < seconds(op, 1e9, over) < seconds(op, 1e9, apart)


def test_a_tree_over_many_nodes_keeps_a_small_all_reduce_logarithmic():
    few, many = seconds("all_reduce", 1e3, cluster(8, 8)), seconds("all_reduce", 1e3, cluster(8, 512))
    assert many < few * 3.5  # 3 doublings of nodes become 9; the steps inside a node stay


def test_a_shared_host_bridge_gives_each_of_eight_a_sixteenth_of_what_two_get():
    device = load_device("l40s")

    def busbw(n: int) -> float:
        group = node(n, 31.5, name="pcie", topology="pcie", latency_us=1.0)
        work = Collective(op="all_gather", num_bytes=2.68e8, group=group)
        return 2.68e8 * (n - 1) / n / link(work, device).seconds / 1e9

    # nccl-tests of NCCL 2.27 on 2 and 8 L40S: 19.4 and 1.2 GB/s
    assert busbw(2) == pytest.approx(19.4, rel=0.1)
    assert busbw(8) == pytest.approx(1.2, rel=0.1)


def test_eight_h100_reach_the_bandwidth_nccl_tests_publish():
    # AWS p5.48xlarge, nccl-tests all-reduce of 4 GiB out of place: 476 GB/s bus bandwidth
    num_bytes = 2**32
    busbw = num_bytes * 2 * 7 / 8 / seconds("all_reduce", num_bytes, node(8, reduces=True)) / 1e9
    assert busbw == pytest.approx(476, rel=0.05)


def test_an_engines_own_all_reduce_is_faster_for_small_buffers_and_ncclss_for_large():
    own = Network(library="vllm")
    for num_bytes, ratio in ((8192.0, 0.6), (1e6, 0.9)):
        work = Collective(op="all_reduce", num_bytes=num_bytes, group=node(8, reduces=True))
        assert own(work, H100).seconds < ratio * link(work, H100).seconds
    large = Collective(op="all_reduce", num_bytes=1e9, group=node(8, reduces=True))
    assert own(large, H100).seconds == link(large, H100).seconds


@given(st.sampled_from(["vllm", "sglang", "trtllm"]), st.booleans(), st.floats(1, 1e10), st.floats(1, 100))
def test_an_engines_all_reduce_never_takes_less_for_more(library, eager, num_bytes, factor):
    network = Network(library=library, eager=eager)
    small, large = (
        network(Collective(op="all_reduce", num_bytes=b, group=node(8, reduces=True)), H100).seconds
        for b in (num_bytes, num_bytes * factor)
    )
    assert large >= small * (1 - 1e-12)


def test_outside_a_graph_the_host_bounds_a_small_all_reduce():
    work = Collective(op="all_reduce", num_bytes=1024.0, group=node(8, reduces=True))
    assert Network(library="vllm", eager=True)(work, H100).seconds > 15e-6  # 20 us of host time against 5 in a graph


def test_what_was_measured_is_fitted_and_what_lies_beyond_says_so():
    measured = link(Collective(op="all_reduce", num_bytes=1e6, group=node(8)), H100)
    many = link(Collective(op="all_reduce", num_bytes=1e6, group=cluster(8, 512)), H100)
    huge = link(Collective(op="all_reduce", num_bytes=1e13, group=node(8)), H100)
    assert [e.source.endswith(", extrapolated") for e in (measured, many, huge)] == [False, True, True]
    assert measured.source.startswith("nvlink")
    assert measured.sigma < many.sigma
    assert measured.sigma < huge.sigma
    assert measured.cause == "network"


def test_a_fabric_nobody_measured_gets_its_kind_and_a_wider_interval():
    mi300x = load_device("mi300x")
    work = Collective(op="all_gather", num_bytes=1e8, group=node(8, 448.0, name="xgmi", topology="mesh"))
    guess = link(work, mi300x)
    assert guess.source.endswith(", extrapolated")
    assert guess.sigma > link(Collective(op="all_gather", num_bytes=1e8, group=node(8)), H100).sigma


@pytest.mark.parametrize(
    ("where", "plan", "axis", "share"),
    [
        ("4x8xh100,nics=1,25gbe", "dp32 hsdp8", "replica", 1 / 8),  # eight groups of one rank a node, all at once
        ("4x8xh100,nics=1,25gbe", "dp32", "data", 1.0),  # one ring through every port
        ("4x8xh100,nics=8,25gbe", "dp32 hsdp8", "replica", 1 / 8),  # a port each
        ("4x8xh100,nics=4,25gbe", "dp32 hsdp8", "replica", 1 / 8),  # two to a port
        ("4x8xh100,nics=1,25gbe", "tp8 pp4", "pp", 1 / 8),  # a stage's eight ranks send together
        ("4x8xh100,nics=1,25gbe", "pp32", "pp", 1.0),  # the only rank of its stage: the whole port
        ("4x8xh100,nics=4,25gbe", "pp32", "pp", 1.0),  # eight stages of a group in a node are the whole node
    ],
)
def test_groups_beside_each_other_share_the_ports_of_a_node(where, plan, axis, share):
    """The share that each of the groups has of a node's ports, counted by hand."""
    cluster = load_cluster(where)
    mesh = Mesh(parse(plan).on(32), cluster)
    group = mesh.group(axis) if axis == "pp" else mesh.among(axis)
    hop, port = group.hops[-1], cluster.islands[0].levels[-1]
    assert hop.name == port.name and hop.gb_s == pytest.approx(port.busy_gb_s * share)


def test_a_message_over_a_mesh_goes_over_the_one_link_to_its_neighbour():
    """Where every pair of four has a link of 64 GB/s, a gather fills all three of a rank's, a message only one."""
    mesh, switch = node(4, 192.0, topology="mesh"), node(4, 192.0)
    assert seconds("send", 1e9, mesh) == pytest.approx(3 * seconds("send", 1e9, switch), rel=0.05)
    assert seconds("all_gather", 1e9, mesh) == pytest.approx(seconds("all_gather", 1e9, switch), rel=0.3)


def test_a_host_of_half_the_devices_has_half_as_many_on_each_bridge():
    """Of the measured host of 8 L40S, gathers of 256 MiB over 2 and 4 reach 19.3 and 4.7 GB/s (AIConfigurator): bridges
    are shared. A host with 4 has two on each socket's bridge, as the measured one under 2."""
    l40s, groups = load_device("l40s"), {}
    for text, plan in (("8xl40s", "tp4 dp2"), ("1x4xl40s", "tp4 dp1")):
        groups[text] = Mesh(parse(plan), load_cluster(text)).group("tp")
    rate = {
        text: 0.75 * 0.268435456 / link(Collective(op="all_gather", num_bytes=2.0**28, group=group), l40s).seconds
        for text, group in groups.items()
    }
    assert rate["8xl40s"] == pytest.approx(4.72, rel=0.2)
    assert rate["1x4xl40s"] == pytest.approx(19.3, rel=0.15)


def test_a_sum_that_an_engine_leaves_to_nccl_takes_what_nccl_tests_measure_on_eight_h100():
    # nccl-tests: 16 to 21 us from 8 to 128 KiB (two sources); vLLM's own kernel: 5.1 to 7.9 us
    cluster = load_cluster("8xh100")
    group, device = Mesh(parse("tp8 dp1"), cluster).group("tp"), cluster.islands[0].device
    engine, nccl = Network(library="vllm"), Network()
    for size in (2**13, 2**15, 2**17):
        own, left, usual = (
            network(Collective(op="all_reduce", num_bytes=size, group=group, plain=plain), device).seconds
            for network, plain in ((engine, False), (engine, True), (nccl, False))
        )
        assert left == usual
        assert own == pytest.approx({2**13: 5.1e-6, 2**15: 5.6e-6, 2**17: 7.9e-6}[size], rel=0.15)
        assert 15.9e-6 < left < 21.1e-6


def test_a_part_that_memory_pushes_begins_at_once_and_a_gather_in_place_copies_nothing():
    cluster = load_cluster("8xv100-32,nvlink=150,triggers")
    group, device = Mesh(parse("tp8 dp1"), cluster).group("tp"), cluster.islands[0].device
    assert device.triggers and not load_cluster("8xv100-32,nvlink=150").islands[0].device.triggers

    def took(op, size):
        return link(Collective(op=op, num_bytes=size, group=group), device).seconds

    hop, constants = group.hops[0], shipped().find(group.hops[0], device.name, device.scale_up)[0].constants
    assert took("pushed", 1) == pytest.approx(hop.latency_us * 1e-6, rel=1e-3)
    # seven parts and seven parts back are the all-reduce, less what the library starts and waits for
    port = hop.gb_s * 1e9 * uncontended(hop, constants)
    rate = 7 / 8 * 2**26 / (port * constants.all_reduce)
    assert 7 * took("pushed", 2**23) == pytest.approx(rate + 7 * hop.latency_us * 1e-6, rel=1e-6)
    copied = took("all_gather", 2**26) - took("gather_in_place", 2**26)
    assert copied == pytest.approx(2**26 / 8 / (port * constants.own_copy), rel=1e-6)
