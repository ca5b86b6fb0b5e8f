"""Megatron-LM's flags: their names, their degrees, and Megatron-Core's own records where it is installed."""

import os
import re
import shlex
import shutil
import subprocess

import msgspec
import pytest
from hypothesis import assume, given, settings

from meshwright.export import ExportRequest, export, megatron, megatron_model, target
from meshwright.export.megatron import stage_layout
from meshwright.export.megatron_model import pattern
from meshwright.export.nearest_plan import mended
from meshwright.spec.model import load
from tests.export import megatron_arguments
from tests.export.questions import ask, legal, listed

#: model, cluster, workload, plan -> tp, pp, chunks a rank, cp, ep, etp, replicas of the optimizer's shards.
CASES = {
    ("llama3-8b", "8xh100", "batch=64,seq=8192", "zero1"): (1, 1, 1, 1, None, None, 1),
    ("gpt3-175b", "1024xa100-80", "batch=1536,seq=2048", "tp8 pp8 zero1 selective overlap=dp"): (
        8, 8, 1, 1, None, None, 1,
    ),
    ("llama3-405b", "16384xh100", "batch=2048,seq=8192,tokens=15t", "tp8 pp16 vpp7 zero1 shard64 full"): (
        8, 16, 7, 1, None, None, 2,
    ),
    ("llama3-70b", "64xh100", "batch=512,seq=8192", "tp8 pp4 zero1 overlap=dp stages=19,20,20,21"): (
        8, 4, 1, 1, None, None, 1,
    ),
    ("deepseek-v3", "256xh100", "batch=2048,seq=4096", "pp8 ep32 zero1 vpp4 interleaved etp1 full"): (
        1, 8, 4, 1, 32, 1, 1,
    ),
    ("mixtral-8x7b", "64xh100", "batch=256,seq=4096", "tp2 pp4 ep8 etp1 zero1 overlap=dp"): (2, 4, 1, 1, 8, 1, 1),
    ("qwen3-30b-a3b", "64xh100", "batch=256,seq=4096", "fsdp ep8 moments=bf16 full recompute_layers=2"): (
        1, 1, 1, 1, 8, 1, 1,
    ),
    ("llama3-70b", "64xh100", "batch=64,seq=32768", "tp8 cp4 ring zero1 overlap=dp,tp"): (8, 1, 1, 4, None, None, 1),
    ("mistral-7b", "8xh100", "batch=256,seq=4096", "tp8 dp1 nosp"): (8, 1, 1, 1, None, None, 1),
    ("llama3-8b", "8xh100", "batch=64,seq=4096", "tp8 dp1 loss=fused"): (8, 1, 1, 1, None, None, 1),
    ("gpt-oss-20b", "8xh100", "batch=64,seq=4096", "ep8 zero1"): (1, 1, 1, 1, 8, 1, 1),
    ("mixtral-8x7b", "64xh100", "batch=256,seq=4096", "pp4 vpp8 ep8 zero1 overlap=dp,pp,ep"): (1, 4, 8, 1, 8, 1, 1),
}  # fmt: skip


def cases():
    return [pytest.param(*question, id=" ".join(question[::3])) for question in CASES]


