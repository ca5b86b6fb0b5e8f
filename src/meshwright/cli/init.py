"""``meshwright init``: a question file from five answers, or from a preset of the catalog."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import options
from meshwright.cli.asking import CLUSTER, FIVE, MODEL, Answers, AskedField, ask
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import GOAL, WANTED, Question, asked, beside, preset
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import gibibytes, seconds

if TYPE_CHECKING:
    from meshwright.search.found import Found

DESCRIPTION = """Write a question file that predict, search, run and export take.

Five things are asked: the model, the devices, what a step is, the tokens in all, and a deadline, a budget or a price.
Every answer is read at once; an empty one takes what stands in brackets. Options answer without being asked, and where
nobody can be (no terminal, --yes, --json) the others are taken by default. The plan is then searched.

Exit code 0: written; 1: written, and no plan fits; 2: an answer is wrong, nothing is written."""
FORMAT_VERSION = 1
FILE = "question.toml"
#: Without a terminal to ask on these have to be said.
NEEDED = {"model": f"--model {MODEL}", "on": f"--on {CLUSTER}"}


class InitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright init``."""

    preset: options.text("NAME", "Begin with a question of the catalog: meshwright catalog presets.") = ""
    model: options.text("MODEL", "Catalog name or Hugging Face config.json.") = ""
    on: options.text("CLUSTER", "64xh100, a catalog name, a .toml file, or a range: 8..512xh100.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    tokens: options.text("COUNT", "Tokens of the whole training run, 15t, or an amount of text, 40GB.") = ""
    days: options.DAYS = ""
    budget: options.BUDGET = ""
    price: options.PRICE = ""
    plan: options.text("PLAN", "The plan, as words or a .toml file; searched if left out.") = ""
    out: options.text("FILE", f"Where the question is written; {FILE} if left out.") = ""
    yes: options.switch("Ask nothing: what is not said is taken by default.") = False
    json: options.JSON = False


class PlanWords(msgspec.Struct, frozen=True):
    """The plan of the question as words, "" where there is none, and how it came about."""

    words: str
    said: str


def run(argv: list[str]) -> int:
    """0 when the question is written, 1 when it is and no plan fits."""
    given, wrong = options.read(InitOptions, argv, command="init", description=DESCRIPTION)
    wrong += unwritable(given.out or FILE, "--out")
    if not given.out and Path(FILE).exists():
        help = f"name another file, --out other.toml, or say --out {FILE} to write over it"
        wrong.append(Diagnostic(code="X018", message=f"there is a {FILE} already", place=FILE, help=help))
    answers, begun = _answered(given, wrong)
    plan, fits = _planned(given, answers, begun)
    said = answers.said | ({"plan": plan.words} if plan.words else {})
    path = given.out or FILE
    _write(said, path)
    if given.json:
        answer = {"question": said, "plan": plan.words or None, "command": command(said), "file": path}
        print_json({"format_version": FORMAT_VERSION, **answer})
    else:
        _show(said, plan, path)
    return 0 if fits else 1


def _answered(given: InitOptions, wrong: list[Diagnostic]) -> tuple[Answers, Question | None]:
    """The five answers: from options, from a preset, asked, or by default. And the preset's question."""
    said = {field: getattr(given, field) for field in ("on", "train", "tokens", "days", "budget", "price")}
    begun, question = None, Question(model=given.model, **said)
    if given.preset:
        try:
            begun = preset(given.preset)
            question = asked({"model": given.preset, **said})
            question = msgspec.structs.replace(question, model=given.model or question.model)
        except MeshwrightError as error:
            wrong += error.diagnostics
    asking = sys.stdin is not None and sys.stdin.isatty() and not (given.yes or given.json or given.preset)
    if not (asking or given.yes or given.preset):
        wrong += options.missing(msgspec.structs.asdict(given), NEEDED, command="init")
    texts = [_text(one, question) for one in FIVE]
    wrong += _misread(texts)
    if wrong:
        raise MeshwrightError(wrong)
    answers = Answers()
    for number, (one, text) in enumerate(zip(FIVE, texts), 1):
        try:
            if text or not asking:
                one.take(text or one.default(answers), answers)
            else:
                ask(one, number, answers)
        except EOFError:
            print(file=sys.stderr)
            help = "nothing is written; answer with options, meshwright init --model MODEL --on CLUSTER, or with --yes"
            message = f"the answers end at question {number} of {len(FIVE)}"
            raise MeshwrightError.one("X019", message, place=one.question, help=help) from None
    return answers, begun


def _text(one: AskedField, question: Question) -> str:
    """The answer that is known already; "" where none is."""
    if one.fields != GOAL[1:]:
        return getattr(question, one.fields[0])
    return " ".join(f"{field}={value}" for field in one.fields if (value := getattr(question, field)))


def _misread(texts: list[str]) -> list[Diagnostic]:
    """List the errors in the answers that were given, apart from what they mean together."""
    trial, wrong = Answers(), []
    for one, text in zip(FIVE, texts):
        try:
            if text:
                one.take(text, trial)
        except MeshwrightError as error:
            wrong += [d for d in error.diagnostics if trial.train is not None or d.code != "B003"]
    return wrong


def _planned(given: InitOptions, answers: Answers, begun: Question | None) -> tuple[PlanWords, bool]:
    """The plan that was said, the preset's where the question is still its own, or the best that a search finds; and
    whether it fits."""
    from meshwright.spec.cluster_range import is_range

    if is_range(answers.said["on"]):
        return PlanWords("", "meshwright search finds one for each of the clusters"), True
    own = begun is not None and all(answers.said[f] == getattr(begun, f) for f in ("model", "on"))
    words = given.plan or (begun.plan if own and not given.train else "")
    if words:
        return _checked(words, answers)
    found = _searched(answers)
    if found.best:
        best = found.best[0].prediction
        sure = "proven fastest under the cost model" if found.proven_optimal else "not proven to be the fastest"
        room = gibibytes(best.tightest.headroom_bytes)
        return PlanWords(best.plan.text(), f"{seconds(best.step_time_s)} a step, {sure}, {room} free"), True
    if found.stopped:
        raise KeyboardInterrupt
    lacks = f"; {found.misses[0].plan.text()} lacks {gibibytes(found.misses[0].lacks_bytes)}" if found.misses else ""
    return PlanWords("", f"nothing fits{lacks}"), False


def _checked(words: str, answers: Answers) -> tuple[PlanWords, bool]:
    from meshwright.answer.predict import predict
    from meshwright.plan import parse

    prediction = predict(answers.model, answers.cluster, answers.train, parse(words), detail=False)
    from meshwright.report.facts import fit

    return PlanWords(words, f"{seconds(prediction.step_time_s)} a step, {fit(prediction)}"), prediction.fits


def _searched(answers: Answers) -> Found:
    from meshwright.cli.search import _progress
    from meshwright.search.find import find

    return find(answers.model, answers.cluster, answers.train, top=1, report=_progress)


def command(said: dict[str, str]) -> str:
    """The question as one command line."""
    words = ["meshwright", "predict" if "plan" in said else "search", said["model"]]
    for field in (*WANTED, *GOAL):
        if field != "model" and field in said:
            words += [f"--{field}", said[field]]
    return shlex.join(words)


def _write(said: dict[str, str], path: str) -> None:
    """The question file, whole or not at all, under a line that says what to do with it."""
    from meshwright.atomic import write_bytes
    from meshwright.spec.toml_text import dumps

    name = Path(path).name
    verbs = ("predict", "search", "run", "export") if "plan" in said else ("search",)
    head = f"# A question, for meshwright {', '.join(verbs)}: meshwright {verbs[0]} {name}\n"
    order = [field for field in (*WANTED, *GOAL) if field in said]
    table = {"format_version": 1, **{field: beside(said[field], path) for field in order}}
    write_bytes(path, (head + dumps(table)).encode())


def _show(said: dict[str, str], plan: PlanWords, path: str) -> None:
    out = console()
    width = max(map(len, said))
    for field in (*WANTED, *GOAL):
        if field in said:
            more = f"   ({plan.said})" if field == "plan" else ""
            out.print(f"  {field:<{width}}  {said[field]}{more}", markup=False, soft_wrap=True)
    if not plan.words:
        out.print(f"  no plan: {plan.said}", markup=False, soft_wrap=True)
    out.print(f"the same as: {command(said)}", markup=False, soft_wrap=True)
    then = "predict" if plan.words else "search"
    note(f"wrote {path}: meshwright {then} {path}")
