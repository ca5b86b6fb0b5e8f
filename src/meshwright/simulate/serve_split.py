"""Prefill and decode apart in the compiled loop, where it knows all policies: what
:mod:`meshwright.simulate.serve_apart` says of the same replicas, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.serving.routing import Router
from meshwright.simulate import apart_steps as steps
from meshwright.simulate.apart_loop import SPENTS, apart_loop
from meshwright.simulate.front_line import FRONTS
from meshwright.simulate.kv_links import KvPath, Port
from meshwright.simulate.serve_apart import ApartReplicas, ServedApart, served_apart, whole_of
from meshwright.simulate.serve_loop import SARATHI, V0, V1
from meshwright.simulate.served import GAP_EDGES, MOST_SAMPLES, Replica, ServedRequests, thinned
from meshwright.spec.requests import Requests


def served_split(apart: ApartReplicas, requests: Requests, router: Router) -> ServedApart:
    """Return what becomes of requests that replicas in roles serve."""
    return (served_fast if _known(apart, requests, router) else served_apart)(apart, requests, router)


def _known(apart: ApartReplicas, requests: Requests, router: Router) -> bool:
    """Whether the compiled loop knows what decides over replicas and requests."""
    plain = all(one.compiled and one.drafts is None and one.host.stream_s == 0 for one in apart.replicas)
    plain = plain and not any(one.limits.apart for one in apart.replicas)
    known = (V0, V1, SARATHI)
    alike = plain and all(one.policy.code in known and one.limits.device_share == 1.0 for one in apart.replicas)
    waits = len(requests.after) or len(requests.needed)
    in_order = bool((np.diff(requests.arrival_s) >= 0).all())
    return alike and in_order and not waits and not router.looks and not apart.layerwise


class _Tables(NamedTuple):
    """The engines as the loop reads them: their limits and host times, and their tables behind one another."""

    limit: np.ndarray
    host: np.ndarray
    tables: tuple[np.ndarray, ...]
    seen: int


#: Tables of an engine's costs, as the loop takes them, and where their places are written.
TABLES = (
    ("linear_s", steps.LINEAR_AT),
    ("sampled_s", steps.SAMPLED_AT),
    ("decode_s", steps.DECODE_AT),
    ("context_node", steps.CONTEXT_AT),
    ("prefill_s", steps.PREFILL_AT),
    ("batch_node", steps.BATCH_AT),
    ("query_node", steps.QUERY_AT),
    ("past_node", steps.PAST_AT),
)


def _tables(replicas: Sequence[Replica], parks: Sequence[bool]) -> _Tables:
    """Return replicas as the loop reads them; those of the same costs share them."""
    limit = np.zeros((len(replicas), steps.LIMITS), np.int64)
    host = np.array([[one.host.step_s, one.host.request_s, one.host.eager_s] for one in replicas])
    tables: list[list[np.ndarray]] = [[] for _ in TABLES]
    begins: dict[int, list[int]] = {}
    sizes, seen = [0] * len(TABLES), 0
    for row, one, parked in zip(limit, replicas, parks):
        costs, limits = one.costs, one.limits
        if id(costs) not in begins:
            begins[id(costs)] = sizes.copy()
            for place, (name, _) in enumerate(TABLES):
                tables[place].append(np.ascontiguousarray(getattr(costs, name)).ravel())
                sizes[place] += tables[place][-1].size
        said = {
            steps.POLICY: one.policy.code,
            steps.MAX_BATCH: limits.max_batch,
            steps.BUDGET: limits.budget,
            steps.BLOCK: limits.block,
            steps.BLOCKS: limits.blocks,
            steps.WATERMARK: limits.watermark if one.policy.watermark else 0,
            steps.STAGES: one.stages,
            steps.GRAPH_TOKENS: one.host.graph_tokens,
            steps.POLL: limits.poll,
            steps.HOLD: limits.batch_wait,
            steps.ENOUGH: limits.enough,
            steps.PARKS: parked,
            steps.MOST_TOKENS: costs.most_tokens,
            steps.NUM_CONTEXTS: len(costs.context_node),
            steps.NUM_BATCHES: len(costs.batch_node),
            steps.NUM_QUERIES: len(costs.query_node),
            steps.NUM_PASTS: len(costs.past_node),
            steps.SEEN_AT: seen,
        } | {at: begin for (_, at), begin in zip(TABLES, begins[id(costs)])}
        row[list(said)] = list(said.values())
        seen += costs.most_tokens + 1
    return _Tables(limit, host, tuple(np.concatenate(some) for some in tables), seen)


class _Ways(NamedTuple):
    """The ways between engines as the loop reads them: of each (source, target) its path, ports and shares of these;
    of each path and request the latency and the work."""

    path_of: np.ndarray
    latency_s: np.ndarray
    work_s: np.ndarray
    ports: tuple[np.ndarray, np.ndarray]
    shares: tuple[np.ndarray, np.ndarray]
    num_ports: int


def _ways(apart: ApartReplicas, prompt: np.ndarray) -> _Ways:
    """Return the ways between replicas for requests of so many tokens [n] each."""
    count = len(apart.replicas)
    path_of, ports = np.zeros(count * count, np.int64), np.zeros((2, count * count), np.int64)
    shares, number = np.zeros((2, count * count)), dict[Port, int]()
    lengths, which = np.unique(prompt, return_inverse=True)
    known: dict[Callable, int] = {}
    each: list[np.ndarray] = []
    for (source, target), path in apart.paths.items():
        way = source * count + target
        if path.seconds not in known:
            known[path.seconds] = len(each)
            each.append(np.array([path.seconds(tokens) for tokens in lengths.tolist()]).reshape(-1, 2)[which])
        path_of[way] = known[path.seconds]
        for side, port in enumerate(_ports(source, target, path)):
            ports[side, way] = number.setdefault(port, len(number))
        shares[:, way] = path.out_share, path.in_share
    seconds = np.array(each).reshape(-1, 2)
    latency_s, work_s = (np.ascontiguousarray(seconds[:, part]) for part in (0, 1))
    return _Ways(path_of, latency_s, work_s, tuple(ports), tuple(shares), max(len(number), 1))


def _ports(source: int, target: int, path: KvPath) -> tuple[Port, Port]:
    return (source, "out", path.level), (target, "in", path.level)


def served_fast(apart: ApartReplicas, requests: Requests, router: Router) -> ServedApart:
    """Return what becomes of requests under policies that the compiled loop knows."""
    n, count, doors = len(requests), len(apart.replicas), np.array(apart.doors)
    made, ways = _tables(apart.replicas, [bool(some) for some in apart.targets]), _ways(apart, requests.prompt)
    door = doors[router.assign(requests, len(doors))].astype(np.int64)
    going = np.array([bool(some) for some in apart.targets])[door]
    target_of = np.zeros((count, count), np.int64)
    for row, some in zip(target_of, apart.targets):
        row[: len(some)] = some
    answer = np.array(requests.output, np.int64)
    twice = np.concatenate([requests.prompt, requests.prompt]).astype(np.int64)
    later = np.repeat([0, 1], n)
    places = min(n, max(one.limits.max_batch for one in apart.replicas)) + 1
    state = np.zeros((count, steps.STATES), np.int64)
    state[:, steps.FREE] = made.limit[:, steps.BLOCKS]
    samples = 2 * MOST_SAMPLES + 1

    def ints(size: int) -> np.ndarray:
        return np.zeros(size, np.int64)

    held, evicted, went = ints(2 * n), ints(2 * n), np.full(n, -1)
    times = {name: np.full(2 * n, -1.0) for name in ("came", "scheduled", "first", "last", "end")}
    pulled_s, joined_s = np.full(n, -1.0), np.full(n, -1.0)
    gaps, seen, spent = ints(count * len(GAP_EDGES)), np.zeros(made.seen), np.zeros((count, SPENTS))
    sample_s, sample = np.zeros(count * samples), ints(3 * count * samples)
    link_s = apart_loop(
        n,
        64,
        count,
        len(doors),
        min(requests.concurrency or n, n),
        made.limit.ravel(),
        state.ravel(),
        made.host.ravel(),
        np.zeros(count * steps.CLOCKS),
        door,
        target_of.ravel(),
        np.array([len(some) for some in apart.targets]),
        answer,
        np.concatenate([np.where(going, 1, answer), answer]),
        np.array(requests.arrival_s, np.float64),
        np.array(requests.prompt, np.int64),
        np.array([[one.host.serial_s, one.host.serial_token_s] for one in apart.replicas]).ravel(),
        ints(count * FRONTS),
        np.zeros(count),
        ints(count * n),
        np.zeros(n),
        *made.tables,
        GAP_EDGES,
        len(GAP_EDGES),
        n,
        ints(count * n),
        ints(count * n),
        places,
        ints(count * places),
        ints(count * places),
        ints(count),
        ints(2 * n),
        twice + later,
        twice * later,
        later.copy(),
        held,
        evicted,
        went,
        *times.values(),
        pulled_s,
        joined_s,
        ways.path_of,
        ways.latency_s,
        ways.work_s,
        *ways.ports,
        *ways.shares,
        ways.num_ports,
        np.zeros(ways.num_ports),
        np.zeros(ways.num_ports),
        *(ints(n) for _ in range(6)),
        *(np.zeros(n) for _ in range(3)),
        ints(n),
        gaps,
        seen,
        spent.ravel(),
        MOST_SAMPLES,
        sample_s,
        sample,
    )
    target = np.where(went < 0, door, went)
    own = [(door == one, went == one) for one in range(count)]
    each = []
    for one, (first, rest) in enumerate(own):

        def of(values: np.ndarray, none: np.ndarray | float, first=first, rest=rest) -> np.ndarray:
            return np.where(rest, values[n:], np.where(first, values[:n], none))

        row, at = state[one], made.limit[one, steps.SEEN_AT]
        lines = slice(one * samples, one * samples + row[steps.SAMPLES])
        some_s, some = thinned(sample_s[lines]), thinned(sample.reshape(-1, 3)[lines])
        lost = of(evicted, 0)
        each.append(
            ServedRequests(
                arrival_s=of(times["came"], requests.arrival_s),
                scheduled_s=of(times["scheduled"], -1.0),
                first_s=of(times["first"], -1.0),
                end_s=of(times["end"], -1.0),
                evicted=lost,
                gaps=gaps[one * len(GAP_EDGES) : (one + 1) * len(GAP_EDGES)],
                spent_s=spent[one],
                tokens_seen=seen[at : at + made.limit[one, steps.MOST_TOKENS] + 1],
                iterations=int(row[steps.ITERATIONS]),
                runs=int(row[steps.RUNS]),
                evictions=int(lost.sum()),
                peak_blocks=int(row[steps.PEAK_BLOCKS]),
                peak_batch=int(row[steps.PEAK_BATCH]),
                sample_s=some_s,
                sample=some,
                cached=ints(n),
            )
        )
    return ServedApart(
        whole=whole_of(tuple(each), door, target),
        each=tuple(each),
        source=door,
        target=target,
        pulled_s=pulled_s,
        joined_s=joined_s,
        link_s=link_s,
    )
