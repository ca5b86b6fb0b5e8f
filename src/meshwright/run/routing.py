"""A rank's routers while they train: how often each expert is chosen, and losses that even that out.

A mixture's balance loss is E * sum_i f_i * P_i (Shazeer et al., 1701.06538; Switch, 2101.03961): of its E experts f_i
is the share of choices that are expert i and P_i the mean of its probabilities. ``micro`` takes f from a rank's own
microbatch. ``global`` takes it from the microbatches of all ranks, and of all in this step so far (Qiu et al., "Demons
in the Detail", 2501.11873): balance is asked of the global batch, so that experts may specialise. The loss of locality
(LocMoE, 2401.13920) is the mean probability that goes to experts on other nodes.

The losses join where the tokens pass, as Megatron's do: the value is on the side, the gradient is that of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from meshwright.plan import Plan
from meshwright.run.collect import all_reduce
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.spec.architecture import Model
from meshwright.spec.routing import write
from meshwright.spec.workload import Train


class RouterStatistics:
    """The choices of one router: ``counts`` int64 [experts] of all steps, ``step_counts`` of this one, and
    ``follows`` int64 [experts, experts], choices here behind those of the mixture before, None until it is asked for.
    ``loss`` is the sum of this step's balance losses."""

    def __init__(self, experts: int, device: torch.device):
        self.counts = torch.zeros(experts, dtype=torch.int64, device=device)
        self.step_counts = torch.zeros(experts, dtype=torch.float64, device=device)
        self.follows: torch.Tensor | None = None
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.near = torch.zeros((), dtype=torch.int64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)

    def begin(self) -> None:
        """A step begins."""
        self.step_counts.zero_()
        self.loss.zero_()

    def saw(self, chosen: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Count the experts `chosen` int64 [tokens, k], and `before` those of the same tokens in the mixture before;
        return the counts."""
        experts = len(self.counts)
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        self.counts += counts
        if before is not None and self.follows is not None:
            pairs = before.unsqueeze(2) * experts + chosen.unsqueeze(1)
            self.follows += torch.bincount(pairs.flatten(), minlength=experts**2).view(experts, experts)
        return counts


class _Joined(torch.autograd.Function):
    """Hidden states as they are, with a loss beside them whose gradient is 1."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def join(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """`x`, with `loss` added to what is minimised."""
    return _Joined.apply(x, loss)


def frequency(counts: torch.Tensor, statistics: RouterStatistics, groups: tuple[AxisGroup, ...]) -> torch.Tensor:
    """Return the share of choices that each expert has, float64 [experts]: of a microbatch, or where there are groups
    of all their ranks' and of the step so far."""
    found = counts.to(torch.float64)
    if groups:
        for group in groups:
            all_reduce(found, group, queue="ep")
        statistics.step_counts += found
        found = statistics.step_counts
    return found / found.sum()


def balance(shares: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """Return the balance loss of a microbatch summed over its tokens, from the routers' `shares` [tokens, experts]."""
    return len(frequency) * (shares.sum(0) * frequency.to(shares.dtype)).sum()


def far(shares: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    """Return the probability that goes to experts that are `away`, bool [experts], summed over tokens."""
    return shares[:, away].sum()


def routers(stages: dict[int, nn.Module]) -> list[nn.Module]:
    """The mixtures of a rank's stages, by layer."""
    found = [
        m
        for stage in stages.values()
        for m in stage.modules()
        if isinstance(getattr(m, "seen", None), RouterStatistics)
    ]
    return sorted(found, key=lambda m: m.layer)


@contextmanager
def watched(path: str, mixtures: list[nn.Module], model: Model, mesh: ProcessMesh) -> Iterator[None]:
    """Count which experts follow which, too, and write what was chosen inside as a file of ``routing=``; collective,
    and by the first rank. Without a path nothing is done."""
    if not path:
        yield
        return
    for before, one in zip([None, *mixtures], mixtures):
        seen = one.seen
        seen.follows = torch.zeros((len(seen.counts),) * 2, dtype=torch.int64, device=seen.counts.device)
        one.before = before
    yield
    found = gathered(mixtures, model.routed_layers, mesh)
    if not mesh.first:
        return
    counts, after = (found[name].cpu().numpy().astype(np.float64) for name in ("counts", "follows"))
    borders = after.sum(axis=(1, 2)) == 0  # between stages nobody sees both: as chance would have it
    after[borders] = counts[:-1, :, None][borders] * counts[1:, None, :][borders]
    apart = any(bool(one.away.any()) for one in mixtures)  # on one node all experts are near, wherever that is said
    near = float(found["near"]) / float(counts.sum()) if apart else 0.0
    write(Path(path), counts, after if len(after) else None, near=near)


def gathered(mixtures: list[nn.Module], layers: tuple[int, ...], mesh: ProcessMesh) -> dict[str, torch.Tensor]:
    """Return the statistics of all layers with experts, summed over all ranks: ``counts`` [layers, experts],
    ``follows`` [layers - 1, experts, experts] where they were counted, and ``near``, a count."""
    world = mesh["world"]
    sizes = torch.tensor([len(mixtures[0].seen.counts) if mixtures else 0], device=mesh.device)
    if not world.alone:  # a stage may have no mixture
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=world.handle)
    experts = int(sizes)
    counts = torch.zeros((len(layers), experts), dtype=torch.int64, device=mesh.device)
    follows = torch.zeros((max(0, len(layers) - 1), experts, experts), dtype=torch.int64, device=mesh.device)
    near = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for mixture in mixtures:
        at = layers.index(mixture.layer)
        counts[at] += mixture.seen.counts
        if at and mixture.seen.follows is not None:
            follows[at - 1] += mixture.seen.follows
        near += mixture.seen.near
    for one in (counts, follows, near):
        all_reduce(one, world)
    return {"counts": counts, "follows": follows, "near": near}


def measures(mixtures: list[nn.Module], train: Train, plan: Plan) -> dict[str, float]:
    """Return what this rank's routers were seen to do, where the question asks something of them: the share of copies
    that were dropped so far, and the balance and locality losses of the last step."""
    out = {}
    if mixtures and plan.experts.capacity:
        copies = sum(int(one.seen.counts.sum()) for one in mixtures)
        out["dropped"] = sum(int(one.seen.dropped) for one in mixtures) / max(1, copies)
    if mixtures and (train.balance or train.locality):
        out["router_loss"] = sum(float(one.seen.loss) for one in mixtures)
    return out
