"""Offload: the state of a rank that lies in its host's memory or on its drives, and is moved to the device for use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan.facet import EXCHANGE, KEYED, STRUCTURE, Facet, Field, Form, count, names, unrun, wrong
from meshwright.spec.workload import LAYERWISE
from meshwright.sync.fragments import PARAMETERS
from meshwright.sync.policy import read as read_sync

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


#: Kinds of state that may be moved, in the order in which they are said, and the tiers they may lie in.
STATES = ("params", "grads", "optimizer", "activations")
HOST, NVME = "host", "nvme"
#: Kinds of state of which a part may be moved alone: that of so many layers of every stage.
DIVIDED = ("optimizer", "activations")
#: The host's update runs beside the next step.
DELAYED = "delayed"
_ONE = re.compile(rf"({'|'.join(STATES)})(?::({HOST}|{NVME}))?(?:@(0?\.\d{{1,4}}|1(?:\.0*)?))?")


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """The offload facet of a plan: where each kind of state lies ("" on the device, ``host`` or ``nvme``).

    Attributes:
        params: parameters of each layer, fetched before the layer's passes (Rajbhandari et al. 2104.07857).
        grads: gradients, moved as soon as they are summed over replicas; with several microbatches they accumulate
            there.
        optimizer: moments and master copies; the host's processor does the update (Ren et al. 2101.06840).
        activations: tensors saved for the backward.
        optimizer_part, activations_part: share of each stage's layers whose state is moved, the first ones.
        prefetch: layers that are fetched ahead of their use.
        tiles: parts in which a layer's sharded parameters are gathered and used, one after the other, and its gradients
            are scattered (memory-centric tiling, Rajbhandari et al. 2104.07857, section 5.1.3).
        update: the host's update is waited for (``now``), or runs beside the next step, whose gradients are then of
            parameters one update older (``delayed``; Ren et al. 2101.06840, section 5.2).
    """

    params: str = ""
    grads: str = ""
    optimizer: str = ""
    activations: str = ""
    optimizer_part: float = 1.0
    activations_part: float = 1.0
    prefetch: int = 2
    tiles: int = 1
    update: str = "now"

    @property
    def any(self) -> bool:
        """Whether some state is not on the device."""
        return bool(self.params or self.grads or self.optimizer or self.activations)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers behind the device that are used, from the nearest on; what goes to drives passes the host."""
        used = {getattr(self, name) for name in STATES}
        return (HOST, NVME) if NVME in used else (HOST,) if HOST in used else ()

    def moved(self, what: str, layers: int) -> int:
        """Return how many of a stage's layers have this kind of state off the device, the first ones."""
        if not getattr(self, what):
            return 0
        part = getattr(self, f"{what}_part") if what in DIVIDED else 1.0
        return max(1, round(part * layers)) if layers else 0


def _read(text: str) -> str | None:
    if text in ("", "none"):
        return "none"
    said: dict[str, tuple[str, float]] = {}
    for word in re.split("[+,]", text):
        match = _ONE.fullmatch(word)
        if match is None or match[1] in said or (match[3] and match[1] not in DIVIDED):
            what = "is said twice" if match and match[1] in said else "is none of them"
            help = f"{' '.join(STATES)}, each with :host or :nvme, joined by +; optimizer@0.5 moves half of it"
            raise MeshwrightError.one("P002", f"offload={text}: {word!r} {what}", help=help)
        said[match[1]] = match[2] or HOST, float(match[3] or 1.0)
    return _written({name: tier for name, (tier, _) in said.items()}, {name: part for name, (_, part) in said.items()})


def _written(tiers: dict[str, str], parts: dict[str, float]) -> str:
    words = [
        name + (f":{NVME}" if tiers[name] == NVME else "") + (f"@{parts[name]:g}" if parts.get(name, 1.0) < 1 else "")
        for name in STATES
        if tiers.get(name)
    ]
    return "+".join(words) or "none"


