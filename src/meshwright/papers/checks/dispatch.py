"""Pathways: one controller that dispatches the work of many hosts, and what of it shows.

Barham et al., 2022 (arXiv 2203.12533). A computation runs on its devices; before it starts, its host must have been
told and have enqueued it. Multi-controller JAX tells nobody. A single controller that waits for each computation adds
its round trip every time (TensorFlow 1 on many hosts); one that dispatches asynchronously and in parallel runs ahead.
"""

from __future__ import annotations

from meshwright.papers import figures
from meshwright.papers.outcome import SHOWN, Check, Fact, Figure, Outcome, above, below


def finished(
    computations: int, compute_s: float, hosts: int, message_s: float, enqueue_s: float, latency_s: float, ahead: bool
) -> float:
    """Seconds until the last of a chain of gang-scheduled computations ends.

    The controller sends `hosts` messages for each, `message_s` apart; a message takes `latency_s`, and a host
    `enqueue_s` to prepare one. With `ahead` it sends the next computation's messages at once, otherwise after the last
    has ended.
    """
    sent = ended = prepared = 0.0
    for _ in range(computations):
        sent = (sent if ahead else ended) + hosts * message_s
        prepared = max(prepared, sent + latency_s) + enqueue_s
        ended = max(ended, prepared) + compute_s
    return ended


def stages(count: int, compute_s: float, prepare_s: float, parallel: bool) -> float:
    """A chain of computations on the devices of `count` hosts: preparing each takes `prepare_s`, on its own host, which
    is told at once (`parallel`) or when the stage before it has been enqueued."""
    ended = prepared = 0.0
    for _ in range(count):
        prepared = prepare_s if parallel else prepared + prepare_s
        ended = max(ended, prepared) + compute_s
    return ended


def pathways() -> Outcome:
    table = figures.load("pathways")["tokens_s"]
    message, enqueue, latency = 60e-6, 20e-6, 100e-6
    cores = {32: 4, 512: 64}  # hosts of 8 cores

    def ratio(hosts: int, compute_s: float, ahead: bool = True) -> float:
        alone = 200 * compute_s
        return alone / finished(200, compute_s, hosts, message, enqueue, latency, ahead)

    rows = [
        Figure(
            f"throughput over JAX's, {name}",
            both[1] / both[0],
            ratio(cores[int(name.split()[-2])], 0.3),
            "",
            SHOWN,
        )
        for name, both in table.items()
    ]
    return Outcome(
        figures=(
            *rows,
            Figure("2048 cores on 256 hosts, steps of 0.3 s ('~100%')", 1.0, ratio(256, 0.3), "", SHOWN),
            below(
                "waiting for each computation, of 1 ms on 64 hosts, over dispatching ahead",
                ratio(64, 1e-3, False) / ratio(64, 1e-3),
            ),
            above(
                "16 stages of 1 ms, enqueued one after another over in parallel",
                stages(16, 1e-3, 2e-3, False) / stages(16, 1e-3, 2e-3, True),
            ),
        ),
        facts=(
            Fact("a short computation on many hosts is bound by dispatch", ratio(512, 1e-3) < 0.1),
            Fact("with one host and long steps nothing is lost either way", ratio(1, 1.0, False) > 0.99),
        ),
        baseline="JAX with a controller on every host",
        assumptions=(
            "60 us a message, 20 us to enqueue, 100 us of latency: assumed; steps of the T5 models take 0.3 s: their "
            "batch is not known here. What the paper gives is shown beside them and not judged: with such steps any "
            "message of less than half a millisecond gives its figures",
        ),
        missing=(
            "what its hosts and messages take, without which none of its figures is more than shown",
            "the scheduler that gives collectives of many programs one order",
        ),
    )


CHECKS = {"pathways": Check(pathways)}
