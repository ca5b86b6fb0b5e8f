"""Layers whose memory of a sequence has a fixed size, as pieces: Mamba, Mamba-2 and the gated delta rule.

Each projects, convolves a few tokens back, scans and gates. Tensor parallelism splits heads (Mamba: channels), as
Megatron-LM's and vLLM's mixers do. Under context parallelism heads are swapped for tokens around convolution and scan,
which then see whole sequences (Megatron-LM's MambaContextParallel, and its gated delta rule after it); or each rank
scans its own tokens with all heads, and states are handed on (LASP, 2404.02882), or what tokens add goes round a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.layers.kind import Cache, Flops, Held, Kind, Tokens
from meshwright.layers.pieces import Context, Piece, RingMoves, entering, linear, regather
from meshwright.layers.placed import enter
from meshwright.spec.mixers import GatedDelta, Mamba, Mamba2
from meshwright.spec.workload import Train
from meshwright.work import (
    RING_MERGE,
    SEQUENCES_TOGETHER,
    AttentionCore,
    Collective,
    Convolution,
    Elementwise,
    Gemm,
    Group,
    Scan,
)

if TYPE_CHECKING:
    from meshwright.plan import Plan

#: Operations of one token for each number of a state: it decays, takes in a product and is multiplied on its way out
#: (7, as Megatron-LM counts them in its num_floating_point_operations).
PER_STATE = 7.0


def _into(c: Context, n: int, *, bias: bool) -> list[Piece]:
    """The projection into a tensor-parallel region."""
    entry = entering(c)
    made = linear(c, "mixer in", n, c.hidden, bias=bias, saved=entry, held=entry)
    made = [msgspec.structs.replace(p, regather=regather(c)) if p.name == "mixer in" else p for p in made]
    return [*enter(c, "mixer"), *made]


def _out(c: Context, inner: int, *, bias: bool) -> list[Piece]:
    size = c.tokens * inner * c.element
    return linear(c, "mixer out", c.hidden, inner, bias=bias, saved=size, held=size)


def _whole(c: Context, width_in: int, width_out: int, body: list[Piece]) -> list[Piece]:
    """`body` on whole sequences of a share of the heads: `width_in` numbers of a token go there, `width_out` back."""
    if c.plan.layout.cp == 1:
        return body
    # one swap over all context-parallel ranks, whatever the attention of other layers does
    group = c.cp_inner if c.cp_outer.size == 1 else c.cp_outer if c.cp_inner.size == 1 else None
    swaps = []
    for name, width in (("mixer heads to sequence", width_in), ("mixer sequence to heads", width_out)):
        size = c.tokens * width * c.element
        each = [group] if group is not None else [c.cp_inner, c.cp_outer]
        for number, one in enumerate(each):
            moved = Collective(op="all_to_all", num_bytes=size, group=one)
            swaps.append(
                (name, Piece(name=f"{name} {number}".removesuffix(" 0"), forward=moved, backward=moved, queue="cp"))
            )
    there = [piece for name, piece in swaps if name.endswith("to sequence")]
    back = [piece for name, piece in swaps if name.endswith("to heads")]
    return [*there, *body, *back]


def handed(c: Context) -> bool:
    """Whether states are handed on between ranks, each of which scans its own tokens."""
    return c.plan.layout.cp > 1 and c.plan.sequence.scans == "handed"


def ringed(c: Context) -> bool:
    """Whether what tokens add to states goes round a ring of ranks, each of which has its own tokens."""
    return c.plan.layout.cp > 1 and c.plan.sequence.scans == "ringed"


def _shares(c: Context) -> tuple[int, int]:
    """Parts that context-parallel ranks take of the tokens of a row, and of the heads, while they scan."""
    return (c.plan.layout.cp, 1) if handed(c) or ringed(c) else (1, c.plan.layout.cp)


def _neighbours(c: Context) -> Group:
    """One group of neighbours in the order of the sequence, also where its ranks swap heads in layers with
    attention."""
    return c.cp_inner if c.cp_outer.size == 1 else c.cp_outer


def _edge(c: Context, channels: int, kernel: int) -> Piece:
    """The tokens of the rank before that a convolution looks back on."""
    size = c.plan.pipeline.microbatch * (kernel - 1) * channels * c.element
    edge = Collective(op="send", num_bytes=size, group=_neighbours(c))
    return Piece(name="mixer edge", forward=edge, backward=edge, queue="cp")


def _round(c: Context, scan: Scan, saved: float) -> Piece:
    """A ring of keys (by groups), values and decays, which each rank's tokens meet of every rank before it, pair by
    pair: attention whose scores are decayed in place of normalised, the decay between two tokens an exponential as
    well. Each rank has one piece of the sequence, so that the last meets the tokens of all and the others wait for it:
    its pairs are priced."""
    tokens, ring = c.tokens, c.plan.layout.cp
    moved = tokens * (scan.groups * scan.k_dim + scan.heads * (scan.v_dim + 1)) * c.element

    def send(size: float) -> Collective:
        return Collective(op="send", num_bytes=size, group=_neighbours(c))

    def core(backward: bool) -> AttentionCore:
        return AttentionCore(
            batch=scan.batch,
            q_len=scan.seq_len,
            kv_len=scan.seq_len,
            heads=scan.heads,
            kv_heads=scan.heads,
            head_dim=scan.k_dim,
            v_head_dim=scan.v_dim,
            pairs=scan.seq_len**2 * (1 - 0.5 / ring),  # of the rank's own tokens half
            dtype=c.attention_dtype,
            backward=backward,
        )

    value = c.element + 8.0  # as a kernel left it, added to what is read and written in fp32
    gradients = scan.heads * (2 * scan.k_dim + scan.v_dim)
    return Piece(
        name="states in a ring",
        forward=core(False),
        backward=core(True),
        saved=saved,
        ring=ring,
        exchange=RingMoves(first=send(moved), each=send(moved)),
        # they go on, followed by their gradients, which come home at the end
        exchange_back=RingMoves(first=send(2 * moved), each=send(2 * moved), last=send(moved)),
        merge=Elementwise(num_bytes=tokens * scan.heads * scan.v_dim * value, operator=RING_MERGE),
        merge_back=Elementwise(num_bytes=tokens * gradients * value, operator=RING_MERGE),
    )


def _apart(c: Context, channels: int, kernel: int, scan: Scan, body: list[Piece]) -> list[Piece]:
    """`body`, a convolution and a `scan` of this rank's tokens, with what ranks hand on: the tokens that a convolution
    looks back on, and the state of every head. What the tokens see of the state before them, and what they leave of it,
    is found beside the scan: decays, or for the delta rule a scan of an identity."""
    e = c.element
    state = scan.batch * scan.heads * scan.k_dim * scan.v_dim * e
    relay = Collective(op="relay", num_bytes=state, group=_neighbours(c))
    seen = c.tokens * scan.heads * scan.k_dim * e
    if scan.rule == "delta":
        unit = msgspec.structs.replace(scan, v_dim=scan.k_dim)
        back = msgspec.structs.replace(unit, backward=True)
        beside = Piece(name="state reach scan", forward=unit, backward=back, saved=seen)
    else:
        beside = Piece(
            name="state reach", forward=Elementwise(num_bytes=2 * seen), backward=Elementwise(num_bytes=3 * seen)
        )
    product = {"batch": scan.batch * scan.heads, "dtype": c.attention_dtype, "out_bytes": e}
    tokens = scan.seq_len
    found = Gemm(m=tokens, n=scan.v_dim, k=scan.k_dim, **product)
    back = Gemm(m=tokens, n=scan.v_dim, k=scan.k_dim, **(product | {"batch": 2 * product["batch"]}))
    return [
        _edge(c, channels, kernel),
        *body,
        beside,
        Piece(name="state handed on", forward=relay, backward=relay, queue="cp", saved=state),
        Piece(name="state seen", forward=found, backward=back, saved=seen),
    ]


def _convolution(c: Context, channels: int, kernel: int) -> Piece:
    rows, (cuts, cp) = c.plan.pipeline.microbatch, _shares(c)

    def work(backward: bool) -> Convolution:
        width = max(1, channels // cp)
        return Convolution(batch=rows, seq_len=c.seq_len // cuts, channels=width, kernel=kernel, backward=backward)

    return Piece(
        name="mixer convolution",
        forward=work(False),
        backward=work(True),
        saved=c.tokens * channels * c.element,
    )


def _together(c: Context, name: str, width: int) -> list[Piece]:
    """Return the copy that software whose activations are [sequence, row, feature] makes of `width` features for
    kernels that want a row's tokens together, and of their gradients; none of one row, which is so as it is
    (Megatron-LM, megatron/core/ssm/mamba_mixer.py: rearrange and contiguous in front of the convolution and behind the
    scan)."""
    if c.plan.pipeline.microbatch == 1:
        return []
    copy = Elementwise(num_bytes=2 * c.tokens * width * c.element, fused=True, operator=SEQUENCES_TOGETHER)
    return [Piece(name=name, forward=copy, backward=copy)]


def _scan(c: Context, scan: Scan, saved: float) -> Piece:
    """Return the piece of a scan, which saves its inputs and recomputes states in its backward. Documents in a row cost
    nothing more: at their borders the decay is to zero."""
    return Piece(
        name=f"{scan.rule} scan",
        forward=scan,
        backward=msgspec.structs.replace(scan, backward=True),
        saved=saved,
        outputs=(c.tokens * scan.heads * _shares(c)[1] * scan.v_dim * c.element,),
    )


def _gate(c: Context, width: int, *, normed: bool) -> Piece:
    """The output, normalised, times an activated gate: both stay."""
    size = c.tokens * width * c.element
    forward, backward = Elementwise(num_bytes=3 * size), Elementwise(num_bytes=(6 if normed else 5) * size)
    return Piece(name="mixer gate", forward=forward, backward=backward, saved=2 * size)


def _rows(c: Context, **dims: int) -> Scan:
    return Scan(batch=c.plan.pipeline.microbatch, seq_len=c.seq_len // _shares(c)[0], **dims)


def mamba2(c: Context, spec: Mamba2) -> list[Piece]:
    """One projection makes gate, inputs, both maps and step sizes; heads are split, groups where there are enough."""
    cp, inner, groups = _shares(c)[1], spec.inner // c.tp, max(1, spec.groups // c.tp)
    heads, maps = spec.heads // c.tp, 2 * groups * spec.state
    scan = _rows(
        c,
        rule="ssd",
        heads=heads // cp,
        groups=max(1, groups // cp),
        k_dim=spec.state,
        v_dim=spec.head_dim,
        chunk=spec.chunk,
    )
    convolution = _convolution(c, inner + maps, spec.kernel)
    saved = c.tokens * (inner + maps + 2 * heads) * c.element
    body = [
        convolution,
        _round(c, scan, saved) if ringed(c) else _scan(c, scan, saved),
        # its output is not kept (mamba_split_conv1d_scan_combined of state-spaces/mamba, which its layers train with)
        Piece(name="mixer convolution again", backward=convolution.forward),
    ]
    if ringed(c):
        body = [_edge(c, inner + maps, spec.kernel), *body]
    elif handed(c):
        body = _apart(c, inner + maps, spec.kernel, scan, body)
    else:  # fewer groups than ranks: each rank that shares a group gets its maps
        body = _whole(c, inner + maps * max(1, cp // groups) + heads, inner, body)
    return [
        *_into(c, 2 * inner + maps + heads, bias=spec.bias),
        *_together(c, "mixer rows together", 2 * inner + maps + heads),
        *body,
        *_together(c, "mixer rows apart", inner),
        _gate(c, inner, normed=True),
        *_out(c, inner, bias=spec.bias),
    ]


def mamba2_params(spec: Mamba2, c: Context) -> Held:
    """Heads are split; the maps of groups that are fewer than ranks are on several of them."""
    per_group = 2 * spec.state * (c.hidden + spec.kernel + int(spec.conv_bias) + int(spec.bias))
    extra = per_group * (1 - spec.groups / c.tp) if spec.groups < c.tp else 0.0
    return Held(split=spec.num_params(c.hidden), extra=extra)


def delta(c: Context, spec: GatedDelta) -> list[Piece]:
    """Projections make queries, keys, values, gate, step and decay; heads are split."""
    cp, keys, values = _shares(c)[1], spec.key_width // c.tp, spec.value_width // c.tp
    heads = spec.heads // c.tp
    scan = _rows(
        c,
        rule="delta",
        heads=heads // cp,
        groups=max(1, spec.k_heads // c.tp // cp),
        k_dim=spec.k_head_dim,
        v_dim=spec.v_head_dim,
        chunk=spec.chunk,
    )
    body = [
        _convolution(c, 2 * keys + values, spec.kernel),
        _scan(c, scan, c.tokens * (2 * keys + values + 2 * heads) * c.element),
    ]
    width = 2 * keys + values
    body = _apart(c, width, spec.kernel, scan, body) if handed(c) else _whole(c, width + 2 * heads, values, body)
    return [
        *_into(c, 2 * keys + 2 * values + 2 * heads, bias=False),
        *body,
        _gate(c, values, normed=True),
        *_out(c, values, bias=False),
    ]


def delta_params(spec: GatedDelta, c: Context) -> Held:
    """Heads are split; the norm of a head is whole on every rank."""
    return Held(split=spec.num_params(c.hidden) - spec.v_head_dim, whole=float(spec.v_head_dim))


def mamba(c: Context, spec: Mamba) -> list[Piece]:
    """Channels are split; step size and maps are summed over ranks, as every channel has a part in them."""
    inner, small = spec.inner // c.tp, spec.dt_rank + 2 * spec.state
    size = c.tokens * inner * c.element
    scan = _rows(c, rule="selective", heads=inner, groups=1, k_dim=spec.state, v_dim=1, chunk=1)
    summed = []
    if c.tp > 1:
        over = Collective(op="all_reduce", num_bytes=c.tokens * small * c.element, group=c.tp_group)
        summed = [Piece(name="mixer maps sum", forward=over, backward=over, queue="tp")]
    norms = []
    if spec.normed:
        moved = c.tokens * small * c.element
        forward, backward = Elementwise(num_bytes=2 * moved, kernels=3), Elementwise(num_bytes=3 * moved, kernels=3)
        norms = [Piece(name="mixer norms", forward=forward, backward=backward, saved=moved)]
    step = c.tokens * spec.dt_rank * c.element
    return [
        *_into(c, 2 * inner, bias=spec.bias),
        _convolution(c, inner, spec.kernel),
        *linear(c, "mixer maps", small, inner, saved=size, held=size),
        *summed,
        *norms,
        *linear(c, "mixer step", inner, spec.dt_rank, bias=True, saved=step, held=step),
        _scan(c, scan, 2 * size + c.tokens * 2 * spec.state * c.element),
        _gate(c, inner, normed=False),
        *_out(c, inner, bias=spec.bias),
    ]


def mamba_params(spec: Mamba, c: Context) -> Held:
    """Channels are split; the norms of step size and maps are whole on every rank."""
    norms = spec.dt_rank + 2 * spec.state if spec.normed else 0
    return Held(split=spec.num_params(c.hidden) - norms, whole=float(norms))


def _states(spec: Mamba | Mamba2 | GatedDelta) -> int:
    """Numbers of a layer's state."""
    if isinstance(spec, Mamba):
        return spec.inner * spec.state
    if isinstance(spec, Mamba2):
        return spec.inner * spec.state
    return spec.heads * spec.k_head_dim * spec.v_head_dim


