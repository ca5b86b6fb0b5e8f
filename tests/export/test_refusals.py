"""Refusals of engines, asked of thousands of plans: the same gaps as an export, cheaply and without a trace."""

import time

import pytest
from hypothesis import given, settings

from meshwright import plan as plans
from meshwright.errors import Infeasible, MeshwrightError
from meshwright.export import ENGINES, TARGETS, ExportRequest, export, refusals
from meshwright.plan.executable import unexecutable
from meshwright.spec import cluster, model, workload
from tests.export.questions import legal


def request(name, on, train, words):
    where = cluster.load(on)
    plan = plans.parse(words).on(where.num_devices)
    return ExportRequest(model=model.load(name), cluster=where, train=workload.parse(train), plan=plan)


@pytest.mark.parametrize("target", TARGETS)
@given(question=legal())
@settings(max_examples=10)
def test_a_plan_without_refusals_is_exported_and_one_with_them_is_not(target, question):
    asked, where, train, plan = question
    found = refusals(target, ExportRequest(model=asked, cluster=where, train=train, plan=plan.on(where.num_devices)))
    try:
        export(target, asked, where, train, plan, framework=None)
    except Infeasible as error:
        assert len(error.diagnostics) == len(found) > 0
    else:
        assert found == ()


def test_meshwright_refuses_what_its_executor_does_not_run():
    asked = request("llama3-8b", "8xh100", "batch=64,seq=2048", "tp2 fsdp mxfp8 unfused operators")
    found = refusals("meshwright", asked)
    assert len(found) == len(unexecutable(asked.plan, asked.model, asked.train)) == 3
    assert [gap.facet for gap in found] == ["memory.attention", "memory.recompute", "precision.compute"]
    assert "mxfp8 is predicted, not trained" in found[2].reason
    assert refusals("meshwright", request("llama3-8b", "8xh100", "batch=64,seq=2048", "tp2 fsdp")) == ()


def test_an_unknown_engine_is_misuse_and_names_the_nearest():
    with pytest.raises(MeshwrightError) as caught:
        refusals("meshwrite", request("llama3-8b", "8xh100", "batch=64,seq=2048", "fsdp"))
    (only,) = caught.value.diagnostics
    assert (only.code, only.help) == ("E002", "did you mean meshwright?")


@pytest.mark.parametrize("engine", ENGINES)
def test_asking_takes_less_than_200_microseconds_of_cpu(engine):
    asked = request("deepseek-v3", "256xh100", "batch=2048,seq=4096", "tp2 pp4 ep8 zero2")

    def once():
        began = time.process_time_ns()
        refusals(engine, asked)
        return time.process_time_ns() - began

    assert min(once() for _ in range(50)) < 200_000


@pytest.mark.parametrize("target", [name for name in TARGETS if name not in ("torch-ddp", "torchft")])
def test_engines_whose_replicas_step_together_refuse_local_steps_and_ours_runs_them(target):
    asked = request("llama3-8b", "2x8xh100", "batch=64,seq=4096", "tp2 dp8 sync=local:h=8")
    assert "sync.policy" in [gap.facet for gap in refusals(target, asked)]
    assert refusals("meshwright", asked) == ()
