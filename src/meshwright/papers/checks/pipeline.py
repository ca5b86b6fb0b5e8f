"""Pipeline schedules against the formulas of their papers, in the schedule's own clock and in whole predicted steps."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.papers.outcome import ABOVE, AT_MOST, BELOW, SIDE, WITHIN, Check, Fact, Figure, Outcome
from meshwright.papers.record import paper
from meshwright.papers.whatif import applied
from meshwright.plan import parse
from meshwright.schedules import build
from meshwright.schedules.timing import bubble_rate, cost, in_order_times, peak_in_flight
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.model import transformer
from meshwright.spec.workload import parse as parse_train

#: A formula holds to rounding of floating-point numbers.
EXACT = 1e-9
#: Why a gain is another one than the paper's: ours is the schedule's alone.
LARGEST = "the largest gain its authors measured, communication included; ours is the schedule's alone, at equal times"
MEASURED = "measured on its authors' implementation, in which more than the order differs; ours is the schedule's alone"


def step(model: str, cluster: str, train: str, plan: str) -> Prediction:
    """A step predicted from words."""
    asked = load_model(model), load_cluster(cluster), parse_train(train)
    return predict(*asked, parse(plan), detail=False)


def span(name: str, p: int, m: int, vpp: int | None = None, t_f: float = 1.0, t_b: float = 1.0, t_w: float = 1.0):
    """Length of one step of a schedule, in the unit of the times, which are those of 1 / p of the model."""
    actions = build(name, p, m, vpp)
    share = p / actions.num_stages
    # Of a stage that two ranks hold, each does half of the microbatches: all ranks work the same either way.
    start, end = in_order_times(actions, t_f * share, t_b * share, t_w * share)
    return cost(actions, start, end)


def far(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Of (formula, computed) pairs, the one that agrees least."""
    return max(pairs, key=lambda pair: abs(pair[1] - pair[0]))


def gpipe() -> Outcome:
    shapes = [(p, m) for p in (2, 4, 8) for m in (1, 4, 8, 32)]
    worst = far(((p - 1) / (m + p - 1), bubble_rate(build("gpipe", p, m), 1, 1, 1)) for p, m in shapes)
    held = all((peak_in_flight(build("gpipe", p, m)) == m).all() for p, m in shapes)
    at_four = max(bubble_rate(build("gpipe", p, 4 * p), 1, 1, 1) for p in (2, 4, 8))
    even = transformer(layers=32, hidden=4096, heads=32, vocab=1024, max_seq_len=2048)
    asked = load_cluster("8xa100-80"), parse_train("batch=32,seq=2048"), parse("pp8 gpipe mb1 full")
    whole = predict(even, *asked, detail=False)
    return Outcome(
        figures=(
            Figure("bubble, formula against schedule, worst of 12 shapes", *worst, "", WITHIN, EXACT),
            Figure("bubble of a predicted step, K=8 M=32", 7 / 39, whole.bubble, "", WITHIN, 0.15),
            Figure("largest bubble at M = 4 K ('negligible')", None, at_four, "", AT_MOST, 0.2),
        ),
        facts=(Fact("every rank keeps the activations of all M microbatches", held),),
        baseline="a pipeline without waiting",
        assumptions=(
            "formula (K-1)/(M+K-1) of section 2 for equal stages",
            "predicted step: 32 layers of hidden 4096 on 8 A100, sends and the optimizer included",
        ),
    )


