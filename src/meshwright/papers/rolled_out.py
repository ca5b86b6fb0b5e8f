"""Figures about reinforcement-learning jobs: the questions and the quantities that are read off an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from meshwright.answer.rollout_answer import RolloutPrediction
from meshwright.answer.rollouts import predict_rollouts
from meshwright.cost import load_framework, standard
from meshwright.papers.published import RolloutQuestion
from meshwright.plan import parse as parse_plan
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.rollout import parse as parse_rollout
from meshwright.spec.workload import parse as parse_train

#: A quantity of a job: its unit, and how it is read.
ROLLED_OUT: Mapping[str, tuple[str, Callable[[RolloutPrediction], float]]] = {
    "step time": ("s", lambda p: p.step_s.value),
    "trajectories": ("trajectories/s", lambda p: p.trajectories_per_s),
    "over all devices in turn": ("x", lambda p: p.speedup or 0.0),
    "largest age": ("updates", lambda p: float(p.staleness[1])),
    "mean age": ("updates", lambda p: p.staleness[0]),
}


@lru_cache(maxsize=64)
def rolled_out(question: RolloutQuestion) -> RolloutPrediction:
    """The job of a question.

    Raises:
        MeshwrightError: everything that is wrong with the question.
    """
    costs = standard(load_framework(question.framework))
    parts = load_model(question.model), load_cluster(question.on), parse_train(f"batch=1,{question.train}")
    return predict_rollouts(*parts, parse_plan(question.plan), parse_rollout(question.rollout), costs=costs)
