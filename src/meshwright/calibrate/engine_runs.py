"""Host times of engines whose iterations are published, fitted to runs of measured requests.

What a publication says of an engine's iterations are its kernels; what the host adds between them is not in it. Every
run of ``serving_requests`` under such a profile is served again with its own arrivals under step and request times of a
grid, from the middle to ever better neighbours. The best are those whose means and medians of both times are nearest to
all runs; the error of a run that nobody saw is that of each under the best of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.cost.engine import EngineProfile, engine_profile, engines
from meshwright.cost.standard import serving_costs
from meshwright.validate.serving_requests import PLANS_DATE, MeasuredRun, distance, files, runs

#: Times of an iteration and of a request in it (us) that are tried; a client's delay (us) that is tried with each.
STEPS_US = (0.0, 1000.0, 2000.0, 3000.0, 4000.0, 6000.0)
REQUESTS_US = (0.0, 25.0, 50.0, 100.0, 200.0, 300.0, 400.0)
FRONTS_US = (0.0, 5000.0, 10000.0)
#: Weights of the logarithms of predicted over measured: mean and median time per token, then to the first token.
WEIGHTS = np.array([1.0, 1.0, 0.5, 0.5])
#: Runs that a fit needs.
FEWEST_RUNS = 4
#: The normal distribution's central 80% lies within this many standard deviations.
NORMAL_80 = 1.2816


#: A step and a request time of the grid, by their numbers.
_Place = tuple[int, int]


class RunsFit(NamedTuple):
    """A fitted profile, the runs behind it, and their errors in sample and left out [runs, figures]: means and medians
    of times per token and to the first token as logarithms of predicted over measured, then the distributions'
    distances."""

    profile: EngineProfile
    runs: tuple[str, ...]
    errors: dict[str, np.ndarray]


def fit_runs(folder: Path, progress: Callable[[str], None] = lambda line: None) -> list[RunsFit]:
    """Return the fits of all published profiles that have runs enough in a folder's ``serving_requests``.

    Raises:
        MeshwrightError: V001, V002 and V004 for tables that cannot be read.
    """
    found: dict[str, list[MeasuredRun]] = {}
    for path in files(folder):
        for _, _, run in runs(path):
            if isinstance(run, MeasuredRun):
                found.setdefault(_published(engine_profile(run.serve.engine.profile)), []).append(run)
    out = []
    for name, some in sorted(found.items()):
        if name and len(some) >= FEWEST_RUNS:
            progress(f"engines: {name}, {len(some)} runs")
            out.append(fit(name, some))
    return out


def _published(profile: EngineProfile) -> str:
    """The profile whose published iterations a profile has, "" where it has none."""
    return profile.published_as or (profile.name if profile.iterations else "")


def fit(name: str, some: list[MeasuredRun]) -> RunsFit:
    """Return the host times that explain runs under the published iterations of a profile best."""
    usual = engines()[name]
    bare = msgspec.structs.replace(usual, name=f"{name}-{PLANS_DATE}", until=PLANS_DATE, each_stage=True)
    bare = msgspec.structs.replace(bare, published_as=name, flagged=False)
    costs = serving_costs(usual.library)
    known: dict[_Place, tuple[EngineProfile, np.ndarray]] = {}

    def tried(place: _Place) -> tuple[EngineProfile, np.ndarray]:
        """The profile of a place on the grid with the client's delay that is best for all, and its errors."""
        if place not in known:
            host = msgspec.structs.replace(bare, step_us=STEPS_US[place[0]], request_us=REQUESTS_US[place[1]])
            times = [run.times(host, costs) for run in some]
            fronts = [[_error(run, t.tpot, t.ttft + us * 1e-6) for run, t in zip(some, times)] for us in FRONTS_US]
            which = min(range(len(FRONTS_US)), key=lambda one: _loss(np.array(fronts[one])).sum())
            known[place] = msgspec.structs.replace(host, front_us=FRONTS_US[which]), np.array(fronts[which])
        return known[place]

    def best(left: int = -1) -> tuple[EngineProfile, np.ndarray]:
        """The same of the best place without one of the runs."""
        kept = np.arange(len(some)) != left
        return tried(_descended(lambda place: float(_loss(tried(place)[1])[kept].sum())))

    profile, seen = best()
    errors = {"in_sample": seen, "run": np.array([best(left)[1][left] for left in range(len(some))])}
    names, left = tuple(run.run for run in some), {key: figures(rows) for key, rows in errors.items()}
    said = ", ".join(f"{text} {left[key]['mean']:.1%}" for key, text in WORDS.items())
    return RunsFit(
        msgspec.structs.replace(
            profile,
            title=f"{usual.title}, as its runs were served",
            sigma=_spread(errors["run"][:, 0]),
            front_sigma=_spread(errors["run"][:, 2]),
            source=f"iterations as published, host times fitted to {len(some)} measured runs (LLMServe/DistServe, "
            f"simdistserve/benchmarks/alignment, Apache-2.0); mean errors of the mean time per token: {said}",
            left_out=left,
        ),
        names,
        errors,
    )


