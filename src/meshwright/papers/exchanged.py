"""Exchanges between replicas as figures of papers count them: bytes that ranks bring and send, and the rate of sums."""

from __future__ import annotations

import numpy as np

from meshwright.answer.prediction import Prediction
from meshwright.cost.network import link
from meshwright.errors import MeshwrightError
from meshwright.lower import lower
from meshwright.lower.program import Program
from meshwright.work import HOST_REDUCE


def _exchanges(prediction: Prediction) -> list[Program]:
    """Return the exchanges of one rank of the first class in a step."""
    lowered = lower(prediction.plan, prediction.model, prediction.cluster, prediction.train)
    graph = lowered.graph
    rank_of = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    programs = (lowered.programs[graph.cost_key[task]] for task in np.flatnonzero(rank_of == 0).tolist())
    return [program for program in programs if program.kind == "exchange"]


def sum_bandwidth(prediction: Prediction) -> float:
    """Return the bytes a second at which the sums of a step's gradients go, one after the other and with nothing beside
    them: a rank's own bytes over the time (the algorithm bandwidth of nccl-tests).

    Raises:
        MeshwrightError: J008 where nothing is summed.
    """
    device = prediction.cluster.islands[0].device
    moves = [move for program in _exchanges(prediction) for move in program.moves]
    sums = [move for move in moves if move.op in ("all_reduce", HOST_REDUCE)]
    found = [(move, link(move.work, device)) for move in sums]
    seconds = sum(estimate.seconds * move.times for move, estimate in found if estimate is not None)
    if not seconds:
        raise MeshwrightError.one("J008", "the plan's replicas sum nothing", place="plan", help="say dp of 2 or more")
    return sum(move.num_bytes for move in sums) / seconds


def brought_bytes(prediction: Prediction, *, mean: bool = False) -> float:
    """Return the bytes that one rank of the first class brings into the exchanges between replicas in a step: what it
    has summed, sends to others, and its own part of what is gathered. What is due once in several steps counts whole,
    or, in the ``mean``, for one of these."""
    total = 0.0
    for program in _exchanges(prediction):
        brought = sum(m.num_bytes / (m.group.size if m.op == "all_gather" else 1) for m in program.moves)
        total += brought / (program.every if mean else 1)
    return total


def exchanged_bytes(prediction: Prediction) -> float:
    """Return the bytes that all replicas send to share what they learnt once: for the next version of a server's model,
    or, where they mix or average parameters, in one exchange."""
    rounds, one = prediction.clients, prediction.round
    if rounds is not None:
        return (rounds.down_bytes + rounds.up_bytes) / len(rounds.versions)
    return (brought_bytes(prediction) if one is None else one.part_bytes) * prediction.num_devices
