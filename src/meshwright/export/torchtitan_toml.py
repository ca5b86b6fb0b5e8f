"""TorchTitan's older form: the TOML file that ``--job.config_file`` reads.

Written for TorchTitan 0.2.2, the last release that reads one (Liang et al., 2024, arXiv 2410.06511);
``data/torchtitan-toml.toml`` lists the keys of its ``JobConfig``.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export import launch
from meshwright.export import limits as shared
from meshwright.export import torchtitan_shared as titan
from meshwright.export.comments import commented
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import load
from meshwright.spec.toml_text import dumps

NAME, FILE = "torchtitan-toml", "meshwright.toml"
#: How key-value shards travel: a ring is made of all-to-alls, a rotation each.
ROTATE = {"ring": "alltoall", "allgather": "allgather"}
RECOMPUTE = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "operators": {"mode": "selective", "selective_ac_option": "op"},
}
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}
KEPT_IN_BF16 = ["output", "router.gate"]
#: Compute precision -> converters, and the tables that they read.
QUANTIZED = {
    "fp8_row": ("float8", {"recipe_name": "rowwise"}, {}),
    "fp8": ("float8", {"recipe_name": "tensorwise"}, {}),
    "mxfp8": ("mx", {"recipe_name": "mxfp8_cublas"}, {"recipe_name": "mxfp8"}),
}


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Yield what the request needs and TorchTitan 0.2.2 cannot express."""
    yield from titan.limits(r, load(NAME), tuple(QUANTIZED), operators=True)
    yield from shared.context(r, tuple(ROTATE), "keys and values rotate or are gathered, heads stay where they are")
    pieces = 2 * r.layout.cp * r.layout.tp
    yield from shared.pieces(r, pieces, "every rank of tensor and of context parallelism takes two")
    yield from _tensor(r)
    yield from _expert_tensor(r)
    yield from _replicas(r)
    yield from _mixed_precision(r)
    if r.plan.pipeline.schedule != "dualpipev" or r.plan.memory.recompute != "none":
        yield from shared.no_expert_overlap(r, "only its DualPipeV without recompute overlaps it")


def _tensor(r: ExportRequest) -> Iterator[Gap]:
    if r.layout.tp > 1 and not r.layout.sp:
        yield Gap(
            facet="layout.sp",
            value="nosp",
            reason="sequence parallelism is part of its tensor parallelism",
            help="say sp",
            mend={"layout.sp": True},
        )
    yield from titan.whole_heads(r)


def _expert_tensor(r: ExportRequest) -> Iterator[Gap]:
    """Experts are split over the tensor-parallel ranks, or whole when expert parallelism takes those ranks too."""
    ep, etp, tp = r.plan.experts.ep, r.plan.etp, r.layout.tp
    if r.has_experts and etp not in ((1, tp) if ep > 1 else (tp,)):
        yield Gap(
            facet="experts.etp",
            value=f"etp{etp} beside tp{tp} ep{ep}",
            reason=f"etp is tp{' or 1' if ep > 1 else ' without expert parallelism'}",
            help=f"say etp{tp}",
            mend={"experts.etp": 0},
        )


def _replicas(r: ExportRequest) -> Iterator[Gap]:
    layout = r.layout
    if layout.zero == 0 and layout.dp > 1 and layout.cp == 1 and layout.tp * layout.pp > 1:
        yield Gap(
            facet="layout.zero",
            value=f"dp{layout.dp} without sharding beside tp{layout.tp} pp{layout.pp}",
            reason="its DDP goes with no other parallelism",
            help="say zero2 or fsdp",
            mend={"layout.zero": 2},
        )


