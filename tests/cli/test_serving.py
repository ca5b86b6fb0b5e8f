"""``meshwright predict --serve``: exit codes, files, and what is wrong said at once."""

import csv
import gzip
import json

import pytest

from meshwright.cli import main

BASE = ["predict", "llama3-8b", "--on", "1xh100", "--plan", "tp1"]
WORDS = "rate=4,prompt=256,output=32,requests=60"


def test_an_answer_says_verdict_latencies_and_memory(capsys):
    assert main([*BASE, "--serve", f"{WORDS},ttft=500ms,tpot=50ms@p90"]) == 0
    said = capsys.readouterr().out
    for part in ("fits", "TTFT p90", "within 500 ms", "goodput", "weights", "engine profile"):
        assert part in said, part


def test_a_missed_objective_is_exit_code_1(capsys):
    assert main([*BASE, "--serve", f"{WORDS},tpot=1ms", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] and not said["good"] and said["objectives"][0]["met"] is False


def test_a_model_that_does_not_fit_is_exit_code_1(capsys):
    assert main(["predict", "llama3-70b", "--on", "1xh100", "--plan", "tp1", "--serve", WORDS]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_records_and_timeline_are_written(capsys, tmp_path):
    rows, trace = tmp_path / "requests.csv", tmp_path / "trace.json.gz"
    assert main([*BASE, "--serve", WORDS, "--records", str(rows), "--trace", str(trace)]) == 0
    with rows.open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 60 and float(found[0]["first_s"]) > float(found[0]["arrival_s"])
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"running (requests)", "waiting (requests)", "cache blocks (blocks)"} <= names


def test_everything_that_is_wrong_is_said_at_once(capsys):
    words = ["predict", "llama3-8b", "--on", "1xh100", "--plan", "tp1 zero1", "--tokens", "1t"]
    assert main([*words, "--serve", "rate=0,prompt=8,output=8,kv=x"]) == 2
    said = capsys.readouterr().err
    assert [said.count(f"error[{code}]") for code in ("X004", "W002", "W014")] == [1, 2, 1]


def test_a_training_step_beside_requests_is_refused(capsys):
    assert main([*BASE, "--train", "batch=8,seq=512", "--serve", WORDS]) == 2
    assert "--train is of a training step" in capsys.readouterr().err


def test_objectives_may_be_an_option_of_their_own(capsys):
    assert main([*BASE, "--serve", WORDS, "--slo", "ttft=500ms,tpot=1ms@p95", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)["objectives"]
    assert [(one["metric"], one["share"], one["met"]) for one in said] == [
        ("ttft_s", 0.95, True),
        ("tpot_s", 0.95, False),
    ]
    assert main([*BASE, "--serve", WORDS, "--slo", "rate=3"]) == 2
    assert "'rate' is no objective" in capsys.readouterr().err


def test_records_without_requests_are_refused(capsys):
    assert main([*BASE, "--train", "batch=8,seq=512", "--records", "x.csv"]) == 2
    assert "--records is of requests" in capsys.readouterr().err


def test_a_question_file_may_say_requests(capsys, tmp_path):
    (tmp_path / "requests.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n")
    lines = ['model = "llama3-8b"', 'on = "1xh100"', 'plan = "tp1"', 'serve = "trace=requests.csv"']
    (tmp_path / "q.toml").write_text("\n".join(["format_version = 1", *lines]))
    assert main(["predict", str(tmp_path / "q.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2


def test_a_trace_said_as_an_option_is_looked_for_where_the_command_runs(capsys, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    lines = ["format_version = 1", 'model = "llama3-8b"', 'on = "1xh100"', 'plan = "tp1"']
    (tmp_path / "there" / "q.toml").write_text("\n".join(lines))
    (tmp_path / "here.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "there/q.toml", "--serve", "trace=here.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 1


@pytest.mark.parametrize("rows", ["0,0,5\n1,5,x\n", "5,1,1\n1,1,1\n"])
def test_wrong_rows_of_a_trace_are_exit_code_2(capsys, tmp_path, rows):
    (tmp_path / "bad.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    assert main([*BASE, "--serve", f"trace={tmp_path / 'bad.csv'}"]) == 2
    said = capsys.readouterr().err
    assert "W011" in said and "line 3" in said


def test_a_trace_has_a_process_for_every_replica_with_its_requests_and_counters(tmp_path, capsys):
    from meshwright.trace import read

    trace = tmp_path / "trace.json"
    words = [*BASE[:3], "2xh100", *BASE[4:]]
    assert main([*words, "--serve", WORDS, "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "replica 0", 1: "replica 1"}
    assert {e["pid"] for e in events if e["ph"] == "C"} == {0, 1}
    spans = [e for e in events if e["ph"] in "be" and e["id"] == 3]
    assert [e["name"] for e in spans] == [
        "request 3", "waiting", "waiting", "prompt", "prompt", "answer", "answer", "request 3",
    ]  # fmt: skip
    assert [e["ts"] for e in spans] == sorted(e["ts"] for e in spans)
    assert len(read(trace).records["requests"]["end_s"]) == 60


def test_parquet_without_its_library_is_said_before_the_work(tmp_path, capsys, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*BASE, "--serve", WORDS, "--records", str(tmp_path / "r.parquet")]) == 2
    said = capsys.readouterr().err
    assert "error[K006]" in said and "meshwright[import]" in said


def test_records_may_be_parquet(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra")
    out = tmp_path / "r.parquet"
    assert main([*BASE, "--serve", WORDS, "--records", str(out)]) == 0
    table = parquet.read_table(out).to_pydict()
    assert len(table["end_s"]) == 60 and table["prompt_tokens"] == [256] * 60


MIX = """format_version = 1
requests = 60
[[client]]
name = "chat"
rate = 8
prompt = 64
output = 8
turns = 3
think = "1s"
ttft = "10s"
[[client]]
trace = "azure-conv"
"""


def test_a_file_of_clients_is_answered_with_the_objectives_of_each(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mix.toml").write_text(MIX)
    assert main([*BASE, "--serve", "mix.toml,policy=sarathi", "--slo", "e2e=100s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 60
    assert {(one["metric"], one["of"]) for one in found["objectives"]} == {("e2e_s", ""), ("ttft_s", "chat")}


def test_a_question_file_names_a_file_of_requests_beside_it(capsys, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    lines = ["format_version = 1", 'model = "llama3-8b"', 'on = "1xh100"', 'plan = "tp1"', 'serve = "mix.toml"']
    (tmp_path / "there" / "q.toml").write_text("\n".join(lines))
    (tmp_path / "there" / "mix.toml").write_text(MIX)
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "there/q.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 60
    (tmp_path / "here.toml").write_text(MIX.replace("60", "30"))
    assert main(["predict", "there/q.toml", "--serve", "here.toml,seed=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 30


def test_an_objective_of_a_priority_may_stand_apart(capsys):
    words = "rate=8,prompt=64,output=8,requests=40,priority=1+0"
    assert main([*BASE, "--serve", words, "--slo", "ttft=10s,ttft.1=1us"]) == 1
    assert "of priority 1" in capsys.readouterr().out


def test_an_answer_says_where_recorded_requests_are_from(capsys):
    assert main([*BASE, "--serve", "trace=mooncake,longest=4096,requests=20"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Apache-2.0" in said and "3,000" in said


def test_a_recorded_trace_is_played_without_what_the_model_cannot_take(capsys):
    # one request of the Azure trace is longer than this model's 8,192 tokens
    words = ["predict", "llama3-8b", "--on", "1xh100", "--plan", "tp1", "--serve", "trace=azure-conv,rate=1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "longest=8192" in found["serve"] and any("8,192" in one for one in found["warnings"])


def test_a_serving_question_without_a_plan_is_told_of_the_search(capsys):
    assert main(["predict", "llama3-8b", "--on", "1xh100", "--serve", "rate=1,prompt=8,output=8"]) == 2
    assert "meshwright search" in capsys.readouterr().err


def test_an_answer_says_that_shared_prefixes_are_not_kept(capsys):
    words = "rate=8,prompt=640,output=8,requests=40,prefix=512"
    for more, said in (("", True), (",prefix_cache=yes", False)):
        assert main([*BASE, "--serve", words + more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert any("prefix_cache=yes" in one for one in found["warnings"]) == said
        assert (found["hit_rate"] > 0.5) == (not said)


def test_recorded_lengths_and_clients_are_played_without_what_the_model_cannot_take(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clients = '[[client]]\ntrace = "mooncake"\n[[client]]\nrate = 1\nprompt = 8\noutput = 8\n'
    (tmp_path / "mix.toml").write_text("format_version = 1\nrequests = 40\n" + clients)
    for words in (
        "mix.toml",
        "windows=servegen-deepseek-r1,begin=8h,requests=40",
        "rate=1,lengths=sharegpt,requests=400",
    ):
        assert main([*BASE, "--serve", words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert any("8,192 tokens are left out" in one for one in found["warnings"])
