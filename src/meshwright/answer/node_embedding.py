"""Predict the training of a graph's vectors of nodes: check, lower passes over all buckets, time them, and say what is
assumed."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.provenance import identity
from meshwright.answer.whole_answer import limits, plain, rank_memory, timed
from meshwright.cost import Costs, load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.lower.bucket_training import READ_NS
from meshwright.plan import Plan
from meshwright.plan.bucket_rules import bucket_violations, idle_of, is_host
from meshwright.plan.facets.buckets import GRID
from meshwright.simulate.bucket_training import BucketTimes, time_buckets
from meshwright.spec.cluster import Cluster
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graphs import NodeEmbedding


class NodePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The training of vectors of nodes under a plan: the ``total`` time of all epochs, ``passes`` over all buckets and
    what each of them takes (``times``), the ``memory`` of a device and bytes of its ``host`` by kind. ``cautions``
    should be known before the answer is believed."""

    model: NodeEmbedding
    cluster: Cluster
    work: EdgeSamples
    plan: Plan
    times: BucketTimes
    passes: float
    total: Metric
    memory: RankMemory
    host_bytes: dict[str, float]
    assumptions: tuple[Assumption, ...]
    cautions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether neither a device nor its host holds more than there is room for."""
        node = self.cluster.islands[0].node
        return self.memory.headroom_bytes >= 0 and sum(self.host_bytes.values()) <= node.host_memory_bytes

    @property
    def total_s(self) -> float:
        """Seconds of all epochs."""
        return self.total.value

    @property
    def epoch_s(self) -> float:
        """Seconds of as many samples as there are edges, behind the first pass."""
        return self.model.edges / self.samples_per_s

    @property
    def samples_per_s(self) -> float:
        """Samples trained on in a second, by all devices."""
        lowered = self.times.lowered
        return lowered.samples * self.plan.buckets.partitions**2 / self.times.pass_s

    @property
    def peak_memory_bytes(self) -> float:
        """Bytes of a device."""
        return self.memory.peak_bytes

    @property
    def swapped_bytes(self) -> float:
        """Bytes that all devices load and store in a pass."""
        return self.times.lowered.moved_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        lowered = self.times.lowered
        return {
            **plain(self),
            **limits("total", self.total),
            "train": self.work.text(),
            "epoch_s": self.epoch_s,
            "pass_s": self.times.pass_s,
            "first_pass_s": self.times.first_s,
            "passes": self.passes,
            "samples_per_s": self.samples_per_s,
            "attribution_s": self.times.places,
            "memory": msgspec.to_builtins(self.memory),
            "host_bytes": self.host_bytes,
            "partition_bytes": lowered.item_bytes,
            "swapped_bytes": self.swapped_bytes,
            "rounds": [[list(b) if b is not None else None for b in one] for one in lowered.rounds],
            "identity": msgspec.to_builtins(self.times.timeline.identity),
        }

    def __str__(self) -> str:
        return f"{self.work.text()}: {self.total_s:.4g} s in all, {self.samples_per_s:,.0f} samples/s"


def predict_node_embedding(
    model: NodeEmbedding, cluster: Cluster, work: EdgeSamples, plan: Plan, *, costs: Costs | None = None
) -> NodePrediction:
    """Predict the training of vectors of nodes. Without `costs` kernels are fused and nothing is said of a host.

    Raises:
        MeshwrightError: P084 for everything in the plan that does not apply or does not divide, at once.
    """
    plan = plan if plan.several else plan.on(cluster.num_devices)
    found = bucket_violations(plan, model, cluster, work)
    if found:
        raise MeshwrightError(found)
    costs = costs or standard(load_framework("fused"))
    times = time_buckets(model, plan, cluster, work, costs)
    known = identity(model, cluster, work, plan, costs, times.lowered.graph)
    times = msgspec.structs.replace(times, timeline=msgspec.structs.replace(times.timeline, identity=known))
    passes = work.epochs * model.edges / (times.lowered.samples * plan.buckets.partitions**2)
    seconds = times.first_s * min(1.0, passes) + times.pass_s * max(0.0, passes - 1)
    return NodePrediction(
        model=model,
        cluster=cluster,
        work=work,
        plan=plan,
        times=times,
        passes=passes,
        total=timed(seconds, times.sigma, costs),
        memory=_memory(times, plan, cluster, costs),
        host_bytes=times.lowered.host,
        assumptions=_assumptions(model, cluster, work, plan, costs),
        cautions=_cautions(times, plan, work, passes),
    )


def _memory(times: BucketTimes, plan: Plan, cluster: Cluster, costs: Costs) -> RankMemory:
    held = dict(times.lowered.held)
    if not is_host(cluster.islands[0].device):
        held["allocator slack"] = costs.framework.allocator_slack * sum(held.values())
        held["context"] = costs.framework.context_bytes
    return rank_memory("device", plan.layout.dp, held, cluster)


def _assumptions(
    model: NodeEmbedding, cluster: Cluster, work: EdgeSamples, plan: Plan, costs: Costs
) -> tuple[Assumption, ...]:
    state = f"{work.row_state or 'no'} number a row, {work.number_state} for each of its numbers"
    out = [
        Assumption(
            "rows",
            "rows are read and written at the memory's streaming rate: no cache, no loss to random access",
            "a sample has its own" if work.shared == 1 else f"{work.shared} edges share negatives",
            True,
        ),
        Assumption("buckets", "nodes are cut at random, so that all buckets have equally many edges", "workload", True),
        Assumption("order", "machines get buckets as if all took equally long", f"buckets={plan.buckets.way}"),
        Assumption("optimizer state of vectors", state, f"optimizer={work.optimizer}"),
        Assumption("vectors", "fp32, indices of 4 bytes", "workload"),
        Assumption("partitions that nobody trains", idle_of(plan, cluster), "plan"),
        Assumption("costs", costs.profile, f"framework {costs.framework.name}"),
    ]
    if work.walk:
        threads = "a host's threads wait 90 ns for each of three reads of a step, and cores do nothing else"
        out.append(Assumption("samples by walks", threads, f"{READ_NS:g} ns a read that no cache has", True))
    if work.rate:
        out.append(Assumption("training", f"{work.rate:,} samples/s a device, measured", "rate="))
    if model.relations:
        relations = "on every device; what their changes take to be added up is not priced"
        out.append(Assumption("relations", relations, f"{model.relations:,} relations", True))
    return tuple(out)


def _cautions(times: BucketTimes, plan: Plan, work: EdgeSamples, passes: float) -> tuple[str, ...]:
    out = ["approximate: negatives are drawn from the partition that is trained, and edges bucket by bucket"]
    idle = sum(one is None for round in times.lowered.rounds for one in round)
    if idle:
        slots = len(times.lowered.rounds) * plan.layout.dp
        out.append(f"devices are left without a bucket in {idle / slots:.0%} of rounds: others hold what they need")
    if passes < 1:
        out.append(f"episode={plan.buckets.episode} is more than all epochs: a pass over all buckets does not end")
    if plan.buckets.way == GRID and plan.layout.dp > 1 and not work.walk:
        out.append("edges are sorted into the blocks of the grid beforehand, which is not counted")
    return tuple(out)
