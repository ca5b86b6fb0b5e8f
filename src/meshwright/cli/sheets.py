"""Questions about models whose answers are sheets (images, recommendation models, rollouts, graphs): read, answered or
searched, and printed or written as the options say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.cli import options
from meshwright.cli.guard import INTERRUPTED
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.progress import Progress
from meshwright.cli.question import GOAL, WORLD, Question, beside, path_of
from meshwright.errors import Diagnostic, MeshwrightError

#: Options of other questions, by command.
OTHERS = {
    "predict": ("job_trace", "records", "slo", "engine_profile"),
    "search": (
        *("slo", "day", "rates", "goodput", "for_", "headroom", "risk", "robust", "runnable", "strategy", "objective"),
        *("pareto", "variants", "pick", "report", "plot", "store"),
    ),
}
#: Questions, and what is asked about the answer of one.
ASKED = ("train", *GOAL, *WORLD, "serve", "denoise", "rollout")


class PartsRead:
    """The parts of a question as they are read, and everything that is wrong with it so far."""

    def __init__(self, question: Question, wrong: list[Diagnostic]):
        self.question, self.wrong = question, [*wrong]

    def part(self, text: str, reader: Callable[[], Any]) -> Any:
        """Return a text as `reader` reads it; None where nothing is said, and where what is wrong is noted."""
        try:
            return reader() if text else None
        except MeshwrightError as error:
            self.wrong.extend(error.diagnostics)
            return None

    def path(self, text: str) -> str:
        """A text that may be a path, from where the question stands."""
        return path_of(text, self.question.base)

    def model(self) -> Any:
        """The model of layers that is named."""
        from meshwright.spec.model import load

        return self.part(self.question.model, lambda: load(self.path(self.question.model)))

    def cluster(self, what: str) -> Any:
        """The one cluster that ``what`` is done on."""
        from meshwright.spec.cluster import load
        from meshwright.spec.cluster_range import is_range

        on = self.question.on
        if is_range(on):
            message = f"{on!r} is a range of clusters, and {what} on one"
            self.wrong.append(Diagnostic(code="B005", message=message, place=f"--on {on}", help="say one cluster"))
            return None
        return self.part(on, lambda: load(self.path(on)))

    def costs(self) -> Any:
        """Costs of the framework that is named; None where none is."""

        def read() -> Any:
            from meshwright.cost import load_framework, standard

            return standard(load_framework(self.question.framework))

        return self.part(self.question.framework, read)

    def plan(self) -> Any:
        """The plan; None where none is said."""
        from meshwright.plan import parse

        return self.part(self.question.plan, lambda: parse(self.path(self.question.plan)))

    def missing(self, needed: dict[str, str], command: str) -> None:
        """Note which of what is `needed` is not said, with how it is written."""
        self.wrong += options.missing(msgspec.structs.asdict(self.question), needed, command=command)

    def done(self, *parts: Any) -> tuple[Any, ...]:
        """Return the parts.

        Raises:
            MeshwrightError: everything that is wrong.
        """
        if self.wrong:
            raise MeshwrightError(self.wrong)
        return parts


def of_others(
    question: Question, given: Any, command: str, noun: str, own: tuple[str, ...] = ("train",)
) -> list[Diagnostic]:
    """X004 for what says nothing of a ``noun``: words and options of other questions. Words that are its ``own`` end
    with the option that asks about it."""
    said = [f"--{name}" for name in ASKED if name not in own and getattr(question, name)]
    said += [f"--{name.strip('_').replace('_', '-')}" for name in OTHERS[command] if getattr(given, name, "")]
    place, help = f"meshwright {command}", "drop it"
    if own != ("train",):
        place, help = f"{place} --{own[-1]}", f"{help}, or drop --{own[-1]}"
    return [Diagnostic(code="X004", message=f"{name} says nothing of {noun}", place=place, help=help) for name in said]


def unwritable_files(given: Any) -> list[Diagnostic]:
    """X104 for files of a sheet that cannot be written."""
    return [*unwritable(given.report, "--report"), *unwritable(given.trace, "--trace")]


def show(prediction: Any, sheet: Callable[[Any], Any], given: Any) -> int:
    """Print an answer and write its files; 0 when it fits, 1 when not."""
    if given.json:
        print_json(prediction.to_json())
    else:
        from meshwright.report.sheet_text import render

        render(sheet(prediction), console())
    if given.report:
        from meshwright.report.sheet_html import write

        write(sheet(prediction), given.report)
        note(f"wrote {given.report}")
    if given.trace:
        from meshwright.trace.chrome import write

        write(prediction.times.timeline, given.trace)
        note(f"wrote {given.trace}")
    return 0 if prediction.fits else 1


def unsearchable(given: Any) -> list[Diagnostic]:
    """X104 and R002 for options of a search that cannot be."""
    wrong = unwritable(given.save, "--save")
    if given.top and not (given.top.isdecimal() and int(given.top)):
        wrong.append(Diagnostic(code="R002", message=f"{given.top!r} is not a count", place=f"--top {given.top}"))
    return wrong


def limits(given: Any) -> dict[str, Any]:
    """The restrictions of a search, how many of the best it shows, and who is told how far it is."""
    said = {name: getattr(given, name) for name in ("fix", "bound", "exclude", "allow")}
    return said | {"top": int(given.top or 5), "report": Progress("plans", least_s=1.0)}


def show_found(
    found: Any, render: Callable[[Any, Any], None], question: Question, given: Any, work: str, option: str = "train"
) -> int:
    """Print the best plans of a search and save the first with its question, whose workload an `option` says; 0 when a
    plan fits, 1 when none does, 130 when it was stopped before one was found."""
    if given.json:
        print_json(found.to_json())
    else:
        render(found, console())
    if given.save:
        from meshwright.plan.toml import save

        said = {field: getattr(question, field) for field in ("model", "on", "framework") if getattr(question, field)}
        said = {field: beside(path_of(text, question.base), given.save) for field, text in said.items()}
        save(found.best[0].plan, given.save, said | {option: work})
        note(f"wrote {given.save}: meshwright predict {given.save} says more")
    return 0 if found.fits else INTERRUPTED if found.stopped else 1
