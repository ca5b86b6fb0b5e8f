"""The part of ``meshwright search`` that asks about a whole training run, on one cluster or on many."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import GOAL, OPTIONAL, Question, asked, beside, path_of, read_goal, read_parts
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import seconds

if TYPE_CHECKING:
    from meshwright.search.scaling import Scaling, ScalingRange
    from meshwright.spec.goal import Goal
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

NEEDED = ("model", "on", "train")
WANTED = {
    "model": "MODEL, a catalog name, a config.json or a question.toml (meshwright catalog models)",
    "on": "--on CLUSTER, such as 64xh100 or 8..512xh100 (meshwright catalog clusters)",
    "train": "--train batch=512,seq=8192",
}


class AskedCurve(msgspec.Struct, frozen=True):
    """Question of a search: the texts, and what they mean. ``curves`` are the clusters of each ``--on``."""

    question: Question
    model: Model
    train: Train
    curves: tuple[ScalingRange, ...]
    goal: Goal

    @property
    def is_scaling(self) -> bool:
        """Whether it is of several clusters."""
        return sum(len(curve.clusters) for curve in self.curves) > 1

    def saved(self, on: str, path: str) -> dict[str, str]:
        """The question as a file at `path` says it, of one of the clusters."""
        said = {**{field: getattr(self.question, field) for field in (*NEEDED, *OPTIONAL, *GOAL)}, "on": on}
        texts = {field: path_of(text, self.question.base) for field, text in said.items() if text}
        return {field: beside(text, path) for field, text in texts.items()}


def read(given: Any, wrong: list[Diagnostic]) -> AskedCurve:
    """Read the question that the options of a search ask.

    Raises:
        MeshwrightError: `wrong`, and everything that is wrong with the question.
    """
    said = {field: getattr(given, field) for field in ("model", "train", "framework", *GOAL)}
    question = asked({**said, "on": ""})
    words = given.on or ((question.on,) if question.on else ())
    said = {"model": question.model, "on": words, "train": question.train}
    wrong += options.missing(said, WANTED, command="search")
    parts, found = read_parts(msgspec.structs.replace(question, on="", plan="", price=""))
    curves, of_clusters = clusters_of(words, question)
    clusters = [cluster for curve in curves for _, cluster in curve.clusters]
    goal, of_goal = read_goal(question, [*parts, *clusters])
    wrong += found + of_clusters + of_goal
    if not wrong and len(clusters) > 1 and not parts[1].tokens:
        message = "time to train and cost are of a whole run, and its tokens are not said"
        help = "add --tokens 15t, or tokens=15t to the workload"
        wrong.append(Diagnostic(code="B003", message=message, place=" ".join(f"--on {w}" for w in words), help=help))
    if wrong:
        raise MeshwrightError(wrong)
    return AskedCurve(question, *parts, tuple(curves), goal)


def clusters_of(words: tuple[str, ...], question: Question) -> tuple[list[ScalingRange], list[Diagnostic]]:
    """The clusters of each word at the price that was said, and what is wrong with any of them."""
    from meshwright.search.scaling import ScalingRange
    from meshwright.spec.cluster_range import load_all
    from meshwright.spec.goal import Price, absent, priced, read_price

    curves, wrong, price = [], [], Price()
    try:
        price = read_price(question.price) if question.price else price
    except MeshwrightError as error:
        wrong += error.diagnostics
    for word in dict.fromkeys(words):
        try:
            curves.append(ScalingRange(word, load_all(path_of(word, question.base))))
        except MeshwrightError as error:
            wrong += error.diagnostics
    there = {i.device.name for c in curves for _, cluster in c.clusters for i in cluster.islands}
    wrong += absent(price, there, ", ".join(words)) if curves else []
    return [ScalingRange(c.text, tuple((t, priced(x, price)) for t, x in c.clusters)) for c in curves], wrong


def plottable(path: str) -> list[Diagnostic]:
    """List the reasons why a plot cannot be written to `path`; asked before the work starts."""
    if not path:
        return []
    ending = Path(path).suffix.lower()
    if ending not in (".svg", ".png"):
        message, help = "a plot is a .svg or a .png file", "name it curve.svg or curve.png"
        return [Diagnostic(code="B006", message=message, place=f"--plot {path}", help=help)]
    if ending == ".png" and find_spec("PIL") is None:
        help = 'pip install "meshwright[plot]", or write .svg, which needs nothing'
        return [Diagnostic(code="L003", message="a .png needs Pillow, not installed here", place="--plot", help=help)]
    return unwritable(path, "--plot")


def run(given: Any, ask: AskedCurve, find_on: Any) -> int:
    """0 when a cluster meets the goal (or fits, where there is none), 1 when none does, 130 when it was stopped
    before a plan was found."""
    from meshwright.cli.guard import INTERRUPTED
    from meshwright.search.scaling import sweep

    progress = _Progress()
    scaling = sweep(
        ask.curves,
        ask.goal,
        lambda cluster, **hints: find_on(cluster, before=progress.before, **hints),
        progress,
    )
    if given.json:
        print_json(scaling.to_json())
    else:
        from meshwright.report.scaling_text import render

        render(scaling, console())
    _write_files(scaling, given, ask)
    if scaling.stopped and not scaling.fitting:
        return INTERRUPTED
    return 0 if scaling.meeting else 1


class _Progress:
    """Which cluster is searched and how long the others may take, as far as the first ones tell: what stands
    ``before`` the progress of each search."""

    def __init__(self) -> None:
        self.before = ""
        self._began = monotonic()

    def __call__(self, done: int, asked: int, text: str) -> None:
        left = (monotonic() - self._began) / done * (asked - done) if done else 0.0
        total = f", about {seconds(left)} left in all" if done else ""
        self.before = f"{done + 1} of {asked} clusters, {text}{total}: "


def _write_files(scaling: Scaling, given: Any, ask: AskedCurve) -> None:
    chosen = scaling.chosen
    if given.save and chosen is not None:
        from meshwright.plan.toml import save

        save(chosen.prediction.plan, given.save, ask.saved(chosen.text, given.save))
        note(f"wrote {given.save} for {chosen.text}: meshwright predict {given.save} says more")
    if chosen is not None:
        from meshwright.cli.next_steps import after_search, training_engines

        engines = training_engines(ask.model, chosen.cluster, ask.train, chosen.prediction.plan)
        note(after_search(given.save, engines, given.for_.partition(",")[0].strip()))
    if given.report:
        from meshwright.report.scaling_html import write

        write(scaling, given.report)
        note(f"wrote {given.report}")
    if given.plot and scaling.fitting:
        from meshwright.report.scaling_plot import figure

        figure(scaling).write(given.plot)
        note(f"wrote {given.plot}")
