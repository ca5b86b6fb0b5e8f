"""``meshwright serve``: everything that is wrong is said at once, before any engine is built."""

import json
from functools import partial

import pytest
from fuzz.fake_model import write_tokenizer

from meshwright.cli import main, needs, serve
from meshwright.endpoint import supervisor
from meshwright.endpoint.supervisor import EngineProcess
from meshwright.errors import MeshwrightError
from tests.cli.tiny import tiny


@pytest.fixture
def folder(tmp_path):
    """A published model's folder but for its weights, which nothing here reads."""
    tiny(tmp_path)
    return write_tokenizer(tmp_path / "tiny")


def read(*words):
    given, wrong = serve.options.read(serve.ServeOptions, words, command="serve", description="")
    return serve._read(given, wrong)


def test_options_say_the_engine_its_limits_and_its_callers(folder, monkeypatch):
    monkeypatch.setenv("KEY", "two")
    words = ["--plan", "tp2", "--serve", "policy=sarathi,budget=256,max_batch=8", "--api-key", "one", "--api-key"]
    limits = ["--max-queue", "5", "--timeout", "0", "--slow", "2", "--max-body", "1MiB", "--name", "mine"]
    limits += ["--adapter", "sql=adapters/sql", "--adapter", "chat=chat"]
    spec, served = read("--model", str(folder), *words, "env:KEY", *limits, "--host", "0.0.0.0")
    assert (spec.plan, spec.serve) == ("tp2", "policy=sarathi,max_batch=8,budget=256")
    assert spec.adapters == (("sql", "adapters/sql"), ("chat", "chat"))
    assert served.keys == ("one", "two") and served.names == ("mine", str(folder)) and served.host == "0.0.0.0"
    found = served.limits
    assert (found.running, found.queue, found.timeout_s, found.slow_s, found.body_bytes) == (8, 5, 0, 2, 2**20)


def test_a_plan_file_a_question_file_and_the_folder_alone_are_taken(folder, tmp_path):
    spec, served = read(str(folder))
    assert (spec.folder, spec.plan, spec.serve) == (str(folder), "", "") and served.names[0] == "tiny"
    assert served.limits.running == 256  # as many as the engine's words let run
    plan = tmp_path / "plan.toml"
    plan.write_text("format_version = 1\n[layout]\ntp = 2\n")
    spec, _ = read(str(plan), "--model", str(folder))
    assert spec.plan == str(plan) and spec.folder == str(folder)
    question = tmp_path / "question.toml"
    said = {"model": "tiny/config.json", "plan": "tp2", "serve": "rate=8,prompt=16,output=8,policy=orca,max_batch=4"}
    question.write_text("format_version = 1\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in said.items()))
    spec, served = read(str(question))
    assert (spec.folder, spec.plan) == (str(folder), "tp2") and served.limits.running == 4
    assert spec.serve == "policy=orca,max_batch=4"  # the requests are of a prediction
    assert read(str(question), "--serve", "max_batch=2")[1].limits.running == 2


def test_everything_that_is_wrong_is_said_at_once(folder, capsys, monkeypatch):
    words = ["--plan", "tq2", "--serve", "polcy=x,budget=-1", "--port", "70000", "--max-body", "big", "--device", "tpu"]
    words += ["--adapter", "nameless"]
    assert main(["serve", "--model", str(folder), *words, "--api-key", "env:NOT_SET", "--json"]) == 2
    found = [error["code"] for error in json.loads(capsys.readouterr().out)["errors"]]
    assert sorted(found) == ["L005", "L005", "L005", "L005", "P001", "T002", "W001", "W002"]
    with pytest.raises(MeshwrightError) as lost:
        read("--plan", "tp1")
    assert "--model DIR" in lost.value.diagnostics[0].help


def test_a_plan_that_no_engine_can_be_laid_out_by_is_refused_before_one_is_started(folder, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "EngineProcess", None)
    words = ["--plan", "tp3", "--tool-parser", "guess", "--hang", "0"]
    assert main(["serve", "--model", str(folder), *words[:2]]) == 2
    assert "error[W014]: tp3 does not divide 4 heads" in capsys.readouterr().err
    assert main(["serve", "--model", str(folder), *words, "--json"]) == 2
    found = [error["message"] for error in json.loads(capsys.readouterr().out)["errors"]]
    assert sorted(found)[:2] == ["--hang 0 cannot be", "--tool-parser guess cannot be"] and len(found) == 3


def test_without_a_tokenizer_or_the_extra_it_says_what_is_missing(folder, capsys, monkeypatch):
    (folder / "tokenizer.json").unlink()
    assert main(["serve", str(folder)]) == 2
    assert "error[D004]" in capsys.readouterr().err
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    assert main(["serve", str(folder)]) == 2
    assert 'pip install "meshwright[serve]"' in capsys.readouterr().err


def test_an_engine_that_cannot_be_built_is_an_error_with_its_reason(folder, capsys, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)  # the process imports the fake engine from there
    monkeypatch.setattr(supervisor, "EngineProcess", partial(EngineProcess, module="fuzz.fake_engine"))
    assert main(["serve", str(folder), "--port", "0", "--serve", "policy=orca"]) == 2
    said = capsys.readouterr()
    assert "error[L005]: this engine cannot be" in said.err and said.out == ""
    assert main(["serve", str(folder), "--port", "0", "--serve", "policy=static"]) == 2  # dies on that
    assert "error[L007]" in capsys.readouterr().err


def test_a_taken_port_is_an_error_before_an_engine_is_built(folder, capsys):
    from meshwright.endpoint.hosts import bind

    with bind("127.0.0.1", 0, 0) as taken:
        assert main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "error[I010]" in capsys.readouterr().err
