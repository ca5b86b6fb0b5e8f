"""`meshwright predict` as a user meets it: answers, files, and every mistake at once in plain words."""

import gzip
import json
import re
from pathlib import Path

import pytest

from meshwright.cli import main

QUESTION = ["llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=4096"]
FITS = [*QUESTION, "--plan", "fsdp"]
DOES_NOT = [*QUESTION, "--plan", "zero1"]  # 8.03e9 parameters x (2 + 4) bytes and activations: more than 80 GB
NEEDED = """fits step_time_s step_time_interval_s tokens_per_s_per_gpu mfu peak_memory_bytes attribution plan"""


def said(capsys, *argv):
    code = main(["predict", *argv])
    return code, *capsys.readouterr()


def errors(err):
    return re.findall(r"^error\[(\w+)\]: (.*)$", err, re.MULTILINE)


def test_a_plan_that_fits_is_a_verdict_on_stdout_and_exit_0(capsys):
    code, out, err = said(capsys, *FITS)
    assert code == 0
    assert out.startswith("fits: ")
    assert "Where the step goes" in out
    assert err == ""


def test_a_plan_that_does_not_fit_says_by_how_much_and_exits_1(capsys):
    code, out, _ = said(capsys, *DOES_NOT)
    assert code == 1
    assert re.match(r"does not fit: [\d.]+ GiB over on rank 0", out)


