"""Frozen encoders of a training run: their passes ahead of a step, in its waits or between them, and what they make.

A rank runs its part of the order that a prediction found (``lower/filling.py``): passes of rows of a microbatch through
a layer, each behind so many of its schedule's actions, for the batch of the next step; before a first step, or with
``filling=before``, all of them at once. What comes of a chunk is sent to the rank of the first stage, which alone reads
it. The same layers see the same rows under every plan, so that a run is that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.lower.filling import FrozenOrder, FrozenPass, plain_order
from meshwright.plan import Plan
from meshwright.plan.facets.pipeline import BEFORE
from meshwright.plan.filling import way, without_frozen
from meshwright.run.autoencoder import ImageEncoder, latents
from meshwright.run.connect import Edge
from meshwright.run.mesh import FROZEN, ProcessMesh
from meshwright.run.parts import Pass
from meshwright.run.pieces import FROZEN as FROZEN_STATE
from meshwright.run.pieces import TensorPiece, alike
from meshwright.run.record import recorder
from meshwright.spec.encoded import denoiser_of, entry_of, is_encoded, latent_work, side_of
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

Chunk = tuple[int, int]
"""(microbatch, first row) of the rows that one rank encodes."""


class _State(NamedTuple):
    """How far a chunk is: what its rows are before a ``layer``, and what the layer has made of the first of them."""

    layer: int
    entered: torch.Tensor
    parts: list[torch.Tensor]


class FrozenEncoder:
    """The frozen layers on one rank, and the latents of steps."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        train: Train,
        mesh: ProcessMesh,
        dtype: torch.dtype,
        seed: int,
        order: FrozenOrder | None,
    ):
        """`order` is the prediction's, of every pipeline rank; without one all passes are behind a step's own. A step
        has ``per_step`` images."""
        self.mesh, self.seed, self.group = mesh, seed, mesh["pp"]
        self.encoder = ImageEncoder(model, mesh.device, dtype, seed)
        self.order = order or plain_order(plan, model, train)
        side = side_of(model, train)
        self.shape, self.dtype = (entry_of(model).channels, side, side), dtype
        self.ahead, self.per_step = way(plan) != BEFORE, train.tokens_per_step
        self.handle = mesh.groups[FROZEN].handle if FROZEN in mesh.groups else mesh["pp_forward_down"].handle
        #: The next step's passes, while this one runs, and how many frozen passes of this rank are done of them.
        self.following: list[Pass] = []
        self.done = 0
        self.ready = False
        self.made: dict[Chunk, torch.Tensor] = {}
        self.works: list[tuple[dist.Work, torch.Tensor]] = []

    def edges(self) -> list[Edge]:
        """List the connections that results go over."""
        ranks = self.group.ranks
        return [Edge("frozen", source, ranks[0], self.handle) for source in ranks[1:]] if len(ranks) > 1 else []

    def pieces(self) -> list[TensorPiece]:
        """The frozen weights, which every rank has whole, as those of published weights."""
        return alike([self.encoder], self.mesh)

    def saved(self) -> list[TensorPiece]:
        """The frozen weights as a checkpoint has them, which the first rank writes: a run that was begun with published
        ones goes on with them, and what is exported of it is whole."""
        return [piece._replace(key=FROZEN_STATE, owner=self.mesh.first) for piece in self.pieces()]

    # -- a step

    def given(self, passes: list[Pass], *, trained: bool) -> list[Pass]:
        """The passes with the latents of their images: of a step that is `trained` on those that are ready; else they
        are encoded now."""
        kept = self.made
        if not (trained and self.ready):
            self._begin(passes if trained else [p._replace(step=-1) for p in passes])
            self._until(None)
            self._end()
        found, self.made = self.made, {} if trained else kept
        self.ready = self.ready and not trained
        if self.group.index:  # later stages ask of samples how large they are
            return [p._replace(tokens=self._empty(len(p.tokens))) for p in passes]
        out = []
        for number, p in enumerate(passes):
            some = (found[number, first] for first in range(0, len(p.tokens), self.order.chunk))
            out.append(p._replace(tokens=torch.cat(list(some))))
        return out

    def begin(self, following: list[Pass]) -> None:
        """A step begins, in whose waits the batch of the next one is encoded."""
        self._begin([p._replace(step=p.step + 1) for p in following])

    def at(self, actions: int) -> None:
        """The schedule has begun so many of this rank's actions."""
        if self.following:
            self._until(actions)

    def end(self) -> None:
        """The step's own passes are over: run what is left, and have all results where they are read."""
        if self.following:
            self._until(None)
            self._end()
            self.ready = True

    # -- passes

    def _begin(self, passes: Sequence[Pass]) -> None:
        self.following, self.done, self.made = list(passes), 0, {}
        self.states: dict[Chunk, _State] = {}

    def _until(self, actions: int | None) -> None:
        """Run what is due when so many actions have begun; all of it where that is None."""
        mine = self.order.ranks[self.group.index]
        while self.done < len(mine) and (actions is None or mine[self.done].actions <= actions):
            self._pass(mine[self.done])
            self.done += 1

    def _pass(self, one: FrozenPass) -> None:
        size = self.order.chunk
        chunk, p = (one.microbatch, one.first - one.first % size), self.following[one.microbatch]
        state = self.states.get(chunk)
        if state is None:
            state = _State(0, p.tokens[chunk[1] : chunk[1] + size], [])
        elif one.layer > state.layer:
            state = _State(one.layer, torch.cat(state.parts), [])
        with recorder().span("F", microbatch=one.microbatch, layer=one.layer):
            first = one.first - chunk[1]
            state.parts.append(self.encoder(one.layer, state.entered[first : first + one.rows]))
        self.states[chunk] = state
        if one.layer == len(self.encoder) - 1 and sum(map(len, state.parts)) == size:
            del self.states[chunk]
            self._result(chunk, torch.cat(state.parts), p)

    def _result(self, chunk: Chunk, moments: torch.Tensor, p: Pass) -> None:
        rows = p.rows[chunk[1] : chunk[1] + self.order.chunk]
        made = latents(moments, rows, self.seed, p.step).contiguous()
        if not self.group.index:
            self.made[chunk] = made
            return
        self.works.append((dist.isend(made, dst=self.group.ranks[0], group=self.handle), made))

    def _end(self) -> None:
        """Take what other ranks have encoded, on the first; wait for what this one sent, on the others."""
        arriving = []
        for rank in range(1, len(self.order.ranks)) if not self.group.index else ():
            for chunk in self.order.begins(rank):
                made = self.made[chunk] = self._empty(self.order.chunk)
                arriving.append(dist.irecv(made, src=self.group.ranks[rank], group=self.handle))
        for work in arriving:
            work.wait()
        for work, _ in self.works:
            work.wait()
        self.works, self.following = [], []

    def _empty(self, rows: int) -> torch.Tensor:
        return torch.empty((rows, *self.shape), dtype=self.dtype, device=self.mesh.device)


def parted(model: Model, plan: Plan, train: Train) -> tuple[Model, Plan, Train]:
    """The layers that are trained, their plan and what they train on; a model without a frozen encoder as it is."""
    if not is_encoded(model):
        return model, plan, train
    return denoiser_of(model), without_frozen(plan), latent_work(model, train)