def flops(spec: Mamba | Mamba2 | GatedDelta, tokens: Tokens) -> Flops:
    """Every parameter multiplies every token, and every token every number of the state."""
    weights = 2 * spec.num_params(tokens.hidden) * tokens.count
    return Flops(weights=weights, mixing=PER_STATE * _states(spec) * tokens.count)


def state(spec: Mamba | Mamba2 | GatedDelta) -> Cache:
    """The state and the taps of the convolution, however long the sequence is."""
    channels = spec.inner if isinstance(spec, Mamba) else spec.conv_width
    return Cache(constant=_states(spec) + channels * (spec.kernel - 1))


def _divides(name: str, ranks: int, what: str, count: int, help: str) -> Iterator[tuple[str, str]]:
    if count % ranks:
        yield f"{name}={ranks} does not divide {what}={count}", help


def head_rules(spec: Mamba2 | GatedDelta, plan: Plan, train: Train) -> Iterator[tuple[str, str]]:
    """Heads must divide over tensor- and context-parallel ranks, groups over the former or the other way round."""
    tp, cp = plan.layout.tp, 1 if plan.sequence.scans != "swapped" else plan.layout.cp
    yield from _divides("tp", tp, "heads of the mixer", spec.heads, "take a tp that divides them")
    if spec.heads % tp == 0:
        per_rank = spec.heads // tp
        yield from _divides("cp", cp, "a rank's heads of the mixer", per_rank, "its heads are swapped for tokens")
    groups = spec.groups if isinstance(spec, Mamba2) else spec.k_heads
    if groups % tp and tp % groups:
        yield f"tp={tp} and the mixer's groups={groups} do not divide each other", "take a tp that divides them"
    if isinstance(spec, GatedDelta) and groups % (tp * cp):
        yield (
            f"tp*cp={tp * cp} does not divide the mixer's key heads={groups}",
            "Megatron-LM splits key heads over both",
        )


def channel_rules(spec: Mamba, plan: Plan, train: Train) -> Iterator[tuple[str, str]]:
    """Channels must divide; nobody has published context parallelism of Mamba-1."""
    yield from _divides("tp", plan.layout.tp, "channels of the mixer", spec.inner, "take a tp that divides them")
    if plan.layout.cp > 1:
        yield (
            "context parallelism of Mamba-1 layers is not modelled: no implementation is published, their scan goes on "
            "from token to token with a state for every channel",
            "say cp1",
        )


KINDS = (
    Kind(name="mamba2", record=Mamba2, pieces=mamba2, params=mamba2_params, flops=flops, state=state, rules=head_rules),
    Kind(
        name="delta", record=GatedDelta, pieces=delta, params=delta_params, flops=flops, state=state, rules=head_rules
    ),
    Kind(name="mamba", record=Mamba, pieces=mamba, params=mamba_params, flops=flops, state=state, rules=channel_rules),
)