def _loss(error: np.ndarray) -> np.ndarray:
    """Return the loss of every run [runs]."""
    return np.abs(error[:, : len(WEIGHTS)]) @ WEIGHTS


def _descended(loss: Callable[[_Place], float]) -> _Place:
    """Return the place of the grid from which no neighbour is better, on the way down from its middle."""
    here = (len(STEPS_US) // 2, len(REQUESTS_US) // 2)
    while True:
        near = [(here[0] + a, here[1] + b) for a, b in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (1, -1), (-1, 1))]
        near = [(a, b) for a, b in near if 0 <= a < len(STEPS_US) and 0 <= b < len(REQUESTS_US)]
        there = min(near, key=loss)
        if there == here:
            return here
        here = there


#: What is left out, in words.
WORDS = {"in_sample": "in sample", "run": "runs left out"}


def _error(run: MeasuredRun, tpot: np.ndarray, ttft: np.ndarray) -> list[float]:
    """Return the logarithms of predicted over measured times, and the distances of the distributions."""
    logs, apart = [], []
    for name, mine in (("tpot", tpot), ("ttft", ttft)):
        told = run.measured[name]
        known = ~np.isnan(told) & ~np.isnan(mine)
        logs += [float(np.log(mid(mine[known]) / mid(told[known]))) for mid in (np.mean, np.median)]
        apart.append(distance(mine[known], told[known]))
    return logs + apart


def figures(errors: np.ndarray) -> dict[str, float]:
    """Return the means over runs of the errors of mean times, and of the distributions' distances."""
    ape = np.abs(np.expm1(errors[:, [0, 2]])).mean(0)
    found = {"mean": ape[0], "ttft_mean": ape[1], "ks": errors[:, 4].mean(), "ttft_ks": errors[:, 5].mean()}
    return {name: round(float(value), 4) for name, value in found.items()}


def _spread(logs: np.ndarray) -> float:
    return round(float(np.quantile(np.abs(logs), 0.8)) / NORMAL_80, 3)


def report(found: Iterable[RunsFit]) -> list[str]:
    """Return the fits as lines of text: each profile's host times, then every run in sample beside left out."""
    lines = []
    for one in found:
        profile = one.profile
        host = f"step {profile.step_us:g} us, request {profile.request_us:g} us, front {profile.front_us:g} us"
        lines.append(f"{profile.name}: {host}; {profile.source}")
        for run, seen, left in zip(one.runs, one.errors["in_sample"], one.errors["run"]):
            text = ", ".join(
                f"{name} {np.expm1(a):+.1%} (left out {np.expm1(b):+.1%})"
                for name, a, b in (("TPOT", seen[0], left[0]), ("TTFT", seen[2], left[2]))
            )
            lines.append(f"{'':4s}{run}: {text}")
        for key, text in WORDS.items():
            lines.append(f"{'':4s}{text}: " + ", ".join(f"{k} {v:.3f}" for k, v in profile.left_out[key].items()))
    return lines
