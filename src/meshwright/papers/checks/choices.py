"""Choices that records teach: what is picked for questions that are left out of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import exp, log
from statistics import fmean

import numpy as np

from meshwright.papers.outcome import SHOWN, WITHIN, Check, Figure, Outcome
from meshwright.search.serving.learned import SHIPPED, AskedWords, RecordedGains, read
from meshwright.search.serving.techniques import HELPS, measure_of

#: Questions left out together with the one that is asked: those of its model, of its devices and plan, or of its
#: workload.
LEFT_OUT: dict[str, Callable[[AskedWords], Hashable]] = {
    "model": lambda asked: asked.model,
    "devices": lambda asked: (asked.on, asked.plan),
    "workload": lambda asked: asked.serve,
}


def metainf() -> Outcome:
    """The technique that records of other models, devices and workloads choose, against the best of all that were
    tried: how often it gains as much, to a percent."""
    known = RecordedGains(read(SHIPPED), measure_of(False))
    best = np.maximum(np.nanmax(known.gains, axis=1), 0.0)
    right: dict[str, float] = {}
    gained, always = [], []
    for name, key in LEFT_OUT.items():
        hits = []
        for row, asked in enumerate(known.questions):
            but = [other for other, one in enumerate(known.questions) if key(one) == key(asked)]
            got = _gain(known, row, known.expects(known.x[row], but=but).expected)
            hits.append(got >= best[row] - log(HELPS))
            gained.append(got)
            rest = np.delete(known.gains, but, axis=0)
            usual = known.words[int(np.nanargmax(np.where(np.isnan(known.gains[row]), -np.inf, _means(rest))))]
            always.append(known.gains[row, known.words.index(usual)] >= best[row] - log(HELPS))
        right[name] = fmean(hits)
    figures = [
        Figure(f"of them where no record has the {name}", None, share, "", SHOWN) for name, share in right.items()
    ]
    return Outcome(
        figures=(
            Figure("questions whose best technique is picked", 0.898, fmean(right.values()), "", WITHIN, 0.1, "",
                   headline=True),
            *figures,
            Figure("the same where what gains most on average is always picked", None, fmean(always)),
            Figure("gain of what is picked, geometric mean", None, exp(fmean(gained)), "x"),
            Figure("gain of the best of each question, geometric mean", None, exp(fmean(best)), "x"),
        ),
        baseline="every technique tried on every question",
        assumptions=(
            f"{len(known.questions)} questions of 4 models on 4 places with 5 workloads, predicted; an accuracy is of "
            "questions whose model, devices or workload no record has, and the mean of the three is judged; within a "
            "percent of the best is the best",
            "0.898 is of the results that its authors' documentation lists (docs.nesa.ai), where gradient boosting has "
            "0.815 and a random forest 0.742",
        ),
        missing=(
            "its tasks, of which none is public: these are this project's; a choice within a budget of cost; models "
            "and devices described by a language model",
        ),
    )  # fmt: skip


def _gain(known: RecordedGains, row: int, expected: tuple[tuple[str, float], ...]) -> float:
    """Return the log gain on a question of the first technique that it takes; 0 where none is said to gain."""
    for words, gain in expected:
        found = known.gains[row, known.words.index(words)]
        if gain <= HELPS:
            break
        if not np.isnan(found):
            return float(found)
    return 0.0


def _means(gains: np.ndarray) -> np.ndarray:
    """Return the mean log gain of each technique [techniques]; minus infinity where nothing is known."""
    count = (~np.isnan(gains)).sum(0)
    return np.where(count, np.nansum(gains, axis=0) / np.maximum(count, 1), -np.inf)


CHECKS = {"metainf": Check(metainf)}
