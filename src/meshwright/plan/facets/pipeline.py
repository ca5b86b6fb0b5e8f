"""Pipeline: the schedule, chunks per rank, how the batch is cut into microbatches and the layers into stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan.facet import (
    ALONE,
    KEYED,
    LAYER,
    NUMBERED,
    STRUCTURE,
    Facet,
    Field,
    Form,
    count,
    divisors,
    names,
    unrun,
    wrong,
)
from meshwright.plan.slices import kinds, meet_inside

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


#: Microbatches times layers of one step: far above what anybody runs, and what still takes seconds to simulate.
MAX_PASSES = 2_000_000
#: Sequences of a microbatch at most, in the default space: so many, and of short ones so many tokens; images of one.
MOST_MICROBATCH, MOST_TOKENS, MOST_IMAGES = 32, 65536, 512
#: Ordered anew for the times of every plan, so that no plan says much about another: allowed, not the default.
SEARCHED = ("zb-auto", "zb-1p", "zb-2p")


#: Where the passes of frozen layers go: before a step's own passes, into its waits, or there in parts of a microbatch.
BEFORE, WAITS, PARTS = "before", "waits", "parts"
#: Stages that may hold no layer: the first, of the embedding alone, and the last, of the head alone.
ENDS = 2


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline facet of a plan: the schedule, the chunks that a rank holds (``vpp``), sequences per microbatch; the
    first ``fill`` layers are frozen and run ahead of each step, in the waits of the step before. ``filling`` says where
    passes of frozen layers go, those that a model has of itself too: "" is the waits for ``fill`` and before the step
    for a model's own."""

    schedule: str = "1f1b"
    vpp: int = 1
    microbatch: int = 1
    fill: int = 0
    filling: str = ""


