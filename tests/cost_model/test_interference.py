"""Kernels beside collectives: what each loses, by hand."""

import msgspec
import pytest

from meshwright.cost import Costs
from meshwright.cost.chain import Estimate
from meshwright.cost.interference import memory_share, sent_bytes, slowdown
from meshwright.cost.roofline import contention
from meshwright.lower.entry import Entry
from meshwright.simulate.layer import cost
from meshwright.spec.cluster import load_device
from meshwright.work import Collective, Elementwise, Gemm, Group

H100 = load_device("h100")
EIGHT = Group(size=8, hops=())


def collective(op, num_bytes=1e9):
    return Collective(op=op, num_bytes=num_bytes, group=EIGHT)


def test_a_rank_of_a_ring_sends_its_share_as_often_as_the_collective_needs():
    assert sent_bytes(collective("all_reduce")) == pytest.approx(2 * 7 / 8 * 1e9)
    assert (
        sent_bytes(collective("reduce_scatter")) == sent_bytes(collective("all_gather")) == pytest.approx(7 / 8 * 1e9)
    )
    assert sent_bytes(collective("send")) == 1e9


def test_an_all_reduce_over_nvlink_takes_a_third_of_the_memory_and_one_between_nodes_little():
    # 360 GB/s a rank, each byte three times through 3,350 GB/s; 45 GB/s between nodes
    whole = collective("all_reduce")
    assert memory_share(whole, sent_bytes(whole) / 360e9, H100) == pytest.approx(3 * 360 / 3350, rel=0.01)
    assert memory_share(whole, sent_bytes(whole) / 45e9, H100) == pytest.approx(3 * 45 / 3350, rel=0.01)
    gather = collective("all_gather")
    assert memory_share(gather, sent_bytes(gather) / 360e9, H100) == pytest.approx(2 * 360 / 3350, rel=0.01)


def test_products_lose_multiprocessors_and_norms_lose_memory():
    whole = collective("all_reduce")
    seconds = sent_bytes(whole) / 360e9
    taken = memory_share(whole, seconds, H100)
    assert slowdown("gemm", whole, seconds, H100) == slowdown("attention", whole, seconds, H100) == contention(H100)
    assert slowdown("elementwise", whole, seconds, H100) == pytest.approx(taken / (1 - taken))
    # however short it is, it leaves half of the bandwidth; what was measured on a machine holds for all kernels there
    assert slowdown("elementwise", whole, 1e-6, H100) == 1.0
    told = msgspec.structs.replace(H100, comm_slowdown=0.1)
    assert slowdown("elementwise", whole, seconds, told) == slowdown("gemm", whole, seconds, told) == 0.1
    assert slowdown("gemm", whole, seconds, msgspec.structs.replace(H100, cores=4)) == 0.0


def test_a_layer_adds_up_what_each_pair_loses_for_as_long_as_both_run():
    # a sum of 3 s beside a product of 2 s and a norm of 4 s, of which 1 s is beside it
    seconds = {Gemm: (2.0, "gemm"), Elementwise: (4.0, "elementwise"), Collective: (3.0, "network")}
    costs = Costs(links=(lambda work, device: Estimate(*seconds[type(work)], "given", 0.0),))
    whole = collective("all_reduce", 3e12)
    entries = [
        Entry("sum", "tp", whole, ()),
        Entry("product", "compute", Gemm(m=1, n=1, k=1), ()),
        Entry("norm", "compute", Elementwise(num_bytes=1.0, fused=True), (1,)),
    ]
    lost = 2.0 * contention(H100) + 1.0 * slowdown("elementwise", whole, 3.0, H100)
    assert 0.1 < slowdown("elementwise", whole, 3.0, H100) <= 1.0
    assert cost(entries, "F", H100, costs).seconds == pytest.approx(6.0 + lost)
