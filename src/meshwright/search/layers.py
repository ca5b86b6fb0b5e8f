"""Layers worked out once for all plans: equal sizes, groups and options are one context, whatever else the plans say.

A pass over a layer depends on a few facets only (tensor, context and expert parallelism and where their groups lie,
the microbatch, precision, kernels). Plans that agree on those share one :class:`Book` of layer costs; the rest of the
space (schedules, stages, sharding) is combined from them.
"""

from __future__ import annotations

from meshwright.cost import Costs
from meshwright.lower.entry import Entry
from meshwright.lower.known import Known
from meshwright.lower.place import Mesh
from meshwright.lower.program import Site
from meshwright.lower.stages import Stages
from meshwright.lower.state import Activations
from meshwright.lower.units import Unit
from meshwright.plan import Plan
from meshwright.plan.facet import LAYER
from meshwright.plan.facets import decided
from meshwright.simulate.layer import LayerCost
from meshwright.simulate.price import Pricer
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.policy import read

#: Facets of which the embedding and the head see the number of tokens and the share of a rank alone.
_NOT_AT_ENDS = ("layout", "pipeline", "sequence", "experts")
_of_layers, _of_ends = decided(LAYER), decided(LAYER, but=_NOT_AT_ENDS)


def _sizes(plan: Plan) -> tuple:
    """Everything in a plan that decides the passes of its layers and their bytes, but for where groups lie."""
    return (*_of_layers(plan), read(plan.sync.policy).further_heads)


def deciding_ends(plan: Plan) -> tuple:
    """The same of the embedding and the head alone."""
    return (*_of_ends(plan), read(plan.sync.policy).further_heads)


class Book:
    """Layer costs and activations of one context, looked up in the tables that it shares with others."""

    def __init__(self, stages: Stages, sites: dict[str, Site], pricer: Pricer):
        self.stages, self._sites, self._pricer = stages, sites, pricer
        self._costs: dict[tuple[Unit, str, str, int], LayerCost] = {}
        #: Columns of seconds and bytes of its layers, kept by who asks for them.
        self.columns: dict = {}

    def unit(self, unit: Unit, which: str, device: str, start: int = 0) -> LayerCost:
        """One pass over one layer on a device, as a step's pricer has it."""
        key = (unit, which, device, start)
        found = self._costs.get(key)
        if found is None:
            one = self.stages.layer_pass(unit, which, start)
            found = self._costs[key] = self._pricer.layer(one, self._sites[device])
        return found

    def entries(self, unit: Unit, which: str, start: int = 0) -> tuple[Entry, ...]:
        """The operators of a pass over a layer."""
        return self.stages.layer_pass(unit, which, start).entries

    def activations(self, unit: Unit) -> Activations:
        """Bytes one microbatch leaves in a layer."""
        return self.stages.unit_activations(unit)


class Layers:
    """The books of one question (model, cluster, workload, costs)."""

    def __init__(self, model: Model, cluster: Cluster, train: Train, costs: Costs):
        self.model, self.cluster, self.train = model, cluster, train
        self.pricer = Pricer(costs)
        self.devices = {island.device.name: island.device for island in cluster.islands}
        self._books: dict[tuple, Book] = {}
        self._known: dict[tuple, Known] = {}
        self._alike: dict[tuple, Known] = {}
        self._ends: dict[tuple, dict] = {}
        self._params: dict[tuple, dict] = {}
        self._groups: dict[int, dict] = {}
        self._sites: dict[tuple[str, int], Site] = {}

    def mesh(self, plan: Plan) -> Mesh:
        """The plan's mesh; groups are shared between meshes of as many ranks."""
        return Mesh(plan, self.cluster, self._groups.setdefault(plan.layout.num_ranks, {}))

    def book(self, plan: Plan, mesh: Mesh) -> Book:
        """The layer costs that this plan shares with others."""
        layout = plan.layout
        groups: tuple = (mesh.group("tp"), mesh.group("cp"), mesh.expert_group("ep"), mesh.expert_group("etp"))
        if not mesh.alike:  # what a rank's neighbours are depends on the whole layout
            groups += (layout.order, layout.pp, layout.dp)
        key = (_sizes(plan), groups)
        found = self._books.get(key)
        if found is None:
            stages = self.stages(plan, mesh)
            sites = {name: stages.known.site(device, layout.num_ranks) for name, device in self.devices.items()}
            found = self._books[key] = Book(stages, sites, self.pricer)
        return found

    def stages(self, plan: Plan, mesh: Mesh | None = None) -> Stages:
        """The plan's stages, with the tables that it shares with plans of the same sizes."""
        stages = Stages(plan, self.model, self.train, mesh or self.mesh(plan))
        sizes, layout = _sizes(plan), plan.layout
        split = (layout.tp, plan.experts, stages.ends_meet, layout.pp == 1, sizes[-1])
        key = (sizes, split)
        found = self._known.get(key)
        if found is None:
            like = self._alike.get(sizes)
            if like is None:
                like = self._alike[sizes] = Known(ends=self._shared_ends(stages), sites=self._sites)
            found = self._known[key] = Known(params=self._params.setdefault(split, {}), like=like)
        stages.known = found
        return stages

    def _shared_ends(self, stages: Stages) -> dict:
        """Passes of the embedding and the head, shared by plans in which as many tokens meet equal shares of them."""
        c = stages.context()
        same = (c.tokens, c.tp, c.sp, *deciding_ends(c.plan))
        return self._ends.setdefault(same, {})
