"""All-reduces that hosts add up, against counts by hand and those of the paper (HFReduce, An et al. 2408.14158)."""

import pytest

import meshwright as mw
from meshwright.cost.host_reduce import host_flows
from meshwright.cost.network import link
from meshwright.lower.place import Mesh
from meshwright.work import HOST_REDUCE, Collective, HostLinks

LINKS = {"copy_gb_s": 25.0, "root_gb_s": 0.0, "memory_gb_s": 320.0, "numa_nodes": 2, "nic_gb_s": 25.0}


def seconds(on, plan, num_bytes=2e8, op=HOST_REDUCE):
    cluster = mw.load_cluster(on)
    mesh = Mesh(mw.parse_plan(plan), cluster)
    group = mesh.group("dp")
    group = mesh.hosted(group) if op == HOST_REDUCE else group
    return link(Collective(op=op, num_bytes=num_bytes, group=group), cluster.islands[0].device).seconds


def test_memory_is_passed_24_times_by_eight_devices_on_many_hosts_as_the_paper_counts():
    # section IV-D: 8 writes, 8 reads and 1 write, 2 sent and 2 received and 1 read to add them, 2 reads
    flows = host_flows(HostLinks(devices=8, members=8, paired=1, **LINKS), 10**9)
    assert flows.memory == pytest.approx(8 + 8 + 1 + 2 + 2 + 1 + 2)
    assert (flows.copied, flows.rooted, flows.sent) == pytest.approx((1, 2, 2))


def test_one_host_sends_nothing_and_two_send_the_buffer_once():
    one, two = (host_flows(HostLinks(devices=8, members=8, paired=1, **LINKS), n) for n in (1, 2))
    assert (one.sent, one.memory) == (0, 8 + 8 + 1 + 2)
    assert (two.sent, two.memory) == (1, 8 + 8 + 1 + 2.5 + 2)


def test_pairs_copy_half_a_buffer_each():
    # 4 written, 4 read and 1 written, 5 between hosts, 2 read: each processor's devices need both halves
    flows = host_flows(HostLinks(devices=8, members=8, paired=2, **LINKS), 10**9)
    assert flows.memory == pytest.approx(4 + 4 + 1 + 5 + 2)
    assert (flows.copied, flows.rooted, flows.paired) == (0.5, 1.0, 1.0)


def test_groups_beside_each_other_share_memory_and_ports():
    whole = host_flows(HostLinks(devices=8, members=8, paired=1, **LINKS), 4)
    halves = host_flows(HostLinks(devices=8, members=4, paired=1, **LINKS), 4)
    assert halves.sent == 2 * whole.sent
    assert halves.memory == pytest.approx(2 * (4 + 4 + 1 + 2.5 * 1.5 + 2))
    alone = host_flows(HostLinks(devices=8, members=1, paired=1, **LINKS), 4)
    assert alone.memory == pytest.approx(8 * (1 + 2.5 * 1.5 + 1))  # nothing to add up on a host


def test_the_busiest_link_of_a_host_sets_the_pace():
    # two devices on a root port of 37.5 GB/s: 2e8 bytes each way of both
    slow = seconds("8xa100-40-pcie,nonvlink", "dp8 sync=hfreduce")
    assert slow == pytest.approx(4 * 2e8 / 37.5e9, rel=2e-3)
    # pairs carry half of it
    assert seconds("8xa100-40-pcie", "dp8 sync=hfreduce") == pytest.approx(slow / 2, rel=3e-3)


@pytest.mark.parametrize(("devices", "paper_gb_s"), [(16, 19.18), (32, 13.0), (128, 10.3), (256, 9.66)])
def test_with_nvlink_bridges_it_is_as_fast_as_figure_7b(devices, paper_gb_s):
    size = 46 * 2**22
    took = seconds(f"{devices}xa100-40-pcie", f"dp{devices} sync=hfreduce", size)
    assert size / took / 1e9 == pytest.approx(paper_gb_s, rel=0.06)


def test_a_ring_is_held_by_what_devices_reach_of_a_port_and_hosts_are_not():
    # 9 GiB/s between a device and the port (section IV-D), nearly two buffers of which a ring sends
    ring = seconds("256xa100-40-pcie,nonvlink", "dp256", 186 * 2**20, "all_reduce")
    assert 186 * 2**20 / ring / 1e9 < 9 * 2**30 / 1e9 / 2
    sockets = mw.load_cluster("256xa100-40-pcie,nonvlink,100gbe").islands[0].node
    assert sockets.direct_gb_s == 0, "sockets go through the host's memory"


def test_kernels_go_on_beside_a_sum_of_hosts_as_fast_as_alone():
    asked = (
        mw.load_model("gpt2-medium"),
        mw.load_cluster("32xa100-40-pcie,nonvlink"),
        mw.parse_train("batch=256,seq=1024"),
    )
    rings, hosts = (mw.predict(*asked, mw.parse_plan(f"dp32 mb1 sync={s}"), detail=False) for s in ("step", "hfreduce"))
    assert hosts.step_time_s < rings.step_time_s
    assert hosts.attribution["dp"] < rings.attribution["dp"] / 2
    assert hosts.attribution["gemm"] == pytest.approx(rings.attribution["gemm"])


@pytest.mark.parametrize(
    ("on", "plan", "said"),
    [
        ("32xa100-40-pcie", "fsdp sync=hfreduce", "hosts sum whole gradients"),
        ("32xa100-40-pcie", "tp2 pp16 sync=hfreduce", "replicas, and the plan has one"),
        ("gb200-nvl72", "dp72 sync=hfreduce", "joined past their hosts of 4"),
    ],
)
def test_plans_and_clusters_that_hosts_cannot_sum_for_are_refused(on, plan, said):
    asked = mw.load_model("gpt2-medium"), mw.load_cluster(on), mw.parse_train("batch=1152,seq=1024")
    with pytest.raises(mw.MeshwrightError, match=said) as error:
        mw.predict(*asked, mw.parse_plan(plan), detail=False)
    assert any(d.code == "Y003" for d in error.value.diagnostics)
