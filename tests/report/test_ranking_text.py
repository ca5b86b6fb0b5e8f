"""The ranking of techniques as text: its verdict, and words of plans that stay whole on narrow terminals."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

import meshwright as mw
from meshwright.papers.whatif import rank
from meshwright.report.ranking_text import render, verdict


@pytest.fixture(scope="module")
def ranking():
    model, cluster = mw.load_model("gpt2"), mw.load_cluster("8xa100")
    return rank(model, cluster, mw.parse_train("batch=16,seq=512"), mw.parse_plan("dp8 mb1 zero1"))


def shown(ranking, width):
    console = Console(file=io.StringIO(), width=width)
    render(ranking, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_the_words_that_a_technique_changes_stand_together_at_every_width(ranking, width):
    changed = [a for a in ranking.attempts if ranking.changes(a)]
    words = {word for a in changed for word in a.after.plan.text().split()} - set(ranking.before.plan.text().split())
    text = shown(ranking, width)
    assert words and all(word in text.split() for word in words)


@pytest.mark.parametrize(("gain", "said"), [(1.0002, "no technique is faster"), (1.002, "most is gained by")])
def test_a_gain_that_reads_as_none_is_none(gain, said):
    plan = SimpleNamespace(text=lambda: "dp8")
    best = SimpleNamespace(paper=SimpleNamespace(id="one"), after=SimpleNamespace(fits=True))
    before = SimpleNamespace(plan=plan, step_time_s=1.0)
    found = SimpleNamespace(before=before, attempts=(best,), changes=lambda one: True, gain=lambda one: gain)
    assert said in verdict(found)
