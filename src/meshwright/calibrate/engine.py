"""Engine profiles fitted to measured servers: pace of kernels, host times, and what clients wait for besides.

A row of ``serving_runs`` is served by the simulator under an engine that adds nothing; then the constants of a profile
are moved until times per token and to the first token (or tokens a second, where a row says no other) are those
measured. Errors count by their logarithm and not by its square, so that rows of another kind bend nothing; steps are
those of Gauss and Newton, each a bounded least-squares problem whose weights are the inverse errors (iteratively
reweighted, Beaton and Tukey 1974). The error of models, hardware or engines that constants never saw is that of every
group left out in turn, from the derivatives at the solution.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.latency import times_of
from meshwright.answer.replica import built, host_times, paced
from meshwright.atomic import write_bytes
from meshwright.calibrate.fitting import bounded_step
from meshwright.cost.engine import FORMAT_VERSION, EngineProfile, engines
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.simulate.serve import simulate
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import load_device
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.spec.toml_text import dumps
from meshwright.validate import tables
from meshwright.validate.protocols import protocol_of
from meshwright.validate.serving import asked, ported

#: An engine that adds nothing to its kernels.
NOTHING = EngineProfile(name="nothing", step_us=0.0, request_us=0.0, layer_us=0.0, sigma=0.0)
#: Rows that an engine needs, and those that are left when a group is left out.
FEWEST = 40
#: Steps of the fit, then of one in which requests may wait for one another at the engine's front; and the error below
#: which rows weigh no more.
STEPS, LINE_STEPS, SMALL = 8, 4, 0.03
#: Weight of a time to the first token beside a time per token.
FIRST_TOKEN = 0.5
#: Rows of a model on a device at most: more of them, by a hash of what was measured, decide nothing alone.
MOST = 24
#: Host times of a layer and of its experts (us) that a fit starts from, and of latent attention where servers have it.
#: Where the device takes longer than the host the error does not change with these, so that a fit from a small start
#: stays there.
STARTS, LATENT = ((150.0, 150.0), (400.0, 1500.0)), 1000.0
#: The normal distribution's central 80% lies within this many standard deviations.
NORMAL_80 = 1.2816


class EngineConstant(NamedTuple):
    """A constant of a profile: where the fit starts, the step of its derivative, and its bounds."""

    name: str
    start: float
    step: float
    low: float
    high: float


CONSTANTS = (
    EngineConstant("kernels", 1.0, 0.02, 0.5, 3.0),
    EngineConstant("prompts", 1.0, 0.05, 0.5, 3.0),
    EngineConstant("step_us", 200.0, 50.0, 0.0, 20000.0),
    EngineConstant("request_us", 2.0, 1.0, 0.0, 300.0),
    EngineConstant("layer_us", 150.0, 50.0, 0.0, 3000.0),
    EngineConstant("experts_us", 150.0, 50.0, 0.0, 6000.0),
    EngineConstant("latent_us", 0.0, 50.0, 0.0, 6000.0),
    EngineConstant("serial_us", 0.0, 200.0, 0.0, 20000.0),
    EngineConstant("serial_token_us", 0.0, 0.25, 0.0, 20.0),
    EngineConstant("stream_us", 0.0, 10.0, 0.0, 1000.0),
    EngineConstant("front_us", 10000.0, 1000.0, 0.0, 300000.0),
    EngineConstant("token_us", 3.0, 0.5, 0.0, 50.0),
    EngineConstant("front_steps", 1.0, 0.25, 0.0, 50.0),
)


#: Constants of what clients wait for besides, and the host's times that follow from them: nothing is computed again.
FRONT = ("front_us", "token_us", "front_steps")
#: Constants of the line at an engine's front, which are fitted last: what all requests wait for alike explains most of
#: what a line does, so that a fit of both at once from anywhere finds either.
LINE = ("serial_us", "serial_token_us", "stream_us")
SEEN = ("front_s", "token_s", "front_steps")


class EngineSample(NamedTuple):
    """A measured server: its replica under an engine that adds nothing, its requests, and the measured seconds per
    token and to the first token, and tokens a second of a device (NaN where the row does not say)."""

    profile: str
    model: str
    hardware: str
    source: str
    base: Replica
    spec: Model
    serve: Serve
    requests: Requests
    devices: int
    measured: tuple[float, float, float]

    def predicted(self, profile: EngineProfile) -> np.ndarray:
        """Return (seconds per token, to the first token, tokens a second and device) [3] in an engine."""
        return self.seen(self.computed(profile), profile)

    def computed(self, profile: EngineProfile) -> ServedRequests:
        """Return what becomes of the requests in an engine as it computes them, before clients see it."""
        host = msgspec.structs.replace(host_times(profile, self.spec, self.serve), **dict.fromkeys(SEEN, 0.0))
        table = paced(self.base.costs, profile, load_device(self.hardware))
        replica = msgspec.structs.replace(self.base, costs=table, host=host)
        return simulate(replica, self.requests)

    def seen(self, computed: ServedRequests, profile: EngineProfile) -> np.ndarray:
        """Return the same of requests that were computed, as clients of an engine see them."""
        served = computed.seen(self.requests, host_times(profile, self.spec, self.serve))
        times = times_of(self.requests, served)
        span = float(served.end_s.max() - served.arrival_s.min())
        tpot = float(np.nanmean(times.tpot)) if (self.requests.output > 1).any() else np.nan
        return np.array([tpot, float(times.ttft.mean()), float(self.requests.output.sum()) / span / self.devices])


class EngineFit(NamedTuple):
    """A fitted profile, the samples and models behind it, and the natural logarithms of predicted over measured
    [samples, 3] in sample and of groups left out in turn, by what was left out."""

    profile: EngineProfile
    rows: int
    models: int
    errors: dict[str, np.ndarray]


def samples(folder: Path, progress: Callable[[str], None] = lambda line: None) -> list[EngineSample]:
    """Return the rows of a folder's ``serving_runs`` that say a time or tokens a second of a server that is predicted.

    Raises:
        MeshwrightError: V001, V002 and V004 for a table that cannot be read.
    """
    path = tables.find(folder, "serving_runs")
    found: list[EngineSample] = []
    costs = {library: serving_costs(library) for library in ("vllm", "trtllm", "sglang")}
    for number, (_, row) in enumerate(tables.numbered(path, "serving_runs") if path else ()):
        if number % 500 == 0:
            progress(f"engines: row {number}")
        name = profile_name(row)
        try:
            model, cluster, serve, plan, requests, devices = asked(row)
            if plan.several:
                continue  # its pools have a server each
            made = built(
                model,
                cluster,
                serve,
                plan.on(cluster.num_devices),
                requests,
                costs[library_of(name)],
                msgspec.structs.replace(NOTHING, **_facts(name)),
                split=False,
            )
        except MeshwrightError:
            continue  # validate says why
        cells = (("tpot_ms", 1e-3), ("ttft_ms", 1e-3), ("throughput_tok_s_per_gpu", 1.0))
        measured = tuple((tables.number(row, column) or np.nan) * unit for column, unit in cells)
        if made.replica is None or np.isnan(measured).all():
            continue
        where = (row["model"], row["hardware"], row["source"])
        found.append(EngineSample(name, *where, made.replica, model, serve, requests, devices, measured))
    return found


def profile_name(row: dict[str, str]) -> str:
    """Return the name of the profile that a row belongs to: its engine, with the last month of the year where that
    year's versions have a profile of their own."""
    engine, date = ported(row), protocol_of(row).date
    return f"{engine}-{date[:4]}-12" if date and date < RECENT else engine


