"""Provenance of a prediction: its assumptions, warnings to the user, and the identity of the question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec
import numpy as np

from meshwright import schedules
from meshwright.answer.exchange_shares import exchange_shares
from meshwright.answer.feature_maps import convolution_assumptions
from meshwright.answer.prediction import Assumption
from meshwright.cost import Costs, Framework, measured
from meshwright.cost.chain import EXTRAPOLATED
from meshwright.cost.measured import MeasuredTables
from meshwright.cost.roofline import SCAN_OF_PEAK, TYPICAL_OF_BEST, efficiency, peak_flops, supports
from meshwright.graph import TaskGraph
from meshwright.lower import Lowered
from meshwright.plan import Memory, Plan, Precision
from meshwright.plan.lowered import read as read_lowered
from meshwright.quantity import seconds
from meshwright.simulate.clock import CUT_TASKS
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_names import ASSUMED
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graph_epochs import GraphEpochs
from meshwright.spec.graphs import GraphModel
from meshwright.spec.hardware import Device, source_of
from meshwright.spec.model import Model
from meshwright.spec.network_bill import network_bill
from meshwright.spec.recommender import Recommender
from meshwright.spec.samples import SampleBatch
from meshwright.spec.workload import Train
from meshwright.timeline import Identity, Timeline
from meshwright.version import VERSION
from meshwright.work import AttentionCore, Collective, Gemm, GroupedGemm, Scan

#: MFU that 9 of the 1,007 measured 16-bit steps exceed that state theirs (llm-foundry's benchmarks 6 of 174, MegaScale
#: 3 of 8, nanotron's sweep none of 823, Megatron-Bridge none of 2).
SELDOM_MFU = 0.6


def identity(
    model: Model | Recommender | GraphModel,
    cluster: Cluster,
    work: Train | SampleBatch | EdgeSamples | GraphEpochs,
    plan: Plan,
    costs: Costs,
    graph: TaskGraph,
) -> Identity:
    """Return the identity of a prediction: digests of the question, the costs and the graph, and the code's version.
    Equal identities give equal predictions."""

    def digest(value: object) -> str:
        return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:12]

    return Identity(
        code=VERSION,
        costs=costs.profile,
        model=f"{model.name} {digest(model)}",
        cluster=f"{cluster.name} {digest(cluster)}",
        workload=work.text(),
        plan=plan.text(),
        graph=graph.digest(),
    )


def _peak(device: Device) -> str:
    """The dense peak of 16 bits, or of 32 where a device has no unit for fewer."""
    dtype = next((name for name in ("bf16", "fp16", "fp32") if name in device.peak_flops), "bf16")
    return f"{peak_flops(device, dtype) / 1e12:.4g} TFLOP/s {dtype} dense"


def assumptions(
    lowered: Lowered, costs: Costs, model: Model, cluster: Cluster, train: Train, plan: Plan
) -> tuple[Assumption, ...]:
    """Return the assumptions of a prediction, each with its source; flagged where nobody measured it."""
    out = []
    for device in {d.name: d for s in lowered.mesh.slices for d in s.devices}.values():
        curves = fitted(lowered, costs, device)
        for name, what, clause in (
            ("gemm", "matrix products", "gemm"),
            ("memory", "memory-bound kernels", "memory"),
            ("attention_fwd", "attention forward", "forward"),
            ("attention_bwd", "attention backward", "backward"),
        ):
            if name in curves:
                out.append(msgspec.structs.replace(curves[name], name=f"{device.name}: {what}"))
                continue
            value, published = efficiency(device, name)
            source = (
                f"{TYPICAL_OF_BEST[name]:.0%} of the best published: " + _clause(device.efficiency.source, clause)
                if published
                else "default, no published figure for this device"
            )
            out.append(
                Assumption(
                    f"{device.name}: {what}", f"{value:.0%} of peak", source, not published or "unverified" in source
                )
            )
        out += scans(lowered, costs, device)
        out.append(
            Assumption(
                f"{device.name}: peak",
                _peak(device),
                source_of(device, "peak_flops"),
            )
        )
        count = lowered.num_ranks
        if device.slowest_of(count) > 1.0:
            out.append(
                Assumption(
                    f"{device.name}: slowest of {count:,}",
                    f"{device.slowest_of(count) - 1:.1%} slower than the median device (standard deviation of speeds "
                    f"{device.speed_spread:.1%})",
                    device.sources.get("speed_spread", SPREAD_SOURCE),
                )
            )
    out += convolution_assumptions(model, train, plan)
    out += fabric(cluster)
    out += collectives(lowered, costs)
    f = costs.framework
    out += exchange_shares(lowered, f)
    out.append(
        Assumption(
            f"framework profile {f.name!r}",
            f"{f.host_us_per_kernel:g} us per kernel launch, {f.host_us_per_collective:g} us per collective, "
            f"{f.host_us_per_pass:g} us per pass, {f.elementwise_passes:g} memory passes, "
            f"{f.context_bytes / 2**30:.1f} GiB context, {f.communicator_bytes / 2**20:.0f} MiB per communicator, "
            + (f"{f.activation_copies:g} copies of activations, " if f.activation_copies != 1 else "")
            + f"{f.allocator_slack:.0%} allocator slack"
            + (f", launch-ahead {f.ahead_layers:g} layers" if f.ahead_layers else "")
            + (f", a ring's steps {f.ring_steps:g} times as long during training" if f.ring_steps != 1.0 else "")
            + (f", kernels {f.kernel_slowdown:.1%} longer in a model than alone" if f.kernel_slowdown else "")
            + (
                f", tokens to experts on other nodes by kernels of mode {f.defaults.dispatch!r}"
                if f.defaults.dispatch and model.mixtures
                else ""
            )
            + (f", gradients in buckets of {f.defaults.bucket_bytes:,} bytes" if f.defaults.bucket_bytes else ""),
            f.source,
            f.flagged,
        )
    )
    out += _layout_assumptions(lowered, model, train, plan)
    return tuple(out)


def fabric(cluster: Cluster) -> list[Assumption]:
    """The speed of every level of the cluster, once for islands that are built alike; flagged where nobody said so."""
    out = []
    for island in cluster.islands:
        mine = f"{island.device.name} " if len(cluster.islands) > 1 else ""
        inside = 1
        for number, level in enumerate(island.levels):
            each = "node" if inside == island.node.devices else f"group of {inside} devices" if number else "device"
            out.append((f"{mine}{level.name} links", level, each))
            inside *= level.arity
    out += [(f"{level.name} between islands", level, "island") for level in cluster.interconnect]
    found = []
    for name, level, each in out:
        text = f"{level.gb_s:g} GB/s per direction and {each}, {level.latency_us:g} us"
        text += "".join(f"; {op} reached {value:g} GB/s" for op, value in level.busbw_gb_s.items())
        text += f"; {level.wiring.text()}" if level.wiring is not None else ""
        source = source_of(level, "gb_s")
        found.append(Assumption(name, text, source, source.startswith("assumed") or "unverified" in source))
    bill = network_bill(cluster)
    if bill is not None:
        text = f"{bill.switches:,} switches and {bill.transceivers:,} transceivers, counted by this wiring"
        found.append(Assumption("parts of the network", text, bill.source, "unverified" in bill.source))
    return list(dict.fromkeys(found))


#: Where a device's spread of speeds comes from that its record says nothing of.
SPREAD_SOURCE = "8% between the whiskers on five GPU clusters (Sinha et al., SC 2022, arXiv 2208.11035)"


def scans(lowered: Lowered, costs: Costs, device: Device) -> list[Assumption]:
    """Return the source of the time of each rule's scans, forward and backward; flagged where no kernel was
    measured."""
    seen: dict[tuple[str, bool], str] = {}
    for layer in lowered.layer_passes:
        for work in (entry.work for entry in layer.entries):
            if isinstance(work, Scan):
                seen.setdefault((work.rule, work.backward), costs.price(work, device).source)
    out = []
    for (rule, backward), source in sorted(seen.items()):
        measured = source != "roofline"
        said = source if measured else "no table has such a kernel: taken to reach what scans of the delta rule do"
        value = f"{SCAN_OF_PEAK[rule]:.0%} of peak"
        if measured:
            value = "by its work" if backward else "as measured"
        way = "backward" if backward else "forward"
        out.append(Assumption(f"{device.name}: {rule} scan {way}", value, said, not measured or backward))
    return out


def fitted(lowered: Lowered, costs: Costs, device: Device) -> dict[str, Assumption]:
    """Return the efficiency of one layer's kernels by class, where fitted curves price most of their time: the share of
    the peak at their precision, and the curve behind the largest part."""
    took: dict[str, dict[str, float]] = {}
    ideal: dict[str, float] = {}
    beyond: dict[str, float] = {}
    for layer in lowered.layer_passes:
        for work in (entry.work for entry in layer.entries):
            if isinstance(work, Gemm | GroupedGemm):
                name = "gemm"
            elif isinstance(work, AttentionCore):
                name = "attention_bwd" if work.backward else "attention_fwd"
            else:
                continue
            price = costs.price(work, device)
            behind, source = took.setdefault(name, {}), price.source.removesuffix(EXTRAPOLATED)
            behind[source] = behind.get(source, 0.0) + price.seconds
            ideal[name] = ideal.get(name, 0.0) + work.flops / peak_flops(device, work.dtype)
            if price.source != source or "carried to" in source:
                beyond[name] = beyond.get(name, 0.0) + price.seconds
    out = {}
    for name, behind in took.items():
        total, (said, most) = sum(behind.values()), max(behind.items(), key=lambda item: item[1])
        if said == "roofline" or total <= 0:
            continue
        outside = beyond.get(name, 0.0) / total
        said += f"; other sources for {1 - most / total:.0%} of their time" if most < 0.99 * total else ""
        said += f"; {outside:.0%} of their time extrapolated from other shapes or devices" if outside > 0.01 else ""
        out[name] = Assumption(name, f"{ideal[name] / total:.0%} of peak for this plan's shapes", said, outside > 0.5)
    return out


def collectives(lowered: Lowered, costs: Costs) -> list[Assumption]:
    """The profile behind the collectives over each set of levels, by the largest buffer sent there."""
    largest: dict[tuple[str, ...], Collective] = {}
    device = lowered.mesh.slices[0].devices[0]
    for work in _communication(lowered):
        levels = tuple(hop.name for hop in work.group.hops)
        if levels and work.num_bytes > largest.get(levels, work).num_bytes * 0.999:
            largest[levels] = work
    out = []
    for levels, work in sorted(largest.items()):
        price = costs.price(work, device)
        if price.source == "roofline":
            continue
        if work.num_bytes >= 2**20:
            sent = f"{work.num_bytes / 2**20:.4g} MiB over {work.group.size} ranks at "
            sent += f"{work.num_bytes / price.seconds / 1e9:.4g} GB/s"
        else:
            kib = f"{work.num_bytes / 1024:.4g} KiB" if work.num_bytes >= 1024 else f"{work.num_bytes:.4g} bytes"
            sent = f"{kib} over {work.group.size} ranks in {seconds(price.seconds)}"
        value = f"{work.op} of {sent}"
        out.append(
            Assumption(
                f"collectives over {' and '.join(levels)}", value, price.source, price.source.endswith(EXTRAPOLATED)
            )
        )
    return out


def _communication(lowered: Lowered) -> Iterator[Collective]:
    for layer in lowered.layer_passes:
        yield from (entry.work for entry in layer.entries if isinstance(entry.work, Collective))
    for program in lowered.programs:
        if program.kind == "exchange":
            yield from (Collective(op=m.op, num_bytes=m.num_bytes, group=m.group) for m in program.moves)


def _clause(source: str, label: str) -> str:
    """The part of a source that is about one number: ``gemm: ...; memory: ...``."""
    for part in source.split("; "):
        if part.startswith(f"{label}: "):
            return part.removeprefix(f"{label}: ")
    return source


def _layout_assumptions(lowered: Lowered, model: Model, train: Train, plan: Plan) -> list[Assumption]:
    out = []
    counts = sorted({len(s) for s in lowered.stages.layers})
    if len(counts) > 1 and not plan.layout.stages:
        shown = ",".join(str(len(s)) for s in lowered.stages.layers)
        out.append(
            Assumption(
                "layers per stage",
                shown if len(shown) < 60 else f"{counts[0]} to {counts[-1]}",
                f"{model.num_layers} layers do not divide by {plan.num_stages} stages; "
                "the last and first stages get fewer; say stages= to choose",
            )
        )
    if plan.layout.zero == 3 and plan.layout.pp > 1:
        out.append(
            Assumption(
                "sharded parameters under a pipeline",
                "gathered once a step and kept",
                "TorchTitan's default (2410.06511): every microbatch needs them",
            )
        )
    if plan.layout.zero == 2 and plan.num_stages > plan.layout.pp > 1:
        out.append(
            Assumption(
                "sharded gradients under a pipeline",
                "scattered after every round of a stage",
                "a round is the microbatches a rank takes through a stage without another between; zero1 scatters once",
            )
        )
    if model.mixtures and train.routing is None and not plan.experts.capacity:
        out.append(
            Assumption(
                "expert load",
                f"busiest rank {plan.experts.imbalance:g}x the mean",
                "plan word imbalance=" if plan.experts.imbalance > 1 else "balanced router; say imbalance= for another",
                plan.experts.imbalance == 1.0,
            )
        )
    return out


def usual_words(framework: Framework, plan: Plan) -> list[str]:
    """Words of a plan that say what the framework does by default where the plan is left at its own default: which
    kernels run, the bytes saved for the backward and how gradients are summed."""
    usual, memory, silent = framework.defaults, plan.memory, Memory()
    out = []
    if memory.attention == silent.attention != usual.attention:
        out.append(usual.attention)
    if memory.loss == silent.loss != usual.loss:
        out.append(f"loss={usual.loss}")
    if plan.layout.tp > 1 and plan.layout.sp and memory.gathered == silent.gathered != usual.gathered:
        out.append(f"gathered={usual.gathered}")
    if plan.precision.grads == Precision().grads != usual.grads:
        out.append(f"grads={usual.grads}")
    return out


#: Seconds above which a step is hardly what anybody means.
LONG_STEP_S = 86_400.0


def cautions(
    lowered: Lowered, costs: Costs, model: Model, train: Train, plan: Plan, *, mfu: float, step_s: float
) -> tuple[str, ...]:
    """Doubts that belong beside the answer itself, above everything that explains it."""
    out = []
    usual = plan.precision.compute or train.dtype
    own, mesh = plan.kinds.dtypes, lowered.mesh
    computed = {
        (device.name, own[kind] if own else usual): device
        for kind, slices in zip(mesh.kinds_of_slices, mesh.slices)
        for device in slices.devices
    }
    for kind, slices in zip(mesh.kinds_of_slices, mesh.slices) if plan.kinds.lowered else ():
        if (low := read_lowered(plan.kinds.lowered[kind])) is not None:
            computed |= {(device.name, low.dtype): device for device in slices.devices}
    for (_, dtype), device in computed.items():
        if not supports(device, dtype):
            rates = [n for n in ("fp8", "bf16", "fp16", "fp32") if n in device.peak_flops]
            used = next((n for n in rates if peak_flops(device, n) == peak_flops(device, dtype)), "fastest")
            out.append(f"{device.name} has no {dtype} matrix units: products are priced at its {used} rate")
    if model.max_seq_len and train.longest_document > model.max_seq_len:
        out.append(
            f"{train.longest_document:,} tokens are beyond the {model.max_seq_len:,} positions that {model.name} is "
            "configured for: it takes as long, but needs its positions rescaled and trained for"
        )
    if plan.overlap.yield_mb and (not mesh.cluster.shares_ports or lowered.graph.num_tasks > CUT_TASKS):
        why = "its exchanges are timed as if each had its port to itself: say shared_ports behind the count"
        if mesh.cluster.shares_ports:
            why = f"tokens inside passes share no ports in a step of more than {CUT_TASKS:,} tasks"
        out.append(f"yield_mb={plan.overlap.yield_mb} lets nothing pass on {mesh.cluster.name}: {why}")
    if step_s > LONG_STEP_S:
        out.append(f"one step takes {seconds(step_s)}: batch= counts sequences of a step, seq= tokens of a sequence")
    if mfu > SELDOM_MFU and costs.framework.flagged:
        out.append(
            f"an MFU of {mfu:.0%} is more than all but one in a hundred measured steps reach: name your framework "
            "(--framework) for a nearer answer"
        )
    return tuple(out)


def _here(cluster: Cluster) -> MeasuredTables | None:
    """The tables of this machine, where a cluster is of it alone."""
    if any(island.device.name != "here" for island in cluster.islands):
        return None
    found = measured.link()
    return None if found is None else found.tables


def with_pace(timeline: Timeline, cluster: Cluster) -> Timeline:
    """Return a timeline that says at which pace this machine was when its profile was made, where that predicts."""
    tables = _here(cluster)
    if tables is None or not tables.pace:
        return timeline
    columns = {name: np.array([seconds]) for name, seconds in tables.pace.items()} | {"made": np.array([tables.made])}
    return msgspec.structs.replace(timeline, records=timeline.records | {"pace": columns})


def _basis(costs: Costs, cluster: Cluster) -> str:
    """The source of the costs, in words."""
    tables = _here(cluster)
    if tables is None or not tables.made:
        return (
            f"costs come from {costs.profile}, not from measurements of this system: believe the 80% interval in "
            "brackets rather than the number before it"
        )
    return (
        f"costs come from measurements of this machine, {tables.made}: whether it keeps that pace, a run says "
        "(meshwright run)"
    )


def warnings(
    lowered: Lowered, costs: Costs, model: Model, cluster: Cluster, train: Train, plan: Plan
) -> tuple[str, ...]:
    """Return the warnings of a prediction, which a user should read before believing it."""
    out = []
    out.append(_basis(costs, cluster))
    if model.unknown_fields:
        out.append(f"the model's configuration has keys that were not understood: {', '.join(model.unknown_fields)}")
    out += [f"{model.name}: {note}" for note in model.notes] + list(cluster.notes)
    words = usual_words(costs.framework, plan)
    if words:
        out.append(
            f"software of the framework profile {costs.framework.name!r} runs {' '.join(words)} by default, and the "
            "plan does not say so: add it to the plan to predict that software without further options"
        )
    out += _unsaid_network(cluster)
    hides = schedules.get(plan.pipeline.schedule).hides_experts
    if plan.experts.ep > 1 and hides and not plan.overlap.ep:
        out.append(
            f"{plan.pipeline.schedule} is made to hide expert exchange behind another microbatch's work, and this plan "
            "counts all of `ep` as exposed: say overlap=dp,pp,ep if yours hides it"
        )
    return tuple(out)


def _unsaid_network(cluster: Cluster) -> list[str]:
    """Nodes with fewer devices than are usual, whose network nobody said: they are rarely part of a larger one."""
    out = []
    for island in cluster.islands:
        node, usual = island.node, island.device.node
        if node.devices == usual.devices or not any(source_of(v, "gb_s").startswith(ASSUMED) for v in island.levels):
            continue
        out.append(
            f"{island.name} names no network: {node.nics} ports of {node.nic_gbit_s:g} Gbit/s a node are assumed, as "
            f"many as {node.devices}/{usual.devices} of the usual node has; say yours, such as {island.name},25gbe"
        )
    return out
