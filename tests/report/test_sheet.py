"""Answers that are sheets: what a terminal says of them is on their page, which is whole, escaped and offline."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.recommending import predict_recommending
from meshwright.cli import main
from meshwright.plan import parse
from meshwright.report import recommending_sheet, sheet_html, sheet_text
from meshwright.report.sheet import Lines, Remarks, Sheet, SheetGrid, Spent, fullest, headline, shown
from meshwright.spec.cluster import load
from meshwright.spec.recommender import load_recommender
from meshwright.spec.samples import parse_samples
from tests.report.test_report_html import Page

GIB = 2.0**30
RANK = RankMemory(
    rank="ranks 0-3",
    multiplicity=4,
    peak_bytes=4 * GIB,
    at_s=0.0,
    alive={"weights": 3 * GIB, "rest": GIB},
    capacity_bytes=8 * GIB,
)
SPENT = Spent(
    "Where it goes", 2.0, [("computing", 1.5, "kernels"), ("nothing", 0.0, "absent"), ("waiting", 0.5, "idle")]
)
SHEET = Sheet(
    name="a <model> on a cluster",
    fits=True,
    headline=headline(Metric(2.0, (1.0, 3.0)), "a step", "5 samples/s", (RANK,)),
    question=(("model", "a <model>"), ("plan", "dp4")),
    sections=(
        SPENT,
        Lines("Sent", [("rows", "3 MB", "in a step")], ["and nothing else"]),
        SheetGrid("Splits", ("first", "second"), [("1", "2"), ("3", "4")], chosen=1),
        Remarks("Against", ["twice as fast"]),
    ),
    memory=(RANK,),
    held=(fullest((RANK,)),),
    elsewhere=(Lines("Memory of a host", [("pool", "7 GiB")]),),
    assumptions=(
        Assumption("input", "is there", "nobody measured it", True),
        Assumption("costs", "catalog", "", False),
    ),
    cautions=("approximate",),
)


def printed(sheet: Sheet) -> str:
    out = io.StringIO()
    sheet_text.render(sheet, Console(file=out, width=120))
    return out.getvalue()


def test_a_headline_says_the_fullest_rank_and_the_interval():
    assert SHEET.headline == "fits: 4.0 GiB of 8.0 GiB | 2.000 s [1.000 s, 3.000 s] a step | 5 samples/s"
    small = msgspec.structs.replace(RANK, rank="rank 4", capacity_bytes=2 * GIB)
    over = headline(Metric(2.0, None), "a step", "5 samples/s", (RANK, small))
    assert over == "does not fit: 4.0 GiB of 8.0 GiB | 2.000 s [2.000 s, 2.000 s] a step | 5 samples/s"
    assert msgspec.structs.replace(SHEET, memory=(RANK, small)).tightest == small


def test_causes_stand_behind_one_another_and_nothing_is_not_drawn():
    assert shown(SPENT) == [("computing", 0.0, 1.5, "kernels"), ("waiting", 1.5, 0.5, "idle")]
    lines = printed(SHEET).split("\n")
    computing, waiting = (next(line for line in lines if line.strip().startswith(n)) for n in ("computing", "waiting"))
    assert "75.0%" in computing and "25.0%" in waiting
    assert waiting.index("█") == computing.rindex("█") + 1
    assert "nothing" not in " ".join(line for line in lines if "absent" in line)


def test_a_bar_is_never_broken_where_there_is_no_room():
    narrow = Spent("Where it goes", 2.0, [("a", 1.86, "long words " * 5), ("b", 0.08, "longer words " * 5)])
    out = io.StringIO()
    sheet_text.render(msgspec.structs.replace(SHEET, sections=(narrow,)), Console(file=out, width=60))
    assert "█▎" in out.getvalue() and not any(line.strip() in set("▏▎▍▌▋▊▉█") for line in out.getvalue().split("\n"))


def test_the_page_says_what_the_terminal_says():
    source = sheet_html.render(SHEET)
    page = Page(source)
    text = re.sub(r"\s+", " ", " ".join(page.text))
    for section in (*SHEET.sections, *SHEET.elsewhere):
        assert section.title in text and section.title in printed(SHEET)
    for word in ("75.0%", "3 MB", "in a step", "and nothing else", "second", "twice as fast", "7 GiB", "approximate"):
        assert word in text and word in printed(SHEET), word
    for said in ("a <model>", "not confirmed", "nobody measured it", "3.0 GiB", SHEET.headline):
        assert said in text, said
    assert "a <model>" not in source  # escaped
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", source)
    ids = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(ids) == len(set(ids)) and not page.open
    links = [a["href"][1:] for tag, a in page.elements if tag == "a" and (a.get("href") or "").startswith("#")]
    assert set(links) <= set(ids)


def test_a_timeline_is_drawn_where_there_is_one():
    found = predict_recommending(
        load_recommender("dlrm-dcnv2"), load("8xh100"), parse_samples("batch=65536"), parse("embeddings=auto")
    )
    sheet = recommending_sheet.sheet(found)
    source = sheet_html.render(sheet)
    assert "Timeline of one step" in source and 'data-timeline="step"' in source
    total = sum(seconds for _, seconds, _ in sheet.sections[0].causes)
    assert total == pytest.approx(found.step_time_s, rel=1e-9)
    assert "Timeline of" not in sheet_html.render(msgspec.structs.replace(sheet, timeline=None))


def test_a_page_is_written_whole_or_not_at_all(tmp_path, capsys):
    asked = ["predict", "dlrm-dcnv2", "--on", "8xh100", "--train", "batch=65536", "--plan", "embeddings=auto"]
    assert main([*asked, "--report", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").read_text().rstrip().endswith("</html>")
    capsys.readouterr()
    assert main([*asked, "--report", str(tmp_path / "no" / "a.html")]) == 2
    assert "X104" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["a.html"]
