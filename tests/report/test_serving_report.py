"""The serving report: one file that asks for nothing, complete, and the same as the answer."""

import re
import shlex
from xml.etree import ElementTree

import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.rates import rate_curve
from meshwright.answer.serving import predict_serving
from meshwright.answer.serving_answer import Summary
from meshwright.cli import main
from meshwright.quantity import latency
from meshwright.report import palette, serving_html, serving_plot
from meshwright.report.line_plot import Scale, spanned
from meshwright.report.serving_text import LATENCIES, _row, room_made_by, verdict
from meshwright.spec.serve import parse
from tests.report.test_report_html import Page

WORDS = "rate=8,prompt=256,output=32,requests=200,ttft=300ms,tpot=20ms@p95"


def made(words, model="llama3-8b", on="2xh100", plan="tp1"):
    serve = parse(words)
    requests = serve.drawn()
    answer = predict_serving(mw.load_model(model), mw.load_cluster(on), serve, mw.parse_plan(plan), requests=requests)
    return answer, rate_curve(answer, requests)


@pytest.fixture(scope="module")
def answered():
    return made(WORDS)


@pytest.fixture(scope="module")
def page(answered):
    question = {"model": "llama3-8b", "on": "2xh100", "serve": WORDS, "plan": "tp1 nosp", "price": ""}
    return serving_html.render(*answered, question)


def test_the_page_is_one_file_that_asks_for_nothing(page):
    read = Page(page)
    assert not read.open
    outside = [
        a for _, a in read.elements if any(str(a.get(k, "")).startswith(("http", "//")) for k in ("src", "href"))
    ]
    assert outside == []
    assert "default-src 'none'" in page and "url(" not in page


def test_the_page_says_what_the_answer_says(page, answered):
    prediction, curve = answered
    text = " ".join(" ".join(Page(page).text).split())
    for piece in (*verdict(prediction), *LATENCIES.values(), prediction.plan.text(), "goodput"):
        assert piece in text, piece
    for one in prediction.objectives:
        assert latency(one.value_s) in text and f"{one.share:.1%}" in text
    for point in curve:
        assert f"{point.metrics.goodput_req_per_s:.3g}" in text
    for assumption in prediction.assumptions:
        assert assumption.name in text
    assert "meshwright predict llama3-8b --on 2xh100 --serve rate=8" in text and "--plan 'tp1 nosp'" in text


def test_every_drawing_has_its_words_and_the_colours_of_the_page(page):
    drawings = re.findall(r"<svg xmlns.*?</svg>", page, re.S)
    assert len(drawings) == 4 + 2 + 2
    known = {f"mark-{name}" for name in palette.MARKS["light"]} | set(palette.THEMES["light"])
    for drawing in drawings:
        assert ElementTree.fromstring(drawing).get("aria-label")
        assert set(re.findall(r"var\(--([\w-]+)\)", drawing)) <= known and "#" not in drawing


def test_distributions_end_where_the_metrics_say(answered):
    prediction, _ = answered
    for name, (values, shares) in serving_plot.latencies(prediction).items():
        summary = getattr(prediction.metrics, name)
        at = float(values[np.searchsorted(shares, 0.9)])
        assert at == pytest.approx(summary.p90, rel=0.05), name
        assert shares[-1] == pytest.approx(1.0) and (np.diff(values) >= 0).all()


def test_an_answer_that_does_not_fit_has_a_page_without_latencies():
    prediction, curve = made("batch=4,prompt=64,output=8", model="llama3-70b", on="1xh100")
    page = serving_html.render(prediction, curve)
    assert curve == () and "does not fit" in page and 'id="latency"' not in page and 'id="memory"' in page


def test_tenants_have_their_own_rows():
    prediction, curve = made("rate=400,max_batch=4,prompt=256,output=32,requests=200,tenants=3,seed=1,ttft=300ms@p90")
    page = " ".join(" ".join(Page(serving_html.render(prediction, curve)).text).split())
    assert len(prediction.groups) == 3
    for one in prediction.groups:
        assert one.name in page and f"{one.requests:,}" in page
    assert f"{prediction.fairness.jain_index:.3f}" in page


