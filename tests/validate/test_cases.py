"""A row becomes a question: what its words mean, and what a default fills is marked."""

import pytest

from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.spec.layers import Moe
from meshwright.validate.cases import case, network_gb_s
from meshwright.validate.measured import ANSWERS
from meshwright.validate.steps import answers
from tests.validate.samples import step


@pytest.mark.parametrize(
    ("text", "gb_s"),
    [
        ("Selene: 8x200 Gb/s HDR InfiniBand per node, NVLink3 NVSwitch in node", 200.0),
        ("8 x 400 Gb/s NDR InfiniBand", 400.0),
        ("400 Gb/s per GPU", 400.0),
        ("NVLink only", None),
        ("", None),
    ],
)
def test_the_nodes_bandwidth_is_read_from_a_description(text, gb_s):
    assert network_gb_s(text, 8) == gb_s


def test_a_complete_row_assumes_nothing():
    assert case(step()).assumed == ()


@pytest.mark.parametrize(
    ("column", "value", "assumed"),
    [
        ("vocab", "", "vocab"),
        ("micro_batch_seqs", "", "microbatch"),
        ("recompute", "", "recompute"),
        ("recompute", "unknown", "recompute"),
        ("attention_kernel", "", "attention"),
    ],
)
def test_what_a_default_fills_is_marked(column, value, assumed):
    assert assumed in case(step(**{column: value})).assumed


@pytest.mark.parametrize("name", ["", "unknown (a script)", "somebody's trainer 3.1"])
def test_software_that_nobody_measured_is_answered_by_the_default(name):
    asked = case(step(framework=name))
    assert (asked.framework.name, asked.framework.flagged) == ("default", True)
    assert asked.assumed == ("framework", "state")


def test_software_that_nobody_named_on_a_device_of_one_compiler_is_that_compiler_s():
    assert case(step(framework="", hardware="tpu_v5p")).framework.name == "xla"


def test_unknown_software_lies_among_the_measured_profiles_and_not_at_their_best():
    """The default is the middle of stacks: some that were measured are faster, some slower, and the 80% interval is the
    spread of whole steps of stacks left out, exp(2 * 1.28 * 0.145) from end to end (1.45), give or take the draws."""
    names = ("unknown", "megatron-lm", "megatron-bridge-2026", "nanotron", "deepspeed")
    found = {name: next(answers([step(framework=name)], standard))[1] for name in names}
    unknown = found.pop("unknown")
    times = [one.step_s for one in found.values()]
    assert min(times) < unknown.step_s < max(times)
    assert unknown.high_s / unknown.low_s == pytest.approx(1.45, rel=0.1)


@pytest.mark.parametrize(("said", "kernel"), [("splash/flash", "flash"), ("cudnn_flash_te", "flash"), ("warp9", "")])
def test_an_attention_kernel_that_nobody_knows_is_assumed_and_not_read_as_the_fastest(said, kernel):
    asked = case(step(attention_kernel=said))
    assert ("attention" in asked.assumed) == (not kernel)
    assert asked.plan.memory.attention == (kernel or "flash")


@pytest.mark.parametrize(
    ("flags", "stored"), [("nf4_base", "nf4"), ("nf4_dq_base", "nf4-dq"), ("int8_gptq_base", "int8"), ("", "nf4")]
)
def test_a_quantised_base_is_adapters_over_what_its_flag_says(flags, stored):
    notes = "LoRA r=32 q,k,v,proj,mlp,head=true/false/true/false/true/false"
    asked = case(step(phase="qlora", flags=flags, notes=notes, tp=1, dp=8))
    assert asked.plan.precision.params == stored
    assert (asked.train.phase, asked.train.lora.rank) == ("lora", 32)
    assert asked.train.lora.targets == ("q", "v", "gate", "up", "down")


def test_a_row_that_ran_without_a_recorded_recompute_mode_fits_where_full_recompute_would():
    """60 GB of activations without recompute are not the job's that ran; as a mode that was recorded they are."""
    row = {"micro_batch_seqs": 16, "global_batch_seqs": 128, "seq_len": 8192}
    unrecorded, none = (next(answers([step(recompute=r, **row)], standard))[1] for r in ("unknown", "none"))
    assert (unrecorded.fits, none.fits) == (True, False)


