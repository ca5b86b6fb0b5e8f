"""Sequences cut over real processes in ways that training does not take, each as its paper has it.

Outputs and gradients are held against the plain computation in one process.

Every function is one rank's part. Exchanges are differentiable, so that gradients travel the way back by themselves,
but for BurstAttention, whose backward is its own. Shapes: q, k, v are [heads, tokens, head dim] of this rank, at
``places`` of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run import launch, mesh
from meshwright.run.exchange import swap
from meshwright.run.visible import runs_of
from meshwright.run.world import World

HEADS, TOKENS, DIM = 4, 32, 8


class SequenceCut(NamedTuple):
    """This rank's place among all, and which tokens a rank holds."""

    rank: int
    size: int
    tokens: Callable[[int, int], torch.Tensor]

    def of(self, rank: int) -> torch.Tensor:
        """The tokens of a rank."""
        return self.tokens(rank, self.size)

    @property
    def places(self) -> torch.Tensor:
        return self.of(self.rank)


def contiguous(rank: int, size: int) -> torch.Tensor:
    return torch.arange(TOKENS).tensor_split(size)[rank]


def zigzag(rank: int, size: int) -> torch.Tensor:
    """An early and a late piece, so that a causal mask leaves all ranks the same work."""
    return torch.cat([torch.arange(*run) for run in runs_of(TOKENS, size, rank, balanced=True)])


# ---- exchanges


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return _shifted(x, by)

    @staticmethod
    def backward(ctx, grad):
        return _shifted(grad, -ctx.by), None


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    if by % size == 0:
        return x
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.isend(x, (rank + by) % size)
    dist.recv(out, (rank - by) % size)
    sent.wait()
    return out


def shift(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """Return the tensor of the rank `by` places before this one; gradients go back. All ranks' have one shape."""
    return _Shift.apply(x, by)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, like, source):
        ctx.source = source
        out = torch.empty_like(like)
        dist.recv(out, source)
        return out

    @staticmethod
    def backward(ctx, grad):
        dist.send(grad.contiguous(), ctx.source)
        return torch.zeros_like(grad), None


def received(like: torch.Tensor, source: int) -> torch.Tensor:
    """Receive a tensor from rank `source`, of the shape of `like`, which must take gradients; they go back."""
    return _Receive.apply(like, source)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target):
        ctx.target = target
        dist.send(x.contiguous(), target)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty(HEADS, DIM, DIM, dtype=torch.float64)
        dist.recv(out, ctx.target)
        return out, None


# ---- what a block gives, and how two are merged


def block(q, k, v, rows, columns):
    """Output of rows over columns that a causal mask leaves, and the logarithm of its sums; -inf where none is left."""
    scores = q @ k.transpose(1, 2) * DIM**-0.5
    scores = scores.masked_fill(rows[:, None] < columns[None, :], float("-inf"))
    sums = scores.logsumexp(-1, keepdim=True)
    weights = (scores - sums.masked_fill(sums == float("-inf"), 0.0)).exp()
    return weights @ v, sums


def merge(a, b):
    """Two blocks of the same rows as one."""
    sums = torch.logaddexp(a[1], b[1])
    shares = [(s - sums.masked_fill(sums == float("-inf"), 0.0)).exp() for _, s in (a, b)]
    return a[0] * shares[0] + b[0] * shares[1], sums


# ---- the papers


def ring_self_attention(q, k, v, cut: SequenceCut):
    """Two trips, keys and then values, with whole rows of scores kept (Li et al., 2021, 2105.13120)."""
    order = [(cut.rank - step) % cut.size for step in range(cut.size)]
    scores = []
    for step, owner in enumerate(order):
        found = q @ k.transpose(1, 2) * DIM**-0.5
        scores.append(found.masked_fill(cut.places[:, None] < cut.of(owner)[None, :], float("-inf")))
        k = shift(k) if step + 1 < cut.size else k
    weights = torch.cat(scores, -1).softmax(-1).split([s.shape[-1] for s in scores], -1)
    out = torch.zeros_like(q)
    for step, part in enumerate(weights):
        out = out + part @ v
        v = shift(v) if step + 1 < cut.size else v
    return out


