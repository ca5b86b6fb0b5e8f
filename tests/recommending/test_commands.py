"""``predict``, ``search`` and ``catalog`` of recommendation models on the command line."""

import json

import pytest

from meshwright.cli import main

ASKED = ["dlrm-dcnv2", "--on", "16xh100", "--train", "batch=65536"]


def test_predict_says_where_the_time_goes_and_where_tables_are(capsys):
    assert main(["predict", *ASKED, "--plan", "embeddings=row towers=node"]) == 0
    out = capsys.readouterr().out
    assert "fits" in out and "exposed exchange" in out and "by rows" in out


def test_json_has_seconds_that_sum_to_the_step_and_every_table(capsys, tmp_path):
    trace = tmp_path / "step.json"
    assert main(["predict", *ASKED, "--plan", "embeddings=table", "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["attribution_s"].values()) == pytest.approx(found["step_time_s"])
    assert len(found["tables"]) == 26 and found["samples_per_s"] == pytest.approx(65536 / found["step_time_s"])
    assert trace.exists()


def test_a_search_saves_a_question_that_predict_answers_alike(capsys, tmp_path):
    path = str(tmp_path / "plan.toml")
    fixed = ["--fix", "embeddings=column,table", "--fix", "small=0", "--top", "2"]
    assert main(["search", *ASKED, *fixed, "--save", path, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert len(best) == 2 and best[0]["step_time_s"] <= best[1]["step_time_s"]
    assert main(["predict", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == best[0]["step_time_s"]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["predict", *ASKED, "--plan", "tp2"], "P082"),
        (["predict", "llama3-8b", "--on", "8xh100", "--train", "batch=8,seq=4096", "--plan", "embeddings=row"], "P081"),
        (["predict", *ASKED, "--plan", "dp16", "--slo", "ttft=1s"], "X004"),
        (["predict", *ASKED], "X004"),
        (["export", *ASKED, "--plan", "dp16", "--to", "megatron"], "M010"),
        (["search", *ASKED, "--objective", "cost"], "X004"),
        (["search", *ASKED, "--fix", "tp=2"], "R001"),
        (["search", "dlrm", "--on", "8..64xh100", "--train", "batch=64"], "B005"),
    ],
)
def test_what_does_not_apply_is_misuse(argv, code, capsys):
    assert main(argv) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_the_catalog_lists_recommendation_models(capsys):
    assert main(["catalog", "recommenders"]) == 0
    assert "dlrm-dcnv2" in capsys.readouterr().out
    assert main(["catalog", "recommenders", "dlrm-mlperf"]) == 0
    assert "mlcommons" in capsys.readouterr().out
