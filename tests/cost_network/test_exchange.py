"""Token exchange of expert parallelism: how often a token is sent, and what bounds sending it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.exchange import MODES, ExchangeConstants, MoeExchange, exchange_seconds, flows, price, reached
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.work import Group, Hop

H100 = load_device("h100_sxm")
NODE = Hop(name="nvlink", members=8, gb_s=450.0, latency_us=0.6, below=1, topology="switch")


def over(nodes: int) -> Group:
    rail = Hop(name="rail", members=nodes, gb_s=400.0, latency_us=2.7, below=8, topology="fat_tree", scale_out=True)
    return Group(size=8 * nodes, hops=(NODE, rail) if nodes > 1 else (NODE,))


def item(phase: str = "dispatch", nodes: int = 1, **changes) -> MoeExchange:
    fields = {"tokens": 4096, "hidden": 7168, "top_k": 8, "experts": 256, "dtype": "fp8"} | changes
    return MoeExchange(phase=phase, group=over(nodes), **fields)


def test_a_share_is_reached_as_often_as_drawing_without_repetition_says():
    # 4 experts in 2 shares, 2 chosen: 1 of 6 pairs misses a share
    assert reached(2, 4, 2) == pytest.approx(5 / 6)
    assert reached(8, 8, 1) == pytest.approx(1 / 8)
    assert reached(1, 256, 8) == 1


def test_a_token_goes_once_to_each_rank_and_once_to_each_other_node():
    copies, near, far = flows(item(nodes=2, tokens=1, hidden=1), each_expert=False)
    assert copies == pytest.approx(16 * reached(16, 256, 8))
    assert near == pytest.approx(copies * (1 + 4 / 128))
    assert far == pytest.approx(reached(2, 256, 8) * (1 + 4 / 128))


def test_low_latency_kernels_send_a_token_for_every_expert():
    copies, near, far = flows(item("combine", nodes=2, tokens=1, hidden=1), each_expert=True)
    assert copies == 8
    assert near + far == pytest.approx(8 * 15 / 16 * 2)  # bf16 results, one share in 16 stays


def test_a_large_exchange_in_a_node_is_bound_by_its_port():
    only_port = ExchangeConstants(
        start_us=0, token_ns=0, copy_ns=0, expert_us=0, node_us=0, fraction=0.5, network_fraction=1
    )
    sent = 4096 * 7168 * (1 + 4 / 128) * 7 * reached(8, 256, 8)
    assert exchange_seconds(item(), only_port, each_expert=False) == pytest.approx(sent / 225e9)


def test_over_nodes_the_nic_of_a_rank_bounds_it():
    only_port = ExchangeConstants(
        start_us=0, token_ns=0, copy_ns=0, expert_us=0, node_us=0, fraction=1, network_fraction=1
    )
    sent = 4096 * 7168 * (1 + 4 / 128) * 3 * reached(4, 256, 8)
    assert exchange_seconds(item(nodes=4), only_port, each_expert=False) == pytest.approx(sent / 50e9)


@given(
    st.sampled_from(MODES), st.sampled_from(["dispatch", "combine"]), st.sampled_from([1, 2, 8]), st.integers(1, 10**5)
)
def test_more_tokens_never_take_less(mode, phase, nodes, tokens):
    fewer, more = (price(item(phase, nodes, tokens=t), H100, mode=mode).seconds for t in (tokens, tokens * 2))
    assert more >= fewer


def test_a_group_of_one_is_free():
    alone = MoeExchange(phase="dispatch", tokens=9, hidden=9, top_k=1, experts=8, group=Group(size=1, hops=()))
    assert price(alone, H100).seconds == 0.0


def test_deepep_on_eight_h100_takes_what_was_published():
    # DeepEP as SGLang 0.5.6 runs it, 20 multiprocessors, 4096 tokens of 7168 to 8 of 256 experts: 491 and 973 us
    assert price(item(), H100).seconds == pytest.approx(491e-6, rel=0.15)
    assert price(item("combine"), H100).seconds == pytest.approx(973e-6, rel=0.2)


def test_a_fabric_or_a_size_nobody_measured_is_flagged_and_wider():
    a100 = load_device("a100_80gb_sxm")
    known, other, many = price(item(), H100), price(item(), a100), price(item(tokens=10**7), H100)
    assert (known.source, other.source, many.source) == ("fitted", "extrapolated", "extrapolated")
    assert known.sigma < min(other.sigma, many.sigma)


def test_a_mode_nobody_measured_is_refused():
    with pytest.raises(MeshwrightError, match="N004"):
        price(item(), H100, mode="lowlatency")
