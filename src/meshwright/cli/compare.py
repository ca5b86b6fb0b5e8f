"""``meshwright compare``: a prediction against what was measured of the same plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import WANTED, Question, load, read_all
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.timeline import Timeline

DESCRIPTION = """Where prediction and measurement part: step time, error by kind of task and by queue, critical paths.

PREDICTED and MEASURED are trace files (predict, run or emulate with --trace FILE), or a question.toml, which is
predicted now. A prediction within the spread of the measured steps is right.

Of served requests (bench-serve --out FILE, predict --serve --trace FILE): latencies, their distributions, batch and
queue over time, and which requests are furthest apart. PREDICTED may be a server's engine profile (calibrate --server),
which then predicts the requests that were measured.

To compare clusters, ask search: meshwright search MODEL --on 64xh100 --on 64xa100 --train ... --tokens 1t.

Exit code 0, whatever the error is; 2: a file cannot be compared."""
COMMAND = "compare"


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright compare``."""

    predicted: options.positional(
        "PREDICTED", "A trace file, or a question.toml or a server's profile to predict now."
    ) = ""
    measured: options.positional("MEASURED", "The trace file of a run, or the file of bench-serve.") = ""
    report: options.text("FILE", "Write the full comparison, one offline HTML file.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 once both could be read."""
    given, wrong = options.read(CompareOptions, argv, command=COMMAND, description=DESCRIPTION)
    wanted = {"predicted": "PREDICTED, a trace file or a question.toml", "measured": "MEASURED, a run's trace file"}
    wrong += options.missing({"predicted": given.predicted, "measured": given.measured}, wanted, command=COMMAND)
    wrong += unwritable(given.report, "--report")
    from meshwright.compare.served import is_served

    predicted, measured = timelines([given.predicted, given.measured], wrong)
    if is_served(predicted) or is_served(measured):
        return _served(predicted, measured, given)
    from meshwright.compare import compare

    comparison = compare(predicted, measured)
    if given.json:
        print_json(comparison.to_json())
    else:
        from meshwright.report.compare_text import render

        render(comparison, console())
    if given.report:
        from meshwright.report.compare_html import write

        write(comparison, predicted, measured, given.report)
        note(f"wrote {given.report}")
    return 0


def _served(predicted: Timeline, measured: Timeline, given: CompareOptions) -> int:
    """Compare served requests and print that."""
    from meshwright.compare.served import compare_served, is_served

    sides = {given.predicted: predicted, given.measured: measured}
    help = "predict --serve --trace FILE, or bench-serve --out FILE"
    wrong = [
        Diagnostic(code="X105", message=f"{path} has no served requests, and the other has", place=path, help=help)
        for path, side in sides.items()
        if not is_served(side)
    ]
    if wrong:
        raise MeshwrightError(wrong)
    comparison = compare_served(predicted, measured)
    if given.json:
        print_json(comparison.to_json())
    else:
        from meshwright.report.served_text import render

        render(comparison, console())
    if given.report:
        from meshwright.report.served_html import write

        write(comparison, given.report)
        note(f"wrote {given.report}")
    return 0


def _profiled(path: str, measured: str) -> Timeline | None:
    """The prediction of a measured server's profile for the requests that a file of measured traffic is of; None where
    `path` is no such profile."""
    from meshwright.cost.engine import load as load_profile
    from meshwright.cost.engine import of_a_server

    if not of_a_server(path):
        return None
    from meshwright.answer.server import predict_server
    from meshwright.spec.serve import parse
    from meshwright.traffic.record import digest, read

    traffic = read(measured)
    serve = parse(traffic.head.serve)
    requests = serve.drawn()
    if digest(requests) != traffic.head.digest:
        help = "ask from the folder that bench-serve was asked in, with the trace that it had"
        message = f"the words of {measured} draw other requests now than were measured"
        raise MeshwrightError.one("T004", message, place=traffic.head.serve, help=help)
    return predict_server(load_profile(path), serve, requests).timeline


def timelines(paths: list[str], wrong: list[Diagnostic]) -> list[Timeline]:
    """The timelines of trace files and question files; what is wrong with any of them, and `wrong`, together."""
    found: list = []
    for path in filter(None, paths):
        try:
            found.append(_side(path, paths[-1]))
            wrong += _empty(path, found[-1])
        except MeshwrightError as error:
            wrong += error.diagnostics
    questions = [side for side in found if isinstance(side, Question)]
    for question in questions:
        wrong += options.missing(msgspec.structs.asdict(question), WANTED, command=COMMAND)
    answers = iter(read_all(questions, also_wrong=wrong))
    return [next(answers)().timeline if isinstance(side, Question) else side for side in found]


def _side(path: str, measured: str) -> Question | Timeline:
    """Read what a file holds: a question, a timeline, measured traffic, or a profile that predicts what that is of."""
    from meshwright.trace import read
    from meshwright.traffic.record import is_traffic

    if path.endswith(".toml"):
        predicted = _profiled(path, measured)
        return load(path) if predicted is None else predicted
    if is_traffic(path):
        from meshwright.traffic.record import read as read_traffic
        from meshwright.traffic.timeline import timeline

        return timeline(read_traffic(path))
    return read(path)


def _empty(path: str, side: Question | Timeline) -> list[Diagnostic]:
    """X105 for a trace without spans."""
    if isinstance(side, Question) or side.num_spans or "requests" in side.records:
        return []
    help = "record at least one step after the warm-up: meshwright run --steps 20 --trace FILE"
    return [Diagnostic(code="X105", message=f"{path} has no spans", place=path, help=help)]
