"""TorchTitan's current form: a Python module with a function that returns its ``Trainer.Config``.

Written for TorchTitan 0.3.0 (Liang et al., 2024, arXiv 2410.06511), where ``--module`` names the module and
``--config`` the function; ``data/torchtitan.toml`` lists the fields of that version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from meshwright.export import launch
from meshwright.export import limits as shared
from meshwright.export import torchtitan_shared as titan
from meshwright.export.comments import commented
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import load

NAME, FILE, FUNCTION = "torchtitan", "meshwright_config.py", "planned"
#: Recompute -> the class that does it; its selective policy saves every second matrix product.
RECOMPUTE = {"full": "FullAC", "operators": "SelectiveAC"}
#: Compute precision -> its converters for linear layers and for grouped experts.
CONVERTERS = {
    "fp8": ("Float8LinearConverter", "Float8GroupedExpertsConverter"),
    "mxfp8": ("MXFP8LinearConverter", "MXFP8GroupedExpertsConverter"),
    "nvfp4": ("NVFP4LinearConverter", ""),
}
#: Which linear layers each converts: the head and the routers stay in bf16, as the plan's precisions mean.
CONVERTED = {
    "Float8LinearConverter": 'filter_fqns=["lm_head", "router"]',
    "MXFP8LinearConverter": 'fqns=["attention", "feed_forward", "shared_experts"]',
    "NVFP4LinearConverter": 'fqns=["layers"]',
}


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Yield what the request needs and TorchTitan 0.3.0 cannot express."""
    quantized = ("fp8", "mxfp8") if r.has_experts else tuple(CONVERTERS)
    yield from titan.limits(r, load(NAME), quantized, operators=True)
    yield from _context(r)
    yield from titan.whole_heads(r)
    yield from _expert_tensor(r)
    yield from shared.no_expert_overlap(r, "its layers run whole, one after the other")


def _context(r: ExportRequest) -> Iterator[Gap]:
    yield from shared.context(r, ("allgather",), "FlexAttention gathers keys and values over the context ranks")
    count = (r.layout.tp if r.layout.sp else 1) * (2 * r.layout.cp if r.layout.cp > 1 else 1)
    yield from shared.pieces(r, count, "every tensor-parallel rank takes one, every context-parallel rank two")


def _expert_tensor(r: ExportRequest) -> Iterator[Gap]:
    """Experts are split over the tensor-parallel ranks, or over expert-parallel ranks that include them."""
    ep, tp = r.plan.experts.ep, r.layout.tp
    wanted = 1 if ep > 1 else tp
    if r.has_experts and r.plan.etp != wanted:
        yield Gap(
            facet="experts.etp",
            value=f"etp{r.plan.etp} beside ep{ep}",
            reason="with expert parallelism every expert is whole, without it experts are split over all of tp",
            help=f"say etp{wanted}",
            mend={"experts.etp": wanted if ep > 1 else 0},
        )


def write(r: ExportRequest) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    text = "\n".join([*_head(r), *_imports(r), *_constants(r), *_function(r)]) + "\n"
    text, known = commented(text, load(NAME).comments), load(NAME).find(r.model)
    notes = [launch.note(r, _command(r, FILE.removesuffix(".py")))]
    notes.append(f"keep {FILE} where Python finds it: PYTHONPATH=.")
    notes += titan.notes(r, known)
    notes.append("CUDA graphs are off, as the plan was predicted; TorchTitan has them on where it can")
    if _compiled(r):
        notes.append("torch.compile is on, which quantized or overlapped matrix products need; predicted without it")
    if r.compute in CONVERTERS:
        notes.append(f"{r.compute} needs the torchao package")
    # the configuration is a module: Python looks for it beside the script
    command = 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"\n' + _command(r, '"${CONFIG%.py}"')
    start = launch.script(r, f"Starts {load(NAME).label}", FILE, command, {})
    return {FILE: text, **titan.extra_files(r), launch.FILE: start}, notes


def _command(r: ExportRequest, module: str) -> str:
    return f"{launch.torchrun(r)} -m torchtitan.train --module {module} --config {FUNCTION}"


def _head(r: ExportRequest) -> list[str]:
    return [f'"""Configuration for {load(NAME).label}, written by Meshwright.', "", r.name, '"""', ""]


def _compiled(r: ExportRequest) -> bool:
    return r.compute in CONVERTERS or _async_tp(r)


def _async_tp(r: ExportRequest) -> bool:
    return r.layout.tp > 1 and r.plan.overlap.tp


def _converters(r: ExportRequest) -> list[str]:
    linear, grouped = CONVERTERS.get(r.compute, ("", ""))
    return [name for name in (linear, grouped if r.has_experts else "") if name]


