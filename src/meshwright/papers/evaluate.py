"""The check that every figure written as data goes through: ask, take the quantity, lay it beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import inf
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.answer.serving import predict_serving
from meshwright.answer.serving_answer import ServingMetrics, ServingPrediction
from meshwright.cost import Costs, load_framework, standard
from meshwright.cost.engine import engine_profile
from meshwright.cost.roofline import peak_flops
from meshwright.cost.standard import serving_costs
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.papers.denoised import IMAGES, DenoiseQuestion, denoised
from meshwright.papers.embedded import EMBEDDED, GraphQuestion, embedded
from meshwright.papers.exchanged import brought_bytes, exchanged_bytes, sum_bandwidth
from meshwright.papers.outcome import JUDGES, SIDE, WITHIN, Figure, Outcome
from meshwright.papers.published import OrderQuestion, Published, ServeQuestion, StepQuestion, Words, kind_of
from meshwright.papers.recommended import TABLES, TableQuestion, recommended
from meshwright.papers.record import Paper
from meshwright.papers.rolled_out import ROLLED_OUT, RolloutQuestion, rolled_out
from meshwright.papers.sublayers import sublayer_seconds
from meshwright.plan import parse as parse_plan
from meshwright.schedules import build, get
from meshwright.schedules.actions import Actions
from meshwright.schedules.timing import cost, in_order_times, peak_in_flight
from meshwright.simulate.clients import ClientRounds
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import Model
from meshwright.spec.model import load as load_model
from meshwright.spec.network_bill import network_bill
from meshwright.spec.serve import parse as parse_serve
from meshwright.spec.wiring import Bill
from meshwright.spec.workload import parse as parse_train
from meshwright.world.trace import read as read_world

#: The mean of other figures' errors.
MEAN_ERROR = "mean error"
#: A quantity of a predicted step: its unit, and how it is read.
STEP: Mapping[str, tuple[str, Callable[[Prediction], float]]] = {
    "step time": ("s", lambda p: p.step_time_s),
    "throughput": ("tokens/s/GPU", lambda p: p.tokens_per_s_per_gpu),
    "total throughput": ("tokens/s", lambda p: p.tokens_per_s_per_gpu * p.num_devices),
    "MFU": ("", lambda p: p.mfu),
    "HFU": ("", lambda p: p.hfu),
    "model FLOP/s": ("TFLOP/s/GPU", lambda p: p.mfu * peak_flops(p.cluster.islands[0].device, "bf16") / 1e12),
    "bubble": ("", lambda p: p.bubble),
    "waits filled": ("", lambda p: 0.0 if p.filled is None else p.filled.share),
    "peak memory": ("bytes", lambda p: p.peak_memory_bytes),
    "parameters of the first rank": ("bytes", lambda p: p.memory[0].alive["parameters"]),
    "parameters of the last rank": ("bytes", lambda p: p.memory[-1].alive["parameters"]),
    "fits": ("", lambda p: float(p.fits)),
    "bytes brought": ("bytes", lambda p: brought_bytes(p)),
    "bytes brought a step": ("bytes", lambda p: brought_bytes(p, mean=True)),
    "time of a merged step": ("s", lambda p: merging(p).seconds / merging(p).merged),
    "time of a version": ("s", lambda p: merging(p).seconds / len(merging(p).versions)),
    "staleness": ("versions", lambda p: merging(p).staleness),
    "clients at work": ("", lambda p: merging(p).busy),
    "bytes a merged step": ("bytes", lambda p: (merging(p).up_bytes + merging(p).down_bytes) / merging(p).merged),
    "bytes of an exchange": ("bytes", lambda p: exchanged_bytes(p)),
    "bandwidth of sums": ("GB/s", lambda p: sum_bandwidth(p) / 1e9),
    "token exchange": ("s", lambda p: p.attribution["ep"]),
    "network price": ("$", lambda p: _network(p).usd or 0.0),
    "network power": ("W", lambda p: _network(p).watts or 0.0),
    "switches": ("", lambda p: float(_network(p).switches)),
    "transceivers": ("", lambda p: float(_network(p).transceivers)),
}


def _network(prediction: Prediction) -> Bill:
    """The parts of the network between the nodes of a prediction's cluster.

    Raises:
        MeshwrightError: J008 where the cluster says nothing of its switches.
    """
    found = network_bill(prediction.cluster)
    if found is None:
        help = "say how nodes are joined, such as 64xh100,rail-only"
        raise MeshwrightError.one("J008", "the cluster says nothing of its switches", place="on", help=help)
    return found


def merging(prediction: Prediction) -> ClientRounds:
    """The rounds of a prediction whose replicas are clients.

    Raises:
        MeshwrightError: J008 where they are none.
    """
    if prediction.clients is None or not prediction.clients.versions:
        help = "say a sync of clients, such as sync=fedavg:h=8"
        raise MeshwrightError.one("J008", "the plan's replicas are no clients of a server", place="plan", help=help)
    return prediction.clients


def longest_request(prediction: ServingPrediction) -> float:
    """Return the tokens of the longest request that the caches hold: of one replica, or of all that lend."""
    engine = prediction.serve.engine
    return float(prediction.kv_blocks * engine.block * (prediction.plan.layout.dp if engine.borrow else 1))


#: A quantity of served requests, likewise; times are means unless a percentile is said.
SERVED: Mapping[str, tuple[str, Callable[[ServingPrediction], float]]] = {
    "fits": ("", lambda p: float(p.fits)),
    "batch": ("requests", lambda p: float(p.peak_batch)),
    "cache blocks": ("blocks", lambda p: float(p.kv_blocks)),
    "longest request": ("tokens", longest_request),
    "time with kernels over that of requests alone": ("x", lambda p: p.beside[0].busy / p.beside[0].busy_alone),
    "servers fed over those at rated power": ("x", lambda p: p.power.most_servers / p.power.rated_servers),
    "time of requests of low priority with caps": ("x", lambda p: p.power.slower_low),
    "time of requests of high priority with caps": ("x", lambda p: p.power.slower_high),
    "speed of the job beside": ("", lambda p: p.beside[0].speed),
    "preemptions": ("", lambda p: float(p.preemptions)),
    "hit rate": ("", lambda p: p.hit_rate),
    "computed share of prompts": ("", lambda p: 1.0 - p.hit_rate),
    "throughput": ("tokens/s", lambda p: served_metrics(p).throughput_tokens_per_s),
    "requests": ("requests/s", lambda p: served_metrics(p).throughput_req_per_s),
    "goodput": ("requests/s", lambda p: served_metrics(p).goodput_req_per_s),
    "attainment": ("", lambda p: served_metrics(p).attainment),
    "decode throughput": ("tokens/s", lambda p: p.peak_batch / served_metrics(p).itl_s.p50),
    "TTFT": ("s", lambda p: served_metrics(p).ttft_s.mean),
    "TPOT": ("s", lambda p: served_metrics(p).tpot_s.mean),
    "E2E": ("s", lambda p: served_metrics(p).e2e_s.mean),
    "TTFT p99": ("s", lambda p: served_metrics(p).ttft_s.p99),
    "E2E p99": ("s", lambda p: served_metrics(p).e2e_s.p99),
    "ITL p99": ("s", lambda p: served_metrics(p).itl_s.p99),
}


def served_metrics(prediction: ServingPrediction) -> ServingMetrics:
    """The metrics of a serving prediction.

    Raises:
        MeshwrightError: J008 where the model leaves no room for a request.
    """
    if prediction.metrics is None:
        raise MeshwrightError.one("J008", "the weights leave no room for a request", place="plan", help="more devices")
    return prediction.metrics


class Timed(msgspec.Struct, frozen=True):
    """A pipeline order with the seconds (or slots) it takes; ``share`` is what a stage is of a rank's layers."""

    actions: Actions
    question: OrderQuestion
    share: float
    length: float
    busy: float

    @property
    def copies(self) -> int:
        """The most ranks that hold one stage."""
        return max(len(ranks) for ranks in self.actions.stage_ranks)

    @property
    def gathers(self) -> int:
        """How often the last rank turns to another stage or direction, where sharded parameters are gathered anew.
        Forward and backward of a stage alternate in the steady phase and share what was gathered."""
        mine = slice(int(self.actions.rank_ptr[-2]), int(self.actions.rank_ptr[-1]))
        turns, held = 0, {}
        for kind, stage in zip(self.actions.kind[mine].tolist(), self.actions.stage[mine].tolist()):
            if kind != 2 and held.get(kind != 0) != stage:  # a backward to the weights gathers nothing
                turns += 1
                held[kind != 0] = stage
        return turns


