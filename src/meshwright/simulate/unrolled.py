"""Successive steps of a cyclic graph as one graph without lags, whose timeline can be drawn."""

from __future__ import annotations

import numpy as np

from meshwright.graph import ATTRIBUTES, QUEUES, GraphBuilder, TaskGraph


def unrolled(graph: TaskGraph, num_steps: int) -> TaskGraph:
    """Return the tasks of `num_steps` successive steps, numbered in the attribute ``step``. An edge with a lag comes
    from so many steps before, and is none in the first steps, which have none before them. Cost keys stay."""
    builder, n = GraphBuilder(graph.streams.ranks), graph.num_tasks
    for name in graph.keys:
        builder.key(name)
    attributes = {name: graph.attribute(name) for name in ATTRIBUTES if name != "step"}
    streams = (graph.streams.rank * len(QUEUES) + graph.streams.queue)[graph.member]
    owner = np.repeat(np.arange(n), np.diff(graph.member_ptr))
    waits = np.repeat(np.arange(n), np.diff(graph.dep_ptr))
    for step in range(num_steps):
        builder.extend(graph.kind, graph.cost_key, step=np.full(n, step), **attributes)
        builder.occupy(step * n + owner, streams)
        there = graph.dep_lag <= step
        builder.depend(step * n + waits[there], (step - graph.dep_lag[there]) * n + graph.dep[there])
    return builder.build()
