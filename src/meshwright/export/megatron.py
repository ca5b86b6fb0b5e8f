"""Megatron-LM's flags, as a script that starts ``pretrain_gpt.py``.

Written for Megatron-Core 0.16.1 (Narayanan et al., 2021, arXiv 2104.04473; Korthikanti et al., 2022, arXiv 2205.05198;
parallel folding: 2504.14960); ``data/megatron.toml`` lists the flags and where they are defined. ZeRO-1 is its
distributed optimizer, ZeRO-2 and 3 its own FSDP.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from meshwright.export import launch, megatron_model, offloads
from meshwright.export import limits as shared
from meshwright.export.comments import commented
from meshwright.export.gap import Gap
from meshwright.export.megatron_model import Flags
from meshwright.export.megatron_precision import limits as precision_limits
from meshwright.export.megatron_precision import precision
from meshwright.export.request import ExportRequest
from meshwright.export.target import load
from meshwright.plan.facets.layout import DEFAULT_ORDER

NAME, FILE = "megatron", "pretrain.sh"
#: --use-tp-pp-dp-mapping
STAGES_INSIDE = ("tp", "cp", "pp", "dp")
CP_COMM = {"ring": "p2p", "ulysses": "a2a", "allgather": "allgather"}
OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "momentum": "sgd"}
#: What the environment must say before the script runs.
WANTED = {
    "MEGATRON_LM": "folder of a checkout of NVIDIA/Megatron-LM",
    "DATA_PATH": "prefix of the indexed dataset",
    "TOKENIZER_MODEL": "folder or Hugging Face name of the tokenizer",
    "LR": "learning rate",
}


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Yield what the request needs and Megatron-LM cannot express."""
    yield from shared.nodes(r)
    yield from shared.equal_shares(r)
    yield from shared.one_copy(r)
    yield from offloads.stays(r, "what is written keeps Megatron-LM's state on its devices")
    yield from shared.every_step(r)
    yield from megatron_model.limits(r)
    yield from _workload(r)
    yield from shared.order(r, (DEFAULT_ORDER, STAGES_INSIDE))
    yield from _schedule(r)
    yield from _context(r)
    yield from _zero(r)
    yield from _recompute(r)
    yield from _overlap(r)
    yield from precision_limits(r)


def _workload(r: ExportRequest) -> Iterator[Gap]:
    yield from shared.no_lora(r)
    yield from shared.causal_only(r)
    if r.train.lengths is not None:
        reason = "pretrain_gpt.py attends across documents with its fused kernels"
        yield Gap(facet="train.lengths", value="documents that do not see each other", reason=reason)
    if r.train.optimizer not in OPTIMIZERS:
        reason = "pretrain_gpt.py has Adam and SGD, and Muon only beside an unsharded optimizer and its own checkpoints"
        yield Gap(facet="train.optimizer", value=f"optimizer={r.train.optimizer}", reason=reason, help="say adamw")
    rows = r.model.learned_positions
    if r.model.is_decoder and not rows and not r.model.blocks[0].attention.rotary:
        reason = "positions are learned or rotary, it has no ALiBi"
        yield Gap(facet="model", value=r.model.name, reason=reason)
    elif rows and r.train.seq_len > rows:
        reason = f"{r.model.name} has {rows} learned positions"
        yield Gap(facet="train.seq_len", value=f"seq={r.train.seq_len}", reason=reason)


def _schedule(r: ExportRequest) -> Iterator[Gap]:
    pipeline, pp = r.plan.pipeline, r.layout.pp
    if pp == 1:
        yield from shared.one_stage(r)
    elif pipeline.schedule not in ("1f1b", "interleaved"):
        name = "interleaved" if pipeline.vpp > 1 else "1f1b"
        yield Gap(
            facet="pipeline.schedule",
            value=pipeline.schedule,
            reason="it runs 1F1B, interleaved where a rank holds several chunks",
            help=f"say {name}",
            mend={"pipeline.schedule": name},
        )
    elif pp == 2 and pipeline.vpp > 1 and not r.plan.overlap.pp:
        yield Gap(
            facet="overlap.pp",
            value="interleaved pp2 with blocking sends",
            reason="two ranks would send to each other twice at once",
            help="say overlap=dp,pp",
            mend={"overlap.pp": True},
        )


