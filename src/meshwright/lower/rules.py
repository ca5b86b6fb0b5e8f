"""Rules of a step graph, which hold after every pass of lowering."""

from __future__ import annotations

import numpy as np

from meshwright.graph import KIND, TaskGraph


def broken(graph: TaskGraph, *, forward_only: bool = False) -> list[str]:
    """Broken rules as sentences, none for a sound graph, which is acyclic besides.

    Edges without lag point backwards, every task has a stream, a collective's members are distinct, and every
    forward has its backward, but where they are frozen (`forward_only`).
    """
    found = []
    owner = np.repeat(np.arange(graph.num_tasks), np.diff(graph.dep_ptr))
    if np.any((graph.dep >= owner) & (graph.dep_lag == 0)):
        found.append("an edge without lag points forward")
    if np.any(np.diff(graph.member_ptr) == 0):
        found.append("a task occupies no stream")
    task = np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))
    pairs = np.sort(task.astype(np.int64) * max(1, len(graph.streams)) + graph.member)
    if np.any(pairs[1:] == pairs[:-1]):
        found.append("a task occupies one stream twice")
    where = graph.attribute("stage").astype(np.int64) * 2**31 + graph.attribute("microbatch")
    forward = set(where[graph.kind == KIND["F"]].tolist())
    if not forward_only and forward != set(where[(graph.kind == KIND["B"]) | (graph.kind == KIND["BW"])].tolist()):
        found.append("a forward has no backward, or the other way round")
    return found
