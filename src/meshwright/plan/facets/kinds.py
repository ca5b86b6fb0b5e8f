"""Kinds of devices: sizes that replicas on each of them have of their own, besides how many microbatches they run.

Data-parallel slices on the same devices in the same order are one kind (``plan/slices.py``). A kind may take more or
fewer sequences at a time, and hold a larger or smaller part of the state that ZeRO shards: the first goes by what its
devices have room for while they compute, the second by what is left, and ``shares=`` by how fast they are (Cephalo, Guo
et al., 2024, arXiv 2411.01075). A kind that is slower or has less memory may compute in fewer bits than the others
(QSync, Zhao et al., 2024, arXiv 2407.02327).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import lowered
from meshwright.plan.facet import (
    BALANCED,
    EVEN,
    EXCHANGE,
    LAYER,
    STRUCTURE,
    Facet,
    Form,
    counts,
    uneven,
    unrun,
    wrong,
)
from meshwright.plan.facets.precision import EXECUTED
from meshwright.plan.slices import kinds
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.sync.record import USUAL

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


class Kinds(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that each kind of data-parallel slices has of its own, in the order of ``shares=``; () where all are alike.

    ``mbs`` are sequences of a microbatch. ``hold`` are relative sizes of the shard of ZeRO's state on every rank: under
    ``hold=3,1`` a rank of the first kind holds three times what one of the second does. ``dtypes`` are the precisions
    of matrix products; gradients, masters and moments are those of the plan everywhere. ``lowered`` are operators in
    fewer bits than the rest (``plan/lowered.py``).
    """

    mbs: tuple[int, ...] = ()
    hold: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether kinds differ in any of it."""
        return bool(self.mbs or self.hold or self.dtypes or self.lowered)

    @property
    def computed(self) -> bool:
        """Whether passes and state of kinds differ, besides how much of the state each holds."""
        return bool(self.mbs or self.dtypes or self.lowered)


def _number(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield the violations of numbers that are not one for each kind of slices."""
    layout, own = plan.layout, plan.kinds
    if not own.any or layout.num_ranks != cluster.num_devices:
        return
    found = kinds(layout, cluster)
    are = "; ".join(f"{len(k.members)} on {' + '.join(dict.fromkeys(d.name for d in k.devices))}" for k in found)
    for word in ("mbs", "hold", "dtypes", "lowered"):
        values = getattr(own, word)
        if values and len(values) != len(found):
            yield wrong(
                "P025",
                f"{word}= names {len(values)} kinds of data-parallel slices and this layout has {len(found)}: {are}",
                f"kinds.{word} = {values}",
                f"give {len(found)} values" if len(found) > 1 else f"drop {word}: all slices are alike",
            )


