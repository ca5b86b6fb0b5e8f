"""Recipes trained on labelled digits: what a row's technique comes to on held-out images, beside what it is against.

The images are those that come with the program (``--data digits``), the model a perceptron of one layer of 32, and runs
are those of ``meshwright run`` with its defaults, in float64, so that other machines find the same. Every figure is a
mean over :data:`SEEDS` seeds, of weights and of the order of the data, and says what each came to. Learning rates are
chosen for each way by itself, among powers of two and on other seeds (10 and 11), so that none is judged by the rate of
another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.papers.outcome import AT_LEAST, AT_MOST, SHOWN, Figure
from meshwright.papers.record import paper

if TYPE_CHECKING:
    from meshwright.run.by_clock import JudgedVersion
    from meshwright.run.job import Job

#: Runs of every recipe, with seeds from 0; images that they are judged by.
SEEDS, HELD_OUT = 3, 360
#: Points of a share.
POINTS = 100
ASSUMPTIONS = (
    "1,437 digits of 8 x 8 pixels are trained on, where the paper's data sets have tens of thousands of larger images",
    "learning rates are those of each way that classify best, among powers of two and on other seeds",
)


def jobs(
    plan: str,
    train: str,
    lr: float,
    steps: int,
    *,
    model: str = "digits-perceptron",
    seeds: Sequence[int] = range(SEEDS),
    world: str = "",
    **settings: Any,
) -> list[Job]:
    """The runs of a recipe, one a seed: a `plan` and a workload in words, with so many steps and a learning rate."""
    from meshwright.plan import parse
    from meshwright.run import data
    from meshwright.run.data import tokenizer
    from meshwright.run.job import Job
    from meshwright.run.settings import Settings
    from meshwright.spec.model import load
    from meshwright.spec.workload import parse as parse_train
    from meshwright.world.trace import read

    corpus = str(data.build("digits", tokenizer.Bytes(), data.cache_folder()))
    placed = parse(plan)
    usual = {"weight_decay": 1e-4, "precision": "float64"} | settings
    return [
        Job(
            model=load(model),
            plan=placed.on(placed.layout.num_ranks),
            train=parse_train(f"features=64,dtype=fp32,{train}"),
            settings=Settings(seed=seed, lr=lr, **usual),
            text="digits",
            corpus=corpus,
            steps=steps,
            quiet=True,
            judged_every=steps,
            faulty=read(world).faulty if world else None,
        )
        for seed in seeds
    ]


#: What was found in this process: the accuracy of a run.
_found: dict[bytes, float] = {}


def accuracies(runs: Mapping[str, Sequence[Job]]) -> dict[str, list[float]]:
    """Train all runs of some recipes, each once in this process, and return the accuracies of each."""
    from meshwright.run.trials import trained

    every = {name: [_key(job) for job in some] for name, some in runs.items()}
    wanted = {key: job for name, some in runs.items() for key, job in zip(every[name], some) if key not in _found}
    for key, one in zip(wanted, trained(list(wanted.values()))):
        _found[key] = one.accuracy
    return {name: [_found[key] for key in keys] for name, keys in every.items()}


def _key(job: Job) -> bytes:
    said = (job.model.name, job.plan.text(), job.train.text(), job.settings, job.faulty, job.steps)
    return msgspec.json.encode(said)


def missing(row: str) -> tuple[str, ...]:
    """Return what a row says that it lacks, where its figures do not."""
    one = paper(row)
    return () if one.figures or not one.missing else (one.missing,)


def resolution(shares: Sequence[float]) -> float:
    """Return the standard error of an accuracy, in points, that so many images are judged by."""
    right = fmean(shares)
    return POINTS * sqrt(max(right * (1 - right), 0.0) / HELD_OUT)


def by_seed(values: Sequence[float], unit: str = "points") -> str:
    """Return in words what every seed came to, and how far they are apart."""
    sign = "+" if unit == "points" else ""
    said = ", ".join(f"{value:{sign}.2f}" for value in values)
    return f"by seed {said} {unit}; standard deviation {stdev(values):.2f}"


def shown(what: str, shares: Sequence[float], **more: Any) -> Figure:
    """The accuracy that runs came to, in percent."""
    percents = [POINTS * share for share in shares]
    return Figure(what, None, fmean(percents), "%", SHOWN, 1.0, by_seed(percents, "%"), **more)


def lost(what: str, one: Sequence[float], other: Sequence[float]) -> Figure:
    """Points of accuracy that `one` way is behind an `other`, at most what so many images can tell."""
    apart = [POINTS * (b - a) for a, b in zip(one, other, strict=True)]
    return Figure(what, None, fmean(apart), "points", AT_MOST, resolution(other), by_seed(apart))


def gained(what: str, one: Sequence[float], other: Sequence[float]) -> Figure:
    """Points of accuracy that `one` way is ahead of an `other`: at least what so many images can tell, and twice the
    standard error over seeds."""
    apart = [POINTS * (a - b) for a, b in zip(one, other, strict=True)]
    least = max(resolution(other), 2 * stdev(apart) / sqrt(len(apart)))
    return Figure(what, None, fmean(apart), "points", AT_LEAST, least, by_seed(apart))


def first_at(versions: Sequence[JudgedVersion], accuracy: float) -> JudgedVersion | None:
    """Return the first version from which on the mean of it and the next two classifies so much rightly: one version
    by itself may be lucky. None where there is none."""
    for at, version in enumerate(versions):
        if fmean(one.accuracy for one in versions[at : at + 3]) >= accuracy:
            return version
    return None
