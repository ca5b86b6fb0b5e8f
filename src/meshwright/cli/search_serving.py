"""``meshwright search --serve``: how many devices, which layout, how many replicas and which scheduler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.guard import INTERRUPTED
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import Question, beside, path_of, read_parts
from meshwright.cli.scaling import clusters_of
from meshwright.cli.serving import bounded
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.search.serving.day import DayPlanned
    from meshwright.search.serving.found import ServingFound
    from meshwright.search.serving.walk import ServingWalk
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.requests import Requests
    from meshwright.spec.serve import Serve
    from meshwright.spec.serving_day import ServingDay
    from meshwright.spec.workload import Train

WANTED = {
    "model": "MODEL, a catalog name, a config.json or a question.toml (meshwright catalog models)",
    "on": "--on CLUSTER, such as 64xh100 (meshwright catalog clusters)",
}
#: Options of a search that are of training alone.
OF_TRAINING = (
    "tokens",
    "days",
    "budget",
    "for_",
    "framework",
    "headroom",
    "robust",
    "runnable",
    "strategy",
    "variants",
    "pick",
    "plot",
    "store",
)


class AskedServing(msgspec.Struct, frozen=True):
    """The question of a search for a serving plan: the texts, and what they mean. ``said`` are the keys of the workload
    that were said, which the search leaves as they are; ``train`` is the training job beside a ``day`` of serving."""

    question: Question
    on: tuple[str, ...]
    model: Model
    clusters: tuple[Cluster, ...]
    serve: Serve
    requests: Requests
    said: tuple[str, ...]
    day: ServingDay | None = None
    train: Train | None = None
    rates: tuple[float, ...] = ()


def search_served(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Search and print as the options say; 0 when a plan keeps the objectives, 1 when none does, 130 when it was
    stopped before one was found."""
    from meshwright.search.serving.split import STRATEGIES

    apart = given.strategy if given.strategy in STRATEGIES else ""
    ask = read(question, msgspec.structs.replace(given, strategy="") if apart else given, wrong)
    if apart:
        return _split(ask, given)
    if ask.rates:
        return _swept(ask, given)
    found = _found(ask, given)
    day = _day(ask, found) if ask.day is not None and found.best else None
    if given.json:
        print_json(found.to_json() | ({} if day is None else {"day": day.to_json()}))
    else:
        from meshwright.report.search_serving_text import render

        render(found, console())
        if day is not None:
            from meshwright.report.serving_day_text import render as render_day

            render_day(day, ask.serve, console())
    if given.report:
        from meshwright.report.search_serving_html import write

        write(found, given.report)
        note(f"wrote {given.report}")
    if given.save and found.best:
        _save(found, ask, given.save)
    if found.best:
        from meshwright.cli.next_steps import after_search, serving_engines

        best = found.best[0]
        engines = serving_engines(ask.model, best.cluster, best.prediction.serve, best.prediction.plan, ask.requests)
        note(after_search(given.save, engines))
    if found.good:
        return 0 if day is None or day.good else 1
    return INTERRUPTED if found.stopped else 1


def _split(ask: AskedServing, given: Any) -> int:
    """Place prefill and decode apart and print it; 0 when the best placement keeps the objectives."""
    from meshwright.report.split_text import render
    from meshwright.search.serving.split import find_split

    said = [f"--{name}" for name in ("day", "goodput", "report", "objective", "pareto") if getattr(given, name)]
    if said or len(ask.clusters) > 1:
        what = said[0] if said else "--on of several clusters"
        help = "drop it: placements of one cluster are ordered by their rate for each device"
        raise MeshwrightError.one("X004", f"{what} beside --strategy {given.strategy}", place="search", help=help)
    found = find_split(ask.model, ask.clusters[0], ask.serve, ask.requests, strategy=given.strategy)
    if given.json:
        print_json(found.to_json())
    else:
        render(found, console())
    best = next((one for one in found.placements if one.plan), None)
    if best:
        from meshwright.cli.next_steps import after_search, serving_engines
        from meshwright.plan import parse

        plan = parse(best.plan)
        if given.save:
            _write(plan, ask.on[0], ask.serve, ask, given.save)
        engines = serving_engines(ask.model, ask.clusters[0], ask.serve, plan, ask.requests)
        note(after_search(given.save, engines))
    return 0 if found.good else 1