def flags(text):
    """Flag -> value of every array of the script, as bash would split it."""
    arrays = re.findall(r"^[A-Z]+=\(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    words = [shlex.split(line, comments=True) for line in "".join(arrays).splitlines()]
    assert all(len(line) <= 2 for line in words)
    return {line[0]: line[1] if len(line) == 2 else True for line in words}


def read(*question):
    return flags(ask("megatron", *question).text)


def test_one_kernel_for_the_loss_is_transformer_engines():
    question = "llama3-8b", "8xh100", "batch=64,seq=4096"
    fused = read(*question, "tp8 dp1 loss=fused")
    assert fused["--cross-entropy-loss-fusion"] is True
    assert fused["--cross-entropy-fusion-impl"] == "te"
    for words in ("tp8 dp1", "tp8 dp1 loss=in-place"):
        assert not [flag for flag in read(*question, words) if "cross-entropy" in flag]


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_every_flag_is_one_of_the_named_version(model, on, train, words):
    known = {flag for group in target("megatron").keys.values() for flag in group}
    assert set(read(model, on, train, words)) <= known


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_the_degrees_read_back_are_those_of_the_plan(model, on, train, words):
    found = read(model, on, train, words)
    layout = found.get("--pipeline-model-parallel-layout")
    pp = int(found["--pipeline-model-parallel-size"])
    chunks = (layout.count("|") + 1) // pp if layout else int(found.get("--num-virtual-stages-per-pipeline-rank", 1))
    experts = [found.get(f"--expert-{kind}-parallel-size") for kind in ("model", "tensor")]
    assert (
        int(found["--tensor-model-parallel-size"]),
        pp,
        chunks,
        int(found["--context-parallel-size"]),
        *(size and int(size) for size in experts),
        int(found.get("--num-distributed-optimizer-instances", 1)),
    ) == CASES[model, on, train, words]


def test_the_header_and_the_module_name_the_version():
    import meshwright.export.megatron as exporter

    version = target("megatron").version
    assert f"Megatron-Core {version}" in exporter.__doc__
    text = ask("megatron", "llama3-8b", "8xh100", "batch=64,seq=8192", "zero1").text
    assert text.startswith(f"#!/bin/bash\n# Flags for Megatron-Core {version} (Megatron-LM), written by Meshwright.\n")


def test_what_a_plan_does_not_say_is_asked_of_the_environment():
    exported = ask("megatron", "llama3-8b", "16xh100", "batch=64,seq=8192", "zero1")
    wanted = re.findall(r'^: "\$\{(\w+):\?', exported.text, re.MULTILINE)
    assert wanted == ["MEGATRON_LM", "DATA_PATH", "TOKENIZER_MODEL", "LR", "TRAIN_ITERS", "HEAD_NODE"]
    assert all(any(note.startswith(f"fill in {name}") for note in exported.notes) for name in wanted)
    with_tokens = flags(ask("megatron", "llama3-8b", "8xh100", "batch=64,seq=8192,tokens=1b", "zero1").text)
    # 1e9 tokens in steps of 64 * 8192: 1907.3
    assert with_tokens["--train-iters"] == "1908"


@pytest.mark.parametrize(
    ("stages", "layout"), [((19, 20, 20, 21), "Et*19|t*20|t*20|t*21L"), ((1, 2, 2, 1), "Et|t*2|t*2|tL")]
)
def test_uneven_stages_are_a_layout(stages, layout):
    assert stage_layout(stages) == layout


def test_dense_first_layers_are_a_pattern_that_python_evaluates():
    text = pattern([0] * 3 + [1] * 58)
    assert text == "([0]*3+[1]*58)"
    assert listed(text) == [0] * 3 + [1] * 58
    found = read("deepseek-v3", "256xh100", "batch=2048,seq=4096", "ep32 zero1 etp1")
    assert found["--moe-layer-freq"] == text


def test_gpt3_and_llama_differ_in_the_flags_that_their_papers_differ_in():
    gpt = read("gpt3-175b", "8xa100-80", "batch=64,seq=2048", "tp8")
    llama = read("llama3-8b", "8xa100-80", "batch=64,seq=2048", "tp8")
    assert (gpt["--position-embedding-type"], llama["--position-embedding-type"]) == ("learned_absolute", "rope")
    assert (gpt["--normalization"], llama["--normalization"]) == ("LayerNorm", "RMSNorm")
    for flag in ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--num-query-groups"):
        assert (flag in gpt, flag in llama) == (False, True), flag


def test_stages_may_lie_inside_replicas():
    found = read("llama3-8b", "16xh100", "batch=64,seq=2048", "tp2 pp2 zero1 overlap=dp order=tp-cp-pp-dp")
    assert found["--use-tp-pp-dp-mapping"] is True


def test_one_hardware_queue_is_asked_for_beside_tensor_parallelism_only():
    line = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert line in ask("megatron", "llama3-8b", "8xh100", "batch=64,seq=2048", "tp8").text
    assert line not in ask("megatron", "llama3-8b", "8xh100", "batch=64,seq=2048", "zero1").text


def test_embedding_rows_that_do_not_divide_are_padded_and_said():
    vocab = load("gpt2").vocab
    exported = ask("megatron", "gpt2", "8xa100-80", "batch=64,seq=1024", "tp4 dp2")
    padded = int(flags(exported.text)["--padded-vocab-size"])
    assert padded % 4 == 0 and 0 < padded - vocab < 4
    assert any(f"padded to {padded}" in note for note in exported.notes)


#: Flags whose field in Megatron-Core's configuration has another name.
FIELDS = {
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "swiglu": "gated_linear_unit",
}


def value(text):
    if text is True or not re.fullmatch(r"-?[\d.,]+|\(.*\)", text):
        return text
    if text.isdecimal():
        return int(text)
    if text.startswith("("):
        return listed(text)
    return tuple(map(int, text.split(","))) if "," in text else float(text)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_megatron_core_itself_takes_the_configuration(model, on, train, words):
    core = pytest.importorskip("megatron.core.transformer", reason="megatron-core is not installed")
    torch = pytest.importorskip("torch")
    found = read(model, on, train, words)
    kind = core.MLATransformerConfig if "--multi-latent-attention" in found else core.TransformerConfig
    given = {FIELDS.get(name := flag[2:].replace("-", "_"), name): value(text) for flag, text in found.items()}
    given = {name: text for name, text in given.items() if name in kind.__dataclass_fields__}
    if "recompute_modules" in given:
        given["recompute_modules"] = [given["recompute_modules"]]
    given.pop("attention_backend")
    config = kind(**given, add_bias_linear="--disable-bias-linear" not in found, pipeline_dtype=torch.bfloat16)
    tp, pp, chunks, cp, ep, etp, _ = CASES[model, on, train, words]
    assert config.tensor_model_parallel_size == tp and config.pipeline_model_parallel_size == pp
    assert (config.virtual_pipeline_model_parallel_size or 1) == chunks and config.context_parallel_size == cp
    if ep:
        assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (ep, etp)


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is bash's to read")
@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_bash_starts_torchrun_with_the_flags(model, on, train, words, tmp_path):
    script, torchrun = tmp_path / "pretrain.sh", tmp_path / "torchrun"
    script.write_text(ask("megatron", model, on, train, words).text)
    torchrun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    names = ("MEGATRON_LM", "DATA_PATH", "TOKENIZER_MODEL", "LR", "TRAIN_ITERS", "HEAD_NODE")
    wanted = {name: f"my {name.lower()}" for name in names}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **wanted}
    done = subprocess.run(["bash", script, "--mock-data"], env=environment, capture_output=True, text=True, check=True)
    arguments = done.stdout.splitlines()
    assert arguments[-1] == "--mock-data"
    assert arguments[arguments.index("--data-path") + 1] == "my data_path"
    for flag, said in flags(script.read_text()).items():
        after = arguments[arguments.index(flag) + 1]
        assert said is True or after == (wanted[said[1:]] if said.startswith("$") else said)
    assert subprocess.run(["bash", script], env={"PATH": environment["PATH"]}, capture_output=True).returncode != 0