#: Versions from this month on are those of today, and none before the second one replays CUDA graphs (vLLM 0.3).
RECENT, CAPTURED = "2025-01", "2024-01"


def month_of(profile: str) -> str:
    """Return the last month that a profile stands for, of its name; "" of today's."""
    found = re.search(r"-(\d{4}-\d\d)$", profile)
    return found[1] if found else ""


def library_of(profile: str) -> str:
    """Return whose collectives an engine runs: its own where they were measured, else vLLM's."""
    engine = profile.partition("-")[0]
    return engine if engine in ("trtllm", "sglang") else "vllm"


def spread(found: Iterable[EngineSample]) -> list[EngineSample]:
    """Return the samples without those that are more than :data:`MOST` of one engine, model and device."""
    groups: dict[tuple[str, ...], list[EngineSample]] = {}
    for sample in found:
        groups.setdefault((sample.profile, sample.model, sample.hardware, sample.source), []).append(sample)

    def drawn(sample: EngineSample) -> bytes:
        return sha256(repr((sample.measured, len(sample.requests))).encode()).digest()

    return [sample for some in groups.values() for sample in sorted(some, key=drawn)[:MOST]]


def fit_all(found: Iterable[EngineSample], progress: Callable[[str], None] = lambda line: None) -> list[EngineFit]:
    """Return the fit of every profile that has rows enough, in order of their names, and last of the default: that of
    all engines, whose error is that of engines left out."""
    by_profile: dict[str, list[EngineSample]] = {}
    for sample in spread(found):
        by_profile.setdefault(sample.profile, []).append(sample)
    mine = {name: some for name, some in sorted(by_profile.items()) if len(some) >= FEWEST}
    out = []
    for name, some in mine.items():
        progress(f"engines: {name}, {len(some)} rows")
        out.append(fit(name, some, ("model", "hardware")))
    today = [sample for name, some in mine.items() for sample in some if not month_of(name)]
    if len({sample.profile for sample in today}) > 1:
        progress(f"engines: default, {len(today)} rows")
        out.append(fit("default", today, ("profile",)))
    return out


