"""A framework profile for the user's own stack, from a few of its runs: one Bayesian step from what is known of others.

A run is a question and the seconds its step took, and where it is stated the peak of its memory. The prior is a
mixture: half of it is the middle of all stacks, the other half every stack that is known, as one stack overlaps and
fuses what another does not, which no constant says; around each its constants vary together as those of the known
stacks do. Words that some stacks have and others have not, such as the first FlashAttention or CUDA graphs
(``runs_words.py``), no constant says either: the middle of all stacks stands there with and without each. The kind
whose evidence in the runs is the largest is taken (or the one that is named), and within
it the posterior's mode, by damped least squares over the logarithms. The error that counts is of runs left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.intervals import LEAST_SIGMA
from meshwright.calibrate import logs
from meshwright.calibrate.framework import CONSTANTS, sharing
from meshwright.calibrate.runs_memory import peak_errors, with_peaks
from meshwright.calibrate.runs_words import having, likely, open_words
from meshwright.cost import Costs, Framework, frameworks, load_framework
from meshwright.cost.framework import overlapped_as_usual
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan, check
from meshwright.plan import parse as parse_plan
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import Model
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import DTYPE_BYTES, Train
from meshwright.spec.workload import parse as parse_train
from meshwright.validate.tables import number, text_of

#: Columns of a file of runs: the words of a question, and the seconds of a step or the log that says them.
WORDS = ("model", "on", "train", "plan")
TIMED = ("step_time_s", "log")
#: Constants that are updated, with the smallest standard deviation of their logarithm in the prior. A ring's steps are
#: the job's network's and no other stack's: theirs is that of a constant that nobody pins (``stacks.among_others``).
UPDATED = {
    "elementwise_passes": 0.3,
    "host_us_per_kernel": 0.5,
    "host_us_per_collective": 0.5,
    "host_us_per_pass": 0.7,
    "ring_steps": 1.2,
    "kernel_slowdown": 0.15,
}
#: Relative error of a step that the constants cannot say: about that of fitted profiles on models left out. Errors of
#: more than so many of these count by their size, and no longer by its square: a run may be an outlier.
OBSERVED, ROBUST = 0.1, 1.5
#: Degrees of freedom of the distribution under which kinds of stacks are weighed: few, so that one odd run among a
#: handful does not decide.
FREEDOM = 4.0
#: A word changes a run whose predicted time it moves by this share.
CHANGES = 0.002
#: Step of the logarithms for a slope; the factor on kernels is better known than the others.
NUDGE = {"kernel_slowdown": 0.05}
#: Smallest and largest values that are believable; of the slowdown those of the factor on kernels.
BOUNDS = {name: CONSTANTS[name][1:] for name in UPDATED if name in CONSTANTS} | {"kernel_slowdown": (0.7, 1.6)}
ROUNDS, FOLDS = 6, 8
#: The loss that another round has to save.
ENOUGH = 0.02
#: What a peak may be of, and more than any device has.
KINDS, MOST_MEMORY = ("allocated", "reserved"), 1e13
#: Steps longer than this are a unit mixed up (milliseconds for seconds).
LONGEST_S = 7 * 86_400.0


class OwnRun(NamedTuple):
    """A run: the line of the file, its question with the plan in the user's words, the seconds of its step, and the
    peak of its memory in bytes with its kind where that is stated."""

    line: int
    model: Model
    cluster: Cluster
    train: Train
    plan: Plan
    seconds: float
    words: str = ""
    peak_bytes: float = 0.0
    peak_kind: str = "reserved"

    def under(self, framework: Framework) -> OwnRun:
        """Return the run as one of a framework, which overlaps what it does where the words leave that open."""
        if not self.words:
            return self
        plan = parse_plan(self.words).on(self.cluster.num_devices)
        return self._replace(plan=overlapped_as_usual(framework, plan, self.words, self.model, self.cluster))


class OwnProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The updated profile, with the mean absolute errors of the runs in sample, with each left out of the step, and
    under the prior alone; ``rows`` are (line, measured seconds, seconds predicted while it was left out). ``peaks`` is
    the error of the peaks that runs state, in sample."""

    framework: Framework
    in_sample: float
    left_out: float | None
    before: float
    rows: tuple[tuple[int, float, float], ...]
    peaks: float | None = None


