"""DeepSpeed's JSON: its keys, its batch, and DeepSpeed's own reader where it is installed."""

import json

import pytest

from meshwright.errors import Infeasible
from meshwright.export import target
from tests.export.questions import ask

#: model, cluster, workload, plan -> ZeRO stage, accumulation steps, tp, ep, gradients.
CASES = {
    ("llama3-8b", "16xh100", "batch=512,seq=8192", "fsdp full"): (3, 32, 0, 1, "fp32"),
    ("mixtral-8x7b", "16xh100", "batch=512,seq=8192", "ep8 zero2 full mb2"): (2, 16, 0, 8, "fp32"),
    ("llama3-8b", "16xh100", "batch=512,seq=8192", "cp4 ulysses zero1"): (1, 128, 0, 1, "fp32"),
    ("llama3-8b", "16xh100", "batch=512,seq=8192", "tp2 nosp zero1 overlap=dp,tp"): (1, 64, 2, 1, "fp32"),
    ("llama3-8b", "16xh100", "batch=512,seq=8192", "dp16 grads=bf16 overlap=none"): (0, 32, 0, 1, "bf16"),
    ("llama3-8b", "16xh100", "batch=512,seq=8192", "zero2 grads=bf16 master=bf16 moments=bf16"): (2, 32, 0, 1, "bf16"),
    ("llama3-8b", "16xh100", "batch=512,seq=8192,optimizer=momentum", "zero2 fp16"): (2, 32, 0, 1, "fp32"),
}


def cases():
    return [pytest.param(*question, id=" ".join(question[::3])) for question in CASES]


def read(*question):
    return json.loads(ask("deepspeed", *question).text)


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_every_key_is_one_of_the_named_version(model, on, train, words):
    keys, table = target("deepspeed").keys, read(model, on, train, words)
    assert set(table) <= set(keys["top"])
    for name, section in table.items():
        if isinstance(section, dict):
            assert set(section) <= set(keys[name]), name
    assert set(table["optimizer"]["params"]) <= set(keys["optimizer.params"])


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_batch_and_degrees_read_back_are_those_of_the_plan(model, on, train, words):
    table, (stage, steps, tp, ep, grads) = read(model, on, train, words), CASES[model, on, train, words]
    assert table["zero_optimization"]["stage"] == stage
    assert table["gradient_accumulation_steps"] == steps
    assert table.get("tensor_parallel", {}).get("autotp_size", 0) == tp
    assert table.get("expert_parallel", {}).get("autoep_size", 1) == ep
    assert table["data_types"]["grad_accum_dtype"] == grads
    if tp == 0:
        ranks = table.get("data_parallel_size", 16)
        assert table["train_batch_size"] == table["train_micro_batch_size_per_gpu"] * steps * ranks == 512


def test_ulysses_is_a_mesh_of_data_and_sequence():
    table = read("llama3-8b", "16xh100", "batch=512,seq=8192", "cp4 ulysses zero1")
    assert (table["data_parallel_size"], table["sequence_parallel_size"]) == (4, 4)


def test_the_notes_and_the_module_name_the_version():
    import meshwright.export.deepspeed as exporter

    version = target("deepspeed").version
    assert f"DeepSpeed {version}" in exporter.__doc__
    exported = ask("deepspeed", "llama3-8b", "8xh100", "batch=64,seq=8192", "fsdp full")
    assert exported.notes[0].startswith(f"written for DeepSpeed {version}: llama3-8b on 8xh100")
    assert "in the script: model.gradient_checkpointing_enable()" in exported.notes


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_deepspeed_itself_reads_the_file(model, on, train, words, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    table, (stage, steps, tp, ep, grads) = read(model, on, train, words), CASES[model, on, train, words]
    # it checks the batch against the ranks of the job, and this is a job of one
    table.pop("train_batch_size", None)
    found = config.DeepSpeedConfig(table)
    assert (found.zero_optimization_stage, found.gradient_accumulation_steps) == (stage, steps)
    assert (found.tensor_parallel_config.autotp_size, found.expert_parallel_config.autoep_size) == (tp, ep)
    assert found.grad_accum_dtype == grads


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_gradients_in_16_bits_are_a_key_and_other_policies_a_gap(policy):
    question = ("llama3-8b", "16xh100", "batch=512,seq=8192")
    words = f"dp16 grads=bf16 overlap=none sync={policy}"
    assert read(*question, words)["communication_data_type"] == policy
    assert set(read(*question, words)) <= set(target("deepspeed").keys["top"])
    assert "communication_data_type" not in read(*question, "dp16 grads=bf16 overlap=none")
    with pytest.raises(Infeasible, match="1-bit Adam and LAMB send the signs of momenta"):
        read(*question, "dp16 grads=bf16 overlap=none sync=powersgd")


def test_eight_bit_weights_with_four_bit_gradients_are_zero_plus_plus():
    question = ("llama3-8b", "16xh100", "batch=512,seq=8192")
    zero = read(*question, "fsdp full sync=qsdp:grads=4")["zero_optimization"]
    assert zero["stage"] == 3 and zero["zero_quantized_weights"] is zero["zero_quantized_gradients"] is True
    assert zero["zero_hpz_partition_size"] == 1  # no second copy of the weights on a node
    assert read(*question, "fsdp hpz8 full sync=qsdp:grads=4,near=8")["zero_optimization"] == zero | {
        "zero_hpz_partition_size": 8
    }
    assert read(*question, "fsdp hpz8 full")["zero_optimization"]["zero_hpz_partition_size"] == 8
    with pytest.raises(Infeasible, match="among the ranks of a node first"):
        read(*question, "fsdp full sync=qsdp:grads=4,near=4")
    assert set(zero) <= set(target("deepspeed").keys["zero_optimization"])
    assert "zero_quantized_weights" not in read(*question, "fsdp full")["zero_optimization"]
    with pytest.raises(Infeasible, match="between several nodes alone"):
        read("llama3-8b", "8xh100", "batch=512,seq=8192", "fsdp full sync=qsdp:grads=4")
