"""Limits that several targets share: axis order, pipelines, context parallelism, what a launcher can start."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from meshwright.export.gap import Gap, Limits
from meshwright.export.request import ExportRequest
from meshwright.plan import Experts
from meshwright.plan.facets.feedback import CHAIN
from meshwright.plan.facets.layout import DEFAULT_ORDER
from meshwright.plan.facets.passes import FIXED
from meshwright.plan.facets.sequence import PIECED, STATIC, SWAPPED
from meshwright.sync.record import USUAL

#: Words of a workload whose steps no other trainer takes.
OWN_STEPS = {
    "grow": "a batch that grows by the norm test",
    "align": "a learning rate for each part of the model",
    "adversarial": "text whose embeddings are moved by older weights",
    "clusters": "a momentum for each cluster of the data",
}
#: The schedules that mean the same as no pipeline at all when there is one stage: a microbatch after the other.
PLAIN = ("1f1b", "interleaved")


def nodes(r: ExportRequest) -> Iterator[Gap]:
    """A launcher starts the same number of processes on every node."""
    sizes = sorted({island.devices_per_node for island in r.cluster.islands})
    if len(sizes) > 1:
        yield Gap(
            facet="cluster",
            value=r.cluster.name,
            reason=f"its nodes have {' and '.join(map(str, sizes))} devices, and every node starts as many processes",
            help="name an island of nodes that are alike",
        )
    elif r.world > sizes[0] and r.world % sizes[0]:
        yield Gap(
            facet="layout.dp",
            value=f"{r.world} ranks",
            reason=f"they do not fill nodes of {sizes[0]} devices, and every node starts as many processes",
            help=f"use a multiple of {sizes[0]} ranks",
        )


def equal_shares(r: ExportRequest) -> Iterator[Gap]:
    """Every replica runs as many microbatches, as large, in one precision, and shards are of one size and scope."""
    if len(set(r.layout.shares)) > 1:
        yield Gap(
            facet="layout.shares",
            value=f"shares={','.join(map(str, r.layout.shares))}",
            reason="every data-parallel replica runs as many microbatches",
            help="drop shares",
            mend={"layout.shares": ()},
        )
    if r.layout.scopes:
        yield Gap(
            facet="layout.scopes",
            value=f"scopes={','.join(map(str, r.layout.scopes))}",
            reason="weights, gradients and optimizer states are sharded over the same ranks",
            help="drop scopes",
            mend={"layout.scopes": ()},
        )
    yield from _alike(r)


def one_copy(r: ExportRequest) -> Iterator[Gap]:
    """Backwards gather weights from all ranks that shard them."""
    if r.layout.hpz:
        yield Gap(
            facet="layout.hpz",
            value=f"hpz{r.layout.hpz}",
            reason="backwards gather weights from where forwards do",
            help="drop hpz",
            mend={"layout.hpz": 0},
        )


def _alike(r: ExportRequest) -> Iterator[Gap]:
    """Yield what kinds of replicas have of their own that differs from what the others have or the plan says."""
    own, usual = r.plan.kinds, r.plan.precision.compute or r.train.dtype
    each = r.train.global_batch // r.layout.dp
    rows = next((n for n in range(max(own.mbs, default=1), 1, -1) if each % n == 0), 1)
    even = {"layout.shares": (), "pipeline.microbatch": rows}
    for word, values, wanted, reason, besides in (
        ("mbs", own.mbs, own.mbs[:1], "microbatches are of one size on all replicas", even),
        ("hold", own.hold, own.hold[:1], "it shards state evenly", {}),
        ("lowered", own.lowered, ("none",), "all products of layers are of one precision", {}),
        ("dtypes", own.dtypes, (usual,), "all replicas compute in one precision", {}),
    ):
        if values and set(values) != set(wanted):
            yield Gap(
                facet=f"kinds.{word}",
                value=f"{word}={','.join(map(str, values))}",
                reason=reason,
                help=f"drop {word}",
                mend={f"kinds.{word}": (), **besides},
            )


def every_step(r: ExportRequest) -> Iterator[Gap]:
    """Replicas exchange gradients in every step."""
    if r.plan.sync.policy != USUAL:
        yield Gap(
            facet="sync.policy",
            value=f"sync={r.plan.sync.policy}",
            reason="its replicas exchange gradients in every step",
            help="drop sync",
            mend={"sync.policy": USUAL},
        )
    yield from own_steps(r)


def own_steps(r: ExportRequest) -> Iterator[Gap]:
    """Yield the gaps of a plan or a workload whose steps no other trainer takes."""
    for field, word, nothing in (("fill", "fill_layers", 0), ("filling", "filling", "")):
        if value := getattr(r.plan.pipeline, field):
            yield Gap(
                facet=f"pipeline.{field}",
                value=f"{word}={value}",
                reason="its pipelines have no frozen layers in their waits",
                help=f"drop {word}",
                mend={f"pipeline.{field}": nothing},
            )
    if r.plan.passes.policy != FIXED:
        yield Gap(
            facet="passes.policy",
            value=f"passes={r.plan.passes.policy}",
            reason="its stages are fixed ranks"
            if r.plan.passes.swarm is not None
            else "its experts are on fixed ranks",
            help="drop passes",
            mend={"passes.policy": FIXED},
        )
    if not r.plan.feedback.exact:
        yield Gap(
            facet="feedback.way",
            value=f"feedback={r.plan.feedback.way}",
            reason="its layers learn by gradients that come back from layer to layer",
            help="drop feedback",
            mend={"feedback.way": CHAIN},
        )
    for name, what in OWN_STEPS.items():
        if getattr(r.train, name):
            value = f"{name}={getattr(r.train, name):g}"
            yield Gap(facet=f"train.{name}", value=value, reason=f"{what} is meshwright run's", help=f"drop {name}=")


def order(r: ExportRequest, allowed: tuple[tuple[str, ...], ...] = (DEFAULT_ORDER,)) -> Iterator[Gap]:
    """The order of the axes on the devices; axes of one rank have no place."""
    placed = _placed(r, r.layout.order)
    if placed not in [_placed(r, known) for known in allowed]:
        yield Gap(
            facet="layout.order",
            value=f"order={'-'.join(r.layout.order)}",
            reason=f"its mesh is laid out as {' or '.join('-'.join(known) for known in allowed)} from the inside out",
            help=f"say order={'-'.join(allowed[0])}",
            mend={"layout.order": allowed[0]},
        )


def _placed(r: ExportRequest, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if getattr(r.layout, axis) > 1)


def no_pipeline(r: ExportRequest, reason: str) -> Iterator[Gap]:
    """Yield the gap of pp > 1 for a target without pipeline parallelism; its ranks are offered to data parallelism."""
    layout = r.layout
    plain = {"pipeline.schedule": "1f1b", "pipeline.vpp": 1}
    if layout.pp > 1:
        yield Gap(
            facet="layout.pp",
            value=f"pp{layout.pp}",
            reason=reason,
            help=f"pp1 dp{layout.dp * layout.pp}",
            mend={"layout.pp": 1, "layout.dp": layout.dp * layout.pp, "layout.stages": (), **plain},
        )
    else:
        yield from one_stage(r)


def one_stage(r: ExportRequest) -> Iterator[Gap]:
    """Yield the gap of a pipeline schedule on one stage: without a pipeline microbatches follow one another, and other
    schedules have other orders, and memory."""
    pipeline = r.plan.pipeline
    if r.layout.pp == 1 and (pipeline.schedule not in PLAIN or pipeline.vpp > 1):
        yield Gap(
            facet="pipeline.schedule",
            value=f"{pipeline.schedule} vpp{pipeline.vpp} on one stage",
            reason="without a pipeline it runs each microbatch forward and backward before the next",
            help="say 1f1b vpp1",
            mend={"pipeline.schedule": "1f1b", "pipeline.vpp": 1, "layout.stages": ()},
        )


def shard_contains_context(r: ExportRequest) -> Iterator[Gap]:
    """FSDP2 shards over the context ranks first: their copies of a parameter are never whole."""
    layout = r.layout
    if layout.cp == 1:
        return
    whole = layout.dp * layout.cp
    if layout.zero == 0:
        yield Gap(
            facet="layout.zero",
            value=f"whole parameters beside cp{layout.cp}",
            reason="parameters are always sharded over the context-parallel ranks",
            help="say zero2 or fsdp" if layout.dp == 1 else f"say hsdp{layout.cp}, or fsdp for all {whole} ranks",
            mend={"layout.zero": 2, "layout.shard": layout.cp if layout.dp > 1 else 0},
        )
    elif layout.shard_group % layout.cp:
        least = -(-layout.shard_group // layout.cp) * layout.cp
        yield Gap(
            facet="layout.shard",
            value=f"shards of {layout.shard_group} beside cp{layout.cp}",
            reason="a sharding group holds whole context-parallel groups",
            help=f"take a multiple of {layout.cp}",
            mend={"layout.shard": least if whole % least == 0 and least < whole else 0},
        )


def optimizer_shards_alone(r: ExportRequest, reason: str) -> Iterator[Gap]:
    """ZeRO-1 where optimizer state is only ever sharded together with gradients."""
    if r.layout.zero == 1 and r.layout.dp * r.layout.cp > 1:
        yield Gap(facet="layout.zero", value="zero1", reason=reason, help="say zero2", mend={"layout.zero": 2})


def in_rounds(r: ExportRequest) -> bool:
    """Whether ZeRO-2 would scatter gradients more than once a step: several stages a rank."""
    return r.layout.pp > 1 and r.plan.pipeline.vpp > 1


def pieces(r: ExportRequest, count: int, why: str) -> Iterator[Gap]:
    """The sequence must divide into `count` pieces."""
    if r.train.seq_len % count:
        yield Gap(
            facet="layout.cp",
            value=f"a sequence of {r.train.seq_len} tokens in {count} pieces",
            reason=why,
            help=f"take a sequence that is a multiple of {count}",
        )


def context(r: ExportRequest, allowed: tuple[str, ...], reason: str) -> Iterator[Gap]:
    """Yield the gap of a context-parallel exchange that the target does not have."""
    algorithm = r.plan.sequence.algorithm
    if r.layout.cp > 1 and algorithm not in allowed:
        yield Gap(
            facet="sequence.algorithm",
            value=algorithm,
            reason=reason,
            help=f"say {' or '.join(allowed)}",
            mend={"sequence.algorithm": allowed[0]},
        )
    yield from one_exchange(r)


def one_exchange(r: ExportRequest) -> Iterator[Gap]:
    """No swap of heads inside another exchange."""
    if r.plan.sequence.ulysses > 1:
        yield Gap(
            facet="sequence.ulysses",
            value=f"heads swapped among {r.plan.sequence.ulysses} ranks inside the {r.plan.sequence.algorithm}",
            reason="what is written names one exchange over all context-parallel ranks",
            help="leave the number out",
            mend={"sequence.ulysses": 1},
        )
    if r.plan.sequence.scans in PIECED and r.layout.cp > 1:
        yield Gap(
            facet="sequence.scans",
            value=f"scans={r.plan.sequence.scans}",
            reason="layers with a state swap heads for tokens; meshwright run has the other ways",
            help="leave scans out",
            mend={"sequence.scans": SWAPPED},
        )
    if r.plan.sequence.groups != STATIC:
        yield Gap(
            facet="sequence.groups",
            value=f"groups={r.plan.sequence.groups}",
            reason="its context-parallel ranks are the same for every batch",
            help="leave groups out",
            mend={"sequence.groups": STATIC, "sequence.long": 1},
        )


def always_overlapped(r: ExportRequest) -> Iterator[Gap]:
    """Yield the gap of a plan without overlap=dp, for a target that always overlaps gradients' exchange with the
    backward."""
    if r.layout.dp * r.layout.cp > 1 and not r.plan.overlap.dp:
        yield Gap(
            facet="overlap.dp",
            value="gradients exchanged after the backward",
            reason="the exchange is always overlapped with it",
            help="say overlap=dp",
            mend={"overlap.dp": True},
        )


def no_expert_overlap(r: ExportRequest, reason: str) -> Iterator[Gap]:
    """Yield the gap of overlap=ep, for a target that cannot overlap the experts' exchange; `reason` says why."""
    if r.plan.experts.ep > 1 and r.plan.overlap.ep:
        yield Gap(
            facet="overlap.ep",
            value="experts' exchange overlapped with other microbatches",
            reason=reason,
            help="leave ep out of overlap=",
            mend={"overlap.ep": False},
        )


