"""Assumptions name the share of the bandwidth between nodes that a framework's exchanges of sharded state reach."""

import pytest

from meshwright.answer.predict import predict
from meshwright.cost import standard_on
from meshwright.plan import parse
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train


def assumptions(plan, on="2x1x4090,100mbit", framework=""):
    cluster, train = load_cluster(on), parse_train("batch=8,seq=128")
    costs = standard_on(cluster, framework, train.dtype)
    found = predict(load_model("llama-1m"), cluster, train, parse(plan), costs=costs)
    return found, {one.name: one.value for one in found.assumptions}


def test_exchanges_layer_by_layer_are_priced_at_the_share_that_is_said():
    found, said = assumptions("fsdp")
    value = said["exchanges of each layer"]
    assert value == "40% of the bandwidth between nodes"
    # by hand: every of 4 microbatches reduces 4 bytes and gathers twice 2 of 857,472 parameters, half of them on the
    # wire at 90% of 12.5 MB/s: 0.61 s of reductions at the whole rate, 1.52 s at 40% of it, beside which others go on
    reductions_s = 4 * 857_472 / 2 * 4 / 11.25e6
    assert reductions_s / 0.4 < found.step_time_s < 2 * reductions_s / 0.4


@pytest.mark.parametrize(("plan", "on"), [("dp2", "2x1x4090,100mbit"), ("fsdp", "2x4090")])
def test_other_exchanges_and_those_inside_a_node_are_at_all_of_it(plan, on):
    assert "exchanges of each layer" not in assumptions(plan, on)[1]


def test_the_largest_of_small_buffers_is_said_in_kib_and_milliseconds():
    value = assumptions("dp2")[1]["collectives over 100mbit"]
    assert "KiB over 2 ranks in" in value and value.endswith(" ms")


def test_a_gather_after_the_update_is_at_the_share_that_is_said():
    assert assumptions("dp2 zero1 gather=after")[1]["gather after the update"] == "36% of the bandwidth between nodes"
    assert "gather after the update" not in assumptions("dp2 zero1")[1]