#: A quantity of a pipeline order, likewise.
ORDER: Mapping[str, tuple[str, Callable[[Timed], float]]] = {
    "length": ("slots", lambda t: t.length),
    "throughput": ("microbatches/slot", lambda t: t.question.microbatches / t.length),
    "speed-up": ("devices", lambda t: t.question.ranks * t.busy / t.length),
    "bubble": ("", lambda t: (t.length - t.busy) / t.length),
    "activations": ("microbatches", lambda t: float(peak_in_flight(t.actions, t.question.keep_w).max() * t.share)),
    "copies of the model": ("", lambda t: float(t.copies)),
    "parameter gathers": ("", lambda t: float(t.gathers)),
}
_TABLES = {
    StepQuestion: STEP,
    ServeQuestion: SERVED,
    DenoiseQuestion: IMAGES,
    TableQuestion: TABLES,
    GraphQuestion: EMBEDDED,
    RolloutQuestion: ROLLED_OUT,
}


def evaluate(paper: Paper) -> Outcome:
    """The figures of a row, computed and judged.

    Raises:
        MeshwrightError: J008 and whatever is wrong with a question's words, of all figures at once.
    """
    found: list[Figure] = []
    wrong: list[Diagnostic] = []
    for number, one in enumerate(paper.figures):
        place = f"rows/{paper.id}.toml: figures[{number}], {one.what!r}"
        try:
            found.append(_figure(paper, one, found, place))
        except MeshwrightError as error:
            wrong += [
                msgspec.structs.replace(d, place=place if d.place.startswith(place) else f"{place}: {d.place}")
                for d in error.diagnostics
            ]
    if wrong:
        raise MeshwrightError(wrong)
    return Outcome(
        figures=tuple(found),
        baseline=paper.claim.baseline,
        assumptions=paper.assumptions,
        missing=(paper.missing,) if paper.missing else (),
    )