def read(question: Question, given: Any, wrong: list[Diagnostic]) -> AskedServing:
    """Read the question that the options ask.

    Raises:
        MeshwrightError: `wrong`, and everything that is wrong with the question.
    """
    from meshwright.answer.serving_check import oversized
    from meshwright.spec.serve import parse

    words = given.on or ((question.on,) if question.on else ())
    wrong = [*wrong, *options.missing({"model": question.model, "on": words}, WANTED, command="search")]
    wrong += _of_training(given) + unwritable(given.save, "--save") + unwritable(given.report, "--report")
    if given.top and not (given.top.isdecimal() and int(given.top)):
        wrong.append(Diagnostic(code="R002", message=f"{given.top!r} is not a count", place=f"--top {given.top}"))
    text = bounded(question.serve, given.slo, wrong)
    question = msgspec.structs.replace(question, price=given.price or question.price, serve=text)
    parts, found = read_parts(
        msgspec.structs.replace(question, on="", train="", plan="", price="", framework="", tokens="")
    )
    curves, of_clusters = clusters_of(words, question)
    wrong += found + of_clusters
    serve = requests = None
    try:
        serve = parse(text, base=question.base)
        serve = serve.for_context(parts[0].max_seq_len) if parts else serve
        requests = serve.drawn()
    except MeshwrightError as error:
        wrong += error.diagnostics
    if parts and requests is not None:
        wrong += oversized(parts[0], requests, serve.engine)
    day, train, of_day = _of_day(question, given, serve)
    rates, of_rates = _rates(given)
    if wrong + of_day + of_rates:
        raise MeshwrightError(wrong + of_day + of_rates)
    said = tuple(part.partition("=")[0].strip().lower() for part in text.split(","))
    largest = tuple(curve.clusters[-1][1] for curve in curves)
    return AskedServing(question, tuple(words), parts[0], largest, serve, requests, said, day, train, rates)


def _rates(given: Any) -> tuple[tuple[float, ...], list[Diagnostic]]:
    """The rates of a sweep, and what is wrong with them."""
    found, wrong = [], []
    for part in filter(None, (one.strip() for one in given.rates.split(","))):
        try:
            found.append(float(part))
        except ValueError:
            found.append(0.0)
        if not 0 < found[-1] <= 1e6:
            help = "requests a second, such as --rates 5,10,20"
            message = f"{part!r} is not a rate above 0 up to 1e6"
            wrong.append(Diagnostic(code="W002", message=message, place=f"--rates {given.rates}", help=help))
    if given.rates and (given.day or given.save or given.report):
        message, help = "--rates are of several plans, and --day, --save and --report of one", "drop one of them"
        wrong.append(Diagnostic(code="X004", message=message, place="meshwright search --serve", help=help))
    return tuple(dict.fromkeys(found)), wrong


def _swept(ask: AskedServing, given: Any) -> int:
    """Search at every rate and print the sweep."""
    from meshwright.search.serving.rates import sweep_rates

    def find(serve: Serve, requests: Requests) -> ServingFound:
        return _found(msgspec.structs.replace(ask, serve=serve, requests=requests), given, top=1)

    sweep = sweep_rates(ask.rates, ask.serve, ask.requests, find)
    if given.json:
        print_json(sweep.to_json())
    else:
        from meshwright.report.search_serving_text import render_sweep

        render_sweep(sweep, console())
    if sweep.stopped and not any(one.found.good for one in sweep.points):
        return INTERRUPTED
    return 0 if sweep.good else 1


