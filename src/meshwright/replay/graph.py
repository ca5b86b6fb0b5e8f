"""Rebuilt tasks as a task graph, and as what each span of a timeline waited for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.graph import KIND, GraphBuilder, TaskGraph
from meshwright.replay.tasks import Rebuilt


def causes(rebuilt: Rebuilt) -> NDArray[np.int32]:
    """For every span of the timeline the span whose end came last before it among all that its task waits for, -1 for
    none [S]."""
    out = np.full(rebuilt.timeline.num_spans, -1, np.int32)
    last: dict[tuple[int, str], int] = {}
    begun: set[int] = set()
    for task in rebuilt.tasks:
        before = sorted(task.needs) + [last[r, task.queue] for r in task.ranks if (r, task.queue) in last]
        if task.spans[0] not in begun and before:
            # of equal ends a dependency says more than the stream's order
            latest = rebuilt.tasks[max(before, key=lambda n: rebuilt.tasks[n].end_s)]
            member = dict(zip(latest.ranks, latest.spans))
            out[task.spans] = [member.get(rank, latest.spans[0]) for rank in task.ranks]
        begun.add(task.spans[0])
        last |= {(r, task.queue): task.number for r in task.ranks}
    return out


def graph_of(rebuilt: Rebuilt) -> tuple[TaskGraph, NDArray[np.int64]]:
    """The task graph, whose cost key of a task is its number in the rebuilt list, and that number per task [N]."""
    timeline = rebuilt.timeline
    builder = GraphBuilder(timeline.ranks)
    for task in rebuilt.tasks:
        number = builder.extend(
            KIND[task.kind],
            builder.key(f"{task.key}\0{task.number}"),
            stage=task.stage,
            chunk=task.chunk,
            microbatch=task.microbatch,
            layer=task.layer,
        )
        for rank in dict.fromkeys(task.ranks):
            builder.occupy(number, [builder.stream(rank, task.queue)])
        if task.needs:
            needs = np.array(sorted(task.needs))
            builder.depend(np.full(len(needs), number[0]), needs)
    graph = builder.build()
    return graph, graph.cost_key.astype(np.int64)
