"""Golden answers: some eighty questions with the graph, the step time and the memory that they are answered with.

A change of structure leaves every answer as it is, to the last bit; a change of physics says which answers it moves and
why. ``python -m tests.golden`` prints what differs from ``answers.json``, ``--write`` keeps it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.answer.predict import predict
from meshwright.cost import standard_on

FOLDER = Path(__file__).parent
ANSWERS = FOLDER / "answers.json"


def questions() -> list[str]:
    """The questions, one a line, without remarks."""
    lines = (FOLDER / "questions.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def known() -> dict[str, dict[str, Any]]:
    """The kept answers by question."""
    return json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}


def answered(question: str) -> dict[str, Any]:
    """The answer: the graph's digest, the step time and its 80% interval in seconds, the fullest rank's peak in bytes,
    and seconds by cause. Numbers are written with all their digits."""
    from meshwright.cli.question import Question, read_parts

    model, on, train, plan, framework = (part.strip() for part in question.split("|"))
    parts, wrong = read_parts(Question(model=model, on=on, train=train, plan=plan, framework=framework))
    if wrong:
        raise AssertionError(f"{question}: {'; '.join(map(str, wrong))}")
    found = predict(*parts, costs=standard_on(parts[1], framework), detail=False)
    return {
        "graph": found.identity.graph,
        "step_time_s": found.step_time_s,
        "interval_s": list(found.step_time_interval_s),
        "peak_bytes": found.peak_memory_bytes,
        "attribution_s": {cause: seconds for cause, seconds in found.attribution.items() if seconds},
    }
