"""Attention over a cut sequence: equal to plain attention on simulated ranks, and sending what its paper says."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshwright.layers.algebra import AxisMesh, prove, transfers
from meshwright.papers import ranks, trained
from meshwright.papers.outcome import AT_MOST, WITHIN, Check, Fact, Figure, Outcome, at_most, below, equal

#: Heads, tokens, head dim and ranks of the tensors that everything here is proven on.
HEADS, TOKENS, DIM, RANKS = 8, 96, 16, 4
#: Largest difference that rounding of float64 explains on them.
ROUNDING = 1e-9
ALONE = "one device that holds the whole sequence"
PROVEN = f"numbers proven on {HEADS} heads, {TOKENS} tokens, head dim {DIM}, {RANKS} simulated ranks, float64"


class Tensors(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def tensors(seed: int = 0) -> Tensors:
    """Random q, k and v, [heads, tokens, dim]."""
    return Tensors(*np.random.default_rng(seed).standard_normal((3, HEADS, TOKENS, DIM)))


def as_plain(found: np.ndarray, wanted: np.ndarray) -> Figure:
    """Return the figure for an attention's result: its largest difference from plain attention's, at most rounding."""
    return at_most("largest difference from plain attention", float(np.abs(found - wanted).max()), ROUNDING)


def ring_self_attention() -> Outcome:
    t, sent = tensors(), ranks.Sent(RANKS)
    found, held = ranks.ring_self_attention(*t, ranks.contiguous(TOKENS, RANKS), sent)
    per_rank = HEADS * TOKENS // RANKS * DIM
    # Its Tables 1 and 2: elements of an MLP and of an attention block under tensor and under sequence parallelism.
    hidden, length, heads, width = 768, 512, 12, 64

    def crossing(block: str) -> float:
        """Batch times length at which both need the same memory, by bisection, over what the paper says."""
        low, high = 1.0, 1e9
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if _memory(block, "tp", middle, hidden, length, heads, width)
                < _memory(block, "sp", middle, hidden, length, heads, width)
                else (low, middle)
            )
        return low

    return Outcome(
        figures=(
            as_plain(found, ranks.attention(*t)),
            equal("elements sent by a rank forward: 2 (N-1) B Z L/N A", 2 * (RANKS - 1) * per_rank, sent.most),
            equal("scores a rank holds: B Z L^2 / N", HEADS * TOKENS**2 // RANKS, held),
            Figure(
                "MLP block: B L where sequence parallelism needs less, 32 H",
                32 * hidden,
                crossing("mlp"),
                "",
                WITHIN,
                1e-6,
                restated=True,
            ),
            Figure(
                "attention block: B L where it needs less, 16 A Z",
                16 * width * heads,
                crossing("attention"),
                "",
                WITHIN,
                1e-6,
                restated=True,
            ),
        ),
        baseline=ALONE + "; memory: tensor parallelism on as many ranks",
        assumptions=(
            PROVEN,
            "crossings by the formulas of its Tables 1 and 2, N = 64, BERT-base widths",
        ),
    )


def _memory(block: str, kind: str, batch_length: float, h: int, length: int, z: int, a: int, n: int = 64) -> float:
    """Elements by Tables 1 and 2 of 2105.13120; `batch_length` is batch times sequence length."""
    bl, scores = batch_length, batch_length * length * z / n
    if block == "mlp":
        return 32 * h * h / n + 4 * bl * h / n + bl * h if kind == "tp" else 32 * h * h + 5 * bl * h / n
    whole = 16 * a * z * h
    return (
        whole / n + 4 * bl * z * a / n + scores + bl * h
        if kind == "tp"
        else whole + 4 * bl * z * a / n + scores + bl * h / n
    )


def usp() -> Outcome:
    t, rings, heads = tensors(), 2, 2
    sent, plain_ring = ranks.Sent(rings * heads), ranks.Sent(RANKS)
    found = ranks.unified(*t, heads, rings, sent)
    ranks.ring(*t, ranks.zigzag(TOKENS, RANKS), plain_ring)
    work = ranks.pairs(ranks.zigzag(TOKENS, RANKS))
    uneven = ranks.pairs(ranks.contiguous(TOKENS, RANKS))
    whole = HEADS * TOKENS * DIM // RANKS
    # 4 tensors swap over the heads' axis; k and v of a head share go round the ring.
    said = 4 * whole * (heads - 1) / heads + 2 * (rings - 1) * HEADS // heads * TOKENS // rings * DIM
    return Outcome(
        figures=(
            as_plain(found, ranks.attention(*t)),
            equal("elements sent by a rank: 4 swapped, 2 circulated", said, sent.most),
            Figure(
                "causal work of the busiest rank over the mean, zigzag",
                1.0,
                max(work) / np.mean(work),
                "",
                WITHIN,
                1e-9,
            ),
        ),
        facts=(
            Fact(
                "contiguous pieces leave the last rank more than half again as much",
                max(uneven) > 1.5 * np.mean(uneven),
            ),
            Fact("less is sent than by a ring over all ranks", sent.most < plain_ring.most),
            Fact("more ranks than heads are possible: 2 heads on 4 ranks", _more_ranks_than_heads()),
        ),
        baseline=ALONE,
        assumptions=(PROVEN, "elements sent: counted, not timed"),
    )


def _more_ranks_than_heads() -> bool:
    two = Tensors(*(t[:2] for t in tensors(1)))
    found = ranks.unified(*two, 2, 2, ranks.Sent(4))
    return bool(np.abs(found - ranks.attention(*two)).max() < ROUNDING)


def burst() -> Outcome:
    t, grad = tensors(), tensors(5).q
    sent = ranks.Sent(RANKS)
    cut = ranks.zigzag(TOKENS, RANKS)
    dq, dk, dv = ranks.attention_backward(*t, grad, cut, sent)
    errors = [_slope(t, grad, which, got) for which, got in enumerate((dq, dk, dv))]
    rows = HEADS * TOKENS // RANKS
    ring = (RANKS - 1) * 4 * rows * DIM  # k, v, dk and dv go round in the backward of a plain ring
    wide = (3 * 128 + 2) / (4 * 128)
    return Outcome(
        figures=(
            as_plain(ranks.ring(*t, cut, ranks.Sent(RANKS)), ranks.attention(*t)),
            at_most("largest error of gradients against differences of the loss", max(errors), 1e-5),
            equal("elements sent backward: (N-1) (3 d + 2) a row", (RANKS - 1) * rows * (3 * DIM + 2), sent.most),
            Figure(
                "backward traffic over a ring of k, v, dk, dv: (3 d + 2) / 4 d",
                (3 * DIM + 2) / (4 * DIM),
                sent.most / ring,
                "",
                WITHIN,
                1e-9,
            ),
            Figure("the same at head dim 128: a quarter less", 0.75, wide, "", WITHIN, 0.01, restated=True),
        ),
        baseline="RingAttention, whose backward hands on k, v and their gradients",
        assumptions=(PROVEN, "the abstract's 40% (first version) counts what its authors measured and is not judged"),
    )


def _slope(t: Tensors, grad: np.ndarray, which: int, found: np.ndarray) -> float:
    """The difference between a gradient and the slope of the loss along a random direction, relative."""
    along = np.random.default_rng(9).standard_normal(found.shape)
    step = 1e-5

    def loss(sign: int) -> float:
        moved = [x + sign * step * along if i == which else x for i, x in enumerate(t)]
        return float((ranks.attention(*moved) * grad).sum())

    slope = (loss(1) - loss(-1)) / (2 * step)
    return abs(slope - float((found * along).sum())) / max(1.0, abs(slope))


def tokenring() -> Outcome:
    t = tensors()
    cut = ranks.zigzag(TOKENS, RANKS)
    found, most = ranks.ring_of_queries(*t, cut)
    rows = HEADS * TOKENS // RANKS
    one_way = 2 * rows * DIM  # a ring hands on k and v in one direction
    return Outcome(
        figures=(
            as_plain(found, ranks.attention(*t)),
            equal("a step's queries, one way: d a row", rows * DIM, most["forth"]),
            equal("a step's output and lse, the other way: d + 1 a row", rows * (DIM + 1), most["back"]),
            below("busiest direction over a ring's, both directions usable", max(most.values()) / one_way),
        ),
        facts=(Fact("the work of ranks is equal under a causal mask", len(set(ranks.pairs(cut))) == 1),),
        baseline="RingAttention on full-duplex links, of which it uses one direction",
        assumptions=(PROVEN, "the abstract gives no figures"),
    )


def dsp() -> Outcome:
    """Two blocks of a transformer over space and time: attention over space, then over time."""
    mesh, shape = AxisMesh.of(sp=4), (12, 16, 8)  # time, space, hidden
    switches = transfers(mesh, "S0", "S1", shape) + transfers(mesh, "S1", "S0", shape)
    dynamic = sum(one.sent for one in switches)
    qkvo = 4 * transfers(mesh, "S0", "S2", shape)[0].sent
    gathered = transfers(mesh, "S0", "R", shape)[0].sent + transfers(mesh, "P", "S0", shape)[0].sent
    return Outcome(
        figures=(
            Figure(
                "elements sent over two blocks, of embedded all-to-all ('at least half less')",
                0.5,
                dynamic / qkvo,
                "x",
                AT_MOST,
            ),
            below("of gathering and scattering in attention and MLP of both blocks", dynamic / (4 * gathered)),
            at_most(
                "largest error of a switch there and back",
                max(prove(mesh, "S0", "S1", shape), prove(mesh, "S1", "S0", shape)),
                ROUNDING,
            ),
        ),
        facts=(
            Fact("a switch is one all-to-all", [one.op for one in switches] == ["all_to_all"] * 2),
            Fact("the dim a block attends over is whole on every rank", _attends_locally(mesh)),
        ),
        baseline="sequence parallelism inside attention: four all-to-alls of the time block's q, k, v and output",
        assumptions=("volume claim of the later version; the first says under 25% of the volume",),
    )


def _attends_locally(mesh: AxisMesh) -> bool:
    """Attention over space with time cut, then over time with space cut, equals both on one device."""
    from meshwright.layers.algebra import assemble, carry_out, distribute

    x = np.random.default_rng(2).standard_normal((12, 16, 8))

    def over_space(part: np.ndarray) -> np.ndarray:
        return ranks.attention(part, part, part, causal=False)

    def over_time(part: np.ndarray) -> np.ndarray:
        return over_space(part.swapaxes(0, 1)).swapaxes(0, 1)

    held = {at: over_space(part) for at, part in distribute(mesh, "S0", x).items()}
    for one in transfers(mesh, "S0", "S1", x.shape):
        held = carry_out(mesh, one, held)
    found = assemble(mesh, "S1", {at: over_time(part) for at, part in held.items()})
    return bool(np.abs(found - over_time(over_space(x))).max() < ROUNDING)


def lasp() -> Outcome:
    t = tensors()
    volumes = {}
    for tokens in (TOKENS // 2, TOKENS):
        part, sent = Tensors(*(x[:, :tokens] for x in t)), ranks.Sent(RANKS)
        found = ranks.passed_states(*part, ranks.contiguous(tokens, RANKS), sent)
        volumes[tokens] = sent.most
    around = ranks.Sent(RANKS)
    ranks.ring(*t, ranks.contiguous(TOKENS, RANKS), around)
    long = 4096 * 1024
    return Outcome(
        figures=(
            as_plain(found, ranks.linear_attention(*t)),
            equal("elements sent a hop: one head dim x head dim state a head", HEADS * DIM * DIM, volumes[TOKENS]),
            equal("sent for twice the sequence, over once", 1.0, volumes[TOKENS] / volumes[TOKENS // 2], unit="x"),
            below(
                "of a ring's keys and values, 4096K tokens on 128 ranks, head dim 128", 128 / (2 * (long // 128) * 127)
            ),
        ),
        facts=(Fact("a ring sends more already on the small tensors", around.most > volumes[TOKENS]),),
        baseline="the same linear attention on one device; rings that hand on keys and values",
        assumptions=(PROVEN,),
    )


def _executed(name: str, find: Callable[[], Outcome]) -> Check:
    """A check that real processes take part in, where there are any."""
    return Check(lambda: trained.cut_over_processes(find(), name))


CHECKS = {"usp": Check(usp)} | {
    name: _executed(name, find)
    for name, find in (
        ("ring-self-attn", ring_self_attention),
        ("burstattention", burst),
        ("tokenring", tokenring),
        ("dsp", dsp),
        ("lasp", lasp),
    )
}