def tokenring(q, k, v, cut: SequenceCut):
    """Queries go round while outputs return to their owners (2412.20501)."""
    merged = None
    for step in range(cut.size):
        owner = (cut.rank - step) % cut.size
        out, sums = block(q, k, v, cut.of(owner), cut.places)
        back = shift(torch.cat((out, sums), -1), -step)
        part = back[..., :-1], back[..., -1:]
        merged = part if merged is None else merge(merged, part)
        q = shift(q) if step + 1 < cut.size else q
    return merged[0]


class _Burst(torch.autograd.Function):
    """Keys and values go round forward; backward they stay, and queries go round with their gradients and two numbers
    a row (Sun et al., 2024, 2403.09347)."""

    @staticmethod
    def forward(ctx, q, k, v, cut):
        merged, keys, values = None, k, v
        for step in range(cut.size):
            part = block(q, keys, values, cut.places, cut.of((cut.rank - step) % cut.size))
            merged = part if merged is None else merge(merged, part)
            keys, values = _shifted(keys, 1), _shifted(values, 1)
        ctx.save_for_backward(q, k, v, *merged)
        ctx.cut = cut
        return merged[0]

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, sums = ctx.saved_tensors
        cut, scale = ctx.cut, DIM**-0.5
        moving = torch.cat((q, torch.zeros_like(q), grad, sums, (grad * out).sum(-1, keepdim=True)), -1)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for step in range(cut.size):
            rows = cut.of((cut.rank - step) % cut.size)
            there, dq, do, lse, delta = moving.split([DIM, DIM, DIM, 1, 1], -1)
            scores = there @ k.transpose(1, 2) * scale
            weights = (scores - lse).exp().masked_fill(rows[:, None] < cut.places[None, :], 0.0)
            inner = weights * (do @ v.transpose(1, 2) - delta)
            dv = dv + weights.transpose(1, 2) @ do
            dk = dk + inner.transpose(1, 2) @ there * scale
            moving = _shifted(torch.cat((there, dq + inner @ k * scale, do, lse, delta), -1), 1)
        return moving[..., DIM : 2 * DIM].contiguous(), dk, dv, None  # home after a whole round


def burst(q, k, v, cut: SequenceCut):
    return _Burst.apply(q, k, v, cut)


def lasp(q, k, v, cut: SequenceCut):
    """Linear attention: one state goes from each rank to the next (Sun et al., 2024, 2404.02882)."""
    inside = (q @ k.transpose(1, 2)).tril() @ v
    state = torch.zeros(HEADS, DIM, DIM, dtype=q.dtype, requires_grad=True)
    if cut.rank:
        state = received(state, cut.rank - 1)
    out = inside + q @ state
    if cut.rank + 1 < cut.size:
        # the zero ties what was sent to the loss, so that its gradient is waited for
        out = out + _Send.apply(state + k.transpose(1, 2) @ v, cut.rank + 1)
    return out


def linear(q, k, v):
    """Causal linear attention on one process, the function whose sequence :func:`lasp` splits over ranks."""
    return torch.einsum("hid,hide->hie", q, torch.einsum("hid,hie->hide", k, v).cumsum(1))


def plain(q, k, v):
    """Causal softmax attention."""
    every = torch.arange(TOKENS)
    return block(q, k, v, every, every)[0]


class Way(NamedTuple):
    """A rank's part, how the sequence is cut, and the whole that it is a part of."""

    part: Callable[..., torch.Tensor]
    cut: Callable[[int, int], torch.Tensor]
    whole: Callable[..., torch.Tensor] = plain


WAYS = {
    "ring-self-attn": Way(ring_self_attention, contiguous),
    "tokenring": Way(tokenring, zigzag),
    "burstattention": Way(burst, zigzag),
    "lasp": Way(lasp, contiguous, linear),
}


