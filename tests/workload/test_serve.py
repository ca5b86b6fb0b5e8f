"""The serving workload: its words read back, its draws as they are defined, its traces with every wrong row named."""

import gzip
import json
import math

import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.spec.request_files import read
from meshwright.spec.request_gaps import weibull_shape
from meshwright.spec.requests import COLUMNS, Requests, numbered
from meshwright.spec.serve import Objective, duration_s, parse

TEXTS = (
    "rate=8,prompt=1024,output=256,requests=2000",
    "rate=2.5,cv=3,burst=weibull,prompt=64,output=8,window=600s,seed=7",
    "concurrency=32,ramp=10s,prompt=128,output=128,policy=sarathi,budget=512",
    "batch=16,prompt=2048,output=128,policy=static",
    "trace=requests.csv,scale=2,window=600s",
    "trace=requests.csv,rate=20,ttft=0.5s@p90,tpot=0.05s@p99",
    "rate=8,lengths=lengths.csv,kv=fp8,memory=0.8,graphs=no,max_batch=64",
)


def codes(text):
    with pytest.raises(MeshwrightError) as caught:
        parse(text)
    return [d.code for d in caught.value.diagnostics]


@pytest.mark.parametrize("text", TEXTS)
def test_the_words_of_a_workload_are_read_back(text):
    assert parse(parse(text).text()) == parse(text)


def test_a_percentile_behind_one_objective_is_meant_for_those_without():
    found = parse("rate=1,prompt=8,output=8,ttft=500ms,tpot=50ms@p95,e2e=10s")
    assert found.objectives == {
        "ttft_s": Objective(0.5, 0.95),
        "tpot_s": Objective(0.05, 0.95),
        "e2e_s": Objective(10.0, 0.95),
    }


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("0.5", 0.5), ("2m", 120.0), ("1h", 3600.0), ("0s", None), ("-1s", None), ("x", None)],
)
def test_durations_are_seconds(text, seconds):
    assert duration_s(text) == seconds


def test_everything_that_is_wrong_is_said_at_once():
    assert codes("rate=0,prompt=1024,outptu=256,cv=2") == ["W002", "W001", "W003"]
    assert codes("") == ["W003", "W003", "W003"]
    assert codes("rate=1,concurrency=2,prompt=8,output=8") == ["W005"]
    assert codes("rate=1,rate=2,prompt=8,output=8") == ["W005"]
    assert codes("trace=a.csv,rate=2,scale=3") == ["W005"]
    assert codes("concurrency=4,prompt=8,output=8,cv=2,window=5s,scale=2") == ["W005"] * 3
    assert codes("rate=1,prompt=8,output=8,ramp=5s") == ["W005"]
    assert codes("rate=1,lengths=a.csv,prompt=8") == ["W005"]


@pytest.mark.parametrize(
    ("words", "cv"),
    [("", 1.0), (",cv=3", 3.0), (",cv=0.5", 0.5), (",cv=2,burst=weibull", 2.0)],
)
def test_gaps_between_arrivals_have_the_mean_and_the_variation_that_were_said(words, cv):
    at = parse(f"rate=8,prompt=8,output=8,requests=200000{words}").drawn().arrival_s
    gaps = np.diff(at)
    assert at[0] == 0.0 and gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_the_shape_of_an_exponential_distribution_is_that_of_weibull_1():
    # 1 + cv^2 = Gamma(1 + 2/k) / Gamma(1 + 1/k)^2: k = 1 gives Gamma(3) / Gamma(2)^2 = 2, and k = 1/2 gives 24 / 4 = 6
    assert weibull_shape(1.0) == pytest.approx(1.0) and weibull_shape(math.sqrt(5.0)) == pytest.approx(0.5)


def test_draws_are_those_of_the_seed():
    one, same, other = (parse(f"rate=8,prompt=8,output=8,seed={s}").drawn().arrival_s for s in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_a_window_keeps_the_requests_of_its_seconds():
    found = parse("rate=20,prompt=8,output=8,window=100s").drawn()
    assert len(found) == pytest.approx(2000, rel=0.1) and found.arrival_s[-1] < 100
    assert len(parse("rate=20,prompt=8,output=8,window=100s,requests=50").drawn()) == 50


def test_a_closed_loop_and_a_batch_arrive_at_once():
    closed = parse("concurrency=4,prompt=8,output=8,requests=10").drawn()
    assert closed.concurrency == 4 and not closed.arrival_s.any() and len(closed) == 10
    assert len(parse("batch=16,prompt=8,output=8").drawn()) == 16


def test_the_first_requests_of_a_closed_loop_come_over_its_ramp():
    assert parse("concurrency=4,ramp=8s,prompt=8,output=8,requests=6").drawn().arrival_s.tolist() == [0, 2, 4, 6, 8, 8]


TABLE = "arrival_s,prompt_tokens,output_tokens,block_hashes\n5.0,600,10,1 2\n6.5,700,20,1 3\n7.0,80,30,\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
)
MOONCAKE = "".join(
    json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": h}) + "\n"
    for t, i, o, h in ((0, 6758, 500, [0, 1, 2]), (3000, 7322, 490, [0, 1, 14]))
)