def fit(name: str, mine: list[EngineSample], groups: tuple[str, ...]) -> EngineFit:
    """Return the profile of servers, with every value of each of the ``groups`` (fields of a sample) left out in turn
    where there are several."""
    measured = np.log(np.array([sample.measured for sample in mine]))
    weight = weights(measured)
    latent = LATENT if any(one.kv_lora_rank for sample in mine for one in sample.spec.attentions) else 0.0
    starts = [(*eager, latent) for eager in STARTS]
    best = min((_fitted(name, mine, measured, weight, eager) for eager in starts), key=lambda found: found.loss)
    errors = {"in_sample": best.error}
    for field in groups:
        left = [getattr(sample, field) for sample in mine]
        errors[field] = _left_out(best.error, best.slope, weight, best.values, left)
    found = _profile(name, best.values, mine, errors, weight)
    return EngineFit(found, len(mine), len({sample.model for sample in mine}), errors)


class _Found(NamedTuple):
    """The constants of a fit, the weighted error of what they predict, its parts [n, 3] and their derivatives."""

    loss: float
    values: np.ndarray
    error: np.ndarray
    slope: np.ndarray


def _fitted(
    name: str, mine: list[EngineSample], measured: np.ndarray, weight: np.ndarray, eager: tuple[float, float, float]
) -> _Found:
    """Return the best constants behind those host times of a layer and of its experts."""
    given = dict(zip(("layer_us", "experts_us", "latent_us"), eager))
    values = np.array([given.get(constant.name, constant.start) for constant in CONSTANTS])
    best = _Found(np.inf, values, np.empty(0), np.empty(0))
    for step in range(STEPS + LINE_STEPS):
        now, computed = _logs(name, values, mine)
        error = now - measured
        loss = float(np.nansum(np.abs(error) * weight))
        if loss >= best.loss:
            values = (values + best.values) / 2  # half the step back
            continue
        best = _Found(loss, values, error, _slopes(name, values, mine, now, computed, LINE if step < STEPS else ()))
        values = values + _step(error, best.slope, weight, values)
    return best


