"""``meshwright predict --rollout``: how fast a reinforcement-learning job generates answers and trains on them."""

from __future__ import annotations

from typing import Any

from meshwright.cli.question import WANTED, Question
from meshwright.cli.sheets import PartsRead, of_others, show, unwritable_files
from meshwright.errors import Diagnostic

#: What such a question needs, and how it is written.
NEEDED = WANTED | {
    "train": "--train seq=32768, the tokens of a sequence that trajectories are packed into",
    "plan": '--plan "fsdp full", of the devices that train',
}
OWN = ("train", "rollout")
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
    wrong = [*wrong, *of_others(question, given, "predict", "rollouts", OWN), *_undrawn(given.trace)]
    reading = PartsRead(question, [*wrong, *_of_rollouts(question.train), *unwritable_files(given)])
    reading.missing(NEEDED, "predict")
    from meshwright.spec.rollout import parse
    from meshwright.spec.workload import parse as parse_train

    said = f"batch=1,{question.train}" if question.train and not reading.wrong else ""
    model, cluster, train, plan, rollout, costs = reading.done(
        reading.model(),
        reading.cluster("rollouts are trained on"),
        reading.part(said, lambda: parse_train(said, base=question.base)),
        reading.plan(),
        reading.part(question.rollout, lambda: parse(question.rollout, base=question.base)),
        reading.costs(),
    )
    from meshwright.answer.rollouts import predict_rollouts
    from meshwright.report.rollouts_sheet import sheet

    return show(predict_rollouts(model, cluster, train, plan, rollout, costs=costs), sheet, given)


def _of_rollouts(train: str) -> list[Diagnostic]:
    """W005 for words of a training step that the rollouts say."""
    words = [part.partition("=")[0].strip().lower() for part in train.split(",")]
    return [
        Diagnostic(code="W005", message=f"{word}= beside --rollout: {why}", place=f"--train {train!r}", help="drop it")
        for word, why in FROM_ROLLOUTS.items()
        if word in words
    ]


def _undrawn(trace: str) -> list[Diagnostic]:
    """X004 for a timeline, of which rollouts have none."""
    message, help = "no timeline of rollouts is written", "--report FILE writes what both sides do and wait for"
    return [Diagnostic(code="X004", message=message, place="--trace", help=help)] if trace else []
