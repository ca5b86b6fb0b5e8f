"""The search as a page, as text and as a picture: offline, in palette colours, complete, and the same as the answer."""

import re
import struct
from xml.etree import ElementTree

import pytest
from rich.console import Console

from meshwright.export.runnable import engine
from meshwright.report import palette, search_html, search_text
from meshwright.report.search_plot import Axis, drawn, figure, marks
from meshwright.search.engines import Demands
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse
from tests.report.test_report_html import Page

ASKED = model("llama3-8b"), cluster("8xh100"), parse("batch=64,seq=8192")
FIX = ["order=tp-cp-dp-pp", "tp=1,2", "cp=1,2", "pp=1,2", "recompute=none", "mb=1,2"]


@pytest.fixture(scope="module")
def found():
    engines = tuple(engine(name, *ASKED) for name in ("deepspeed",))
    space = restricted(default(*ASKED), fix=FIX)
    return find(*ASKED, space=space, families=True, recommend=True, demands=Demands(engines=engines, room_bytes=1e9))


@pytest.fixture(scope="module")
def page(found):
    return search_html.render(found)


def test_the_page_is_one_file_that_asks_for_nothing(page):
    read = Page(page)
    assert not read.open
    outside = [
        a for _, a in read.elements if any(str(a.get(k, "")).startswith(("http", "//")) for k in ("src", "href"))
    ]
    assert outside == []
    assert "default-src 'none'" in page and "url(" not in page


def test_the_page_says_what_the_answer_says(page, found):
    text = " ".join(" ".join(Page(page).text).split())
    assert search_text.verdict(found) in text and search_text.coverage(found) in text
    assert found.recommended.plan.text() in text and found.recommended.why in text
    for ranked in found.best:
        assert ranked.plan.text() in text
        assert f"{ranked.prediction.mfu:.1%}" in text
        for variant in ranked.variants:
            assert variant.plan.text() in text
    if found.unrunnable:
        assert found.unrunnable.plan.text() in text and found.unrunnable.reasons[0] in text
    for why, count in found.pruned.items():
        assert why in text and f"{count:,}" in text
    assert "run by DeepSpeed" in text and "zero1" in text


def test_every_point_of_the_front_can_be_tabbed_to_and_leads_to_its_row(page, found):
    read = Page(page)
    ids = {a["id"] for _, a in read.elements if a.get("id")}
    points = [a for tag, a in read.elements if tag == "a" and a.get("class") == "point"]
    assert len(points) >= 2 * len(found.pareto)  # on the broad and on the narrow drawing
    assert {a["href"][1:] for a in points} <= ids
    assert sum(a["href"].startswith("#plan-") for a in points) == 2 * len(found.pareto)
    for plan, _ in found.pareto:
        assert page.count(f"<code>{plan.text()}</code>") >= 3
    assert not any("tabindex" in a for _, a in read.elements)


def test_colours_are_of_the_palette_in_both_themes(page):
    for theme in ("light", "dark"):
        assert palette.css(theme) in page
    known = {c.lower() for kind in (palette.THEMES, palette.MARKS) for t in kind.values() for c in t.values()}
    assert {c.lower() for c in re.findall(r"#[0-9a-fA-F]{6}\b", page)} <= known | {"#ffffff", "#000000"}
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    assert used <= set(re.findall(r"--([\w-]+):", page))


def test_a_page_of_nothing_that_fits_names_what_comes_closest():
    asked = model("llama3-8b"), cluster("2x4090"), parse("batch=16,seq=2048")
    none = find(*asked)
    read = Page(search_html.render(none))
    text = " ".join(" ".join(read.text).split())
    assert "nothing fits" in text and none.misses[0].remedy in text and none.misses[0].plan.text() in text
    assert "llama3-8b on 2x4090" in text and not read.having(id="front")


def test_an_axis_has_round_ticks_within_it():
    """By hand: 4.779 to 7.644, with 4% around, is 4.66 to 7.76, whose fifth is 0.62, so ticks are whole seconds."""
    axis = Axis.of("step", [4.779, 7.644, 5.0])
    assert axis.ticks == (5.0, 6.0, 7.0)
    assert (round(axis.low, 3), round(axis.high, 3)) == (4.664, 7.759)
    assert axis.share(axis.low) == 0 and axis.share(axis.high) == 1
    alone = Axis.of("energy", [3.0])
    assert alone.ticks and all(alone.low <= t <= alone.high for t in alone.ticks)
    assert drawn("headroom", -3 * 2**30) == 3.0 and drawn("step", 2.5) == 2.5


def test_the_plot_places_faster_plans_left_and_roomier_ones_above(found):
    placed, (across, up) = marks(found, 720.0, 400.0)
    by = {m.plan: m for m in placed}
    front = [by[plan] for plan, _ in found.pareto]
    assert [m.x for m in front] == sorted(m.x for m in front)
    assert [m.y for m in front] == sorted((m.y for m in front), reverse=True)
    assert all(0 <= m.x <= 720 and 0 <= m.y <= 400 for m in placed)
    assert any("fastest" in m.named for m in placed) and any("recommended" in m.named for m in placed)
    assert (across.title, up.title) == ("step time, seconds", "memory left, GiB")


def test_the_picture_is_written_as_svg_and_as_png(found, tmp_path):
    drawing = figure(found)
    drawing.write(tmp_path / "front.svg")
    root = ElementTree.fromstring((tmp_path / "front.svg").read_text())
    words = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert {"step time, seconds", "memory left, GiB", "better: left and up"} <= set(words)
    titles = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert any(found.best[0].plan.text() in title for title in titles)
    pytest.importorskip("PIL")
    drawing.write(tmp_path / "front.png")
    head = (tmp_path / "front.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == (1440, 800)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_words_of_a_plan_stay_together_at_every_width(width, found, capsys):
    """A plan that fits on a line is on one line, not folded into a column; no line is longer than the terminal."""
    console = Console(width=width, highlight=False, force_terminal=False)
    search_text.render(found, console)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    for ranked in found.best:
        if len(ranked.plan.text()) + 5 <= width:
            assert any(line.strip().startswith(ranked.plan.text()) for line in lines)
