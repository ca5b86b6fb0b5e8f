"""Network profiles from measured collectives: fit, check on whole groups held out, write to the catalog.

A profile is fitted for every fabric of :data:`FABRICS` that the table measures, from the inside out: what lies
under a network is known when the network is fitted. Each is drawn towards its kind's mean, and that mean is the
profile of fabrics nobody measured; its spread is how badly it predicts a fabric left out.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from math import log
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.atomic import write_bytes
from meshwright.calibrate.network import exchange as network_exchange
from meshwright.calibrate.network.custom import fit_custom
from meshwright.calibrate.network.jobs import read_job_series, with_steps_at_scale
from meshwright.calibrate.network.report import FitReport, Predicted, predict
from meshwright.calibrate.network.rows import FLAGS, Series, group_of, read_series
from meshwright.calibrate.network.solve import START, SeriesCurve, to_constants, to_vector
from meshwright.calibrate.network.solve import fit as fit_constants
from meshwright.cost.exchange import ExchangeProfile
from meshwright.cost.fabric import FORMAT_VERSION, Constants, FabricProfile, Fabrics, names_of, profile_text
from meshwright.cost.network import Network
from meshwright.spec.cluster import load_device
from meshwright.work import Collective, Group, Hop

__all__ = ["fit", "group_of", "run", "write"]


class Fabric(NamedTuple):
    """One fabric to fit: its name, kind, the names it answers to, and whether it counts towards its kind's mean."""

    name: str
    kind: str
    answers: tuple[str, ...]
    typical: bool = True


#: From the inside out. Not typical: a bridge that was not used, networks run over sockets or on an old library.
FABRICS = (
    Fabric("nvlink2", "nvlink", ("nvlink2.nvlink",)),
    Fabric("nvlink3", "nvlink", ("nvlink3.nvlink",)),
    Fabric("nvlink3_mesh", "nvlink", ("nvlink3.nvlink.mesh",)),
    Fabric("nvlink4", "nvlink", ("nvlink4.nvlink",)),
    Fabric("nvlink5", "nvlink", ("nvlink5.nvlink",)),
    Fabric("nvlink_bridge", "nvlink", ("nvlink_bridge.nvlink_bridge",)),
    Fabric("a40_pair", "nvlink", ("a40.nvlink_bridge",), typical=False),
    Fabric("pcie4_host", "pcie", ("l40s.pcie",)),
    Fabric("pcie5_switch", "pcie", ("rtx_pro_6000_server.pcie",)),
    Fabric("pcie3_host", "pcie", ("pcie3.pcie",)),
    Fabric("pcie_between_pairs", "pcie", ("nvlink_bridge.pcie",)),
    Fabric("efa", "network", ("efa",)),
    Fabric("infiniband_ndr", "network", ("gh200.fabric",)),
    Fabric("infiniband_hdr", "network", ("a100_40gb_sxm.fabric",)),
    Fabric("roce", "network", ("h200_sxm.fabric",)),
    Fabric("omni_path", "network", ("omni_path",), typical=False),
    Fabric("sockets", "network", ("v100_pcie_16gb.unstated",), typical=False),
)
KINDS = ("nvlink", "pcie", "network")
#: Relative spread of a kind without measurements.
NOTHING_KNOWN = 0.5
#: How far, in logarithms, constants may lie from where the first fit starts, and from their kind's mean.
LOOSE, TIGHT = 1.0, 0.6
#: Parts the groups are held out in, for the spreads.
FOLDS = 4
#: A series is unstable when more than this share of its steps to a larger size fall below this share of the time.
UNSTABLE_SHARE, UNSTABLE_FALL = 0.2, 0.8
#: A fabric measured by fewer values than its constants is the kind's in all but what they tell; so are its spreads.
FEW = 24
#: Where a source's numbers were published, and under what licence.
SOURCES = {
    "aiconfigurator": "ai-dynamo/aiconfigurator, Apache-2.0",
    "apex_plus": "microsoft/apex_plus, MIT",
    "aws_nccl_tests": "aws-samples/awsome-distributed-training, MIT-0",
    "bigscience_jeanzay": "bigscience-workshop/bigscience, Apache-2.0",
    "distca": "hao-ai-lab/DistCA, Apache-2.0",
    "echo_azure_ndv4": "NetX-lab/Echo, MIT",
    "estimate_train_time_perlmutter": "DebarghaG/estimate-train-time, MIT",
    "estimate_train_time_vista": "DebarghaG/estimate-train-time, MIT",
    "mlperf_training_v5.0": "mlcommons/training_results_v5.0, Apache-2.0",
    "vidur": "microsoft/vidur, MIT",
}
Memo = dict[tuple, Constants]
"""Fits already made, by what they were made from."""


