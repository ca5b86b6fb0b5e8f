"""Experts of a serving iteration: which ranks have them, how many tokens the busiest gets, and how tokens come there.

The ranks of a replica split the experts among ``ep`` groups and each of them over ``etp`` ranks; together they are all
ranks. Hidden states are whole on every rank of an attention group. With one group every rank computes its experts for
all tokens, and the outputs are summed once. With several (attention data parallelism) tokens are sent to the ranks of
their experts and back (GShard, 2006.16668; DeepEP), or every rank gathers all tokens and the sums are scattered.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp, sqrt
from statistics import NormalDist

import msgspec

from meshwright import layers
from meshwright.layers.mlp import dense
from meshwright.layers.pieces import Context, Piece
from meshwright.layers.placed import leave
from meshwright.layers.routed import leaving, served_load
from meshwright.plan import Plan
from meshwright.spec.layers import Moe
from meshwright.spec.routing import Routing
from meshwright.work import Collective, Elementwise, Group, GroupedGemm, Routed

#: Pieces of a mixture that are of experts' tokens, and so of a rank's share of them.
OWN = "experts "


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica's ranks hold experts: ``ep`` groups, each expert over ``etp`` ranks; ``sent``: tokens travel to
    those that want them alone; ``stays``: they stay with their first expert until the next layer's."""

    ep: int
    etp: int
    sent: bool
    stays: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Spread:
        """Return what a plan says, with what it leaves open: each expert over the ranks that ``ep`` leaves."""
        experts = plan.experts
        etp = experts.etp or max(1, plan.layout.tp // experts.ep)
        stays = experts.dispatch == "stays"
        sent = stays or experts.dispatch == "sent" or (not experts.dispatch and etp == 1)
        return cls(ep=experts.ep, etp=etp, sent=sent and plan.layout.adp > 1, stays=stays)


#: Standard deviation of the logarithm of how often a router's experts are chosen, over its experts. Routers are not
#: even, so that fewer experts are read than even draws would. Fitted to 171 measured servers of seven mixtures under
#: three engines (``serving_runs``, nine of each engine, model, device and precision; without five groups that are off
#: by more than twice as much for other reasons, such as guesses that nobody says): of 0, 0.5, 0.7, 0.8 and 1.1 errors a
#: token of models left out are 7.9, 7.0, 6.2, 6.7 and 7.1% under vLLM, 19, 18, 18, 18 and 17% under SGLang, and 6.3,
#: 6.5, 6.4, 6.4 and 8.7% under TensorRT-LLM, and the error has no hump any more at 8 to 32 open requests under vLLM,
#: where even draws differ most from uneven ones.
UNEVEN = 0.7


@lru_cache(maxsize=1 << 10)
def popularity(experts: int, top_k: int, spread: float) -> tuple[float, ...]:
    """Return the probability of each expert that a token chooses it [experts], which sum to `top_k`: in proportion to
    the quantiles of a log-normal distribution whose logarithm has the standard deviation `spread`, and at most 1."""
    normal = NormalDist()
    wanted = [exp(spread * normal.inv_cdf((i + 0.5) / experts)) for i in range(experts)]
    certain = 0  # of the most wanted ones, those that every token chooses
    while True:
        rest = wanted[: experts - certain]
        scale = (top_k - certain) / sum(rest) if rest else 0.0
        if not rest or rest[-1] * scale <= 1.0:
            return (*(each * scale for each in rest), *[1.0] * certain)
        certain += 1


@lru_cache(maxsize=1 << 14)
def load(experts: int, top_k: int, tokens: int, ep: int, spread: float = UNEVEN) -> tuple[int, int]:
    """Return (rows, experts with any) of the busiest of `ep` ranks, where tokens choose experts as unevenly as `spread`
    says and these are dealt to ranks such that their rows are even on average.

    A rank's rows are binomial with mean n k / E for each expert it has, and an expert that a token chooses with
    probability p is drawn by some of n with probability 1 - (1 - p)^n; the largest of several such counts is above the
    mean by as many standard deviations as the largest of as many normal ones (Blom 1958)."""
    own = experts // ep
    drawn = sum(1.0 - (1.0 - each) ** tokens for each in popularity(experts, top_k, spread)) / experts
    above = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25)) if ep > 1 else 0.0
    active = own * drawn + above * sqrt(own * drawn * (1.0 - drawn))
    rows = tokens * top_k / ep
    rows += above * sqrt(rows * (1.0 - 1.0 / ep))
    most = min(rows, float(tokens) * min(top_k, own))
    return max(1, ceil(most)), max(1, min(own, round(active)))


