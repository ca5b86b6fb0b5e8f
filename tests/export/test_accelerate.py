"""Accelerate's YAML: its keys, its degrees, and Accelerate's own reader where it is installed."""

import json
import re

import pytest

from meshwright.export import target
from tests.export.questions import ask

yaml = pytest.importorskip("yaml", reason="PyYAML reads the files back")

#: model, cluster, workload, plan -> kind, replicate, shard, tp, cp.
CASES = {
    ("llama3-8b", "16xh100", "batch=512,seq=8192", "tp2 cp2 fsdp full nosp"): ("FSDP", 1, 4, 2, 2),
    ("llama3-8b", "32xh100", "batch=64,seq=8192", "hsdp8"): ("FSDP", 4, 8, 1, 1),
    ("llama3-8b", "8xh100", "batch=64,seq=8192", "zero2 fp16"): ("FSDP", 1, 8, 1, 1),
    ("llama3-8b", "16xh100", "batch=64,seq=8192", "zero1 full"): ("DEEPSPEED", None, None, None, None),
    ("llama3-8b", "8xh100", "batch=64,seq=8192", "dp8"): ("MULTI_GPU", None, None, None, None),
    ("llama3-8b", "8xh100", "batch=64,seq=8192", "tp8 nosp"): ("MULTI_GPU", 1, 1, 8, 1),
    ("llama3-8b", "1xh200", "batch=64,seq=2048", "full"): ("NO", None, None, None, None),
    ("mixtral-8x7b", "16xh100", "batch=64,seq=4096", "fsdp full"): ("FSDP", 1, 16, 1, 1),
}
AXES = ("dp_replicate", "dp_shard", "tp", "cp")


def cases():
    return [pytest.param(*question, id=" ".join(question[::3])) for question in CASES]


def read(*question):
    return yaml.safe_load(ask("accelerate", *question).text)


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_every_key_is_one_of_the_named_version(model, on, train, words):
    keys, table = target("accelerate").keys, read(model, on, train, words)
    assert set(table) <= set(keys["ClusterConfig"])
    for name, section in table.items():
        if isinstance(section, dict):
            assert set(section) <= set(keys[name]), name


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_the_degrees_read_back_are_those_of_the_plan(model, on, train, words):
    table = read(model, on, train, words)
    sizes = table.get("parallelism_config", {})
    degrees = [sizes.get(f"parallelism_config_{axis}_size") for axis in AXES]
    assert (table["distributed_type"], *degrees) == CASES[model, on, train, words]


def test_zero2_keeps_what_it_gathered_and_fsdp_gathers_again():
    on, train = "8xh100", "batch=64,seq=8192"
    for words, again in (("zero2", False), ("fsdp", True)):
        assert read("llama3-8b", on, train, words)["fsdp_config"]["fsdp_reshard_after_forward"] is again


def test_the_header_and_the_module_name_the_version():
    import meshwright.export.accelerate as exporter

    version = target("accelerate").version
    assert f"Accelerate {version}" in exporter.__doc__
    text = ask("accelerate", "llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp").text
    assert text.startswith(f"# Configuration for Accelerate {version}, written by Meshwright.\n")


def test_what_the_script_has_to_do_is_said():
    notes = ask("accelerate", "llama3-8b", "16xh100", "batch=512,seq=8192", "fsdp mb2").notes
    # 512 sequences over 16 ranks, two at a time
    assert "in the script: Accelerator(gradient_accumulation_steps=16)" in notes
    assert "fill in <MAIN_PROCESS_IP>: the address of the first node" in notes


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_accelerate_itself_reads_the_file(model, on, train, words, tmp_path, monkeypatch):
    config = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    launch = pytest.importorskip("accelerate.commands.launch")
    environment = pytest.importorskip("accelerate.utils.launch")
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    file = tmp_path / "accelerate.yaml"
    file.write_text(ask("accelerate", model, on, train, words).text)
    kind, *degrees = CASES[model, on, train, words]
    assert config.load_config_from_file(str(file)).distributed_type.value == kind
    meeting = re.findall("(--rdzv_backend) (c10d)", ask("accelerate", model, on, train, words).files["run.sh"])
    said = ["--config_file", str(file), *(meeting[0] if meeting else ()), "train.py"]
    args, _, says_precision = launch._validate_launch_command(launch.launch_command_parser().parse_args(said))
    assert (args.use_fsdp, args.multi_gpu) == (kind == "FSDP", kind == "MULTI_GPU")
    # DeepSpeed's own file says the precision, and Accelerate refuses to hear of it twice
    assert bool(args.use_deepspeed) is (kind == "DEEPSPEED") is not says_precision
    if args.num_machines > 1:  # torchrun gets no rank of a node: they agree on one at the first node's address
        args.main_process_ip, args.main_process_port = "n1", 29400
        environment.prepare_multi_gpu_env(args)
        assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "n1:29400")
    if args.use_parallelism_config:
        args.main_process_port = 0
        for name, text in environment.prepare_multi_gpu_env(args).items():
            monkeypatch.setenv(name, text)
        read_back = parallelism.ParallelismConfig()
        assert [read_back._sizes[axis] for axis in AXES] == degrees
        assert read_back.total_size == args.num_processes


def test_zero1_is_deepspeeds_with_the_optimizer_left_to_the_script():
    exported = ask("accelerate", "llama3-8b", "16xh100", "batch=512,seq=8192", "zero1 full")
    assert list(exported.files) == ["accelerate.yaml", "ds_config.json", "run.sh"]
    said = json.loads(exported.files["ds_config.json"])
    # 512 sequences over 16 ranks
    assert (said["zero_optimization"]["stage"], said["gradient_accumulation_steps"]) == (1, 32)
    assert "optimizer" not in said
    assert set(said) <= set(target("deepspeed").keys["top"])
