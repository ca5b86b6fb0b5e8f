"""A mixture of experts on a rank: the router, dispatch to the experts' ranks, the experts, combine.

No token is dropped: the all-to-alls of expert parallelism (GShard, Lepikhin et al. 2006.16668) are as uneven as the
router is. An expert may also be split over ``etp`` ranks, which then share their tokens: gathered before the experts,
results reduce-scattered behind them, as ``layers/moe.py`` says. Tokens come from the shard of the sequence that a rank
holds between tensor-parallel regions, so nothing is sent twice.

Routers are those of Mixtral (2401.04088) and of Qwen2-MoE and Qwen3-MoE (2407.10671, 2505.09388): a softmax over all
experts, of which the top k keep their weights, or have them divided by their sum (``Numerics.norm_topk``).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from meshwright.run.activation import activate
from meshwright.run.collect import all_gather, gather_dim, scatter_dim
from meshwright.run.exchange import swap
from meshwright.run.linear import grouped_matmul, matmul
from meshwright.run.mesh import AxisGroup
from meshwright.run.parameters import INIT_STD
from meshwright.run.parts import Mlp, Shared
from meshwright.run.pieces import Part
from meshwright.run.record import recorder
from meshwright.spec import naming
from meshwright.spec.layers import Dense, Moe

#: Words for an expert's gate, up and down matrices where they differ from those of a dense MLP.
EXPERT_WORDS = {"mixtral": ("w1", "w3", "w2")}


def refused(spec: Moe, school: str) -> str:
    """Why mixtures of this kind cannot be run; "" when they can."""
    if school not in ("llama", "mixtral"):
        return f"experts are not named in the {school or 'unknown'} naming scheme"
    if spec.router_bias:
        return "its router has a bias for each expert, and only routers by softmax alone are run"
    return "its experts have biases" if spec.bias else ""


class Mixture(nn.Module):
    """Routed experts of one block, and its shared ones; this rank's part of them.

    Raises:
        ValueError: a kind of mixture that is not run (:func:`refused`).
    """

    def __init__(self, shared: Shared, prefix: str, spec: Moe):
        super().__init__()
        school = naming.school(shared.model)
        if reason := refused(spec, school):
            raise ValueError(f"the mixture of experts of {shared.model.name} cannot be run: {reason}")
        self.spec, self.normed = spec, shared.model.numerics.norm_topk
        self.ep, self.etp = shared.mesh["ep"], shared.mesh["etp"]
        model, n = shared.model, shared.names
        at = f"{prefix}{n.mlp}"

        def replicated(name: str, rows: int) -> nn.Parameter:
            shape = (rows, model.hidden)
            part = Part(name, shape, (0, 0), (slice(None), slice(None)))
            return shared.make(name, shape, [part], copies=shared.tp.size, sums=shared.shard_sums)

        self.router = replicated(f"{at}gate.weight", spec.experts)
        local, width = spec.experts // self.ep.size, spec.ffn // self.etp.size
        gate, up, down = EXPERT_WORDS.get(school, (n.gate, n.up, n.down))
        into = (gate, up) if spec.gated else (up,)
        names = [f"{at}experts.{self.ep.index * local + i}." for i in range(local)]
        first = self.etp.index * width
        self.up = shared.make(
            f"{at}experts.up.weight",
            (local, width * len(into), model.hidden),
            [
                Part(
                    f"{name}{word}.weight", (spec.ffn, model.hidden), (first, 0), (i, slice(j * width, (j + 1) * width))
                )
                for i, name in enumerate(names)
                for j, word in enumerate(into)
            ],
            expert=True,
        )
        self.down = shared.make(
            f"{at}experts.down.weight",
            (local, model.hidden, width),
            [Part(f"{name}{down}.weight", (model.hidden, spec.ffn), (0, first), (i,)) for i, name in enumerate(names)],
            std=INIT_STD / (2 * model.num_layers) ** 0.5,
            expert=True,
        )
        self.beside, self.beside_gate = None, None
        if spec.shared_ffn:
            alone = shared._replace(names=msgspec.structs.replace(n, mlp=f"{n.mlp}shared_expert."))
            dense = Dense(ffn=spec.shared_ffn, gated=spec.gated, activation=spec.activation)
            self.beside = Mlp(alone, prefix, dense)
        if spec.shared_gate:
            self.beside_gate = replicated(f"{at}shared_expert_gate.weight", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] of this rank's tokens in and out."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = route(tokens, self.router, self.spec.top_k, normed=self.normed)
        ordered, place = chosen.flatten().sort(stable=True)
        # where each expert begins among them, found without asking the device how many there are
        begins = torch.arange(self.spec.experts + 1, device=x.device)
        counts = torch.searchsorted(ordered, begins).diff()
        sent = SentRows.agree(counts, self.ep, self.etp)
        rows = self._experts(dispatch(tokens[place // self.spec.top_k], sent, self.ep, self.etp), sent)
        rows = combine(rows, sent, self.ep, self.etp)
        # back from the order of experts to that of tokens
        rows = rows[place.argsort()].unflatten(0, chosen.shape)
        out = (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(1).view(x.shape)
        if self.beside is None:
            return out
        beside = self.beside(x)
        if self.beside_gate is not None:
            beside = beside * torch.sigmoid(matmul(x, self.beside_gate))
        return out + beside

    def _experts(self, rows: torch.Tensor, sent: SentRows) -> torch.Tensor:
        inner = activate(grouped_matmul(rows, self.up, sent.groups), self.spec)
        return grouped_matmul(inner, self.down, sent.groups)


def route(tokens: torch.Tensor, router: torch.Tensor, top_k: int, *, normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, experts) of each token, [t, top_k] both, by falling weight; computed in fp32, or fp64 where the tokens
    are."""
    logits = matmul(tokens, router)
    shares = logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    weights, chosen = shares.topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normed else weights), chosen


