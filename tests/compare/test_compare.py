"""A comparison says by how much, and where, one timeline differs from another that was made by changing it."""

import io
import json

import msgspec
import numpy as np
import pytest
from rich.console import Console

from meshwright import trace
from meshwright.cli import main
from meshwright.compare import _alike, _rows, compare, mean_error, spread, worst
from meshwright.graph import KIND, QUEUE
from meshwright.replay.timed import timed, typical
from meshwright.report import compare_html, compare_text
from tests.replay.test_rebuild import answer, merged, repeated

PLANS = ("pp4 dp2 mb1 1f1b zero1", "pp4 vpp2 dp2 mb1 interleaved", "dp8 zero3", "tp2 pp2 dp2 mb1 gpipe zero1")


@pytest.mark.parametrize("plan", PLANS)
def test_a_timeline_equals_itself(plan):
    timeline = answer(plan).timeline
    c = compare(timeline, timeline)
    assert c.step_time_s.error == 0.0 and c.within_spread and c.differ == {}
    for row in (*c.kinds, *c.queues):
        assert row.error == 0.0 or not row.measured_s
        assert row.only_predicted == row.only_measured == 0
    assert c.predicted == c.measured
    assert mean_error(c.kinds) == 0.0


@pytest.mark.parametrize("plan", PLANS)
def test_the_rows_are_the_time_of_every_rank(plan):
    """Seconds by kind and by queue both sum to the mean over ranks of all spans."""
    timeline = answer(plan).timeline
    c = compare(timeline, timeline)
    whole = sum(
        (timeline.end_s[i] - timeline.start_s[i]) * timeline.multiplicity[timeline.rank[i]]
        for i in range(timeline.num_spans)
    ) / sum(timeline.multiplicity)
    for rows in (c.kinds, c.queues):
        assert sum(r.predicted_s for r in rows) == pytest.approx(whole)


@pytest.mark.parametrize("plan", PLANS)
def test_the_critical_path_and_its_idle_time_are_the_step(plan):
    side = compare(answer(plan).timeline, answer(plan).timeline).predicted
    assert sum(side.path_s.values()) == pytest.approx(side.step_time_s, rel=1e-6)
    assert sum(link.seconds + link.idle_s for link in side.path) == pytest.approx(side.step_time_s, rel=1e-6)


def slower(timeline, kind, factor):
    """The same step with every task of a kind longer."""
    rebuilt = typical(timeline)
    return timed(rebuilt, np.array([t.seconds * (factor if t.kind == kind else 1.0) for t in rebuilt.tasks]))


def test_a_kind_that_took_longer_is_found():
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    measured = slower(timeline, "F", 1.25)
    c = compare(timeline, measured)
    rows = {r.name: r for r in c.kinds}
    # predicted over measured: 1 / 1.25 - 1
    assert rows["F"].error == pytest.approx(-0.2)
    assert all(abs(r.error) < 1e-9 for name, r in rows.items() if name != "F")
    assert next(iter(worst(c))).name == "F"
    assert c.step_time_s.error == pytest.approx(timeline.makespan_s / measured.makespan_s - 1)
    assert not c.within_spread


def test_a_prediction_within_the_spread_of_the_steps_is_right():
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    around = compare(timeline, repeated(timeline, [0.9, 0.95, 1.05, 1.1, 1.2]))
    assert around.within_spread and around.measured.num_steps == 5
    assert around.step_time_s.error == pytest.approx(1 / 1.05 - 1)
    assert "so the step time is right" in compare_text.verdict(around) and around.cancelling == ()
    beyond = compare(timeline, repeated(timeline, [1.1, 1.2, 1.3, 1.2, 1.1]))
    assert not beyond.within_spread and "outside the spread" in compare_text.verdict(beyond)


def test_errors_of_parts_that_cancel_in_the_step_are_named():
    timeline = answer("mb1").timeline
    spent = {row.name: row.predicted_s for row in compare(timeline, timeline).kinds}
    back = next(name for name in spent if name.startswith("B"))
    measured = slower(slower(timeline, "F", 1.3), back, 1 - 0.3 * spent["F"] / spent[back])
    c = compare(timeline, repeated(measured, [0.95, 1.0, 1.05]))
    assert c.within_spread
    assert {row.name for row in c.cancelling} == {"F", back}
    assert "errors that cancel" in compare_text.verdict(c)
    assert any("F -23.1% (-" in line for line in compare_text.remarks(c))  # 1 / 1.3 - 1


def test_the_spread_is_the_middle_eighty_percent():
    assert spread([1.0]) == (1.0, 1.0)
    # eleven steps from 0 to 10: a tenth lies below 1 and above 9
    assert spread([float(i) for i in range(11)]) == (1.0, 9.0)