def _mixed_precision(r: ExportRequest) -> Iterator[Gap]:
    layout = r.layout
    sharded = titan.data_parallel(r)[1] * layout.cp > 1
    alone = layout.dp * layout.cp == 1 and layout.tp * layout.pp > 1
    if alone and not sharded and r.compute != "fp32" and titan.stored_in(r) == "float32":
        yield Gap(
            facet="precision",
            value=f"{r.compute} with fp32 parameters on ranks that shard nothing",
            reason="mixed precision comes with FSDP, with DDP alone, or not at all",
            help="say grads=bf16 master=none moments=bf16",
            mend=titan.WHOLE_BF16,
        )


def write(r: ExportRequest) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    known = load(NAME).find(r.model)
    head = [f"# Configuration for {load(NAME).label}, written by Meshwright.", f"# {r.name}", ""]
    text = commented("\n".join(head) + dumps(_tables(r)) + _stage_modules(r), load(NAME).comments)
    command = f"{launch.torchrun(r)} -m torchtitan.train --job.config_file "
    notes = [launch.note(r, command + FILE), *titan.notes(r, known)]
    if r.plan.overlap.tp and r.layout.tp > 1:
        notes.append("torch.compile is on, which asynchronous tensor parallelism needs; predicted without it")
    if r.compute in QUANTIZED:
        notes.append(f"{r.compute} needs the torchao package and torch.compile, which is on; predicted without it")
    start = launch.script(r, f"Starts {load(NAME).label}", FILE, command + '"$CONFIG"', {})
    return {FILE: text, **titan.extra_files(r), launch.FILE: start}, notes


def _tables(r: ExportRequest) -> dict[str, object]:
    """All tables; ``[parallelism]`` comes last, so that the long list of modules can follow it."""
    known = load(NAME).find(r.model)
    model = {"name": known.module, "flavor": known.flavor, "hf_assets_path": "<HF_ASSETS_PATH>"}
    if r.compute in QUANTIZED:
        model["converters"] = _converters(r)
    compiled = r.compute in QUANTIZED or (r.plan.overlap.tp and r.layout.tp > 1)
    return {
        "model": model,
        "optimizer": {"name": OPTIMIZERS[r.train.optimizer]},
        "training": {"dataset": "<DATASET>", **titan.training(r)},
        "activation_checkpoint": RECOMPUTE[r.plan.memory.recompute],
        **({"compile": {"enable": True}} if compiled else {}),
        **({"quantize": _quantize(r)} if r.compute in QUANTIZED else {}),
        "parallelism": _parallelism(r),
    }


def _converters(r: ExportRequest) -> list[str]:
    kind = QUANTIZED[r.compute][0]
    return [f"quantize.linear.{kind}", *([f"quantize.grouped_mm.{kind}"] if r.has_experts else [])]


def _quantize(r: ExportRequest) -> dict[str, object]:
    kind, linear, grouped = QUANTIZED[r.compute]
    out: dict[str, object] = {"linear": {kind: {**linear, "filter_fqns": KEPT_IN_BF16}}}
    if r.has_experts:
        out["grouped_mm"] = {kind: {**grouped, "fqns": ["experts"]}}
    return out


def _parallelism(r: ExportRequest) -> dict[str, object]:
    out = titan.parallelism(r)
    if r.layout.tp > 1 and r.plan.overlap.tp:
        out["enable_async_tensor_parallel"] = True
    if r.layout.cp > 1:
        out["context_parallel_rotate_method"] = ROTATE[r.plan.sequence.algorithm]
    if r.plan.experts.ep > 1:
        out["expert_tensor_parallel_degree"] = r.plan.etp
    if r.layout.pp > 1 and out["pipeline_parallel_schedule"] == "DualPipeV":
        out["pipeline_parallel_expert_parallel_overlap"] = r.plan.overlap.ep and r.plan.experts.ep > 1
    return out


def _stage_modules(r: ExportRequest) -> str:
    """The modules of every virtual stage, a line each."""
    if r.layout.pp == 1:
        return ""
    rows = ["  [" + ", ".join(f'"{name}"' for name in part) + "]," for part in titan.modules(r, "output")]
    return "\n".join(["module_fqns_per_model_part = [", *rows, "]", ""])
