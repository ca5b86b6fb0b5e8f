"""Tokens exchanged inside runs of ranks and then across them: the same bytes, and what each step's ports carry."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.layers.routed import load_of
from meshwright.lower.place import Mesh
from meshwright.plan import check, parse
from meshwright.spec import cluster as clusters
from meshwright.spec import model as models
from meshwright.spec.routing import read, shares
from meshwright.spec.workload import Train

MODEL, CLUSTER = models.load("mixtral-8x7b"), clusters.load("2x4xh100")


def test_each_step_carries_what_goes_to_a_place_of_every_run_and_to_every_run():
    """By hand: a rank gives place j what all runs' ranks at j want, and a run sends another what its experts want."""
    plan = parse("ep8 ep_inner=4").on(8)
    mesh = Mesh(plan, CLUSTER)
    whole, *steps = (mesh.expert_group(name) for name in ("ep", "ep_inner", "ep_outer"))
    assert [g.size for g in steps] == [4, 2]
    assert [[h.scale_out for h in g.hops] for g in steps] == [[False], [True]]
    train = Train(global_batch=8, seq_len=64, routing=read("zipf:s=1"))
    load = load_of(MODEL, plan, train, MODEL.mixtures[0], 64, whole, tuple(steps))
    wanted = shares(train.routing, 32, 8)  # one expert a rank
    places = wanted.reshape(-1, 2, 4).sum(1)
    # a rank receives what its place is sent by the three others, or sends what is for theirs; evenly it is 3/4
    inside = np.maximum(3 * places, 1 - places).max(1) / 0.75
    runs = wanted.reshape(-1, 2, 4).sum(2)
    across = (4 * runs.max(1)) / (4 * 4 / 8)  # four ranks' tokens go to the busier run; evenly half of them
    assert load.inside == pytest.approx((inside.mean(),))
    assert load.across == pytest.approx((across.mean(),))
    even = load_of(MODEL, plan, Train(global_batch=8, seq_len=64), MODEL.mixtures[0], 64, whole, tuple(steps))
    assert even.carried_in_two(*steps) == tuple(steps)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ep8 ep_inner=3", "valid ep_inner: 2, 4"),
        ("ep8 ep_inner=8", "valid ep_inner: 2, 4"),
        ("ep2 ep_inner=2", "say ep4 or more"),
        ("ep8 ep_inner=2 portions=2", "of which portions=2 would hide one"),
        ("ep8 ep_inner=2 overlap=ep", "of which overlap=ep would hide one"),
    ],
)
def test_runs_that_do_not_cut_the_ranks_and_other_ways_of_hiding_are_refused(words, said):
    found = check(parse(words).on(8), MODEL, CLUSTER, Train(global_batch=8, seq_len=64))
    assert said in "\n".join(d.message + " " + d.help for d in found)


def test_a_model_without_experts_has_none_to_exchange_in_two_steps():
    found = check(parse("ep_inner=2").on(8), models.load("llama3-8b"), CLUSTER, Train(global_batch=8, seq_len=64))
    assert [(d.code, "drop ep_inner" in d.help) for d in found] == [("P017", True)]