def test_whole_passes_match_their_layers():
    """Measured passes are whole where predicted ones are cut layer by layer; a pass is a pass."""
    timeline = answer("dp8 zero0").timeline
    c = compare(timeline, merged(timeline))
    rows = {r.name: r for r in c.kinds}
    assert rows["BW"].only_predicted == rows["BW"].only_measured == 0
    assert rows["BW"].error == pytest.approx(0.0, abs=1e-9)
    assert rows["gradient exchange"].matched == 32


def replicas(timeline, k):
    """Every rank class as several processes."""
    n = timeline.num_spans
    columns = {c: np.tile(getattr(timeline, c), k) for c in ("queue", "kind", "cost_key", "start_s", "end_s")}
    shift = np.repeat(np.arange(k), n)
    waited = np.tile(timeline.waited_for, k)
    return msgspec.structs.replace(
        timeline,
        **columns,
        ranks=tuple(
            msgspec.structs.replace(rank, at=(("dp", place),), multiplicity=1)
            for place in range(k)
            for rank in timeline.ranks
        ),
        rank=np.tile(timeline.rank, k) + shift.astype(np.int32) * len(timeline.ranks),
        task=np.tile(timeline.task, k) + shift * (timeline.task.max() + 1),
        attributes=np.tile(timeline.attributes, (1, k)),
        waited_for=np.where(waited >= 0, waited + shift * n, -1).astype(np.int32),
        memory=(),
    )


def test_processes_are_compared_with_the_class_that_predicts_them():
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    c = compare(timeline, replicas(timeline, 2))
    for row in (*c.kinds, *c.queues):
        assert row.only_predicted == row.only_measured == 0
        assert row.error == pytest.approx(0.0, abs=1e-12)
    assert c.measured.exposed_s == pytest.approx(c.predicted.exposed_s)


def test_what_only_one_side_has_is_counted_and_no_error():
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    sends = timeline.kind == KIND["send"]
    queue = np.where(sends, QUEUE["copy"], timeline.queue).astype(np.int32)
    c = compare(timeline, msgspec.structs.replace(timeline, queue=queue))
    (row,) = [r for r in c.kinds if r.name == "send"]
    assert (row.matched, row.only_predicted) == (0, 48) and row.only_measured > 0
    assert row.error is None and row.unmatched_predicted_s == pytest.approx(row.unmatched_measured_s)


def test_what_a_member_waits_for_the_others_is_no_exchange():
    """The norm joins all ranks; on one of them it is entered early."""
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    norm = np.flatnonzero((timeline.queue == QUEUE["dp"]) & (timeline.attribute("stage") < 0))
    start = timeline.start_s.copy()
    start[norm[0]] -= 0.02
    c = compare(timeline, msgspec.structs.replace(timeline, start_s=start))
    (row,) = [r for r in c.kinds if r.name == "gradient norm"]
    assert row.error == pytest.approx(0.0, abs=1e-9)


def test_another_plan_is_said_to_be_another():
    a, b = answer("pp4 dp2 mb1 1f1b zero1").timeline, answer("pp4 dp2 mb1 gpipe zero1").timeline
    assert compare(a, b).differ == {"plan": (a.identity.plan, b.identity.plan)}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 120])
