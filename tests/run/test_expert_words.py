"""Words of experts change where tokens are computed and never what: one process' losses, gradients and parameters."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import msgspec
import pytest
import torch

from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run.hot import HotChoice
from meshwright.run.mesh import AxisGroup, build
from meshwright.run.routing import measures, watched
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.routing import follows, read, shares
from meshwright.spec.workload import Train
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, batch, differences, llama, train_steps

#: Relative to each tensor's largest element; two steps of AdamW amplify what another order of sums leaves.
TOLERANCE = 1e-9
MODEL = llama(layers=2, experts=8, top_k=2, moe_ffn=24, shared_ffn=16)
DEEP = llama(experts=8, top_k=2, moe_ffn=24, shared_ffn=16)  # of four layers
TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32", routing=read("zipf:s=1"))


@cache
def trained(count, plan, train, model=MODEL):
    return launch(count, train_steps, model, plan, train, 2)


def one_process(plan, train, model=MODEL):
    return trained(1, plan, train, model)


def far_from_one_process(plan, train=TRAIN, alone="tp1 mb8", model=MODEL):
    """The largest relative differences of losses, first gradients and last parameters."""
    expected = one_process(alone, train, model)
    layout = parse(plan).layout
    count = layout.tp * layout.pp * layout.cp * max(1, layout.dp)
    legal = parse(plan).on(count)
    assert check(legal, model, load(f"{count}xh100"), train) == []
    assert unexecutable(legal, model, train) == []
    got = trained(count, plan, train, model)
    losses = max(abs(a - b) / abs(b) for ours, theirs in zip(got[0][0], expected[0][0]) for a, b in zip(ours, theirs))
    apart = [max(differences(assemble(got, i), assemble(expected, i)).values()) for i in (1, 2)]
    return max(losses, *apart)


@pytest.mark.parametrize(
    "plan",
    [
        "dp4 ep4 placement=balanced",
        "dp2 ep2 placement=moetuner hot=3 mb2",
        "dp4 ep2 placement=exflow hot=2 portions=2 full",
        "dp4 ep2 etp2 portions=3",
        "dp4 ep4 ep_inner=2 full placement=balanced hot=1 mb2",
        "tp2 dp2 ep4 etp1 nosp mb2",
        "tp2 dp2 ep2 nosp duplicates=sent mb2",
        "pp2 dp2 ep2 hot=1 zero1 hot_by=step",
    ],
)
def test_where_experts_lie_and_how_tokens_travel_changes_nothing(plan):
    assert far_from_one_process(plan) < TOLERANCE


def test_hot_experts_are_those_that_were_chosen_most_in_the_step_before():
    class Seen:
        """A mixture's counts, and the experts that it was told to have on all ranks."""

        def __init__(self, layer):
            self.layer, self.hot, self.plan, self.seen = layer, "some", SimpleNamespace(hot=2), self
            self.counts, self.told = torch.tensor([9, 0, 0, 0]), None
            self.heat = lambda experts: setattr(self, "told", experts)

    model = llama(layers=2, experts=4, top_k=2, moe_ffn=24)
    mixtures = [Seen(0), Seen(1)]
    for by_step, told in ((True, [[2, 1], [0, 3]]), (False, [None, None])):
        choice = HotChoice(mixtures, model, AxisGroup(name="alone", ranks=(0,), index=0), by_step=by_step)
        choice.begin()
        for one, more in zip(mixtures, ([0, 3, 4, 3], [5, 0, 0, 2])):  # of the equal second ones the lower number
            one.counts, one.told = one.counts + torch.tensor(more), None
        choice.choose(torch.device("cpu"))
        assert [one.told for one in mixtures] == told


def test_an_exchange_in_two_steps_has_the_bits_of_the_one_all_at_once():
    """Rows arrive in the same order: losses, gradients and parameters of every rank are equal, not only near."""
    plan = "dp4 ep4 ep_inner=2 full placement=balanced hot=1 mb2"
    for steps, whole in zip(trained(4, plan, TRAIN), trained(4, plan.replace("ep_inner=2 ", ""), TRAIN), strict=True):
        assert steps[0] == whole[0]
        for i in (1, 2):
            assert [piece[:3] for piece in steps[i]] == [piece[:3] for piece in whole[i]]
            assert all(torch.equal(a[3], b[3]) for a, b in zip(steps[i], whole[i]))


