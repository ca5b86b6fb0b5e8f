"""The common part of the two forms of a TorchTitan configuration: mesh, pipeline, precisions, and their limits.

TorchTitan (Liang et al., 2024, arXiv 2410.06511) shards parameters, gradients and optimizer state together with FSDP2,
keeps them gathered after the forward when asked to (ZeRO-2's traffic), splits a model into stages by module names, and
takes its schedules from torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright import schedules
from meshwright.export import limits as shared
from meshwright.export import offloads
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import KnownModel, Target

#: Our schedule -> the name of the same order in torch.distributed.pipelining (get_schedule_class).
NATIVE = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
#: With one chunk a rank the looped schedules are these; torch's looped classes want two or more.
UNLOOPED = {"interleaved": "1F1B", "breadth-first": "GPipe"}
#: The class that runs an order written out in a file.
WRITTEN_OUT = "PipelineScheduleMulti"
#: Stages of a rank that torch's schedules keep gathered at a time.
KEPT_GATHERED = 3
#: The nearest order with the same chunks for placements that torch's stages do not have.
NEAREST_SCHEDULE = {"wave": ("interleaved", None), "bidirectional": ("1f1b", 1), "v": ("zb-v", 2)}
SCHEDULE_FILE = "schedule.csv"
WHOLE_BF16 = {"precision.grads": "bf16", "precision.master": "none", "precision.moments": "bf16"}
MIXED = {"precision.grads": "fp32", "precision.master": "fp32", "precision.moments": "fp32"}


def limits(r: ExportRequest, target: Target, quantized: tuple[str, ...], *, operators: bool = False) -> Iterator[Gap]:
    """Yield what the request needs and neither form of a TorchTitan configuration can express. `quantized` are the
    compute precisions it has converters for; `operators`: its selective recompute keeps every second matrix product."""
    yield from shared.nodes(r)
    yield from shared.equal_shares(r)
    yield from shared.one_copy(r)
    yield from offloads.stays(r, "its CPU offload is of parameters, gradients and optimizer at once")
    yield from shared.every_step(r)
    yield from _model(r, target)
    yield from _workload(r)
    yield from shared.order(r)
    if r.layout.pp == 1:
        yield from shared.optimizer_shards_alone(r, "FSDP2 shards optimizer state, gradients and parameters together")
    yield from shared.shard_contains_context(r)
    yield from _rounds(r)
    yield from _pipeline(r)
    yield from _experts(r)
    yield from shared.no_partial_recompute(r, "its selective policy picks operators", operators=operators)
    yield from shared.loss_kernels(r, ("eager",), "it computes the loss by torch's cross-entropy")
    yield from _kernel(r)
    yield from _precision(r, quantized)
    yield from _overlap(r)


def whole_heads(r: ExportRequest) -> Iterator[Gap]:
    """Tensor parallelism splits key-value heads and copies none."""
    heads = min((a.kv_heads for a in r.model.attentions), default=r.layout.tp)
    if heads % r.layout.tp:
        yield Gap(
            facet="layout.tp",
            value=f"tp{r.layout.tp}",
            reason=f"it does not copy key-value heads, and {r.model.name} has {heads}",
            help=f"take a tp that divides {heads}",
        )


def _model(r: ExportRequest, target: Target) -> Iterator[Gap]:
    known = target.find(r.model)
    if known is None:
        has = ", ".join(f"{m.module} {m.flavor}" for m in target.models)
        yield Gap(facet="model", value=r.model.name, reason="it does not bring this model", help=f"it has {has}")
        return
    if r.layout.pp > 1 and not known.pipeline:
        reason = f"its {known.module} cannot be split into stages"
    elif r.layout.pp > 1 and r.model.tied_embeddings:
        reason = "embedding and head share one matrix, which its stages cannot"
    else:
        reason = ""
    if reason:
        yield Gap(facet="layout.pp", value=f"pp{r.layout.pp} for {r.model.name}", reason=reason, help="say pp1")
    if r.layout.cp > 1 and not known.context:
        reason = f"the attention of its {known.module} does not work on a sequence split over ranks"
        yield Gap(facet="layout.cp", value=f"cp{r.layout.cp} for {r.model.name}", reason=reason, help="say cp1")
    if known.max_seq_len and r.train.seq_len > known.max_seq_len:
        yield Gap(
            facet="train.seq_len",
            value=f"seq={r.train.seq_len}",
            reason=f"its {known.module} {known.flavor} ends at {known.max_seq_len} tokens",
        )


def _workload(r: ExportRequest) -> Iterator[Gap]:
    yield from shared.no_lora(r)
    yield from shared.causal_only(r)
    if r.train.dropout:
        yield Gap(facet="train.dropout", value="dropout", reason="its models have none", help="say dropout=no")
    if r.train.optimizer not in ("adamw", "adam"):
        reason = "it has Adam and AdamW, and Muon only with a list of which matrices it is for"
        yield Gap(facet="train.optimizer", value=f"optimizer={r.train.optimizer}", reason=reason, help="say adamw")


def _pipeline(r: ExportRequest) -> Iterator[Gap]:
    pipeline = r.plan.pipeline
    if r.layout.pp == 1:
        yield from shared.one_stage(r)
        return
    family = schedules.get(pipeline.schedule)
    if family.name in NATIVE or family.placement in ("linear", "loop"):
        return
    name, vpp = NEAREST_SCHEDULE[family.placement]
    yield Gap(
        facet="pipeline.schedule",
        value=family.name,
        reason=f"its stages are not placed as a {family.placement} over the ranks",
        help=f"say {name}",
        mend={"pipeline.schedule": name, "pipeline.vpp": vpp or pipeline.vpp},
    )


def _rounds(r: ExportRequest) -> Iterator[Gap]:
    if r.layout.zero == 2 and shared.in_rounds(r) and r.layout.shard_group > 1:
        yield Gap(
            facet="layout.zero",
            value=f"zero2 beside {r.plan.pipeline.schedule} of {r.plan.pipeline.vpp} chunks",
            reason="under a pipeline its gradients accumulate whole until the last microbatch",
            help="say zero1 or fsdp, which keep them so",
            mend={"layout.zero": 1},
        )


def _experts(r: ExportRequest) -> Iterator[Gap]:
    """Expert ranks are borrowed from the sharded ones and, whole, from tensor parallelism."""
    if not r.has_experts:
        return
    layout, ep = r.layout, r.plan.experts.ep
    _, shard = data_parallel(r)
    room = shard * layout.cp * layout.tp
    if ep > 1 and room % (ep * r.plan.etp):
        yield Gap(
            facet="experts.ep",
            value=f"ep{ep}",
            reason=f"expert ranks are taken from the {room} ranks that one copy of the parameters is sharded over",
            help="shard the parameters over more ranks: fsdp",
            mend={"layout.zero": 3, "layout.shard": 0} if (layout.zero < 2 or layout.shard) else {},
        )


def _kernel(r: ExportRequest) -> Iterator[Gap]:
    if r.plan.memory.attention != "flash":
        yield Gap(
            facet="memory.attention",
            value="unfused",
            reason="its attention kernels are fused",
            help="say flash",
            mend={"memory.attention": "flash"},
        )


def _precision(r: ExportRequest, quantized: tuple[str, ...]) -> Iterator[Gap]:
    known = ("bf16", "fp32", *quantized)
    yield from shared.multiplies(r, known, f"it multiplies in {', '.join(known)}")
    if r.compute in known and stored_in(r) is None:
        p = r.plan.precision
        yield Gap(
            facet="precision",
            value=f"grads={p.grads} master={p.master} moments={p.moments}",
            reason="it keeps all of them in fp32, or with training.dtype bfloat16 everything in bf16 without a master",
            help="say grads=fp32 master=fp32 moments=fp32",
            mend=MIXED,
        )


def stored_in(r: ExportRequest) -> str | None:
    """``training.dtype``; None when neither says what the plan stores."""
    p = r.plan.precision
    if p.grads == p.moments == "fp32" and ("fp32" in (p.master, r.compute)):
        return "float32"
    if p.grads == p.moments == "bf16" and p.master == "none" and r.compute != "fp32":
        return "bfloat16"
    return None


def _overlap(r: ExportRequest) -> Iterator[Gap]:
    yield from shared.always_overlapped(r)
    yield from shared.tiles_alone(r)
    if r.layout.pp > 1 and not r.plan.overlap.pp:
        yield Gap(
            facet="overlap.pp",
            value="sends between stages that computing waits for",
            reason="its sends are always asynchronous",
            help="say overlap=dp,pp",
            mend={"overlap.pp": True},
        )


def sharded(r: ExportRequest) -> bool:
    """Whether FSDP2 shards anything. Under a pipeline it gathers parameters once a step and keeps gradients whole until
    the last microbatch, with whatever it shards: ZeRO-1, ZeRO-2 of one stage a rank and ZeRO-3 are the same there."""
    return r.layout.zero >= 2 or (r.layout.zero == 1 and r.layout.pp > 1)


def data_parallel(r: ExportRequest) -> tuple[int, int]:
    """(``data_parallel_replicate_degree``, ``data_parallel_shard_degree``): what is sharded over dp beyond cp."""
    layout = r.layout
    if not sharded(r):
        return layout.dp, 1
    shard = max(1, layout.shard_group // layout.cp)
    return layout.dp // shard, shard


def reshard(r: ExportRequest) -> str:
    """``fsdp_reshard_after_forward``: ZeRO-2 keeps parameters gathered until the backward is done, and so does ZeRO-1;
    for ZeRO-3 the default gathers them for every microbatch, under a pipeline once a step."""
    return "never" if r.layout.zero in (1, 2) else "default"


def schedule(r: ExportRequest) -> str:
    """``pipeline_parallel_schedule``."""
    pipeline = r.plan.pipeline
    name = schedules.get(pipeline.schedule).name
    if pipeline.vpp == 1 and name in UNLOOPED:
        return UNLOOPED[name]
    return NATIVE.get(name, WRITTEN_OUT)


def schedule_csv(r: ExportRequest) -> str:
    """The order of a schedule that torch has no name for, a row of ``STAGE KIND MICROBATCH`` per rank: F forward, I
    input gradient, W weight gradient, B both. torch adds the sends itself."""
    pipeline = r.plan.pipeline
    actions = schedules.build(pipeline.schedule, r.layout.pp, r.num_microbatches, pipeline.vpp)
    rows = []
    for rank in range(actions.num_ranks):
        part = slice(int(actions.rank_ptr[rank]), int(actions.rank_ptr[rank + 1]))
        columns = (actions.stage[part], actions.kind[part], actions.microbatch[part])
        rows.append(",".join(f"{stage}{'FIWB'[kind]}{mb}" for stage, kind, mb in zip(*(c.tolist() for c in columns))))
    return "\n".join(rows) + "\n"


def modules(r: ExportRequest, head: str) -> list[list[str]]:
    """``module_fqns_per_model_part``: the modules of every virtual stage, `head` the head's name."""
    parts, first = [], 0
    for count in r.stages:
        parts.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def parallelism(r: ExportRequest) -> dict[str, object]:
    """The keys of ``parallelism`` that both forms have, in their order."""
    layout = r.layout
    replicate, shard = data_parallel(r)
    out: dict[str, object] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": reshard(r),
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": r.plan.experts.ep,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        out["pipeline_parallel_schedule"] = schedule(r)
        if out["pipeline_parallel_schedule"] == WRITTEN_OUT:
            out["pipeline_parallel_schedule_csv"] = SCHEDULE_FILE
        out["pipeline_parallel_microbatch_size"] = r.plan.pipeline.microbatch
    return out