def _context(r: ExportRequest) -> Iterator[Gap]:
    layout = r.layout
    if layout.cp == 1:
        return
    yield from shared.pieces(r, 2 * layout.cp, "every context-parallel rank takes two")
    yield from shared.context(r, tuple(CP_COMM), "it passes keys and values on, swaps heads, or gathers")
    if r.plan.memory.attention != "flash":
        yield Gap(
            facet="memory.attention",
            value=f"unfused attention beside cp{layout.cp}",
            reason="only its fused kernels split a sequence over ranks",
            help="say flash",
            mend={"memory.attention": "flash"},
        )
    if any(a.sinks for a in r.model.attentions):
        yield Gap(
            facet="layout.cp",
            value=f"attention sinks beside cp{layout.cp}",
            reason="no kernel of Transformer Engine splits a sequence under a learned softmax",
            help="say cp1",
            mend={"layout.cp": 1, "layout.dp": layout.dp * layout.cp},
        )
    heads = min((a.kv_heads for a in r.model.attentions), default=r.layout.tp)
    if r.plan.sequence.algorithm == "ulysses" and heads % (layout.tp * layout.cp):
        yield Gap(
            facet="sequence.algorithm",
            value=f"ulysses over cp{layout.cp}",
            reason=f"it splits key-value heads too, and {heads} do not divide by tp{layout.tp} * cp{layout.cp}",
            help="say ring",
            mend={"sequence.algorithm": "ring"},
        )


def _zero(r: ExportRequest) -> Iterator[Gap]:
    layout = r.layout
    if layout.zero >= 2 and layout.pp > 1:
        alike = layout.zero == 3 or r.plan.pipeline.vpp == 1
        yield Gap(
            facet="layout.zero",
            value=f"{'fsdp' if layout.zero == 3 else 'zero2'} beside pp{layout.pp}",
            reason="its FSDP reduces gradients and gathers parameters for every microbatch, a pipeline once a step",
            help="say zero1" + (", which is the same step under a pipeline" if alike else ""),
            mend={"layout.zero": 1},
        )


def _recompute(r: ExportRequest) -> Iterator[Gap]:
    memory = r.plan.memory
    if memory.recompute == "operators":
        yield Gap(
            facet="memory.recompute",
            value="operators",
            reason="it recomputes the attention core or whole layers, no single products",
            help="say full",
            mend={"memory.recompute": "full"},
        )
    if memory.gathered == "kept" and r.layout.tp > 1 and r.layout.sp:
        yield Gap(
            facet="memory.gathered",
            value="gathered=kept",
            reason="it gathers the inputs of products again for their weight gradients",
            help="leave it out",
            mend={"memory.gathered": "again"},
        )
    yield from shared.loss_kernels(
        r, ("in-place", "eager", "fused"), "its own cross-entropy writes probabilities over the logits"
    )
    if memory.layers and memory.recompute == "selective":
        yield Gap(
            facet="memory.layers",
            value=f"selective recompute_layers={memory.layers}",
            reason="selective recompute covers every layer",
            help="say selective alone, or full with recompute_layers",
            mend={"memory.layers": 0},
        )


def _overlap(r: ExportRequest) -> Iterator[Gap]:
    overlap, layout = r.plan.overlap, r.layout
    if why := _expert_overlap(r):
        yield from shared.no_expert_overlap(r, why)
    yield from shared.tiles_alone(r)
    if layout.tp > 1 and overlap.tp and not layout.sp:
        yield Gap(
            facet="overlap.tp",
            value="overlap=tp with nosp",
            reason="products overlap with the gathers of sequence parallelism",
            help="say sp",
            mend={"layout.sp": True},
        )
    if layout.pp > 1 and r.plan.pipeline.vpp == 1 and overlap.pp:
        yield Gap(
            facet="overlap.pp",
            value="sends beside computing under 1f1b",
            reason="only its interleaved schedule overlaps them",
            help="say overlap=dp, or a vpp of 2 and more",
            mend={"overlap.pp": False},
        )


