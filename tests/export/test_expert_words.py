"""Words of experts that only the executor has are refused by every target that trains, all at once."""

from __future__ import annotations

import pytest

from meshwright.errors import MeshwrightError
from meshwright.export import export
from meshwright.plan import parse
from meshwright.spec.cluster import load
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed"])
def test_words_of_experts_that_no_target_has_are_refused_at_once(target):
    train = parse_train("batch=64,seq=4096,routing=zipf:s=1,balance=global")
    moe = "ep8 etp1 capacity=1.25 placement=balanced hot=2 portions=2"
    plan = parse(f"tp2 mb1 zero1 full nosp brought=kept loss_portions=8 {moe}")
    with pytest.raises(MeshwrightError) as error:
        export(target, load_model("mixtral-8x7b"), load("32xh100"), train, plan)
    said = "\n".join(d.message for d in error.value.diagnostics)
    words = (
        "placement=balanced",
        "capacity=1.25",
        "hot=2",
        "portions=2",
        "brought=kept",
        "loss_portions=8",
        "balance=",
        "without sp",
    )
    assert [word for word in words if word not in said] == []
    with pytest.raises(MeshwrightError, match="its experts read what leaves attention"):
        export(target, load_model("mixtral-8x7b,shortcut"), load("32xh100"), train, parse("dp32 mb1 zero1 full"))


def test_moving_selection_biases_are_refused_by_a_target_that_has_a_setting_of_its_own():
    train, plan = parse_train("batch=64,seq=4096,balance=bias"), parse("dp64 ep64 mb1 zero1 full")
    with pytest.raises(MeshwrightError, match="balance=bias"):
        export("megatron", load_model("deepseek-v3"), load("64xh100"), train, plan)
