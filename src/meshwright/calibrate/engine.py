"""Engine profiles fitted to measured servers: host time an iteration, host time a request in it, and kernels' pace.

A row of ``serving_runs`` with a time per token and a load of so many open requests is predicted with an engine that
adds nothing. What is left is ``kernels * device + step + request * batch``, whose constants are the nodes of a grid
with the least median error. The error of models that the constants never saw is that of every model left out in turn;
the kernels keep the pace of the tables unless another one is better for models left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.atomic import write_bytes
from meshwright.cost.engine import FORMAT_VERSION, EngineProfile
from meshwright.errors import MeshwrightError
from meshwright.spec.toml_text import dumps
from meshwright.validate import tables
from meshwright.validate.serving import predicted

#: An engine that adds nothing to its kernels.
NOTHING = EngineProfile(name="nothing", step_us=0.0, request_us=0.0, layer_us=0.0, sigma=0.0)
#: Constants that are tried: paces, microseconds an iteration, microseconds a request.
KERNELS = np.arange(0.7, 1.151, 0.025)
STEPS_US = np.array([0, 50, 100, 150, 200, 300, 400, 500, 650, 800, 1000, 1300, 1600, 2000, 2500, 3000.0])
REQUESTS_US = np.array([0, 1, 2, 3, 4, 6, 8, 10, 14, 20, 28, 40, 60, 100.0])
#: Rows that an engine needs, and those that are left when a model is left out.
FEWEST = 40


class EngineSample(NamedTuple):
    """A measured server: ``batch`` requests open, seconds a token that its kernels are predicted to take, and that it
    took."""

    engine: str
    model: str
    batch: int
    device_s: float
    measured_s: float
    source: str = ""


class EngineFit(NamedTuple):
    """The constants of an engine and their absolute relative errors: in sample, and of models left out."""

    engine: str
    rows: int
    models: int
    kernels: float
    step_us: float
    request_us: float
    median: float
    p90: float
    left_median: float
    left_p90: float
    sources: tuple[str, ...] = ()


def samples(folder: Path, progress: Callable[[str], None] = lambda line: None) -> list[EngineSample]:
    """Return the rows of a folder's ``serving_runs`` that say a time per token at a number of open requests.

    Raises:
        MeshwrightError: V001, V002 and V004 for a table that cannot be read.
    """
    path = tables.find(folder, "serving_runs")
    found: list[EngineSample] = []
    for number, (_, row) in enumerate(tables.numbered(path, "serving_runs") if path else ()):
        batch, measured = tables.whole(row, "concurrency"), tables.number(row, "tpot_ms")
        if row["load_type"] != "concurrency" or not batch or not measured:
            continue
        if number % 200 == 0:
            progress(f"engines: row {number}")
        try:
            metrics, _ = predicted(row, NOTHING)
        except MeshwrightError:
            continue  # validate says why
        seconds = metrics.tpot_s.mean, measured * 1e-3
        found.append(EngineSample(family(row["engine"]), row["model"], batch, *seconds, row["source"]))
    return found


def family(engine: str) -> str:
    """Return the name of an engine's profile: its first word."""
    return engine.lower().split()[0] if engine.strip() else ""


def fit_all(found: Iterable[EngineSample]) -> list[EngineFit]:
    """Return the fit of every engine that has rows enough, in order of their names."""
    by_engine: dict[str, list[EngineSample]] = {}
    for sample in found:
        by_engine.setdefault(sample.engine, []).append(sample)
    return [fit(engine, mine) for engine, mine in sorted(by_engine.items()) if len(mine) >= FEWEST]


def fit(engine: str, mine: list[EngineSample]) -> EngineFit:
    """Return the constants of an engine, with every model left out in turn where there are several."""
    usual, free = (_fit(engine, mine, paces) for paces in (np.array([1.0]), KERNELS))
    return free if free.left_median < usual.left_median else usual


