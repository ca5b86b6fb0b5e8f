"""The nearest plan that a refusal offers: one that the target expresses and that fits, as predict says of it."""

import re

import pytest

from meshwright.answer.predict import predict
from meshwright.cost import standard_on
from meshwright.errors import Infeasible
from meshwright.export import ExportRequest, engines, export, nearest_plan, refusals, runnable
from meshwright.plan import parse
from meshwright.spec import cluster, model, workload


def question(name, on, train, words):
    where = cluster.load(on)
    nouns = model.load(name), where, workload.parse(train)
    return ExportRequest(model=nouns[0], cluster=where, train=nouns[2], plan=parse(words).on(where.num_devices))


def offered(target, asked):
    profile = runnable.profile((target,))
    found = nearest_plan.nearest(asked, engines.exporter(target).limits, profile)
    nouns = asked.model, asked.cluster, asked.train
    with pytest.raises(Infeasible) as caught:
        export(target, *nouns, asked.plan)
    costs = standard_on(asked.cluster, profile)
    return (
        found,
        caught.value.diagnostics[-1].help,
        nouns,
        lambda plan: predict(*nouns, plan, costs=costs, detail=False),
    )


@pytest.mark.parametrize(
    ("target", "words"),
    [
        # closing the gap alone (zero2) does not fit, sharding the parameters does
        ("torchtitan", "zero1 selective"),
        ("accelerate", "zero1 tp2 nosp"),
        # a replica of one device does not fit without sharding, and DeepSpeed has no groups of shards
        ("deepspeed", "hsdp2 operators"),
    ],
)
def test_what_is_offered_is_expressed_and_predicted_to_fit(target, words):
    asked = question("llama3-8b", "8xh100", "batch=64,seq=8192", words)
    found, help, nouns, answer = offered(target, asked)
    assert refusals(target, ExportRequest(model=nouns[0], cluster=nouns[1], train=nouns[2], plan=found.plan)) == ()
    said, refused = answer(found.plan), answer(asked.plan)
    assert said.fits and found.fits
    assert found.step_time_s == pytest.approx(said.step_time_s, rel=1e-9)
    assert found.headroom_bytes == pytest.approx(min(r.headroom_bytes for r in said.memory), rel=1e-6)
    change = abs(said.step_time_s / refused.step_time_s - 1)
    assert f'--plan "{found.plan.text()}", {said.step_time_s:.3g} s a step' in help
    assert f"{change:.1%}" in help or "as fast as" in help
    assert ("which does not fit" in help) == (not refused.fits)


def test_where_nothing_near_fits_the_excess_and_the_search_are_named():
    # 70.6e9 parameters with 16 bytes of state each are 1.1 TB, eight devices have 0.64 TB
    asked = question("llama3-70b", "8xh100", "batch=64,seq=2048", "tp2 pp2 zero2")
    found, help, _, answer = offered("accelerate", asked)
    assert not found.fits and not answer(found.plan).fits
    over = re.search(r"does not fit, ([\d.]+) GiB over", help)
    assert float(over[1]) == pytest.approx(-found.headroom_bytes / 2**30, abs=0.05)
    assert "meshwright search --for" in help


def test_what_no_plan_mends_has_no_nearest_plan():
    asked = question("gemma2-9b", "8xh100", "batch=64,seq=2048", "fsdp")
    found, help, *_ = offered("megatron", asked)
    assert found is None and "--plan" not in help


def test_a_refusal_without_a_framework_is_not_predicted():
    asked = question("llama3-8b", "8xh100", "batch=64,seq=8192", "zero1 selective")
    found = nearest_plan.nearest(asked, engines.exporter("torchtitan").limits, None)
    assert (found.plan, found.step_time_s) == (parse("dp8 zero2"), 0.0)
    assert found.text("TorchTitan") == 'the nearest plan that TorchTitan can express: --plan "dp8 mb1 zero2"'
