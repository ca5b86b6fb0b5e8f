"""The HTML report: offline, escaped, complete, and readable without its charts."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from meshwright.answer.prediction import FORMAT_VERSION
from meshwright.errors import MeshwrightError
from meshwright.graph import ATTRIBUTES
from meshwright.quantity import seconds
from meshwright.report import columns, html
from meshwright.timeline import Identity
from tests.report.sample import prediction

VOID = {"meta", "link", "br", "hr", "img", "input"}
SVG_VOID = {"path"}


class Page(HTMLParser):
    """Elements with attributes, their nesting checked, and the text outside of scripts and styles."""

    def __init__(self, source: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts: dict[str, str] = {}
        self._id = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID | SVG_VOID:
            self.open.append(tag)
            self._id = dict(attrs).get("id") or ""

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> does not close what is open"

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[self._id] = self.scripts.get(self._id, "") + data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    def having(self, **wanted):
        return [a for _, a in self.elements if all(a.get(k.replace("_", "-")) == v for k, v in wanted.items())]

    @property
    def said(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture(scope="module")
def answer():
    return prediction()


@pytest.fixture(scope="module")
def page(answer):
    return Page(html.render(answer))


def test_elements_are_nested_and_closed(page):
    assert page.open == []


def test_nothing_is_loaded_and_the_policy_forbids_it(page, answer):
    source = html.render(answer)
    assert "http://" not in source and "https://" not in source
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "img")
        assert "src" not in attributes
        assert not any((value or "").startswith("//") for value in attributes.values())
        if tag == "link":
            assert attributes["href"] == "data:,"
    policy = page.having(http_equiv="Content-Security-Policy")[0]["content"]
    assert "default-src 'none'" in policy
    assert "@import" not in source and "url(" not in source


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def test_hostile_names_stay_text():
    answer = prediction(name=HOSTILE, identity=Identity(code=HOSTILE), warnings=(HOSTILE,))
    evil = type(answer.memory[0])(
        rank=HOSTILE, multiplicity=1, capacity_bytes=1e9, peak_bytes=2e9, at_s=0.0, alive={HOSTILE: 2e9}
    )
    source = html.render(prediction(name=HOSTILE, warnings=(HOSTILE,), memory=(evil,), fits=False))
    hostile = Page(source)
    assert hostile.open == []
    assert not any("onerror" in attributes for _, attributes in hostile.elements)
    assert "<script>alert" not in source and "<img" not in source
    assert HOSTILE in "".join(hostile.text)


def test_verdict_and_numbers_are_in_the_text(page, answer):
    assert "fits: 46.0 GiB of 79.6 GiB" in page.said
    for value in (
        answer.step_time_s,
        *answer.step_time_interval_s,
        answer.bound_s,
        *filter(None, answer.attribution.values()),
    ):
        assert seconds(value) in page.said
    assert "41.2%" in page.said and "412" in page.said and answer.plan.text() in page.said


def test_no_record_is_printed_as_python_writes_it(page):
    assert not re.search(r"\b(RankClass|Identity|Metric|NoneType|Timeline)\(", page.said)


def test_every_rank_is_in_the_memory_chart_and_in_both_tables(page, answer):
    for rank in answer.memory:
        assert page.said.count(rank.rank) >= 3


def test_what_is_drawn_is_also_a_table(page):
    captions = page.said
    for caption in (
        "Seconds of the step by cause",
        "Bytes alive at the peak of each distinct rank",
        "Each distinct rank's compute queue over the step",
        "Where compute queues stood idle longest",
        "Operators of block, forward",
    ):
        assert caption in captions
    assert len([1 for tag, _ in page.elements if tag == "details"]) >= 5


def test_every_chart_has_a_name_and_the_timeline_says_how_to_use_it(page):
    for attributes in page.having(role="img") + page.having(role="application"):
        assert attributes["aria-label"]
    ids = {a["id"] for _, a in page.elements if a.get("id")}
    assert len(ids) == len([1 for _, a in page.elements if a.get("id")])
    for _, attributes in page.elements:
        for reference in ("aria-describedby", "aria-labelledby", "aria-controls"):
            assert attributes.get(reference, next(iter(ids))) in ids
    canvases = [a for tag, a in page.elements if tag == "canvas"]
    assert all(a.get("tabindex") == "0" or a.get("aria-hidden") == "true" for a in canvases)


def test_headings_go_down_one_level_at_a_time(page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_live_regions_announce_and_the_identity_has_its_format(page, answer):
    assert page.having(aria_live="polite")
    assert f"format_version {FORMAT_VERSION}" in page.said
    for name, value in answer.identity.said().items():
        assert name in page.said and value in page.said


def test_assumptions_are_listed_with_sources_and_flags(page, answer):
    for assumption in answer.assumptions:
        assert assumption.source in page.said and assumption.value in page.said
    assert page.said.count("not confirmed") == sum(a.flagged for a in answer.assumptions)


def test_an_answer_that_does_not_fit_lists_what_would(answer):
    said = Page(html.render(prediction(capacity_gib=40.0))).said
    assert "does not fit: 6.0 GiB over on stage 0" in said and "frees part of 10.4 GiB of activations" in said


def test_a_prediction_without_zooms_memory_run_or_warnings_renders(answer):
    bare = type(answer.timeline)(
        **{f: getattr(answer.timeline, f) for f in answer.timeline.__struct_fields__ if f != "memory"}
    )
    said = Page(
        html.render(prediction(zooms=(), run=None, warnings=(), sensitivities=(), assumptions=(), timeline=bare))
    ).said
    assert "Inside a layer" not in said and "Training run" not in said


def decoded(column: list[str]) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(column[1])), f"<{column[0]}")


def test_the_timeline_in_the_page_is_the_prediction_s(page, answer):
    data = json.loads(page.scripts["step"])
    timeline = answer.timeline
    assert data["count"] == timeline.num_spans and data["ranks"] == [rank.name for rank in timeline.ranks]
    order = np.lexsort((timeline.start_s, timeline.queue, timeline.rank))
    tick = data["seconds"] / (2**32 - 1)
    assert np.allclose(decoded(data["start"]) * tick, timeline.start_s[order], atol=tick)
    assert np.allclose(decoded(data["end"]) * tick, timeline.end_s[order], atol=tick)
    for name in ATTRIBUTES:
        assert np.array_equal(decoded(data["attributes"][name]), timeline.attribute(name)[order])
    waited = decoded(data["waited"])
    mine = timeline.waited_for[order]
    assert np.array_equal(waited < 0, mine < 0)
    assert np.array_equal(order[waited[waited >= 0]], mine[mine >= 0])
    assert decoded(data["path"]).sum() == len(timeline.critical_path())


def test_lanes_cover_all_spans_of_one_queue_each(answer):
    data = columns.payload(answer.timeline)
    assert sum(count for *_, count in data["lanes"]) == data["count"]
    assert [first for _, _, first, _ in data["lanes"]] == list(np.cumsum([0, *(c for *_, c in data["lanes"][:-1])]))


def test_a_timeline_too_large_keeps_the_first_and_last_microbatches_and_says_so():
    timeline = prediction(num_microbatches=64).timeline
    data = columns.payload(timeline, max_spans=300)
    kept = decoded(data["attributes"]["microbatch"])
    assert data["count"] <= 300 and {0, 63} <= set(kept.tolist()) and 32 not in kept
    assert f"{timeline.num_spans:,} tasks" in data["note"]
    assert decoded(data["waited"]).min() >= -2


def test_the_memory_curve_is_thinned_without_losing_its_peak(monkeypatch, answer):
    monkeypatch.setattr(columns, "MAX_MEMORY_POINTS", 6)
    data = columns.memory_payload(answer.timeline, answer.memory)
    for trace, rank in zip(answer.timeline.memory, data["ranks"]):
        time = decoded(rank["time"])
        values = decoded(rank["values"]).reshape(-1, len(time))
        assert len(time) < len(trace.time_s)
        assert values.sum(axis=0).max() == pytest.approx(trace.peak()[0], rel=1e-6)


def test_what_is_alive_at_the_peak_and_not_traced_tops_the_curve_up_to_the_rank_s_peak(answer):
    extra = tuple(
        msgspec.structs.replace(m, alive=m.alive | {"buffers": 1e9}, peak_bytes=m.peak_bytes + 1e9)
        for m in answer.memory
    )
    data = columns.memory_payload(answer.timeline, extra)
    assert data["categories"][-1] == "buffers"
    for rank, memory in zip(data["ranks"], extra):
        values = decoded(rank["values"]).reshape(len(data["categories"]), -1)
        assert values.sum(axis=0).max() == pytest.approx(memory.peak_bytes, rel=1e-6)


def test_the_file_is_written_whole_and_a_missing_folder_is_one_error(tmp_path, answer):
    html.write(answer, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == html.render(answer)
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    with pytest.raises(MeshwrightError) as caught:
        html.write(answer, tmp_path / "none" / "r.html")
    assert caught.value.diagnostics[0].code == "X104"