def hanayo() -> Outcome:
    shapes = [(p, w) for p in (4, 8, 16) for w in (1, 2, 4)]
    worst = far(
        ((2 * p - 2) / (3 * p * w + 2 * p - 2), bubble_rate(build("hanayo", p, p, 2 * w), 1, 2, 0)) for p, w in shapes
    )
    times = {w: span("hanayo", 8, 8, 2 * w) for w in (1, 2, 4)}
    chimera = span("chimera", 8, 8)
    one = peak_in_flight(build("hanayo", 8, 8, 4)).max() / 4
    return Outcome(
        figures=(
            Figure("bubble by waves, formula against schedule, worst of 9", *worst, "", WITHIN, EXACT),
            Figure("two waves over Chimera, 8 ranks", 1.304, chimera / times[2], "x", SIDE, why=LARGEST),
            Figure("activations of two waves, in microbatches of p", 8, float(one), "", AT_MOST),
        ),
        facts=(
            Fact("more waves, less bubble", times[1] > times[2] > times[4]),
            Fact("one copy of the model: every stage is on one rank", _copies("hanayo", 8, 8) == 1),
        ),
        baseline="Chimera, which the paper calls the state of the art, without communication",
        assumptions=("a backward takes twice a forward", "1.304 is the largest gain the abstract gives"),
    )


def _copies(name: str, p: int, m: int) -> int:
    """How many ranks hold a stage."""
    return max(len(ranks) for ranks in build(name, p, m).stage_ranks)


def bitpipe() -> Outcome:
    shapes = [(p, u) for p in (4, 8, 16) for u in (1, 2, 4)]

    def idle(p: int, units: int) -> float:
        m = units * p
        actions = build("bitpipe", p, m)
        start, end = in_order_times(actions, 1, 1, 0)
        return cost(actions, start, end) - m * actions.num_stages / p * 2

    worst = far((p - 2, idle(p, u)) for p, u in shapes)
    gains = {
        name: span(name, 8, m, vpp) / span("bitpipe", 8, m)
        for name, vpp, m in (("1f1b", None, 16), ("interleaved", 2, 16), ("chimera", None, 16))
    }
    return Outcome(
        figures=(
            Figure("slots of half a stage lost, formula against schedule, worst of 9", *worst, "", WITHIN, EXACT),
            *(Figure(f"over {name}, p=8 m=16", 1.28, gain, "x", SIDE, why=LARGEST) for name, gain in gains.items()),
        ),
        facts=(Fact("the model is held twice", _copies("bitpipe", 8, 8) == 2),),
        baseline="synchronous pipelines of the same ranks and microbatches",
        assumptions=("1.28 is the largest gain of the abstract (1.05 the least)", "without communication"),
    )


def two_bp() -> Outcome:
    pairs = [((n - 1) / (4 * n - 1), bubble_rate(build("2bp:1f1b", n, n), 1, 1, 1)) for n in (2, 4, 8)]
    pairs += [(2 * (n - 1) / (2 * (n - 1) + 3 * n), bubble_rate(build("2bp:gpipe", n, n), 1, 1, 1)) for n in (2, 4, 8)]
    kept = peak_in_flight(build("2bp:1f1b", 4, 4)) >= peak_in_flight(build("1f1b", 4, 4))
    return Outcome(
        figures=(
            Figure("bubble, Table 1 against schedule, worst of 6", *far(pairs), "", WITHIN, EXACT),
            Figure(
                "1F1B-1 with over without, 4 ranks",
                1.70,
                span("1f1b", 4, 4) / span("2bp:1f1b", 4, 4),
                "x",
                SIDE,
                why=MEASURED,
            ),
        ),
        facts=(Fact("no rank keeps fewer activations than without", bool(kept.all())),),
        baseline="the same schedule with whole backwards",
        assumptions=("equal times of forward and the two parts of the backward, as Table 1",),
    )