def pieces(
    own: Context,
    tokens: int,
    moe: Moe,
    spread: Spread,
    groups: tuple[Group, Group],
    routing: Routing | None = None,
) -> list[Piece]:
    """Return router, experts and shared experts for so many `tokens` of all attention groups, on a rank that routes
    those of `own`; `groups` are all ranks of the replica, and those at the same place of every attention group.
    `routing` is how often each expert is chosen, as :data:`UNEVEN` says where nobody said it."""
    imbalance = own.plan.experts.imbalance
    plan = msgspec.structs.replace(
        own.plan, experts=msgspec.structs.replace(own.plan.experts, ep=1, etp=1, imbalance=1, duplicates="sent")
    )
    alone = msgspec.structs.replace(own, plan=plan)
    split = msgspec.structs.replace(moe, ffn=-(-moe.ffn // spread.etp), shared_ffn=0)
    uneven = UNEVEN if routing is None else 0.0  # what was said of them tells the busiest rank
    rows, active = load(moe.experts, moe.top_k, tokens, spread.ep, uneven)
    layers_of, method = len(own.model.routed_layers), own.plan.experts.placement
    if routing is not None and spread.ep > 1:
        ranked = Group(size=spread.ep, hops=groups[0].hops if spread.etp == 1 else ())
        found = served_load(routing, layers_of, moe.experts, method, ranked)
        rows = max(rows, ceil(tokens * moe.top_k / spread.ep * found.busiest))
        if spread.sent:
            groups = (found.carried(groups[0]), groups[1])
    mine = [
        _busiest(p, rows * imbalance, active, own.tokens * moe.top_k) for p in layers.of(split).pieces(alone, split)
    ]
    first = next(i for i, p in enumerate(mine) if p.name.startswith(OWN))
    last = max(i for i, p in enumerate(mine) if p.name.startswith(OWN)) + 1
    if spread.stays and routing is not None:
        into, out = _stay(own, moe, groups[0], leaving(routing, layers_of, moe.experts, method, groups[0]))
    else:
        into, out = _travel(own, tokens, moe, spread, groups)
    body = [*mine[:first], *into, *mine[first:last], *out, *mine[last:]]
    shared = dense(alone, "shared experts", moe.shared_ffn, moe.gated) if moe.shared_ffn else []
    if own.plan.layout.adp == 1:  # one sum of routed and shared experts' outputs
        return [*body, *(shared or leave(alone, "experts"))]
    return [*body, *shared]


def _busiest(piece: Piece, rows: float, active: int, routed: float) -> Piece:
    """Return a piece of the experts with the busiest rank's rows in place of all that this context routes. Their
    operands are quantised by one kernel, where training has one for each expert."""
    if not piece.name.startswith(OWN):
        return piece
    work, share = piece.forward, rows / routed
    outputs = tuple(size * share for size in piece.outputs)
    if isinstance(work, GroupedGemm):
        work = msgspec.structs.replace(work, rows=ceil(rows), groups=active)
    elif isinstance(work, Elementwise):
        work = msgspec.structs.replace(work, num_bytes=work.num_bytes * share, kernels=1)
    return msgspec.structs.replace(piece, forward=work, outputs=outputs)


def _travel(
    own: Context, tokens: int, moe: Moe, spread: Spread, groups: tuple[Group, Group]
) -> tuple[list[Piece], list[Piece]]:
    """Return the exchanges before and behind the experts of attention groups with requests of their own."""
    if own.plan.layout.adp == 1:
        return [], []
    everyone, beside = groups
    size = float(own.tokens) * own.hidden * own.element
    if not spread.sent:
        whole = float(tokens) * own.hidden * own.element
        gather = Collective(op="all_gather", num_bytes=whole, group=beside)
        scatter = Collective(op="reduce_scatter", num_bytes=whole, group=everyone)
        return [_exchange("dispatch gather", gather)], [_exchange("combine scatter", scatter), *_again(own, size)]
    share, width = -(-own.tokens // own.tp), moe.width(own.hidden)
    routed = {"tokens": share, "hidden": width, "top_k": moe.top_k, "experts": moe.experts}
    sent = float(share) * moe.top_k * width * own.element
    there = Collective(op="all_to_all", num_bytes=sent, group=everyone, routed=Routed(phase="dispatch", **routed))
    back = Collective(op="all_to_all", num_bytes=sent, group=everyone, routed=Routed(phase="combine", **routed))
    return [_exchange("dispatch", there)], [_exchange("combine", back), *_again(own, size)]


def _stay(own: Context, moe: Moe, everyone: Group, leaves: tuple[float, ...]) -> tuple[list[Piece], list[Piece]]:
    """Return the exchanges of tokens that stay with their first expert from layer to layer (ExFlow, 2401.08383): on
    their way there the copies whose next expert is elsewhere, back those of all experts but the first."""
    share, width = -(-own.tokens // own.tp), moe.width(own.hidden)
    routed = {"tokens": share, "hidden": width, "experts": moe.experts}
    size = float(share) * width * own.element
    going = tuple(msgspec.structs.replace(hop, carried=hop.carried * one) for hop, one in zip(everyone.hops, leaves))
    group = msgspec.structs.replace(everyone, hops=going)
    work = Routed(phase="dispatch", top_k=moe.top_k, **routed)
    there = Collective(op="all_to_all", num_bytes=size * moe.top_k, group=group, routed=work)
    whole = float(share) * own.hidden * own.element
    if moe.top_k == 1:
        return [_exchange("dispatch", there)], _again(own, whole)
    others = Routed(phase="combine", top_k=moe.top_k - 1, **routed)
    back = Collective(op="all_to_all", num_bytes=size * (moe.top_k - 1), group=everyone, routed=others)
    return [_exchange("dispatch", there)], [_exchange("combine", back), *_again(own, whole)]


def context_gather(own: Context, kept: float, everyone: Group) -> Piece:
    """Return the gather that gives all ranks the keys and values of an iteration's new tokens, `kept` bytes for each of
    those on a rank, so that a token's layers may run wherever its experts are."""
    size = float(own.tokens) * kept * everyone.size
    return _exchange("context gather", Collective(op="all_gather", num_bytes=size, group=everyone))


def _again(own: Context, size: float) -> list[Piece]:
    """Return the gather by which the ranks of an attention group have all its tokens whole again."""
    if own.tp == 1:
        return []
    return [_exchange("combine gather", Collective(op="all_gather", num_bytes=size, group=own.tp_group))]


def _exchange(name: str, work: Collective) -> Piece:
    return Piece(name=name, forward=work, queue="ep")