def dsp(x: torch.Tensor, group: mesh.AxisGroup) -> torch.Tensor:
    """Attention over space with time cut, one switch, attention over time with space cut, and back (Zhao et al., 2024,
    2403.10266). x: [time / ranks, space, dim]."""
    part = _over_rows(x)
    part = torch.cat(_switch(part.transpose(0, 1), group), 1)  # [space / ranks, time, dim]
    part = _over_rows(part)
    return torch.cat(_switch(part.transpose(0, 1), group), 1)  # [time / ranks, space, dim]


def _switch(rows: torch.Tensor, group: mesh.AxisGroup) -> list[torch.Tensor]:
    """Row blocks [a, b, dim] to the ranks that they belong to; the blocks [a / ranks, b, dim] of all that arrive."""
    return list(swap(rows, group, queue="cp").chunk(group.size))


def _over_rows(x: torch.Tensor) -> torch.Tensor:
    """Attention within each first index of [n, tokens, dim], without a mask."""
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def contrastive(images: torch.Tensor, texts: torch.Tensor, cut: SequenceCut) -> torch.Tensor:
    """This rank's part of the sum of the losses of paired rows [n, dim]: texts go round, and of the similarities only
    one tile is held (Cheng et al., 2024, 2410.17243)."""
    own = (images * texts).sum(-1)
    sums = None
    for step in range(cut.size):
        tile = (images @ texts.T).logsumexp(-1)
        sums = tile if sums is None else torch.logaddexp(sums, tile)
        texts = shift(texts) if step + 1 < cut.size else texts
    return (sums - own).sum()


def apart(ranks: int = 4) -> dict[str, float]:
    """For every way, the largest difference of outputs and of gradients from one process, on any of so many ranks.

    Raises:
        RankDied: L001 when a process ends before its time.
    """
    return launch.start(_compare, num_ranks=ranks, device="cpu", timeout_s=60.0)


def _compare(world: World) -> dict[str, float]:
    group = mesh.AxisGroup(name="cp", ranks=tuple(range(world.size)), index=world.rank, handle=dist.group.WORLD)
    worst = {name: _difference(way, world) for name, way in WAYS.items()}
    worst |= {"dsp": _dsp_difference(world, group), "inf-cl": _contrastive_difference(world)}
    most = torch.nan_to_num(torch.tensor(list(worst.values()), dtype=torch.float64), nan=1e300, posinf=1e300)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(worst, most.tolist()))


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def _difference(way: Way, world: World) -> float:
    cut = SequenceCut(world.rank, world.size, way.cut)
    places = cut.places
    q, k, v, weight = _drawn(4, HEADS, TOKENS, DIM)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = way.whole(*whole)
    (wanted * weight).sum().backward()
    mine = [t[:, places].clone().requires_grad_() for t in (q, k, v)]
    found = way.part(*mine, cut)
    (found * weight[:, places]).sum().backward()
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(mine, whole))]
    return max(float((a - b[:, places]).detach().abs().max()) for a, b in pairs)


def _dsp_difference(world: World, group: mesh.AxisGroup) -> float:
    x, weight = _drawn(2, 8, 12, DIM)
    whole = x.clone().requires_grad_()
    wanted = _over_rows(_over_rows(whole).transpose(0, 1)).transpose(0, 1)
    (wanted * weight).sum().backward()
    rows = torch.arange(8).tensor_split(world.size)[world.rank]
    mine = x[rows].clone().requires_grad_()
    found = dsp(mine, group)
    (found * weight[rows]).sum().backward()
    return max(float((a - b).detach().abs().max()) for a, b in ((found, wanted[rows]), (mine.grad, whole.grad[rows])))


def _contrastive_difference(world: World) -> float:
    images, texts = _drawn(2, TOKENS, DIM)
    whole = [t.clone().requires_grad_() for t in (images, texts)]
    wanted = (torch.logsumexp(whole[0] @ whole[1].T, -1) - (whole[0] * whole[1]).sum(-1)).sum()
    wanted.backward()
    cut = SequenceCut(world.rank, world.size, contiguous)
    mine = [t[cut.places].clone().requires_grad_() for t in (images, texts)]
    part = contrastive(*mine, cut)
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    gradients = [float((a.grad - b.grad[cut.places]).abs().max()) for a, b in zip(mine, whole)]
    return max(float((total - wanted).detach().abs()), *gradients)
