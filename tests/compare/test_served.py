"""Served requests laid side by side: hand-made ones whose errors are known, and the command on files."""

import json

import numpy as np
import pytest

from meshwright.answer.server import predict_server
from meshwright.calibrate import engine
from meshwright.calibrate.server_terms import TriedServer, profile_of
from meshwright.cli import main
from meshwright.compare.served import compare_served
from meshwright.report.served_text import tables
from meshwright.spec.serve import parse
from meshwright.timeline import Timeline
from meshwright.trace import read, write
from meshwright.traffic import record
from meshwright.traffic.record import RequestRecord, Traffic, TrafficHead
from meshwright.traffic.timeline import timeline

#: A server that takes 10 ms and 1 ms a token for a prompt, and 20 ms a next token, one request at a time.
PROFILE = profile_of(
    TriedServer("tiny", "orca", 0, 1, False, False, 0), np.array([0, 0, 10_000, 1_000, 0, 20_000, 0, 0.0]), "there"
)
WORDS = "rate=1,prompt=90,output=11,requests=20,seed=2"


def requests(arrival, ttft, tpot, output=11):
    """The timeline of requests with such times."""
    arrival = np.asarray(arrival, float)
    table = {
        "prompt_tokens": np.full(len(arrival), 90),
        "output_tokens": np.full(len(arrival), output),
        "arrival_s": arrival,
        "first_s": arrival + ttft,
        "end_s": arrival + ttft + np.asarray(tpot) * (output - 1),
    }
    return Timeline.bare(records={"requests": table})


def test_errors_are_predicted_over_measured_less_one():
    at = np.arange(10.0)
    found = compare_served(requests(at, 0.11, 0.02), requests(at, 0.1, 0.025))
    by_name = {one.name: one for one in found.times}
    assert by_name["ttft_s"].error() == pytest.approx(0.1) and by_name["ttft_s"].error("p90") == pytest.approx(0.1)
    assert by_name["tpot_s"].error() == pytest.approx(-0.2)
    assert by_name["e2e_s"].error() == pytest.approx(0.31 / 0.35 - 1)
    assert by_name["ttft_s"].predicted_cdf == pytest.approx([0.11] * 19)
    assert not found.near and compare_served(requests(at, 0.11, 0.02), requests(at, 0.1, 0.02)).near


def test_states_over_time_are_means_of_windows():
    # one request from 0 to 1 s, half of it before its first token; measured it is two of them
    one, two = requests([0.0], 0.5, 0.05), requests([0.0, 0.0], 0.5, 0.05)
    found = compare_served(one, two)
    assert [w.predicted_queue for w in found.windows] == pytest.approx([1.0] * 10 + [0.0] * 10)
    assert [w.predicted_batch for w in found.windows] == pytest.approx([0.0] * 10 + [1.0] * 10)
    assert [w.measured_batch for w in found.windows] == pytest.approx([0.0] * 10 + [2.0] * 10)
    assert found.parts_s is None  # one apart is not far


def test_where_they_part_is_the_first_window_whose_states_are_far_apart():
    at = np.arange(20) * 1.0
    late = np.where(at >= 10, 5.0, 0.1)
    found = compare_served(requests(at, 0.1, 0.02), requests(at, late, 0.02))
    # from 10 s on a request a second waits for five seconds
    assert 10.0 <= found.parts_s <= 14.0
    by_name = {one.name: one for one in found.groups}
    assert by_name["arrival beyond"].ttft == pytest.approx(0.1 / 5.0 - 1)
    assert by_name["arrival up to 6.333 s"].ttft == pytest.approx(0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A profile, its prediction, and a measurement in which every request takes a tenth longer to its first token."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "server.toml").write_text(engine.as_toml(PROFILE))
    prediction = predict_server(PROFILE, parse(WORDS))
    write(prediction.timeline, str(folder / "predicted.json"))
    table = prediction.timeline.records["requests"]
    head = TrafficHead(
        url="http://there",
        model="tiny",
        serve=parse(WORDS).text(),
        digest=record.digest(parse(WORDS).drawn()),
        requests=20,
    )
    records = {}
    for n in range(20):
        at, first, end = (float(table[c][n]) for c in ("arrival_s", "first_s", "end_s"))
        first, end = at + 1.1 * (first - at), end + 0.1 * (first - at)
        gap = round((end - first) / 10 * 1e6)
        records[n] = RequestRecord(
            number=n, due_s=at, sent_s=at, first_s=first, end_s=end, prompt=90, output=11, asked=11, status=200,
            finish="length", gaps_us=(gap,) * 10,
        )  # fmt: skip
    journal = record.TrafficJournal(str(folder / "measured.jsonl"), head, goes_on=False)
    for one in records.values():
        journal.add(one)
    journal.close()
    return folder, Traffic(head=head, records=records)


def test_measured_traffic_is_the_timeline_that_a_prediction_is(files):
    folder, traffic = files
    ours, theirs = read(str(folder / "predicted.json")), timeline(record.read(folder / "measured.jsonl"))
    assert set(theirs.records["requests"]) == set(ours.records["requests"])
    assert {c.name for c in theirs.counters} <= {c.name for c in ours.counters}
    assert theirs.identity.source == "measured" and ours.identity.workload == theirs.identity.workload
    assert record.read(folder / "measured.jsonl").records == traffic.records


@pytest.mark.parametrize("predicted", ["predicted.json", "server.toml"])
def test_the_command_compares_a_prediction_or_a_profile_with_what_was_measured(files, predicted, capsys):
    folder, _ = files
    asked = ["compare", str(folder / predicted), str(folder / "measured.jsonl")]
    assert main([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["errors"]["ttft_s"]["mean"] == pytest.approx(1 / 1.1 - 1, abs=1e-4)
    assert abs(said["errors"]["tpot_s"]["mean"]) < 1e-3 and said["near"] is True and said["differ"] == {}
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "TTFT -9.1%" in shown and "Where they part" in shown


def test_the_report_draws_both_sides_and_says_what_the_text_does(files, tmp_path, capsys):
    folder, _ = files
    page = tmp_path / "page.html"
    asked = ["compare", str(folder / "predicted.json"), str(folder / "measured.jsonl")]
    assert main([*asked, "--report", str(page)]) == 0
    said, found = capsys.readouterr(), page.read_text()
    assert "wrote" in said.err and found.count("<svg") == 5  # three distributions, two states over time
    assert found.count(">measured</text>") == 5 and "http://" not in found.replace("http://www.w3.org/2000/svg", "")
    comparison = compare_served(read(asked[1]), timeline(record.read(asked[2])))
    for title, _, _, rows in tables(comparison):
        assert title in found and title in said.out
        assert all(cell in found for row in rows for cell in row)
    assert main([*asked, "--report", str(tmp_path / "no" / "page.html")]) == 2 and not (tmp_path / "no").exists()


def test_requests_are_not_compared_with_a_training_step(files, tmp_path, capsys):
    folder, _ = files
    bare = tmp_path / "bare.json"
    write(Timeline.bare(records={"step": {"seconds": np.array([1.0])}}), str(bare))
    assert main(["compare", str(bare), str(folder / "measured.jsonl")]) == 2
    assert "X105" in capsys.readouterr().err


def test_a_profile_that_is_broken_is_said_to_be(files, tmp_path, capsys):
    folder, _ = files
    bad = tmp_path / "bad.toml"
    bad.write_text('format_version = 1\nname = "x"\n[server]\nmodel = "x"\n')
    assert main(["compare", str(bad), str(folder / "measured.jsonl")]) == 2
    assert "T008" in capsys.readouterr().err