def _stored(text: str) -> dict[str, Any]:
    out: dict[str, Any] = dict.fromkeys(STATES, "") | {f"{name}_part": 1.0 for name in DIVIDED}
    for word in text.split("+") if text != "none" else ():
        match = _ONE.fullmatch(word)
        if match is not None:
            out[match[1]] = match[2] or HOST
            if match[1] in DIVIDED:
                out[f"{match[1]}_part"] = float(match[3] or 1.0)
    return out


def _of(offload: Offload) -> str:
    return _written(
        {name: getattr(offload, name) for name in STATES},
        {name: getattr(offload, f"{name}_part") for name in DIVIDED},
    )


def _possible(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """P052 where state cannot be moved, or moving it changes nothing."""
    offload, layout, synchronous = plan.offload, plan.layout, cluster.islands[0].device.synchronous
    place = f"offload = {_of(offload)}"
    if offload.tiles > 1 and (layout.zero < 3 or layout.pp > 1):
        message = f"tiles={offload.tiles} gathers a layer in parts, and no layer is gathered for its pass alone"
        yield wrong("P052", message, f"offload.tiles = {offload.tiles}", "say zero3 and pp1, or drop tiles=")
    if offload.update == DELAYED and (not offload.optimizer or synchronous):
        what = "is by the devices themselves, which are processor cores" if synchronous else "is by the devices"
        message = f"update=delayed is about an update by the host beside the next step, and the update {what}"
        yield wrong("P052", message, "offload.update = delayed", "add offload=optimizer on GPUs, or drop update=")
    if not offload.any:
        if offload.prefetch != Offload().prefetch:
            place = f"offload.prefetch = {offload.prefetch}"
            yield wrong(
                "P052", "prefetch= says how far ahead moved state is fetched, and none is moved", place, "drop it"
            )
        return
    if synchronous and HOST in (offload.params, offload.grads, offload.optimizer, offload.activations):
        message = f"the memory of {cluster.islands[0].device.name} is the host's: nothing is moved there"
        yield wrong("P052", message, place, "move to drives, such as optimizer:nvme")
    policy = read_sync(plan.sync.policy)
    if not policy.plain or policy.rule.forwards or policy.stepped:
        message = f"state stays on the device where replicas are kept together by sync={plan.sync.policy}"
        yield wrong("P052", message, place, "drop sync=, or offload=")
    elif PARAMETERS in policy.fragments and (offload.optimizer or offload.params):
        message = f"sync={plan.sync.policy} averages parameters on the device, where offload={_of(offload)} keeps none"
        yield wrong("P052", message, place, "drop sync=, or move activations alone")
    if offload.grads and not offload.optimizer:
        message = "gradients in the host's memory are for an update there, and the optimizer is on the device"
        yield wrong("P052", message, place, "add optimizer to offload=")
    replicas = layout.dp * layout.cp
    if offload.grads and replicas > 1 and layout.zero < 2:
        message = (
            f"gradients move once they are scattered, and zero{layout.zero} sums them whole over {replicas} replicas"
        )
        yield wrong("P052", message, place, "say zero2 or zero3")
    if offload.grads and layout.zero == 3 and layout.pp > 1 and not plan.overlap.dp:
        message = "gradients leave as they are summed: without dp in overlap= a stage's are, after its backward"
        yield wrong("P052", message, place, "say overlap=dp, or leave grads out of offload=")
    if offload.params and replicas > 1 and layout.zero in (1, 2):
        message = f"zero{layout.zero} gathers updated parameters on the device, where offload=params keeps none"
        yield wrong("P052", message, place, "say zero3, of which each rank fetches its shard, or zero0")
    if offload.optimizer and train.optimizer in LAYERWISE:
        message = f"{train.optimizer} goes by norms of whole matrices, which the device takes"
        yield wrong("P052", message, place, "optimizer=adamw, or no offload=optimizer")
    if offload.optimizer and (train.clusters or train.grow or train.align):
        message = "moments of several kinds of data, and batches that grow, are kept on the device"
        yield wrong("P052", message, place, "drop offload=optimizer, or those words of the workload")
    if offload.activations and schedules.get(plan.pipeline.schedule).splits_backward:
        message = f"{plan.pipeline.schedule} splits the backward, and moved activations are freed by it whole"
        yield wrong("P052", message, place, "another schedule, or no offload=activations")


def _has_tier(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """P053 for a tier that the nodes do not have."""
    if NVME not in plan.offload.tiers:
        return
    for island in cluster.islands:
        node = island.node
        lacks = [
            what for what, value in (("drives", node.nvme_bytes), ("their read rate", node.nvme_gb_s)) if not value
        ]
        if lacks:
            message = f"the nodes of {island.name} have no {' and no '.join(lacks)}"
            help = "say them behind the cluster, such as nvme=28tb@25/20, or move to the host alone"
            yield wrong("P053", message, f"offload = {_of(plan.offload)}", help)


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    offload = plan.offload
    for name in STATES:
        tier = getattr(offload, name)
        if tier and name in ("params", "grads"):
            message = f"{name} off the device are priced and not run"
            yield unrun("P033", message, plan, "offload", f"{name} = {tier}", **{name: ""})
    if offload.optimizer == HOST and plan.layout.zero == 3:
        message = "shards of parameters that the host updates are priced and not run under zero3"
        yield unrun("P033", message, plan, "offload", f"optimizer = {HOST}", optimizer="")
    if offload.tiles > 1:
        message = "layers gathered in parts are priced and not run"
        yield unrun("P033", message, plan, "offload", f"tiles = {offload.tiles}", tiles=1)
    if offload.update == DELAYED:
        message = "an update beside the next step is priced and not run"
        yield unrun("P033", message, plan, "offload", "update = delayed", update="now")
    policy = plan.precision
    if offload.optimizer == NVME and (policy.compute or train.dtype) != "fp32" and policy.compute != "float64":
        message = "masters of 16-bit parameters stay in memory while moments lie on drives: priced and not run"
        yield unrun("P033", message, plan, "offload", f"optimizer = {offload.optimizer}", optimizer="")


FIELDS = (
    Field(
        name="offload",
        attribute=(*STATES, *(f"{name}_part" for name in DIVIDED)),
        help="state that lies in the host's memory or on drives",
        form=Form(
            read=_read,
            wanted=f"some of {', '.join(STATES)}, each with :{HOST} or :{NVME}, joined by +",
            whole=True,
        ),
        spelled=KEYED,
        place=320,
        decides=(STRUCTURE, EXCHANGE),
        stored=_stored,
        of=_of,
    ),
    Field(
        name="prefetch",
        help="layers fetched ahead of their use, of state that lies off the device",
        form=count(1, 64),
        spelled=KEYED,
        place=321,
        decides=(STRUCTURE, EXCHANGE),
        useful=lambda plan: plan.offload.any,
    ),
    Field(
        name="tiles",
        help="parts in which a layer's sharded parameters are gathered and used",
        form=count(1, 4096),
        spelled=KEYED,
        place=322,
        decides=(EXCHANGE,),
        useful=lambda plan: plan.layout.zero == 3,
    ),
    Field(
        name="update",
        help="whether the host's update is waited for, or runs beside the next step",
        form=names("now", DELAYED),
        spelled=KEYED,
        place=323,
        decides=(STRUCTURE, EXCHANGE),
        useful=lambda plan: bool(plan.offload.optimizer),
    ),
)
FACET = Facet(
    name="offload",
    help="state of a rank that lies in its host's memory or on drives",
    record=Offload,
    fields=FIELDS,
    rules=(_possible, _has_tier),
    unexecutable=_unexecutable,
)
