"""Framework constants from measured steps: few, physical, shared by every model, plan and size of a framework.

Only host times, the memory passes of unfused kernels and what exchanges between nodes reach are fitted, on the mean
absolute log error with every group of rows weighing the same. The error that counts is the one with groups left out:
the rows of every shape of a model, whatever its name, are predicted with constants that never saw that shape.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from meshwright.calibrate.stacks import CONSTANTS, Belief, among_others, between_versions, with_versions
from meshwright.causes import CAUSE
from meshwright.cost import Costs, Framework, frameworks, standard
from meshwright.cost.framework import Defaults
from meshwright.errors import MeshwrightError
from meshwright.lower import Lowered
from meshwright.plan import check
from meshwright.simulate.step import simulate, timed
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.validate.cases import Case, case
from meshwright.validate.faults import faulty
from meshwright.validate.measured import refuse
from meshwright.validate.software import shape_of
from meshwright.validate.tables import find, number
from meshwright.validate.tables import numbered as numbered_rows

#: Constants that only rows with experts say anything of, and those that only ZeRO-3 between nodes says something of.
OF_MIXTURES, OF_SHARDED = ("host_us_per_dispatch",), ("exchange_share",)
#: What is not fitted where jobs measured their networks and leave a layer's exchange whole, and elsewhere: only the
#: former tell of a ring's steps.
LEFT_OUT = {True: "host_us_per_collective", False: "ring_steps"}
#: Rows a fit looks at, chosen by a hash, so that the same tables give the same constants.
MAX_ROWS = 160
MAX_FOLDS = 5
#: The usual mean absolute error of logarithms that constants cannot say, and the correlation of errors of one shape:
#: those of the steps of fitted profiles (a one-way analysis of variance of each; the means of variances over profiles).
NOISE, ALIKE = 0.07, 0.2
#: The share of a constant's variance that steps take away at least, if they say something of it.
TOLD = 0.5
#: A relative change of a constant that shows a slope, and the log error below which all errors weigh the same.
NUDGE, SHARP = 0.1, 0.005
#: Fewer rows than this cannot tell the constants apart.
MIN_ROWS = 8
#: What searches made of steps and of a belief before them.
Known = dict[tuple[object, ...], Belief]


class TimedQuestion(msgspec.Struct, frozen=True):
    """A question with the seconds it took, its step ready to be priced, and what it is left out with: the shape of the
    model, the device, the source; ``name`` is the software as the row says it."""

    asked: Case
    seconds: float
    group: str
    lowered: Lowered | None = None
    device: str = ""
    source: str = ""
    name: str = ""
    id: str = ""


class FrameworkFit(msgspec.Struct, frozen=True, kw_only=True):
    """A framework's constants, with mean absolute errors in sample and with each group left out; ``fitted_rows`` of the
    ``rows`` were looked at, ``bits`` are the widths of operands that a tenth of them or more have, and ``told`` are the
    constants that they say something of."""

    framework: str
    constants: dict[str, float]
    rows: int
    groups: int
    in_sample: float
    left_out: float | None
    fitted_rows: int = 0
    bits: tuple[int, ...] = (16,)
    told: tuple[str, ...] = ()

    @property
    def launches_alone(self) -> bool:
        """Whether the rows say how fast kernels are issued, and nothing of the bytes they move."""
        return "elementwise_passes" not in self.constants

    @property
    def pinned(self) -> tuple[str, ...]:
        """The constants that the rows say something of; none of rows that are launches alone, which are tests of
        software and no training."""
        return () if self.launches_alone else self.told


def sharing(costs_of: Callable[[Framework], Costs]) -> Callable[[Framework], Costs]:
    """Return the same costs of a framework, for trying constants: links follow from its defaults, and those that answer
    for one framework are not asked again for another of the same defaults."""
    known: dict[Defaults, Costs] = {}

    def of(framework: Framework) -> Costs:
        if framework.defaults not in known:
            known[framework.defaults] = costs_of(framework)
        return known[framework.defaults].under(framework)

    return of


def fit_all(
    folder: Path, costs_of: Callable[[Framework], Costs], *, progress: Callable[[str], None] = lambda _: None
) -> Iterator[FrameworkFit]:
    """Constants for every framework with enough timed rows in ``training_steps``; versions that share constants are
    fitted as one.

    Raises:
        MeshwrightError: V003 when the folder has no such table.
    """
    costs_of = sharing(costs_of)
    by_framework: dict[str, list[TimedQuestion]] = {}
    for name, found in timed_questions(folder, costs_of):
        by_framework.setdefault(name, []).append(found)
    for name, found in sorted(by_framework.items()):
        if len(found) < MIN_ROWS:
            progress(f"{name}: {len(found)} timed rows are too few to fit; the profile keeps its flagged defaults")
            continue
        progress(f"{name}: {len(found)} timed rows")
        yield _fit(name, by_framework, costs_of)


def timed_questions(folder: Path, costs_of: Callable[[Framework], Costs]) -> Iterator[tuple[str, TimedQuestion]]:
    """The timed rows of ``training_steps`` whose software is known, each with the profile that owns its constants.

    Raises:
        MeshwrightError: V003 when the folder has no such table.
    """
    path = find(folder, "training_steps")
    if path is None:
        raise MeshwrightError.one("V003", f"no training_steps table in {folder}", place=f"--data {folder}")
    numbered = numbered_rows(path, "training_steps")
    refuse(path, numbered)  # a constant is not fitted to what cannot have been measured
    shared: dict[str, Costs] = {}
    for _, row in numbered:
        seconds = number(row, "step_time_s")
        if seconds is None or row["outcome"] != "ok" or faulty(row):
            continue
        try:
            asked = case(row)
        except MeshwrightError:
            continue
        if "framework" in asked.assumed:
            continue  # nobody knows whose step it is
        if check(asked.plan, asked.model, asked.cluster, asked.train):
            continue
        costs = shared.get(asked.framework.name)
        if costs is None:
            costs = shared[asked.framework.name] = costs_of(asked.framework)
        lowered = simulate(asked.plan, asked.model, asked.cluster, asked.train, costs).lowered
        yield (
            asked.framework.constants_of or asked.framework.name,
            TimedQuestion(
                asked, seconds, shape_of(row), lowered, row["hardware"], row["source"], row["framework"], row["id"]
            ),
        )


def _fit(
    name: str, by_framework: dict[str, list[TimedQuestion]], costs_of: Callable[[Framework], Costs]
) -> FrameworkFit:
    found = by_framework[name]
    known: Known = {}
    before = _before(name, by_framework, costs_of, known)
    after = search(_sample(found, MAX_ROWS), costs_of, before, evidence=_evidence(found))
    constants = after.constants()
    folds = _folds(found)
    errors = []
    if len(folds) > 1:
        for fold in folds:
            held = [t for t in found if t.group in fold]
            constants_there = without(name, by_framework, lambda t, fold=fold: t.group in fold, costs_of, known)
            if constants_there is not None:
                errors.append(ratios(held, costs_of, constants_there) - 1)
    return FrameworkFit(
        framework=name,
        constants=constants,
        rows=len(found),
        groups=len({t.group for t in found}),
        in_sample=float(np.abs(ratios(found, costs_of, constants) - 1).mean()),
        left_out=float(np.abs(np.concatenate(errors)).mean()) if errors else None,
        fitted_rows=min(len(found), MAX_ROWS),
        bits=_bits(found),
        told=tuple(n for n in after.mean if after.sigma[n] ** 2 < (1 - TOLD) * before.sigma[n] ** 2),
    )


def without(
    name: str,
    by_framework: dict[str, list[TimedQuestion]],
    left: Callable[[TimedQuestion], bool],
    costs_of: Callable[[Framework], Costs] = standard,
    known: Known | None = None,
) -> dict[str, float] | None:
    """Return the constants of a framework that the questions say which are not `left` out, its own and those of its
    other versions; None where none of its own are. Searches that `known` has, of the same `costs_of`, are not made
    again: most folds leave every step of another version in place."""
    rest = {owner: [t for t in some if not left(t)] for owner, some in by_framework.items()}
    own = rest[name]
    if not own:
        return None
    known = {} if known is None else known
    return _short(own, costs_of, _before(name, rest, costs_of, known), known).constants()


def _short(found: list[TimedQuestion], costs_of: Callable[[Framework], Costs], before: Belief, known: Known) -> Belief:
    """The belief after a quick search over a sample of the steps."""
    sample, evidence = _sample(found, MAX_ROWS // 4), _evidence(found)
    # by their identity: questions live as long as the folds over them
    key = (*map(id, sample), evidence, *before.mean.items(), *before.sigma.items())
    if key not in known:
        known[key] = search(sample, costs_of, before, evidence=evidence, rounds=2)
    return known[key]


def _before(
    name: str, by_framework: dict[str, list[TimedQuestion]], costs_of: Callable[[Framework], Costs], known: Known
) -> Belief:
    """The belief about a framework's constants before its own steps: by other stacks, and by the steps of its other
    versions."""
    profiles = frameworks()
    family = profiles[name].family or name
    kin = {f.name for f in profiles.values() if family in (f.name, f.family, f.constants_of)}

    def among(one: str) -> Belief:
        return among_others(profiles[one], min(profiles[one].bits), kin)

    told = []
    for version in sorted(kin - {name}):
        if steps := by_framework.get(version):
            prior = among(version)
            told.append((prior, _short(steps, costs_of, prior, known)))
    return with_versions(among(name), told, between_versions())


def _bits(found: list[TimedQuestion]) -> tuple[int, ...]:
    low = sum(DTYPE_BYTES[t.asked.train.dtype] < 2 for t in found) / len(found)
    return tuple(bits for bits, share in ((8, low), (16, 1 - low)) if share >= 0.1)


def _sample(found: list[TimedQuestion], most: int) -> list[TimedQuestion]:
    if len(found) <= most:
        return found
    key = [hashlib.sha256(f"{t.asked.plan.text()} {t.group} {t.seconds}".encode()).digest() for t in found]
    return [found[i] for i in sorted(sorted(range(len(found)), key=key.__getitem__)[:most])]


def _folds(found: list[TimedQuestion]) -> list[set[str]]:
    """Assign whole groups to at most MAX_FOLDS folds in turn, in the order of a hash of their names."""
    names = sorted({t.group for t in found}, key=lambda g: hashlib.sha256(g.encode()).digest())
    folds: list[set[str]] = [set() for _ in range(min(MAX_FOLDS, len(names)))]
    for i, group in enumerate(names):
        folds[i % len(folds)].add(group)
    return folds


def ratios(
    found: list[TimedQuestion], costs_of: Callable[[Framework], Costs], constants: dict[str, float]
) -> np.ndarray:
    """Predicted over measured step times under some constants."""
    shared: dict[str, Costs] = {}
    out = []
    for t in found:
        framework = t.asked.framework
        costs = shared.get(framework.name)
        if costs is None:
            costs = shared[framework.name] = costs_of(msgspec.structs.replace(framework, **constants))
        out.append(timed(t.lowered, costs).step_time_s / t.seconds)
    return np.array(out)


def search(
    found: list[TimedQuestion],
    costs_of: Callable[[Framework], Costs],
    before: Belief,
    *,
    evidence: float,
    rounds: int = 4,
) -> Belief:
    """Return what is believed of the constants after some steps, which count as so many independent ones (`evidence`):
    the posterior's mode, and its standard deviation there.

    A step time bends where the host falls behind the device, so coordinates are first moved by factors, which jumps
    over bends; between them it is near linear in the constants, so damped least squares, reweighted towards absolute
    errors, walks the narrow valleys in which one constant stands for another.
    """
    weight = _weights(found)
    usual_of = {name: float(np.exp(mean)) for name, mean in before.mean.items()}
    left = set() if any(t.asked.model.mixtures for t in found) else set(OF_MIXTURES)
    if _launch_bound(found, costs_of, usual_of):
        left.add("elementwise_passes")
    if not any(t.asked.plan.layout.zero == 3 and t.asked.cluster.num_devices > 8 for t in found):
        left |= set(OF_SHARDED)
    measured = any(v.busbw_gb_s for t in found for island in t.asked.cluster.islands for v in island.levels)
    left.add(LEFT_OUT[measured and "tp" not in found[0].asked.framework.defaults.overlap])
    names = [name for name in CONSTANTS if name not in left]
    least, most = (np.log([CONSTANTS[n][i] for n in names]) for i in (1, 2))

    def errors(at: np.ndarray) -> np.ndarray:
        return np.log(ratios(found, costs_of, dict(zip(names, np.exp(at).tolist(), strict=True))))

    usual = np.clip([before.mean[n] for n in names], least, most)
    spread = np.array([before.sigma[n] for n in names])

    def noise(wrong: np.ndarray) -> float:
        """The mean size of errors that constants cannot say; what is known of it counts as a step for each constant."""
        return (float((np.abs(wrong) * weight).sum()) * evidence + NOISE * len(names)) / (evidence + len(names))

    def loss(wrong: np.ndarray, at: np.ndarray) -> float:
        return float((np.abs(wrong) * weight).sum() + (held * (at - usual) ** 2).sum())

    at = usual.copy()
    wrong = errors(at)
    # Laplace's errors and normal constants: minus the posterior's logarithm, over the evidence's weight
    held = NOISE / evidence / 2 / spread**2
    for step in (2.0, 1.5)[:rounds]:
        for i, sign in ((i, sign) for i in range(len(names)) for sign in (1, -1)):
            while True:
                tried = at.copy()
                tried[i] = np.clip(at[i] + sign * np.log(step), least[i], most[i])
                if tried[i] == at[i] or loss(now := errors(tried), tried) >= loss(wrong, at) - 1e-4:
                    break
                at, wrong = tried, now
    damping = 1e-2
    for _ in range(3 * rounds):
        held = noise(wrong) / evidence / 2 / spread**2
        slope = _slope(errors, at, wrong, most)
        pull = weight / np.maximum(np.abs(wrong), SHARP)
        # the gradient and curvature of half the loss's quadratic stand-in; the prior is quadratic already
        normal = slope.T @ (slope * pull[:, None]) + 2 * np.diag(held)
        downhill = -slope.T @ (pull * wrong) - 2 * held * (at - usual)
        while damping < 1e4:
            by = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            tried = np.clip(at + np.clip(by, -1, 1), least, most)
            if loss(now := errors(tried), tried) < loss(wrong, at) - 1e-4:
                at, wrong, damping = tried, now, damping / 4
                break
            damping *= 4
        else:
            break
    slope = _slope(errors, at, wrong, most)
    # a Laplace error of mean size b tells 1 / b^2 of what moves it
    told = slope.T @ (slope * weight[:, None]) * evidence / noise(wrong) ** 2 + np.diag(spread**-2)
    sigma = np.sqrt(np.diag(np.linalg.inv(told)))
    return Belief(dict(zip(names, at.tolist(), strict=True)), dict(zip(names, sigma.tolist(), strict=True)))


def _slope(
    errors: Callable[[np.ndarray], np.ndarray], at: np.ndarray, wrong: np.ndarray, most: np.ndarray
) -> np.ndarray:
    """Slopes of the errors [rows, constants], on the side that stays within the bounds."""
    moves = np.where(at + NUDGE <= most, NUDGE, -NUDGE)
    return np.stack([(errors(at + move) - wrong) / move.sum() for move in np.diag(moves)], axis=1)


def _launch_bound(found: list[TimedQuestion], costs_of: Callable[[Framework], Costs], start: dict[str, float]) -> bool:
    """Whether the host is most of the time of most rows: such rows say how fast kernels are issued, and nothing of the
    bytes they move."""
    shared: dict[str, Costs] = {}
    shares = []
    for t in found:
        name = t.asked.framework.name
        if name not in shared:
            shared[name] = costs_of(msgspec.structs.replace(t.asked.framework, **start))
        parts = timed(t.lowered, shared[name]).priced.parts.sum(axis=0)
        shares.append(float(parts[CAUSE["host"]] / parts.sum()))
    return float(np.median(shares)) > 0.5


def _weights(found: list[TimedQuestion]) -> np.ndarray:
    """Every row's in the sum of errors: as much as it says beside the others of its shape, whose errors are alike."""
    counts = Counter(t.group for t in found)
    each = np.array([1 / (1 + (counts[t.group] - 1) * ALIKE) for t in found])
    return each / each.sum()


def _evidence(found: list[TimedQuestion]) -> float:
    """The number of independent steps that these count as."""
    counts = Counter(t.group for t in found)
    return sum(n / (1 + (n - 1) * ALIKE) for n in counts.values())
