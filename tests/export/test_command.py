"""``meshwright export``: the configuration on stdout or in a file, notes on stderr, gaps as exit code 1."""

import json
import tomllib

import pytest

from meshwright.cli import main
from meshwright.export import TARGETS

QUESTION = ["llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=8192", "--plan", "fsdp"]


def test_the_configuration_is_the_only_thing_on_stdout(capsys):
    assert main(["export", *QUESTION, "--to", "torchtitan-toml"]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["parallelism"]["data_parallel_shard_degree"] == 8
    assert err.startswith("note: start it: torchrun --nnodes=1 --nproc-per-node=8 ")


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_writes_json_with_its_files_and_notes(target, capsys):
    assert main(["export", *QUESTION, "--to", target, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["format_version"], said["target"]) == (1, target)
    assert said["files"] and said["notes"] and said["version"]


def test_a_file_gets_its_own_name_in_the_notes_and_its_companions_beside_it(tmp_path, capsys):
    out = tmp_path / "titan.py"
    words = ["llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=8192", "--plan", "pp2 zb-h1 fsdp"]
    assert main(["export", *words, "--to", "torchtitan", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["schedule.csv", "titan.py"]
    assert "--module titan --config planned" in shown.err
    assert "meshwright_config" not in shown.err


def test_what_cannot_be_expressed_is_exit_code_one_with_every_gap(capsys):
    asked = [*QUESTION[:-1], "zero1 selective", "--to", "torchtitan", "--json"]
    assert main(["export", *asked]) == 1
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [e["code"] for e in errors] == ["E001", "E001"]
    assert errors[-1]["help"].endswith('--plan "dp8 mb1 zero2"')


def test_everything_wrong_with_a_question_is_listed_at_once(capsys):
    assert main(["export", "lama3-8b", "--on", "8xh100", "--plan", "tp", "--to", "nemo"]) == 2
    err = capsys.readouterr().err
    assert all(f"error[{code}]" in err for code in ("M006", "P001", "X004", "E002"))


def test_a_place_that_cannot_be_written_is_said_before_the_work(capsys):
    assert main(["export", *QUESTION, "--to", "deepspeed", "--out", "no/such/folder/ds.json"]) == 2
    assert "error[X104]" in capsys.readouterr().err


def test_a_pipe_takes_a_configuration_of_one_file_and_no_other(tmp_path, capsys):
    assert main(["export", *QUESTION, "--to", "megatron", "--out", "/dev/null"]) == 0
    assert "bash pretrain.sh" in capsys.readouterr().err  # the script's own name in how to start it, not the pipe's
    two = [*QUESTION[:-1], "pp2 zb-h1 fsdp", "--to", "torchtitan", "--out"]
    for out, reason in (("/dev/null", "it takes one file"), (str(tmp_path / "schedule.csv"), "has that name")):
        assert main(["export", *two, out]) == 2
        err = capsys.readouterr().err
        assert "error[X104]" in err and reason in err and "schedule.csv belongs to it" in err
    assert list(tmp_path.iterdir()) == []