def read(path: Path, framework: Framework, *, keep_good: bool = False) -> tuple[list[OwnRun], list[Diagnostic]]:
    """The runs of a CSV file, and what is wrong with others of its rows where `keep_good` lets those go.

    Raises:
        MeshwrightError: V001 unreadable, V002 missing columns, V008 for every row that cannot be a run, with its line.
    """
    reader = csv.DictReader(io.StringIO(text_of(path)))
    columns = tuple(reader.fieldnames or ())
    missing = [c for c in WORDS if c not in columns] + ([] if set(TIMED) & set(columns) else ["step_time_s or log"])
    if missing:
        raise MeshwrightError.one(
            "V002",
            f"the file of runs has no column {', '.join(missing)}",
            place=f"{path}:1",
            help=f"{', '.join(WORDS)} in the words of meshwright predict, and step_time_s in seconds, or log",
        )
    found: list[OwnRun] = []
    wrong: list[Diagnostic] = []
    for cells in reader:
        row = {k: (v or "").strip() for k, v in cells.items() if isinstance(k, str)}
        place = f"{path}:{reader.line_num}"
        try:
            found.append(_run(row, reader.line_num, path.parent, framework))
        except MeshwrightError as error:
            wrong += [
                Diagnostic(code="V008", message=f"{d.code}: {d.message}", place=f"{place} {d.place}", help=d.help)
                for d in error.diagnostics
            ]
    if wrong and not keep_good:
        raise MeshwrightError(wrong)
    if not found:
        raise MeshwrightError(wrong or [Diagnostic(code="V008", message="no run in the file", place=f"{path}:1")])
    return found, wrong


def _run(row: dict[str, str], line: int, folder: Path, framework: Framework) -> OwnRun:
    cluster, train = load_cluster(row["on"]), parse_train(row["train"], place="train")
    model, plan = load_model(row["model"]), parse_plan(row["plan"]).on(cluster.num_devices)
    plan = overlapped_as_usual(framework, plan, row["plan"], model, cluster)
    if illegal := check(plan, model, cluster, train):
        raise MeshwrightError(illegal)
    seconds = number(row, "step_time_s")
    if seconds is None and row.get("log"):
        tokens = train.tokens_per_step / cluster.num_devices
        seconds = logs.read(folder / row["log"], sequences=train.global_batch, tokens_per_device=tokens).seconds
    if seconds is None or not 0 < seconds < LONGEST_S:
        said = row.get("step_time_s") or "nothing"
        raise MeshwrightError.one(
            "V008", f"a step of {said!r} seconds", place="step_time_s", help="the seconds of one optimizer step"
        )
    peak, kind = number(row, "peak_memory_gb"), row.get("memory_kind") or "reserved"
    if kind not in KINDS or (peak is not None and not 0 < peak * 1e9 < MOST_MEMORY):
        said = f"{row.get('peak_memory_gb')!r} GB, {kind}"
        help = f"1e9 bytes of one device, {' or '.join(KINDS)} as torch says them"
        raise MeshwrightError.one("V008", f"a peak of {said}", place="peak_memory_gb", help=help)
    return OwnRun(line, model, cluster, train, plan, seconds, row["plan"], (peak or 0.0) * 1e9, kind)


def known_stacks(without: tuple[str, ...] = ()) -> list[Framework]:
    """Every stack that was fitted to measured steps, one of each that share constants, but those of some names."""
    fitted = (f for f in frameworks().values() if not f.flagged and not f.constants_of)
    return [f for f in fitted if f.name not in without]


class Weighed(NamedTuple):
    """A kind of stack that runs may be of: errors of the runs at its constants as logarithms [runs], their slopes
    [runs, constants], and the logarithm of how likely it is before anything is known."""

    kind: Framework
    wrong: np.ndarray
    slope: np.ndarray
    before: float


