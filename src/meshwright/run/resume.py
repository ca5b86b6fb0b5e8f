"""Going on from a checkpoint: which states a rank takes from it, under the plan that saved it or another."""

from __future__ import annotations

import torch

from meshwright.errors import MeshwrightError
from meshwright.run.agree import agree
from meshwright.run.average import BEGUN, of_round
from meshwright.run.checkpoint.format import Meta, find, read_index
from meshwright.run.coded import Added, Anew, laid_anew, of_code
from meshwright.run.outer import MOMENTUM
from meshwright.run.pieces import PARAM, PERTURBATION, POINT, TensorPiece
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.rounds import in_common


def wanted_of(out: str, plan: str, trainer: Trainer) -> tuple[list[TensorPiece], Anew]:
    """The pieces to fill from the checkpoint of a run in a folder, under a plan: each replica's own state where it was
    saved by as many, else, at the end of a round, the first replica's, or the mean of those that met; and what codes
    keep that is added up anew.

    Raises:
        MeshwrightError: Y004 within a round that this plan does not go on with; what `load` raises of a checkpoint.
    """
    place, wrong, known, saved = trainer.mesh, (), {}, ""
    try:
        meta = read_index(find(out)).meta
        known, saved = meta.extra, meta.plan
    except MeshwrightError as error:
        wrong = error.diagnostics
    agree(place["world"], wrong, place.device)
    before, replicas = known.get("sync", "step"), known.get("replicas", 1)
    same = replicas == trainer.rounds.replicas
    goes_on = same and (before == trainer.plan.sync.policy or replicas == 1)
    joined, common = known.get("joined", True), in_common(read(before))
    if read(before).differing_models and not (same and before == trainer.plan.sync.policy):
        raise MeshwrightError.one(
            "Y004",
            f"the checkpoint holds {replicas} replicas with models of their own under sync={before}, and this plan has "
            f"{trainer.rounds.replicas} replicas under sync={trainer.plan.sync.policy}",
            place=f"--resume {out}",
            help=f"go on with sync={before} and {replicas} replicas",
        )
    if read(before).meets and not goes_on:
        return _mean_of(trainer, replicas)
    if not (joined or common or (same and before == trainer.plan.sync.policy)):
        raise MeshwrightError.one(
            "Y004",
            f"the checkpoint is within a round of {replicas} replicas under sync={before}, and this plan has "
            f"{trainer.rounds.replicas} under sync={trainer.plan.sync.policy}",
            place=f"--resume {out}",
            help=f"go on with sync={before} and {replicas} replicas to the end of the round, then change the plan",
        )
    if goes_on:
        moved = moves_on(meta, plan, trainer.train)
        found = [p for p in trainer.pieces() if moved or p.key != PERTURBATION]
    else:
        found = [p for p in trainer.pieces(shared=not same) if not of_round(p.key) and p.key != PERTURBATION]
        if not joined:  # replicas never hold the same: what they had in common at the last exchange
            found = [p._replace(key=BEGUN) if p.key == PARAM else p for p in trainer.pieces(shared=True)]
        if read(before).outer.momentum:
            found += [p for p in trainer.rounds.pieces() if p.key == MOMENTUM]
    if saved == plan:
        return found, []
    points = before == trainer.plan.sync.policy
    rest = [p for p in found if not of_code(p.key) and (points or p.key != POINT)]
    if before != trainer.plan.sync.policy or trainer.model.mixtures or trainer.rounds.replicas > 1:
        return rest, []
    parts, anew = laid_anew(found, known.get("copies", 1), trainer.copies)
    return rest + parts, anew


def moves_on(meta: Meta, plan: str, train: Train) -> bool:
    """Whether what the next batch's text is moved by is taken from a checkpoint: one of the same plan and workload."""
    return meta.plan == plan and meta.extra.get("workload") == train.text()


def _mean_of(trainer: Trainer, replicas: int) -> tuple[list[TensorPiece], Anew]:
    """The mean of what so many replicas held, which messages on their way do not change: the model that replicas which
    meet are said to have."""
    wanted, anew = [], []
    for piece in trainer.pieces(shared=True):
        parts = [torch.empty_like(piece.values) for _ in range(replicas)]
        keys = [f"{piece.key}@{number}" if number else piece.key for number in range(replicas)]
        wanted += [piece._replace(key=key, values=part) for key, part in zip(keys, parts)]
        anew.append(Added(piece.values, parts, 1 / replicas))
    return wanted, anew