def _stages(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout, count = plan.layout, plan.num_stages
    if layout.stages:
        if len(layout.stages) != count:
            yield wrong(
                "P013",
                f"stages= names {len(layout.stages)} stages and pp{layout.pp} * vpp{plan.pipeline.vpp} makes {count}",
                f"layout.stages = {layout.stages}",
                f"give {count} numbers",
            )
        if sum(layout.stages) != model.num_layers:
            yield wrong(
                "P013",
                f"stages= hold {sum(layout.stages)} layers and {model.name} has {model.num_layers}",
                f"layout.stages = {layout.stages}",
                f"the numbers must add up to {model.num_layers}",
            )
        if not all(layout.stages[1:-1]):
            yield wrong(
                "P013",
                f"stage {layout.stages.index(0, 1)} of stages= holds no layer, and neither the embedding nor the head",
                f"layout.stages = {layout.stages}",
                "only the first stage (the embedding alone) and the last (the head alone) may be 0",
            )
    elif count > model.num_layers + ENDS:
        yield wrong(
            "P013",
            f"{count} stages for {model.num_layers} layers leave stages empty ({model.name})",
            f"pp{layout.pp} * vpp{plan.pipeline.vpp}",
            f"at most {model.num_layers + ENDS} stages: one for each layer, the embedding and the head",
        )


def _batch(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    per_wave = plan.trainers * plan.pipeline.microbatch
    which = f"dp{plan.layout.dp}" if plan.trainers == plan.layout.dp else f"{plan.trainers} replicas that train"
    if plan.layout.shares:
        for share in plan.layout.shares:
            yield from _microbatches(plan, model, share)
        return
    if train.global_batch % per_wave:
        lower = train.global_batch // per_wave * per_wave
        near = " or ".join(str(b) for b in (lower, lower + per_wave) if b)
        yield wrong(
            "P014",
            f"global batch {train.global_batch} is not a multiple of {which} * mb{plan.pipeline.microbatch} "
            f"= {per_wave}",
            f"pipeline.microbatch = {plan.pipeline.microbatch}",
            f"the batch is never changed for you: take batch={near}, or a dp and mb whose product divides it",
        )
        return
    yield from _microbatches(plan, model, train.global_batch // per_wave)


def _microbatches(plan: Plan, model: Model, microbatches: int) -> Iterator[Diagnostic]:
    """Yield the violations of a pipeline with so many microbatches: too many passes to simulate, and its schedule's."""
    if microbatches * model.num_layers > MAX_PASSES:
        yield wrong(
            "P024",
            f"{microbatches:,} microbatches through {model.num_layers} layers are more than a step is simulated for",
            f"pipeline.microbatch = {plan.pipeline.microbatch}",
            f"at most {MAX_PASSES // model.num_layers:,} microbatches: take a smaller batch, or a larger dp or mb",
        )
    family = schedules.get(plan.pipeline.schedule)
    yield from family.legality(plan.layout.pp, microbatches, plan.pipeline.vpp)


def _shares(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout, mb = plan.layout, plan.pipeline.microbatch
    if not layout.shares or layout.num_ranks != cluster.num_devices:
        return
    place = f"layout.shares = {layout.shares}"
    found = kinds(layout, cluster)
    if len(layout.shares) != len(found):
        are = "; ".join(f"{len(k.members)} on {' + '.join(dict.fromkeys(d.name for d in k.devices))}" for k in found)
        yield wrong(
            "P025",
            f"shares= names {len(layout.shares)} kinds of data-parallel slices and this layout has {len(found)}: {are}",
            place,
            f"give {len(found)} numbers" if len(found) > 1 else "drop shares: all slices are alike",
        )
        return
    sizes = plan.kinds.mbs if len(plan.kinds.mbs) == len(found) else (mb,) * len(found)
    total = sum(len(kind.members) * share * size for kind, share, size in zip(found, layout.shares, sizes))
    if total != train.global_batch or min(layout.shares) < 1:
        sums = " + ".join(f"{len(kind.members)} x {share}" for kind, share in zip(found, layout.shares))
        each = f"mbs={','.join(map(str, sizes))}" if plan.kinds.mbs else f"mb{mb}"
        yield wrong(
            "P025",
            f"({sums}) microbatches of {each} are {total} sequences and the global batch is {train.global_batch}",
            place,
            "every slice takes at least one microbatch, and together they take the batch",
        )
        return
    if layout.shards_gradients and len(set(layout.shares)) > 1:
        yield wrong(
            "P026",
            "sharded gradients are exchanged as often as there are microbatches, which is not as often on all slices",
            f"layout.zero = {layout.zero} with shares",
            "say zero1, or as many microbatches everywhere and their sizes with mbs=, or drop shares",
        )
    if not meet_inside(layout, plan.experts.ep * plan.etp, found):
        yield wrong(
            "P026",
            f"ep{plan.experts.ep} exchanges tokens between slices in every microbatch, and they do not run as many",
            f"experts.ep = {plan.experts.ep} with shares",
            "take an ep that stays inside slices of one kind, or drop shares",
        )


def _schedule(text: str) -> str:
    """The schedule of a name or an alias; with a MeshwrightError where there is none."""
    if text == "2bp":
        help = "2BP goes over a schedule: write 2bp:1f1b, or 2bp: and another schedule"
        raise MeshwrightError.one("P001", "'2bp' does not say over which schedule", help=help)
    return schedules.get(text).name


def _implied(plan: Plan, said: set[str], fresh: bool) -> Pipeline:
    """`vpp` of more than one under plain ``1f1b`` is the interleaved schedule, as every framework names it; a
    schedule with its own number of chunks brings it along."""
    pipeline = plan.pipeline
    if not fresh and "schedule" not in said:
        return pipeline
    if pipeline.vpp > 1 and ("schedule" not in said or pipeline.schedule == "1f1b"):
        pipeline = msgspec.structs.replace(pipeline, schedule="interleaved")
    if "vpp" not in said:
        pipeline = msgspec.structs.replace(pipeline, vpp=schedules.get(pipeline.schedule).default_vpp)
    return pipeline


def _sizes(train: Train) -> tuple[int, ...]:
    """Sizes of a microbatch in the default space. An image, or a short sequence, is little work for a device, so that
    more of them are together."""
    most = MOST_IMAGES if train.image else max(MOST_MICROBATCH, MOST_TOKENS // train.seq_len)
    return tuple(n for n in divisors(train.global_batch) if n <= most)


def _vpp_words(plan: Plan) -> list[str]:
    schedule, vpp = plan.pipeline.schedule, plan.pipeline.vpp
    return [f"vpp{vpp}"] if vpp != schedules.get(schedule).default_vpp or schedule == "interleaved" else []


def _schedule_words(plan: Plan) -> list[str]:
    return [plan.pipeline.schedule] if plan.pipeline.schedule != "1f1b" or plan.layout.pp > 1 else []


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Yield what the executor does not do with the words of this facet."""
    if plan.pipeline.fill and not model.frozen:
        why = "layers of text that are frozen are priced and not run in the waits of a pipeline"
        message = f"fill_layers={plan.pipeline.fill}: {why}"
        yield unrun("P033", message, plan, "pipeline", f"fill = {plan.pipeline.fill}", fill=0, filling="")


FIELDS = (
    Field(
        name="schedule",
        help="pipeline schedule",
        form=Form(read=_schedule, wanted="a schedule", open=True),
        spelled=ALONE,
        place=130,
        decides=(STRUCTURE,),
        domain=lambda model, cluster, train: tuple(n for n in schedules.families() if n not in SEARCHED),
        say=_schedule_words,
    ),
    Field(
        name="vpp",
        help="chunks per pipeline rank",
        form=count(),
        spelled=NUMBERED,
        place=30,
        decides=(STRUCTURE,),
        domain=lambda model, cluster, train: None,
        say=_vpp_words,
    ),
    Field(
        name="mb",
        attribute="microbatch",
        help="sequences per microbatch",
        form=count(),
        spelled=NUMBERED,
        place=80,
        decides=(LAYER,),
        size=True,
        domain=lambda model, cluster, train: _sizes(train),
        say=lambda plan: [f"mb{plan.pipeline.microbatch}"],
    ),
    Field(
        name="fill_layers",
        attribute="fill",
        help="frozen layers at the model's beginning that ranks run in their waits, ahead of the step that needs them",
        form=count(),
        spelled=KEYED,
        place=135,
        decides=(STRUCTURE,),
    ),
    Field(
        name="filling",
        attribute="filling",
        help="where passes of frozen layers go: before a step, into waits of the step before, or there in parts of a "
        "microbatch",
        form=names(BEFORE, WAITS, PARTS),
        spelled=KEYED,
        place=136,
        decides=(STRUCTURE,),
        domain=lambda model, cluster, train: (BEFORE, WAITS, PARTS) if model.frozen else ("",),
    ),
)
FACET = Facet(
    name="pipeline",
    help="the pipeline schedule, chunks per rank, sequences per microbatch",
    record=Pipeline,
    fields=FIELDS,
    rules=(_stages, _batch, _shares),
    unexecutable=_unexecutable,
    implied=_implied,
)
