"""A mixture of experts on a rank: the router, dispatch to the experts' ranks, the experts, combine.

No token is dropped without a capacity: the all-to-alls of expert parallelism (GShard, Lepikhin et al. 2006.16668) are
as uneven as the router is. Experts lie on ranks as the plan's placement says. An expert may also be split over ``etp``
ranks, which then share their tokens: gathered before the experts, results reduce-scattered behind them, as
``layers/moe.py`` says. Tokens come from the shard of the sequence that a rank holds between tensor-parallel regions, so
nothing is sent twice.

Routers are in :mod:`.choice`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import nn

from meshwright.layers.routed import hottest, most_rows, placement
from meshwright.run.activation import activate
from meshwright.run.choice import Sorted, route, within
from meshwright.run.collect import copy_to, part_of, sum_over, whole_of
from meshwright.run.flights import Flight, begin, end
from meshwright.run.linear import grouped_matmul, matmul
from meshwright.run.lora.adapters import ExpertAdapter
from meshwright.run.materialise import HotExperts, once
from meshwright.run.mesh import AxisGroup
from meshwright.run.parameters import INIT_STD
from meshwright.run.parts import Mlp, Pass, Shared
from meshwright.run.pieces import Part
from meshwright.run.routing import RouterStatistics, balance, far, frequency, join
from meshwright.run.sent_rows import SentRows, arranged, combine, dispatch, unarranged
from meshwright.spec import naming
from meshwright.spec.layers import Dense, Moe
from meshwright.spec.naming import EXPERT_PARAMETERS
from meshwright.spec.workload import Train

#: Words for an expert's gate, up and down matrices where they differ from those of a dense MLP.
EXPERT_WORDS = {"mixtral": ("w1", "w3", "w2")}


def refused(spec: Moe, school: str) -> str:
    """Why mixtures of this kind cannot be run; "" when they can."""
    if school not in ("llama", "mixtral", "deepseek"):
        return f"experts are not named in the {school or 'unknown'} naming scheme"
    if spec.router_bias and school != "deepseek":
        return "its router has a bias for each expert, and only routers by softmax alone are run"
    return "its experts have biases" if spec.bias else ""


def expert_parameters(
    shared: Shared, at: str, spec: Moe, numbers: list[int], etp: AxisGroup
) -> tuple[nn.Parameter, nn.Parameter]:
    """The matrices of the experts of these numbers into their inner width [experts, width, h] and out of it [experts,
    h, width], or the part of them that a rank of `etp` has; names begin with `at`."""
    model, n = shared.model, shared.names
    local, width = len(numbers), spec.ffn // etp.size
    gate, up, down = EXPERT_WORDS.get(naming.school(model), (n.gate, n.up, n.down))
    into = (gate, up) if spec.gated else (up,)
    names = [f"{at}experts.{expert}." for expert in numbers]
    first = etp.index * width
    inner = shared.make(
        f"{at}experts.up.weight",
        (local, width * len(into), model.hidden),
        [
            Part(f"{name}{word}.weight", (spec.ffn, model.hidden), (first, 0), (i, slice(j * width, (j + 1) * width)))
            for i, name in enumerate(names)
            for j, word in enumerate(into)
        ],
        expert=True,
    )
    outer = shared.make(
        f"{at}experts.down.weight",
        (local, model.hidden, width),
        [Part(f"{name}{down}.weight", (model.hidden, spec.ffn), (0, first), (i,)) for i, name in enumerate(names)],
        std=INIT_STD / (2 * model.num_layers) ** 0.5,
        expert=True,
    )
    return inner, outer


def through_experts(
    shared: Shared, spec: Moe, rows: torch.Tensor, groups: list[int], up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """[t, h] of rows in the order of their experts, of which each has so many as `groups` says."""
    inner = activate(grouped_matmul(rows, up, groups, shared.low), spec, shared.plan.kernels.compile)
    return grouped_matmul(inner, down, groups, shared.low)


class Asks(Protocol):
    """Whoever has experts in processes of their own."""

    def ask(self, layer: int, rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, h] of rows in the order of their experts, zero for those that were not answered in time, and which
        experts were, bool [experts]; in a backward the experts learn."""


