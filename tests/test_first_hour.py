"""The first hour of three users, as the commands they type: each ends with what their own tools accept."""

import json
import re

import pytest

from meshwright.cli import main
from tests.export import megatron_arguments


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A new folder to work in, with a store of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def shell(folder, capsys):
    """A command of meshwright: its stdout and its stderr, once its exit code is the one expected."""

    def run(*words, code=0):
        assert main(list(words)) == code, capsys.readouterr().err
        return capsys.readouterr()

    return run


def test_a_team_with_64_h100_takes_llama_70b_from_a_question_to_megatron(folder, shell):
    question = ["llama3-70b", "--on", "64xh100", "--train", "batch=512,seq=8192"]
    # a plan from a paper, which their engine does not run
    refused = shell("export", *question, "--plan", "tp8 pp4 vpp2 zero2", "--to", "megatron", code=1).err
    assert "zero2 beside pp4" in refused and "that fits: --plan" in refused
    # the fastest one that it runs, among those of one node's tensor parallelism
    narrow = ["--fix", "tp=8", "--fix", "cp=1", "--fix", "mb=1"]
    saved = shell("search", *question, "--for", "megatron", *narrow, "--save", "plan.toml").err
    assert "next: meshwright export plan.toml --to megatron" in saved
    said = json.loads(shell("predict", "plan.toml", "--json").out)
    assert said["fits"] and said["model"] == "llama3-70b"
    # its script: what their engine takes, for 8 nodes of 8, and what is theirs to fill in
    notes = shell("export", "plan.toml", "--to", "megatron", "--out", "pretrain.sh").err
    script = (folder / "pretrain.sh").read_text()
    args = megatron_arguments.accepted(script)
    assert (args.tensor_model_parallel_size, args.micro_batch_size, args.global_batch_size) == (8, 1, 512)
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (
        80,
        8192,
        64,
    )  # Llama 3, 2407.21783, table 3
    assert "#SBATCH --nodes=8\n" in script and (folder / "pretrain.sh").stat().st_mode & 0o100
    for name in ("MEGATRON_LM", "DATA_PATH", "TOKENIZER_MODEL", "LR", "TRAIN_ITERS", "HEAD_NODE"):
        assert f"fill in {name}: " in notes and f"${{{name}:?" in script


def test_a_researcher_with_a_laptop_asks_what_a_paper_would_bring(folder, shell):
    (folder / "question.toml").write_text(
        'format_version = 1\nmodel = "llama3.2-1b"\non = "8xa100-80"\ntrain = "batch=64,seq=2048"\nplan = "dp8"\n'
    )
    assert "partly" in shell("papers", "--area", "data-parallel").out
    assert "optimizer state sharded" in shell("explain", "zero1").out
    before = json.loads(shell("predict", "question.toml", "--json").out)
    assert before["fits"]
    tried = json.loads(shell("whatif", "question.toml", "--try", "pytorch-fsdp", "--json").out)
    # sharding gives memory back and changes no number that is trained
    assert tried["before"]["step_time_s"] == before["step_time_s"]
    assert tried["exact"] and tried["memory_bytes"] < 0
    sides = ["llama3.2-1b", "--on", "8xa100-80", "--train", "batch=64,seq=2048", "--plan", "dp8", "--plan", "fsdp"]
    apart = json.loads(shell("diff", *sides, "--json").out)
    assert apart["step_time_s"]["a"] == before["step_time_s"] < apart["step_time_s"]["b"]
    shell("predict", "question.toml", "--report", "report.html")
    report = (folder / "report.html").read_text()
    assert report.startswith("<!doctype html>") and "llama3.2-1b" in report
    assert not re.search(r"""(?:src|href)=["']https?://""", report)  # it opens on a train
    # the plan is trained for real by any engine: the one of this package takes it as it is
    assert shell("export", "question.toml", "--to", "torchtitan").out.startswith('"""Configuration for TorchTitan')


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("target", ["accelerate", "deepspeed"])
def test_a_fine_tuner_with_two_cards_ends_with_a_configuration_of_their_trainer(target, folder, shell):
    question = ["llama3-8b", "--on", "2x4090", "--train", "batch=16,seq=2048,phase=lora"]
    first = shell("predict", *question, "--plan", "dp2", code=1).out
    assert "does not fit" in first and "fsdp" in first
    shell("search", *question, "--for", target, "--save", "plan.toml")
    found = json.loads(shell("predict", "plan.toml", "--json").out)
    assert found["fits"]
    out = {"accelerate": "accelerate.yaml", "deepspeed": "ds_config.json"}[target]
    notes = shell("export", "plan.toml", "--to", target, "--out", out).err
    assert "adapters of rank 16 on q+k+v+o (peft)" in notes and "fill in <SCRIPT>" in notes
    assert "--nproc-per-node=2" in (folder / "run.sh").read_text() or target == "accelerate"
    check = {"accelerate": launched_by_accelerate, "deepspeed": read_by_deepspeed}[target]
    check(folder / out)


