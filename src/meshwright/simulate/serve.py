"""The serving simulator: requests, an engine's policy and the costs of its iterations become records of every request.

An engine is a replica of the model with queues of its own; it computes one iteration after the other on a virtual
clock. Policies of the catalog run in a compiled loop, which skips runs of equal iterations; any other decider runs in
:mod:`meshwright.simulate.serve_plain`, which says what both compute.
"""

from __future__ import annotations

import numpy as np

from meshwright.errors import MeshwrightError, remark
from meshwright.serving.routing import Router
from meshwright.simulate.front_line import FRONTS
from meshwright.simulate.loop_tables import tables_of
from meshwright.simulate.serve_loop import (
    EVICTIONS,
    ITERATIONS,
    PEAK_BATCH,
    PEAK_BLOCKS,
    RUNS,
    SAMPLES,
    serve_loop,
)
from meshwright.simulate.serve_pool import pooled
from meshwright.simulate.serve_pool import served_alone as plainly
from meshwright.simulate.served import GAP_EDGES, MOST_SAMPLES, SPENT, Replica, ServedRequests
from meshwright.spec.requests import Requests

#: Tokens of a replica's answers above which one that is not simulated by the compiled loop takes some ten seconds.
PATIENCE_TOKENS = 500_000
SLOWLY = (
    "this policy or speculation is simulated iteration by iteration in Python, which takes a minute for some ten "
    "thousand requests: requests=1000 among the words of --serve is soon answered"
)


def simulate(replica: Replica, requests: Requests) -> ServedRequests:
    """Return what becomes of requests that one replica serves, as their clients see it.

    Raises:
        MeshwrightError: W012 for requests that the cache can never hold.
    """
    refuse_oversized(replica, requests)
    alone = plainly if not replica.compiled or len(requests.after) or len(requests.needed) else serve_fast
    if alone is plainly and int(requests.output.sum()) > PATIENCE_TOKENS:
        remark(SLOWLY)
    return alone(replica, requests).seen(requests, replica.host)


def serve_fast(replica: Replica, requests: Requests, begun_s: np.ndarray | None = None) -> ServedRequests:
    """Return what becomes of requests under policies that the compiled loop knows; of those whose prompts were computed
    elsewhere, where their first tokens were generated at ``begun_s`` [n], which come with their caches."""
    count, limits, host, costs = len(requests), replica.limits, replica.host, replica.costs
    ints = {name: np.zeros(count, np.int64) for name in ("queue", "computed", "generated", "held", "evicted")}
    times = {name: np.full(count, -1.0) for name in ("last_s", "scheduled_s", "first_s", "end_s")}
    if begun_s is not None:
        ints["computed"][:], ints["generated"][:], times["last_s"][:] = requests.prompt, 1, begun_s
    width = min(count, limits.max_batch) + 1
    arrival = np.array(requests.arrival_s, np.float64)
    gaps, counts = np.zeros(len(GAP_EDGES), np.int64), np.zeros(7, np.int64)
    spent, seen = np.zeros(len(SPENT)), np.zeros(costs.most_tokens + 1)
    sample_s, sample = np.zeros(MOST_SAMPLES), np.zeros(3 * MOST_SAMPLES, np.int64)
    watermark = limits.watermark if replica.policy.watermark else 0
    guessing = replica.guessing if replica.drafts is not None else None
    shape, tables = tables_of([costs] if guessing is None else [costs, guessing.draft])
    right = np.zeros(1, np.uint8) if guessing is None else guessing.right(requests.output)
    serve_loop(
        count,
        64,
        np.array(
            [
                replica.policy.code,
                limits.max_batch,
                limits.budget,
                limits.block,
                limits.blocks,
                watermark,
                requests.concurrency,
                replica.stages,
                host.graph_tokens,
                limits.poll,
                limits.batch_wait,
                limits.groups,
                limits.enough,
                replica.drafts.count if guessing is not None else 0,
            ],
            np.int64,
        ),
        np.array([host.step_s, host.request_s, host.eager_s]),
        np.array([*((host.serial_s, host.serial_token_s) if begun_s is None else (0.0, 0.0)), host.stream_s]),
        arrival,
        np.array(requests.prompt, np.int64),
        np.array(requests.output, np.int64),
        np.cumsum(requests.output, dtype=np.int64) - requests.output,
        right,
        shape,
        *tables,
        GAP_EDGES,
        len(GAP_EDGES),
        np.zeros(FRONTS, np.int64),
        np.zeros(2),
        np.zeros(count, np.int64),
        np.zeros(count),
        ints["queue"],
        np.zeros(width, np.int64),
        np.zeros(width, np.int64),
        ints["computed"],
        ints["generated"],
        ints["held"],
        np.full(2 * count, -1),
        np.array([count, limits.groups, limits.settle, *[0] * (2 + 3 * limits.groups)], np.int64),
        times["last_s"],
        times["scheduled_s"],
        times["first_s"],
        times["end_s"],
        ints["evicted"],
        gaps,
        seen,
        spent,
        counts,
        MOST_SAMPLES,
        sample_s,
        sample,
    )
    kept = int(counts[SAMPLES])
    return ServedRequests(
        arrival_s=arrival,
        scheduled_s=times["scheduled_s"],
        first_s=times["first_s"],
        end_s=times["end_s"],
        evicted=ints["evicted"],
        gaps=gaps,
        spent_s=spent,
        tokens_seen=seen,
        iterations=int(counts[ITERATIONS]),
        runs=int(counts[RUNS]),
        evictions=int(counts[EVICTIONS]),
        peak_blocks=int(counts[PEAK_BLOCKS]),
        peak_batch=int(counts[PEAK_BATCH]),
        sample_s=sample_s[:kept],
        sample=sample.reshape(-1, 3)[:kept],
        cached=np.zeros(count, np.int64),
    )


def simulate_routed(
    replica: Replica, replicas: int, requests: Requests, router: Router
) -> tuple[list[Requests], list[ServedRequests]]:
    """Return the requests of every replica that served any behind a router that looks, and what became of them, without
    those that nobody needed any more.

    Raises:
        MeshwrightError: W012 for requests that the cache can never hold.
    """
    refuse_oversized(replica, requests)
    shares, served = pooled(replica, replicas, requests, router)
    return shares, [one.seen(share, replica.host) for share, one in zip(shares, served)]


def refuse_oversized(replica: Replica, requests: Requests, lenders: int = 1) -> None:
    """Raise W012 for requests that the cache can never hold, nor those of all `lenders` together, by their lines."""
    from meshwright.spec.requests import numbered

    limits = replica.limits
    adapters = replica.rules.adapters
    held = (limits.watermark if replica.policy.watermark else 0) + (adapters.blocks if adapters is not None else 0)
    room = limits.holds(lenders * limits.blocks - held)
    over = np.flatnonzero(requests.prompt + requests.output > room)
    if len(over):
        where = numbered(requests.line[over]) if len(requests.line) else f"{len(over):,} of {len(requests):,} requests"
        longest = int((requests.prompt + requests.output).max())
        whose = "a replica holds" if lenders == 1 else f"{lenders} replicas together holds"
        raise MeshwrightError.one(
            "W012",
            f"requests of up to {longest:,} tokens, and the cache of {whose} {max(room, 0):,.0f}: {where}",
            place=f"--serve {requests.source}".strip(),
            help="more devices to a replica (tp, pp), a smaller or quantised model, kv=fp8, or shorter requests",
        )