def _figure(paper: Paper, one: Published, before: list[Figure], place: str) -> Figure:
    table: Mapping[str, Any] = ORDER if one.order else _TABLES[kind_of(paper.ask | one.ask)]
    known = [MEAN_ERROR] if one.of else [*table, *(LONGEST if table is STEP else ())]
    if table is STEP and one.quantity in LONGEST:
        table = LONGEST
    wrong = []
    if one.quantity not in known:
        wrong.append(("quantity", one.quantity, known))
    if one.judge not in JUDGES:
        wrong.append(("judge", one.judge, list(JUDGES)))
    said = [
        Diagnostic(
            code="J008", message=f"{what}={value!r} is none of a figure's", place=place, help=nearest(value, names)
        )
        for what, value, names in wrong
    ]
    numbers = {"tolerance": one.tolerance, "bound": one.bound}
    said += [
        Diagnostic(code="J008", message=f"{what}={value:g} is not 0 or more", place=place, help=f"say {what} = 0.1")
        for what, value in numbers.items()
        if not 0 <= value < inf
    ]
    if one.paper is None and one.judge in (WITHIN, SIDE):
        message, help = f"judge={one.judge!r} needs the paper's value", "say paper, or another judge"
        said.append(Diagnostic(code="J008", message=message, place=place, help=help))
    if said:
        raise MeshwrightError(said)
    if one.of:
        errors = [abs(f.error) for f, other in zip(before, paper.figures) if other.place == one.of and f.error]
        if not errors:
            raise MeshwrightError.one(
                "J008", f"no figure before it is of {one.of!r}", place=place, help="say a place of figures above it"
            )
        unit, value = "", fmean(errors)
    else:
        unit, read = table[one.quantity]
        asked = _asked(paper, one)
        values = [read(*question) if table is LONGEST else read(_answer(*question)) for question in asked]
        value, unit = (values[0], unit) if len(values) == 1 else (values[0] / values[1], "x")
    return Figure(
        one.what,
        one.paper,
        value,
        unit,
        one.judge,
        one.tolerance if one.judge == WITHIN else one.bound,
        why=one.why,
        headline=one.headline,
        restated=one.restated,
    )


