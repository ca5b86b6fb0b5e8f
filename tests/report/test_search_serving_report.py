"""The search for a serving plan as a page: offline, complete, and the same as the answer."""

import pytest

import meshwright as mw
from meshwright.cli import main
from meshwright.report import search_serving_html
from meshwright.report.search_serving_text import coverage, said, verdict
from meshwright.search.restrict import restricted
from meshwright.search.serving.find import find_serving
from meshwright.search.serving.found import FLOOR, MISSED, NO_ROOM, WORK
from meshwright.search.serving.space import default, forms
from meshwright.spec.serve import parse
from tests.report.test_report_html import Page

FIX = ("policy=vllm-v1,sarathi", "budget=0,512")
WORDS = "rate=60,prompt=512,output=64,requests=300,max_batch=64"


def found_for(slo):
    model, cluster, serve = mw.load_model("llama3-8b"), mw.load_cluster("4xh100"), parse(f"{WORDS},{slo}")
    space = restricted(default(model, cluster, serve), fix=FIX, forms=forms())
    return find_serving(model, (cluster,), serve, spaces=(space,))


@pytest.fixture(scope="module")
def found():
    return found_for("ttft=200ms,tpot=20ms@p90")


@pytest.fixture(scope="module")
def page(found):
    return search_serving_html.render(found)


def test_the_page_is_one_file_that_asks_for_nothing(page):
    read = Page(page)
    assert not read.open
    assert [a for _, a in read.elements if str(a.get("src", a.get("href", ""))).startswith(("http", "//"))] == []
    assert "default-src 'none'" in page and "url(" not in page


def test_the_page_says_what_the_answer_says(page, found):
    text = " ".join(" ".join(Page(page).text).split())
    assert verdict(found) in text and coverage(found) in text
    for candidate, _ in found.pareto:
        assert said(found, candidate) in text
    for loser in found.losers:
        assert said(found, loser.candidate) in text and loser.why in text
    for why, count in found.reasons.items():
        assert why in text and f"{count:,}" in text
    for name in found.space.domains:
        assert name in text


def test_a_layout_that_lost_is_shown_by_its_plan_that_got_farthest(found):
    """A static batch of long prompts has no room where another engine has: the layout has."""
    losers = {one.candidate.family: [] for one in found.lost_layouts}
    for loser in found.losers:
        losers.get(loser.candidate.family, []).append(loser)
    stages = (NO_ROOM, FLOOR, WORK, MISSED)
    for one in found.lost_layouts:
        later = stages[stages.index(one.reason) + 1 :] if one.reason in stages else ()
        assert not any(other.reason in later for other in losers[one.candidate.family])
        assert all(one.ratio <= other.ratio for other in losers[one.candidate.family] if other.reason == one.reason)
    assert losers and len(losers) == len(found.lost_layouts)


def test_the_front_is_drawn_by_every_pair_of_its_values_with_each_plan_of_it(found):
    drawings = search_serving_html.figures(found)
    assert len(found.front) == 3 and len(drawings) == 3
    titles = {shape.title for shape in drawings[0].shapes if shape.kind == "dot"}
    assert {said(found, candidate) for candidate, _ in found.pareto} <= titles


def test_where_nothing_keeps_the_bounds_the_nearest_plan_is_shown():
    nothing = found_for("tpot=1ms")
    page = search_serving_html.render(nothing)
    assert nothing.nearest is not None and "Nearest" in page and verdict(nothing) in page
    assert said(nothing, nothing.nearest.candidate).split()[0] in page


def test_the_command_writes_the_page(tmp_path, capsys):
    out = tmp_path / "found.html"
    words = ["--serve", WORDS, "--slo", "ttft=200ms,tpot=20ms@p90", "--fix", FIX[0], "--fix", FIX[1]]
    assert main(["search", "llama3-8b", "--on", "2xh100", *words, "--report", str(out)]) == 0
    assert "Pareto" in out.read_text() and f"wrote {out}" in capsys.readouterr().err