def _of_day(
    question: Question, given: Any, serve: Serve | None
) -> tuple[ServingDay | None, Train | None, list[Diagnostic]]:
    """The day and the training job beside it, and what is wrong with either."""
    from meshwright.spec.serving_day import parse as read_day
    from meshwright.spec.workload import parse as read_train

    wrong: list[Diagnostic] = []
    day = train = None
    try:
        day = read_day(given.day) if given.day else None
    except MeshwrightError as error:
        wrong += error.diagnostics
    if given.train and not given.day:
        help = "say --day: a job has what serving leaves free over a day; or drop one of the two"
        message = "--train beside requests is of a day that both share"
        wrong.append(Diagnostic(code="X004", message=message, place="meshwright search --serve", help=help))
    elif given.train:
        try:
            train = read_train(given.train, base=question.base)
        except MeshwrightError as error:
            wrong += error.diagnostics
    if day is not None and serve is not None and day.low and not (serve.rate and day.low <= serve.rate):
        help = "say rate= in --serve, the highest of the day, and low= at most that"
        message = f"low={day.low:g} is the lowest rate of a day whose highest is not above it"
        wrong.append(Diagnostic(code="W005", message=message, place=f"--day {given.day}", help=help))
    if day is not None and serve is not None and serve.engine.beside is not None:
        help = "say --train: a job has the whole devices that serving leaves free; or drop one of the two"
        message = "beside= is of devices that are shared all the time, and --day of whole ones that come and go"
        wrong.append(Diagnostic(code="W005", message=message, place="meshwright search --serve", help=help))
    return day, train, wrong


def _day(ask: AskedServing, found: ServingFound) -> DayPlanned:
    """The day with the best plan."""
    from meshwright.cost.engine import engine_profile
    from meshwright.cost.standard import serving_costs
    from meshwright.search.serving.day import planned
    from meshwright.search.serving.evaluate import ServingEvaluator

    best, profile = found.best[0], engine_profile(ask.serve.engine.profile)
    evaluator = ServingEvaluator(
        ask.model, best.cluster, ask.serve, ask.requests, serving_costs(profile.library), profile
    )
    return planned(evaluator, best.candidate, ask.day, ask.train)


def _of_training(given: Any) -> list[Diagnostic]:
    """X004 for options that are of training alone; of a strategy with those that are of serving."""
    from meshwright.search.serving.split import STRATEGIES

    instead = {"strategy": f"say {' or '.join(STRATEGIES)} to place prefill and decode apart, or drop it"}
    return [
        Diagnostic(
            code="X004",
            message=f"--{name.rstrip('_')}{f' {given.strategy}' if name in instead else ''} is of training",
            place="meshwright search --serve",
            help=instead.get(name, "drop it, or drop --serve"),
        )
        for name in OF_TRAINING
        if getattr(given, name)
    ]


def _found(ask: AskedServing, given: Any, top: int = 0) -> ServingFound:
    """The answer on every cluster together."""
    from meshwright.search.restrict import restricted
    from meshwright.search.serving.find import alone, find_serving
    from meshwright.search.serving.space import default, forms

    clusters = tuple(island for cluster in ask.clusters for island in alone(cluster))
    together = ["roles=together"] if ask.day is not None else []  # a day counts replicas that are alike
    words = {"fix": [*given.fix, *together], "bound": given.bound, "exclude": given.exclude, "allow": given.allow}
    spaces = [restricted(default(ask.model, c, ask.serve, ask.said), **words, forms=forms()) for c in clusters]
    return find_serving(
        ask.model,
        clusters,
        ask.serve,
        spaces=spaces,
        requests=ask.requests,
        objective=given.objective or "devices",
        front=tuple(given.pareto.split(",")) if given.pareto else (),
        most_rates=given.goodput,
        top=top or int(given.top or 5),
        report=progress,
    )


def progress(walk: ServingWalk) -> None:
    """Write one line over and over on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        said = "" if walk.ended else walk.progress()
        print(f"\r\033[K{said}", end="", file=sys.stderr, flush=True)
    elif not walk.ended and walk.due():
        note(walk.progress())


def _save(found: ServingFound, ask: AskedServing, path: str) -> None:
    """Write the best plan as a plan file with its question."""
    best = found.best[0]
    on = ask.on[0] if len(ask.on) == 1 and len(found.clusters) == 1 else best.cluster.name
    _write(best.prediction.plan, on, best.prediction.serve, ask, path)


def _write(plan: Plan, on: str, serve: Serve, ask: AskedServing, path: str) -> None:
    """Write a plan file with its question, on the cluster of those texts."""
    from meshwright.plan.toml import save

    said = {"model": ask.question.model, "on": on, "serve": serve.text()}
    texts = {field: path_of(text, ask.question.base) for field, text in said.items()}
    save(plan, path, {field: beside(text, path) for field, text in texts.items()})
    note(f"wrote {path}: meshwright predict {path} says more")