def _imports(r: ExportRequest) -> list[str]:
    known = load(NAME).find(r.model)
    optimizer = "default_adamw" if r.train.optimizer == "adamw" else "OptimizersContainer, ParamGroupConfig"
    config = ["ParallelismConfig", "TrainingConfig", *(["CompileConfig"] if _compiled(r) else [])]
    lines = ["from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss"]
    if r.train.optimizer == "adamw":
        lines.append(f"from torchtitan.components.optimizer import {optimizer}")
    else:
        lines.append(f"from torchtitan.components.optimizer.optimizer import {optimizer}")
    if _converters(r):
        lines.append(f"from torchtitan.components.quantization import {', '.join(sorted(_converters(r)))}")
    lines.append(f"from torchtitan.config import {', '.join(sorted(config))}")
    if r.plan.memory.recompute in RECOMPUTE:
        lines.append(f"from torchtitan.distributed.activation_checkpoint import {RECOMPUTE[r.plan.memory.recompute]}")
    return [
        *lines,
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{known.module} import model_registry",
        "from torchtitan.trainer import Trainer",
        "",
    ]


def _constants(r: ExportRequest) -> list[str]:
    lines = ['HF_ASSETS_PATH = "<HF_ASSETS_PATH>"', 'DATASET = "<DATASET>"']
    if r.layout.pp == 1:
        return [*lines, ""]
    return [
        *lines,
        f"LAYERS_PER_STAGE = {list(r.stages)}",
        "",
        "",
        "def modules_per_stage():",
        "    stages, first = [], 0",
        "    for count in LAYERS_PER_STAGE:",
        '        stages.append([f"layers.{layer}" for layer in range(first, first + count)])',
        "        first += count",
        '    stages[0].insert(0, "tok_embeddings")',
        '    stages[-1] += ["norm", "lm_head"]',
        "    return stages",
        "",
    ]


def _function(r: ExportRequest) -> list[str]:
    return [
        "",
        f"def {FUNCTION}() -> Trainer.Config:",
        *_model_spec(r),
        "    return Trainer.Config(",
        "        model_spec=model_spec,",
        "        hf_assets_path=HF_ASSETS_PATH,",
        "        dataloader=HuggingFaceTextDataLoader.Config(dataset=DATASET),",
        "        loss=ChunkedLossWrapper.Config(",
        "            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),",
        "        ),",
        *_optimizer(r),
        *_call("training", "TrainingConfig", {**titan.training(r), "disable_cuda_graphs": True}),
        *_call("parallelism", "ParallelismConfig", _parallelism(r)),
        f"        activation_checkpoint={_recompute(r)},",
        *_compile(r),
        "    )",
    ]


def _model_spec(r: ExportRequest) -> list[str]:
    known = load(NAME).find(r.model)
    arguments = [json.dumps(known.flavor)]
    if r.layout.cp > 1:
        arguments.append('attn_backend="flex"')
    converters = [
        f"{name}.Config({', '.join(filter(None, (CONVERTED.get(name), 'model_compile_enabled=True')))})"
        for name in _converters(r)
    ]
    if not converters:
        return [f"    model_spec = model_registry({', '.join(arguments)})"]
    rows = [f"            {converter}," for converter in converters]
    return ["    model_spec = model_registry(", f"        {', '.join(arguments)},", "        converters=[", *rows,
            "        ],", "    )"]  # fmt: skip


def _optimizer(r: ExportRequest) -> list[str]:
    if r.train.optimizer == "adamw":
        return ["        optimizer=default_adamw(),"]
    group = 'ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 8e-4})'
    return [f"        optimizer=OptimizersContainer.Config(param_groups=[{group}]),"]


def _parallelism(r: ExportRequest) -> dict[str, object]:
    out = titan.parallelism(r)
    if r.layout.tp > 1:
        out["enable_sequence_parallel"] = r.layout.sp
    if r.layout.pp > 1:
        out["module_fqns_per_model_part"] = _Name("modules_per_stage()")
    return out


def _recompute(r: ExportRequest) -> str:
    kind = RECOMPUTE.get(r.plan.memory.recompute)
    return f"{kind}.Config()" if kind else "None"


def _compile(r: ExportRequest) -> list[str]:
    if not _compiled(r):
        return []
    return _call("compile", "CompileConfig", {"enable": True, "enable_async_tensor_parallel": _async_tp(r)})


class _Name(str):
    """Python to be written as it is, not as a text."""


def _call(field: str, kind: str, values: dict[str, object]) -> list[str]:
    rows = [
        f"            {key}={value if isinstance(value, _Name) else _python(value)}," for key, value in values.items()
    ]
    return [f"        {field}={kind}(", *rows, "        ),"]


def _python(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