def own_experts(r: ExportRequest) -> Iterator[Gap]:
    """Yield the gaps of words of experts, and of recomputation and models, that the executor alone has."""
    experts, usual = r.plan.experts, Experts()
    for name in ("placement", "capacity", "hot", "hot_by", "portions", "duplicates", "ep_inner"):
        value = getattr(experts, name)
        if value != getattr(usual, name):
            reason = "there is nothing to set for it; meshwright run does it"
            mend = {f"experts.{name}": getattr(usual, name)}
            yield Gap(facet=f"experts.{name}", value=f"{name}={value}", reason=reason, help=f"drop {name}=", mend=mend)
    if r.plan.overlap.yield_mb:
        value, reason = f"yield_mb={r.plan.overlap.yield_mb}", "there is nothing to set for it; meshwright run does it"
        mend = {"overlap.yield_mb": 0}
        yield Gap(facet="overlap.yield_mb", value=value, reason=reason, help="drop yield_mb=", mend=mend)
    if r.model.mixtures and r.layout.tp > 1 and not r.layout.sp:
        value, reason = "experts under tensor parallelism without sp", "tokens come to experts from sequence shards"
        yield Gap(facet="layout.sp", value=value, reason=reason, help="drop nosp", mend={"layout.sp": True})
    if r.plan.memory.brought == "kept":
        reason, mend = "recomputed layers exchange again", {"memory.brought": "again"}
        yield Gap(facet="memory.brought", value="brought=kept", reason=reason, help="drop brought=", mend=mend)
    for name, word in (("portions", "recompute_portions"), ("loss_portions", "loss_portions")):
        value = getattr(r.plan.memory, name)
        if value > 1:
            reason, mend = "it computes whole sequences; meshwright run does it", {f"memory.{name}": 1}
            yield Gap(facet=f"memory.{name}", value=f"{word}={value}", reason=reason, help=f"drop {word}=", mend=mend)
    if r.plan.memory.similarities != "stored":
        value, reason = f"similarities={r.plan.memory.similarities}", "its contrastive loss stores them"
        mend = {"memory.similarities": "stored"}
        yield Gap(facet="memory.similarities", value=value, reason=reason, help="drop similarities=", mend=mend)
    for name in ("balance", "locality"):
        if getattr(r.train, name):
            reason = "a loss on routers is its own setting, and another than this"
            yield Gap(facet=f"train.{name}", value=f"{name}=", reason=reason, help=f"drop {name}= from the workload")
    if r.train.bias_rate:
        reason = "how far a step moves selection biases is a setting of its own, which no file here writes"
        yield Gap(facet="train.bias_rate", value="balance=bias", reason=reason, help="drop bias from balance=")
    if any(spec.shortcut for spec in r.model.mixtures):
        reason = "its experts read what leaves attention"
        yield Gap(facet="model", value=r.model.name, reason=reason, help="name the model without shortcut")
    if r.model.ways > 1:
        reason = "its blocks have one stream of residuals"
        yield Gap(facet="model", value=r.model.name, reason=reason, help="name the model without kraken")


