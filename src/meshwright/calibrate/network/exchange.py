"""Constants of token exchange from ``moe_a2a.csv``: DeepEP's and TensorRT-LLM's dispatch and combine.

DeepEP's normal kernels were measured with many counts of multiprocessors; those with its default of 20 are used.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.atomic import write_bytes
from meshwright.calibrate.network.rows import group_of
from meshwright.calibrate.network.solve import minimise
from meshwright.calibrate.tables import find
from meshwright.cost.exchange import PHASES, ExchangeConstants, ExchangeProfile, MoeExchange, exchange_seconds
from meshwright.cost.fabric import rounded, shipped

#: Multiprocessors the kernels communicate with: DeepEP's default, or a library that does not say.
SMS = ("0", "20")
NAMES = ExchangeConstants.__struct_fields__
START = ExchangeConstants(
    start_us=15.0, token_ns=10.0, copy_ns=2.0, expert_us=0.01, node_us=10.0, fraction=0.6, network_fraction=0.6
)
LOOSENESS = 1.5
#: Weight of one row against the prior: rows of one group differ only in tokens.
ROW_WEIGHT = 0.2
FOLDS = 4
SOURCE = "fitted to ai-dynamo/aiconfigurator, Apache-2.0: "


class MeasuredExchange(NamedTuple):
    """One measured exchange; `configuration` is the whole group a holdout takes or leaves."""

    fabric: str
    mode: str
    library: str
    item: MoeExchange
    seconds: float
    configuration: tuple[str, ...]


def read_runs(data_dir: Path) -> list[MeasuredExchange]:
    """The dispatch and combine rows of a folder's ``moe_a2a.csv``; none when it has no such table."""
    path = find(data_dir, "moe_a2a")
    if path is None:
        return []
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        return [_run(row) for row in csv.DictReader(file) if row["comm_sms"] in SMS and row["phase"] in PHASES]


def _run(row: dict[str, str]) -> MeasuredExchange:
    group, device = group_of({**row, "network": ""})
    mode = row["mode"]
    if mode == "nvlink_alltoall":
        mode = "one_sided" if "OneSided" in row["library"] else "two_sided"
    item = MoeExchange(
        phase=row["phase"],
        tokens=int(row["tokens_per_rank"]),
        hidden=int(row["hidden"]),
        top_k=int(row["top_k"]),
        experts=int(row["experts"]),
        group=group,
        dtype=row["dtype"],
    )
    named = tuple(row[c] for c in ("hardware", "mode", "phase", "gpus", "hidden", "top_k", "experts"))
    fabric = shipped().find(group.hops[0], device.name, device.scale_up)[0].name
    return MeasuredExchange(fabric, mode, row["library"], item, float(row["latency_us"]) * 1e-6, named)


def fit(data_dir: Path) -> tuple[ExchangeProfile, ...]:
    """A profile for each fabric, mode and phase; what a fabric does not tell (its network) is as on the first."""
    classes: dict[tuple[str, str, str], list[MeasuredExchange]] = defaultdict(list)
    for run in read_runs(data_dir):
        classes[run.mode, run.item.phase, run.fabric].append(run)
    found: dict[tuple[str, str, str], ExchangeConstants] = {}
    profiles = []
    for (mode, phase, fabric), runs in sorted(classes.items()):
        prior = next((c for (m, p, _), c in found.items() if (m, p) == (mode, phase)), START)
        found[mode, phase, fabric] = fit_runs(runs, prior)
        profiles.append(_profile(fabric, mode, phase, runs, found[mode, phase, fabric], prior))
    return tuple(profiles)


def _profile(
    fabric: str,
    mode: str,
    phase: str,
    runs: list[MeasuredExchange],
    constants: ExchangeConstants,
    prior: ExchangeConstants,
) -> ExchangeProfile:
    unseen = held_out_errors(runs, prior)
    tokens = [run.item.tokens for run in runs]
    return ExchangeProfile(
        fabric=fabric,
        mode=mode,
        phase=phase,
        source=SOURCE + ", ".join(sorted({run.library for run in runs})),
        constants=constants,
        sigma=float(np.quantile(np.abs(unseen), 0.8)) / 1.2816,
        median_error=float(np.median(np.abs(np.expm1(unseen)))),
        rows=len(runs),
        tokens_range=(min(tokens), max(tokens)),
        ranks=tuple(sorted({run.item.group.size for run in runs})),
    )


def held_out_errors(runs: list[MeasuredExchange], prior: ExchangeConstants) -> np.ndarray:
    """Logarithms of predicted over measured, each group of rows predicted from the folds without it."""
    errors = []
    for fold in range(FOLDS):
        inside = [run for run in runs if _fold(run) != fold]
        outside = [run for run in runs if _fold(run) == fold]
        if inside and outside:
            constants = fit_runs(inside, prior)
            errors.append(_errors(outside, constants))
    return np.concatenate(errors) if errors else _errors(runs, prior)


def _fold(run: MeasuredExchange) -> int:
    return hashlib.sha256("|".join(run.configuration).encode()).digest()[0] % FOLDS


def fit_runs(runs: list[MeasuredExchange], prior: ExchangeConstants) -> ExchangeConstants:
    """The constants nearest the prior that predict some runs."""
    centre = np.log([getattr(prior, name) for name in NAMES])
    weights = np.full(len(runs), ROW_WEIGHT)
    z, _ = minimise(lambda v: _errors(runs, _constants(v)), centre, centre, weights, LOOSENESS)
    return _constants(z)


def _constants(z: np.ndarray) -> ExchangeConstants:
    values = dict(zip(NAMES, map(float, np.exp(z))))
    shares = ("fraction", "network_fraction")
    return ExchangeConstants(**{name: min(1.0, v) if name in shares else v for name, v in values.items()})


def _errors(runs: list[MeasuredExchange], constants: ExchangeConstants) -> np.ndarray:
    guess = [exchange_seconds(run.item, constants, each_expert=run.mode == "low_latency") for run in runs]
    return np.log(np.array(guess) / np.array([run.seconds for run in runs]))


def write(profiles: tuple[ExchangeProfile, ...], folder: Path) -> None:
    """All profiles in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(profiles))), indent=1)
    write_bytes(folder / "profiles.json", text + b"\n")
