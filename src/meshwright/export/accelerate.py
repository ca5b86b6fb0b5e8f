"""Hugging Face Accelerate's YAML, with FSDP2 and its parallelism configuration.

Written for Accelerate 1.15.0 (the documentation's "nd_parallel" and "fsdp2" pages); ``data/accelerate.toml`` lists
the keys. Model, optimizer, batch and data are the training script's; the notes say what it has to do.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export import deepspeed, launch, offloads
from meshwright.export import limits as shared
from meshwright.export.comments import commented
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import load
from meshwright.export.yaml_text import dumps

NAME, FILE = "accelerate", "accelerate.yaml"
SCRIPT = "your training script, with the model, the tokenizer and the data"
#: How key-value shards travel: a ring is made of all-to-alls, a rotation each.
COMM_STRATEGY = {"ring": "alltoall", "allgather": "allgather"}
MIXED_PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp32": "no", "fp8": "fp8"}


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Yield what the request needs and Accelerate cannot express."""
    if _through_deepspeed(r):
        yield from deepspeed.limits(r)
        return
    yield from shared.nodes(r)
    yield from shared.equal_shares(r)
    yield from shared.one_copy(r)
    yield from offloads.stays(r, "what is written keeps FSDP2's shards on their devices")
    yield from shared.every_step(r)
    yield from shared.no_pipeline(r, "its configuration has tensor, context and data parallelism, and no stages")
    yield from shared.order(r)
    yield from _tensor(r)
    yield from shared.context(r, tuple(COMM_STRATEGY), "keys and values rotate or are gathered, heads stay")
    if r.layout.cp > 1:
        yield from shared.pieces(r, 2 * r.layout.cp, "every context-parallel rank takes two")
    yield from shared.optimizer_shards_alone(r, "FSDP2 shards optimizer state, gradients and parameters together")
    yield from shared.shard_contains_context(r)
    yield from _replicas(r)
    yield from _experts(r)
    yield from shared.no_partial_recompute(r, "FSDP2 recomputes the layers that it wraps")
    yield from shared.loss_kernels(r, ("eager",), "the loss is computed by your model's own code")
    yield from shared.always_overlapped(r)
    yield from _precision(r)
    yield from _context_kernel(r)


def _through_deepspeed(r: ExportRequest) -> bool:
    """Whether DeepSpeed runs the plan: ZeRO-1, which FSDP2 does not have, over ranks that split nothing else."""
    layout = r.layout
    alone = layout.tp * layout.cp * layout.pp * r.plan.experts.ep == 1
    return layout.zero == 1 and layout.dp > 1 and alone and r.plan.pipeline.vpp == 1


def _tensor(r: ExportRequest) -> Iterator[Gap]:
    if r.layout.tp == 1:
        return
    if r.layout.sp:
        yield Gap(
            facet="layout.sp",
            value="sp",
            reason="between tensor-parallel regions every rank has all tokens",
            help="say nosp",
            mend={"layout.sp": False},
        )
    if r.plan.overlap.tp:
        yield Gap(
            facet="overlap.tp",
            value="overlap=tp",
            reason="a tensor-parallel product waits for its collective",
            help="leave tp out of overlap=",
            mend={"overlap.tp": False},
        )


