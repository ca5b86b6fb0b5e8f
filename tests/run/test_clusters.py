"""A momentum for each cluster of the data: which text a step has, and what it makes of the momenta."""

import numpy as np
import pytest
import torch

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.clusters import ClusterMomentum, moment
from meshwright.run.data import Corpus
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as parse_train
from tests.run import codes, local, small
from tests.run.processes import launch_kept as launch

TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32", optimizer="momentum", clusters=2)


def test_a_step_moves_its_cluster_and_goes_along_the_mean_of_all():
    """By hand: gradients 1, 2 and 4 on clusters 0, 1 and 0 of two, at a rate of 0.5 from 10."""
    weight = torch.nn.Parameter(torch.tensor([10.0], dtype=torch.float64))
    made = ClusterMomentum([{"params": [weight]}], 0.5, 2)
    made.state[weight] |= {moment(number): torch.zeros(1, dtype=torch.float64) for number in range(2)}
    seen = []
    for step, gradient in enumerate((1.0, 2.0, 4.0)):
        made.cluster, weight.grad = step % 2, torch.tensor([gradient], dtype=torch.float64)
        made.step()
        seen.append(weight.item())
    # momenta (1, 0), (1, 2), (0.9 + 4, 2); half of the rate for each
    assert seen == pytest.approx([10 - 0.25, 9.75 - 0.75, 9.0 - 0.25 * 6.9])


@pytest.mark.parametrize("plan", ["dp2 zero1 mb1"])
def test_momenta_of_clusters_are_alike_under_every_plan(plan):
    (alone,) = launch(1, local_state, small.llama(layers=1), "dp1 tp1 mb8")
    got = launch(parse(plan).layout.num_ranks, local_state, small.llama(layers=1), plan)
    for key in ("param", "momentum_buffer", "momentum_buffer.1"):
        apart = small.differences(local.whole(got, key), local.whole([alone], key))
        assert max(apart.values()) < 1e-9, (key, max(apart, key=apart.get))


def local_state(rank, model, text):
    trainer = local.begun(model, text, TRAIN)
    local.steps(trainer, 0, 3)
    return local.state(trainer)


def test_training_goes_on_from_a_checkpoint_of_all_momenta(tmp_path):
    for on, again, *_ in launch(2, codes.resumed, small.llama(layers=1), "dp2 mb1", TRAIN, tmp_path, 1):
        assert on == again


def test_steps_take_turns_on_parts_of_the_text():
    """A text of 41 tokens that are their places is ten sequences of four: two parts of five, two a step."""
    said = {"tokens": np.arange(41), "starts": np.array([0]), "largest": 40, "seq_len": 4, "global_batch": 2}
    text = Corpus(**said, clusters=2)
    steps = [text.batch(step).tokens[:, 0].tolist() for step in range(10)]
    first, second = ([at for step in steps[part::2] for at in step] for part in range(2))
    assert sorted(first) == sorted([0, 4, 8, 12, 16] * 2) and sorted(second) == sorted([20, 24, 28, 32, 36] * 2)
    halves = [text.batch(3, index, 2).tokens[:, 0].tolist() for index in range(2)]
    assert [*halves[0], *halves[1]] == steps[3]


def test_every_cluster_keeps_a_momentum_in_memory():
    model, state = small.llama(layers=1), {}
    for clusters in (0, 4):
        work = Train(global_batch=8, seq_len=16, dtype="fp32", optimizer="momentum", clusters=clusters)
        run = simulate(parse("dp2 mb1"), model, load("2xh100"), work, standard())
        state[clusters] = run.lowered.static_bytes[0]["optimizer"]
    assert state[4] - state[0] == 3 * 4 * model.num_params


@pytest.mark.parametrize("words", ["optimizer=adamw,clusters=4", "optimizer=momentum,clusters=4,grow=0.5,most=64"])
def test_clusters_go_with_momentum_and_data_that_nothing_else_lays_out(words):
    with pytest.raises(MeshwrightError, match=r"W002.*clusters"):
        parse_train(f"batch=8,seq=16,{words}")
    work = parse_train("batch=8,seq=16,optimizer=momentum,clusters=4")
    assert work.clusters == 4 and parse_train(work.text()) == work
