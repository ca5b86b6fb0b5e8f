"""Recipes that real processes carry out: equal to one process, and not when the executor is broken."""

import os
import signal
import threading
import time

import pytest

from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.papers import checking, state, trained
from meshwright.papers.checks import checks
from meshwright.papers.outcome import Fact, Outcome
from meshwright.papers.record import paper, papers
from meshwright.papers.state import EXECUTED, MODEL, NOT_HERE, NOT_YET, USABLE
from meshwright.plan import check
from meshwright.plan.executable import unexecutable
from meshwright.plan.text import over

PLANS = sorted({plan for row in papers().values() for plan in row.runs})


@pytest.mark.parametrize("text", PLANS)
def test_a_plan_that_a_row_runs_is_legal_and_executable(text):
    plan = trained.read(text)
    model = trained.model_of(plan)
    train = trained.train_of(plan)
    assert check(plan, model, trained.cluster_of(plan), train) == []
    assert unexecutable(plan, model, train) == []


@pytest.mark.parametrize(
    "row", [p for p in papers().values() if p.recipe and p.recipe.plan and p.runs], ids=lambda p: p.id
)
def test_what_is_run_follows_the_recipe(row):
    """Some plan of the row stays itself when the recipe is put over it."""
    assert any(plan == over(plan, row.recipe.plan) for plan in map(trained.read, row.runs))


def test_states_say_which_rows_were_executed(states):
    assert {name for name, s in states.items() if s.executed == EXECUTED} >= {n for n, p in papers().items() if p.runs}


def reached(name, monkeypatch):
    """The state of a row whose plans are trained anew."""
    monkeypatch.setattr(trained, "_found", {})
    row = paper(name)
    return state.of(row, trained.judged(row.runs))


def test_gradients_that_are_not_exchanged(monkeypatch):
    from meshwright.run import sync

    monkeypatch.setattr(sync.Bucket, "exchange", lambda self: None)
    assert reached("pytorch-ddp", monkeypatch).state == NOT_YET


def test_layers_that_lie_on_the_wrong_stage(monkeypatch):
    from meshwright.run import exchanges

    monkeypatch.setattr(exchanges, "stage_layers", lambda plan, model: ((0, 1, 2), (2,)))
    assert reached("yuan2", monkeypatch).state == NOT_YET


def test_weight_gradients_that_are_left_out(monkeypatch):
    from meshwright.run import pipeline
    from meshwright.schedules.actions import W

    real = pipeline.RankPipeline._act

    def without(self, kind, *args):
        return None if kind == W else real(self, kind, *args)

    monkeypatch.setattr(pipeline.RankPipeline, "_act", without)
    assert reached("2bp", monkeypatch).state == NOT_YET


def test_partial_products_that_are_not_summed(monkeypatch):
    from meshwright.run import linear

    monkeypatch.setattr(linear, "all_reduce", lambda x, group, **more: x)
    assert reached("redco", monkeypatch).state == NOT_YET


def test_blocks_of_a_ring_that_are_not_merged(monkeypatch):
    from meshwright.run import ring

    real = ring.Merged.add

    def first_only(self, block, out, sums):
        if block.causal:
            real(self, block, out, sums)

    monkeypatch.setattr(ring.Merged, "add", first_only)
    assert reached("usp", monkeypatch).state == NOT_YET


def test_what_a_row_trains_or_puts_over_a_plan_is_not_its_baseline():
    """A ring is BurstAttention's baseline, not its recipe; the linear rule is no plan's."""
    burst, rule = paper("burstattention"), paper("imagenet-1h")
    assert burst.recipe.plan == "burstattention" and all("burstattention" in plan.split() for plan in burst.runs)
    assert (rule.recipe, rule.runs) == (None, ())


def test_tokens_that_stay_with_the_wrong_experts(monkeypatch):
    from meshwright.run import sent_rows

    real = sent_rows.swap

    def stay(x, group, sent=None, received=None, *, queue):
        if group.alone:  # the one process that all are compared with
            return real(x, group, sent, received, queue=queue)
        return x.new_zeros((x.shape[0] if received is None else sum(received), *x.shape[1:]))

    monkeypatch.setattr(sent_rows, "swap", stay)
    assert reached("deepspeed-ted", monkeypatch).state == NOT_YET


def test_collectives_that_bring_nothing(monkeypatch):
    from meshwright.run import placements

    monkeypatch.setattr(
        placements, "exchanged", lambda pieces, shapes, group: [pieces[0].new_zeros(tuple(s)) for s in shapes]
    )
    found = checks()["oneflow"]()
    assert [f.what for f in found.figures if not f.ok] == [
        "collectives of 2 x 2 processes, furthest from simulated ones",
        "a model trained by completed placements on 2 x 2 processes, uneven: furthest from one process",
    ]


@pytest.mark.parametrize(
    ("what", "broken", "rows"),
    [
        ("merge", lambda a, b: (a[0] + b[0], b[1]), {"tokenring", "burstattention"}),
        ("shift", lambda x, by=1: x, {"ring-self-attn", "tokenring", "inf-cl"}),
        ("_switch", lambda rows, group: list(rows.chunk(group.size)), {"dsp"}),
    ],
)
def test_cut_sequences_without_what_makes_them_whole(what, broken, rows, monkeypatch):
    from meshwright.run import sequences

    monkeypatch.setattr(sequences, what, broken)
    found = sequences.apart()
    assert {name for name, apart in found.items() if apart > trained.TOLERANCE} == rows