@pytest.mark.parametrize(
    ("name", "text", "at", "prompt", "output"),
    [
        ("requests.csv", TABLE, [0.0, 1.5, 2.0], [600, 700, 80], [10, 20, 30]),
        ("azure.csv", AZURE, [0.0, 4.314579], [374, 396], [44, 109]),
        ("burst.csv", BURST, [0.0, 40.0], [472, 1087], [18, 230]),
        ("mooncake.jsonl", MOONCAKE, [0.0, 3.0], [6758, 7322], [500, 490]),
    ],
)
def test_the_published_forms_of_traces_are_read(tmp_path, name, text, at, prompt, output):
    (tmp_path / name).write_text(text)
    found = read(tmp_path / name)
    assert found.arrival_s.tolist() == pytest.approx(at, abs=1e-6)
    assert (found.prompt.tolist(), found.output.tolist()) == (prompt, output)


def test_block_hashes_are_kept_by_request(tmp_path):
    (tmp_path / "a.csv").write_text(TABLE)
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    table, lines = read(tmp_path / "a.csv"), read(tmp_path / "m.jsonl")
    assert (table.hashes.tolist(), table.hash_ptr.tolist()) == ([1, 2, 1, 3], [0, 2, 4, 4])
    assert (lines.hashes.tolist(), lines.hash_ptr.tolist()) == ([0, 1, 2, 0, 1, 14], [0, 3, 6])


def test_a_part_of_the_requests_keeps_all_that_is_said_of_them():
    column = np.arange(4)
    all_of_them = Requests(
        arrival_s=column * 1.0,
        prompt=column + 10,
        output=column + 20,
        tenant=column + 30,
        priority=column + 40,
        adapter=column + 50,
        program=column + 60,
        slo=column + 70,
        needed=column + 80,
        line=column + 90,
        hashes=np.array([1, 2, 3, 1, 9, 8, 7]),
        hash_ptr=np.array([0, 2, 3, 3, 7]),
        hash_block=512,
    )
    part = all_of_them.chosen(np.array([3, 0, 2]))
    said = [getattr(part, name).tolist() for name in COLUMNS if name != "after"]
    assert said == [[base + i for i in (3, 0, 2)] for base in range(0, 100, 10)]
    assert (part.hashes.tolist(), part.hash_ptr.tolist()) == ([1, 9, 8, 7, 1, 2], [0, 4, 6, 6])
    assert part.hash_block == 512 and not len(part.after)
    assert all_of_them.first(2).hashes.tolist() == [1, 2, 3] and all_of_them.first(9) is all_of_them


def test_a_request_waits_for_the_nearest_one_before_it_that_is_kept():
    # 0 <- 1 <- 2 <- 3 with thinking of 1, 2 and 4 seconds; 4 arrives by itself at 9
    length = np.full(5, 8)
    chain = Requests(
        arrival_s=np.array([0.5, 1, 2, 4, 9]), prompt=length, output=length, after=np.array([-1, 0, 1, 2, -1])
    )
    kept = chain.chosen(np.array([0, 3, 4]))
    assert (kept.arrival_s.tolist(), kept.after.tolist()) == ([0.5, 7, 9], [-1, 0, -1])  # 1 + 2 + 4 behind the first
    alone = chain.chosen(np.array([2, 3]))
    assert (alone.arrival_s.tolist(), alone.after.tolist()) == ([3.5, 4], [-1, 0])  # 0.5 + 1 + 2
    assert chain.first(2).after.tolist() == [-1, 0]


def test_a_trace_is_scaled_cut_and_set_to_a_rate(tmp_path):
    rows = "".join(f"{10 + i * 0.5},100,10\n" for i in range(101))  # 2 a second for 50 seconds
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    scaled = parse("trace=t.csv,scale=2,window=10s", base=tmp_path).drawn()
    assert len(scaled) == 40 and np.diff(scaled.arrival_s) == pytest.approx(0.25)  # those at 10 s are behind it
    assert np.diff(parse("trace=t.csv,rate=5", base=tmp_path).drawn().arrival_s) == pytest.approx(0.2)


def test_lengths_are_drawn_as_pairs_from_a_file(tmp_path):
    with gzip.open(tmp_path / "l.csv.gz", "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n,10,1\n,20,2\n,30,3\n")
    found = parse("rate=8,lengths=l.csv.gz,requests=300", base=tmp_path).drawn()
    assert np.array_equal(found.prompt, found.output * 10) and set(found.output) == {1, 2, 3}


def test_every_wrong_row_is_named_by_its_line_at_once(tmp_path):
    rows = [
        "arrival_s,prompt_tokens,output_tokens",
        "0,10,1",
        "1,0,1",
        "0.5,10,1",
        "2,10,x",
        "-3,10,1",
        "4,10",
        "5,2,2",
    ]
    (tmp_path / "bad.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(MeshwrightError) as caught:
        read(tmp_path / "bad.csv")
    said = {d.message.partition(": l")[0][:12]: d.message.rpartition(": ")[2] for d in caught.value.diagnostics}
    assert said == {
        "the prompt i": "line 3",
        "the answer i": "lines 5, 7",
        "the arrival ": "line 6",
        "it arrives b": "line 4",
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", ""), ("a.csv", "arrival_s,prompt_tokens,output_tokens\n"), ("a.csv", "a,b\n1,2\n"), ("a.jsonl", "x\n")],
)
def test_a_file_without_requests_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(MeshwrightError) as caught:
        read(tmp_path / name)
    assert [d.code for d in caught.value.diagnostics] == ["W011"]


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(MeshwrightError, match="No such file"):
        parse("trace=nowhere.csv").drawn()


def test_neighbouring_lines_are_a_range():
    assert numbered(np.array([3, 9, 8, 7])) == "lines 3, 7-9" and numbered(np.array([4])) == "line 4"
