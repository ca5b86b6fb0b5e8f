"""A prediction in a notebook: a few lines of text, pictures without script, a row of a data frame."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import KIND
from meshwright.report import notebook

pandas = pytest.importorskip("pandas", reason="data frames need pandas")


@pytest.fixture(scope="module")
def answer():
    model, cluster = mw.load_model("llama3-8b"), mw.load_cluster("8xh100")
    return mw.predict(model, cluster, mw.parse_train("batch=64,seq=4096"), mw.parse_plan("tp2 pp4 mb1 zero1"))


def test_a_prediction_prints_in_six_lines(answer):
    lines = repr(answer).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) < 100
    assert lines[0].startswith("Prediction: fits, ")
    assert "llama3-8b on 8xh100" in lines[1]
    assert lines[2] == f"  plan {answer.plan.text()}"


def test_its_pictures_are_well_formed_without_script_style_sheet_or_request(answer):
    html = answer._repr_html_()
    root = ElementTree.fromstring(html)
    assert {e.tag for e in root.iter()} <= {
        "div",
        "strong",
        "span",
        "code",
        "svg",
        "title",
        "text",
        "rect",
        "line",
        "path",
    }
    assert "http" not in html and "url(" not in html
    assert len(html) < 40_000


def test_the_waterfall_and_the_memory_say_what_the_prediction_says(answer):
    titles = [e.text for e in ElementTree.fromstring(answer._repr_html_()).iter("title")]
    for name, spent in answer.attribution.items():
        assert not spent or any(re.search(f"{100 * spent / answer.step_time_s:.1f}%$", t) for t in titles), name
    for name, size in answer.tightest.alive.items():
        assert not size or f"{name}: {size / 2**30:.1f} GiB" in titles


def test_a_column_of_a_lane_is_as_full_as_its_queue_is_busy(answer):
    timeline = answer.timeline
    spans = timeline.of_rank(0)
    forward = spans[timeline.kind[spans] == KIND["F"]]
    scale = notebook.COLUMNS / timeline.makespan_s
    covered = notebook._coverage(timeline.start_s[forward] * scale, timeline.end_s[forward] * scale)
    assert covered.min() >= -1e-9 and covered.max() <= 1 + 1e-9
    # over all columns, the seconds of the forwards
    assert covered.sum() / scale == pytest.approx((timeline.end_s[forward] - timeline.start_s[forward]).sum())
    # by hand: intervals [0.5, 2.25) and [3, 3.5)
    by_hand = notebook._coverage(np.array([0.5, 3.0]), np.array([2.25, 3.5]))
    assert by_hand[:5].tolist() == [0.5, 1.0, 0.25, 0.5, 0.0]


def test_predictions_are_rows_of_one_data_frame(answer):
    frame = pandas.concat([answer.to_dataframe()] * 2)
    assert frame.shape[0] == 2
    row = frame.iloc[0]
    assert row.step_time_s == answer.step_time_s and row.plan == answer.plan.text()
    causes = [c for c in frame.columns if c.startswith("attribution.")]
    assert row[causes].sum() == pytest.approx(answer.step_time_s)


def test_a_timeline_is_a_data_frame_of_its_spans(answer):
    frame = answer.timeline.to_dataframe()
    assert len(frame) == answer.timeline.num_spans
    busy = frame[(frame["rank"] == answer.timeline.ranks[0].name) & (frame["queue"] == "compute")]
    assert (busy.end_s - busy.start_s).sum() == pytest.approx(answer.timeline.busy_s(0))


def test_without_pandas_a_data_frame_says_what_to_do(answer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(mw.MeshwrightError, match="pip install pandas"):
        answer.to_dataframe()