def test_state_whose_precision_nobody_recorded_of_unknown_software_may_be_in_16_bits():
    """6 billion parameters on one device: 18 bytes of each are more than 80 GB, 8 are not. What a known framework keeps
    is known, and so is what a row says."""
    row = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 16384, "num_gpus": 1, "dp": 1, "recompute": "full"}
    row |= {"global_batch_seqs": 4, "micro_batch_seqs": 1, "tp": 1, "pp": 1, "optimizer_state_bytes_per_param": ""}
    rows = (row | {"framework": name} for name in ("unknown", "megatron-core"))
    assert [next(answers([step(**one)], standard))[1].fits for one in rows] == [True, False]
    said = row | {"framework": "unknown", "optimizer_state_bytes_per_param": 12}
    assert not next(answers([step(**said)], standard))[1].fits


def test_products_in_fp16_that_nobody_dates_are_of_the_time_before_fused_attention():
    assert case(step(dtype="fp16", attention_kernel="")).plan.memory.attention == "unfused"
    assert case(step(dtype="fp16", attention_kernel="flash")).plan.memory.attention == "flash"


def test_adapters_drop_inputs_where_the_framework_does():
    rates = {name: case(step(phase="lora", framework=name)).train.lora.dropout for name in ("litgpt", "torchtune")}
    assert rates == {"litgpt": 0.05, "torchtune": 0.0}


def test_the_catalogs_model_is_taken_only_when_its_dimensions_are_the_rows():
    dims = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "gated_mlp": True}
    named = case(step(model="llama3-8b", **dims)).model
    assert named.num_params == 8_030_261_248  # the published count of Llama 3 8B
    assert case(step(model="llama3-8b", **(dims | {"layers": 16}))).model.num_layers == 16


def test_dimensions_make_a_model_that_no_catalog_has():
    # 24 layers of 12 h^2 and a tied embedding of 51200 h: 1.3 billion
    assert case(step()).model.num_params == pytest.approx(24 * 12 * 2048**2 + 51200 * 2048, rel=0.1)


@pytest.mark.parametrize(
    ("framework", "flags", "etp"),
    [
        ("megatron-core", "", 2),
        ("megatron-core", "tiny_model;etp1", 1),
        ("megatron-bridge", "", 1),
        ("nemo", "etp2", 2),
    ],
)
def test_experts_are_split_as_a_flag_says_or_the_framework_does(framework, flags, etp):
    asked = case(step(experts=8, top_k=2, moe_ffn=8192, ep=2, tp=2, dp=4, framework=framework, flags=flags))
    assert asked.plan.etp == etp


def test_experts_make_layers_of_experts():
    model = case(step(experts=8, top_k=2, moe_ffn=8192, ep=4, tp=1, dp=8)).model
    assert isinstance(model.blocks[-1].mlp, Moe)


def test_the_plan_is_the_rows():
    layout = case(step(tp=2, pp=2, dp=2, zero_stage=1)).plan.layout
    assert (layout.tp, layout.pp, layout.dp, layout.zero) == (2, 2, 2, 1)


def test_a_device_the_catalog_does_not_know_is_refused():
    with pytest.raises(MeshwrightError):
        case(step(hardware="abacus"))


@pytest.mark.parametrize("notes", ["hybrid layers", "Mamba blocks"])
def test_layers_of_several_kinds_whose_sizes_nobody_says_are_refused(notes):
    with pytest.raises(MeshwrightError, match="several kinds are not modelled"):
        case(step(notes=notes))


HYBRID = {
    "layers": 52,
    "hidden": 2688,
    "heads": 32,
    "kv_heads": 2,
    "vocab": 131072,
    "experts": 128,
    "top_k": 6,
    "moe_ffn": 1856,
    "ffn": "",
    "seq_len": 8192,
    "tp": 1,
    "dp": 8,
    "ep": 8,
    "notes": "hybrid Mamba2/attention/MoE: 23 M + 6 attn + 23 MoE layers",
}


def test_a_hybrid_s_row_is_asked_of_the_catalog_s_model_where_its_dimensions_are_the_row_s():
    model = case(step(model="nemotron3-nano-30b-a3b", **HYBRID)).model
    assert model.layers_by_kind == (23, 23, 6)
    with pytest.raises(MeshwrightError, match="several kinds are not modelled"):
        case(step(model="nemotron3-nano-30b-a3b", **HYBRID | {"hidden": 4096}))


def test_a_question_is_the_same_whatever_was_measured():
    plain = step(micro_batch_seqs="", recompute="unknown", vocab="")
    told = plain | {"step_time_s": "7", "peak_memory_gb": "1", "memory_kind": "reserved", "outcome": "oom"}
    assert case(plain | dict.fromkeys(ANSWERS, "")) == case(plain) == case(told)