def held_out(series: Series, share: float) -> bool:
    """Whether a whole group (source, hardware, op, ranks) is kept from the fit: a hash decides, the same always."""
    return _hash(series) < share * 2**32


def _hash(series: Series) -> int:
    digest = hashlib.sha256("|".join(map(str, series.held_by)).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def fit(data_dir: Path) -> tuple[FabricProfile, ...]:
    """The profiles of a folder of measurements, their spreads from whole groups held out in turn."""
    return with_steps_at_scale(fit_series(read_series(data_dir), folds=FOLDS), read_job_series(data_dir))


def fit_series(series: Iterable[Series], *, folds: int = 0) -> tuple[FabricProfile, ...]:
    """Return the profiles fitted to the clean series, those without a known fault and with stable times.

    With `folds` > 0 the spread of a profile is that of cross-validation over so many folds of whole groups (source,
    hardware, op, ranks); with 0 it is that of the fit's own residuals."""
    used = [s for s in series if usable(s)]
    profiles = _fit(used)
    if not folds:
        return profiles
    unseen: dict[tuple[str, str], list[float]] = defaultdict(list)
    for fold in range(folds):
        inside = [s for s in used if _hash(s) % folds != fold]
        network = _fit(inside)
        for one in used:
            fabric = fabric_of(one.group.hops[-1], one)
            if fabric and one.library == "nccl" and _hash(one) % folds == fold:
                unseen[fabric.name, one.op] += log_errors(network, one)
    return tuple(_with_spread(p, unseen) for p in profiles)


def _with_spread(profile: FabricProfile, unseen: dict[tuple[str, str], list[float]]) -> FabricProfile:
    sigma = {op: spread(np.array(unseen[profile.name, op])) for op in profile.sigma if (profile.name, op) in unseen}
    return msgspec.structs.replace(profile, sigma=profile.sigma | sigma)


def log_errors(profiles: Iterable[FabricProfile], series: Series) -> list[float]:
    """Logarithm of predicted over measured, at every size of a series."""
    network = Network(Fabrics(tuple(profiles)), library=series.library, eager=series.eager)
    found = []
    for num_bytes, seconds in zip(series.num_bytes, series.seconds):
        work = Collective(op=series.op, num_bytes=num_bytes, group=series.group)
        found.append(log(network(work, series.device).seconds / seconds))
    return found


def usable(series: Series) -> bool:
    """Neither a known fault nor so unstable that it tells no constant (larger sizes often far faster)."""
    if any(flag in series.flag for flag in FLAGS):
        return False
    seconds = [t for _, t in sorted(zip(series.num_bytes, series.seconds))]
    falls = sum(later < UNSTABLE_FALL * before for before, later in pairwise(seconds))
    return falls <= UNSTABLE_SHARE * len(seconds)


def _fit(used: list[Series], memo: Memo | None = None, only: str = "") -> tuple[FabricProfile, ...]:
    """The profiles of some series. `memo` keeps fits that others will share; `only` is the device that is to be
    predicted: fabrics it has no part in are left at their first fit."""
    memo = {} if memo is None else memo
    by_fabric: dict[str, list[Series]] = defaultdict(list)
    for one in used:
        fabric = fabric_of(one.group.hops[-1], one)
        if fabric:
            by_fabric[fabric.name].append(one)
    measured = [f for f in FABRICS if any(s.library == "nccl" for s in by_fabric[f.name])]
    loose = _constants(measured, by_fabric, dict.fromkeys(KINDS, START), LOOSE, memo)
    centres = {kind: _mean([loose[f.name] for f in measured if f.kind == kind and f.typical]) for kind in KINDS}
    wanted = [f for f in measured if not only or _touches(f, only)]
    final = loose | _constants(wanted, by_fabric, centres, TIGHT, memo)
    kinds = _kinds(measured, by_fabric, loose, final, centres)
    wide = {profile.name: profile.sigma["*"] for profile in kinds}
    return (*kinds, *(_profile(f, final, by_fabric[f.name], wide[f.kind]) for f in wanted))


def _touches(fabric: Fabric, device: str) -> bool:
    """Whether a device may be on a fabric: a network is anyone's."""
    known = load_device(device)
    return fabric.kind == "network" or any(
        answer.split(".")[0] in (known.name, known.scale_up) for answer in fabric.answers
    )


def fabric_of(hop: Hop, series: Series) -> Fabric | None:
    for name in names_of(hop, series.device.name, series.device.scale_up):
        for fabric in FABRICS:
            if name in fabric.answers:
                return fabric
    return None


def _constants(
    measured: list[Fabric],
    by_fabric: dict[str, list[Series]],
    priors: dict[str, Constants],
    looseness: float,
    memo: Memo,
) -> dict[str, Constants]:
    found: dict[str, Constants] = {}
    for fabric in measured:
        curves, prior = _curves(by_fabric[fabric.name], found, priors), priors[fabric.kind]
        key = (
            prior,
            looseness,
            tuple((c.op, c.group, c.inside, len(c.num_bytes), c.log_seconds.sum()) for c in curves),
        )
        if key not in memo:
            memo[key] = fit_constants(curves, prior, looseness)
        found[fabric.name] = memo[key]
    return found


def _curves(series: list[Series], found: dict[str, Constants], priors: dict[str, Constants]) -> list[SeriesCurve]:
    """Group the NCCL series by collective and group, each with the constants of the fabrics inside the outermost one.

    The outermost level's constants are the unknowns of the fit; an inner level without constants yet has NVLink's."""
    alike: dict[tuple[str, Group], list[Series]] = defaultdict(list)
    for one in series:
        if one.library == "nccl":
            alike[one.op, one.group].append(one)
    curves = []
    for (_, group), together in alike.items():
        fabrics = [fabric_of(hop, together[0]) for hop in group.hops[:-1]]
        inside = (found[f.name] if f and f.name in found else priors["nvlink"] for f in fabrics)
        curves.append(SeriesCurve(together, tuple(inside)))
    return curves


def _mean(constants: list[Constants]) -> Constants:
    return to_constants(np.mean([to_vector(c) for c in constants], axis=0)) if constants else START


def _kinds(
    measured: list[Fabric],
    by_fabric: dict[str, list[Series]],
    loose: dict[str, Constants],
    final: dict[str, Constants],
    centres: dict[str, Constants],
) -> list[FabricProfile]:
    """A profile for each kind: the mean of its typical fabrics; its spread is its error on each of them left out."""
    profiles = []
    for kind in KINDS:
        typical = [f for f in measured if f.kind == kind and f.typical]
        parts = []
        for fabric in typical:
            others = _mean([loose[f.name] for f in typical if f is not fabric])
            curves = _curves(by_fabric[fabric.name], final, centres)
            parts += [(c.op, c.error(others)) for c in curves]
        errors = _errors(parts)
        sigma = {op: spread(e) for op, e in errors.items() if len(e) >= FEW}
        sigma["*"] = spread(np.concatenate(list(errors.values()))) if errors else NOTHING_KNOWN
        names = ", ".join(f.name for f in typical)
        profiles.append(
            FabricProfile(
                format_version=FORMAT_VERSION,
                name=kind,
                kind=kind,
                answers=(),
                source=f"mean of {names}; spread: each predicted from the others" if names else "no measurements",
                constants=centres[kind],
                sigma=sigma,
            )
        )
    return profiles


def _profile(fabric: Fabric, constants: dict[str, Constants], series: list[Series], wide: float) -> FabricProfile:
    curves = _curves(series, constants, dict.fromkeys(KINDS, START))
    errors = _errors((c.op, c.error(constants[fabric.name])) for c in curves)
    sizes = [b for s in series for b in s.num_bytes]
    return FabricProfile(
        format_version=FORMAT_VERSION,
        name=fabric.name,
        kind=fabric.kind,
        answers=fabric.answers,
        source="fitted to " + "; ".join(sorted({SOURCES.get(s.source, s.source) for s in series})),
        constants=constants[fabric.name],
        sigma={op: spread(e) for op, e in errors.items() if len(e) >= FEW} | {"*": wide},
        custom=fit_custom(series, constants[fabric.name]),
        rows=sum(len(s.seconds) for s in series),
        bytes_range=(min(sizes), max(sizes)),
        ranks=tuple(sorted({s.group.size for s in series})),
        median_error={op: float(np.median(np.abs(np.expm1(e)))) for op, e in errors.items()},
    )


def _errors(parts: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    gathered: dict[str, list[np.ndarray]] = defaultdict(list)
    for name, error in parts:
        gathered[name].append(error)
    return {name: np.concatenate(parts) for name, parts in sorted(gathered.items())}


def spread(log_errors: np.ndarray) -> float:
    """The standard deviation whose 80% interval holds 80% of the errors (normal: 1.2816 of it)."""
    return max(0.02, float(np.quantile(np.abs(log_errors), 0.8)) / 1.2816)


def run(data_dir: Path, holdout: float = 0.2, out: Path | None = None) -> FitReport:
    """Fit, print how well, and write one profile a file to `out` when it is given.

    Raises:
        MeshwrightError: N002, N003 for the table.
    """
    series = read_series(Path(data_dir))
    trained = fit_series([s for s in series if not held_out(s, holdout)], folds=FOLDS)
    profiles = fit_series(series, folds=FOLDS)
    memo: Memo = {}
    report = FitReport(
        held_out=predict(trained, [s for s in series if held_out(s, holdout)]),
        in_sample=predict(profiles, series),
        device_out=[row for name in _devices(series) for row in _without(name, series, memo)],
        profiles=with_steps_at_scale(profiles, read_job_series(Path(data_dir))),
    )
    exchanges = network_exchange.fit(Path(data_dir))
    print(report.text())
    print("\n".join(_exchange_lines(exchanges)))
    if out is not None:
        write(report.profiles, Path(out))
        if exchanges:
            network_exchange.write(exchanges, Path(out) / "exchange")
    return report


def _exchange_lines(profiles: tuple[ExchangeProfile, ...]) -> list[str]:
    lines = ["", "token exchange: rows, median |error| on groups held out, spread"] if profiles else []
    return lines + [
        f"  {f'{p.fabric} {p.mode} {p.phase}':<58} {p.rows:>6} {p.median_error:7.1%} {p.sigma:7.1%}" for p in profiles
    ]


def _devices(series: list[Series]) -> list[str]:
    return sorted({s.device.name for s in series})


def _without(name: str, series: list[Series], memo: Memo) -> list[Predicted]:
    """The rows of one device, predicted from all others."""
    others = _fit([s for s in series if s.device.name != name and usable(s)], memo, name)
    return predict(others, [s for s in series if s.device.name == name])


def write(profiles: Iterable[FabricProfile], folder: Path) -> None:
    """One JSON file a profile."""
    folder.mkdir(parents=True, exist_ok=True)
    for profile in profiles:
        write_bytes(folder / f"{profile.name}.json", profile_text(profile))
