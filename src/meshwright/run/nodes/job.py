"""The job of training a graph's vectors, as every process does its part of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.assign.buckets import Round
from meshwright.atomic import write_by
from meshwright.run.nodes.train import Hyper, NodeTrainer
from meshwright.run.pass_progress import PassProgress
from meshwright.run.world import World, add_up
from meshwright.spec.edge_files import read_edges
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graphs import NodeEmbedding

#: The file of vectors in the folder of a run.
VECTORS = "vectors.npz"


def train_nodes(
    world: World,
    model: NodeEmbedding,
    work: EdgeSamples,
    hyper: Hyper,
    rounds: tuple[Round, ...],
    partitions: int,
    data: str,
    passes: int,
    out: str,
    drives: str,
    ahead: bool,
) -> dict[str, Any]:
    """Train the part of one process and return, on the first one, the loss of every pass, the samples, the seconds and
    the bytes of partitions that were sent, and read and written in `drives`; it writes the vectors into `out`, where
    that is said. A job that is asked to stop ends behind a pass, with what it has trained."""
    edges = read_edges(data, model.nodes, model.relations)
    trainer = NodeTrainer(model, work, hyper, rounds, partitions, edges, passes, world.rank, drives, ahead)
    losses, samples = [], []

    def ended(number: int, loss: float, count: int) -> None:
        losses.append(loss)
        samples.append(count)
        progress(number, loss)

    add_up(torch.zeros(1))  # all begin together
    begun, progress = time.perf_counter(), PassProgress(world.first, passes)
    trainer.train(ended)
    seconds = time.perf_counter() - begun
    stored = (trainer.kept.read_bytes, trainer.kept.written_bytes) if drives else (0, 0)
    moved = torch.tensor([trainer.moved_bytes, sum(stored)], dtype=torch.int64)
    sent, swapped = add_up(moved).tolist()
    tables = trainer.gathered() if out else None
    if tables is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        names = ("vectors", "context")
        found = {n: t.numpy() for n, t in zip(names, tables)}
        found |= {} if trainer.kinds is None else {"relations": trainer.kinds.rows.numpy()}
        write_by(Path(out) / VECTORS, lambda file: np.savez(file, **found))
    return {
        "losses": losses,
        "samples": sum(samples),
        "seconds": seconds,
        "moved_bytes": sent,
        "swapped_bytes": swapped,
    }
