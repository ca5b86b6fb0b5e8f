"""A placed computation carried out by real processes in float64: forward, derived backward and steps of descent.

Every rank holds its part of each tensor, makes its part of each step with torch, and between them carries out the
transfers of the algebra (``run/placements.py``); no step is differentiated by torch. Beside it every rank computes the
same forward whole, by dense einsums, and has torch's autograd differentiate that, so that losses, gradients and weights
can be laid side by side. Which rows a sparse relation has is known to all ranks; its values lie where they are placed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from sys import float_info
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from meshwright.answer.joined import JoinedPrediction, JoinedStep
from meshwright.errors import MeshwrightError
from meshwright.layers import algebra
from meshwright.layers.algebra import REPLICATE, Placement
from meshwright.run import launch, placements
from meshwright.run.annotated import PlacedRun
from meshwright.run.relations import Relations, aligned, data, einsum, whole
from meshwright.run.world import World
from meshwright.spec.computation import ADD, JOIN, ONE, OVER_A_KEY, PRESENT, SLOPE, UPDATE

SEED = 0
_ROOT_TWO, _ROOT_TAU = 2.0**0.5, (2.0 * np.pi) ** 0.5
#: The slopes of functions, by what they are of.
SLOPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: (x > 0).to(x.dtype),
    "gelu": lambda x: (1 + torch.erf(x / _ROOT_TWO)) / 2 + x * torch.exp(-x * x / 2) / _ROOT_TAU,
    "sigmoid": lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x)),
    "tanh": lambda x: 1 - torch.tanh(x) ** 2,
    "exp": torch.exp,
    "log": lambda x: 1 / x,
    "square": lambda x: 2 * x,
    "sqrt": lambda x: 0.5 / torch.sqrt(x),
    "reciprocal": lambda x: -1 / (x * x),
}
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": torch.log,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    PRESENT: torch.ones_like,
    **{name + SLOPE: slope for name, slope in SLOPES.items()},
}


def start(found: JoinedPrediction, steps: int) -> PlacedRun:
    """Train a placed computation on processes of this machine, and on one beside.

    Raises:
        MeshwrightError: A003 where a loss is no number.
        RankDied: L001 when a process ends before its time.
    """
    ranks = len(list(found.mesh.ranks))
    return msgspec.convert(launch.start(_train, found, steps, num_ranks=ranks, device="cpu"), PlacedRun)


def _train(world: World, found: JoinedPrediction, steps: int) -> dict[str, Any]:
    relations, given = data(found.computation, SEED)
    rank = _Rank(found, relations, world.rank)
    rank.hold(given)
    trained = {t.name: given[t.name].clone() for t in found.computation.inputs if t.trained}
    losses, alone, errors = [], [], [0.0, 0.0]
    for step in range(steps):
        losses.append(rank.step())
        reference = {name: tensor.requires_grad_() for name, tensor in trained.items()}
        loss = whole(found.computation, relations, given | reference, FORMS)
        gradients = torch.autograd.grad(loss, list(reference.values()))
        alone.append(float(loss.detach()))
        if step == 0:
            errors[0] = rank.error(dict(zip(reference, gradients)), rank.gradient)
        with torch.no_grad():
            trained = {
                name: tensor - found.computation.rate * g for (name, tensor), g in zip(reference.items(), gradients)
            }
        rank.update()
        if not isfinite(losses[-1]):
            message = f"the loss of step {step} is {losses[-1]}, and {alone[-1]} on one process"
            help = 'inputs are random: say values = "uniform" where a logarithm or a root reads them, or a smaller rate'
            raise MeshwrightError.one("A003", message, place=found.computation.name, help=help)
    errors[1] = rank.error(trained, rank.held)
    worst = torch.tensor(errors, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"losses": losses, "alone": alone, "gradient_error": float(worst[0]), "weight_error": float(worst[1])}


class _Rank:
    """This rank's part of a computation."""

    def __init__(self, found: JoinedPrediction, relations: Relations, rank: int):
        self.found, self.relations, self.mesh = found, relations, found.mesh
        self.computation = found.computation
        self.sizes = found.mesh.sizes
        self.ranks = list(found.mesh.ranks)
        self.me = self.ranks[rank]
        self.groups = placements.groups_along(found.mesh, rank)
        #: This rank's parts of inputs, and of all tensors by where they are read.
        self.held: dict[str, torch.Tensor] = {}
        self.values: dict[str, dict[Placement, torch.Tensor]] = {}

    def hold(self, given: dict[str, torch.Tensor]) -> None:
        """Keep this rank's parts of all inputs."""
        self.held = {name: self.cut(name, tensor, self.found.homes[name]).clone() for name, tensor in given.items()}

    def rows(self, name: str, place: Placement, at: Sequence[int] | None = None) -> np.ndarray:
        """Numbers of the rows of a sparse tensor that a rank has."""
        return self.relations.rows(self.computation.tensors[name].rows_of, place, self.sizes, at or self.me)

    def cut(self, name: str, tensor: torch.Tensor, place: Placement) -> torch.Tensor:
        """This rank's part of a whole tensor; of a sparse one that is given dense, the values of its rows."""
        rows_of = self.computation.tensors[name].rows_of
        if rows_of:
            keys = self.relations.keys[rows_of][:, self.rows(name, place)]
            return tensor[tuple(torch.from_numpy(k) for k in keys)]
        for p, size, mine in zip(place, self.sizes, self.me):
            tensor = tensor.tensor_split(size, dim=p)[mine] if p >= 0 else tensor
        return tensor

    def step(self) -> float:
        """Forward and backward; the loss."""
        self.values = {name: {self.found.homes[name]: tensor} for name, tensor in self.held.items()}
        for placed in self.found.steps:
            ins = [self.read(name, place) for name, place in zip(placed.step.inputs, placed.ins)]
            self.values[placed.step.output] = {placed.out: self.made(placed, ins)}
        whole_on_all = (REPLICATE,) * len(self.sizes)
        return float(self.read(self.computation.loss, whole_on_all))

    def update(self) -> None:
        """Take the weights behind the step for those of the next one."""
        for placed in self.found.steps:
            if placed.step.kind == UPDATE:
                (self.held[placed.step.inputs[0]],) = self.values[placed.step.output].values()

    @property
    def gradient(self) -> dict[str, torch.Tensor]:
        """This rank's part of the gradient of every trained input, as the step read it."""
        steps = [p for p in self.found.steps if p.step.kind == UPDATE]
        return {p.step.inputs[0]: self.values[p.step.inputs[1]][p.ins[1]] for p in steps}

    def error(self, tensors: dict[str, torch.Tensor], mine: dict[str, torch.Tensor]) -> float:
        """The largest difference of this rank's parts to those of whole tensors, over the largest number of each."""
        worst = 0.0
        for name, tensor in tensors.items():
            apart = (self.cut(name, tensor.detach(), self.found.homes[name]) - mine[name]).abs()
            most = tensor.detach().abs().max().clamp_min(1e-30)
            found = float(apart.max() / most) if apart.numel() else 0.0
            worst = max(worst, found if isfinite(found) else float_info.max)  # a NaN is larger than nothing
        return worst

    def read(self, name: str, place: Placement) -> torch.Tensor:
        """A tensor as it is read at a placement: moved there once."""
        there = self.values[name]
        if place not in there:
            there[place] = self._carried(name, self.found.homes[name], place)
        return there[place]

    def _carried(self, name: str, source: Placement, target: Placement) -> torch.Tensor:
        x, axes = self.values[name][source], [axis for axis, _ in self.mesh.axes]
        sparse = bool(self.computation.tensors[name].rows_of)
        for one in algebra.transfers(self.mesh, source, target, self.computation.shape(name)):
            axis = axes.index(one.axis)
            if sparse:
                x = self._rows_carried(name, one, axis, x)
            else:
                x = placements.carried(one, axis, x, self.sizes[axis], self.me[axis], self.groups[axis])
        return x

    def _rows_carried(self, name: str, one: algebra.Transfer, axis: int, x: torch.Tensor) -> torch.Tensor:
        """Carry out a transfer of the values of a sparse tensor: who has which rows before and behind is known."""
        size, me = self.sizes[axis], self.me[axis]
        peers = [(*self.me[:axis], i, *self.me[axis + 1 :]) for i in range(size)]
        before = [self.rows(name, one.before, at) for at in peers]
        after = [self.rows(name, one.after, at) for at in peers]
        if one.op == "all_reduce":
            x = x.clone()
            dist.all_reduce(x, group=self.groups[axis])
            return x
        if one.op in ("slice", "keep"):
            out = x.new_zeros(len(after[me]))
            shared = np.intersect1d(before[me], after[me])
            if one.op == "slice" or one.before[axis] >= 0 or me == 0:
                out[_at(after[me], shared)] = x[_at(before[me], shared)]
            return out
        # the same row may be at several ranks only where it is a term of a sum, which is then added up
        sent = [x[_at(before[me], np.intersect1d(before[me], theirs))] for theirs in after]
        rows = [np.intersect1d(theirs, after[me]) for theirs in before]
        got = placements.exchanged(sent, [(len(one),) for one in rows], self.groups[axis])
        out = x.new_zeros(len(after[me]))
        for part, some in zip(got, rows):
            out[_at(after[me], some)] += part
        return out

    # -- steps on a rank's parts

    def made(self, placed: JoinedStep, ins: list[torch.Tensor]) -> torch.Tensor:
        """This rank's part of what a step makes."""
        step = placed.step
        if step.kind == ONE:
            return torch.ones((), dtype=torch.float64)
        if step.kind == JOIN:
            return self._join(placed, ins)
        if step.kind in (ADD, UPDATE):
            sparse = bool(self.computation.tensors[step.output].rows_of)
            terms = (x if sparse else aligned(x, keys, step.keys) for x, keys in zip(ins, step.read))
            return sum(factor * x for factor, x in zip(step.factors, terms))
        if step.kind in OVER_A_KEY:
            return getattr(torch, step.kind)(ins[0], dim=step.keys.index(step.over))
        return FORMS[step.kind](ins[0])

    def _join(self, placed: JoinedStep, ins: list[torch.Tensor]) -> torch.Tensor:
        step, tensors = placed.step, self.computation.tensors
        sparse = [i for i, name in enumerate(step.inputs) if tensors[name].rows_of]
        out = self._gathered(placed, ins, sparse) if sparse else einsum(step.read, step.keys, ins)
        if tensors[step.output].rows_of or tuple(out.shape) == (shape := self._shape(step.output, placed.out)):
            return step.factors[0] * out
        return (step.factors[0] * out).expand(shape).contiguous()

    def _shape(self, name: str, place: Placement) -> tuple[int, ...]:
        return tuple(high - low for low, high in self._bounds(name, place))

    def _bounds(self, name: str, place: Placement) -> list[tuple[int, int]]:
        """Where this rank's part of every key begins and ends."""
        lengths = [self.computation.dims[key] for key in self.computation.tensors[name].keys]
        return self.relations.bounds(lengths, place, self.sizes, self.me)

    def _gathered(self, placed: JoinedStep, ins: list[torch.Tensor], sparse: list[int]) -> torch.Tensor:
        """A join with a sparse relation: rows of the dense sides are gathered for its rows, and sums scattered."""
        step, first = placed.step, sparse[0]
        pattern, place = step.read[first], placed.ins[first]
        rows = self.rows(step.inputs[first], place)
        keys = self.relations.keys[self.computation.tensors[step.inputs[first]].rows_of][:, rows]
        by_key = dict(zip(pattern, keys))
        operands, read = [], []
        for name, its, where, x in zip(step.inputs, step.read, placed.ins, ins):
            if self.computation.tensors[name].rows_of:
                operands.append(x)
                read.append(("",))
                continue
            shared = [k for k in its if k in by_key]
            rest = [k for k in its if k not in by_key]
            x = x.permute([its.index(k) for k in (*shared, *rest)])
            lows = dict(zip(its, (low for low, _ in self._bounds(name, where))))
            if shared:
                x = x[tuple(torch.from_numpy(by_key[k] - lows[k]) for k in shared)]
            operands.append(x)
            read.append((*([""] if shared else []), *rest))
        if self.computation.tensors[step.output].rows_of:
            return einsum(read, ("",), operands)
        kept = [k for k in step.keys if k in by_key]
        rest = [k for k in step.keys if k not in by_key and any(k in its for its in read)]
        made = einsum(read, (*([""] if kept else []), *rest), operands)
        bounds = dict(zip(step.keys, self._bounds(step.output, placed.out)))
        if kept:
            at = np.zeros(len(rows), np.int64)
            for k in kept:
                at = at * (bounds[k][1] - bounds[k][0]) + by_key[k] - bounds[k][0]
            lengths = [bounds[k][1] - bounds[k][0] for k in kept]
            flat = made.new_zeros((int(np.prod(lengths)), *made.shape[1:]))
            made = flat.index_add_(0, torch.from_numpy(at), made).view(*lengths, *made.shape[1:])
        return aligned(made, (*kept, *rest), step.keys)


def _at(rows: np.ndarray, some: np.ndarray) -> torch.Tensor:
    """Where some of a rank's rows are among them."""
    return torch.from_numpy(np.searchsorted(rows, some))
