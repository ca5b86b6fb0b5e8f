"""Evaluate a plan: its step time, to the last bit what ``predict`` says, and how much memory it leaves.

Plans of one structure share a graph (:mod:`meshwright.search.skeleton`), plans of one context share their layers
(:mod:`meshwright.search.layers`); what is left for one more plan is to put durations together and run the clock.
On unequal devices a plan is lowered and simulated on its own.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.answer.predict import simulate
from meshwright.answer.rank_memory import rank_memory
from meshwright.cost import Costs, standard_on
from meshwright.lower import Lowered, lower
from meshwright.lower.place import Mesh
from meshwright.lower.residency import constant_bytes
from meshwright.lower.stages import Composition, Stages
from meshwright.lower.state import Activations
from meshwright.plan import Plan
from meshwright.search.layers import Book, Layers, SharedPricer
from meshwright.search.skeleton import Skeleton, structure
from meshwright.simulate.clock import shares_ports
from meshwright.simulate.engine import times
from meshwright.simulate.schedule_times import takes_times
from meshwright.simulate.simulated import Simulated
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


class Evaluated(NamedTuple):
    """Seconds of a step, and capacity less peak memory of the fullest rank (negative: it does not fit)."""

    step_time_s: float
    headroom_bytes: float

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0


class Evaluator:
    """Evaluates the plans of one question. ``kinds`` of blocks, and ``num_units`` with the embedding and the head;
    ``devices`` are the kinds of them; ``alike``: all of one kind, on one island. ``kernels`` are those of layers, by
    the sizes that split them: they are the same on any number of the same devices, so that searches on several
    clusters of one kind share them."""

    def __init__(
        self, model: Model, cluster: Cluster, train: Train, costs: Costs | None = None, kernels: dict | None = None
    ):
        self.kernels = {} if kernels is None else kernels
        self.model, self.cluster, self.train = model, cluster, train
        self.costs = costs or standard_on(cluster)
        self.layers = Layers(model, cluster, train, self.costs)
        self.kinds, self.num_units = len(model.blocks), len(model.blocks) + 2
        self.devices = tuple(self.layers.devices.values())
        self.alike = len(cluster.islands) == 1
        self._skeletons: dict[tuple, Skeleton] = {}
        #: What balanced stages are worked out from, and those, kept by ``search/settle.py``.
        self.stages: dict = {}

    def __call__(self, plan: Plan) -> Evaluated:
        """The plan must be legal, with ``dp`` filled in."""
        same = None
        if self.alike and not self.devices[0].synchronous and not shares_ports(self.cluster) and not takes_times(plan):
            same = structure(plan, self.model, plan.num_microbatches(self.train.global_batch))
        if same is None:
            return self._judged(simulate(plan, self.model, self.cluster, self.train, self.costs), plan)
        skeleton = self._skeletons.get(same)
        if skeleton is None:
            skeleton = Skeleton(lower(plan, self.model, self.cluster, self.train))
            self._skeletons[same] = skeleton
        return self._retimed(plan, skeleton)

    def _retimed(self, plan: Plan, skeleton: Skeleton) -> Evaluated:
        mesh = self.layers.mesh(plan)
        book = self.layers.book(plan, mesh)
        stages = self.layers.stages(plan, mesh)
        stages.compositions = skeleton.compositions
        keys = skeleton.keys(stages, mesh)
        priced = SharedPricer(stages, mesh, self.costs, book, keys).all()
        start, end = times(skeleton.graph, priced.durations)
        lowered = self._filled(skeleton, stages, mesh, book)
        sigma = self.costs.framework.step_sigma
        run = Simulated(lowered=lowered, priced=priced, start_s=start, end_s=end, step_sigma=sigma)
        return self._judged(run, plan)

    def _filled(self, skeleton: Skeleton, stages: Stages, mesh: Mesh, book: Book) -> Lowered:
        """The skeleton with this plan's sizes."""
        kept = [activations(book, c) for c in skeleton.distinct]
        return Lowered(
            graph=skeleton.with_bytes(kept, stages),
            keys=(),
            mesh=mesh,
            stages=stages,
            actions=skeleton.actions,
            static_bytes=constant_bytes(stages, skeleton.actions),
        )

    def _judged(self, run: Simulated, plan: Plan) -> Evaluated:
        ranks = rank_memory(run, self.costs, plan)
        return Evaluated(run.step_time_s, min(r.headroom_bytes for r in ranks))


def activations(book: Book, composition: Composition) -> Activations:
    """What one microbatch leaves in a stage."""
    found = book.rows.get(composition)
    if found is None:
        found = Activations()
        for unit in composition.units:
            found = found.then(book.activations(unit))
        book.rows[composition] = found
    return found