def weights(measured: np.ndarray) -> np.ndarray:
    """Return the weights [n, 3] of what was measured: times per token and to the first token, or tokens a second where
    no time per token is known."""
    known = ~np.isnan(measured)
    return np.stack([known[:, 0], FIRST_TOKEN * known[:, 1], known[:, 2] & ~known[:, 0]], axis=1).astype(np.float64)


def _with(name: str, values: np.ndarray) -> EngineProfile:
    fields = {constant.name: float(value) for constant, value in zip(CONSTANTS, values)}
    graphs = {"graph_tokens": 0} if "" < month_of(name) < CAPTURED else {}
    return EngineProfile(name=name, library=library_of(name), **fields, **graphs, **_facts(name))


def _facts(name: str) -> dict[str, str | bool]:
    """Return what is not fitted of an engine: what its code does."""
    known = engines().get(name, NOTHING)
    return {"policy": known.policy, "of_free": known.of_free}


def _logs(
    name: str, values: np.ndarray, mine: list[EngineSample], computed: list[ServedRequests] | None = None
) -> tuple[np.ndarray, list[ServedRequests]]:
    """Logarithms of what is predicted [n, 3], and what was computed for it, unless it is given."""
    profile = _with(name, values)
    found = [sample.computed(profile) for sample in mine] if computed is None else computed
    return np.log(np.array([sample.seen(one, profile) for sample, one in zip(mine, found, strict=True)])), found


def _slopes(
    name: str,
    values: np.ndarray,
    mine: list[EngineSample],
    now: np.ndarray,
    computed: list[ServedRequests],
    held: tuple[str, ...] = (),
) -> np.ndarray:
    """Derivatives of those by each constant [constants, n, 3], in units of its step; 0 by those that are `held`."""
    found = []
    for place, constant in enumerate(CONSTANTS):
        if constant.name in held:
            found.append(np.zeros_like(now))
            continue
        moved = values + constant.step * (np.arange(len(values)) == place)
        found.append(_logs(name, moved, mine, computed if constant.name in FRONT else None)[0] - now)
    return np.array(found)