def test_linear_attention_whose_state_is_not_handed_on(monkeypatch):
    from meshwright.run import sequences

    def nothing(like, source):
        return sequences._Receive.apply(like, source) * 0

    monkeypatch.setattr(sequences, "received", nothing)
    assert sequences.apart()["lasp"] > trained.TOLERANCE


def test_a_plan_that_ends_its_job_is_a_fact_that_does_not_hold(monkeypatch):
    def dies(cases, **more):
        raise MeshwrightError.one("L001", "rank 1 on host died: killed by SIGKILL")

    monkeypatch.setattr("meshwright.run.equality.apart", dies)
    found = reached("gpipe", monkeypatch)
    assert found.state == NOT_YET and found.why.count("killed by SIGKILL") == 2 and found.passing


def test_processes_that_end_early_leave_what_was_simulated(monkeypatch):
    def dies(*args, **more):
        raise MeshwrightError.one("L001", "rank 1 on host died: killed by SIGKILL")

    monkeypatch.setattr("meshwright.run.placements.apart", dies)
    found = checks()["oneflow"]()
    assert (
        found.passing
        and len(found.figures) == 3
        and found.failures == ("not so: collectives of real processes: rank 1 on host died: killed by SIGKILL",)
    )


def test_a_plan_is_trained_once(monkeypatch):
    monkeypatch.setattr(trained, "_found", {"pp2 gpipe": 0.0, "pp4 gpipe": 1.0})
    monkeypatch.setattr(trained, "_trained", lambda texts: pytest.fail("trained again"))
    found = trained.judged(("pp2 gpipe", "pp4 gpipe"))
    assert [f.ok for f in found.figures] == [True, False]


def test_elements_that_no_rank_holds_are_missed(monkeypatch):
    from meshwright.run import equality

    real = equality._trained

    def without_the_first(case, place):
        seen = real(case, place)
        return seen if place.world == 1 else seen._replace(parameters=seen.parameters[1:])

    monkeypatch.setattr(equality, "_trained", without_the_first)
    plan = trained.read("pp2 gpipe")
    (found,) = equality.apart([equality.EqualityCase(model=trained.DENSE, plan=plan, train=trained.TRAIN)])
    assert not found.whole and found.most == float("inf")


def test_without_torch_a_row_is_usable_by_what_is_simulated_and_says_so(monkeypatch):
    monkeypatch.setattr("meshwright.papers.outcome.can_run", lambda: False)
    monkeypatch.setattr(trained, "train", lambda texts: pytest.fail("trained"))
    found = state.of(paper("zero-bubble"), checking.run(paper("zero-bubble")))
    assert (found.state, found.executed) == (USABLE, NOT_HERE)
    assert "'pp2 zb-h1'" in found.unchecked and "torch is not installed" in found.unchecked


def test_without_torch_a_check_that_is_all_processes_says_nothing(monkeypatch):
    monkeypatch.setattr("meshwright.papers.outcome.can_run", lambda: False)
    said = state.of(paper("ucp"), checking.run(paper("ucp")))
    assert (said.state, said.executed) == (NOT_YET, NOT_HERE)
    assert said.why.startswith("not checked here: ") and said.why.endswith("torch is not installed")


def test_a_torch_that_cannot_be_loaded_is_said_and_ends_nothing(monkeypatch):
    def broken(name):
        raise ImportError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr("meshwright.papers.outcome.import_module", broken)
    monkeypatch.setattr(trained, "train", lambda texts: pytest.fail("trained"))
    found = state.of(paper("zero-bubble"), checking.run(paper("zero-bubble")))
    assert (found.state, found.executed, found.passing) == (USABLE, NOT_HERE, True)
    assert "torch cannot be loaded: libtorch_cpu.so" in found.unchecked


def test_what_is_not_checked_speaks_neither_for_nor_against():
    good = Fact("it is so", True)
    alone = paper("jacobi-feedforward")
    assert state.of(alone, Outcome(facts=(good,), unchecked=("a busy machine",))).state == MODEL
    both = state.of(alone, Outcome(facts=(good,), executed=True, unchecked=("a busy machine",)))
    assert (both.executed, both.unchecked) == (EXECUTED, "a busy machine")


def test_an_interrupt_while_plans_are_trained_ends_the_command_and_keeps_no_plan(monkeypatch, tmp_path, capsys):
    from meshwright.run import equality

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trained, "_found", {})
    monkeypatch.setattr(equality, "_trained", lambda case, place: time.sleep(8))
    monkeypatch.setattr(checking, "checks", lambda: dict.fromkeys(checks(), Outcome))
    real = trained._trained

    def interrupted(texts):
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        return real(texts)

    monkeypatch.setattr(trained, "_trained", interrupted)
    assert main(["papers", "--check", "--area", "pipeline"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert not trained._found and not any(
        p.runs
        for n, p in papers().items()
        if n in checking._kept(checking.store_folder() / "papers.json") and p.checked
    )