def all_limits(exporter: ModuleType) -> Limits:
    """Return the limits of a target that trains: its own, and what no target has."""
    return lambda request: (*exporter.limits(request), *own_experts(request))


def tiles_alone(r: ExportRequest) -> Iterator[Gap]:
    """Yield the gap of a way of overlapping inside layers that is not the steps of a ring, for a target that has no
    other."""
    if r.layout.tp > 1 and r.plan.overlap.tp and r.plan.overlap.how:
        yield Gap(
            facet="overlap.how",
            value=f"overlap=tp:{r.plan.overlap.how}",
            reason="products overlap with their own collectives, in the steps of a ring, or not at all",
            help="say overlap=tp, or leave tp out",
            mend={"overlap.how": ""},
        )


def no_partial_recompute(r: ExportRequest, keeps: str, *, operators: bool = False) -> Iterator[Gap]:
    """Recompute is all or nothing: no attention core alone, no first layers alone, and only if `operators` is said
    all but every second matrix product."""
    memory = r.plan.memory
    partial = {"selective": "the attention core alone", "operators": "all but every second matrix product"}
    if memory.recompute in partial and not (operators and memory.recompute == "operators"):
        yield Gap(
            facet="memory.recompute",
            value=memory.recompute,
            reason=f"it cannot recompute {partial[memory.recompute]}: {keeps}",
            help="say full, or nothing: with the flash kernel selective frees little",
            mend={"memory.recompute": "none" if memory.attention == "flash" else "full", "memory.layers": 0},
        )
    elif memory.layers:
        yield Gap(
            facet="memory.layers",
            value=f"recompute_layers={memory.layers}",
            reason="it recomputes every layer or none",
            help="say full without recompute_layers",
            mend={"memory.layers": 0},
        )


