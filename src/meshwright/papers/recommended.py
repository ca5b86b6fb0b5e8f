"""Figures about steps of recommendation models: the questions and the quantities that are read off an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from meshwright.answer.recommending import RecommendingPrediction, predict_recommending
from meshwright.cost import load_framework, standard
from meshwright.papers.published import TableQuestion
from meshwright.plan import parse as parse_plan
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.recommender import load_recommender
from meshwright.spec.samples import parse_samples

#: A quantity of a recommendation model's step: its unit, and how it is read.
TABLES: Mapping[str, tuple[str, Callable[[RecommendingPrediction], float]]] = {
    "step time": ("s", lambda p: p.step_time_s),
    "throughput": ("samples/s", lambda p: p.samples_per_s),
    "peak memory": ("bytes", lambda p: p.peak_memory_bytes),
    "fits": ("", lambda p: float(p.fits)),
    "bytes between nodes": ("bytes", lambda p: p.sent_far_bytes),
}


@lru_cache(maxsize=64)
def recommended(question: TableQuestion) -> RecommendingPrediction:
    """Return the predicted step of a question.

    Raises:
        MeshwrightError: all that is wrong with the question.
    """
    parts = load_recommender(question.model), load_cluster(question.on), parse_samples(question.train)
    costs = standard(load_framework(question.framework))
    return predict_recommending(*parts, parse_plan(question.plan), costs=costs)
