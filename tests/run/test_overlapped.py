"""Overlap inside layers by real processes: exact ways train as one process does, in float64; a ladder as a ladder."""

from __future__ import annotations

import pytest
import torch

from meshwright.run import model as run_model
from meshwright.run.collect import all_gather, reduce_scatter
from meshwright.run.mesh import AxisGroup
from meshwright.run.tiles import gathered_product, scattered_product
from tests.run.processes import launch as launch_anew
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, differences, llama, train_steps
from tests.run.test_equality import TOLERANCE, TRAIN, compare, reference


@pytest.mark.parametrize(
    ("model", "plan", "documents"),
    [
        ("llama", "tp2 nosp mb4 overlap=dp,pp,tp:domino", False),
        ("one key-value head", "tp2 nosp pp2 mb4 zb-h1 overlap=dp,pp,tp:domino4", True),
        ("gpt", "tp2 dp2 zero2 mb2 overlap=dp,tp", False),
    ],
)
def test_parts_that_overlap_train_as_one_process_does(model, plan, documents):
    compare(model, plan, documents=documents)


def _ladder(stage, x, p):
    """Ladder Residual's section 3 in plain autograd: part i reads the sum of the parts before i - 1."""
    streams = [stage.embedding(p)]
    for layer in stage.layers:
        for norm, inside in ((layer.attention_norm, lambda u, a=layer.attention: a(u, p)), (layer.mlp_norm, layer.mlp)):
            read = streams[max(0, len(streams) - 2)]
            streams.append(streams[-1] + inside(norm(read)))
    return stage.head(streams[-1], p)


def _one_process_ladder(rank, model, *asked):
    run_model.Stage.forward = _ladder
    return train_steps(rank, model, *asked)


def test_a_ladder_over_ranks_trains_as_a_ladder_written_plainly_and_unlike_the_usual_model():
    model = llama()
    got = launch(2, train_steps, model, "tp2 nosp mb4 overlap=dp,tp:ladder", TRAIN, 1)
    # what it patches ends with its process
    expected = launch_anew(1, _one_process_ladder, model, f"tp1 mb{TRAIN.global_batch}", TRAIN, 1)
    assert got[0][0][0] == pytest.approx(expected[0][0][0], rel=TOLERANCE)
    apart = differences(assemble(got, 1), assemble(expected, 1))
    assert max(apart.values()) <= TOLERANCE, apart
    usual = reference("llama", 4, 1, False)[0][0][0][0]
    assert abs(usual / got[0][0][0][0] - 1) > 1e-6


def _both_ways(rank):
    group = AxisGroup(name="tp", ranks=(0, 1, 2), index=rank, handle=torch.distributed.group.WORLD)
    draw = torch.Generator().manual_seed(rank)
    shard, weight = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((4, 2, 5), (7, 5)))
    out, whole = gathered_product(shard, weight, group)
    gathered = all_gather(shard, group)
    apart = [(whole - gathered).abs().max(), (out - gathered @ weight.T).abs().max()]
    tall = torch.randn(12, 2, 5, generator=draw, dtype=torch.float64)
    apart.append((scattered_product(tall, weight, group) - reduce_scatter(tall @ weight.T, group)).abs().max())
    return [float(x) for x in apart]


def test_products_in_the_steps_of_a_ring_are_the_products_with_their_collectives():
    for whole, product, scattered in launch(3, _both_ways):
        assert whole == 0.0 and product < 1e-13 and scattered < 1e-13