def launched_by_accelerate(file):
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate is not installed")
    words = ["--config_file", str(file), "train.py"]
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    assert (args.num_processes, args.num_machines, args.mixed_precision) == (2, 1, "bf16")


def read_by_deepspeed(file):
    table = json.loads(file.read_text())
    # 16 sequences a step, whatever share of them a card takes at once
    ranks = table.get("data_parallel_size", 2)
    assert table["train_micro_batch_size_per_gpu"] * table["gradient_accumulation_steps"] * ranks == 16
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    table.pop("train_batch_size", None)  # it is checked against the ranks of the job, and this is a job of one
    assert config.DeepSpeedConfig(table).zero_optimization_stage == table["zero_optimization"]["stage"]


TRAIN = ["--train", "batch=64,seq=4096"]
OURS = ["predict", "llama3-8b", "--on", "8xh100", "--plan", "fsdp"]
ONLY_DP = ["--fix", "tp=1", "--fix", "pp=1", "--fix", "cp=1"]
SERVED = ["predict", "llama3-8b", "--on", "8xh100", "--plan", "tp8", "--serve", "rate=4,prompt=512,output=64"]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ([*OURS, "--train", "batch=64 seq=4096"], "W002", "words are separated by commas"),
        ([*OURS, "--train", "batch=64;seq=4096"], "W002", "words are separated by commas"),
        ([*SERVED[:-1], "rate=4 prompt=512 output=64"], "W002", "words are separated by commas"),
        ([*OURS[:-1], "tp", *TRAIN], "P001", "it wants a number behind it: tp2"),
        ([*OURS[:3], "mine.toml", *OURS[4:], *TRAIN], "C004", "--toml > mine.toml writes one"),
        ([*OURS[:3], "8xh100,foo=3", *OURS[4:], *TRAIN], "C014", "keys are nodes, gpus, device, "),
        ([*OURS, "--train", "batch=64,seq=4096,lengths=none.csv"], "W004", "a file with a length in tokens a line"),
        (OURS, "X004", "or for requests in place of steps --serve rate="),
        ([*SERVED, *TRAIN], "X004", "drop --train, or drop --serve"),
        (["predict", "none.toml"], "X006", "meshwright init and meshwright search --save write one"),
        (["search", *OURS[1:4], *TRAIN, "--fix", "tp=3"], "R005", "tp=3 does not divide num_heads=32"),
        (["search", *OURS[1:3], "7xh100", *TRAIN, *ONLY_DP], "R005", "batch 64 is not a multiple of dp7"),
        (["predict", "empty.json", *OURS[2:], *TRAIN], "M007", "cannot read empty.json: it is empty"),
        (["papers", "zero-bubble", "dapple"], "X003", "meshwright papers --help lists what it takes"),
        (["papers", "zero-bubbel"], "J001", "did you mean zero-bubble?"),
        (["calibrate"], "X004", "add --here (this machine), --server URL, "),
        (["calibrate", "--runs", "none.csv", "--out", "o.toml"], "V001", "cannot read the table: No such file or"),
        (["run", "llama-1m", "--on", "2xh100", *TRAIN, "--plan", "dp2", "--data", "sample", "--steps", "0"], "L005",
         "a number of steps, at least 1"),
    ],
)  # fmt: skip
def test_a_slip_of_the_first_hour_is_told_what_to_write(argv, code, said, folder, shell):
    (folder / "empty.json").touch()
    err = shell(*argv, code=2).err
    assert f"error[{code}]" in err and said in err


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([*SERVED, "--slo", "tfft=2s"], "W001"),
        (["predict", "--serve", "rate=2,prompt=40,output=20", "--engine-profile", "none.toml"], "T008"),
    ],
)
def test_one_slip_is_one_error(argv, code, folder, shell):
    assert re.findall(r"error\[(\w+)\]", shell(*argv, code=2).err) == [code]
