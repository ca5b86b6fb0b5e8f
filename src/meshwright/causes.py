"""The causes that time is split by: of a step (:data:`STEP`), and of a training job over days (:data:`JOB`).

Every list of causes is this one: what pricing adds up, what an attribution sums to, which errors are drawn together,
what a search proposes to measure, and the words and colours of every report. A new cause is a new row.
"""

from __future__ import annotations

from typing import NamedTuple

#: Classes of errors that move together, one draw for a whole step, and what to measure to learn each.
ERROR_CLASSES = {
    "gemm": "the rate of the matrix products of these shapes",
    "attention": "the attention kernels at these lengths and heads",
    "elementwise": "the bandwidth of norms, activations and the optimizer",
    "host": "the launch overhead of the framework",
    "network inside nodes": "collectives inside a node",
    "network between nodes": "collectives between nodes at these sizes",
}


class Cause(NamedTuple):
    """One entry of an attribution.

    ``kind`` is ``kernel`` (the device computes), ``host`` (it waits for its host), ``exchange`` (exposed communication,
    named as its queue), ``wait`` (for other ranks; nothing is priced as that) or ``job`` (above the step).
    ``error_class`` is one of :data:`ERROR_CLASSES`, "" for what has no cost of its own. ``colour`` is a mark of
    :mod:`meshwright.report.palette`, ``ink`` the colour of its bar in a terminal.
    """

    name: str
    words: str
    kind: str
    error_class: str
    colour: str
    ink: str


#: Where step time goes, in the order it is shown. Sums to the step time (mean over ranks).
STEP = (
    Cause("gemm", "matrix multiplications", "kernel", "gemm", "blue", "blue"),
    Cause("attention", "attention kernels", "kernel", "attention", "teal", "blue"),
    Cause(
        "elementwise",
        "norms, activations and other memory-bound kernels",
        "kernel",
        "elementwise",
        "sky",
        "blue",
    ),
    Cause("recompute", "forward work repeated for the backward", "kernel", "gemm", "green", "magenta"),
    Cause("host", "launch overhead that kernels do not hide", "host", "host", "grey", "red"),
    Cause("optimizer", "optimizer update", "kernel", "elementwise", "purple", "cyan"),
    Cause("tp", "exposed tensor-parallel communication", "exchange", "network inside nodes", "orange", "yellow"),
    Cause("cp", "exposed context-parallel communication", "exchange", "network inside nodes", "rose", "yellow"),
    Cause("ep", "exposed expert-parallel communication", "exchange", "network between nodes", "ochre", "yellow"),
    Cause("pp", "exposed pipeline sends", "exchange", "network between nodes", "rose", "yellow"),
    Cause("dp", "exposed data-parallel communication", "exchange", "network between nodes", "red", "yellow"),
    Cause(
        "offload",
        "exposed transfers of state between device, host and drives",
        "exchange",
        "network inside nodes",
        "green",
        "yellow",
    ),
    Cause("bubble", "pipeline bubble: waiting for other stages", "wait", "", "grey", "red"),
    Cause("unequal", "unequal work: waiting for costlier microbatches", "wait", "", "orange", "red"),
    Cause("stragglers", "waiting for ranks that are slower in this step", "wait", "", "rose", "red"),
    Cause("data", "waiting for the batch, and copying it to the device", "wait", "", "ochre", "red"),
)
#: Where the time of a training job goes; sums to it.
JOB = (
    Cause("steps", "steps", "job", "", "blue", "blue"),
    Cause("checkpoints", "checkpoints", "job", "", "purple", "cyan"),
    Cause("lost", "lost work", "job", "", "red", "red"),
    Cause("restarts", "restarts", "job", "", "orange", "yellow"),
    Cause("waiting", "waiting for nodes", "job", "", "grey", "red"),
)

#: The step's causes by name.
BY_NAME = {cause.name: cause for cause in STEP}
#: What each entry of an attribution is called in full.
WORDS = {cause.name: cause.words for cause in STEP}
#: The causes that a task's cost is split by, the columns of every priced array, and their places there.
PRICED = tuple(cause.name for cause in STEP if cause.kind != "wait")
CAUSE = {name: place for place, name in enumerate(PRICED)}
#: Which error each priced cause shares.
ERROR_CLASS = {name: BY_NAME[name].error_class for name in PRICED}


def of_kind(kind: str) -> tuple[str, ...]:
    """Names of the step's causes of one kind, in the table's order."""
    return tuple(cause.name for cause in STEP if cause.kind == kind)
