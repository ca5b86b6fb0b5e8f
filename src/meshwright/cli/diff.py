"""``meshwright diff``: why two predictions, plans, clusters, workloads or models differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, print_json
from meshwright.cli.question import WANTED, Question, load, read_all
from meshwright.cli.saved import load as load_saved
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.answer.prediction import Prediction

DESCRIPTION = """Why two predictions differ: the step time's difference, cause by cause.

meshwright diff A B compares two files: saved predictions (predict --json > a.json) or question files (.toml).

meshwright diff MODEL --on CLUSTER --train WORKLOAD --plan PLAN1 --plan PLAN2 asks both now. What is given once is
shared; MODEL, --on, --train and --plan may each be given twice."""
COMMAND = "diff"


class DiffOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright diff``."""

    first: options.positional("A", "A saved prediction (.json), a question (.toml), or with --plan: a model.") = ""
    second: options.positional("B", "Another file of either kind, or a second model.") = ""
    on: options.repeated("CLUSTER", "A cluster for both sides; twice: one for each.") = ()
    train: options.repeated("WORKLOAD", "A workload for both sides; twice: one for each.") = ()
    plan: options.repeated("PLAN", "A plan for both sides; twice: one for each.") = ()
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0, whatever the difference is."""
    given, wrong = options.read(DiffOptions, argv, command=COMMAND, description=DESCRIPTION)
    asked = given.on or given.train or given.plan
    a, b = _asked(given, wrong) if asked else _files(given, wrong)
    from meshwright.report.diff import delta
    from meshwright.report.diff_text import render

    difference = delta(a, b)
    if given.json:
        print_json(difference.to_json())
    else:
        render(difference, console())
    return 0


def _asked(given: DiffOptions, wrong: list[Diagnostic]) -> list[Prediction]:
    """Both answers to what the options ask."""
    said = {
        "model": tuple(filter(None, (given.first, given.second))),
        "on": given.on,
        "train": given.train,
        "plan": given.plan,
    }
    wrong += _legality(said)
    sides = [Question(**{field: words[side % len(words)] for field, words in said.items() if words}) for side in (0, 1)]
    return [answer() for answer in read_all(sides, also_wrong=wrong)]


def _legality(said: dict[str, tuple[str, ...]]) -> list[Diagnostic]:
    """X004 for what neither side has, X010 for what is given too often, or when nothing is given twice."""
    place = f"meshwright {COMMAND}"
    wrong = options.missing(said, WANTED, command=COMMAND)
    wrong += [
        Diagnostic(code="X010", message=f"{len(words)} of --{field}; two sides take two at most", place=place)
        for field, words in said.items()
        if len(words) > 2
    ]
    if not wrong and all(len(words) == 1 for words in said.values()):
        help = 'give one of MODEL, --on, --train and --plan twice: --plan "tp8 pp2" --plan "tp4 pp4"'
        wrong.append(Diagnostic(code="X010", message="both sides are the same question", place=place, help=help))
    return wrong


def _files(given: DiffOptions, wrong: list[Diagnostic]) -> list[Prediction | dict[str, Any]]:
    """Read both files: saved predictions as they are, questions as the predictions that answer them.

    Faults of the options and of either file are added to `wrong` and raised together."""
    wanted = {"first": "A, a saved prediction or question file", "second": "B, another one"}
    named = {field: getattr(given, field) for field in wanted}
    wrong += options.missing(named, wanted, command=COMMAND)
    sides: list[Any] = []
    for path in filter(None, named.values()):
        try:
            sides.append(load(path) if path.endswith(".toml") else load_saved(path))
        except MeshwrightError as error:
            wrong += error.diagnostics
    questions = [side for side in sides if isinstance(side, Question)]
    for question in questions:
        wrong += options.missing(msgspec.structs.asdict(question), WANTED, command=COMMAND)
    answers = iter(read_all(questions, also_wrong=wrong))
    return [next(answers)() if isinstance(side, Question) else side for side in sides]