def test_the_text_fits_any_terminal(encoding, width):
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    compare_text.render(compare(timeline, slower(timeline, "BW", 1.5)), Console(file=out, width=width))
    out.seek(0)
    lines = out.read().splitlines()
    assert any("BW" in line and "-33.3%" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_the_report_is_one_offline_file_with_both_timelines():
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    other = repeated(timeline, [1.0, 1.1, 1.2])
    page = compare_html.render(compare(timeline, other), timeline, other)
    assert page.count("<canvas") == 4 and "http://" not in page and "https://" not in page
    assert page.count('type="application/json"') == 2
    assert "Gradient" in page or "gradient exchange" in page


@pytest.fixture
def files(tmp_path):
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    trace.write(timeline, tmp_path / "a.json.gz")
    trace.write(repeated(timeline, [1.0, 1.1, 1.2]), tmp_path / "b.json")
    (tmp_path / "q.toml").write_text(
        'format_version = 1\nmodel = "llama3-8b"\non = "8xh100"\ntrain = "batch=16,seq=4096"\n'
        'plan = "pp4 dp2 mb1 1f1b zero1"\n'
    )
    return tmp_path


def test_the_command_compares_files_and_questions(files, capsys):
    for first in ("a.json.gz", "q.toml"):
        assert main(["compare", str(files / first), str(files / "b.json"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step_time_s"]["error"] == pytest.approx(1 / 1.1 - 1, rel=1e-6)
        assert found["measured"]["num_steps"] == 3
    report = files / "r.html"
    assert main(["compare", str(files / "q.toml"), str(files / "b.json"), "--report", str(report)]) == 0
    assert report.read_text().startswith("<!doctype html>")
    assert "By kind of task" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said_at_once(files, capsys):
    (files / "bad.json").write_text("{}")
    assert main(["compare", str(files / "bad.json"), str(files / "none.json")]) == 2
    err = capsys.readouterr().err
    assert "error[X102]" in err and "error[X101]" in err
    assert main(["compare", str(files / "a.json.gz")]) == 2
    assert "MEASURED" in capsys.readouterr().err


def test_a_run_is_judged_by_all_its_steps_after_the_warm_up_whether_their_spans_were_kept_or_not():
    """By hand: of eight steps two only warm up; the median of 4, 5, 6, 7, 8 and 9 is 6.5, the middle 80% of them 4.5 to
    8.5. Rates follow from that median."""
    predicted = answer("pp4 dp2 mb1 1f1b zero1")
    seconds = np.array([90.0, 80.0, 9.0, 4.0, 8.0, 5.0, 7.0, 6.0])
    records = {
        "step": {"step": np.arange(1, 9), "seconds": seconds, "loss": np.ones(8)},
        "rank": {"rank": np.arange(2), "peak_bytes": np.array([3e9, 5e9])},
    }
    measured = msgspec.structs.replace(repeated(predicted.timeline, [1.0, 1.1]), records=records)
    c = compare(predicted, measured)
    assert (c.measured.num_steps, c.step_time_s.measured) == (6, 6.5)
    assert c.measured.spread_s == pytest.approx((4.5, 8.5))
    assert c.measured.peak_memory_bytes == 5e9 and c.peak_memory_bytes.predicted == predicted.peak_memory_bytes
    tokens, mfu = c.rates
    assert tokens.measured == pytest.approx(16 * 4096 / 6.5)
    assert mfu.measured == pytest.approx(predicted.mfu * predicted.step_time_s / 6.5)
    assert compare(predicted.timeline, measured).rates == ()


def at(timeline, **seconds):
    """The timeline with what the reference probe took."""
    return msgspec.structs.replace(timeline, records={"pace": {name: np.array([s]) for name, s in seconds.items()}})


def test_a_machine_that_is_slower_than_when_it_was_calibrated_is_told_with_the_error_at_its_pace_of_then():
    """By hand: a product takes 1.3 times as long and a copy 1.1 times, 1.2 in the mean, and so does every task."""
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    rebuilt = typical(timeline)
    measured = timed(rebuilt, np.array([1.2 * t.seconds for t in rebuilt.tasks]))
    then = at(timeline, product=1.0, copy=2.0, made="2026-01-01 00:00 UTC")
    c = compare(then, at(measured, product=1.3, copy=2.2, share=0.6))
    assert c.pace.slower == pytest.approx(1.2) and c.pace.drifted
    assert c.step_time_s.error == pytest.approx(1 / 1.2 - 1) and c.at_pace.error == pytest.approx(0, abs=1e-9)
    (said,) = compare_text.drifted(c)
    assert said.startswith(
        "this machine is now 1.20 times slower than when it was calibrated, 2026-01-01 00:00 UTC (times as long as "
        "then: a matrix product 1.30, a copy 1.10; other work had its cores for 40% of the time)"
    )
    assert "its error would be" in said and "instead of -16.7%" in said and said in compare_text.remarks(c)
    assert c.to_json()["pace"]["slower"] == pytest.approx(1.2)
    # within the probe's own noise nothing is said, and nothing where either side does not say
    assert compare_text.drifted(compare(then, at(measured, product=1.1, copy=2.1))) == []
    assert compare(then, measured).pace is None and compare(then, then).pace is None
    faster = compare(then, at(measured, product=0.8, copy=1.6))
    assert "1.25 times faster" in compare_text.drifted(faster)[0]


def test_the_pace_of_a_run_is_in_its_trace(tmp_path):
    timeline = at(answer("pp4 dp2 mb1 1f1b zero1").timeline, product=1.25e-3, copy=2.0, share=1.0)
    trace.write(timeline, tmp_path / "t.json.gz")
    assert trace.read(tmp_path / "t.json.gz").records["pace"]["product"].tolist() == [1.25e-3]


def test_exchanges_that_one_side_has_at_once_are_laid_beside_all_of_the_other_s():
    """Of four layers, exchanged at once in 30 ms and one by one in 20, 5, 5 and 10 ms: 25% too short."""
    at_once = {("rank 0", "dp", "gradient exchange", 0, 0): 0.03, ("rank 0", "compute", "F", 0, 0): 1.0}
    layers = {("rank 0", "dp", "gradient exchange", 0, i): s for i, s in enumerate((0.02, 0.005, 0.005, 0.01))}
    found = {r.name: r for r in _rows(*_alike(at_once, layers), lambda key: key[2])}["gradient exchange"]
    assert (found.matched, found.only_measured) == (1, 0) and found.error == pytest.approx(-0.25)
    # cut alike, layers stay apart
    assert _alike(layers, layers) == (layers, layers)