def test_pools_apart_have_a_table_and_what_went_between_them():
    plan = "prefill=[tp1 on=0:1] + decode=[tp1 on=1:2] prefill->decode:kv"
    prediction, curve = made("rate=8,prompt=256,output=32,requests=60", plan=plan)
    page = " ".join(" ".join(Page(serving_html.render(prediction, curve)).text).split())
    assert len(curve) > 2 and len(prediction.pools) == 2
    for pool in prediction.pools:
        assert f"{pool.name} {pool.role} {pool.replicas} x {pool.devices}" in page
    assert f"{prediction.transfers.requests:,} caches of" in page
    for stage, value in prediction.transfers.stages_s.items():
        assert f"{stage} {latency(value)}" in page


def test_names_from_files_are_escaped(answered):
    import msgspec

    prediction, curve = answered
    evil = msgspec.structs.replace(prediction.model, name="<script>alert(1)</script>")
    page = serving_html.render(msgspec.structs.replace(prediction, model=evil), curve)
    assert "<script>alert" not in page


def test_a_thinned_step_function_keeps_its_peaks():
    time, value = np.arange(5000.0), np.zeros(5000)
    value[1234] = 7.0
    kept = serving_plot.thinned(time, value)
    assert len(kept) <= serving_plot.MOST_POINTS and (1234.0, 7.0) in kept


def test_an_axis_has_round_values_and_places_by_its_scale():
    linear, steep = spanned([20.0], "", str), Scale(low=1.0, high=100.0, title="", text=str, logarithmic=True)
    assert linear.ticks == [0.0, 5.0, 10.0, 15.0, 20.0]
    assert (steep.share(10.0), steep.share(1000.0), linear.share(-1.0)) == (0.5, 1.0, 0.0)


def test_the_command_writes_the_report(tmp_path, capsys):
    out = tmp_path / "served.html"
    asked = ["llama3-8b", "--on", "1xh100", "--plan", "tp1", "--serve", "batch=2,prompt=64,output=8"]
    assert main(["predict", *asked, "--report", str(out)]) == 0
    assert "served on" in out.read_text() and f"wrote {out}" in capsys.readouterr().err


def test_the_page_of_a_question_file_says_its_files_where_they_lie(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "asked"
    folder.mkdir()
    (folder / "rows.csv").write_text("prompt_tokens,output_tokens\n64,8\n32,4\n")
    words = 'model = "llama3-8b"\non = "1xh100"\nplan = "tp1"\nserve = "batch=2,lengths=rows.csv"\n'
    (folder / "q.toml").write_text(f"format_version = 1\n{words}")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "asked/q.toml", "--report", "served.html"]) == 0
    command = re.search(r"<pre>(.*)</pre>", (tmp_path / "served.html").read_text())[1].replace("&#39;", "'")
    capsys.readouterr()
    assert main(shlex.split(command)[1:]) == 0  # as it stands, from the same folder


@pytest.mark.parametrize(
    ("model", "words", "help"),
    [
        ("llama3-70b", "", "more devices to a replica"),
        ("llama3-8b", ",draft=llama3-70b,accept=0.5", "a smaller draft= than llama3-70b"),
        ("llama3-8b", ",policy=orca,max_batch=2000", "a smaller max_batch= (2,000 now)"),
        ("llama3-8b", ",memory=0.1", "a larger share of the device for serving than memory=0.1"),
    ],
)
def test_a_replica_without_room_says_what_would_make_some(model, words, help):
    """70e9 parameters of two bytes are more than 80 GB; the activations of 2,000 prompts of 4,096 tokens are too."""
    requests = "batch=2000,prompt=4096,output=8" if "orca" in words else "rate=8,prompt=64,output=8,requests=5"
    answer = predict_serving(
        mw.load_model(model), mw.load_cluster("1xh100"), parse(requests + words), mw.parse_plan("tp1"), detail=False
    )
    assert not answer.fits and any(help in line for line in room_made_by(answer))
    assert "are for serving (memory=" in " ".join(verdict(answer))


def test_times_of_requests_are_all_in_seconds_however_long_they_waited():
    """A table has 5 s and 626 s, which can be compared, and not 5 s and 0.174 h."""
    summary = Summary(mean=626.4, p50=5.0, p90=0.25, p99=172_800.0, mean_interval=(4e-5, 1234.5))
    assert _row("TTFT", summary) == ("TTFT", "626.4 s", "40 us to 1,234.5 s", "5.000 s", "250 ms", "172,800.0 s")