@pytest.mark.parametrize(("model", "on", "train", "words"), cases())
def test_the_command_line_is_one_that_megatron_lm_takes(model, on, train, words):
    args = megatron_arguments.accepted(ask("megatron", model, on, train, words).text)
    tp, pp, _, cp, ep, etp, _ = CASES[model, on, train, words]
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    assert sizes == (tp, pp, cp)
    assert (args.expert_model_parallel_size, args.expert_tensor_parallel_size) == (ep, etp)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("--bf16", "--bfloat16", "unrecognized"),
        ("--optimizer adam", "--optimizer adamw", "invalid choice"),
        ("--seq-length 8192", "--seq-length 8k", "invalid int"),
        ("--overlap-grad-reduce", "", "gathers overlap where reductions do"),
        ("--use-distributed-optimizer", "", "a sharded optimizer"),
        ("--global-batch-size 64", "--global-batch-size 63", "the batch divides"),
    ],
)
def test_what_megatron_lm_would_stop_with_is_found(old, new, why):
    text = ask("megatron", "llama3-8b", "8xh100", "batch=64,seq=8192", "zero1").text
    assert old in text
    with pytest.raises(megatron_arguments.Refused, match=why):
        megatron_arguments.accepted(text.replace(old, new))


def test_the_record_has_every_flag_that_a_script_may_have():
    flags = {flag for group in target("megatron").keys.values() for flag in group}
    assert flags <= set(megatron_arguments.parser()._option_string_actions)


@given(question=legal())
@settings(max_examples=30)
def test_the_nearest_of_any_plan_is_one_that_megatron_lm_takes(question):
    asked, where, train, plan = question
    train = msgspec.structs.replace(train, optimizer="adam", dropout=False)
    request = ExportRequest(model=asked, cluster=where, train=train, plan=plan.on(where.num_devices))
    nearest = mended(request, megatron.limits)
    assume(nearest is not None and not list(megatron_model.limits(request)))
    exported = export("megatron", asked, where, train, nearest, framework=None)
    args = megatron_arguments.accepted(exported.text)
    assert args.tensor_model_parallel_size * args.pipeline_model_parallel_size <= where.num_devices


def test_gpt_oss_has_its_own_gate_biases_and_kernel():
    """gpt-oss (2508.10925): x sigmoid(1.702 x) gates the other half plus 1, clamped at 7; sinks; biases everywhere."""
    found = read("gpt-oss-20b", "8xh100", "batch=64,seq=4096", "ep8 zero1")
    assert (found["--activation-func-clamp-value"], found["--glu-linear-offset"]) == ("7.0", "1.0")
    assert found["--attention-backend"] == "auto" and found["--softmax-type"] == "learnable"
    assert not {"--swiglu", "--disable-bias-linear", "--moe-router-enable-expert-bias"} & set(found)