@pytest.mark.parametrize(
    "plan", ["dp4 ep4 mb2 capacity=0.6", "dp4 ep2 mb2 capacity=0.6 hot=2 placement=balanced portions=2"]
)
def test_what_a_capacity_drops_is_what_one_process_drops_of_the_same_microbatches(plan):
    assert far_from_one_process(plan, alone="tp1 mb2 capacity=0.6") < TOLERANCE
    everything = one_process("tp1 mb2", TRAIN)[0][0][0][0]
    assert abs(one_process("tp1 mb2 capacity=0.6", TRAIN)[0][0][0][0] - everything) > 1e-6  # some were dropped


@pytest.mark.parametrize("plan", ["dp4 ep4 mb2", "tp2 dp2 ep2 etp1 mb4", "cp2 dp2 ep4 mb4 full"])
def test_a_global_balance_loss_is_that_of_one_process_with_the_whole_batch(plan):
    balanced = msgspec.structs.replace(TRAIN, balance="global", balance_weight=10.0)
    assert far_from_one_process(plan, balanced) < TOLERANCE


def test_a_balance_loss_of_microbatches_is_another_than_the_global_one():
    micro, whole = (msgspec.structs.replace(TRAIN, balance=b, balance_weight=10.0) for b in ("micro", "global"))
    assert far_from_one_process("dp4 ep2 mb2", micro, alone="tp1 mb2") < TOLERANCE
    norms = [one_process("tp1 mb2", t)[0][0][0][1] for t in (micro, whole, TRAIN)]
    assert len({round(norm, 8) for norm in norms}) == 3


@pytest.mark.parametrize("plan", ["dp4 ep4", "tp2 dp2 ep2 etp2 full mb2", "dp2 ep2 hot=2 capacity=0.9 mb4"])
def test_experts_that_read_what_entered_the_block_are_those_of_one_process(plan):
    model = llama(layers=2, experts=8, top_k=2, moe_ffn=24, shared_ffn=16, shortcut=True)
    alone = "tp1 mb4 capacity=0.9" if "capacity" in plan else "tp1 mb8"
    assert far_from_one_process(plan, alone=alone, model=model) < TOLERANCE
    usual, other = (launch(1, train_steps, m, "tp1 mb8", TRAIN, 1)[0][0][0][0] for m in (MODEL, model))
    assert abs(usual - other) > 1e-6  # another model


def _recorded(rank, plan_text, path):
    """Train a step while the routers are watched; what they were seen to do, and what is dropped."""
    plan = parse(plan_text)
    mesh = build(plan)
    trainer = Trainer(DEEP, plan, TRAIN, mesh, settings=Settings(precision="float64"))
    with watched(path, trainer.routers, DEEP, mesh):
        trainer.step(batch(TRAIN, DEEP.vocab, 0, plan.layout.dp, mesh["dp"].index))
    return measures(trainer.routers, TRAIN, plan)


@pytest.mark.parametrize("plan", ["dp2 ep2 mb2 full capacity=0.6", "pp2 dp1 mb4"])
def test_what_runs_record_of_routers_is_what_one_process_counts(plan, tmp_path):
    """Every microbatch once, also where its forward is repeated; over a border of stages nobody sees what follows."""
    seen = launch(2, _recorded, plan, str(tmp_path / "two.json"))
    launch(1, _recorded, plan.replace("dp2 ep2", "dp1").replace("pp2 ", ""), str(tmp_path / "one.json"))
    two, one = (read(f"{name}.json", tmp_path) for name in ("two", "one"))
    assert shares(two, 4, 8) == pytest.approx(shares(one, 4, 8))
    assert (two.counted, two.near) == (one.counted, 0.0)  # all copies of 128 tokens, in whole numbers
    inside = [0, 2] if "pp2" in plan else [0, 1, 2]
    assert follows(two, 4, 8)[inside] == pytest.approx(follows(one, 4, 8)[inside])
    assert seen[0].keys() == ({"dropped"} if "capacity" in plan else set())
    assert all(0.1 < each["dropped"] < 0.9 for each in seen if each)