def _expert_overlap(r: ExportRequest) -> str:
    """Return why Megatron-LM cannot overlap the experts' exchange of a microbatch with another one; "" where it can."""
    if r.layout.pp > 1 and r.plan.pipeline.vpp == 1:
        return "under a pipeline only its interleaved schedule overlaps it"
    if r.plan.memory.recompute == "full":
        return "layers that are recomputed whole cannot be cut at the exchange"
    if r.compute == "fp32":
        return "it overlaps it in bf16 and fp16"
    return ""


def write(r: ExportRequest) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    groups = {
        "MODEL": megatron_model.flags(r),
        "PARALLELISM": parallelism(r),
        "TRAINING": training(r),
        "PRECISION": precision(r),
    }
    title = f"Flags for {load(NAME).label} (Megatron-LM)"
    lines = [*launch.head(r, title, FILE), *launch.asked(_wanted(r)), *launch.nodes(r)]
    if _one_connection(r):
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")
    for name, flags in groups.items():
        lines += ["", f"{name}=(", *("  " + _words(flag, value) for flag, value in flags.items()), ")"]
    arrays = " ".join(f'"${{{name}[@]}}"' for name in groups)
    lines += ["", f'{launch.torchrun(r)} "$MEGATRON_LM/pretrain_gpt.py" {arrays} "$@"', ""]
    return {FILE: commented("\n".join(lines), load(NAME).comments)}, list(_notes(r))


def _wanted(r: ExportRequest) -> dict[str, str]:
    out = dict(WANTED)
    if not r.num_steps:
        out["TRAIN_ITERS"] = "optimizer steps"
    return out


def _words(flag: str, value: object) -> str:
    if value is True:
        return flag
    text = str(value)
    return f'{flag} "{text}"' if text.startswith("$") else f"{flag} {shlex.quote(text)}"


def _fsdp(r: ExportRequest) -> bool:
    return r.layout.zero >= 2 and r.layout.dp * r.layout.cp > 1


def _one_connection(r: ExportRequest) -> bool:
    """One hardware queue keeps communication kernels in the order of their launch; FSDP wants several."""
    return r.layout.tp * r.layout.cp > 1 and not _fsdp(r)


def parallelism(r: ExportRequest) -> Flags:
    """Axes, stages, experts, what is sharded and what overlaps."""
    layout, experts = r.layout, r.plan.experts
    out: Flags = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
    }
    if layout.tp > 1 and layout.sp:
        out["--sequence-parallel"] = True
    if layout.cp > 1:
        out["--cp-comm-type"] = CP_COMM[r.plan.sequence.algorithm]
    if r.has_experts:
        out |= {"--expert-model-parallel-size": experts.ep, "--expert-tensor-parallel-size": r.plan.etp}
    if layout.pp > 1 and layout.dp > 1 and layout.order.index("pp") < layout.order.index("dp"):
        out["--use-tp-pp-dp-mapping"] = True
    return {**out, **_stages(r), **_sharding(r), **_overlaps(r)}


def _stages(r: ExportRequest) -> Flags:
    pipeline, stages = r.plan.pipeline, r.stages
    if r.layout.pp == 1:
        return {}
    if len(set(stages)) > 1:
        return {"--pipeline-model-parallel-layout": stage_layout(stages)}
    return {"--num-virtual-stages-per-pipeline-rank": pipeline.vpp} if pipeline.vpp > 1 else {}


def stage_layout(stages: tuple[int, ...]) -> str:
    """Layers per virtual stage in Megatron-Core's letters: E embedding, t a layer, L loss, | between stages."""
    return "E" + "|".join("t" if count == 1 else f"t*{count}" for count in stages) + "L"


