"""Studies of convergence as files: the folder that ``meshwright converge`` leaves, read back as a loss model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.sync.losses import TrainedLoss, rated, sync_of
from meshwright.sync.record import USUAL
from meshwright.sync.tokens import LossModel, LossStudy, Studied, modelled

#: A study's question, the folder of its runs, and the result of one.
QUESTION, RUNS, RESULT = "study.json", "runs", "result.json"
_NAMED = "name the folder of meshwright converge --out FOLDER"


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a study's question that a loss model says."""

    model: str
    train: str
    replicas: int
    lr: float
    text: str


def results(folder: Path) -> list[TrainedLoss]:
    """The results in a study's folder, in the order of their names."""
    found = []
    for file in sorted((folder / RUNS).glob(f"*/{RESULT}")):
        with suppress(OSError, msgspec.MsgspecError):  # cut short by a hand: the run is done anew
            read_back = msgspec.json.decode(file.read_bytes(), type=dict)
            if read_back["loss"] is None:
                read_back["loss"] = math.inf
            found.append(msgspec.convert(read_back, TrainedLoss))
    return found


def read_study(folder: Path) -> LossModel:
    """The factors of the runs in a study's folder, and the fit through them.

    Raises:
        MeshwrightError: X006 for a folder that holds no study, or one whose runs tell no factor: without ``sync=step``
            after several numbers of steps a loss cannot be read as tokens.
    """
    try:
        asked = msgspec.json.decode((folder / QUESTION).read_bytes(), type=_Asked)
    except OSError as error:
        raise _unread(folder, error.strerror or str(error)) from None
    except msgspec.MsgspecError as error:
        raise _unread(folder, f"{QUESTION}: {error}") from None
    rows = [row for row in results(folder) if sync_of(row.policy) == rated(row.policy)[0]]  # not ways of feedback
    if len({row.steps for row in rows if row.policy == USUAL}) < 2:
        help = "meshwright converge ... --ladder 96,192 trains sync=step for other numbers of steps too"
        raise _unread(folder, f"sync={USUAL} was trained for one number of steps, or none", help)
    if all(row.policy == USUAL for row in rows):
        raise _unread(folder, f"it has runs of sync={USUAL} alone", "name more policies: meshwright converge --sync")
    first = rows[0]
    study = LossStudy(
        title=f"{asked.model} on {asked.text}",
        source=f"meshwright converge, {folder}",
        licence="",
        tokens_per_step=round(first.tokens / first.steps),
        runs=_runs(rows),
        **msgspec.structs.asdict(asked),
    )
    return modelled(str(folder), study)


def _runs(rows: Sequence[TrainedLoss]) -> tuple[Studied, ...]:
    """Results by policy and steps, those of its seeds in order; a seed that is not there yet ends them."""
    by: dict[tuple[str, int], dict[int, TrainedLoss]] = {}
    for row in rows:
        by.setdefault((row.policy, row.steps), {})[row.seed] = row
    out = []
    for (policy, steps), seeds in sorted(by.items()):
        done = [seeds[seed] for seed in range(len(seeds)) if seed in seeds]
        losses = tuple(row.loss if math.isfinite(row.loss) else None for row in done)
        if done:
            out.append(Studied(policy=policy, steps=steps, losses=losses, sent=done[0].sent_per_token))
    return tuple(out)


def _unread(
    folder: Path, why: str, help: str = "name the folder of meshwright converge --out FOLDER"
) -> MeshwrightError:
    return MeshwrightError.one("X006", f"cannot read a study: {why}", place=f"--study {folder}", help=help)
