"""DeepSpeed's JSON.

Written for DeepSpeed 0.19.8: ZeRO (Rajbhandari et al., 2019, arXiv 1910.02054), AutoTP, AutoEP and Ulysses (Jacobs et
al., 2023, arXiv 2309.14509); ``data/deepspeed.toml`` lists the keys. Stages of a pipeline are arguments of
``PipelineModule`` in a program, not keys of this file. Model and data are the training script's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from meshwright.export import launch, offloads
from meshwright.export import limits as shared
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import load
from meshwright.sync.policy import read
from meshwright.sync.record import USUAL, SyncPolicy

NAME, FILE = "deepspeed", "ds_config.json"
SCRIPT = "your training script, with the model, the tokenizer and the data"
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "sgd": "SGD", "momentum": "SGD"}
#: Policies that are a type of what is exchanged, ``communication_data_type``.
CARRIED = ("bf16", "fp16")
#: The rule of quantised weights and gradients, and the bits that ZeRO++ has of each (Wang et al., 2023, arXiv
#: 2306.10209): what its kernels are called with in runtime/zero/partition_parameters.py and coalesced_collectives.py.
QUANTISED, BITS = "qsdp", {"weights": "8", "grads": "4"}
INSTEAD = (
    "sync=bf16 and fp16 are keys of its file, and with fsdp sync=qsdp:grads=4 is ZeRO++; 1-bit Adam and LAMB send the "
    "signs of momenta after a warm-up, which is no policy here"
)
#: Architectures whose mixtures AutoEP finds by itself.
EXPERT_PRESETS = {
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "qwen2_moe": "qwen3_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Yield what the request needs and a DeepSpeed configuration cannot express."""
    yield from shared.nodes(r)
    yield from shared.equal_shares(r)
    yield from _exchange(r)
    yield from shared.no_pipeline(r, "stages are arguments of PipelineModule in your program, not of the JSON")
    yield from shared.order(r)
    yield from _tensor(r)
    yield from _context(r)
    yield from _scope(r)
    yield from _experts(r)
    yield from _recompute(r)
    yield from _overlap(r)
    yield from _precision(r)
    yield from _optimizer(r)
    yield from offloads.by_deepspeed(r)


def _exchange(r: ExportRequest) -> Iterator[Gap]:
    """Gradients are exchanged in every step: as they are, in 16 bits, or with the weights in those of ZeRO++."""
    policy = read(r.plan.sync.policy)
    if policy.rule.name == QUANTISED:
        yield from shared.own_steps(r)
        yield from _quantised(r, policy)
    elif policy.text in CARRIED:
        yield from shared.own_steps(r)
    else:
        for gap in shared.every_step(r):
            if gap.facet == "sync.policy":
                gap = msgspec.structs.replace(gap, help=f"{gap.help}: {INSTEAD}")
            yield gap


