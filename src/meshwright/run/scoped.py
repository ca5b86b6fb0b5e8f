"""State with a scope for each kind (Xu et al., 2025, arXiv 2501.04266): weights sharded over a few ranks, gradients
over more, what the optimizer updates over all.

Torch's ``fully_shard`` has the weights over the innermost scope, as they are computed with: it gathers a layer for its
pass and scatters its gradient there. The rest is done here, a layer at a time. A rank's part of that gradient is
scattered on over the gradients' scope and added up; once a step sums are scattered on over the optimizer's; what a
rank has updated is gathered the same way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from meshwright.run.collect import all_gather_single, reduce_scatter_single
from meshwright.run.fsdp import About, Gathering, fsdp_parameters, local_values, runs_of, sharded_units, sum_parts
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.run.model import Stage
from meshwright.run.pieces import HeldElements
from meshwright.run.record import recorder
from meshwright.run.shards import Run, ShardCode
from meshwright.sync.fragments import GRADIENTS
from meshwright.sync.scoped import GRADIENT_SHARD, OPTIMIZER_SHARD, WEIGHT_SHARD


class _Part(NamedTuple):
    """This rank's part of a parameter: its elements from ``start`` on, and where a unit's gradient has them."""

    about: About
    parameter: nn.Parameter
    start: int
    run: Run

    def values(self) -> torch.Tensor:
        """The elements that this rank computes with, 1-D."""
        return local_values(self.parameter).view(-1)


class Scoped(Gathering):
    """A stage with scopes for its state; the same duties as the buckets of ``sync``."""

    def __init__(
        self,
        stage: Stage,
        mesh: ProcessMesh,
        *,
        params: torch.dtype,
        grads: torch.dtype,
        masters: torch.dtype,
        codes: Mapping[str, str],
        seed: int = 0,
    ):
        """`codes`: those in which parameters are gathered and gradients scattered, by what is exchanged; `seed` is that
        of codes that draw."""
        super().__init__()
        self.stage, self.mesh = stage.stage, mesh
        about = {name: About(p) for name, p in stage.named_parameters() if p.requires_grad}
        group = mesh[WEIGHT_SHARD]
        units = sharded_units(stage, group, mesh, params, grads, codes, seed)
        names = {id(p): name for name, p in stage.named_parameters()}
        self.codes += [code for *_, mine in units for code in mine]
        #: Whether sums go on over the optimizer's scope beside that pass: not on a processor, where it would wait.
        self.beside = mesh.plan.overlap.dp and mesh.device.type != "cpu"
        self.flats: list[_Flat] = []
        like = torch.empty(0, dtype=grads, device=mesh.device)
        for number, (unit, said, _) in enumerate(units):
            parts = []
            for one, run in zip(fsdp_parameters(unit), runs_of(unit, group), strict=True):
                shape, parameter = one._orig_size, one.sharded_param
                start = -(-shape[0] // group.size) * group.index * (shape.numel() // shape[0])
                parts.append(_Part(about[names[id(parameter)]], parameter, start, run))
                parameter.register_post_accumulate_grad_hook(_drop)  # it is in the sums already
            # vectors are exchanged as they are
            coded = GRADIENTS in codes
            some = [[p for p in parts if p.run.coded == matrix] for matrix in (True, False)] if coded else [parts]
            mine = []
            for which, alike in enumerate(some):
                if alike:
                    code = codes[GRADIENTS] if coded and which == 0 else ""
                    mine.append(_Flat(alike, mesh, like, said, masters, code, seed, f"{self.stage}.{number}"))
            self.flats += mine
            unit.set_all_reduce_hook(partial(self._arrived, mine))
        self.codes += [code for flat in self.flats for code in flat.codes.values()]
        self._held = [h for flat in self.flats for h in flat.held()]

    def held(self) -> Iterable[HeldElements]:
        """Yield the elements that this rank updates."""
        return self._held

    def _arrived(self, flats: list[_Flat], reduced: torch.Tensor) -> None:
        """A unit's gradient of a pass is scattered over the weights' scope (torch calls it, on a stream for that)."""
        for flat in flats:
            flat.add(reduced)
            if self.final and self.beside:
                flat.fold()
        if reduced.is_cuda:
            # made on another stream: nobody may have its memory before this one is done with it
            reduced.record_stream(torch.cuda.current_stream())

    def reset(self) -> None:
        """A step begins."""
        self.final = False
        for flat in self.flats:
            flat.reset()
        super().reset()

    def finish(self) -> None:
        """The gradients are whole, and in what :meth:`held` gave out."""
        for flat in self.flats:
            if not flat.folded:
                flat.fold()
        sum_parts(((part, h.gradient) for flat in self.flats for part, h in flat.summed), self.mesh["tp"])

    def publish(self) -> None:
        """The masters have changed: all ranks get their parts of the weights."""
        for flat in self.flats:
            flat.refresh()


class _Flat:
    """Values of a unit's parameters on this rank, one after the other, which are exchanged in one code or in none.

    They are [parts of the gradients' scope, parts of the optimizer's, width], filled up with zeros; this rank updates
    one row of the last."""

    def __init__(
        self,
        parts: Sequence[_Part],
        mesh: ProcessMesh,
        like: torch.Tensor,
        said: Mapping[str, Any],
        masters: torch.dtype,
        code: str,
        seed: int,
        place: str,
    ):
        """`like` has the type of sums; `said` is told to the recorder; `code` is that of sums, "" for none."""
        self.parts, self.middle, self.outer = list(parts), mesh[GRADIENT_SHARD], mesh[OPTIMIZER_SHARD]
        self.tp, self.replica, self.said = mesh["tp"], mesh["replica"], {k: v for k, v in said.items() if k != "inside"}
        self.inside, ways = said["inside"], self.middle.size * self.outer.size
        length = sum(part.run.end - part.run.start for part in parts)
        width = -(-length // ways)
        self.padding = width * ways - length
        self.lo = (self.middle.index * self.outer.size + self.outer.index) * width
        #: The sums of a step [parts of the optimizer's scope * width], from its first pass until they are scattered on.
        self.sums: torch.Tensor | None = None
        self.folded = False
        self.gradient, self.width = like.new_zeros(width), width
        self.codes = {
            group.name: ShardCode(code, group, [Run(0, size)], seed, f"{place}{group.name}")
            for group, size in ((self.middle, width * self.outer.size), (self.outer, width))
            if code and not group.alone
        }
        #: What this rank updates, with the masters' place in the weights, and the ranks that have parts of a gradient.
        self.summed: list[tuple[int, HeldElements]] = []
        self._weights: list[tuple[torch.Tensor, HeldElements]] = []
        at = 0
        for part in parts:
            self._own(part, at, masters)
            at += part.run.end - part.run.start

    def _own(self, part: _Part, at: int, masters: torch.dtype) -> None:
        """Take on the elements of a part that lies from `at` on, as far as this rank updates them."""
        values, about = part.values(), part.about
        lo, hi = max(self.lo, at), min(self.lo + self.width, at + values.numel())
        if lo >= hi:
            return
        mine = values[lo - at : hi - at]
        held = HeldElements(
            parameter=about.info,
            start=part.start + lo - at,
            stop=part.start + hi - at,
            master=mine if mine.dtype == masters else mine.to(masters),
            gradient=self.gradient[lo - self.lo : hi - self.lo],
            copies=self.replica.size * about.copies,
            decays=len(part.parameter.shape) > 1,
            owner=self.replica.index == 0 and self.tp.index % about.copies == 0,
        )
        self.summed.append((about.sums, held))
        self._weights.append((mine, held))

    def held(self) -> list[HeldElements]:
        """The elements that this rank updates."""
        return [h for _, h in self.summed]

    def reset(self) -> None:
        """A step begins."""
        self.sums, self.folded = None, False

    def add(self, whole: torch.Tensor) -> None:
        """Scatter a pass's gradient of the unit on over the gradients' scope; add this rank's part to the sums."""
        mine = pad(torch.cat([whole[p.run.start : p.run.end] for p in self.parts]), (0, self.padding))
        out = self._scattered(mine, self.middle, inside=self.inside)
        self.sums = out if self.sums is None else self.sums.add_(out)

    def fold(self) -> None:
        """Scatter the step's sums on over the optimizer's scope, and sum them over its copies."""
        if self.sums is None:  # no pass came this way
            self.sums = self.gradient.new_zeros(self.width * self.outer.size)
        out, self.sums, self.folded = self._scattered(self.sums, self.outer), None, True
        if not self.replica.alone:
            with recorder().span("all_reduce", "dp", **self.said, num_bytes=out.nbytes, group=self.replica.ranks):
                dist.all_reduce(out, group=self.replica.handle)
        self.gradient.copy_(out)

    def _scattered(self, whole: torch.Tensor, group: AxisGroup, **more: bool) -> torch.Tensor:
        """This rank's part of the sum of a group's values."""
        if group.alone:
            return whole
        out, said = whole.new_empty(len(whole) // group.size), self.said | more | {"group": group.ranks}
        if group.name in self.codes:
            self.codes[group.name].scatter(out, whole, **said).wait()
            return out
        with recorder().span("reduce_scatter", "dp", **said, num_bytes=whole.nbytes):
            reduce_scatter_single(out, whole, group=group.handle)
        return out

    def refresh(self) -> None:
        """Gather what the ranks of the optimizer's scope have updated, then what those of the gradients' have."""
        for values, held in self._weights:
            if values.data_ptr() != held.master.data_ptr():
                values.copy_(held.master)
        parts = [pad(p.values(), (0, p.run.end - p.run.start - p.values().numel())) for p in self.parts]
        whole = pad(torch.cat(parts), (0, self.padding))[self.lo : self.lo + self.width].clone()
        for group in (self.outer, self.middle):
            if group.alone:
                continue
            mine, whole = whole, whole.new_empty(len(whole) * group.size)
            with recorder().span("all_gather", "dp_gather", **self.said, num_bytes=whole.nbytes, group=group.ranks):
                all_gather_single(whole, mine, group=group.handle)
        at = 0
        for part in self.parts:
            values = part.values()
            values.copy_(whole[at : at + values.numel()])
            at += part.run.end - part.run.start


def _drop(parameter: nn.Parameter) -> None:
    parameter.grad = None