def test_json_is_one_object_with_the_answer(capsys):
    code, out, err = said(capsys, *FITS, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer.keys() >= {"format_version", *NEEDED.split()}
    low, high = answer["step_time_interval_s"]
    assert low < answer["step_time_s"] < high
    assert sum(answer["attribution"].values()) == pytest.approx(answer["step_time_s"])
    assert answer["identity"]["code"]


def test_json_of_a_plan_that_does_not_fit_has_the_answer_too_and_exits_1(capsys):
    code, out, _ = said(capsys, *DOES_NOT, "--json")
    assert (code, json.loads(out)["fits"]) == (1, False)


def test_report_and_trace_are_written_and_told_on_stderr(capsys, tmp_path):
    report, trace = tmp_path / "report.html", tmp_path / "step.json.gz"
    code, out, err = said(capsys, *FITS, "--report", str(report), "--trace", str(trace))
    assert code == 0
    assert out.startswith("fits: ")
    assert err == f"wrote {report}\nwrote {trace}\n"
    assert report.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["report.html", "step.json.gz"]


def test_everything_that_is_wrong_is_said_at_once_and_exits_2(capsys):
    code, out, err = said(
        capsys, "llama3-8", "--on", "64xh1000", "--train", "batch=x", "--plan", "tp4 foo zero9", "--report", "no/r.html"
    )
    assert (code, out) == (2, "")
    codes = [code for code, _ in errors(err)]
    assert codes == ["X104", "M006", "C001", "W002", "W003", "P001", "P002"]
    assert "did you mean llama3-8b" in err


@pytest.mark.parametrize(
    ("without", "named"), [("--on", "--on"), ("--train", "--train"), ("--plan", "--plan"), ("llama3-8b", "MODEL")]
)
def test_what_is_missing_is_named_with_an_example(without, named, capsys):
    argv = list(FITS)
    at = argv.index(without)
    del argv[at : at + (2 if without.startswith("--") else 1)]
    code, _, err = said(capsys, *argv)
    assert code == 2
    assert errors(err) == [("X004", f"{named} is missing")]
    assert f"help: add {named}" in err


@pytest.mark.parametrize("words", [["--report", ""], ["--report="]])
def test_an_empty_value_is_said_and_not_taken_for_none(words, capsys):
    code, out, err = said(capsys, *FITS, *words)
    assert (code, out, errors(err)) == (2, "", [("X004", "--report has an empty value")])


def test_an_option_at_the_end_without_its_value_is_named(capsys):
    code, _, err = said(capsys, *FITS, "--report")
    assert (code, errors(err)) == (2, [("X004", "--report has no value")])


def test_nothing_at_all_names_all_four(capsys):
    code, _, err = said(capsys)
    assert code == 2
    assert [message for _, message in errors(err)] == [
        f"{w} is missing" for w in ("MODEL", "--on", "--train", "--plan")
    ]


def test_an_illegal_plan_lists_every_violation_and_exits_2(capsys):
    code, out, err = said(capsys, *QUESTION, "--plan", "tp6 pp5")  # 32 heads, 8 devices
    assert (code, out) == (2, "")
    assert len(errors(err)) >= 2
    assert all(code.startswith(("P", "S")) for code, _ in errors(err))


def test_errors_as_json_are_one_object_with_all_of_them(capsys):
    code, out, err = said(capsys, "nothing", "--on", "nowhere", "--train", "batch=8,seq=8", "--plan", "tp1", "--json")
    answer = json.loads(out)
    assert (code, err, answer["format_version"]) == (2, "", 1)
    assert [e["code"] for e in answer["errors"]] == ["M006", "C001"]
    assert all(set(e) == {"code", "message", "place", "help"} for e in answer["errors"])


@pytest.mark.parametrize(("option", "file"), [("--report", "r.html"), ("--trace", "t.json.gz")])
def test_an_unwritable_path_is_one_error_before_the_work_and_leaves_nothing(option, file, capsys, tmp_path):
    code, out, err = said(capsys, *FITS, option, str(tmp_path / "absent" / file))
    assert (code, out) == (2, "")
    assert [c for c, _ in errors(err)] == ["X104"]
    assert "mkdir -p" in err
    assert list(tmp_path.iterdir()) == []


def test_a_full_device_is_one_error_beside_the_answer_and_stays_a_device(capsys):
    code, out, err = said(capsys, *FITS, "--trace", "/dev/full", "--json")
    assert code == 2 and json.loads(out)["fits"]  # the answer alone: an error as JSON too would leave no JSON
    assert errors(err) == [("X104", "cannot write /dev/full: No space left on device")]
    assert Path("/dev/full").is_char_device()


def test_a_folder_is_no_report(capsys, tmp_path):
    code, _, err = said(capsys, *FITS, "--report", str(tmp_path))
    assert code == 2
    assert "it is a folder" in err


def test_a_model_may_be_a_config_json(capsys, tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    code, out, _ = said(capsys, str(file), *FITS[1:], "--json")
    assert code == 0
    assert json.loads(out)["model"] == tmp_path.name


QUESTION_FILE = """format_version = 1
model = "llama3-8b"
on = "8xh100"
train = "batch=64,seq=4096"
plan = "fsdp"
"""


def question(tmp_path, text=QUESTION_FILE):
    file = tmp_path / "question.toml"
    file.write_text(text)
    return str(file)


def test_a_model_whose_file_cannot_be_read_says_nothing_of_the_workload(capsys, tmp_path):
    """It may be a model of a graph, of tables or of layers, and each has words of its own."""
    path = tmp_path / "mine.json"
    path.write_text('{"architectures": ["NodeEmbedding"],\n "nodes": 40 "edges": 300}')
    words = [str(path), "--on", "8xh100", "--train", "batch=1000,negatives=4", "--plan", "partitions=4"]
    for command in ("predict", "search"):
        assert main([command, *(words if command == "predict" else words[:-2])]) == 2
        err = capsys.readouterr().err
        assert re.findall(r"^error\[(\w+)\]", err, re.MULTILINE) == ["M007"]
        assert "not JSON" in err and "help: mend line 2 of the file" in err


def test_a_question_file_is_asked_as_if_typed(capsys, tmp_path):
    typed = json.loads(said(capsys, *FITS, "--json")[1])
    assert json.loads(said(capsys, question(tmp_path), "--json")[1]) == typed


def test_options_go_over_the_question_file(capsys, tmp_path):
    _, out, _ = said(capsys, question(tmp_path), "--plan", "tp2 fsdp", "--json")
    assert json.loads(out)["plan"].split()[0] == "tp2"


def test_a_file_named_in_a_question_lies_beside_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    code, _, err = said(capsys, question(tmp_path, QUESTION_FILE.replace("llama3-8b", "absent.json")))
    assert code == 2
    assert str(tmp_path / "absent.json") in err


def test_wrong_keys_of_a_question_file_are_all_named(capsys, tmp_path):
    code, _, err = said(capsys, question(tmp_path, QUESTION_FILE + 'cluster = "8xh100"\nplam = "x"\n'))
    assert code == 2
    assert errors(err) == [("X008", "unknown key 'cluster'"), ("X008", "unknown key 'plam'")]
    assert "did you mean plan?" in err


def test_a_question_of_a_newer_format_is_refused_with_the_way_out(capsys, tmp_path):
    code, _, err = said(capsys, question(tmp_path, QUESTION_FILE.replace("= 1", "= 9", 1)))
    assert code == 2
    assert errors(err) == [("X007", "format_version is 9, this version reads 1")]
    assert "help: it was written by a newer version: pip install --upgrade meshwright" in err


def test_a_question_without_a_format_version_is_told_what_to_write(capsys, tmp_path):
    code, _, err = said(capsys, question(tmp_path, QUESTION_FILE.partition("\n")[2]))
    assert code == 2
    assert "help: write format_version = 1 at the top of the file" in err


@pytest.mark.parametrize("text", ["not toml", "\x00"])
def test_a_question_that_is_not_toml_is_one_error(text, capsys, tmp_path):
    code, _, err = said(capsys, question(tmp_path, text))
    assert code == 2
    assert [c for c, _ in errors(err)] == ["X006"]


def test_expert_exchange_that_dualpipe_would_hide_is_said_to_be_counted_where_a_plan_counts_it(capsys):
    # DeepSeek-V3 (2412.19437, section 3.2.1) hides it behind another microbatch's work
    asked = ["mixtral-8x7b", "--on", "64xh100", "--train", "batch=256,seq=4096", "--plan"]
    told = "is made to hide expert exchange behind another microbatch's work"
    plan = "pp4 ep8 zero1 dualpipev"
    for words, expected in (
        (f"{plan} overlap=dp,pp", True),
        (plan, False),
        ("pp4 zero1 dualpipev overlap=dp,pp", False),
    ):
        _, out, _ = said(capsys, *asked, words)
        assert (told in " ".join(out.split())) is expected


def test_a_named_framework_overlaps_what_it_does_by_default_unless_the_plan_says(capsys):
    # Megatron-Bridge hides the experts' exchange where it crosses nodes (its recipes' moe_a2a_overlap)
    asked = ["qwen3-30b-a3b", "--on", "64xh100", "--train", "batch=256,seq=4096", "--framework", "megatron-bridge@2025"]
    plans = {"pp4 ep16 zero1": "overlap=dp,pp,ep", "pp4 ep8 zero1": "1f1b", "pp4 ep16 overlap=none": "overlap=none"}
    for words, ends in plans.items():
        _, out, _ = said(capsys, *asked, "--json", "--plan", words)
        assert json.loads(out)["plan"].endswith(ends)


def test_an_mfu_that_hardly_any_measured_step_reaches_asks_for_the_frameworks_name(capsys):
    asked = ["llama2-7b", "--on", "8xa100-80", "--train", "batch=128,seq=4096", "--plan"]
    for words, expected in (
        ("fsdp mb2", True),
        ("fsdp mb2 full", False),
        ("fsdp mb2 --framework torchtitan-compile", False),
    ):
        plan, *more = words.split(" --")
        _, out, _ = said(capsys, *asked, plan, *(f"--{more[0]}".split() if more else ()))
        assert ("name your framework" in out.split("model")[0]) is expected


def test_a_file_of_lengths_lies_beside_the_question_and_an_option_s_where_it_is_typed(tmp_path, monkeypatch, capsys):
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "lengths.csv").write_text("tokens\n256\n1024\n")
    (tmp_path / "asked" / "q.toml").write_text(
        'format_version = 1\nmodel = "gpt2-xl"\non = "2xh100"\nplan = "dp2 zero1 mb1"\n'
        'train = "batch=8,seq=1024,lengths=lengths.csv"\nframework = "fused"\n'
    )
    (tmp_path / "here.txt").write_text("1024\n")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "asked/q.toml", "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert asked["workload"] == "batch=8,seq=1024,lengths=lengths.csv"
    found = asked["batches"]
    assert found["num_draws"] == 32 and found["p10_s"] <= found["p50_s"] <= found["p90_s"]
    assert found["mean_s"] == asked["step_time_s"]
    assert found["unequal_s"] == asked["attribution"]["unequal"] > 0
    assert main(["predict", "asked/q.toml", "--train", "batch=8,seq=1024,lengths=here.txt", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main(["predict", "asked/q.toml", "--train", "batch=8,seq=1024", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert whole["step_time_s"] == plain["step_time_s"]


def test_all_that_is_wrong_with_lengths_is_said_at_once(tmp_path, capsys):
    (tmp_path / "bad.csv").write_text("tokens\n0\n-3\nten\n512\n")
    argv = ["predict", "gpt2-xl", "--on", "2xh100", "--plan", "dp3", "--train"]
    assert main([*argv, f"batch=8,seq=2048,pack=tight,seed=x,lengths={tmp_path / 'bad.csv'}"]) == 2
    said = capsys.readouterr().err
    for part in ("pack = 'tight'", "seed = 'x'", "bad.csv:2: '0'; ", "bad.csv:3: '-3'; ", "bad.csv:4: 'ten'"):
        assert part in said, part
