"""Launch scripts, run by bash with the launcher and Slurm replaced by programs that print what they are given."""

import os
import shutil
import subprocess

import msgspec
import pytest

from meshwright.export import ExportRequest, export, launch
from meshwright.spec import model
from tests.export.questions import ask

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are bash's to read")

TWO_NODES = ("llama3-8b", "16xh100", "batch=64,seq=8192", "fsdp")
#: Target -> what starts on each node, in words of the launcher.
STARTED = {
    "torchtitan": "-m torchtitan.train --module meshwright_config --config planned",
    "torchtitan-toml": "-m torchtitan.train --job.config_file meshwright.toml",
    "megatron": "my megatron_lm/pretrain_gpt.py",
    "deepspeed": "my script --deepspeed_config ds_config.json",
    "accelerate": "accelerate.yaml --rdzv_backend c10d --main_process_ip n1 --main_process_port 29400 my script",
}
WANTED = ("MEGATRON_LM", "DATA_PATH", "TOKENIZER_MODEL", "LR", "TRAIN_ITERS", "SCRIPT")
PRINT = '#!/bin/bash\necho "$(basename "$0") $* PYTHONPATH=${PYTHONPATH:-}"\n'


def started(folder, exported, **environment):
    """stdout, stderr of the launch script started in another folder than its own."""
    for name, text in exported.files.items():
        (folder / name).write_text(text)
    bin = folder / "bin"
    bin.mkdir(exist_ok=True)
    for name, text in {
        "torchrun": PRINT,
        "accelerate": PRINT,
        "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_STEP_ID=0 "$@"\nSLURM_STEP_ID=0 "$@"\n',
        "scontrol": '#!/bin/bash\n[[ "$*" == "show hostnames n[1-2]" ]] && printf "n1\\nn2\\n"\n',
    }.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    script = launch.FILE if launch.FILE in exported.files else next(iter(exported.files))
    said = {"PATH": f"{bin}:{os.environ['PATH']}", **environment}
    done = subprocess.run(["bash", str(folder / script), "--more"], env=said, capture_output=True, text=True, cwd="/")
    return done.stdout, done.stderr


@pytest.mark.parametrize("target", STARTED)
def test_by_hand_a_node_joins_the_one_that_the_environment_names(target, tmp_path):
    filled = {name: f"my {name.lower()}" for name in WANTED}
    out, err = started(tmp_path, ask(target, *TWO_NODES), HEAD_NODE="n1:29400", **filled)
    assert err == ""
    (line,) = out.splitlines()
    assert STARTED[target] in line and "--more" in line
    if target != "accelerate":
        assert "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=n1:29400" in line
    if target == "torchtitan":
        assert f"PYTHONPATH={tmp_path}" in line


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "accelerate"])
def test_slurm_starts_it_once_a_node_and_says_where_they_meet(target, tmp_path):
    filled = dict.fromkeys(WANTED, "x")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path)}
    out, err = started(tmp_path, ask(target, *TWO_NODES), **slurm, **filled)
    assert err == ""
    assert len(out.splitlines()) == 2  # the stand-in for srun starts it twice, as on two nodes
    where = "--main_process_ip n1 --main_process_port 29500" if target == "accelerate" else "n1:29500"
    assert all(where in line for line in out.splitlines())


def test_what_slurm_is_asked_for_is_the_nodes_and_devices_of_the_plan():
    lines = ask("megatron", *TWO_NODES[:3], "zero1").text.splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert asked == [
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive",
    ]
    assert lines.index(asked[-1]) < lines.index("set -euo pipefail")  # Slurm stops reading at the first command


@pytest.mark.parametrize("target", STARTED)
def test_what_is_missing_is_said_before_anything_starts(target, tmp_path):
    out, err = started(tmp_path, ask(target, *TWO_NODES))
    assert out == ""
    assert any(f"{name}: " in err for name in (*WANTED, "HEAD_NODE"))


def test_one_node_needs_no_place_to_meet(tmp_path):
    out, err = started(
        tmp_path, ask("deepspeed", "llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp"), SCRIPT="train.py"
    )
    assert (err, "rdzv" in out) == ("", False)
    assert out.startswith("torchrun --nnodes=1 --nproc-per-node=8 train.py --deepspeed_config ds_config.json --more")


@pytest.mark.parametrize("target", STARTED)
def test_a_model_of_any_name_stays_in_the_comment(target, tmp_path):
    evil = msgspec.structs.replace(model.load("llama3-8b"), name='x"""\nimport os\n$(touch hit)`touch hit`\\')
    from meshwright.plan import parse
    from meshwright.spec import cluster, workload

    where, train = cluster.load("8xh100"), workload.parse("batch=64,seq=8192")
    exported = export(target, evil, where, train, parse("fsdp"))
    name = ExportRequest(model=evil, cluster=where, train=train, plan=parse("fsdp").on(8)).name
    assert name.isprintable() and '"' not in name
    for text in exported.files.values():
        assert "\nimport os\n" not in text
        assert all(line.lstrip().startswith(("#", "x", '"')) for line in text.splitlines() if "touch hit" in line)
