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

To compare clusters, ask search: meshwright search MODEL --on 64xh100 --on 64xa100 --train ... --tokens 1t.

Exit code 0, whatever the error is; 2: a file cannot be compared."""
COMMAND = "compare"


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright compare``."""

    predicted: options.positional("PREDICTED", "A trace file, or a question.toml to predict now.") = ""
    measured: options.positional("MEASURED", "The trace file of a run.") = ""
    report: options.text("FILE", "Write the full comparison, one offline HTML file.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 once both could be read."""
    given, wrong = options.read(CompareOptions, argv, command=COMMAND, description=DESCRIPTION)
    wanted = {"predicted": "PREDICTED, a trace file or a question.toml", "measured": "MEASURED, a run's trace file"}
    wrong += options.missing({"predicted": given.predicted, "measured": given.measured}, wanted, command=COMMAND)
    wrong += unwritable(given.report, "--report")
    predicted, measured = timelines([given.predicted, given.measured], wrong)
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


def timelines(paths: list[str], wrong: list[Diagnostic]) -> list[Timeline]:
    """The timelines of trace files and question files; what is wrong with any of them, and `wrong`, together."""
    from meshwright.trace import read

    found: list = []
    for path in filter(None, paths):
        try:
            found.append(load(path) if path.endswith(".toml") else read(path))
            wrong += _empty(path, found[-1])
        except MeshwrightError as error:
            wrong += error.diagnostics
    questions = [side for side in found if isinstance(side, Question)]
    for question in questions:
        wrong += options.missing(msgspec.structs.asdict(question), WANTED, command=COMMAND)
    answers = iter(read_all(questions, also_wrong=wrong))
    return [next(answers)().timeline if isinstance(side, Question) else side for side in found]


def _empty(path: str, side: Question | Timeline) -> list[Diagnostic]:
    """X105 for a trace without spans."""
    if isinstance(side, Question) or side.num_spans:
        return []
    help = "record at least one step after the warm-up: meshwright run --steps 20 --trace FILE"
    return [Diagnostic(code="X105", message=f"{path} has no spans", place=path, help=help)]