class StackKinds:
    """The kinds of stacks that runs may be of: `base`, as likely as all `others` together, and those.

    Of the words that `base` leaves open and that change what is predicted for a run each is as likely as it is among
    the others, whatever the rest are; they are tried one after the other, so long as they make the runs likelier."""

    def __init__(
        self, runs: list[OwnRun], base: Framework, others: list[Framework], costs_of: Callable[[Framework], Costs]
    ):
        self.runs, self.base, self.costs_of = runs, base, costs_of
        self.others = [Weighed(one, *_slopes(runs, one, _logs(one), costs_of), 0.0) for one in others]
        self._with: dict[frozenset[str], Weighed] = {}
        self._share = log(max(1, len(others)))
        plain = errors(runs, base, costs_of)
        bits = 8 if any(DTYPE_BYTES[run.train.dtype] < 2 for run in runs) else 16
        changed = {word: errors(runs, having(base, frozenset({word})), costs_of) for word in open_words(base, bits)}
        moved = [word for word, wrong in changed.items() if np.abs(wrong - plain).max() > CHANGES]
        self.words = {word: likely(word, base, bits, others) for word in moved}

    def having(self, words: frozenset[str]) -> Weighed:
        """Return the base with some words."""
        if words not in self._with:
            kind = having(self.base, words)
            before = sum(log(share if word in words else 1 - share) for word, share in self.words.items())
            found = _slopes(self.runs, kind, _logs(kind), self.costs_of)
            self._with[words] = Weighed(kind, *found, self._share + before)
        return self._with[words]

    def likeliest(self, known: list[Framework], pick: list[int]) -> Framework:
        """Return the kind for which some of the runs are the strongest evidence, under a spread of its constants like
        that of the known stacks."""
        words: frozenset[str] = frozenset()
        best = self.having(words)
        while len(words) < len(self.words):
            more = [words | {word} for word in self.words if word not in words]
            found = max(more, key=lambda w: evidence(self.having(w), known, pick))
            if evidence(self.having(found), known, pick) <= evidence(best, known, pick):
                break
            words, best = found, self.having(found)
        return max([best, *self.others], key=lambda one: evidence(one, known, pick)).kind


def evidence(one: Weighed, known: list[Framework], pick: list[int]) -> float:
    """Return the logarithm of how likely a kind of stack is after some of the runs, but for a constant."""
    wrong, slope = one.wrong[pick], one.slope[pick]
    covariance = slope @ prior(one.kind, known)[1] @ slope.T + OBSERVED**2 * np.eye(len(pick))
    off = float(wrong @ np.linalg.solve(covariance, wrong))
    size = float(np.linalg.slogdet(covariance)[1])
    return one.before - 0.5 * ((FREEDOM + len(pick)) * log(1 + off / FREEDOM) + size)


def fit(
    runs: list[OwnRun],
    base: Framework,
    costs_of: Callable[[Framework], Costs],
    name: str = "own",
    kinds: Sequence[Framework] = (),
    *,
    left_out: bool = True,
) -> OwnProfile:
    """The profile of the software whose runs these are, from `base` or the one of `kinds` that comes nearest to it.

    Each run is predicted without itself, unless they are not to be `left_out`."""
    costs_of = sharing(costs_of)
    known = list(kinds) or known_stacks()
    table = StackKinds(runs, base, known, costs_of) if kinds else None

    def learnt(pick: list[int]) -> Framework:
        kind = table.likeliest(known, pick) if table else base
        return updated([runs[i] for i in pick], kind, known, costs_of)

    own = learnt(list(range(len(runs))))
    rows = []
    folds = min(FOLDS, len(runs)) if left_out and len(runs) > 1 else 0
    for fold in range(folds):
        held = list(range(fold, len(runs), folds))
        rest = learnt([i for i in range(len(runs)) if i not in held])
        wrong = errors([runs[i] for i in held], rest, costs_of)
        rows += [(runs[i].line, runs[i].seconds, runs[i].seconds * float(np.exp(e))) for i, e in zip(held, wrong)]
    left = np.array([log(predicted / measured) for _, measured, predicted in rows])
    spread = float(np.sqrt((left**2).mean())) if len(left) else base.step_sigma
    sigma = max(LEAST_SIGMA, spread, base.step_sigma / (len(runs) + 1) ** 0.5)
    inside, before = (np.abs(np.expm1(errors(runs, one, costs_of))).mean() for one in (own, base))
    outside = None if not rows else float(np.mean([abs(p / m - 1) for _, m, p in rows]))
    said = "" if outside is None else f", {outside:.1%} of runs left out"
    source = f"{own.name}, updated by {len(runs)} runs of its own: {inside:.1%} mean error in sample{said}"
    own = msgspec.structs.replace(
        own,
        name=name,
        title=f"{name}, from its own runs",
        aliases=(),
        constants_of="",
        step_sigma=round(sigma, 3),
        whole_steps=True,
        source=source,
        flagged=False,
    )
    rows.sort()
    peaks = np.abs(np.expm1(peak_errors([run.under(own) for run in runs], own, costs_of)))
    return OwnProfile(
        framework=own,
        in_sample=float(inside),
        left_out=outside,
        before=float(before),
        rows=tuple(rows),
        peaks=float(peaks.mean()) if len(peaks) else None,
    )


