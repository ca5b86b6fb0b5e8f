"""State off the device, as software that trains has it: none, or DeepSpeed's keys for optimizer and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.plan.facets.offload import DIVIDED, NVME, STATES, Offload

#: The device that DeepSpeed has for each tier.
DEVICES = {"host": "cpu", NVME: "nvme"}
#: Where drives are mounted, for who starts the job to fill in.
PATH = "<NVME_PATH>"


def stays(r: ExportRequest, reason: str) -> Iterator[Gap]:
    """All state stays on the device, and layers are gathered whole."""
    offload = r.plan.offload
    if offload.any:
        said = next(name for name in STATES if getattr(offload, name))
        yield _gap(r, said, reason, "leave offload= out", STATES)
    yield from whole(r)


def whole(r: ExportRequest) -> Iterator[Gap]:
    """Layers are gathered whole."""
    if r.plan.offload.tiles > 1:
        yield Gap(
            facet="offload.tiles",
            value=f"tiles={r.plan.offload.tiles}",
            reason="what gathers a layer in parts is a module of the model's own program",
            help="leave tiles= out",
            mend={"offload.tiles": 1},
        )


def by_deepspeed(r: ExportRequest) -> Iterator[Gap]:
    """Yield what a plan moves and DeepSpeed's keys do not: its optimizer goes with ZeRO, takes gradients with it, and
    parameters go with stage 3."""
    offload, zero = r.plan.offload, r.layout.zero
    yield from whole(r)
    if offload.update != Offload().update:
        yield Gap(
            facet="offload.update",
            value=f"update={offload.update}",
            reason="its files say nothing of an update beside the next step",
            help="leave update= out",
            mend={"offload.update": Offload().update},
        )
    if offload.activations:
        reason = "activations are moved by what checkpoints them, in the model's own program"
        yield _gap(r, "activations", reason, "leave activations out of offload=", ("activations",))
    if offload.params and zero < 3:
        yield _gap(r, "params", "parameters leave the device as shards of stage 3", "say fsdp", ("params",))
    if offload.optimizer and zero == 0:
        yield _gap(r, "optimizer", "its host updates shards of ZeRO's stages", "say zero1", ("optimizer", "grads"))
    if offload.optimizer and zero < 3 and (offload.optimizer == NVME or offload.optimizer_part < 1):
        reason = "drives and parts of the optimizer are of stage 3"
        yield _gap(r, "optimizer", reason, "say fsdp, or optimizer", ("optimizer", "grads"))
    if offload.grads and offload.grads != offload.optimizer:
        reason = "gradients go where the optimizer is"
        yield _gap(r, "grads", reason, "say the same of both", ("grads",))


def keys(r: ExportRequest) -> dict[str, Any]:
    """DeepSpeed's keys of its ``zero_optimization``."""
    offload, out = r.plan.offload, {}
    for name, tier in (("offload_optimizer", offload.optimizer), ("offload_param", offload.params)):
        if tier:
            path = {"nvme_path": PATH} if tier == NVME else {"pin_memory": True}
            out[name] = {"device": DEVICES[tier]} | path
    if offload.optimizer and offload.optimizer_part < 1:
        out["offload_optimizer"]["ratio"] = offload.optimizer_part
    return out


def notes(r: ExportRequest) -> Iterator[str]:
    """Yield what DeepSpeed does otherwise, or has to be told."""
    offload = r.plan.offload
    if NVME in (offload.optimizer, offload.params):
        yield f"fill in {PATH}: a folder on the nodes' drives"
    if offload.optimizer and not offload.grads:
        yield "gradients leave the device with the optimizer, pass by pass"
    if offload.any and offload.prefetch != Offload().prefetch:
        yield f"prefetch={offload.prefetch} is counted in layers, stage3_prefetch_bucket_size in parameters: left out"


def _gap(r: ExportRequest, what: str, reason: str, help: str, undone: tuple[str, ...]) -> Gap:
    offload = r.plan.offload
    tier = getattr(offload, what)
    mend: dict[str, object] = {f"offload.{name}": "" for name in undone}
    mend |= {f"offload.{name}_part": 1.0 for name in undone if name in DIVIDED}
    mend |= {"offload.update": Offload().update} if "optimizer" in undone else {}
    value = f"offload={what}" + (f":{tier}" if tier == NVME else "")
    return Gap(facet=f"offload.{what}", value=value, reason=reason, help=help, mend=mend)
