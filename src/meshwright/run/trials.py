"""Trials: short runs on labelled samples, several in one set of processes, and what each came to.

A trial is a job as :mod:`meshwright.run.loop` trains it, between real processes; those of as many ranks share one set
of them, since starting processes takes longer than some of these runs. Clients of a server are trained on a virtual
clock (:mod:`meshwright.run.by_clock`), so that no time hangs on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.run import launch, loop
from meshwright.run.by_clock import JudgedVersion, train_by_clock
from meshwright.run.job import Job
from meshwright.run.world import World
from meshwright.world.crowd import Crowd

#: The code of a run whose loss was not a number.
DIVERGED = "L004"


class FinishedTrial(NamedTuple):
    """A finished trial: its loss and accuracy on what is held out, the samples it trained on and its steps. One that
    diverged has an infinite loss, and classifies nothing rightly."""

    loss: float
    accuracy: float
    samples: int
    steps: int


def trained(jobs: Sequence[Job]) -> list[FinishedTrial]:
    """Train every job, and return what each came to, in their order.

    Raises:
        MeshwrightError: what a job raises that did not merely diverge.
    """
    found: dict[int, FinishedTrial] = {}
    for ranks in sorted({job.plan.num_ranks for job in jobs}):
        some = {number: job for number, job in enumerate(jobs) if job.plan.num_ranks == ranks}
        said = launch.start(_train, list(some.values()), num_ranks=ranks, device="cpu")
        # a loss that is infinite has no JSON
        found |= {number: FinishedTrial(inf if one[0] is None else one[0], *one[1:]) for number, one in zip(some, said)}
    return [found[number] for number in range(len(jobs))]


def _train(world: World, jobs: Sequence[Job]) -> list[tuple]:
    return [tuple(_trial(world, job)) for job in jobs]


def _trial(world: World, job: Job) -> FinishedTrial:
    try:
        said = loop.train(world, job)
    except MeshwrightError as error:
        if all(one.code != DIVERGED for one in error.diagnostics):
            raise
        return FinishedTrial(inf, 0.0, 0, 0)
    (*_, loss), (*_, right) = said["judged"].values(), said["accuracy"].values()
    samples = sum(said["batches"]) or job.train.global_batch * len(said["step_s"])
    return FinishedTrial(loss, right, samples, len(said["step_s"]))


def clocked(jobs: Sequence[Job], world: Crowd, **times: float) -> list[list[JudgedVersion]]:
    """Train the clients of every job on a virtual clock in one world, in a process of its own, and return all judged
    versions of each. `times` are those of :func:`train_by_clock`."""
    said = launch.start(_clocked, list(jobs), world, times, num_ranks=1, device="cpu")
    return [[_version(*one) for one in versions] for versions in said]


def _version(at_s: float, steps: int, loss: float | None, accuracy: float) -> JudgedVersion:
    """A version out of JSON, which has no infinite losses."""
    return JudgedVersion(at_s, steps, inf if loss is None else loss, accuracy)


def _clocked(world: World, jobs: Sequence[Job], crowd: Crowd, times: dict[str, Any]) -> list[list[tuple]]:
    return [[tuple(one) for one in train_by_clock(job, crowd, **times)] for job in jobs]