def _fit(engine: str, mine: list[EngineSample], paces: np.ndarray) -> EngineFit:
    best, errors = _best(mine, paces), []
    models = sorted({sample.model for sample in mine})
    for model in models if len(models) > 1 else ():
        rest = [sample for sample in mine if sample.model != model]
        if len(rest) >= FEWEST // 2:
            errors.append(_errors(_best(rest, paces), [sample for sample in mine if sample.model == model]))
    seen = _errors(best, mine)
    unseen = np.concatenate(errors) if errors else np.array([np.nan])
    kernels, step, request = best
    return EngineFit(
        engine=engine,
        rows=len(mine),
        models=len(models),
        kernels=kernels,
        step_us=step,
        request_us=request,
        median=float(np.median(seen)),
        p90=float(np.quantile(seen, 0.9)),
        left_median=float(np.median(unseen)),
        left_p90=float(np.quantile(unseen, 0.9)),
        sources=tuple(sorted({sample.source for sample in mine})),
    )


def _best(mine: list[EngineSample], paces: np.ndarray) -> tuple[float, float, float]:
    """The node of the grid with the least median error, and of those nearly as good the least mean one."""
    best, least = (1.0, 0.0, 0.0), np.inf
    steps, requests = np.meshgrid(STEPS_US, REQUESTS_US, indexing="ij")
    device, batch, measured = (np.array([getattr(s, f) for s in mine]) for f in ("device_s", "batch", "measured_s"))
    for kernels in paces:
        added = steps[..., None] + requests[..., None] * batch
        ratio = (kernels * device + added * 1e-6) / measured
        loss = np.median(np.abs(ratio - 1), axis=-1) + 0.3 * np.abs(np.log(ratio)).mean(axis=-1)
        at = np.unravel_index(int(np.argmin(loss)), loss.shape)
        if loss[at] < least:
            best, least = (float(kernels), float(steps[at]), float(requests[at])), float(loss[at])
    return best


def _errors(constants: tuple[float, float, float], mine: list[EngineSample]) -> np.ndarray:
    """Absolute relative errors of samples [n]."""
    kernels, step, request = constants
    predicted_s = [kernels * s.device_s + (step + request * s.batch) * 1e-6 for s in mine]
    return np.array([abs(p / s.measured_s - 1) for p, s in zip(predicted_s, mine)])


def profile(found: EngineFit) -> EngineProfile:
    """Return the profile of a fit. Its spread covers 80% of the rows of models left out, of those in sample where
    there is one model."""
    error = found.p90 if np.isnan(found.left_p90) else found.left_p90
    unseen = "one model" if np.isnan(found.left_median) else f"{found.left_median:.1%} with models left out"
    return EngineProfile(
        name=found.engine,
        title=f"{found.engine}, as measured",
        kernels=round(found.kernels, 3),
        step_us=found.step_us,
        request_us=found.request_us,
        sigma=round(float(np.log1p(error)) / 1.645, 3),
        source=f"fitted to times per token of {found.rows} measured servers of {found.models} models "
        f"({', '.join(found.sources)}): "
        f"{found.median:.1%} median error in sample, {unseen}",
        flagged=False,
    )


def report(found: list[EngineFit]) -> list[str]:
    """Return the fits as lines of text."""
    lines = [
        f"{'engine':12s}{'rows':>6s}{'models':>8s}{'kernels':>9s}{'step us':>9s}{'request us':>12s}  errors of TPOT"
    ]
    for one in found:
        lines.append(
            f"{one.engine:12s}{one.rows:6d}{one.models:8d}{one.kernels:9.3f}{one.step_us:9.0f}{one.request_us:12.1f}"
            f"  median {one.median:.1%}, p90 {one.p90:.1%}; models left out {one.left_median:.1%}, {one.left_p90:.1%}"
        )
    return lines


def write(found: list[EngineFit], folder: Path) -> list[Path]:
    """Write a TOML file a profile, as the catalog holds them; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    usual = EngineProfile(name="")
    for one in found:
        made = profile(one)
        fields = {f: getattr(made, f) for f in EngineProfile.__struct_fields__}
        table = {f: value for f, value in fields.items() if f == "name" or value != getattr(usual, f)}
        paths.append(folder / f"{made.name.replace('-', '_')}.toml")
        write_bytes(paths[-1], dumps({"format_version": FORMAT_VERSION, **msgspec.to_builtins(table)}).encode())
    return paths