def _mbs(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    sizes, place = plan.kinds.mbs, f"kinds.mbs = {plan.kinds.mbs}"
    if not sizes:
        return
    if not plan.layout.shares:
        numbers = ",".join("4" for _ in sizes)
        help = f"say how many microbatches each kind runs, such as shares={numbers}"
        yield wrong("P026", "microbatches of unequal size need their number for each kind", place, help)
    if max(sizes) != plan.pipeline.microbatch:
        message = f"the largest microbatch of mbs= has {max(sizes)} sequences and mb says {plan.pipeline.microbatch}"
        yield wrong("P026", message, place, f"say mb{max(sizes)}")
    if train.lengths is not None:
        help = "drop mbs, or say one length"
        yield wrong("P026", "rows of drawn documents have as many sequences on every replica", place, help)


def _hold(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout, place = plan.layout, f"kinds.hold = {plan.kinds.hold}"
    if not plan.kinds.hold:
        return
    if not layout.zero or layout.dp * layout.cp == 1:
        what = "nothing is sharded" if not layout.zero else "one rank holds all state"
        yield wrong("P026", f"hold= says who holds how much of sharded state, and {what}", place, "say zero1 or fsdp")
    elif layout.shard:
        message = f"hold= shares one copy of the state out over all replicas, and shard{layout.shard} makes several"
        yield wrong("P026", message, place, "drop shard, or say fsdp in place of hsdp")
    if model.mixtures:
        yield wrong("P026", "experts are sharded over ranks of their own, evenly", place, "drop hold")
    if plan.sync.policy != USUAL:
        message = f"shards under sync={plan.sync.policy} are of equal size"
        yield wrong("P026", message, place, "drop sync, or drop hold")
    if not any(plan.kinds.hold):
        yield wrong("P026", "no kind of slices holds any of the sharded state", place, "give one kind more than 0")


def _dtypes(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    said, place = plan.kinds.dtypes, f"kinds.dtypes = {plan.kinds.dtypes}"
    if not said:
        return
    if plan.layout.zero:
        message = "sharded state is gathered in one precision, and replicas compute in several"
        yield wrong("P026", message, place, "drop zero, fsdp or shard, or say one precision")
    if plan.precision.compute:
        message = f"the plan computes in {plan.precision.compute}, and dtypes= says in what each kind does"
        yield wrong("P026", message, place, f"drop {plan.precision.compute}, or dtypes")
    if (plan.precision.grads, plan.precision.master) != ("fp32", "fp32"):
        message = "replicas of several precisions update alike from fp32 gradients and masters alone"
        yield wrong("P026", message, place, "drop grads= and master=, which are fp32")
    if train.lora is not None or plan.precision.params != "bf16":
        yield wrong("P026", "a stored base has one precision on all replicas", place, "drop dtypes")


def _lowered(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    said, place, dtype = (
        plan.kinds.lowered,
        f"kinds.lowered = {plan.kinds.lowered}",
        plan.precision.compute or train.dtype,
    )
    if not said:
        return
    last = max((last for one in map(lowered.read, said) if one for _, _, last in one.some or ()), default=0)
    for bad, message, help in (
        (dtype != "fp32", f"lowered= has fewer bits than fp32, and the plan computes in {dtype}", "say dtype=fp32"),
        (bool(plan.kinds.dtypes), "dtypes= has all products of a kind in other bits already", "drop dtypes"),
        (plan.layout.tp > 1, "exchanges of tensor parallelism are of one type", "say tp1"),
        (train.lora is not None, "a frozen base is multiplied as it is stored", "drop lowered"),
        (plan.kernels.compile, "compiled layers are of one type", "drop compile"),
        (plan.several, "pools have no kinds of slices in common", "drop lowered"),
        (not lowered.has_operators(model), f"{model.name} has layers of other operators", "drop lowered"),
        (last >= model.num_layers, f"{model.name} has no layer {last}, but {model.num_layers}", "name its layers"),
    ):
        if bad:
            yield wrong("P062", message, place, help)


def _beside(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    if plan.kinds.any and plan.offload.any:
        message = "state off the devices is worked out for slices that are alike"
        yield wrong("P026", message, "offload with kinds", "drop offload, or drop mbs, hold and dtypes")


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    if plan.kinds.hold and plan.layout.gathers_again:
        message = "uneven shards of parameters are priced and not run: torch's fully_shard cuts rows evenly"
        yield unrun("P033", message, plan, "layout", f"zero = {plan.layout.zero} with hold", zero=2)

    for said in filter(None, map(lowered.read, plan.kinds.lowered)):
        if said.dtype not in EXECUTED:
            message = f"{said.dtype} needs loss scaling: it is predicted, not trained, on any of the replicas"
            yield unrun("P032", message, plan, "kinds", f"lowered = {plan.kinds.lowered}", lowered=())
        elif said.file:
            message = f"which operators are lowered is left to a prediction, by {said.file}"
            help = "meshwright predict with this plan prints it with the operators that it chose"
            yield wrong("P062", message, f"kinds.lowered = {plan.kinds.lowered}", help)
    for dtype in plan.kinds.dtypes:
        if dtype not in EXECUTED:
            message = f"{dtype} is predicted, not trained, on any of the replicas"
            yield unrun("P032", message, plan, "kinds", f"dtypes = {plan.kinds.dtypes}", dtypes=())
            return


def _read(text: str) -> tuple[str, ...] | None:
    values = tuple(text.split(","))
    return values if all(value in DTYPE_BYTES for value in values) else None


def _read_lowered(text: str) -> tuple[str, ...] | None:
    values = tuple(text.split(","))
    try:
        for value in values:
            lowered.read(value)
    except ValueError as error:
        message = f"lowered={text}: {error}"
        help = "say none, a precision, or operators for each kind of slice: lowered=none,bf16:up@0-11+down@3"
        raise MeshwrightError.one("P062", message, place=f"lowered={text}", help=help) from None
    return values


def _differ(model: Model, cluster: Cluster, train: Train) -> tuple[str, ...]:
    """Even, and where devices have unequal memory balanced as well."""
    alike = len({i.device.memory_bytes for i in cluster.islands}) == 1
    return (EVEN,) if alike or model.mixtures else (EVEN, BALANCED)


FIELDS = (
    uneven(
        name="mbs",
        help="sequences per microbatch on each kind of slice, on unequal islands: as mb, or numbers",
        form=counts("sequences per kind of slice such as 4,1"),
        place=192,
        decides=(LAYER,),
    ),
    uneven(
        name="hold",
        help="size of the shard of state on each kind of slice: even, balanced by assign/level.py, or numbers",
        form=counts("relative sizes per kind of slice such as 3,1", least=0),
        place=194,
        decides=(STRUCTURE, EXCHANGE),
        seen={STRUCTURE: lambda plan: ()},
        domain=_differ,
        balanced=True,
    ),
    uneven(
        name="dtypes",
        help="precision of the matrix products on each kind of slice: one, or several",
        form=Form(
            read=_read,
            write=",".join,
            wanted=f"a precision for each kind of slice such as fp32,bf16, of {', '.join(DTYPE_BYTES)}",
            whole=True,
            kind=str | tuple[str, ...],
        ),
        place=196,
        decides=(LAYER, EXCHANGE),
    ),
    uneven(
        name="lowered",
        help="operators in fewer bits than the rest on each kind of slice: none, or some of some layers",
        form=Form(
            read=_read_lowered,
            write=",".join,
            wanted="what each kind of slice lowers such as none,bf16:up@0-11+down@3",
            whole=True,
            kind=str | tuple[str, ...],
        ),
        place=198,
        decides=(STRUCTURE, LAYER),
    ),
)
FACET = Facet(
    name="kinds",
    help="what replicas on each kind of devices have of their own",
    record=Kinds,
    fields=FIELDS,
    rules=(_number, _mbs, _hold, _dtypes, _lowered, _beside),
    unexecutable=_unexecutable,
)