def weights_of(weights: torch.Tensor, answered: torch.Tensor) -> torch.Tensor:
    """Weights [t, k] of the experts that `answered` (bool [t, k]), made to sum to what those of all do; nothing for a
    token of which none did."""
    some = weights * answered
    total = some.sum(-1, keepdim=True)
    return some * (weights.sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0))


class Mixture(nn.Module):
    """Routed experts of one block, and its shared ones; this rank's part of them.

    Raises:
        ValueError: a kind of mixture that is not run (:func:`refused`).
    """

    def __init__(self, shared: Shared, prefix: str, spec: Moe, layer: int = 0):
        super().__init__()
        school = naming.school(shared.model)
        if reason := refused(spec, school):
            raise ValueError(f"the mixture of experts of {shared.model.name} cannot be run: {reason}")
        self.spec, self.numbers, self.layer = spec, shared.model.numerics, layer
        self.shared, self.ep, self.etp = shared, shared.mesh["ep"], shared.mesh["etp"]
        self.plan = shared.plan.experts
        self.seen = RouterStatistics(spec.experts, shared.mesh.device)
        self._frequencies: dict[int, tuple[Pass, torch.Tensor | None]] = {}
        self.before: Mixture | None = None
        self.chosen: dict[int, torch.Tensor] = {}
        self._again: set[int] = set()
        #: Runs of ranks that exchange tokens among themselves first, and the ranks at one place of all of them.
        self.steps = None
        if self.plan.ep_inner > 1:
            self.steps = shared.mesh["ep_inner"], shared.mesh["ep_outer"]
        n = shared.names
        at = f"{prefix}{n.mlp}"
        #: Tokens that tensor-parallel ranks hold alike: each routes its part of them, or all of them.
        self.cut = shared.tp if not shared.tp.alone and not shared.sp and self.plan.duplicates == "dropped" else None
        #: Ranks that each have a part of every expert share their rows, unless all of them hold all.
        self.alike = not shared.tp.alone and not shared.sp and self.plan.duplicates == "sent"
        self.split = shared.mesh["self"] if self.alike else self.etp
        sums = shared.tp.size if self.cut else shared.shard_sums
        self.router = self._whole(f"{at}gate.weight", spec.experts, sums)
        self.bias = None
        if spec.router_bias:
            name, shape = f"{at}gate.e_score_correction_bias", (spec.experts,)
            alike = {"init": "zeros", "copies": shared.tp.size, "sums": sums}
            self.bias = shared.make(name, shape, [Part(name, shape, (0,), (slice(None),))], **alike)
        self._place()
        local = spec.experts // self.ep.size
        numbers = self.order[self.ep.index * local :][:local]
        names = [f"{at}experts.{expert}." for expert in numbers]
        self.up, self.down = expert_parameters(shared, at, spec, numbers, self.etp)
        #: Who is asked for the experts' passes, where peers have the experts.
        self.asks: Asks | None = None
        for kept in (self.up, self.down) if shared.plan.passes.peers else ():
            kept.requires_grad_(False)
        wanted = shared.lora.targets if shared.lora is not None else ()
        sides = tuple(tuple(kept.shape[1:]) for kept in (self.up, self.down))
        self.up_adapter, self.down_adapter = (
            ExpertAdapter(shared, names, word.rpartition(".")[2], *size) if target in wanted else None
            for (target, word), size in zip(EXPERT_PARAMETERS.items(), sides, strict=True)
        )
        self.beside, self.beside_gate = None, None
        if spec.shared_ffn:
            alone = shared._replace(names=msgspec.structs.replace(n, mlp=f"{n.mlp}{n.shared}"))
            dense = Dense(ffn=spec.shared_ffn, gated=spec.gated, activation=spec.activation)
            self.beside = Mlp(alone, prefix, dense)
        if spec.shared_gate:
            self.beside_gate = self._whole(f"{at}shared_expert_gate.weight", 1, shared.shard_sums)

    def _whole(self, name: str, rows: int, sums: int) -> nn.Parameter:
        """A matrix that every rank holds."""
        shape = (rows, self.shared.model.hidden)
        part = Part(name, shape, (0, 0), (slice(None), slice(None)))
        return self.shared.make(name, shape, [part], copies=self.shared.tp.size, sums=sums)

    def _place(self) -> None:
        """Work out where experts lie: ``order`` of them on the ranks, the ``slot`` of each there (None where that is
        its number), which are hot, and which are on other nodes."""
        shared, experts, ranks = self.shared, self.spec.experts, self.ep.size
        layers = shared.model.routed_layers
        routing, device = shared.routing, shared.mesh.device
        at = layers.index(self.layer) if self.layer in layers else 0
        node = max(1, min(ranks, shared.node_ranks // self.etp.size)) if shared.node_ranks else ranks
        self.order, self.slot, self.hot, self.hot_of = list(range(experts)), None, None, None
        if self.plan.placement != "contiguous" and ranks > 1:
            found = placement(routing, len(layers), experts, self.plan.placement, ranks, node)
            self.order = found.order[at].tolist()
            self.slot = torch.tensor(self.order, device=device).argsort()
        if self.plan.hot and ranks > 1:
            self.heat(hottest(routing, len(layers), experts, self.plan.hot)[at].tolist())
        home = torch.tensor(self.order, device=device).argsort() // (experts // ranks)
        self.away = home // node != self.ep.index // node

    def heat(self, experts: list[int]) -> None:
        """Have these experts, by their numbers, on all ranks from the next pass on."""
        slots, count = sorted(self.order.index(e) for e in experts), self.spec.experts
        self.hot = HotExperts(slots, count // self.ep.size, self.ep)
        #: Where a row goes by its slot: a hot one behind all slots.
        self.hot_of = torch.arange(count, device=self.shared.mesh.device)
        self.hot_of[slots] = torch.arange(count, count + len(slots), device=self.hot_of.device)

    def begin(self) -> None:
        """Start what can run before tokens arrive: sending the hot experts."""
        self._arriving = None
        if self.hot is not None:
            self._weights = once(self.up), once(self.down)
            self._arriving = self.hot.begin(*self._weights)

    def forward(self, x: torch.Tensor, p: Pass | None = None) -> torch.Tensor:
        """[s, b, h] of this rank's tokens in and out."""
        if self.hot is not None and getattr(self, "_arriving", None) is None:
            self.begin()
        mine = x if self.cut is None else part_of(x, self.cut)
        out = self._routed(mine.reshape(-1, x.shape[-1]), p).view(mine.shape)
        if self.cut is not None:
            out = whole_of(out, self.cut)
        beside = self.shared_experts(x)
        return out if beside is None else out + beside

    def _routed(self, tokens: torch.Tensor, p: Pass | None) -> torch.Tensor:
        """[t, h] of the tokens that this rank routes, through their experts."""
        if self.asks is not None:
            return self._asked(tokens, p)
        trip = self._prepared(tokens, p)
        return self._joined(trip, self._travelled(trip.cold, trip.sent, trip.up, trip.down))

    def _asked(self, tokens: torch.Tensor, p: Pass | None) -> torch.Tensor:
        """[t, h] of what peers make of tokens: an average over the experts that answered in time, whose weights are
        made to sum to what those of all did. A token of which none did gets nothing."""
        top_k, experts = self.spec.top_k, self.spec.experts
        shares, weights, chosen = route(tokens, self.router, top_k, self.numbers, self.bias)
        if p is not None and torch.is_grad_enabled():
            tokens = self._watched(tokens, shares, chosen, p)
        one = Sorted.of(chosen, None, experts)
        made, answered = self.asks.ask(self.layer, tokens[one.place // top_k], one.counts.tolist())
        if not answered.all():
            weights = weights_of(weights, answered[chosen])
        return (one.restored(made, top_k) * weights.to(made.dtype).unsqueeze(-1)).sum(1)

    def depart(self, x: torch.Tensor, p: Pass | None) -> Trip:
        """Route [s, b, h] of this rank's tokens by what entered the block, and start sending them to their experts."""
        mine = x if self.cut is None else part_of(x, self.cut)
        trip = self._prepared(mine.reshape(-1, x.shape[-1]), p)
        (row,), (one,) = trip.cold, trip.sent
        there, back = Flight(self.ep, one.to, one.back, "ep"), Flight(self.ep, one.back, one.to, "ep")
        row = copy_to(row, self.etp) if self.alike else row
        return trip._replace(under_way=begin(row, there), flights=(there, back), shape=mine.shape)

    def work(self, trip: Trip) -> Trip:
        """Compute the experts of what arrived, and start sending it back."""
        (one,), (there, back) = trip.sent, trip.flights
        arrived = arranged(end(trip.under_way, there), one, self.split)
        done = unarranged(self._experts(arrived, one.groups, trip.up, trip.down), one, self.split)
        return trip._replace(under_way=begin(done, back))

    def arrive(self, trip: Trip) -> torch.Tensor:
        """Wait for what comes back; [s, b, h] of this rank's tokens."""
        out = self._joined(trip, [self._summed(end(trip.under_way, trip.flights[1]))]).view(trip.shape)
        return out if self.cut is None else whole_of(out, self.cut)

    def shared_experts(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the shared experts' output for [s, b, h]; None without any."""
        if self.beside is None:
            return None
        beside = self.beside(x)
        return beside if self.beside_gate is None else beside * torch.sigmoid(matmul(x, self.beside_gate))

    def _prepared(self, tokens: torch.Tensor, p: Pass | None) -> Trip:
        """Route [t, h]: which copies go where, in portions, and the rows of each in the order of their experts."""
        top_k, experts, count = self.spec.top_k, self.spec.experts, self.plan.portions
        shares, weights, chosen = route(tokens, self.router, top_k, self.numbers, self.bias)
        if p is not None and torch.is_grad_enabled():  # it is trained on
            tokens = self._watched(tokens, shares, chosen, p)
        slots = chosen if self.slot is None else self.slot[chosen]
        keep = None
        if self.plan.capacity:
            keep = within(weights, slots, most_rows(len(tokens), top_k, experts, self.plan.capacity), experts)
            self.seen.dropped += (~keep).sum() if p is not None and id(p) not in self._again else 0
        if self.hot_of is not None:
            slots = self.hot_of[slots]
        total = experts + (len(self.hot.slots) if self.hot is not None else 0)
        edges = [len(tokens) * i // count for i in range(count + 1)]
        some = [slice(a, b) for a, b in pairwise(edges)]
        parts = [Sorted.of(slots[one], None if keep is None else keep[one], total) for one in some]
        sent = SentRows.agree(torch.stack([one.counts[:experts] for one in parts]), self.ep, self.split, self.steps)
        up, down = self.up, self.down
        if self.hot is not None:
            up, down = self._weights
        elif count > 1:
            up, down = once(up), once(down)
        rows = [tokens[one][at.place // top_k] for one, at in zip(some, parts)]
        cold = [row[: sum(one.to)] for row, one in zip(rows, sent)]
        return Trip(weights, parts, rows, cold, sent, up, down)

    def _joined(self, trip: Trip, back: list[torch.Tensor]) -> torch.Tensor:
        """[t, h] of what came back of every portion, with what hot experts make of their tokens here."""
        if self.hot is not None:
            warm = self.hot.end(*self._arriving)
            self._arriving = None
            near = [one.counts[self.spec.experts :].tolist() for one in trip.parts]
            back = [
                torch.cat([done, self._experts(row[sum(one.to) :], count, *warm)])
                for done, row, one, count in zip(back, trip.rows, trip.sent, near)
            ]
        made = [one.restored(row, self.spec.top_k) for one, row in zip(trip.parts, back)]
        whole = made[0] if len(made) == 1 else torch.cat(made)
        return (whole * trip.weights.to(whole.dtype).unsqueeze(-1)).sum(1)

    def _travelled(
        self, rows: list[torch.Tensor], sent: list[SentRows], up: torch.Tensor, down: torch.Tensor
    ) -> list[torch.Tensor]:
        """Rows of every portion to their experts, through them and back; with several, one portion is on its way while
        another is multiplied."""
        ep, etp = self.ep, self.split
        if self.alike:
            rows = [copy_to(one, self.etp) for one in rows]
        if len(rows) == 1:
            (row,), (one,) = rows, sent
            done = self._experts(dispatch(row, one, ep, etp), one.groups, up, down)
            return [self._summed(combine(done, one, ep, etp))]
        out = [Flight(ep, one.to, one.back, "ep") for one in sent]
        home = [Flight(ep, one.back, one.to, "ep") for one in sent]
        begun = [begin(row, flight) for row, flight in zip(rows, out)]
        returned = []
        for row, one, there, back in zip(begun, sent, out, home):
            arrived = arranged(end(row, there), one, etp)
            done = self._experts(arrived, one.groups, up, down)
            returned.append(begin(unarranged(done, one, etp), back))
        return [self._summed(end(row, back)) for row, back in zip(returned, home)]

    def _summed(self, rows: torch.Tensor) -> torch.Tensor:
        """The parts of ranks that each computed a part of every row, added."""
        return sum_over(rows, self.etp) if self.alike else rows

    def _experts(self, rows: torch.Tensor, groups: list[int], up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        shared = self.shared
        if self.up_adapter is None and self.down_adapter is None:
            return through_experts(shared, self.spec, rows, groups, up, down)
        into = grouped_matmul(rows, up, groups, shared.low)
        into = into if self.up_adapter is None else into + self.up_adapter(rows, groups)
        inner = activate(into, self.spec, shared.plan.kernels.compile)
        out = grouped_matmul(inner, down, groups, shared.low)
        return out if self.down_adapter is None else out + self.down_adapter(inner, groups)

    # -- what the router is seen to do, and losses on it

    def begin_step(self) -> None:
        """Forget what was seen of the last step's microbatches."""
        self.seen.begin()
        self._frequencies.clear()
        self.chosen.clear()
        self._again.clear()

    def _watched(self, tokens: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, p: Pass) -> torch.Tensor:
        """Count what was chosen, and join the losses of balance and of locality; a pass that is repeated for its
        activations counts once."""
        train, key = self.shared.train, id(p)
        if key in self._frequencies:
            self._again.add(key)
        else:
            before = self.before.chosen.pop(key, None) if self.before is not None else None
            counts = self.seen.saw(chosen, before)
            if self.seen.follows is not None:
                self.chosen[key] = chosen
            self.seen.near += counts[~self.away].sum()
            found = frequency(counts, self.seen, self._everyone(train)) if train is not None else None
            self._frequencies[key] = p, found  # the pass too: no other has its number while this is kept
        if train is None or not (train.balance or train.locality):
            return tokens
        loss = tokens.new_zeros((), dtype=shares.dtype)
        if train.balance:
            loss = loss + train.balance_weight * balance(shares, self._frequencies[key][1])
        if train.locality:
            loss = loss + train.locality * far(shares, self.away)
        if key not in self._again:
            self.seen.loss += loss.detach() * p.scale
        return join(tokens, loss * p.scale)

    def _everyone(self, train: Train) -> tuple[AxisGroup, ...]:
        """The groups over which choices are counted together."""
        if train.balance != "global":
            return ()
        split = self.shared.sp or self.cut is not None
        return (self.shared.mesh["data"], *([self.shared.tp] if split else []))


class Trip(NamedTuple):
    """Tokens on their way through experts: the ``weights`` [t, k] of their copies, and of every portion how its copies
    are sorted, its ``rows``, those of them that travel (``cold``) and where to. ``under_way`` is what a flight brings,
    ``shape`` that of the hidden states."""

    weights: torch.Tensor
    parts: list[Sorted]
    rows: list[torch.Tensor]
    cold: list[torch.Tensor]
    sent: list[SentRows]
    up: torch.Tensor
    down: torch.Tensor
    under_way: torch.Tensor | None = None
    flights: tuple[Flight, ...] = ()
    shape: torch.Size = torch.Size()