def zeropp() -> Outcome:
    idle = max(
        span("zeropp", p, u * (2 * p - 1), v) - 3 * u * (2 * p - 1) for p in (2, 4, 8) for v in (1, 2) for u in (1, 2)
    )
    p, m, vpp = 8, 120, 2
    gathers = {name: _gathers(name, p, m, vpp) for name in ("zeropp", "interleaved", "breadth-first")}
    return Outcome(
        figures=(
            Figure("largest bubble of whole units with equal times, slots", 0.0, idle, "", AT_MOST),
            Figure(
                "over breadth-first, p=8 m=120",
                1.30,
                span("breadth-first", p, m, vpp) / span("zeropp", p, m, vpp),
                "x",
                SIDE,
                why=LARGEST,
            ),
            Figure(
                "over 1F1B, p=8 m=120", 1.68, span("1f1b", p, m) / span("zeropp", p, m, vpp), "x", SIDE, why=LARGEST
            ),
            Figure(
                "parameter gathers a rank and step: 2 directions, 2 stages, 8 units", 32, gathers["zeropp"], "", AT_MOST
            ),
        ),
        facts=(
            Fact("an interleaved order gathers more often", gathers["interleaved"] > gathers["zeropp"]),
            Fact(
                "fewer activations are kept than breadth-first keeps",
                peak_in_flight(build("zeropp", p, m, vpp)).max()
                < peak_in_flight(build("breadth-first", p, m, vpp)).max(),
            ),
        ),
        baseline="breadth-first and 1F1B without communication: the paper's gains (30% and 68%) include it",
        assumptions=("equal times of F, B and W; units of 2 p - 1 microbatches",),
    )


def _gathers(name: str, p: int, m: int, vpp: int) -> int:
    """How often the last rank turns to another stage or direction: each time parameters are gathered anew."""
    actions = build(name, p, m, vpp)
    mine = slice(int(actions.rank_ptr[-2]), int(actions.rank_ptr[-1]))
    both = [(int(k != 0), int(s)) for k, s in zip(actions.kind[mine], actions.stage[mine]) if k != 2]
    # Forward and backward of a stage alternate in the steady phase and share what was gathered.
    turns, held = 0, {}
    for direction, stage in both:
        if held.get(direction) != stage:
            turns += 1
            held[direction] = stage
    return turns


def yuan2() -> Outcome:
    asked = load_model("llama3-8b"), load_cluster("32xh100"), parse_train("batch=64,seq=4096")
    plan = parse("pp8 dp4 zero1 selective")
    relieved = applied(paper("yuan2"), plan, *asked)
    even, uneven = (predict(*asked, p, detail=False) for p in (plan, relieved))
    stages = relieved.layout.stages
    last = [p.memory[-1].alive["parameters"] for p in (even, uneven)]
    return Outcome(
        figures=(
            Figure("step of even stages over uneven ones", None, even.step_time_s / uneven.step_time_s, "x", ABOVE),
            Figure("parameters of the last stage, uneven over even", None, last[1] / last[0], "x", BELOW),
        ),
        facts=(
            Fact("the stages hold every layer once", sum(stages) == asked[0].num_layers),
            Fact("the last stage has fewer layers than any other", stages[-1] < min(stages[:-1])),
        ),
        baseline="the same layers in equal stages",
        assumptions=(
            "the abstract gives no figures: the claim is that fewer layers on the ends even out time and memory",
            f"stages of {', '.join(map(str, stages))} layers, by the row's recipe: of all partitions the fastest",
            "llama3-8b stands for its models: it too has a vocabulary of over 100,000, which burdens the last stage",
        ),
    )


def interleaving(p: int = 8, m: int = 16) -> tuple[float, float]:
    """Throughput of interleaved over plain 1F1B: schedule alone, and a predicted 175B step at a small batch."""
    alone = span("1f1b", p, m) / span("interleaved", p, m, 2)
    asked = "gpt3-175b", "64xa100-80", "batch=16,seq=2048,dtype=fp16"
    plans = [f"tp8 pp8 dp1 mb1 full unfused nosp overlap=pp {words}" for words in ("1f1b", "interleaved vpp2")]
    plain, chunked = (step(*asked, plan) for plan in plans)
    return alone, plain.step_time_s / chunked.step_time_s


CHECKS = {
    "gpipe": Check(gpipe),
    "hanayo": Check(hanayo),
    "bitpipe": Check(bitpipe),
    "2bp": Check(two_bp),
    "zeropp": Check(zeropp),
    "yuan2": Check(yuan2),
}