class SentRows(NamedTuple):
    """Where rows go: ``to`` and ``back`` of them to and from each expert-parallel rank, ``totals`` on each rank of an
    expert's split, ``groups`` for each local expert, and ``order``: which of the rows that arrive, each rank's padded
    to the longest, makes each row of the experts' input."""

    to: list[int]
    back: list[int]
    totals: list[int]
    groups: list[int]
    order: torch.Tensor

    @staticmethod
    def agree(counts: torch.Tensor, ep: AxisGroup, etp: AxisGroup) -> SentRows:
        """Return the rows to send and receive, from this rank's rows for each expert, int64 [experts]. The one place
        that waits for the device."""
        local = len(counts) // ep.size
        mine = counts.view(ep.size, local)
        arriving = mine
        if not ep.alone:
            arriving = torch.empty_like(mine)
            with recorder().span("all_to_all", "ep"):
                dist.all_to_all_single(arriving, mine.contiguous(), group=ep.handle)
        table = all_gather(arriving.unsqueeze(0), etp)
        host = torch.cat([mine.sum(1), table.flatten()]).tolist()
        to, cells = host[: ep.size], host[ep.size :]
        shape = (etp.size, ep.size, local)
        lengths = torch.tensor(cells).view(shape)
        totals = lengths.sum((1, 2)).tolist()
        experts = torch.arange(local).expand(shape).reshape(-1).repeat_interleave(lengths.flatten())
        longest = max(totals)
        places = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(totals)])
        return SentRows(
            to=to,
            back=lengths[etp.index].sum(1).tolist(),
            totals=totals,
            groups=lengths.sum((0, 1)).tolist(),
            order=places[experts.sort(stable=True).indices].to(counts.device),
        )


def dispatch(rows: torch.Tensor, sent: SentRows, ep: AxisGroup, etp: AxisGroup) -> torch.Tensor:
    """Rows [t, h] in the order of their experts, to the ranks of those; what arrives, in the order of this rank's."""
    rows = swap(rows, ep, sent.to, sent.back, queue="ep")
    if not etp.alone:
        rows = gather_dim(_padded(rows, max(sent.totals)), etp, 0)
    return rows[sent.order]


def combine(rows: torch.Tensor, sent: SentRows, ep: AxisGroup, etp: AxisGroup) -> torch.Tensor:
    """The way back of :func:`dispatch`; what the ranks of an expert's split have, each a part, is added."""
    longest = max(sent.totals)
    arrived = rows.new_zeros((longest * etp.size, rows.shape[1])).index_copy(0, sent.order, rows)
    if not etp.alone:
        arrived = scatter_dim(arrived, etp, 0)[: sent.totals[etp.index]]
    return swap(arrived, ep, sent.back, sent.to, queue="ep")


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros((length - len(rows), rows.shape[1]))])
