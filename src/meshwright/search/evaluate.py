"""Evaluate a plan: its step time, to the last bit what ``predict`` says, and how much memory it leaves.

A search simulates plans as a prediction does, and remembers: plans of equal facts share a structure, plans of equal
sizes their layers (:mod:`meshwright.search.layers`), and a pass is priced once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshwright.answer.prediction import RankMemory
from meshwright.answer.rank_memory import rank_memory
from meshwright.answer.tier_memory import tier_memory
from meshwright.cost import Costs, standard_on
from meshwright.lower.facts import Facts
from meshwright.lower.structure import Structure
from meshwright.plan import Plan
from meshwright.plan.filling import without_frozen
from meshwright.search.layers import Layers
from meshwright.search.space import Core, Inner, bare
from meshwright.simulate.filling import least_seconds
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.parts import part_of
from meshwright.spec.workload import Train

#: Words of an inner part that a forward without a backward does not depend on, as they are usually.
_ELSEWHERE = {name: Inner()._asdict()[name] for name in ("order", "recompute", "recompute_layers", "overlap", "shares")}


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
        #: The layers that are trained, by which plans are bounded: those that a model has frozen come on top.
        self.trained = part_of(model, model.frozen, model.num_layers) if model.frozen else model
        self.costs = costs or standard_on(cluster, dtype=train.dtype)
        self.layers = Layers(self.trained, cluster, train, self.costs)
        self.kinds, self.num_units = len(self.trained.blocks), len(self.trained.kinds)
        self.devices = tuple(self.layers.devices.values())
        self.alike = len(cluster.islands) == 1
        self._structures: dict[Facts, Structure] = {}
        #: What balanced stages are worked out from, and those, kept by ``search/settle.py``.
        self.stages: dict = {}
        self._frozen: dict[tuple[Core, Inner], float] = {}

    def frozen_s(self, core: Core, ways: Iterable[Inner]) -> float:
        """Seconds that a rank of a core's plans takes at least for the layers that a model has frozen, whatever their
        inner parts among these; 0 where it has none."""
        if self.trained is self.model:
            return 0.0
        found = {inner._replace(**_ELSEWHERE) for inner in ways}
        return min(self._frozen_s(core, inner) for inner in found)

    def _frozen_s(self, core: Core, inner: Inner) -> float:
        key = core, inner
        if key not in self._frozen:
            asked = self.model, self.cluster, self.train, self.layers.pricer
            self._frozen[key] = least_seconds(bare(core, inner), *asked)
        return self._frozen[key]

    def simulated(self, plan: Plan) -> tuple[Simulated, tuple[RankMemory, ...]]:
        """The step of a legal plan with ``dp`` filled in, and the memory of its rank classes."""
        run = simulate(
            plan,
            self.model,
            self.cluster,
            self.train,
            self.costs,
            stages=self.layers.stages(without_frozen(plan)),
            pricer=self.layers.pricer,
            structures=self._structures,
        )
        return run, rank_memory(run, self.costs)

    def __call__(self, plan: Plan) -> Evaluated:
        """The plan must be legal, with ``dp`` filled in."""
        run, ranks = self.simulated(plan)
        room = min(r.headroom_bytes for r in ranks)
        # where state lies off the devices, what does not fit there is lacking as well
        behind = (tier.headroom_bytes for tier in tier_memory(run, self.costs)) if plan.offload.any else ()
        return Evaluated(run.step_time_s, min((room, *(lack for lack in behind if lack < 0))))
