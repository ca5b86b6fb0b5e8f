"""Figures about images that a diffusion model makes: the questions and the quantities that are read off an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from meshwright.answer.denoising import DenoisingPrediction, predict_denoising
from meshwright.cost import load_framework, standard
from meshwright.papers.published import DenoiseQuestion
from meshwright.plan import parse as parse_plan
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.denoise import parse as parse_denoise
from meshwright.spec.model import load as load_model

#: A quantity of images that are made: its unit, and how it is read.
IMAGES: Mapping[str, tuple[str, Callable[[DenoisingPrediction], float]]] = {
    "latency": ("s", lambda p: p.latency.value),
    "throughput": ("images/s", lambda p: p.images_per_s),
    "bytes of experts' sum": ("bytes", lambda p: p.times.mixed_bytes),
    "bytes between patches": ("bytes", lambda p: p.times.sent_bytes),
}


@lru_cache(maxsize=64)
def denoised(question: DenoiseQuestion) -> DenoisingPrediction:
    """The images of a question.

    Raises:
        MeshwrightError: what is wrong with the question.
    """
    costs = standard(load_framework(question.framework))
    parts = load_model(question.model), load_cluster(question.on), parse_denoise(question.denoise)
    return predict_denoising(*parts, parse_plan(question.plan), costs=costs)