def _step(error: np.ndarray, slope: np.ndarray, weight: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the change of the constants that lowers the weighted sum of absolute errors most, where these are as the
    derivatives say, within the bounds."""
    known = weight > 0
    unit = np.array([constant.step for constant in CONSTANTS])
    low = (np.array([constant.low for constant in CONSTANTS]) - values) / unit
    high = (np.array([constant.high for constant in CONSTANTS]) - values) / unit
    slopes = np.array([one[known] for one in slope])
    return unit * bounded_step(error[known], slopes, weight[known], low, high, small=SMALL)


def _left_out(
    error: np.ndarray, slope: np.ndarray, weight: np.ndarray, values: np.ndarray, group: list[str]
) -> np.ndarray:
    """Return the errors [n, 3] of every group under the constants of the others; NaN where too few others are left."""
    out, label = np.full(error.shape, np.nan), np.array(group)
    unit = np.array([constant.step for constant in CONSTANTS])
    for one in sorted(set(group)):
        held = label == one
        if (~held).sum() < FEWEST // 2:
            continue
        move = _step(error[~held], slope[:, ~held], weight[~held], values) / unit
        out[held] = error[held] + np.einsum("c,cnk->nk", move, slope[:, held])
    return out


def _profile(
    name: str, values: np.ndarray, mine: list[EngineSample], errors: dict[str, np.ndarray], weight: np.ndarray
) -> EngineProfile:
    """The profile as it is stored. Its spreads cover 80% of the rows of models (of engines) left out, of those in
    sample where none can be."""
    rounded = [float(f"{value:.3g}") for value in values]
    unseen = next((e for field, e in errors.items() if field in ("model", "profile") and not np.isnan(e).all()), None)
    unseen = errors["in_sample"] if unseen is None else unseen
    sources = ", ".join(sorted({sample.source for sample in mine}))
    models = len({sample.model for sample in mine})
    left = {field: figures(e, weight) for field, e in errors.items() if not np.isnan(e).all()}
    said = ", ".join(
        f"{text} {left[field]['median']:.1%}" for field, text in LEFT_WORDS.items() if field in left
    )  # fmt: skip
    return msgspec.structs.replace(
        _with(name, np.array(rounded)),
        title="No serving engine in particular" if name == "default" else f"{name}, as measured",
        sigma=_spread(main(unseen, weight)),
        front_sigma=_spread(first(unseen, weight)) if (weight[:, 1] > 0).any() else EngineProfile(name="").front_sigma,
        until=month_of(name),
        source=f"fitted to {len(mine)} measured servers of {models} models ({sources}); median errors: {said}",
        flagged=name == "default",
        left_out=left,
    )


#: What is left out, in words.
LEFT_WORDS = {
    "in_sample": "in sample",
    "model": "models left out",
    "hardware": "devices left out",
    "profile": "engines left out",
}


def main(error: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the errors of times per token, or tokens a second where no time per token is known."""
    found = np.where(weight[:, 0] > 0, error[:, 0], error[:, 2])[(weight[:, 0] > 0) | (weight[:, 2] > 0)]
    return found[~np.isnan(found)]


def first(error: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the errors of times to the first token."""
    found = error[:, 1][weight[:, 1] > 0]
    return found[~np.isnan(found)]


def figures(error: np.ndarray, weight: np.ndarray) -> dict[str, float]:
    """Return the median and the 90th percentile of absolute relative errors, and of times to the first token."""
    out = {}
    for prefix, logs in (("", main(error, weight)), ("ttft_", first(error, weight))):
        if len(logs):
            ape = np.abs(np.expm1(logs))
            out |= {
                f"{prefix}median": round(float(np.median(ape)), 4),
                f"{prefix}p90": round(float(np.quantile(ape, 0.9)), 4),
            }
    return out


def _spread(logs: np.ndarray) -> float:
    return round(float(np.quantile(np.abs(logs), 0.8)) / NORMAL_80, 3)


def report(found: list[EngineFit]) -> list[str]:
    """Return the fits as lines of text."""
    names = [constant.name for constant in CONSTANTS]
    lines = [f"{'profile':22s}{'rows':>6s}{'models':>8s}" + "".join(f"{name:>12s}" for name in names)]
    for one in found:
        values = "".join(f"{getattr(one.profile, name):12g}" for name in names)
        lines.append(f"{one.profile.name:22s}{one.rows:6d}{one.models:8d}{values}")
        for field, errors in one.profile.left_out.items():
            said = ", ".join(f"{key.replace('_', ' ')} {value:.1%}" for key, value in errors.items())
            lines.append(f"{'':10s}{LEFT_WORDS[field]}: {said}")
    return lines


def write(profiles: Iterable[EngineProfile], folder: Path) -> list[Path]:
    """Write a TOML file a profile, as the catalog holds them; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for profile in profiles:
        paths.append(folder / f"{profile.name.replace('-', '_')}.toml")
        write_bytes(paths[-1], as_toml(profile).encode())
    return paths


def as_toml(profile: EngineProfile) -> str:
    """Return a profile as a file holds it: what is not as usual."""
    usual = EngineProfile(name="")
    shown = set(EngineProfile.__struct_fields__) - ({"iterations"} if profile.published_as else set())
    fields = {f: getattr(profile, f) for f in EngineProfile.__struct_fields__ if f in shown}
    table = {f: value for f, value in fields.items() if f == "name" or value != getattr(usual, f)}
    return dumps({"format_version": FORMAT_VERSION, **msgspec.to_builtins(table)})
