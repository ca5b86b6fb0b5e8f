"""Predict the training of a graph network over a whole graph: check, lower an epoch, time it, and say what is
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
from meshwright.plan import Plan
from meshwright.plan.vertex_rules import vertex_violations
from meshwright.simulate.graph_network import NetworkTimes, time_network
from meshwright.spec.cluster import Cluster
from meshwright.spec.graph_epochs import GraphEpochs
from meshwright.spec.graphs import GraphNetwork


class NetworkPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The training of a graph network under a plan: the time of an ``epoch``, where it goes (``times.places``), and the
    ``memory`` of every stage's devices. ``cautions`` should be known before the answer is believed."""

    model: GraphNetwork
    cluster: Cluster
    work: GraphEpochs
    plan: Plan
    times: NetworkTimes
    epoch: Metric
    memory: tuple[RankMemory, ...]
    assumptions: tuple[Assumption, ...]
    cautions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no device holds more than it has room for."""
        return all(one.headroom_bytes >= 0 for one in self.memory)

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch."""
        return self.epoch.value

    @property
    def total_s(self) -> float:
        """Seconds of all epochs."""
        return self.epoch.value * self.work.epochs

    @property
    def peak_memory_bytes(self) -> float:
        """Bytes of the fullest device."""
        return max(one.peak_bytes for one in self.memory)

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of vertices and their gradients that all devices send in an epoch."""
        return self.times.lowered.boundary_bytes + self.times.lowered.stage_bytes

    @property
    def exchange_s(self) -> float:
        """Seconds in which exchanges of the busiest stage run in an epoch, hidden or not."""
        return self.times.busy_s

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        lowered = self.times.lowered
        return {
            **plain(self),
            **limits("epoch", self.epoch),
            "train": self.work.text(),
            "total_s": self.total_s,
            "attribution_s": self.times.places,
            "exchange_s": self.exchange_s,
            "copies": lowered.cut.copies,
            "skew": lowered.cut.skew,
            "boundary_bytes": lowered.boundary_bytes,
            "stage_bytes": lowered.stage_bytes,
            "layers": list(lowered.layers),
            "memory": msgspec.to_builtins(self.memory),
            "identity": msgspec.to_builtins(self.times.timeline.identity),
        }

    def __str__(self) -> str:
        return f"{self.work.text()}: {self.epoch_s:.4g} s an epoch, {self.exchanged_bytes / 1e9:.4g} GB sent"


def predict_graph_network(
    model: GraphNetwork, cluster: Cluster, work: GraphEpochs, plan: Plan, *, costs: Costs | None = None
) -> NetworkPrediction:
    """Predict an epoch of a graph network. Without `costs` kernels are fused and nothing is said of a host.

    Raises:
        MeshwrightError: P085 for everything in the plan that does not apply or does not divide, at once; D010 for a cut
            whose file cannot be read.
    """
    plan = plan if plan.several else plan.on(cluster.num_devices)
    found = vertex_violations(plan, model, cluster)
    if found:
        raise MeshwrightError(found)
    costs = costs or standard(load_framework("fused"))
    times = time_network(model, plan, cluster, work, costs)
    known = identity(model, cluster, work, plan, costs, times.lowered.graph)
    times = msgspec.structs.replace(times, timeline=msgspec.structs.replace(times.timeline, identity=known))
    return NetworkPrediction(
        model=model,
        cluster=cluster,
        work=work,
        plan=plan,
        times=times,
        epoch=timed(times.seconds, times.sigma, costs),
        memory=_memory(times, cluster, costs),
        assumptions=_assumptions(work, plan, times, costs),
        cautions=_cautions(plan),
    )


def _memory(times: NetworkTimes, cluster: Cluster, costs: Costs) -> tuple[RankMemory, ...]:
    out = []
    for rank, kept in zip(times.lowered.graph.streams.ranks, times.lowered.held):
        held = dict(kept)
        held["allocator slack"] = costs.framework.allocator_slack * sum(held.values())
        held["context"] = costs.framework.context_bytes
        out.append(rank_memory(rank.name, rank.multiplicity, held, cluster))
    return tuple(out)


def _assumptions(work: GraphEpochs, plan: Plan, times: NetworkTimes, costs: Costs) -> tuple[Assumption, ...]:
    rows = "a row is read for every edge at the memory's streaming rate: no cache, no loss to random access"
    out = [
        Assumption("aggregation", rows, "fp32, an index and a weight of 4 bytes an edge", True),
        Assumption(
            "model", "a product makes features as wide as a layer, another one classes, around equal layers", ""
        ),
        Assumption("optimizer", "Adam, fp32", ""),
        Assumption("costs", costs.profile, f"framework {costs.framework.name}"),
    ]
    if plan.layout.dp > 1:
        said = (
            "workload" if work.copies >= 0 else f"counted in {work.cut}" if work.cut else "a random cut of mean degree"
        )
        cut = times.lowered.cut
        value = (
            f"each vertex is needed on {cut.copies:.4g} other devices, the busiest of which has {cut.skew:.4g} times"
        )
        value += " the mean of edges and is waited for; exchanges are not overlapped"
        out.insert(1, Assumption("boundary", value, said, work.copies < 0 and not work.cut))
    if plan.vertices.vertex_chunks > 1:
        chunks = "equal vertices and edges in every chunk; its neighbours in all others are on its device"
        out.insert(1, Assumption("chunks", chunks, f"vertex_chunks={plan.vertices.vertex_chunks}", True))
    return tuple(out)


def _cautions(plan: Plan) -> tuple[str, ...]:
    if plan.vertices.vertex_chunks == 1:
        return ()
    return ("approximate: neighbours in chunks that come later are those of the epoch before",)
