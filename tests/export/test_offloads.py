"""State off the device: DeepSpeed's keys where it has them, and a refusal with the nearest plan everywhere else."""

import json

import pytest

from meshwright.errors import MeshwrightError
from meshwright.export.target import load as target
from tests.export.questions import ask

QUESTION = "llama3-8b", "8xa100", "batch=64,seq=4096"


def test_deepspeed_keeps_optimizer_and_parameters_where_the_plan_says():
    table = json.loads(ask("deepspeed", *QUESTION, "dp8 fsdp full offload=params+optimizer:nvme@0.5").text)
    zero, keys = table["zero_optimization"], target("deepspeed").keys
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "<NVME_PATH>", "ratio": 0.5}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    for name in ("offload_optimizer", "offload_param"):
        assert set(zero[name]) <= set(keys[f"zero_optimization.{name}"])


@pytest.mark.parametrize(
    ("to", "words", "said"),
    [
        ("megatron", "dp8 zero1 full offload=optimizer", "offload=optimizer"),
        ("torchtitan", "dp8 fsdp full offload=optimizer", "offload=optimizer"),
        ("accelerate", "dp8 fsdp full offload=activations", "offload=activations"),
        ("torch-ddp", "dp8 full offload=optimizer", "offload=optimizer"),
        ("deepspeed", "dp8 fsdp full offload=optimizer+activations", "activations are moved by"),
        ("deepspeed", "dp8 zero2 full offload=optimizer:nvme", "stage 3"),
        ("deepspeed", "dp8 fsdp full tiles=4", "tiles=4"),
    ],
)
def test_what_a_target_cannot_keep_off_the_device_is_refused(to, words, said):
    with pytest.raises(MeshwrightError) as caught:
        ask(to, *QUESTION, words)
    assert {d.code for d in caught.value.diagnostics} == {"E001"}
    assert any(said in d.message for d in caught.value.diagnostics)
