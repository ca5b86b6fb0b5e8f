"""A mixture of experts as pieces: router, dispatch, the experts' MLPs, combine.

Expert parallelism sends each token to its experts' ranks and back (GShard, 2006.16668); experts may also be split
over ``etp`` ranks. Tokens are taken from the sequence-parallel shard, so nothing is sent twice.
"""

from __future__ import annotations

import msgspec

from meshwright.layers.kind import Flops, Held, Kind, Tokens
from meshwright.layers.mlp import activation, adapted, dense
from meshwright.layers.pieces import Context, Piece, dequantised, linear
from meshwright.layers.placed import COLUMNS, REPLICATE, ROWS_CUT, TOKENS, crossing, moved
from meshwright.spec.layers import Moe
from meshwright.spec.lora import EXPERT_TARGETS
from meshwright.work import PERMUTE, Collective, Elementwise, Gemm, GroupedGemm, Routed

#: The piece that sorts tokens by expert: its forward needs to know how many each gets.
SORTED = "permute tokens"


def pieces(c: Context, spec: Moe) -> list[Piece]:
    """Router, dispatch, the experts' MLPs, combine; shared experts beside them as a dense MLP."""
    first, second, third = stretches(c, spec)
    return [*_gathered(c, spec), *first, *_in_portions(c.plan.experts.portions, second), *third, *_shared(c, spec)]


def around(c: Context, spec: Moe, mixing: list[Piece], again: Piece) -> list[Piece]:
    """Return a mixture whose routed experts read what entered the block, with what mixes tokens (`mixing`) and the norm
    behind it (`again`): dispatch beside the first, combine beside the shared experts (ScMoE, 2404.05019)."""
    first, second, third = stretches(c, spec)
    travels = [i for i, piece in enumerate(second) if piece.name.endswith("all-to-all")]
    if len(travels) == 2:
        there, back = travels
        into = [*second[:there], msgspec.structs.replace(second[there], opens="dispatch")]
        inner = [Piece(name="dispatch arrives", closes="dispatch"), *second[there + 1 : back]]
        out, rest = [msgspec.structs.replace(second[back], opens="combine")], second[back + 1 :]
        closing = [Piece(name="combine arrives", closes="combine")]
    else:
        into, inner, out, rest, closing = [], second, [], [], []
    shared = [again, *_shared(c, spec)] if spec.shared_ffn else []
    return [*_gathered(c, spec), *first, *into, *mixing, *inner, *out, *shared, *closing, *rest, *third]


def _shared(c: Context, spec: Moe) -> list[Piece]:
    return dense(c, "shared experts", spec.shared_ffn, spec.gated) if spec.shared_ffn else []


def stretches(c: Context, spec: Moe) -> tuple[list[Piece], list[Piece], list[Piece]]:
    """Return a mixture's pieces in front of the exchange, from there to its way back, and behind that."""
    e, hidden, plan, load = c.element, spec.width(c.hidden), c.plan, c.load(spec)
    tokens = c.routed_tokens
    sent = tokens * spec.top_k
    routed = sent * hidden * e
    rows = sent if _alike(c) else sent * plan.etp
    ffn = spec.ffn // plan.etp
    inner = rows * ffn * e * load.busiest
    up_width = 2 * ffn if spec.gated else ffn
    kept = rows * hidden * e * load.busiest
    first = [
        *_cut(c, "tokens", forward=False),
        _router(c, spec, tokens),
        *_latent(c, spec, "latent in"),
        Piece(
            name=SORTED,
            forward=Elementwise(num_bytes=routed + tokens * hidden * e, kernels=2, operator=PERMUTE),
            backward=Elementwise(num_bytes=routed + tokens * hidden * e, kernels=2, operator=PERMUTE),
        ),
    ]
    second = [
        *_dispatch(c, spec, "dispatch", routed),
        *_grouped(c, "experts up", spec, rows, up_width, hidden, kept),
        activation("experts activation", inner, spec.gated),
        *_grouped(c, "experts down", spec, rows, hidden, ffn, inner),
        *_dispatch(c, spec, "combine", routed),
    ]
    third = [
        Piece(
            name="unpermute and weight",
            forward=Elementwise(num_bytes=routed + tokens * hidden * e, kernels=2, operator=PERMUTE),
            backward=Elementwise(num_bytes=2 * routed + tokens * hidden * e, kernels=2, operator=PERMUTE),
            saved=routed,
        ),
        *_latent(c, spec, "latent out"),
        *_cut(c, "outputs", forward=True),
    ]
    return first, second, third


