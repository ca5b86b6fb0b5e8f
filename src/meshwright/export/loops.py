"""Loops of a user's own: limits, pieces of Python and notes that the targets for them share.

Such a target is a module that a training script imports: it wraps the script's own model and optimizer, and says how
replicas are kept together. Everything else of a step is the script's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from meshwright.export import limits as shared
from meshwright.export import offloads
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import load

SCRIPT = "your training script, with the model, the optimizer and the data"
#: Precisions of matrix products that torch.autocast has, or needs none for.
PRODUCTS = ("bf16", "fp16", "fp32")


def limits(r: ExportRequest) -> Iterator[Gap]:
    """Yield what a request needs and no wrapper of a user's own model and optimizer can express, but how replicas are
    kept together and sharded."""
    yield from shared.nodes(r)
    yield from shared.equal_shares(r)
    yield from shared.one_copy(r)
    yield from offloads.stays(r, "it wraps a model whose state is on its device")
    yield from shared.own_steps(r)
    yield from _split(r)
    yield from shared.one_stage(r) if r.layout.pp == 1 else ()
    yield from _experts(r)
    yield from shared.no_partial_recompute(r, "the script checkpoints whole layers")
    yield from shared.loss_kernels(r, ("eager",), "the loss is computed by your model's own code")
    yield from shared.always_overlapped(r)
    yield from _precision(r)


def _split(r: ExportRequest) -> Iterator[Gap]:
    """Axes that split a model or its sequences: they are the script's own business."""
    plain = {"layout.dp": r.world, "layout.stages": (), "pipeline.schedule": "1f1b", "pipeline.vpp": 1}
    for axis, what in (("tp", "matrices"), ("pp", "layers"), ("cp", "sequences")):
        if (size := getattr(r.layout, axis)) > 1:
            yield Gap(
                facet=f"layout.{axis}",
                value=f"{axis}{size}",
                reason=f"it wraps a model whose {what} are whole",
                help=f"say {axis}1 dp{r.world}",
                mend={f"layout.{axis}": 1, **plain},
            )


def _experts(r: ExportRequest) -> Iterator[Gap]:
    ep, etp = r.plan.experts.ep, r.plan.etp
    if r.has_experts and (ep > 1 or etp > 1):
        yield Gap(
            facet="experts.ep" if ep > 1 else "experts.etp",
            value=f"ep{ep}" if ep > 1 else f"etp{etp}",
            reason="every replica has all experts, each of them whole",
            help="say ep1 etp1",
            mend={"experts.ep": 1, "experts.etp": 0},
        )


def _precision(r: ExportRequest) -> Iterator[Gap]:
    p = r.plan.precision
    yield from shared.multiplies(r, PRODUCTS, "torch.autocast multiplies in bf16 or fp16, and without it fp32")
    stored = {p.grads, p.moments} | ({p.master} if r.compute != "fp32" else set())
    if stored != {"fp32"}:
        yield Gap(
            facet="precision",
            value=f"grads={p.grads} master={p.master} moments={p.moments}",
            reason="under torch.autocast parameters, gradients and moments are fp32",
            help="say grads=fp32 master=fp32 moments=fp32",
            mend={"precision.grads": "fp32", "precision.master": "fp32", "precision.moments": "fp32"},
        )


def whole(r: ExportRequest, reason: str) -> Iterator[Gap]:
    """Yield the gap of sharded state, for a target whose ranks hold all of it."""
    if r.layout.zero:
        yield Gap(
            facet="layout.zero",
            value=f"zero{r.layout.zero}",
            reason=reason,
            help="say zero0",
            mend={"layout.zero": 0, "layout.shard": 0},
        )


def head(r: ExportRequest, name: str, use: Iterable[str]) -> list[str]:
    """The docstring of the module: who reads it, what the question was, and the lines that use it."""
    title = f'"""How replicas are kept together, for {load(name).label}, written by Meshwright.'
    return [title, "", r.name, "", *(f">>> {line}" for line in use), '"""', ""]


def call(before: str, arguments: Mapping[str, object], after: str = ")") -> list[str]:
    """A call in a function's body, an argument a line; texts are Python as it stands."""
    rows = [f"        {key}={value if isinstance(value, str) else repr(value)}," for key, value in arguments.items()]
    return [f"    {before}(", *rows, f"    {after}"]


def checked(text: str) -> str:
    """`text`, which has to be Python.

    Raises:
        SyntaxError: where it is not.
    """
    ast.parse(text)
    return text


def notes(r: ExportRequest, *, cast: bool = True) -> Iterator[str]:
    """Yield what is the script's to do; `cast`: the types of products too."""
    yield f"fill in <SCRIPT>: {SCRIPT}"
    steps = f", {r.num_steps} steps" if r.num_steps else ""
    size = f"{r.num_microbatches} microbatches of {r.plan.pipeline.microbatch} {r.train.each} a step"
    yield f"in the script: {r.train.optimizer}, {size}{steps}"
    if cast and r.compute != "fp32":
        yield f"in the script: the model in fp32, and torch.autocast in {r.compute}"
    if r.compute == "fp16":
        yield "in the script: torch.amp.GradScaler"
    kernel = "flash" if r.plan.memory.attention == "flash" else "unfused"
    yield f"in the script: {kernel} attention"
    if r.plan.memory.recompute == "full":
        yield "in the script: torch.utils.checkpoint around every layer"
    if r.train.lora is not None:
        yield f"in the script: adapters of rank {r.train.lora.rank} on {'+'.join(r.train.lora.targets)}"
    if r.train.dropout or not r.train.causal or r.train.lengths is not None:
        yield f"in the script: what the workload says of dropout, masks and documents: {r.train.text()}"
