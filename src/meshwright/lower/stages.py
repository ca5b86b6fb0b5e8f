"""Pass 4: virtual stages as compositions of layers. Stages made of the same layers are one composition, so they
share one price and one memory count.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import msgspec

from meshwright import schedules
from meshwright.layers.block import block
from meshwright.layers.embedding import embedding
from meshwright.layers.head import head
from meshwright.layers.pieces import Context, Piece
from meshwright.lower import state
from meshwright.lower.partition import stage_layers
from meshwright.lower.place import Mesh
from meshwright.lower.state import Activations, Params
from meshwright.plan import Plan
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


class Unit(msgspec.Struct, frozen=True, cache_hash=True):
    """A layer as it is run: ``kind`` is a block's index, ``"embedding"`` or ``"head"``; ``recompute`` its mode."""

    kind: int | str
    recompute: str


class Composition(msgspec.Struct, frozen=True, dict=True, cache_hash=True):
    """The units of a stage in order; ``segments`` groups them layer by layer (embedding and head join the layer
    next to them), which is how gradients and gathered parameters are exchanged."""

    units: tuple[Unit, ...]

    @cached_property
    def segments(self) -> tuple[tuple[Unit, ...], ...]:
        blocks = [i for i, u in enumerate(self.units) if not isinstance(u.kind, str)]
        if len(blocks) <= 1:
            return (self.units,)
        cuts = [0, *blocks[1:], len(self.units)]
        return tuple(self.units[a:b] for a, b in pairwise(cuts))


class Stages:
    """Every virtual stage of a plan: its layers, composition, parameters and activations."""

    def __init__(self, plan: Plan, model: Model, train: Train, mesh: Mesh):
        self.plan, self.model, self.train, self.mesh = plan, model, train, mesh
        self.layers = stage_layers(plan, model)
        self._pieces: dict[tuple, list[Piece]] = {}
        self._contexts: dict[tuple, Context] = {}
        self._at: dict[int, Context] = {}
        #: Worked out once by later passes: exchanges by (units, what), programs by (unit, pass, start).
        self.exchanges: dict[tuple, msgspec.Struct] = {}
        self.programs: dict[tuple, list] = {}
        self._params: dict[Unit | tuple[Unit, ...], Params] = {}

    @cached_property
    def compositions(self) -> tuple[Composition, ...]:
        """One per virtual stage; equal stages hold the same object."""
        known: dict[Composition, Composition] = {}
        last = len(self.layers) - 1
        out = []
        for stage, layers in enumerate(self.layers):
            units = [Unit("embedding", "none")] if stage == 0 else []
            for position, layer in enumerate(layers):
                units.append(Unit(self.model.pattern[layer], self._mode(position)))
            if stage == last:
                units.append(Unit("head", "none"))
            composition = Composition(tuple(units))
            out.append(known.setdefault(composition, composition))
        return tuple(out)

    def _mode(self, position: int) -> str:
        memory = self.plan.memory
        return memory.recompute if not memory.layers or position < memory.layers else "none"

    def context(self, start: int = 0) -> Context:
        """Sizes and groups of the ranks around `start`."""
        if start in self._at:
            return self._at[start]
        mesh = self.mesh
        groups = (
            mesh.group("tp", start=start),
            *mesh.hybrid_groups(self.plan.head_swap, "cp", start=start),
            mesh.expert_group("ep", start=start),
            mesh.expert_group("etp", start=start),
        )
        found = self._contexts.get(groups)
        if found is None:
            tp, inner, outer, ep, etp = groups
            found = self._contexts[groups] = Context(
                model=self.model,
                plan=self.plan,
                train=self.train,
                batch=self.train.microbatch(self.plan.pipeline.microbatch),
                tp_group=tp,
                cp_inner=inner,
                cp_outer=outer,
                ep_group=ep,
                etp_group=etp,
            )
        self._at[start] = found
        return found

    def pieces(self, kind: int | str, start: int = 0) -> list[Piece]:
        """What a unit is made of, on the ranks around `start`."""
        c = self.context(start)
        key = (kind, id(c))
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._build(kind, c)
        return found

    def _build(self, kind: int | str, c: Context) -> list[Piece]:
        if kind == "embedding":
            return embedding(c)
        if kind == "head":
            return head(c)
        return block(c, self.model.blocks[kind])

    @property
    def ends_meet(self) -> bool:
        """Whether the first and the last stage are on one rank, so that a tied table is there once."""
        pipeline = self.plan.pipeline
        placement = schedules.get(pipeline.schedule).placement
        turns = placement in ("v", "bidirectional") or (placement == "wave" and pipeline.vpp % 2 == 0)
        return self.plan.layout.pp == 1 or turns

    def params(self, unit: Unit) -> Params:
        """Parameters of a unit on one rank, before ZeRO."""
        found = self._params.get(unit)
        if found is None:
            found = self._params[unit] = self._count(unit)
        return found

    def _count(self, unit: Unit) -> Params:
        if unit.kind == "embedding":
            return state.embedding_params(self.plan, self.model, self.train)
        if unit.kind == "head":
            return state.head_params(self.plan, self.model, self.train, shares_embedding=self.ends_meet)
        return state.block_params(self.plan, self.model, self.train, unit.kind)

    def total_params(self, units: tuple[Unit, ...]) -> Params:
        """Parameters of several units on one rank."""
        found = self._params.get(units)
        if found is None:
            found = Params()
            for unit in units:
                found = found + self.params(unit)
            self._params[units] = found
        return found

    def activations(self, composition: Composition) -> Activations:
        """What one microbatch leaves in a stage."""
        c, out = self.context(), Activations()
        known: dict[Unit, Activations] = {}
        for unit in composition.units:
            if unit not in known:
                known[unit] = state.activations(c, self.pieces(unit.kind), unit.recompute)
            out = out.then(known[unit])
        return out
