"""Advice where a plan does not fit: held against the answer of the plan that takes the advice."""

import re

import pytest

import meshwright as mw
from meshwright.report.remedies import remedies


def answer(model, on, plan, train="batch=512,seq=4096"):
    return mw.predict(mw.load_model(model), mw.load_cluster(on), mw.parse_train(train), mw.parse_plan(plan))


@pytest.mark.parametrize(
    ("model", "on", "plan"),
    [("deepseek-v3", "256xh100", "fsdp"), ("deepseek-v3", "256xh100", "pp4"), ("mixtral-8x22b", "32xh100", "pp2")],
)
def test_experts_that_fill_the_memory_are_spread_and_free_about_what_is_said(model, on, plan):
    before = answer(model, on, plan)
    (advice,) = [line for line in remedies(before) if line.startswith("ep")]
    word, said = advice.split()[0], float(re.search(r"frees about ([\d.]+) GiB", advice)[1])
    after = answer(model, on, f"{plan} {word}")
    state = ("parameters", "gradients", "optimizer", "gathered parameters")
    freed = sum(before.tightest.alive.get(name, 0) - after.tightest.alive.get(name, 0) for name in state) / 2**30
    assert said == pytest.approx(freed, rel=0.1)


def test_advice_on_experts_stays_inside_a_scale_up_domain_and_is_not_given_twice():
    advised = remedies(answer("minimax-m2", "64xh100", "fsdp"))
    assert advised[1].startswith("ep8 spreads the experts, 98% of the parameters, over 8 ranks")
    assert not any("ep" in line.split()[0] for line in remedies(answer("minimax-m2", "64xh100", "fsdp ep64")))


def test_a_dense_model_is_not_told_of_experts():
    assert not any(
        line.startswith("ep") for line in remedies(answer("llama3-70b", "8xh100", "fsdp", "batch=8,seq=4096"))
    )


def test_scores_that_fill_the_memory_are_computed_in_portions_and_free_what_is_said_at_least():
    asked = "qwen3-4b", "1xa800"
    plan, train = "mb1 full grads=bf16 master=none", "batch=1,seq=32768,optimizer=sgd"
    before = answer(*asked, plan, train)
    (advice,) = [line for line in remedies(before) if line.startswith("loss_portions")]
    said = float(re.search(r"loss_portions=16 frees ([\d.]+) GiB of logits", advice)[1])
    after = answer(*asked, f"{plan} loss_portions=16", train)
    assert (before.tightest.peak_bytes - after.tightest.peak_bytes) / 2**30 > said
    assert said == pytest.approx(before.tightest.alive["logits"] * 15 / 16 / 2**30, abs=0.06)
    assert not any("loss_portions" in line for line in remedies(answer(*asked, f"{plan} loss_portions=2", train)))