def _sharding(r: ExportRequest) -> Flags:
    layout = r.layout
    if layout.zero == 0 or layout.dp * layout.cp == 1:
        return {}
    out: Flags = {"--use-distributed-optimizer": True}
    if _fsdp(r):
        out |= {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": "optim_grads_params" if layout.zero == 3 else "optim_grads",
            "--ckpt-format": "fsdp_dtensor",
            "--no-gradient-accumulation-fusion": True,
        }
    instances = layout.dp * layout.cp // layout.shard_group
    if instances > 1:
        out["--num-distributed-optimizer-instances"] = instances
    return out


def _overlaps(r: ExportRequest) -> Flags:
    overlap, layout = r.plan.overlap, r.layout
    out: Flags = {}
    if overlap.dp and layout.dp * layout.cp > 1:
        out["--overlap-grad-reduce"] = True
        if layout.zero and overlap.gathers_ahead:
            out["--overlap-param-gather"] = True
    if overlap.tp and layout.tp > 1:
        out["--tp-comm-overlap"] = True
    if overlap.ep and r.plan.experts.ep > 1:
        out["--overlap-moe-expert-parallel-comm"] = True
    if layout.pp > 1 and r.plan.pipeline.vpp > 1 and not overlap.pp:
        out["--no-overlap-p2p-communication"] = True
    return out


def training(r: ExportRequest) -> Flags:
    """Batch, recompute, kernels, optimizer and data."""
    memory, train = r.plan.memory, r.train
    # FlashAttention has no latent widths and no sinks: Transformer Engine picks another fused kernel
    special = any(a.kv_lora_rank or a.sinks for a in r.model.attentions)
    fused = "auto" if special else "flash"
    out: Flags = {
        "--micro-batch-size": r.plan.pipeline.microbatch,
        "--global-batch-size": train.global_batch,
        "--seq-length": train.seq_len,
        "--train-iters": r.num_steps or "$TRAIN_ITERS",
        "--attention-backend": fused if memory.attention == "flash" else "unfused",
        "--attention-dropout": 0.1 if train.dropout else 0.0,
        "--hidden-dropout": 0.1 if train.dropout else 0.0,
        "--optimizer": OPTIMIZERS[train.optimizer],
        "--lr": "$LR",
    }
    if OPTIMIZERS[train.optimizer] == "sgd":
        out["--sgd-momentum"] = 0.9 if train.optimizer == "momentum" else 0.0
    if memory.loss == "fused":
        out |= {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "te"}
    if memory.recompute == "selective":
        out |= {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}
    elif memory.recompute == "full":
        out["--recompute-granularity"] = "full"
        out["--recompute-method"] = "block" if memory.layers else "uniform"
        out["--recompute-num-layers"] = memory.layers or 1
    return {
        **out,
        "--data-path": "$DATA_PATH",
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": "$TOKENIZER_MODEL",
    }


def _notes(r: ExportRequest) -> Iterator[str]:
    yield launch.note(r, f"bash {FILE}")
    several = {"HEAD_NODE": launch.HEAD_NODE} if r.num_nodes > 1 else {}
    for name, what in (_wanted(r) | several).items():
        yield f"fill in {name}: {what}"
    yield "learning-rate schedule, clipping, initialisation and checkpoints are Megatron-LM's defaults"
    if r.model.blocks[0].attention.rotary:
        yield "the base and scaling of rotary positions are the checkpoint's: --rotary-base, --use-rope-scaling"
    if megatron_model.padded_vocab(r) != r.model.vocab:
        yield f"{r.model.vocab} rows of the embedding do not divide by tp: padded to {megatron_model.padded_vocab(r)}"
    if r.has_experts:
        yield "how the router scores and balances is not part of a plan: --moe-router-load-balancing-type and others"
    if r.plan.experts.imbalance != 1:
        yield f"imbalance={r.plan.experts.imbalance:g} is an assumption about the router, there is nothing to set"
    if r.train.dropout:
        yield "a workload does not say the rate of dropout: 0.1, Megatron-LM's default"
    if _fsdp(r) and r.layout.tp * r.layout.cp > 1:
        yield "FSDP wants CUDA_DEVICE_MAX_CONNECTIONS unset, tensor and context parallelism want 1: left unset"
