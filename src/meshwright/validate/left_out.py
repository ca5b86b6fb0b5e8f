"""Predictions of what was left out: constants fitted again without a shape of model, a device or a source.

In each fold the constants of a framework are fitted anew to the rows that stay, by the project's own calibration, and
the rows that went are predicted with them; rows that went are in no fit of its other versions either. A fold that
leaves no row of a framework behind is answered as if the software were unknown: by the middle of the other stacks. A
profile whose constants nobody fitted is as it is. With a device go its kernels' curves: they are carried from its
nearest relative.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.calibrate import framework as fitting
from meshwright.calibrate.framework import TimedQuestion
from meshwright.cost import Costs, Framework, frameworks, standard
from meshwright.validate import steps, tables
from meshwright.validate.cases import Case, case, families_of, unknown_case
from meshwright.validate.measured import measured
from meshwright.validate.run import Table, tabulated
from meshwright.validate.score import Scored, score_step
from meshwright.validate.software import software_name

#: What is left out, and how a row says which.
LEFT: dict[str, Callable[[TimedQuestion], str]] = {
    "shape": lambda t: t.group,
    "device": lambda t: t.device,
    "source": lambda t: t.source,
}
#: Folds at most; more groups than this share folds, by a hash of their names.
MOST_FOLDS = 3


def left_out(folder: Path, told: Callable[[str], None] = lambda line: None) -> list[Table]:
    """Return the tables of steps that were predicted while their model's shape, their device or their source was left
    out of every fit.

    Raises:
        MeshwrightError: V003 when the folder has no table of steps.
    """
    by_owner: dict[str, list[TimedQuestion]] = {}
    for name, question in fitting.timed_questions(folder, standard):
        by_owner.setdefault(name, []).append(question)
    path = tables.find(folder, "training_steps")
    rows = {row["id"]: row for row in tables.rows(path, "training_steps")}
    task = _Folds(by_owner, rows, families_of(rows.values()), fitting.sharing(standard))
    scored: dict[str, dict[str, list[Scored]]] = {what: {} for what in LEFT}
    owners = sorted(by_owner, key=lambda name: -len(by_owner[name]))
    for done, (owner, found) in enumerate(_each(task, owners), 1):
        told(f"left out of {owner}: {done} of {len(owners)} frameworks")
        for what, some in found.items():
            scored[what][owner] = some
    return [
        tabulated(
            f"training_steps_{what}_left_out", [s for owner in sorted(some) for s in some[owner]], steps.VARIABLES
        )
        for what, some in scored.items()
    ]


def _each(task: _Folds, owners: list[str]) -> Iterator[tuple[str, dict[str, list[Scored]]]]:
    """The rows of each framework, predicted without their groups, in one process a core where processes can inherit
    the questions."""
    count = min(len(owners), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if count < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(task, owners)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_inherit, initargs=(task,)) as pool:
        for future in as_completed([pool.submit(_inherited, owner) for owner in owners]):
            yield future.result()


#: The task of a process that was forked for it: questions with their graphs are inherited, and not sent.
_TASK: list[_Folds] = []


def _inherit(task: _Folds) -> None:
    _TASK[:] = [task]


def _inherited(owner: str) -> tuple[str, dict[str, list[Scored]]]:
    return _TASK[0](owner)


class _Folds(NamedTuple):
    """The folds over the steps of every framework; fits are priced by `shared` costs."""

    by_owner: dict[str, list[TimedQuestion]]
    rows: dict[str, dict[str, str]]
    families: dict[str, frozenset[str]]
    shared: Callable[[Framework], Costs]

    def __call__(self, owner: str) -> tuple[str, dict[str, list[Scored]]]:
        """The rows of one framework, each predicted by what never saw its group, by what was left out."""
        known: fitting.Known = {}
        return owner, {what: list(self._scored(owner, what, known)) for what in LEFT}

    def _scored(self, owner: str, what: str, known: fitting.Known) -> Iterator[Scored]:
        found, key = self.by_owner[owner], LEFT[what]
        for groups in _folds({key(t) for t in found}, MOST_FOLDS if what == "shape" else 0):
            held = [t for t in found if key(t) in groups]
            constants: dict[str, float] | None = {}
            if not frameworks()[owner].flagged:  # one that no step was looked at for stays as it is
                constants = fitting.without(
                    owner, self.by_owner, lambda t, groups=groups: key(t) in groups, self.shared, known
                )
            device = held[0].asked.cluster.islands[0].device.name if what == "device" else ""
            costs_of = _pricing(device)
            for t in held:
                row = self.rows[t.id]
                asked = _asked(row, constants, self.families)
                answer = steps.answer(t.id, asked, costs_of)
                one = score_step(row, measured(row, answer.model_flops), answer, steps.variables(row))
                yield msgspec.structs.replace(one, memory=None, oom=None)


def _pricing(device: str) -> Callable[[Framework], Costs]:
    return cache(lambda framework: standard(framework, without=device))


def _asked(row: dict[str, str], constants: dict[str, float] | None, families: dict[str, frozenset[str]]) -> Case:
    if constants is None:
        return unknown_case(row, families.get(software_name(row), ()))
    asked = case(row)
    return msgspec.structs.replace(asked, framework=msgspec.structs.replace(asked.framework, **constants))


def _folds(groups: set[str], most: int) -> Iterator[set[str]]:
    """Every group alone, or `most` sets of them where there are more."""
    names = sorted(groups, key=lambda g: hashlib.sha256(g.encode()).digest())
    count = min(most, len(names)) if most else len(names)
    return (set(names[i::count]) for i in range(count))
