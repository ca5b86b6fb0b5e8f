"""What can be predicted and not trained says so, and why."""

from __future__ import annotations

from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

TRAIN = Train(global_batch=8, seq_len=64, dtype="fp32")
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "ffn": 64, "max_seq_len": 64}
EXPERTS = {"experts": 4, "top_k": 2, "moe_ffn": 32}


def codes(**over) -> dict[str, str]:
    found = unexecutable(parse("dp2"), transformer(**SMALL | over), TRAIN)
    return {d.code: d.message for d in found}


def test_experts_are_trained_where_they_have_published_names():
    assert codes(gated=True, **EXPERTS) == {}


def test_experts_of_a_gpt2_are_predicted_and_not_trained():
    assert codes() == {}
    refused = codes(bias=False, **EXPERTS)
    assert list(refused) == ["P030"]
    assert "no published GPT-2 has experts" in refused["P030"]