def _latent(c: Context, spec: Moe, name: str) -> list[Piece]:
    """The product that takes tokens into the experts' own width, whose input the router keeps, or their sums out of it;
    each rank has its matrix whole, for tokens of its own."""
    if not spec.latent:
        return []
    tokens = c.routed_tokens
    if name == "latent in":
        return linear(c, name, spec.latent, c.hidden, bias=spec.bias, rows=tokens)
    size = tokens * spec.latent * c.element
    return linear(c, name, c.hidden, spec.latent, bias=spec.bias, rows=tokens, saved=size, held=size)


def _alike(c: Context) -> bool:
    """Whether tensor-parallel ranks send the same tokens, all of them, to the parts that each has of the experts."""
    return c.tp > 1 and not c.sp and c.plan.experts.duplicates == "sent" and c.plan.etp > 1


def _cut(c: Context, name: str, *, forward: bool) -> list[Piece]:
    """The gather of what tensor-parallel ranks did for their parts of tokens that all hold alike: of the outputs in the
    forward, of the inputs' gradients in the backward (duplicate token dropping, DeepSpeed-TED, 2303.06318)."""
    if c.routed_tokens == int(c.shard_tokens):
        return []
    gather = Collective(op="all_gather", num_bytes=c.tokens * c.hidden * c.element, group=c.tp_group)
    ways = {"forward": gather} if forward else {"backward": gather}
    return [Piece(name=f"{name} gather", queue="tp", **ways)]


def _in_portions(count: int, pieces: list[Piece]) -> list[Piece]:
    """Return pieces that take their tokens in so many portions."""
    return pieces if count == 1 else [msgspec.structs.replace(piece, portions=count) for piece in pieces]


def _gathered(c: Context, spec: Moe) -> list[Piece]:
    """The hot experts' weights, gathered on all ranks that share the experts while the layer begins, and their
    gradients summed back to their own ranks (the sparse collectives of Hecate, 2502.02581, section 3)."""
    hot = c.plan.experts.hot
    if not hot or c.plan.experts.ep == 1:
        return []
    size = hot * spec.expert_params(c.hidden) / c.plan.etp * c.element
    gather = Collective(op="all_gather", num_bytes=size, group=c.ep_group)
    reduce = Collective(op="reduce_scatter", num_bytes=size, group=c.ep_group)
    return [Piece(name="hot experts gather", forward=gather, backward=reduce, queue="ep", saved=size, early=True)]


def _router(c: Context, spec: Moe, tokens: int) -> Piece:
    """Return the piece of a router: scores in fp32, then top-k and its bookkeeping, small kernels whose cost is their
    number."""
    scores = tokens * spec.experts * 4.0
    weight = Gemm(m=c.hidden, n=spec.experts, k=tokens, dtype=c.attention_dtype, out_bytes=4.0)
    return Piece(
        name="router",
        forward=Gemm(m=tokens, n=spec.experts, k=c.hidden, dtype=c.attention_dtype, out_bytes=4.0),
        backward=Gemm(m=tokens, n=c.hidden, k=spec.experts, dtype=c.attention_dtype),
        weight=None if c.train.lora is not None else weight,
        saved=2 * scores + tokens * c.hidden * c.element,
        outputs=(scores,),
    )


def _dispatch(c: Context, spec: Moe, name: str, routed: float) -> list[Piece]:
    """All-to-all over ep, and what splits each expert over etp."""

    def swap(phase: str) -> Collective:
        width = spec.width(c.hidden)
        tokens = Routed(phase=phase, tokens=c.routed_tokens, hidden=width, top_k=spec.top_k, experts=spec.experts)
        return Collective(op="all_to_all", num_bytes=routed, group=c.load(spec).carried(c.ep_group), routed=tokens)

    pieces = []
    if c.plan.experts.ep_inner > 1:
        pieces += _in_two_levels(c, spec, name, routed)
    elif c.plan.experts.ep > 1:
        # gradients go the other way
        there, returned = swap(name), swap("combine" if name == "dispatch" else "dispatch")
        pieces.append(Piece(name=f"{name} all-to-all", forward=there, backward=returned, queue="ep"))
    # ranks of a group send tokens of their own, each, or the same ones alike
    first, alike = name == "dispatch", _alike(c)
    lie = REPLICATE if alike else TOKENS
    crossed = crossing(lie, COLUMNS.inputs[0], COLUMNS.out) if first else crossing(ROWS_CUT.out, lie)
    over = moved(f"{name} etp", "tp", crossed, routed * (1 if alike else c.plan.etp), c.etp_group)
    # tokens that all have are copied before they are sent, and summed when they are back
    return [*over, *pieces] if first == alike else [*pieces, *over]