def sizes(r: ExportRequest) -> dict[str, int]:
    """Sizes of its mesh axes; FSDP2 shards over dp_shard and cp together."""
    layout = r.layout
    shard = max(1, layout.shard_group // layout.cp) if layout.zero >= 2 else 1
    return {"dp_replicate": layout.dp // shard, "dp_shard": shard, "tp": layout.tp, "cp": layout.cp}


def _replicas(r: ExportRequest) -> Iterator[Gap]:
    size, layout = sizes(r), r.layout
    if layout.zero == 1:
        return  # never expressed, whatever stands beside it
    if size["dp_replicate"] > 1 and size["dp_shard"] == 1 and layout.tp * layout.cp > 1:
        whole = layout.zero == 0
        yield Gap(
            facet="layout.zero" if whole else "layout.shard",
            value=f"dp{layout.dp} without sharding over it beside tp{layout.tp} cp{layout.cp}",
            reason="DDP goes with no other parallelism",
            help="say zero2 or fsdp",
            mend={"layout.zero": max(2, layout.zero), "layout.shard": 0},
        )


def _experts(r: ExportRequest) -> Iterator[Gap]:
    if not r.has_experts:
        return
    if r.plan.experts.ep > 1:
        yield Gap(
            facet="experts.ep",
            value=f"ep{r.plan.experts.ep}",
            reason="its mesh has no expert axis",
            help="say ep1",
            mend={"experts.ep": 1, "experts.etp": 0},
        )
    elif r.plan.etp != r.layout.tp:
        yield Gap(
            facet="experts.etp",
            value=f"etp{r.plan.etp}",
            reason="experts are split as everything else",
            help=f"say etp{r.layout.tp}",
            mend={"experts.etp": 0},
        )


def _precision(r: ExportRequest) -> Iterator[Gap]:
    p = r.plan.precision
    yield from shared.multiplies(r, tuple(MIXED_PRECISION), f"mixed_precision is one of {', '.join(MIXED_PRECISION)}")
    stored = {p.grads, p.moments} | ({p.master} if r.compute != "fp32" else set())
    if stored != {"fp32"}:
        yield Gap(
            facet="precision",
            value=f"grads={p.grads} master={p.master} moments={p.moments}",
            reason="mixed precision keeps parameters, gradients and moments in fp32",
            help="say grads=fp32 master=fp32 moments=fp32",
            mend={"precision.grads": "fp32", "precision.master": "fp32", "precision.moments": "fp32"},
        )


def _context_kernel(r: ExportRequest) -> Iterator[Gap]:
    if r.layout.cp > 1 and r.plan.memory.attention != "flash":
        yield Gap(
            facet="memory.attention",
            value=f"unfused attention beside cp{r.layout.cp}",
            reason="only scaled_dot_product_attention works on a sequence split over ranks",
            help="say flash",
            mend={"memory.attention": "flash"},
        )


def write(r: ExportRequest) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    table: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(r),
        "num_machines": r.num_nodes,
        "num_processes": r.world,
        "main_training_function": "main",
        "rdzv_backend": "c10d" if r.num_nodes > 1 else "static",
        # a rank of every node is only needed where they do not agree on one among themselves
        "same_network": r.num_nodes == 1,
        "use_cpu": False,
    }
    if _kind(r) != "DEEPSPEED":  # whose own file says it
        table["mixed_precision"] = MIXED_PRECISION[r.compute]
    if r.num_nodes > 1:
        table |= {"main_process_ip": "<MAIN_PROCESS_IP>", "main_process_port": launch.PORT}
    if r.compute == "fp8":
        table["fp8_config"] = {"fp8_backend": "AO"}
    if _kind(r) == "FSDP":
        table["fsdp_config"] = _fsdp(r)
    if _kind(r) == "DEEPSPEED":
        table["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed.FILE,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": False,
        }
    size = sizes(r)
    if r.layout.tp * r.layout.cp > 1 or _kind(r) == "FSDP":
        table["parallelism_config"] = {f"parallelism_config_{axis}_size": n for axis, n in size.items()}
    if r.layout.cp > 1:
        table["parallelism_config"]["parallelism_config_cp_comm_strategy"] = COMM_STRATEGY[r.plan.sequence.algorithm]
    head = f"# Configuration for {load(NAME).label}, written by Meshwright.\n# {r.name}\n"
    start = launch.script(r, f"Starts {load(NAME).label}", FILE, _command(r), {"SCRIPT": SCRIPT})
    beside = {}
    if _kind(r) == "DEEPSPEED":
        beside[deepspeed.FILE] = deepspeed.text(deepspeed.table(r, optimizer=False))
    return {FILE: commented(head + dumps(table), load(NAME).comments), **beside, launch.FILE: start}, list(_notes(r))


def _command(r: ExportRequest) -> str:
    """The command of the launch script: the first node's address is the environment's, whatever the file says."""
    where = ' --main_process_ip "${HEAD_NODE%:*}" --main_process_port "${HEAD_NODE##*:}"' if r.num_nodes > 1 else ""
    return f'{launch.each(r)}accelerate launch --config_file "$CONFIG"{_meeting(r)}{where} "$SCRIPT"'


def _meeting(r: ExportRequest) -> str:
    """How several nodes agree on their ranks; of this the launcher takes its own default over the file."""
    return " --rdzv_backend c10d" if r.num_nodes > 1 else ""


def _kind(r: ExportRequest) -> str:
    if r.world == 1:
        return "NO"
    if _through_deepspeed(r):
        return "DEEPSPEED"
    return "FSDP" if r.layout.zero >= 2 and r.layout.dp * r.layout.cp > 1 else "MULTI_GPU"


def _fsdp(r: ExportRequest) -> dict[str, object]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": r.layout.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": r.plan.memory.recompute == "full",
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _notes(r: ExportRequest) -> Iterator[str]:
    yield launch.note(r, f"accelerate launch --config_file {FILE}{_meeting(r)} <SCRIPT>")
    if r.num_nodes > 1:
        yield "fill in <MAIN_PROCESS_IP>: the address of the first node"
    yield f"fill in <SCRIPT>: {SCRIPT}"
    if _kind(r) == "DEEPSPEED":
        yield f"{deepspeed.FILE} beside it says stage, batch and precisions to the deepspeed package"
    yield f"in the script: {r.plan.pipeline.microbatch} {r.train.each} a device and step"
    yield f"in the script: Accelerator(gradient_accumulation_steps={r.num_microbatches})"
    yield f"in the script: the optimizer, {r.train.optimizer}" + (f", {r.num_steps} steps" if r.num_steps else "")
    yield f"in the script: attn_implementation={_attention(r)!r}"
    if r.layout.tp > 1:
        yield f"in the script: load the model with tp_plan='auto' and tp_size={r.layout.tp}"
    if r.layout.cp > 1:
        yield "in the script: accelerator.maybe_context_parallel around the step"
    if r.plan.memory.recompute == "full" and _kind(r) != "FSDP":
        yield "in the script: model.gradient_checkpointing_enable()"
    if _kind(r) == "FSDP" and r.compute in ("bf16", "fp16"):
        yield f"gradients travel in {r.compute} and are stored in fp32"
    if r.layout.zero == 2 and r.num_microbatches > 1:
        yield "FSDP2 gathers parameters again for every microbatch; zero2 is predicted to gather them once a step"
    if r.compute == "fp8":
        yield "fp8 uses the torchao package"
    if r.plan.experts.imbalance != 1:
        yield f"imbalance={r.plan.experts.imbalance:g} is an assumption about the router, there is nothing to set"
    if r.train.lora is not None:
        targets = "+".join(r.train.lora.targets)
        yield f"in the script: adapters of rank {r.train.lora.rank} on {targets} (peft)"
    if r.train.dropout or not r.train.causal or r.train.lengths is not None:
        yield f"in the script: what the workload says of dropout, masks and documents: {r.train.text()}"


def _attention(r: ExportRequest) -> str:
    if r.plan.memory.attention != "flash":
        return "eager"
    return "sdpa" if r.layout.cp > 1 else "flash_attention_2"
