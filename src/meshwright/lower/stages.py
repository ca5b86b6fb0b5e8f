"""Virtual stages as compositions of layers. Stages made of the same layers are one composition, so they
share one price and one memory count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from meshwright import layers, schedules
from meshwright.layers.kind import Params
from meshwright.layers.pieces import Context, Piece, fused, keeping, locked
from meshwright.lower import state
from meshwright.lower.feedback import answered, entered
from meshwright.lower.known import Known
from meshwright.lower.layer import losing, portioned, program
from meshwright.lower.partition import stage_layers
from meshwright.lower.place import Mesh, first_of_group
from meshwright.lower.portions import keys_and_values, layer_activations, loss_activations, portions_of
from meshwright.lower.program import LayerPass
from meshwright.lower.state import Activations
from meshwright.lower.units import NEVER_AGAIN, Composition, Unit, composition_of, unit_of
from meshwright.plan import Plan, lowered
from meshwright.plan.facets.feedback import Direct
from meshwright.plan.slices import on_kind
from meshwright.spec.architecture import EMBEDDING, HEAD
from meshwright.spec.ends import Boundary, Contrastive
from meshwright.spec.items import Batch
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.work import Group


class GroupShare(NamedTuple):
    """Documents that a group of ranks shares: the ``mesh`` whose context-parallel ranks are such groups, and the
    ``batch`` of one of them."""

    mesh: Mesh
    batch: Batch


class Stages:
    """Every virtual stage of a plan: its layers, composition, parameters and activations."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        train: Train,
        mesh: Mesh,
        known: Known | None = None,
        batch: Batch | None = None,
        *,
        frozen: bool = False,
        first_layer: int = 0,
        shares: Sequence[GroupShare] = (),
        place: int = 0,
        moves: bool = True,
    ):
        """`batch` are the items of a microbatch, the workload's own if left out. ``frozen`` parameters are not trained.
        `first_layer` is the number in the whole model of the first layer, where this is a part of one. `shares` are
        those of the groups that a rank is in, where groups differ; `batch` are then the tokens of one rank. `place` is
        that of the plan's kind among the kinds of slices. `moves`: activations that the plan moves are of this
        microbatch too."""
        self.place, self.moves = place, moves
        #: Forward passes of each microbatch, where there are no backward ones and parameters are trained yet.
        self.forwards = read(plan.sync.policy).rule.forwards if not frozen else 0
        self.frozen, self.first_layer = frozen or self.forwards > 0, first_layer
        self.batch = train.microbatch(plan.pipeline.microbatch) if batch is None else batch
        self.plan, self.model, self.train, self.mesh = plan, model, train, mesh
        self.shares = tuple(shares)
        self.layers = stage_layers(plan, model)
        self.known = known or Known()
        self._at: dict[int, Context] = {}

    @cached_property
    def each(self) -> tuple[Stages, ...]:
        """The stages of every class of slices: these, but where kinds of slices have sizes of their own."""
        said, own = self.plan.kinds, {}
        if not said.computed:
            return (self,) * len(self.mesh.slices)
        for kind in set(self.mesh.kinds_of_slices):
            each = (said.mbs, said.dtypes, said.lowered)
            rows, dtype, fewer = (values[kind] if values else None for values in each)
            plan = on_kind(self.plan, rows or 0, dtype or "", fewer or "")
            known = Known(params=self.known.params, sites=self.known.sites)
            ends = {"frozen": self.frozen, "first_layer": self.first_layer, "place": kind}
            own[kind] = Stages(plan, self.model, self.train, self.mesh, known, **ends)
        return tuple(own[kind] for kind in self.mesh.kinds_of_slices)

    def numbered(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of this part by their numbers in the whole model."""
        return tuple(self.first_layer + layer for layer in layers) if self.first_layer else layers

    @cached_property
    def compositions(self) -> tuple[Composition, ...]:
        """One per virtual stage; equal stages hold the same object."""
        last, ends = len(self.layers) - 1, (self.model.embedding, self.model.head)
        begins, closes = (not isinstance(end, Boundary) for end in ends)  # an open end of a part is no layer
        out, policy = [], read(self.plan.sync.policy)
        for stage, held in enumerate(self.layers):
            numbers = self.numbered(held or (0,))
            own = [
                {"plain": not policy.encodes(n), "level": policy.level_of(n, self.model.num_layers)} for n in numbers
            ]
            units = [unit_of(EMBEDDING, **own[0])] if stage == 0 and begins else []
            units += [
                unit_of(
                    self.model.pattern[layer], self.plan.memory.mode(i), **own[i], lowered=self._lowered(numbers[i])
                )
                for i, layer in enumerate(held)
            ]
            if stage == last and closes:
                units.append(unit_of(HEAD, **own[-1]))
            out.append(composition_of(tuple(units)))
        return tuple(out)

    @cached_property
    def taught(self) -> Composition | None:
        """The stage that public text is passed through, with the heads that neighbours teach behind its own."""
        taught = read(self.plan.sync.policy).taught
        if taught is None:
            return None
        units = self.compositions[0].units
        return composition_of((*units, *[units[-1]] * taught.heads))

    def _lowered(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """The operators of a layer in fewer bits, of each kind of slices; () where none has any."""
        said = [lowered.read(text) for text in self.plan.kinds.lowered]
        found = tuple(one.of_layer(layer) if one else () for one in said)
        return found if any(found) else ()

    def _words(self, unit: Unit) -> tuple[str, ...]:
        """The operators of a unit that are in fewer bits on these ranks."""
        return unit.lowered[min(self.place, len(unit.lowered) - 1)] if unit.lowered and self.plan.kinds.lowered else ()

    def _at_work(self, c: Context, words: tuple[str, ...]) -> Context:
        """The same ranks with these operators in fewer bits."""
        if not words:
            return c
        dtype, pieces = lowered.read(self.plan.kinds.lowered[0]).dtype, tuple(lowered.OPERATORS[w] for w in words)
        return msgspec.structs.replace(c, lowered=pieces, lowered_dtype=dtype)

    def context_of(self, kind: int, start: int = 0) -> Context:
        """Sizes and groups of the ranks around `start` at work on the tokens of a layer."""
        c = self.context(start)
        return c.at(self.model.layer(kind).stream) if self.model.streams else c

    def context(self, start: int = 0) -> Context:
        """Sizes and groups of the ranks around `start`."""
        if start in self._at:
            return self._at[start]
        found = self._context(self.mesh, self.plan, self.batch, start)
        if self.shares:
            shares = tuple(self._context(share.mesh, share.mesh.plan, share.batch, start) for share in self.shares)
            found = msgspec.structs.replace(found, shares=shares)
        self._at[start] = found
        return found

    def _context(self, mesh: Mesh, plan: Plan, batch: Batch, start: int) -> Context:
        inner, outer = mesh.hybrid_groups(plan.head_swap, "cp", start=start)
        return Context.of(
            self.model.head.stream,
            batch,
            self.model,
            plan,
            self.train,
            tp_group=mesh.group("tp", start=start),
            cp_inner=inner,
            cp_outer=outer,
            ep_group=mesh.expert_group("ep", start=start),
            etp_group=mesh.expert_group("etp", start=start),
            ep_inner=mesh.expert_group("ep_inner", start=start),
            ep_outer=mesh.expert_group("ep_outer", start=start),
            ends_meet=self.ends_meet,
            dp_group=self._pairing(mesh, start),
        )

    def _pairing(self, mesh: Mesh, start: int) -> Group:
        """The replicas whose batches meet one another in a contrastive loss."""
        if not isinstance(self.model.head, Contrastive):
            return Group(size=1, hops=())
        return mesh.group("dp", start=first_of_group(mesh, start))

    def pieces(self, kind: int, start: int = 0, words: tuple[str, ...] = ()) -> list[Piece]:
        """The pieces of a layer, on the ranks around `start`; the operators `words` in fewer bits."""
        c = self.context(start)
        key = (kind, c.groups, words)
        found = self.known.pieces.get(key)
        if found is None:
            layer = self.model.layer(kind)
            found = layers.of(layer).pieces(self._at_work(self.context_of(kind, start), words), layer)
            if self.plan.kernels.compile and kind >= 0:
                found = fused(found)
            if getattr(layer, "locked", False):
                found = locked(found)
            if kind == HEAD and read(self.plan.sync.policy).merged is not None:
                own = [piece for piece in found if not piece.name.endswith("norm")]
                found = [*found, *own * read(self.plan.sync.policy).further_heads]
            if self.plan.memory.brought == "kept" and kind >= 0:
                found = keeping(found)
            if self.direct is not None and kind >= 0:
                found = entered(found, self.context_of(kind, start), self.direct)
            self.known.pieces[key] = found
        return found

    def layer_pass(self, unit: Unit, which: str, start: int = 0) -> LayerPass:
        """One pass over one layer, on the ranks around `start`."""
        words = self._words(unit)
        mine = {"lowered": (words,) if words else ()}
        unit = unit_of(unit.kind, **mine) if which in NEVER_AGAIN else unit_of(unit.kind, unit.recompute, **mine)
        c, end = self.context(start), not unit.is_block
        known, key = (
            (self.known.ends, (unit, which, c.tp_group, c.dp_group))
            if end
            else (self.known.passes, (unit, which, c.groups))
        )
        found = known.get(key)
        if found is None:
            overlap, pieces = self.plan.overlap, self.pieces(unit.kind, start, words)
            count = self.num_portions(unit)
            if unit.kind == HEAD and self.direct is not None:
                portions = self.portions(HEAD, count, start) if count > 1 else []
                entries = answered(pieces, portions, c, self.direct) if which == "F" else []
            elif count > 1 and unit.is_block and which in ("B", "BW"):
                entries = portioned(self.portions(unit.kind, count, start, words), which, keys_and_values(pieces))
            elif count > 1 and not unit.is_block and which != "W":
                later = which == "F" and not self.frozen  # the loss comes with the backward
                entries = [] if later else losing(self.portions(unit.kind, count, start), which)
            else:
                entries = program(pieces, which, recompute=unit.recompute, overlap=overlap)
            found = known[key] = LayerPass(which, tuple(entries))
        return found

    @property
    def direct(self) -> Direct | None:
        """How the output's error enters blocks that are trained; None where gradients come back through them."""
        return None if self.frozen else self.plan.feedback.direct

    def num_portions(self, unit: Unit) -> int:
        """The portions of the sequence in which a layer that is recomputed whole, or the head, is computed."""
        if unit.kind == HEAD:
            return self.plan.memory.loss_portions
        return self.plan.memory.portions if unit.recompute == "full" else 1

    def portions(self, kind: int, count: int, start: int = 0, words: tuple[str, ...] = ()) -> list[list[Piece]]:
        """The pieces of each portion of a layer, those of equal work as one object."""
        known: dict[tuple, list[Piece]] = {}
        layer, out = self.model.layer(kind), []
        for c in portions_of(self._at_work(self.context_of(kind, start), words), count):
            tokens = tuple((item.new_tokens, item.context * (kind != HEAD), many) for item, many in c.batch)
            if tokens not in known:
                known[tokens] = layers.of(layer).pieces(c, layer)
            out.append(known[tokens])
        return out

    @property
    def ends_meet(self) -> bool:
        """Whether the first and the last stage are on one rank, so that a tied table is there once."""
        pipeline = self.plan.pipeline
        placement = schedules.get(pipeline.schedule).placement
        turns = placement in ("v", "bidirectional") or (placement == "wave" and pipeline.vpp % 2 == 0)
        return self.plan.layout.pp == 1 or turns

    def params(self, unit: Unit) -> Params:
        """Parameters of a unit on one rank, before ZeRO."""
        found = self.known.params.get(unit)
        if found is None:
            layer = self.model.layer(unit.kind)
            found = state.params_of(self.context_of(unit.kind), layer)
            further = read(self.plan.sync.policy).further_heads
            if further and unit.kind == HEAD:
                more = float(further * self.model.vocab * self.model.hidden)
                found = found + Params(dense=more, trained_dense=more, low=more * (found.low > 0))
            if self.frozen or getattr(layer, "locked", False):
                found = msgspec.structs.replace(found, trained_dense=0.0, trained_expert=0.0)
            self.known.params[unit] = found
        return found

    def total_params(self, units: tuple[Unit, ...]) -> Params:
        """Parameters of several units on one rank."""
        found = self.known.params.get(units)
        if found is None:
            found = Params()
            for unit in units:
                found = found + self.params(unit)
            self.known.params[units] = found
        return found

    def unit_activations(self, unit: Unit) -> Activations:
        """Bytes that one microbatch leaves in a layer."""
        found = self.known.activations.get(unit)
        if found is None:
            words, count = self._words(unit), self.num_portions(unit)
            c, whole = self.context_of(unit.kind), self.pieces(unit.kind, words=words)
            if count > 1 and unit.is_block:
                found = layer_activations(c, whole, self.portions(unit.kind, count, words=words))
            elif count > 1:
                found = loss_activations(c, self.portions(unit.kind, count))
            else:
                found = state.activations(c, whole, unit.recompute, self._entered(c, unit))
            if unit.kind == HEAD and self.direct is not None:  # forward and backward are one pass
                found = Activations(working=found.saved + found.working)
            self.known.activations[unit] = found
        return found

    def _entered(self, c: Context, unit: Unit) -> tuple[Context, ...]:
        """The same ranks at work on the maps that come into a block of convolutions."""
        layer = self.model.layer(unit.kind)
        if not unit.is_block or layer.attention is not None or layer.mixer is not None or not layer.before:
            return ()
        first = layer.before[0]
        return tuple(c.at(stream) for stream in getattr(first, "reads", (getattr(first, "stream", layer.stream),)))

    def activations(self, composition: Composition) -> Activations:
        """Bytes that one microbatch leaves in a stage."""
        found = self.known.activations.get(composition)
        if found is None:
            found = Activations()
            for unit in composition.units:
                found = found.then(self.unit_activations(unit))
            self.known.activations[composition] = found
        return found