def test_stages_are_cut_as_the_framework_cuts_them():
    """24 layers in two stages: nanotron's first has one more than its share."""
    cut = {"layers": 24, "tp": 1, "pp": 2, "dp": 4, "num_gpus": 8, "vpp": 1}
    assert case(step(framework="nanotron", **cut)).plan.layout.stages == (13, 11)
    assert case(step(framework="megatron-lm", **cut)).plan.layout.stages == ()
    assert case(step(framework="nanotron", **(cut | {"pp": 1, "dp": 8}))).plan.layout.stages == ()


EFA = "EFA 3200 Gb/s (400 GB/s) per node, NVLink4 in node"


def measured_job(gathered, **changed):
    notes = f"busbw GB/s in job: AR={2 * gathered} AG={gathered} RS={gathered} AR_intra=424"
    return step(**{"network": EFA, "framework": "nanotron", "notes": notes, "num_gpus": 64, "dp": 32} | changed)


def test_what_a_job_measured_on_its_network_describes_the_cluster():
    *_, outside = case(measured_job(50.0)).cluster.islands[0].levels
    assert outside.busbw_gb_s == {"all_reduce": 100.0, "all_gather": 50.0, "reduce_scatter": 50.0}
    *_, outside = case(step(network=EFA, num_gpus=64, dp=32)).cluster.islands[0].levels
    assert outside.busbw_gb_s == {}


@pytest.mark.parametrize(
    ("row", "profile"),
    [
        # 64 ranks: 4 MiB a step take 10.5 us at 400 GB/s; 150 GB/s are 28 us, 50 GB/s are 84
        (measured_job(150.0), "nanotron"),
        (measured_job(50.0), "nanotron-slow-steps"),
        # what was measured says more than when it ran
        (measured_job(150.0, flags="era_C"), "nanotron"),
        (measured_job(50.0, flags="era_A"), "nanotron-slow-steps"),
        # on one node no step leaves it
        (measured_job(20.0, num_gpus=8, dp=4), "nanotron"),
        # where nothing was measured, what most jobs of the time were
        (step(framework="nanotron", flags="era_A"), "nanotron"),
        (step(framework="nanotron", flags="era_C"), "nanotron-slow-steps"),
    ],
)
def test_a_frameworks_profile_is_that_of_the_network_its_job_measured(row, profile):
    assert case(row).framework.name == profile


def test_what_lies_in_the_hosts_memory_is_not_kept_on_the_device():
    """MaxText's policy saves the projections to queries, keys and values alone, and those on the host."""
    asked = case(step(recompute="selective", flags="qkv_proj_offloaded"))
    assert (asked.plan.memory.recompute, "recompute" in asked.assumed) == ("full", False)


@pytest.mark.parametrize(
    ("said", "vpp", "schedule", "chunks"),
    [
        ("1f1b", "", "1f1b", 1),
        ("interleaved_1f1b", "", "interleaved", 2),
        ("interleaved_1f1b", "3", "interleaved", 3),
        ("1f1b", "3", "interleaved", 3),
        ("gpipe", "", "gpipe", 1),
        ("dualpipev", "", "dualpipev", 2),
    ],
)
def test_the_schedule_is_the_one_a_row_says(said, vpp, schedule, chunks):
    """Rows that differ in the schedule's word alone are two questions; chunks that nobody said are two."""
    asked = case(step(schedule=said, vpp=vpp, pp="2", num_gpus="16", dp="8"))
    assert (asked.plan.pipeline.schedule, asked.plan.pipeline.vpp) == (schedule, chunks)
    assert ("vpp" in asked.assumed) == (said == "interleaved_1f1b" and not vpp)


def test_torchtitan_s_pipelines_cut_a_rank_s_batch_into_as_many_microbatches_as_they_have_ranks():
    """TorchTitan's pipelining_utils.py: n_microbatches is the degree of the pipeline unless said."""
    row = {
        "pp": "4",
        "num_gpus": "8",
        "dp": "2",
        "micro_batch_seqs": "16",
        "grad_accum": "1",
        "global_batch_seqs": "32",
    }
    asked = case(step(framework="torchtitan", schedule="1f1b", **row))
    assert asked.plan.num_microbatches(32) == 4 and "microbatch" in asked.assumed
    assert case(step(framework="nanotron", schedule="1f1b", **row)).plan.num_microbatches(32) == 1