def _in_two_levels(c: Context, spec: Moe, name: str, routed: float) -> list[Piece]:
    """All-to-alls inside runs of ranks and between ranks at one place of all runs, and between them a pass over what
    arrived, to sort it by where it goes."""
    load = c.load(spec)
    groups = load.carried_in_two(c.ep_inner, c.ep_outer)
    inside, across = (Collective(op="all_to_all", num_bytes=routed, group=group) for group in groups)
    sort = Elementwise(num_bytes=2 * routed, kernels=1)
    steps = [
        Piece(name=f"{name} inside", forward=inside, backward=inside, queue="ep"),
        Piece(name=f"{name} sort", forward=sort, backward=sort),
        Piece(name=f"{name} across", forward=across, backward=across, queue="ep"),
    ]
    first = Piece(name=f"{name} order", forward=sort, backward=sort)
    return [first, *steps] if name == "dispatch" else [*steps[::-1], first]


def _grouped(c: Context, name: str, spec: Moe, rows: int, n: int, k: int, saved: float) -> list[Piece]:
    groups = max(1, spec.experts // c.plan.experts.ep) + c.plan.experts.hot
    imbalance, dtype, e = c.load(spec).busiest, c.dtype, c.element
    frozen = c.train.lora is not None
    common = {"groups": groups, "rows": rows, "dtype": dtype, "imbalance": imbalance}
    grads = 4.0 if c.plan.precision.grads == "fp32" else 2.0
    pieces = []
    if dtype not in ("fp32", "fp16", "bf16"):
        many = rows * imbalance
        transposes = 0.0 if frozen else many * (n + k)  # what W multiplies, as of any product
        pieces.append(
            Piece(
                name=f"{name} quantise",
                forward=Elementwise(num_bytes=many * k * (e + 1), kernels=groups, fused=True),
                backward=Elementwise(num_bytes=many * n * (e + 1) + transposes, kernels=groups, fused=True),
            )
        )
        saved *= c.low / e  # as of any product, the quantised operand is what stays for W
    pieces += dequantised(c, name, groups * n * k, groups)
    pieces.append(
        Piece(
            name=name,
            forward=GroupedGemm(n=n, k=k, out_bytes=e, weights=c.plan.precision.experts_format, **common),
            backward=GroupedGemm(n=k, k=n, out_bytes=e, **common),
            weight=None if frozen else GroupedGemm(n=n, k=k, out_bytes=grads, weight_gradient=True, **common),
            saved=0.0 if frozen else saved,
            held=0.0 if frozen else saved,
            gradient=0.0 if frozen else rows * n * c.low_or_element * imbalance,
            outputs=(rows * n * e * imbalance,),
        )
    )
    target = EXPERT_TARGETS[name.endswith("down")]
    return pieces + (_adapters(c, name, common, n, k) if frozen and target in c.train.lora.targets else [])


def _adapters(c: Context, name: str, common: dict, n: int, k: int) -> list[Piece]:
    """The two low-rank factors of every expert's adapter; the first keeps what the experts read."""
    rank, e = c.train.lora.rank, c.element
    rows, common = common["rows"] * common["imbalance"], common | {"dtype": c.attention_dtype}

    def factor(label: str, n: int, k: int) -> Piece:
        return Piece(
            name=f"{name} lora {label}",
            forward=GroupedGemm(n=n, k=k, out_bytes=e, **common),
            backward=GroupedGemm(n=k, k=n, out_bytes=e, **common),
            weight=GroupedGemm(n=n, k=k, out_bytes=4.0, weight_gradient=True, **common),
            saved=rows * k * e,
            held=rows * k * e,
            gradient=rows * n * e,
        )

    return [factor("down", rank, k), factor("up", n, rank)]


def params(spec: Moe, c: Context) -> Held:
    """Shared experts are split as a dense MLP, the router is whole on every rank."""
    return Held(
        split=spec.shared_params(c.hidden),
        whole=float(spec.router_params(c.hidden)),
        expert=spec.experts * spec.expert_params(c.hidden),
    )


def flops(spec: Moe, tokens: Tokens) -> Flops:
    """Router, shared experts, and the experts that a token is routed to."""
    active = spec.num_params(tokens.hidden) - (spec.experts - spec.top_k) * spec.expert_params(tokens.hidden)
    return Flops(weights=2 * active * tokens.count)


def adapters(spec: Moe, hidden: int, target: str) -> int:
    """Inputs plus outputs of a matrix of the shared experts."""
    return adapted(spec.shared_ffn, spec.gated, hidden, target)


KINDS = (Kind(name="moe", record=Moe, pieces=pieces, params=params, flops=flops, adapters=adapters),)
