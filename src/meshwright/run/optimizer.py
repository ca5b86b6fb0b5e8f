"""The optimizer over what a rank holds, on flat pieces that share storage with the parameters: one of torch's, Lion, or
one that scales each matrix (``layerwise.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from meshwright.run.clusters import ClusterMomentum, moment
from meshwright.run.host_update import HostUpdates
from meshwright.run.layerwise import BETAS, Lamb, Lars, Matrices
from meshwright.run.lion import Lion
from meshwright.run.mesh import AxisGroup
from meshwright.run.moments import Moments
from meshwright.run.pieces import HeldElements, TensorPiece
from meshwright.run.record import recorder
from meshwright.run.scaled import Scaled
from meshwright.run.settings import Settings
from meshwright.spec.workload import LAYERWISE
from meshwright.sync.record import SharedScales, SyncPolicy

#: Optimizers by the workload's word, with the names of their moments.
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lars": ("momentum_buffer",),
    "adagrad": ("sum",),
    "scaled": ("scale",),
}
#: Those that count their steps.
COUNTED = ("adamw", "adam", "lamb", "adagrad")
#: Elements that are widened for their update at once.
AT_ONCE = 2**24


class Optimizer:
    """Clipping and update of the held pieces, over the gradient of all ranks that step together (``world``). Matrices
    decay, vectors do not (GPT-3, 2005.14165, practice)."""

    def __init__(
        self,
        held: list[HeldElements],
        kind: str,
        settings: Settings,
        world: AxisGroup,
        device: torch.device,
        parts: Sequence[int] = (),
        clusters: int = 0,
        moved: Callable[[tuple[str, ...]], Moments | HostUpdates] | None = None,
        scaled: tuple[int, SharedScales] | None = None,
        moments: torch.dtype | None = None,
    ):
        """`parts`: the part of the model that each held piece is of, where those have learning rates of their own,
        which ``rates`` multiply. `clusters`: parts of the data that have a momentum each. `moved` makes those moments
        that lie on drives, of their names, or has the host update. `scaled`: the steps of a round, in which steps of
        kind "scaled" keep their scales. `moments` is their type, that of the masters if left out; where it is another,
        an update is computed in it and rounded to the masters'."""
        self.names = tuple(map(moment, range(clusters))) if clusters else MOMENTS[kind]
        self.rates = [1.0] * (1 + max(parts, default=0))
        self.held, self.kind, self.settings, self.world, self.device = held, kind, settings, world, device
        self.copies = torch.tensor([h.copies for h in held], dtype=torch.float64, device=device)
        double = any(h.gradient.dtype == torch.float64 for h in held)
        self.wide = torch.float64 if double else torch.float32
        #: Held pieces whose masters have fewer bits than their moments: theirs are here for their update alone.
        self.narrow = frozenset(i for i, h in enumerate(held) if moments not in (None, h.master.dtype))
        self.masters = [
            nn.Parameter(h.master.new_empty(0, dtype=moments) if i in self.narrow else h.master)
            for i, h in enumerate(held)
        ]
        among = parts.__getitem__ if parts else lambda i: 0
        groups = [
            {
                "params": [
                    m for i, (m, h) in enumerate(zip(self.masters, held)) if h.decays == decays and among(i) == part
                ],
                "weight_decay": settings.weight_decay if decays else 0.0,
                "part": part,
            }
            for part in range(len(self.rates))
            for decays in (True, False)
        ]
        groups = [g for g in groups if g["params"]] or [{"params": [nn.Parameter(torch.zeros(0))]}]
        if kind in LAYERWISE:
            matrices = Matrices(held, world, device)
            said = {"lr": settings.lr} | ({"betas": BETAS, "eps": settings.eps} if kind == "lamb" else {})
            self.torch = (Lamb if kind == "lamb" else Lars)(groups, self.masters, matrices, **said)
        elif scaled is not None:
            self.torch = Scaled(groups, settings.lr, *scaled)
        elif clusters:
            self.torch = ClusterMomentum(groups, settings.lr, clusters)
        else:
            self.torch = _make(kind, groups, settings)
        self.moments_away = (
            moved(self.names)
            if moved is not None and (self.names or any(h.arrived is not None for h in held))
            else None
        )
        absent = self.moments_away.absent if self.moments_away is not None else frozenset()
        for number, master in enumerate(self.masters):
            state = self.torch.state[master]
            for name in self.names if number not in absent else ():
                state[name] = torch.zeros_like(held[number].master, dtype=master.dtype)
            if kind in COUNTED:
                state["step"] = torch.zeros((), dtype=torch.float32, device=held[number].master.device)

    def totals(self, loss: torch.Tensor, *more: torch.Tensor) -> tuple[float, float, list[float]]:
        """Return the loss of the whole job, the Euclidean norm of its gradient, every element counted once, and sums of
        what there is more (float64 scalars), by one exchange for all. `loss` is this rank's part, likewise."""
        square = torch.zeros_like(loss)
        if self.held:
            norms = torch._foreach_norm([h.gradient for h in self.held], 2, self.wide)
            square = (torch.stack(norms).to(torch.float64).square() / self.copies).sum()
        every = torch.stack((loss, square, *more))
        if not self.world.alone:
            with recorder().span("all_reduce", "dp"):
                dist.all_reduce(every, group=self.world.handle)
        total, square, *rest = every.tolist()
        return total, square**0.5, rest

    def squares(self, parts: Sequence[int], count: int) -> torch.Tensor:
        """This rank's share of the squared lengths of the whole gradient [count], by the part of each held piece."""
        out = torch.zeros(count, dtype=torch.float64, device=self.device)
        if not self.held:
            return out
        norms = torch._foreach_norm([h.gradient for h in self.held], 2, self.wide)
        squares = torch.stack(norms).to(torch.float64).square() / self.copies
        return out.index_add_(0, torch.tensor(parts, device=self.device), squares)

    def update(self, step: int, norm: float, some: range | None = None) -> None:
        """One update, with the gradient scaled down to the clipping norm if it is longer; of these held pieces alone,
        or of all."""
        if isinstance(self.torch, ClusterMomentum):
            self.torch.cluster = step % self.torch.clusters
        clip = self.settings.clip
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for group in self.torch.param_groups:
            group["lr"] = self.settings.lr_at(step) * self.rates[group.get("part", 0)]
        chosen = range(len(self.held)) if some is None else some
        away = self.moments_away
        if away is None:
            self._apply(chosen, scale)
            return
        here = [i for i in chosen if i not in away.away]
        if here:
            self._apply(here, scale)
        away.each(partial(self._apply_moved, scale))

    def _apply(self, chosen: Sequence[int], scale: float) -> None:
        """Update these held pieces, with their gradients scaled; narrow ones some at a time, unless they are looked
        at together."""
        if not self.narrow or self.kind in (*LAYERWISE, "scaled"):
            self._step(chosen, scale)
            return
        some: list[int] = []
        for number in chosen:
            some.append(number)
            if sum(self.held[i].master.numel() for i in some) >= AT_ONCE:
                self._step(some, scale)
                some = []
        if some:
            self._step(some, scale)

    def _step(self, chosen: Sequence[int], scale: float) -> None:
        """Update these held pieces together."""
        narrow = [i for i in chosen if i in self.narrow]
        for number in narrow:
            master = self.masters[number]
            master.data = self.held[number].master.to(master.dtype)
        masters = [self.masters[i] for i in chosen]
        with torch.no_grad():
            some = [h.gradient if h.arrived is None else h.arrived for h in (self.held[i] for i in chosen)]
            gradients = [gradient.to(master.dtype) for master, gradient in zip(masters, some)]
            if scale != 1.0 and gradients:
                torch._foreach_mul_(gradients, scale)  # the step is over: nothing reads them after this
            for master, gradient in zip(masters, gradients):
                master.grad = gradient
        self.torch.step()
        for master in masters:
            master.grad = None
        for number in narrow:
            master = self.masters[number]
            self.held[number].master.copy_(master.data)
            master.data = master.data.new_empty(0)

    def _apply_moved(self, scale: float, moments: dict[int, dict[str, torch.Tensor]]) -> None:
        """Update held pieces that :attr:`moments_away` has ready, with the moments that are here for it alone."""
        for number, state in moments.items():
            self.torch.state[self.masters[number]].update(state)
        self._apply(list(moments), scale)
        for number, state in moments.items():
            for name in state:
                del self.torch.state[self.masters[number]][name]

    def set_step(self, step: int) -> None:
        """Bias corrections go on from so many updates, and moments that were filled go back to where they lie."""
        if self.moments_away is not None:
            self.moments_away.put()
        if isinstance(self.torch, Scaled):
            self.torch.count = step
        for state in self.torch.state.values():
            if "step" in state:
                state["step"].fill_(float(step))

    def moments(self, number: int) -> list[torch.Tensor]:
        """The moments of one of the held pieces, live."""
        return [self.torch.state[self.masters[number]][name] for name in self.names]

    def pieces(self) -> list[TensorPiece]:
        """Masters and moments, live; of moments on drives copies, which :meth:`set_step` writes back."""
        out, taken = [], {} if self.moments_away is None else self.moments_away.taken()
        for number, (master, h) in enumerate(zip(self.masters, self.held)):
            where = (h.parameter, h.start, h.stop)
            out.append(TensorPiece("param", *where, h.master.detach(), h.owner))
            state = taken.get(number) or self.torch.state[master]
            out += [TensorPiece(name, *where, state[name], h.owner) for name in self.names]
        return out


def stepping(
    policy: SyncPolicy, kind: str, settings: Settings
) -> tuple[str, Settings, tuple[int, SharedScales] | None]:
    """Return the kind of steps that a workload's optimizer takes under a policy, its settings, and what scales it."""
    if not policy.early and not policy.rule.optimizer:
        return kind, settings, None
    # the norm of all is not known when the first layers are updated, and what arrives is an update, not a gradient
    unclipped = msgspec.structs.replace(settings, clip=0.0)
    if policy.scaling is not None:
        return "scaled", unclipped, (policy.when, policy.scaling)
    return "sgd" if policy.rule.optimizer else kind, unclipped, None


def _make(kind: str, groups: list[dict], settings: Settings) -> torch.optim.Optimizer:
    lr, fused = settings.lr, all(p.is_floating_point() for g in groups for p in g["params"])
    match kind:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=fused)
        case "adam":
            return torch.optim.Adam(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=fused)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=lr)
        case "lion":
            return Lion(groups, lr)
        case "momentum":
            return torch.optim.SGD(groups, lr=lr, momentum=0.9)
        case _:
            return torch.optim.SGD(groups, lr=lr)
