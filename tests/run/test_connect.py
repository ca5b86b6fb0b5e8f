"""Connections of a pipeline: both ends know them, and no order of opening them waits for ever."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshwright.run import pipeline
from meshwright.run.connect import Edge, connect, in_order
from meshwright.run.mesh import AxisGroup
from meshwright.schedules import build


def opened(mine: dict[int, list[Edge]]) -> int:
    """How many edges ranks open that each wait at the first of theirs until its other end waits there too."""
    left, count = {rank: in_order(edges) for rank, edges in mine.items()}, 0
    while True:
        first = [edges[0][:3] for edges in left.values() if edges]
        ready = {edge for edge in first if first.count(edge) == 2}
        if not ready:
            return count
        for edges in left.values():
            if edges and edges[0][:3] in ready:
                edges.pop(0)
        count += len(ready)


def test_every_rank_gets_through_its_connections_whatever_they_are():
    draw = random.Random(3)
    for _ in range(50):
        some = {(draw.choice("abc"), *draw.sample(range(6), 2)) for _ in range(20)}
        edges = [Edge(*one, None) for one in some]
        mine = {rank: draw.sample(ends, len(ends)) for rank in range(6) if (ends := _of(rank, edges))}
        assert opened(mine) == len(some)


def _of(rank, edges):
    return [edge for edge in edges if rank in edge[1:3]]


class Mesh(dict):
    device = torch.device("cpu")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe"])
def test_both_ends_of_a_pipeline_s_message_know_its_connection(schedule):
    actions = build(schedule, 4, 8)
    names = {f"pp_{way}_{to}" for way in ("forward", "backward") for to in ("up", "down")}
    mine = {}
    for rank in range(4):
        groups = {n: AxisGroup(name=n, ranks=(0, 1, 2, 3), index=rank) for n in (*names, "pp")}
        mesh = Mesh(groups)
        due = np.zeros(len(actions.kind), bool)
        made = pipeline.RankPipeline(
            actions, mesh, {}, message=lambda: None, blocking_sends=False, due=due, final=lambda stage: None
        )
        mine[rank] = made.edges()
    known = [edge[:3] for edges in mine.values() for edge in edges]
    assert known and all(known.count(edge) == 2 for edge in known)
    assert all(rank in edge[1:3] for rank, edges in mine.items() for edge in edges)
    assert opened(mine) == len(known) / 2


def test_on_a_processor_connections_are_open():
    connect([Edge("a", 0, 1, None)], 0, torch.device("cpu"))  # no process group is asked


def test_receives_are_posted_as_far_ahead_as_a_step_says(monkeypatch):
    """By hand, of four messages: with none ahead each when it is asked for; with two ahead two at once, then up to two
    beyond the one that is asked for."""
    posted = []
    monkeypatch.setattr(pipeline.dist, "irecv", lambda buffer, **_: posted.append(buffer) or SimpleNamespace(wait=int))
    channel = pipeline.Channel([(0, i) for i in range(4)], 1, None, lambda key: key[1])
    for ahead, seen in ((0, [0, 1, 2, 3, 4]), (2, [2, 3, 4, 4, 4])):
        posted.clear()
        channel.begin(ahead)
        counts = [len(posted)]
        for i in range(4):
            assert channel.receive((0, i)) == i
            counts.append(len(posted))
        assert counts == seen
