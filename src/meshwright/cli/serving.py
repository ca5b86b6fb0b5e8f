"""``meshwright predict --serve``: how fast a plan answers requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import GOAL, WANTED, Question, path_of, read_parts, with_lengths
from meshwright.cli.records import lacking, write_records
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.answer.server import ServerPrediction
    from meshwright.answer.serving import ServingPrediction
    from meshwright.cost.engine import EngineProfile
    from meshwright.spec.requests import Requests

#: Times that an objective bounds.
BOUNDS = ("ttft", "tpot", "e2e")
#: What a serving question needs, and how it is written.
SERVED = {field: how for field, how in WANTED.items() if field != "train"}
SERVED["plan"] = '--plan "tp4 dp2", or ask meshwright search, with the same words, which is the best'


def predict_served(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Answer the question and print it as the options say; 0 when it fits and keeps its objectives, 1 when not."""
    profile = None
    if given.engine_profile:
        from meshwright.cost.engine import load

        try:
            profile = load(given.engine_profile)
        except MeshwrightError as error:  # whether a model is wanted besides is in the file
            raise MeshwrightError([*wrong, *error.diagnostics]) from None
    if profile is not None and profile.server is not None:
        return _predict_server(question, given, profile, wrong)
    wrong = [*wrong, *options.missing(msgspec.structs.asdict(question), SERVED, command="predict")]
    wrong += _of_training(question, given)
    for option in ("records", "trace", "report"):
        wrong += unwritable(getattr(given, option), f"--{option}")
    wrong += lacking(given.records)
    question = msgspec.structs.replace(question, serve=bounded(question.serve, given.slo, wrong))
    parts = read_served(question, wrong)
    prediction = _answered(*parts, profile=profile)
    if given.json:
        print_json(prediction.to_json())
    else:
        from meshwright.report.serving_text import render

        render(prediction, console())
    _write(prediction, given)
    if given.report:
        _report(prediction, parts[-1], question, given.report)
    return 0 if prediction.good else 1


def _of_training(question: Question, given: Any) -> list[Diagnostic]:
    """X004 for what is of training alone: said beside requests, one of the two is meant."""
    said = [f"--{name}" for name in ("train", *GOAL, "world") if getattr(question, name)]
    return [
        Diagnostic(
            code="X004",
            message=f"{name} is of a training step",
            place="meshwright predict --serve",
            help=f"drop {name}, or drop --serve",
        )
        for name in said
        if name != "--price"
    ]


def bounded(words: str, slo: str, wrong: list[Diagnostic]) -> str:
    """The words of requests with those of --slo behind them; W001 is added to `wrong` for those that bound nothing."""
    help = "ttft=, tpot= and e2e=, such as ttft=500ms,tpot=50ms@p90"
    kept = [words] if words else []
    for part in filter(None, (part.strip() for part in slo.split(","))):
        key = part.partition("=")[0].strip().lower()
        if key.partition(".")[0] in BOUNDS:
            kept.append(part)
        else:
            wrong.append(Diagnostic(code="W001", message=f"{key!r} is no objective", place=f"--slo {slo}", help=help))
    return ",".join(kept)


def _answered(model, cluster, serve, plan, requests, profile=None) -> ServingPrediction:
    from meshwright.answer.serving import predict_serving

    return predict_serving(model, cluster, serve, plan, requests=requests, profile=profile)


def _predict_server(question: Question, given: Any, profile: EngineProfile, wrong: list[Diagnostic]) -> int:
    """Answer for a server that was measured, of which no model, cluster or plan is said."""
    help = "the profile stands for the server: drop it, or name an engine's profile"
    said = [n for n in ("model", "on", "plan", "price", "framework") if getattr(question, n)]
    said += ["report"] if given.report else []
    wrong = wrong + _of_training(question, given)
    wrong += [
        Diagnostic(code="X004", message=f"{n if n == 'model' else f'--{n}'} says nothing of a measured server",
                   place=f"--engine-profile {given.engine_profile}", help=help)
        for n in said
    ]  # fmt: skip
    for option in ("records", "trace"):
        wrong += unwritable(getattr(given, option), f"--{option}")
    wrong += lacking(given.records)
    question = msgspec.structs.replace(question, serve=bounded(question.serve, given.slo, wrong))
    from meshwright.answer.server import predict_server
    from meshwright.spec.serve import parse

    try:
        serve = parse(question.serve, base=question.base)
        requests = serve.drawn()
    except MeshwrightError as error:
        wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    prediction = predict_server(profile, serve, requests)
    if given.json:
        print_json(prediction.to_json())
    else:
        from meshwright.report.server_text import render

        render(prediction, console())
    _write(prediction, given)
    return 0 if prediction.good else 1


def _report(prediction: ServingPrediction, requests: Requests, question: Question, path: str) -> None:
    """Write the report, with the requests served at other rates as well."""
    from meshwright.answer.rates import rate_curve
    from meshwright.report.serving_html import write

    words = {name: path_of(getattr(question, name), question.base) for name in ("model", "on", "plan", "price")}
    words["serve"] = with_lengths(question.serve, lambda name: str(question.base / name))
    write(prediction, path, rate_curve(prediction, requests), words)
    note(f"wrote {path}")


def read_served(question: Question, wrong: list[Diagnostic]) -> tuple:
    """Return model, cluster, workload, plan and requests of a serving question.

    Raises:
        MeshwrightError: `wrong`, and everything that is wrong with the question, at once.
    """
    from meshwright.answer.serving_check import oversized, refused, unshared
    from meshwright.spec.serve import Serve, parse

    parts, found = read_parts(msgspec.structs.replace(question, train="", framework=""))
    wrong += found
    serve = requests = None
    try:
        serve = parse(question.serve, base=question.base)
        serve = serve.for_context(parts[0].max_seq_len) if len(parts) == 3 else serve
        requests = serve.drawn()
    except MeshwrightError as error:
        wrong += error.diagnostics
    if len(parts) == 3:
        model, cluster, plan = parts
        wrong += refused(plan.on(cluster.num_devices), model, cluster, serve or Serve())
        wrong += oversized(model, requests, serve.engine) + unshared(plan, requests) if requests is not None else []
    if wrong:
        raise MeshwrightError(wrong)
    return model, cluster, serve, plan, requests


def _write(prediction: ServingPrediction | ServerPrediction, given: Any) -> None:
    if given.records:
        write_records(prediction, given.records)
        note(f"wrote {given.records}")
    if given.trace:
        from meshwright.trace.chrome import write as write_trace

        write_trace(prediction.timeline, given.trace)
        note(f"wrote {given.trace}")