def _asked(paper: Paper, one: Published) -> list[tuple[Any, str]]:
    """The question of a figure and, where it is a ratio, its baseline's, each with the sizes of a model of the row's
    own as JSON."""
    own, shared = (one.order, paper.order) if one.order else (one.ask, paper.ask)
    asked = [shared | own, *([] if one.against is None else [shared | own | one.against])]
    if one.order:
        return [(_question(words, OrderQuestion), "null") for words in asked]
    models = [paper.models.get(str(words.get("model"))) for words in asked]
    full = [_question(words | _added(words, shared), kind_of(words)) for words in asked]
    return [(q, msgspec.json.encode(sizes).decode()) for q, sizes in zip(full, models)]


#: What answers a question of its own kind of model or workload.
ANSWERS: Mapping[type, Callable[[Any], Any]] = {
    TableQuestion: recommended,
    GraphQuestion: embedded,
    DenoiseQuestion: denoised,
    RolloutQuestion: rolled_out,
}


def _answer(question: Any, sizes: str) -> Any:
    if type(question) in ANSWERS:
        return ANSWERS[type(question)](question)
    return _ordered(question) if isinstance(question, OrderQuestion) else _predicted(question, sizes)


def longest_sequence(question: StepQuestion, sizes: str) -> float:
    """Return the tokens of the longest sequences that fit, to 1%; at least a token for each rank that shares one.

    Raises:
        MeshwrightError: J008 where no sequence fits.
    """
    train, each = parse_train(question.train), 2 * parse_plan(question.plan).layout.cp

    def fits(count: int) -> bool:
        words = msgspec.structs.replace(train, seq_len=each * count).text()
        return _predicted(msgspec.structs.replace(question, train=words), sizes).fits

    return float(each * _most(-(-train.seq_len // each), fits))


def largest_batch(question: StepQuestion, sizes: str) -> float:
    """Return the sequences of the largest batch that fits as one microbatch, to 1%.

    Raises:
        MeshwrightError: J008 where not even one sequence fits.
    """
    train, plan = parse_train(question.train), parse_plan(question.plan)

    def fits(count: int) -> bool:
        one = msgspec.structs.replace(plan.pipeline, microbatch=count)
        batch = count * max(1, plan.layout.dp)
        words = msgspec.structs.replace(train, global_batch=batch).text()
        said = msgspec.structs.replace(plan, pipeline=one).text()
        return _predicted(msgspec.structs.replace(question, train=words, plan=said), sizes).fits

    return float(_most(plan.pipeline.microbatch, fits) * max(1, plan.layout.dp))


def _most(start: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, to 1%: from `start` on twice or half as many until the next do not or do,
    and between the two by halves."""
    low = start
    while low and not fits(low):
        low //= 2
    if not low:
        raise MeshwrightError.one("J008", "not even the smallest fits", place="plan", help="more devices")
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sublayer_time(question: StepQuestion, sizes: str) -> float:
    """Return the mean seconds of a product with its sum over tensor-parallel ranks, as the plan overlaps them."""
    asked = _predicted(question, sizes)
    costs = standard(load_framework(question.framework))
    return sublayer_seconds(asked.model, asked.cluster, asked.train, asked.plan, costs)


#: What is found by asking for many steps or for parts of one, likewise, of a question and the sizes of a model of the
#: row's own.
LONGEST: Mapping[str, tuple[str, Callable[[StepQuestion, str], float]]] = {
    "sublayer time": ("s", sublayer_time),
    "longest sequence": ("tokens", longest_sequence),
    "largest batch": ("sequences", largest_batch),
}


def _added(words: Words, shared: Words) -> Words:
    """The plan and the requests of a question that only adds to the row's."""
    found: Words = {}
    for name, between in (("plan", " "), ("serve", ","), ("rollout", ",")):
        text = str(words.get(name, ""))
        if text.startswith("+"):
            found[name] = f"{shared.get(name, '')}{between}{text[1:].strip()}"
    return found


def _question(words: Words, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(words, kind)
    except msgspec.ValidationError as error:
        names = ", ".join(kind.__struct_fields__)
        raise MeshwrightError.one("J008", str(error), place="words", help=f"a question has {names}") from None


@lru_cache(maxsize=256)
def _predicted(question: StepQuestion | ServeQuestion, sizes: str) -> Prediction | ServingPrediction:
    """The predicted step, or what becomes of requests; `sizes` are those of a model of the row's own as JSON, ``null``
    for one of the catalog.

    Raises:
        MeshwrightError: everything that is wrong with the question.
    """
    wrong: list[Diagnostic] = []

    def read(what: str, how: Callable[[str], Any]) -> Any:
        text = getattr(question, what)
        try:
            return how(text)
        except MeshwrightError as error:
            wrong.extend(msgspec.structs.replace(d, place=f"{what} = {text!r}") for d in error.diagnostics)

    def own(name: str) -> Model:
        given = msgspec.json.decode(sizes)
        return load_model(name) if given is None else transformer(**given, name=name)

    words: dict[str, Callable[[str], Any]] = {"model": own, "on": load_cluster, "plan": parse_plan}
    words |= {"serve": parse_serve} if isinstance(question, ServeQuestion) else {"train": parse_train}
    parts = [read(what, how) for what, how in words.items()]
    if isinstance(question, ServeQuestion):
        if wrong:
            raise MeshwrightError(wrong)
        model, where, plan, serve = parts
        costs = _served_costs(engine_profile(serve.engine.profile).library, question.on)
        return predict_serving(model, where, serve, plan, costs=costs, detail=False)
    costs = read("framework", lambda name: standard(load_framework(name)))
    world = read("world", read_world) if question.world else None
    if wrong:
        raise MeshwrightError(wrong)
    model, where, plan, train = parts
    return predict(model, where, train, plan, costs=costs, detail=False, world=world)


@lru_cache(maxsize=8)
def _served_costs(library: str, on: str) -> Costs:
    """The costs of serving by a library on a cluster, which the figures of one model under several policies share."""
    return serving_costs(library)


@lru_cache(maxsize=256)
def _ordered(asked: OrderQuestion) -> Timed:
    """The order, timed by its own clock.

    Raises:
        MeshwrightError: what is wrong with the schedule or its sizes.
    """
    times = {"t_f": asked.t_f, "t_b": asked.t_b, "t_w": asked.t_w}
    # a searched order is made for times and memory; the others take none
    takes = get(asked.schedule).params
    made_for = {key: t for key, t in {**times, "t_comm": asked.t_comm, "keep_w": asked.keep_w}.items() if key in takes}
    actions = build(asked.schedule, asked.ranks, asked.microbatches, asked.chunks, **made_for)
    share = asked.ranks / actions.num_stages
    start, end = in_order_times(actions, *(t * share for t in times.values()), asked.t_comm)
    busy = np.add.reduceat(end - start, actions.rank_ptr[:-1]).max()
    return Timed(actions, asked, share, cost(actions, start, end), float(busy))


__all__ = ["MEAN_ERROR", "ORDER", "STEP", "Timed", "evaluate"]
