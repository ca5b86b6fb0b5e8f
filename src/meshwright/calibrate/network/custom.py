"""Fitting the all-reduce kernels of serving engines: curves from runs in a CUDA graph, host time from eager ones."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from meshwright.calibrate.network.rows import Series
from meshwright.calibrate.network.solve import minimise
from meshwright.cost.collectives import envelope, lines
from meshwright.cost.fabric import Constants, Custom
from meshwright.cost.network import custom_lines
from meshwright.work import Group

#: An engine's own kernel ran where it beat NCCL by more than measurements differ; else it handed over to NCCL.
FASTER = 0.9
#: Start and looseness of the fit: 3 us as a graph-launched kernel with a barrier takes, ports reached to 0.7.
START_US, ONE_SHOT, TWO_SHOT, BARRIER_US = 3.0, 0.7, 0.7, 2.0
LOOSENESS = 1.0


def fit_custom(series: list[Series], constants: Constants) -> dict[str, Custom]:
    """Every engine measured on a fabric, by its name."""
    by_library: dict[str, list[Series]] = defaultdict(list)
    for one in series:
        if one.library != "nccl" and len(one.group.hops) == 1:
            by_library[one.library].append(one)
    return {library: _one(found, constants) for library, found in sorted(by_library.items())}


def _one(series: list[Series], constants: Constants) -> Custom:
    graph = [s for s in series if not s.eager]
    limits: dict[int, float] = {}
    for one in graph:
        limits[one.group.size] = max(limits.get(one.group.size, 0.0), _limit(one, constants))
    used = [(s, [i for i, b in enumerate(s.num_bytes) if b <= limits[s.group.size]]) for s in graph]
    used = [(s, indices) for s, indices in used if indices]
    z = np.log([START_US, ONE_SHOT, TWO_SHOT, BARRIER_US])
    if used:
        count = sum(len(indices) for _, indices in used)
        z, _ = minimise(lambda v: _error(v, used, constants), z, z, np.ones(count), LOOSENESS)
    return _custom(z, _host([s for s in series if s.eager]), dict(sorted(limits.items())))


def _host(eager: list[Series]) -> dict[str, float]:
    """Microseconds of the host by device: what the smallest buffers take outside a graph."""
    by_device: dict[str, list[float]] = defaultdict(list)
    for one in eager:
        by_device[one.device.name].append(one.seconds[0] * 1e6)
    host = {name: float(np.median(found)) for name, found in sorted(by_device.items())}
    return host | {"*": float(np.median(list(host.values()))) if host else 0.0}


def _limit(series: Series, constants: Constants) -> float:
    """The size up to which an engine beats NCCL; 0 when it never does."""
    limit = 0.0
    if series.group.hops[0].topology == "pcie" and series.group.size > 2:
        return limit
    for num_bytes, seconds in sorted(zip(series.num_bytes, series.seconds)):
        if seconds > FASTER * _nccl(series.group, num_bytes, constants):
            break
        limit = num_bytes
    return limit


def _nccl(group: Group, num_bytes: float, constants: Constants) -> float:
    return envelope(lines("all_reduce", group, (constants,)), num_bytes)


def _error(z: np.ndarray, used: list[tuple[Series, list[int]]], constants: Constants) -> np.ndarray:
    custom, parts = _custom(z, {}, {}), []
    for series, indices in used:
        curve = np.array(custom_lines(series.group, constants, custom))
        num_bytes, seconds = np.array(series.num_bytes)[indices], np.array(series.seconds)[indices]
        parts.append(np.log(np.min(curve[:, :1] + curve[:, 1:] * num_bytes, axis=0)) - np.log(seconds))
    return np.concatenate(parts)


def _custom(z: np.ndarray, eager_us: dict[str, float], limits: dict[int, float]) -> Custom:
    start_us, one_shot, two_shot, barrier_us = (float(v) for v in np.exp(z))
    return Custom(
        start_us=start_us,
        one_shot=min(1.0, one_shot),
        two_shot=min(1.0, two_shot),
        barrier_us=barrier_us,
        eager_us=eager_us,
        max_bytes=limits,
    )
