"""Launch scripts of servers, run by bash with servers and Slurm replaced by programs that print what they are given."""

import os
import re
import shutil
import subprocess

import pytest

from tests.export.test_serving import ask

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are bash's to read")

PRINT = '#!/bin/bash\nsleep 0.1; echo "[${CUDA_VISIBLE_DEVICES:-all}] $(basename "$0") $*"; sleep 0.3\n'


def started(folder, exported, **environment):
    """Sorted lines that the servers print, and stderr."""
    for name, text in exported.files.items():
        (folder / name).write_text(text)
    bin = folder / "bin"
    bin.mkdir(exist_ok=True)
    srun = 'while [[ $1 == --* ]]; do shift; done\nfor n in 0 1; do SLURM_STEP_ID=0 SLURM_NODEID=$n "$@"; done\n'
    for name, text in {
        **dict.fromkeys(("vllm", "python3", "trtllm-serve"), PRINT),
        "srun": f"#!/bin/bash\n{srun}",
        "scontrol": '#!/bin/bash\n[[ "$*" == "show hostnames n[1-2]" ]] && printf "n1\\nn2\\n"\n',
    }.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    said = {"PATH": f"{bin}:{os.environ['PATH']}", **environment}
    done = subprocess.run(["bash", str(folder / "run.sh"), "--more"], env=said, capture_output=True, text=True, cwd="/")
    return sorted(done.stdout.splitlines()), done.stderr


def test_the_model_is_asked_for_before_anything_starts(tmp_path):
    out, err = started(tmp_path, ask("vllm", "llama3-8b", "1xh100", "tp1", ""))
    assert out == [] and "MODEL" in err


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm"])
def test_every_replica_has_devices_and_a_port_of_its_own(target, tmp_path):
    exported = ask(target, "llama3-8b", "4xh100", "tp2", "routing=power-of-two")
    out, err = started(tmp_path, exported, MODEL="my model")
    assert err == "" and [line.split("]")[0] for line in out] == ["[0,1", "[2,3"]
    assert [re.search(r"--port (\d+) --more", line)[1] for line in out] == ["8000", "8001"]
    assert all("my model" in line and f"--config {target}.yaml" in line for line in out)
    conf = exported.files["nginx.conf"]
    assert "random two least_conn;" in conf
    assert re.findall(r"server (\S+);", conf) == ["127.0.0.1:8000", "127.0.0.1:8001"]


def test_slurm_starts_the_replicas_of_every_node(tmp_path):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/", "SLURM_JOB_NODELIST": "n[1-2]"}
    out, err = started(tmp_path, ask("vllm", "llama3-8b", "16xh100", "tp4", ""), MODEL="m", **slurm)
    assert err == ""
    # two nodes of eight devices, two replicas of four on each
    assert [line.split("]")[0] for line in out] == ["[0,1,2,3", "[0,1,2,3", "[4,5,6,7", "[4,5,6,7"]


def test_the_nodes_of_a_replica_meet_at_its_first(tmp_path):
    exported = ask("vllm", "llama3-8b", "16xh100", "tp8 pp2", "")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/", "SLURM_JOB_NODELIST": "n[1-2]"}
    out, err = started(tmp_path, exported, MODEL="m", **slurm)
    assert err == "" and len(out) == 2
    assert all("--nnodes 2" in line and "--master-addr n1" in line for line in out)
    assert ["--headless" in line for line in out] == [False, True]
    assert ["--node-rank 1" in line for line in out] == [False, True]
    out, err = started(tmp_path, ask("sglang", "llama3-8b", "16xh100", "tp8 pp2", ""), MODEL="m", NODE_RANK="1")
    assert out == [] and "HEAD_NODE" in err
    node = {"NODE_RANK": "1", "HEAD_NODE": "here"}
    out, err = started(tmp_path, ask("sglang", "llama3-8b", "16xh100", "tp8 pp2", ""), MODEL="m", **node)
    assert err == "" and "--node-rank 1 --dist-init-addr here:29500" in out[0]
