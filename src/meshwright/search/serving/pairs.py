"""The space of plans in which some replicas compute prompts and others go on with them: pairs of layouts, and where
their replicas lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.serving_check import refused
from meshwright.plan import Plan, Pool, PoolLink
from meshwright.plan.pool import KV
from meshwright.plan.record import joined
from meshwright.search.serving.evaluate import ServingEvaluator, rate_of
from meshwright.search.serving.space import APART, REPLICAS, ROLES, Phase, ServingCandidate, engines, layouts
from meshwright.search.space import Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.serve import EngineWords

#: Names of the two pools of a plan.
PREFILL, DECODE = "prefill", "decode"


class LayoutPair(NamedTuple):
    """Candidates that differ in the numbers of replicas of their two halves alone."""

    where: int
    prefill: Plan
    decode: Plan
    engine: EngineWords

    def at(self, prefills: int, decodes: int, cluster: Cluster) -> ServingCandidate | None:
        """Return the candidate of so many replicas; None where the cluster has no place for them."""
        phases = (Phase(self.prefill, prefills), Phase(self.decode, decodes))
        plan = placed(phases, cluster)
        return None if plan is None else ServingCandidate(phases, self.engine, self.where, plan)


def placed(phases: tuple[Phase, Phase], cluster: Cluster) -> Plan | None:
    """Return two phases as pools next to each other: replicas share a node where they fit into one, and have whole
    nodes to themselves where they do not. None where the cluster has no place for them."""
    for together in (True, False):  # neighbouring whole nodes in one pool, unless they lie across a rack
        pools: list[Pool] = []
        at = 0
        for name, phase in zip((PREFILL, DECODE), phases):
            ranges, at = _ranges(phase, at, cluster, together)
            for number, (begin, end, count) in enumerate(ranges):
                layout = msgspec.structs.replace(phase.plan.layout, dp=count)
                plan = msgspec.structs.replace(phase.plan, layout=layout)
                mark = str(number) if len(ranges) > 1 else ""
                pools.append(Pool(name=name + mark, devices=(begin, end), plan=plan))
        if at > cluster.num_devices:
            return None
        if all(cut(cluster, *pool.devices) is not None for pool in pools):
            split = [[pool.name for pool in pools if pool.name.startswith(name)] for name in (PREFILL, DECODE)]
            links = tuple(PoolLink(source=a, target=b, what=KV) for a in split[0] for b in split[1])
            return joined(tuple(pools), links)
    return None


def _ranges(phase: Phase, at: int, cluster: Cluster, together: bool) -> tuple[list[tuple[int, int, int]], int]:
    """The devices of a phase from `at` on as (first, end, replicas), and where the next ones begin."""
    size, left = phase.plan.layout.num_ranks, phase.replicas
    node, found = min(cluster.islands[0].domain_size, cluster.num_devices), []
    if size > node:
        at = -(-at // node) * node
        return [(at, at + size * left, left)], at + size * left
    while left:
        free = node - at % node
        if free < size:
            at += free
            continue
        here = min(left, free // size)
        if together and free == node and node % size == 0 and left * size > node:
            here = left * size // node * (node // size)
        found.append((at, at + here * size, here))
        at, left = at + here * size, left - here
    return found, at


def pairs(space: Space, where: int, evaluator: ServingEvaluator) -> Iterator[LayoutPair]:
    """Yield every pair of layouts of a space that serves apart, under each engine: policies that hold blocks of the
    cache as tokens come, with their usual budget where no other was said."""
    model, cluster, serve = evaluator.model, evaluator.cluster, evaluator.serve
    if APART not in space[ROLES] or space[REPLICAS] is not None or not divisible(evaluator):
        return
    budgets = {0} if 0 in space["budget"] else set(space["budget"])
    known = [
        one
        for one in engines(space, serve)
        if one.budget in budgets and not serving.get("batching", one.policy).reserves
    ]
    plans = [one for one in layouts(space, model, cluster, serve) if one.serving == Plan().serving]
    for prefill in plans:
        for decode in plans:
            plan = placed((Phase(prefill, 1), Phase(decode, 1)), cluster)
            if plan is not None and not refused(plan, model, cluster, serve):
                yield from (LayoutPair(where, prefill, decode, engine) for engine in known)


def divisible(evaluator: ServingEvaluator) -> bool:
    """Whether a question can be answered by two halves: requests come by themselves, under bounds on first tokens and
    on times per token, and go to replicas in turn."""
    serve, requests = evaluator.serve, evaluator.requests
    bounds = serve.common().objectives
    waits = requests.concurrency or len(requests.after) or len(requests.needed)
    looks = serving.get("routing", serve.engine.routing).looks
    words = serve.engine
    plain = not (words.together or words.kv_budget or words.prefix_cache or words.draft)
    kept = {"ttft_s", "tpot_s"} <= bounds.keys() and bool(np.isfinite(rate_of(requests)))
    return kept and plain and not waits and not looks
