"""The job of training a graph network, as every process does its part of it, and the file of a graph."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.atomic import write_by
from meshwright.errors import MeshwrightError
from meshwright.run import launch
from meshwright.run.networks.train import DividedNetwork, GraphData, StageOfNetwork
from meshwright.run.pass_progress import PassProgress
from meshwright.run.world import World, add_up
from meshwright.spec.edge_files import UNREADABLE, arrays, read_edges, why_unreadable
from meshwright.spec.graphs import GraphNetwork


def weights_file(rank: int) -> str:
    """Return the name of the file of weights that a process writes."""
    return f"weights-{rank}.npz"


def read_graph(path: str, model: GraphNetwork, double: bool) -> GraphData:
    """Return the graph of an ``.npz`` file with ``edges`` [E, 2], ``features`` [vertices, features] and ``labels``
    [vertices].

    Raises:
        MeshwrightError: D010 for a file that cannot be read, or of other sizes than the model's.
    """
    edges = read_edges(path, model.vertices)
    wanted = {"features": (model.vertices, model.features), "labels": (model.vertices,)}
    found = {}
    try:
        with arrays(Path(path).expanduser()) as file:
            found = {name: file[name] for name in wanted}
    except UNREADABLE as error:
        reason = why_unreadable(error)
        help = "name an .npz with edges [E, 2], features [vertices, features] and labels [vertices]"
        raise MeshwrightError.one("D010", f"no graph: {reason}", place=path, help=help) from None
    for name, shape in wanted.items():
        if found[name].shape != shape:
            message = f"{name} are {list(found[name].shape)}, and the model says {list(shape)}"
            raise MeshwrightError.one("D010", message, place=path, help="say the graph's own sizes in the model")
    labels = found["labels"].astype(np.int64)
    if labels.min() < 0 or labels.max() >= model.classes:
        message = f"labels from {labels.min()} to {labels.max()} of {model.classes} classes"
        raise MeshwrightError.one("D010", message, place=path, help="number classes from 0")
    if not np.isfinite(found["features"]).all():
        raise MeshwrightError.one(
            "D010", "features are not all numbers", place=path, help="put numbers for NaN and inf"
        )
    features = torch.from_numpy(found["features"].astype(np.float64 if double else np.float32))
    return GraphData(edges, features, torch.from_numpy(labels))


def train_network(
    world: World,
    model: GraphNetwork,
    lr: float,
    seed: int,
    path: str,
    epochs: int,
    stages: int,
    chunks: int,
    schedule: str,
    double: bool,
    out: str,
) -> dict[str, Any]:
    """Train the part of one process and return the loss of every epoch, the seconds and the bytes of vertices that all
    processes sent; each writes the weights it has trained into `out`, where that is said. A job that is
    asked to stop ends behind an epoch."""
    data = read_graph(path, model, double)
    if stages > 1:
        trainer = StageOfNetwork(model, data, seed, lr, world.rank, world.size, chunks, schedule)
    else:
        trainer = DividedNetwork(model, data, seed, lr, world.rank, world.size)
    add_up(torch.zeros(1))  # all begin together
    begun, progress = time.perf_counter(), PassProgress(world.first, epochs, "epoch")
    losses: list[float] = []
    for number in range(epochs):
        losses.append(trainer.epoch())
        progress(number, losses[-1])
        if float(add_up(torch.tensor([float(launch.stop.requested)]))):
            break
    seconds = time.perf_counter() - begun
    sent = torch.tensor(trainer.counted[0], dtype=torch.int64)
    add_up(sent)
    if out and (stages > 1 or world.first):
        Path(out).mkdir(parents=True, exist_ok=True)
        mine = {id(p) for p in (trainer.kept() if stages > 1 else trainer.weights.parameters())}
        named = {n: p.detach().numpy() for n, p in trainer.weights.named_parameters() if id(p) in mine}
        write_by(Path(out) / weights_file(world.rank), lambda file: np.savez(file, **named))
    return {"losses": losses, "seconds": seconds, "sent_bytes": int(sent)}
