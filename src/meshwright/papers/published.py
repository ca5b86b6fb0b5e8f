"""Published figures as data: what a paper measured, and the question that Meshwright answers in its place.

A row carries its figures as ``[[figures]]``. A figure asks about a training step (``ask``: model, on, train, plan and
framework, in the words of ``meshwright predict``), about requests that are served (``ask`` with ``serve`` in place of
``train``), about images that are made (with ``denoise``), about reinforcement learning (with ``rollout`` beside
``train``) or about a pipeline order in its own clock (``order``: schedule, ranks, microbatches and the times of an
action). What figures of a row share stands once in its ``[ask]`` or ``[order]``; a plan, a serve or a rollout that
begins with ``+`` adds words to the row's. With ``against`` the figure is a ratio: the quantity of the question over
that of the same question with those words in place of its own."""

from __future__ import annotations

import msgspec

from meshwright.spec.graphs import known_graph_models
from meshwright.spec.recommender import known_recommenders

#: A word of a question.
Word = str | int | float
Words = dict[str, Word]


class StepQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training step to predict, in the words of ``meshwright predict``; ``model`` is a name of the row's ``[models]``
    or of the catalog, ``framework`` a profile of the catalog: published systems are measured on tuned stacks; ``world``
    says how clients of a server differ."""

    model: str
    on: str
    train: str
    plan: str
    framework: str = "fused"
    world: str = ""


class ServeQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests to serve, in the words of ``meshwright predict --serve``."""

    model: str
    on: str
    serve: str
    plan: str


class RolloutQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reinforcement-learning job, in the words of ``meshwright predict --rollout``."""

    model: str
    on: str
    train: str
    rollout: str
    plan: str
    framework: str = "fused"


class DenoiseQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images to make, in the words of ``meshwright predict --denoise``."""

    model: str
    on: str
    denoise: str
    plan: str
    framework: str = "fused"


class TableQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training step of a recommendation model, in the words of ``meshwright predict``."""

    model: str
    on: str
    train: str
    plan: str
    framework: str = "fused"


class GraphQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training of a model of a graph, in the words of ``meshwright predict``."""

    model: str
    on: str
    train: str
    plan: str
    framework: str = "fused"


def kind_of(
    words: Words,
) -> type[StepQuestion | ServeQuestion | DenoiseQuestion | TableQuestion | GraphQuestion | RolloutQuestion]:
    """Return the kind of question that words ask, by their workload and their model."""
    if "rollout" in words:
        return RolloutQuestion
    if "serve" in words or "denoise" in words:
        return ServeQuestion if "serve" in words else DenoiseQuestion
    model = str(words.get("model", "")).lower()
    if model in known_graph_models():
        return GraphQuestion
    return TableQuestion if model in known_recommenders() else StepQuestion


class OrderQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline order to time in its own clock: what one of ``ranks`` equal stages takes for a forward, a backward to
    the inputs and one to the weights (any one unit), what a transfer delays the next stage, and the share of an
    activation that stays for the weights' backward."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int | None = None
    t_f: float = 1.0
    t_b: float = 1.0
    t_w: float = 1.0
    t_comm: float = 0.0
    keep_w: float = 1.0


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure of a paper.

    ``quantity`` is a name of :data:`meshwright.papers.evaluate.STEP`, ``SERVED`` or ``ORDER``, or
    ``mean error``: then it is the mean distance of the figures at the place ``of`` from their papers' values, relative.
    ``paper`` is the paper's value (left out where it gives none), ``place`` the table or section it stands in.
    ``judge`` is one of :data:`meshwright.papers.outcome.JUDGES`: within ``tolerance`` of the paper's (relative), at
    most or at least ``bound`` times it (``bound`` itself where it gives none), and so on; both are set before anybody
    looks.
    ``headline``: it is what the paper claims of itself. ``restated``: it follows from the paper's own numbers or
    definition, so that agreeing with it proves nothing. ``why`` says where a miss comes from.
    """

    what: str
    quantity: str
    paper: float | None = None
    place: str = ""
    ask: Words = {}
    order: Words = {}
    against: Words | None = None
    of: str = ""
    judge: str = "within"
    tolerance: float = 0.1
    bound: float = 1.0
    headline: bool = False
    restated: bool = False
    why: str = ""


__all__ = [
    "DenoiseQuestion",
    "GraphQuestion",
    "OrderQuestion",
    "Published",
    "RolloutQuestion",
    "ServeQuestion",
    "StepQuestion",
    "TableQuestion",
    "Word",
    "Words",
    "kind_of",
]