def training(r: ExportRequest) -> dict[str, object]:
    """The keys of ``training`` that both forms have. A rank takes its whole share of the batch into one pipeline, and
    without one a microbatch at a time."""
    share = r.train.global_batch // r.layout.dp
    out: dict[str, object] = {
        "local_batch_size": share if r.layout.pp > 1 else r.plan.pipeline.microbatch,
        "global_batch_size": r.train.global_batch,
        "seq_len": r.train.seq_len,
        "dtype": stored_in(r),
        "mixed_precision_param": "float32" if r.compute == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    if r.num_steps:
        out["steps"] = r.num_steps
    return out


def extra_files(r: ExportRequest) -> dict[str, str]:
    """Return the files written beside the configuration, {name: text}: the schedule where torch has no name for it."""
    return {SCHEDULE_FILE: schedule_csv(r)} if r.layout.pp > 1 and schedule(r) == WRITTEN_OUT else {}


def notes(r: ExportRequest, known: KnownModel) -> Iterator[str]:
    """Yield a note for each setting that both forms leave to the user or to TorchTitan."""
    yield "fill in <HF_ASSETS_PATH>: the folder of the tokenizer and configuration of " + r.model.name
    yield "fill in <DATASET>: a name of torchtitan.hf_datasets, such as c4"
    if not r.num_steps:
        yield "the workload does not say tokens: TorchTitan's default number of steps"
    yield "learning rate, its schedule and gradient clipping are TorchTitan's defaults"
    if r.plan.experts.imbalance != 1:
        yield f"imbalance={r.plan.experts.imbalance:g} is an assumption about the router, there is nothing to set"
    if r.train.lengths is not None:
        yield "document lengths are the data's; TorchTitan masks attention at document boundaries where it packs them"
    if r.layout.zero == 2 and r.layout.pp == 1 and r.num_microbatches > 1:
        yield "FSDP2 gathers parameters again for every microbatch; zero2 is predicted to gather them once a step"
    if r.layout.pp > 1 and sharded(r) and r.plan.pipeline.vpp > KEPT_GATHERED:
        vpp = r.plan.pipeline.vpp
        yield f"torch keeps {KEPT_GATHERED} of a rank's {vpp} stages gathered, and gathers again; predicted once a step"
    if r.layout.pp > 1 and schedule(r) == WRITTEN_OUT:
        yield f"{SCHEDULE_FILE} holds the order of {r.plan.pipeline.schedule}; start in its folder"