def loss_kernels(r: ExportRequest, known: tuple[str, ...], why: str) -> Iterator[Gap]:
    """The loss is computed by one of the `known` kernels; the first of them is the nearest to any other."""
    loss = r.plan.memory.loss
    if loss not in known:
        yield Gap(
            facet="memory.loss",
            value=f"loss={loss}",
            reason=why,
            help=f"say loss={known[0]}",
            mend={"memory.loss": known[0]},
        )


def no_lora(r: ExportRequest) -> Iterator[Gap]:
    if r.train.lora is not None:
        yield Gap(
            facet="train.phase",
            value="phase=lora",
            reason="a plan does not say the scale of the adapters, nor does the target take their matrices one by one",
            help="export phase=sft, and add the adapters by hand",
        )


def causal_only(r: ExportRequest) -> Iterator[Gap]:
    if not r.train.causal:
        yield Gap(facet="train.causal", value="causal=no", reason="its language models are causal")


def multiplies(r: ExportRequest, known: tuple[str, ...], reason: str, use: str = "bf16") -> Iterator[Gap]:
    """Matrix products are computed in the precisions `known`, and `use` is the one to say instead of another."""
    if r.compute not in known:
        yield Gap(
            facet="precision.compute",
            value=r.compute,
            reason=reason,
            help=f"say {use}",
            mend={"precision.compute": use},
        )
