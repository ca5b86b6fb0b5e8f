"""Predict a training step of a recommendation model under a plan: check, place tables, lower, time, and say what is
assumed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.provenance import identity
from meshwright.answer.whole_answer import limits, plain, rank_memory, timed
from meshwright.assign.tables import COLUMNS, REPLICATED, ROWS, WHOLE
from meshwright.cost import Costs, load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.facets.embeddings import AUTO, NODE
from meshwright.plan.recommender_rules import recommender_violations
from meshwright.simulate.recommending import RecommendingTimes, TableWalk
from meshwright.spec.cluster import Cluster
from meshwright.spec.recommender import Recommender
from meshwright.spec.samples import SampleBatch

#: Ways of a table in words, in the order they are counted.
WAYS = {WHOLE: "whole", ROWS: "by rows", COLUMNS: "by columns", REPLICATED: "replicated"}


class TablePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one table is: its number in the model, rows, pooling, ``way`` (table, row, column or data), ``slices`` by
    columns, bytes with its optimizer state, and the ``ranks`` that have a part of it."""

    table: int
    rows: int
    pooling: float
    way: str
    slices: int
    num_bytes: float
    ranks: tuple[int, ...]


class RecommendingPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a recommendation model under a plan: its ``step_time``, where its time goes (``times.places``, seconds
    that sum to it), the ``memory`` of every rank class, and where every table is. ``cautions`` should be known before
    the answer is believed."""

    model: Recommender
    cluster: Cluster
    work: SampleBatch
    plan: Plan
    times: RecommendingTimes
    step_time: Metric
    memory: tuple[RankMemory, ...]
    tables: tuple[TablePlace, ...]
    assumptions: tuple[Assumption, ...]
    cautions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no rank holds more than its device has."""
        return all(rank.headroom_bytes >= 0 for rank in self.memory)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.step_time.value

    @property
    def samples_per_s(self) -> float:
        """Samples trained on in a second, by all devices."""
        return self.work.batch / self.step_time.value

    @property
    def peak_memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.peak_bytes for rank in self.memory)

    @property
    def ways(self) -> str:
        """How many tables are placed in which way, in words."""
        count = Counter(table.way for table in self.tables)
        return ", ".join(f"{count[way]} {words}" for way, words in WAYS.items() if count[way])

    @property
    def balance_gap(self) -> float:
        """By what share the busiest rank's tables take longer than any placement of these ways could."""
        return self.times.placed.step.placement.gap

    @property
    def sent_far_bytes(self) -> float:
        """Bytes of pooled vectors that the busiest rank brings into the forward's exchange over all nodes."""
        return self.times.placed.step.sent_far

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        return {
            **plain(self),
            **limits("step_time", self.step_time),
            "train": self.work.text(),
            "samples_per_s": self.samples_per_s,
            "attribution_s": self.times.places,
            "memory": msgspec.to_builtins(self.memory),
            "tables": msgspec.to_builtins(self.tables),
            "balance_gap": self.balance_gap,
            "sent_far_bytes": self.sent_far_bytes,
            "steps_tried": self.times.tried,
            "identity": msgspec.to_builtins(self.times.timeline.identity),
        }

    def __str__(self) -> str:
        return f"{self.work.text()}: {self.step_time_s * 1e3:.4g} ms a step, {self.samples_per_s:,.0f} samples/s"


def predict_recommending(
    model: Recommender, cluster: Cluster, work: SampleBatch, plan: Plan, *, costs: Costs | None = None
) -> RecommendingPrediction:
    """Predict a step of a recommendation model. Without `costs` kernels are fused and nothing is said of a host, as in
    tuned stacks.

    Raises:
        MeshwrightError: P082 for everything in the plan that does not apply or does not divide, at once.
    """
    plan = plan if plan.several else plan.on(cluster.num_devices)
    found = recommender_violations(plan, model, cluster, work)
    if found:
        raise MeshwrightError(found)
    costs = costs or standard(load_framework("fused"))
    times = TableWalk(model, plan, cluster, work, costs).asked()
    timeline = msgspec.structs.replace(
        times.timeline, identity=identity(model, cluster, work, plan, costs, times.placed.step.graph)
    )
    times = msgspec.structs.replace(times, timeline=timeline)
    return RecommendingPrediction(
        model=model,
        cluster=cluster,
        work=work,
        plan=plan,
        times=times,
        step_time=timed(times.placed.seconds, times.sigma, costs),
        memory=_memory(times, cluster),
        tables=_tables(times, model),
        assumptions=_assumptions(model, work, plan, costs),
        cautions=_cautions(times, plan, work),
    )


def _memory(times: RecommendingTimes, cluster: Cluster) -> tuple[RankMemory, ...]:
    step, held = times.placed.step, times.placed.held
    return tuple(
        rank_memory(known.name, known.multiplicity, held[ranks[0]], cluster)
        for known, ranks in zip(step.graph.streams.ranks, step.classes)
    )


def _tables(times: RecommendingTimes, model: Recommender) -> tuple[TablePlace, ...]:
    placement = times.placed.step.placement
    return tuple(
        TablePlace(
            table=number,
            rows=table.rows,
            pooling=table.pooling,
            way=item.way,
            slices=item.parts,
            num_bytes=item.num_bytes,
            ranks=placement.ranks(number),
        )
        for number, (table, item) in enumerate(zip(model.tables, placement.items))
    )


def _assumptions(model: Recommender, work: SampleBatch, plan: Plan, costs: Costs) -> tuple[Assumption, ...]:
    rows = (
        "every lookup reads its row from the device's memory at its streaming rate: no cache, no loss to random access"
    )
    state = f"{work.row_state or 'no'} number a row, {work.number_state} for each of its numbers"
    out = [
        Assumption("lookups", rows, f"{sum(t.pooling for t in model.tables):g} rows a sample", True),
        Assumption(
            "rows updated", "all that are looked up are different ones, up to all rows of a table", "upper bound"
        ),
        Assumption("rows cut", "each rank's share of a table is looked up as often as any other", "hashed indices"),
        Assumption("optimizer state of tables", state, f"optimizer={work.optimizer}"),
        Assumption("tables and their gradients", "fp32", "workload"),
        Assumption("indices", "8 bytes, sent beside the step before", "TorchRec's pipeline of sparse data"),
        Assumption("input", "samples are there in time", "reading and preprocessing are not counted", True),
        Assumption("costs", costs.profile, f"framework {costs.framework.name}"),
    ]
    if plan.embeddings.compress > 1:
        made = "one product from a tower's vectors to 1/compress as many"
        out.append(Assumption("tower module", made, "a linear module; published ones may cross features first", True))
    return tuple(out)


def _cautions(times: RecommendingTimes, plan: Plan, work: SampleBatch) -> tuple[str, ...]:
    said, placement, out = plan.embeddings, times.placed.step.placement, []
    if said.compress > 1:
        out.append(f"compress={said.compress} is approximate: it makes another model, whose quality is not known here")
    if said.pooled != "fp32":
        out.append(f"pooled={said.pooled} is approximate: vectors and gradients travel in fewer bits")
    if work.row_state and any(item.way == COLUMNS for item in placement.items):
        out.append(
            "slices by columns keep a row-wise state each, so that their updates differ from those of whole rows"
        )
    if placement.crowded:
        out.append(f"spread={said.spread} found no placement of these tables with room for them on every rank")
    if said.way == AUTO:
        out.append(f"ways of tables are the best of {times.tried} that a walk tried, with no bound on others")
    if said.towers == NODE:
        out.append(
            "towers are balanced by cost; a learned partition of features by what they have in common is not made"
        )
    return tuple(out)