def updated(
    runs: list[OwnRun], base: Framework, known: list[Framework], costs_of: Callable[[Framework], Costs]
) -> Framework:
    """Return a profile with the constants that runs and the spread of known stacks around it agree on best, and with
    the memory that the runs that state their peaks have."""
    mine = [run.under(base) for run in runs]
    return with_peaks(mine, _with(base, _mode(mine, base, known, costs_of)), costs_of)


def prior(base: Framework, known: list[Framework]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the constants' logarithms: the profile's own, and how known stacks lie around it, halfway
    to constants that vary apart, as few stacks are known. What kernels take longer in a model is a factor on them."""
    mean = _logs(base)
    apart = np.array([_logs(f) - mean for f in known if f.name != base.name]).reshape(-1, len(mean))
    least = np.array(list(UPDATED.values())) ** 2
    found = apart.T @ apart / len(apart) if len(apart) else np.diag(least)
    own = np.diag(found)
    return mean, 0.5 * (found + np.diag(own)) + np.diag(np.maximum(0.0, least - own))


def _logs(framework: Framework) -> np.ndarray:
    values = [getattr(framework, name) + (name == "kernel_slowdown") for name in UPDATED]
    return np.log(values)


def _with(base: Framework, at: np.ndarray) -> Framework:
    values = {name: float(f"{value:.4g}") for name, value in zip(UPDATED, np.exp(at))}
    values["kernel_slowdown"] = round(float(np.exp(at[-1])) - 1, 4)
    return msgspec.structs.replace(base, host_us_per_backward_kernel=None, **values)


def errors(runs: list[OwnRun], framework: Framework, costs_of: Callable[[Framework], Costs]) -> np.ndarray:
    """Return the logarithms of predicted over measured seconds [runs]."""
    costs, mine = costs_of(framework), (run.under(framework) for run in runs)
    return np.array([log(simulate(r.plan, r.model, r.cluster, r.train, costs).step_time_s / r.seconds) for r in mine])


def _slopes(
    runs: list[OwnRun], base: Framework, at: np.ndarray, costs_of: Callable[[Framework], Costs]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of predicted over measured seconds [runs] at some constants, and their slopes [runs,
    constants]."""
    now, columns = errors(runs, _with(base, at), costs_of), []
    for i, name in enumerate(UPDATED):
        step = NUDGE.get(name, 0.3)
        moved = at.copy()
        moved[i] += step
        columns.append((errors(runs, _with(base, moved), costs_of) - now) / step)
    return now, np.stack(columns, axis=1)


def _mode(
    runs: list[OwnRun], base: Framework, known: list[Framework], costs_of: Callable[[Framework], Costs]
) -> np.ndarray:
    """The constants' logarithms where prior and runs agree best."""
    mean, spread = prior(base, known)
    inverse = np.linalg.inv(spread)
    least, most = np.log([BOUNDS[name] for name in UPDATED]).T

    def loss(wrong: np.ndarray, at: np.ndarray) -> float:
        size = np.abs(wrong) / OBSERVED
        bent = np.where(size <= ROBUST, size**2, 2 * ROBUST * size - ROBUST**2)  # Huber's loss
        return float(bent.sum() + (at - mean) @ inverse @ (at - mean))

    at, damping = mean.copy(), 1e-2
    for _ in range(ROUNDS):
        now, slope = _slopes(runs, base, at, costs_of)
        weight = np.minimum(1.0, ROBUST * OBSERVED / np.maximum(np.abs(now), 1e-9)) / OBSERVED**2
        normal = slope.T @ (slope * weight[:, None]) + inverse
        downhill = -slope.T @ (weight * now) - inverse @ (at - mean)
        while damping < 1e4:
            by = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            tried = np.clip(at + np.clip(by, -1.5, 1.5), least, most)
            better = loss(now, at) - loss(errors(runs, _with(base, tried), costs_of), tried)
            if better > 0:
                at, damping = tried, damping / 4
                break
            damping *= 4
        if damping >= 1e4 or better < ENOUGH:
            break
    return at


def base_of(name: str) -> Framework:
    """The profile to begin from: the one that is named, else the middle of all stacks."""
    return load_framework(name or "default")
