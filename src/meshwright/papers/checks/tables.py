"""Embedding tables spread over processes: trained steps equal to those of one process."""

from __future__ import annotations

from meshwright.papers.outcome import AT_MOST, Check, Figure, Outcome, by_processes

#: Processes that tables are spread over, and the largest difference that the order of float64 sums explains.
PROCESSES, ROUNDING = 2, 1e-9


def spread_tables() -> Outcome:
    """Return how far steps with whole tables, by rows, replicated and mixed are from one process."""

    def real() -> Outcome:
        from meshwright.run.tables_apart import apart

        return Outcome(
            figures=tuple(
                Figure(
                    f"{way}: losses and parameters on {PROCESSES} processes, furthest", None, far, "", AT_MOST, ROUNDING
                )
                for way, far in apart(PROCESSES).items()
            )
        )

    found = Outcome(
        baseline="one process that holds all tables and differentiates through every lookup",
        assumptions=(
            "three steps of a small model with dot products and with cross layers, float64, row-wise AdaGrad",
        ),
    )
    return by_processes(found, "steps of tables on real processes", real)


def buckets_apart(which: str) -> Check:
    """Return the check of vectors of nodes that are trained by buckets, of the ways in whose names that is."""

    def found() -> Outcome:
        def real() -> Outcome:
            from meshwright.run.nodes.apart import apart

            what = f"losses and vectors on {PROCESSES} processes, furthest"
            return Outcome(
                figures=tuple(
                    Figure(f"{way}: {what}", None, far, "", AT_MOST, ROUNDING)
                    for way, far in apart(PROCESSES).items()
                    if which in way
                )
            )

        outcome = Outcome(
            baseline="one process with whole tables that takes the buckets of each round one after the other",
            assumptions=("two passes over 600 edges of a graph of 41 nodes, float64",),
        )
        return by_processes(outcome, "vectors of nodes on real processes", real)

    return Check(found)


def networks_apart() -> Outcome:
    """Return how far graph networks with divided vertices, and in a pipeline of chunks, are from one process."""

    def real() -> Outcome:
        from meshwright.run.networks.apart import apart

        what = f"losses and parameters on {PROCESSES} processes, furthest"
        far = apart(PROCESSES)
        return Outcome(
            figures=tuple(Figure(f"{way}: {what}", None, x, "", AT_MOST, ROUNDING) for way, x in far.items())
        )

    outcome = Outcome(
        baseline="one process: with the whole graph as a matrix, or all layers that chunks pass one after the other",
        assumptions=("three epochs of four layers over a graph of 23 vertices, float64, Adam",),
    )
    return by_processes(outcome, "graph networks on real processes", real)


CHECKS = {
    "gnnpipe": Check(networks_apart),
    "dlrm": Check(spread_tables),
    "pbg": buckets_apart("one table"),
    "graphvite": buckets_apart("two tables"),
}
