"""``meshwright predict --rollout``: how fast a reinforcement-learning job generates answers and trains on them."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cli import options
from meshwright.cli.question import GOAL, WANTED, Question, read_parts
from meshwright.cli.sheets import show, unwritable_files
from meshwright.errors import Diagnostic, MeshwrightError

#: What such a question needs, and how it is written.
NEEDED = WANTED | {
    "train": "--train seq=32768, the tokens of a sequence that trajectories are packed into",
    "plan": '--plan "fsdp full", of the devices that train',
}
#: Options of other questions, and files that are written of these alone.
OTHERS = ("serve", "denoise", *GOAL, "world")
FILES = ("job_trace", "records", "slo", "engine_profile")
#: Words of a training step that rollouts say in its place.
FROM_ROLLOUTS = {
    "batch": "the rollouts say how many trajectories a step trains on: prompts= times samples=",
    "lengths": "the rollouts say how long trajectories are: prompt= and output=",
    "tokens": "a job of rollouts is not predicted over all of its tokens",
}


def predict_rolled_out(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Answer the question and print it as the options say; 0 when it fits, 1 when not.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    wrong = [*wrong, *options.missing(msgspec.structs.asdict(question), NEEDED, command="predict")]
    wrong += _of_others(question, given) + _of_rollouts(question.train) + unwritable_files(given)
    said = f"batch=1,{question.train}" if question.train else ""
    parts, found = read_parts(msgspec.structs.replace(question, train="" if wrong else said, framework=""))
    wrong += found
    from meshwright.spec.rollout import parse

    rollout = costs = None
    try:
        rollout = parse(question.rollout, base=question.base)
        if question.framework:
            from meshwright.cost import load_framework, standard

            costs = standard(load_framework(question.framework))
    except MeshwrightError as error:
        wrong += error.diagnostics
    if wrong or rollout is None:
        raise MeshwrightError(wrong)
    from meshwright.answer.rollouts import predict_rollouts
    from meshwright.report.rollouts_sheet import sheet

    model, cluster, train, plan = parts
    return show(predict_rollouts(model, cluster, train, plan, rollout, costs=costs), sheet, given)


def _of_rollouts(train: str) -> list[Diagnostic]:
    """W005 for words of a training step that the rollouts say."""
    words = [part.partition("=")[0].strip().lower() for part in train.split(",")]
    return [
        Diagnostic(code="W005", message=f"{word}= beside --rollout: {why}", place=f"--train {train!r}", help="drop it")
        for word, why in FROM_ROLLOUTS.items()
        if word in words
    ]


def _of_others(question: Question, given: Any) -> list[Diagnostic]:
    """X004 for what is of other questions: said beside rollouts, one of the two is meant."""
    said = [f"--{name}" for name in OTHERS if getattr(question, name)]
    said += [f"--{name.replace('_', '-')}" for name in FILES if getattr(given, name, "")]
    where, help = "meshwright predict --rollout", "drop it, or drop --rollout"
    found = [Diagnostic(code="X004", message=f"{n} says nothing of rollouts", place=where, help=help) for n in said]
    if given.trace:
        message, instead = "no timeline of rollouts is written", "--report FILE writes what both sides do and wait for"
        found.append(Diagnostic(code="X004", message=message, place="--trace", help=instead))
    return found