def _quantised(r: ExportRequest, policy: SyncPolicy) -> Iterator[Gap]:
    """ZeRO++ quantises what stage 3 gathers to 8 bits and what it scatters to 4."""
    if {name: policy[name] for name in BITS} != BITS:
        words = f"{QUANTISED}:grads={BITS['grads']}"
        yield Gap(
            facet="sync.policy",
            value=f"sync={policy.text}",
            reason="ZeRO++ gathers weights in 8 bits and scatters gradients in 4",
            help=f"say sync={words}",
            mend={"sync.policy": words},
        )
    if policy["near"] not in (1, r.world // r.num_nodes):
        words = f"{QUANTISED}:grads={BITS['grads']},near={r.world // r.num_nodes}"
        yield Gap(
            facet="sync.policy",
            value=f"sync={policy.text}",
            reason="ZeRO++ sums gradients among the ranks of a node first",
            help=f"say sync={words}",
            mend={"sync.policy": words},
        )
    if r.num_nodes == 1:
        yield Gap(
            facet="sync.policy",
            value=f"sync={QUANTISED} on one node",
            reason="ZeRO++ quantises gradients between several nodes alone",
            help="drop sync",
            mend={"sync.policy": USUAL},
        )
    if r.layout.zero != 3:
        yield Gap(
            facet="layout.zero",
            value=f"sync={QUANTISED} with zero{r.layout.zero}",
            reason="ZeRO++ quantises the weights and gradients of stage 3",
            help="say fsdp",
            mend={"layout.zero": 3},
        )


def _tensor(r: ExportRequest) -> Iterator[Gap]:
    if r.layout.tp > 1 and r.layout.sp:
        yield Gap(
            facet="layout.sp",
            value="sp",
            reason="AutoTP keeps all tokens on every rank between its regions",
            help="say nosp",
            mend={"layout.sp": False},
        )


def _context(r: ExportRequest) -> Iterator[Gap]:
    yield from shared.context(r, ("ulysses",), "its sequence parallelism trades the sequence for heads (Ulysses)")
    if r.layout.cp > 1 and r.layout.tp > 1:
        yield Gap(
            facet="layout.cp",
            value=f"cp{r.layout.cp} beside tp{r.layout.tp}",
            reason="its mesh has data and sequence parallelism, or data and tensor parallelism",
            help="say tp1 or cp1",
            mend={"layout.tp": 1, "layout.dp": r.layout.dp * r.layout.tp} if r.layout.pp == 1 else {},
        )


def _scope(r: ExportRequest) -> Iterator[Gap]:
    layout = r.layout
    if layout.zero and layout.shard_group < layout.dp * layout.cp:
        yield Gap(
            facet="layout.shard",
            value=f"shards of {layout.shard_group} of {layout.dp * layout.cp} ranks",
            reason="it shards over all of data parallelism (MiCS was removed, hpZ is a second copy: hpz8)",
            help="leave the size of the group out",
            mend={"layout.shard": 0},
        )


def _experts(r: ExportRequest) -> Iterator[Gap]:
    if not r.has_experts:
        return
    ep, etp, tp = r.plan.experts.ep, r.plan.etp, r.layout.tp
    if ep > 1 and r.model.family not in EXPERT_PRESETS:
        yield Gap(
            facet="experts.ep",
            value=f"ep{ep} for {r.model.name}",
            reason=f"AutoEP knows the layers of {', '.join(EXPERT_PRESETS)}",
            help="say ep1",
            mend={"experts.ep": 1, "experts.etp": 0},
        )
    elif ep > 1 and etp > 1:
        yield Gap(
            facet="experts.etp",
            value=f"etp{etp}",
            reason="with expert parallelism every expert is whole",
            help="say etp1",
            mend={"experts.etp": 1},
        )
    elif ep == 1 and etp != tp:
        yield Gap(
            facet="experts.etp",
            value=f"etp{etp}",
            reason="without expert parallelism experts are split as everything else",
            help=f"say etp{tp}",
            mend={"experts.etp": 0},
        )


def _recompute(r: ExportRequest) -> Iterator[Gap]:
    yield from shared.no_partial_recompute(r, "it checkpoints what the model asks it to, whole layers")
    yield from shared.loss_kernels(r, ("eager",), "the loss is computed by your model's own code")


def _overlap(r: ExportRequest) -> Iterator[Gap]:
    layout, overlap = r.layout, r.plan.overlap
    yield from shared.no_expert_overlap(r, "an expert's layer waits for its tokens")
    yield from shared.tiles_alone(r)
    if layout.zero == 0 and overlap.dp and layout.dp * layout.cp > 1:
        yield Gap(
            facet="overlap.dp",
            value="gradients' exchange overlapped with the backward without ZeRO",
            reason="stage 0 reduces them after the last backward",
            help="say zero1, or leave dp out of overlap=",
            mend={"overlap.dp": False},
        )


def _precision(r: ExportRequest) -> Iterator[Gap]:
    p, zero = r.plan.precision, r.layout.zero
    if r.compute not in (known := ("bf16", "fp16", "fp32")):
        yield from shared.multiplies(r, known, "it multiplies in bf16, fp16 or fp32")
        return
    if p.grads not in (grads := _gradients(r)):
        yield Gap(
            facet="precision.grads",
            value=f"grads={p.grads}",
            reason=f"stage {zero} of {r.compute} stores gradients in {' or '.join(grads)}",
            help=f"say grads={grads[0]}",
            mend={"precision.grads": grads[0]},
        )
    if r.compute != "fp32" and not _stored(r):
        yield Gap(
            facet="precision.master",
            value=f"master={p.master} moments={p.moments}",
            reason="master copy and moments are fp32, or with ZeRO of bf16 both bf16",
            help="say master=fp32 moments=fp32",
            mend={"precision.master": "fp32", "precision.moments": "fp32"},
        )
    elif r.compute == "fp32" and p.moments != "fp32":
        yield Gap(
            facet="precision.moments",
            value=f"moments={p.moments}",
            reason="moments are as wide as the parameters",
            help="say moments=fp32",
            mend={"precision.moments": "fp32"},
        )


def _gradients(r: ExportRequest) -> tuple[str, ...]:
    """Stage 0 accumulates in the parameters' own type; a bf16 master copy goes with bf16 gradients."""
    if r.compute == "fp32":
        return ("fp32",)
    if r.plan.precision.master == "bf16":
        return ("bf16",)
    return (r.compute,) if r.layout.zero == 0 else ("fp32", r.compute)


def _stored(r: ExportRequest) -> bool:
    p = r.plan.precision
    low = p.master == "bf16" and p.moments in ("bf16", "fp32") and r.compute == "bf16" and r.layout.zero > 0
    return low or p.master == p.moments == "fp32"


def _optimizer(r: ExportRequest) -> Iterator[Gap]:
    if r.train.optimizer not in OPTIMIZERS:
        reason = "Muon needs to be told which parameters it is for, in the program"
        yield Gap(facet="train.optimizer", value=f"optimizer={r.train.optimizer}", reason=reason, help="say adamw")


def write(r: ExportRequest) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    command = f'{launch.torchrun(r)} "$SCRIPT" --deepspeed_config "$CONFIG"'
    start = launch.script(r, f"Starts {load(NAME).label}", FILE, command, {"SCRIPT": SCRIPT})
    return {FILE: text(table(r)), launch.FILE: start}, list(_notes(r))


def text(table: dict[str, object]) -> str:
    return json.dumps(table, indent=2) + "\n"


def table(r: ExportRequest, *, optimizer: bool = True) -> dict[str, object]:
    """The configuration; without an `optimizer` the training script makes its own."""
    layout = r.layout
    out: dict[str, object] = {
        "train_micro_batch_size_per_gpu": r.plan.pipeline.microbatch,
        "gradient_accumulation_steps": r.num_microbatches,
    }
    if layout.tp == 1:
        # it checks the product with the ranks of the job, which tensor parallelism would count too often
        out["train_batch_size"] = r.train.global_batch
    if optimizer:
        out["optimizer"] = {"type": OPTIMIZERS[r.train.optimizer], "params": _optimizer_params(r)}
    out["zero_optimization"] = _zero(r)
    if r.layout.zero and OPTIMIZERS[r.train.optimizer] == "SGD":
        out["zero_allow_untested_optimizer"] = True
    if r.compute == "bf16":
        p = r.plan.precision
        low = p.master == "bf16"
        out["bf16"] = {"enabled": True} | ({"bf16_master_weights_and_grads": True} if low else {})
        if low and p.moments == "bf16":
            out["bf16"]["bf16_optimizer_states"] = True
    elif r.compute == "fp16":
        out["fp16"] = {"enabled": True}
    if (policy := read(r.plan.sync.policy).text) in CARRIED:
        out["communication_data_type"] = policy
    if r.compute != "fp32":
        out["data_types"] = {"grad_accum_dtype": r.plan.precision.grads}
    if layout.tp > 1:
        out["tensor_parallel"] = {"autotp_size": layout.tp, "tp_overlap_comm": r.plan.overlap.tp}
    if layout.cp > 1:
        out |= {"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp}
    if r.plan.experts.ep > 1:
        out["expert_parallel"] = {
            "enabled": True,
            "autoep_size": r.plan.experts.ep,
            "preset_model": EXPERT_PRESETS[r.model.family],
        }
    return out


def _optimizer_params(r: ExportRequest) -> dict[str, object]:
    own = {"momentum": {"momentum": 0.9}, "adam": {"adam_w_mode": False}}
    return {"lr": 1e-3, **own.get(r.train.optimizer, {})}


def _zero(r: ExportRequest) -> dict[str, object]:
    stage = r.layout.zero
    plus = read(r.plan.sync.policy).rule.name == QUANTISED
    coded = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return (
        {"stage": stage}
        | ({"overlap_comm": r.plan.overlap.dp} if stage else {})
        | (coded if plus else {})
        | ({"zero_hpz_partition_size": r.layout.hpz or 1} if plus or r.layout.hpz else {})
        | offloads.keys(r)
    )


def _notes(r: ExportRequest) -> Iterator[str]:
    yield f"written for {load(NAME).label}: {r.name}"
    yield launch.note(r, f"{launch.torchrun(r)} <SCRIPT> --deepspeed_config {FILE}")
    yield f"fill in <SCRIPT>: {SCRIPT}"
    yield "lr is DeepSpeed's default of 0.001, a plan does not say one; scheduler and clipping are left out"
    yield f"in the script: {r.train.each}" + (f", {r.num_steps} steps" if r.num_steps else "")
    if read(r.plan.sync.policy).rule.name == QUANTISED:
        yield "ZeRO++ rounds to the nearest of levels around zero; QSDP rounds at random"
        if read(r.plan.sync.policy)["near"] == 1:
            yield "ZeRO++ scatters gradients inside a node first, then between nodes, as sync=qsdp:near= does"
    if r.layout.hpz:
        yield "hpZ keeps its second copy of the weights until the step ends, the plan's lasts until the backward"
    yield from offloads.notes(r)
    kernel = "flash_attention_2" if r.plan.memory.attention == "flash" else "eager"
    yield f"in the script: attn_implementation={kernel!r}"
    if r.plan.memory.recompute == "full":
        yield "in the script: model.gradient_checkpointing_enable()"
    if r.layout.cp > 1:
        yield "in the script: UlyssesSPAttentionHF.register_with_transformers and its data loader"
    if r.plan.experts.imbalance != 1:
        yield f"imbalance={r.plan.experts.imbalance:g} is an assumption about the router, there is nothing to set"
    if r.train.lora is not None:
        yield f"in the script: adapters of rank {r.train.lora.rank} on {'+'.join(r.train.lora.targets)} (peft)"
    if r.train.dropout or not r.train.causal or r.train.lengths is not None:
        yield f"in the script: what the workload says of dropout, masks and documents: {r.train.text()}"
