"""Collectives that training jobs measured on themselves before they started: bus bandwidths in a step's notes.

``busbw GB/s in job: AR=96.2 AG=54.1 RS=53.0`` over all ranks of the job. The size is not stated; 256 MiB is where
nccl-tests on two nodes of the same kind reach the jobs' own 345 GB/s for an all-reduce over 16 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from pathlib import Path
from statistics import median

import msgspec

from meshwright.calibrate.network.rows import Series, group_of
from meshwright.cost.fabric import FabricProfile, Fabrics
from meshwright.cost.network import Network
from meshwright.cost.reached import GATHERS, seconds_of
from meshwright.validate.cases import busbw_in_job
from meshwright.validate.faults import faulty
from meshwright.validate.tables import find, rows
from meshwright.work import REACHED_BYTES, Collective

#: Values tried for microseconds of a ring's step, and for the most nodes of a tree.
STEPS_US = tuple(1.1**i for i in range(60))
TREE_NODES = (0.0, 2.0, 4.0, 8.0)
#: Words of a network, and how the collectives table names the same one.
NETWORKS = (("EFA 3200", "p5.48xlarge"),)
SOURCE = "bus bandwidths of training jobs, gkarfakis19/Rapid-LLM (Hugging Face nanotron sweep), Apache-2.0"
#: A median over fewer jobs than this says little.
MIN_JOBS = 10


def read_job_series(data_dir: Path) -> list[Series]:
    """Points per (hardware, ranks, operation): the median over the jobs of that size, then the fastest of them; empty
    without such notes."""
    path = find(data_dir, "training_steps")
    found: dict[tuple[str, int, int, str, str], list[float]] = {}
    for row in rows(path, "training_steps") if path is not None else ():
        reached = busbw_in_job(row["notes"])
        network = next((name for word, name in NETWORKS if word in row["network"]), None)
        gpus, per_node = int(float(row["num_gpus"])), int(float(row["gpus_per_node"]))
        if not reached or network is None or gpus <= per_node or faulty(row):
            continue
        for op, speed in reached.items():
            seconds = seconds_of(speed, 2 if op == "all_reduce" else 1, gpus)
            found.setdefault((row["hardware"], gpus, per_node, op, network), []).append(seconds)
    return [
        _series(hardware, gpus, per_node, op, network, [median(values), min(values)])
        for (hardware, gpus, per_node, op, network), values in sorted(found.items())
        if len(values) >= MIN_JOBS
    ]


def _series(hardware: str, gpus: int, per_node: int, op: str, network: str, seconds: list[float]) -> Series:
    place = {
        "hardware": hardware,
        "gpus": str(gpus),
        "gpus_per_node": str(per_node),
        "network": network,
        "source": "training_jobs",
    }
    group, device = group_of(place)
    return Series("training_jobs", hardware, op, "nccl", False, device, group, "", [REACHED_BYTES] * 2, seconds)


def with_steps_at_scale(profiles: tuple[FabricProfile, ...], series: list[Series]) -> tuple[FabricProfile, ...]:
    """The profiles with what jobs at scale tell of their fabric: bus bandwidth that falls with the number of ranks at
    one size is time of each ring step, and an all-reduce that falls with it runs no tree."""
    out = {p.name: p for p in profiles}
    told: dict[str, list[Series]] = {}
    for one in series:
        profile, only_kind = Fabrics(profiles).find(one.group.hops[-1], one.device.name, one.device.scale_up)
        if not only_kind:
            told.setdefault(profile.name, []).append(one)
    for name, mine in told.items():
        gathers = [s for s in mine if s.op in GATHERS]
        reduces = [s for s in mine if s.op == "all_reduce"]
        unknown = [op for op in GATHERS if op not in out[name].median_error]
        shares = {op: max((_share(s, out[name]) for s in gathers if s.op == op), default=None) for op in unknown}
        out[name] = _with(out[name], {op: share for op, share in shares.items() if share is not None})
        if gathers:
            out[name] = _best(out, name, gathers, ({"gather_us": step} for step in STEPS_US))
        if reduces:
            choices = ({"reduce_us": step, "tree_nodes": most} for most in TREE_NODES for step in STEPS_US)
            out[name] = _best(out, name, reduces, choices)
        out[name] = msgspec.structs.replace(out[name], source=f"{out[name].source}; steps at scale: {SOURCE}")
    return tuple(out.values())


def _share(one: Series, profile: FabricProfile) -> float:
    """Return the share of a node's port that the fastest job reached."""
    outside = one.group.hops[-1]
    port = outside.gb_s * 1e9 * min(1.0, (2 / outside.members) ** profile.constants.contention)
    n = one.group.size
    return min(1.0, (n - 1) / n * REACHED_BYTES / one.seconds[1] / port)


def _best(
    known: dict[str, FabricProfile], name: str, series: list[Series], choices: Iterable[dict[str, float]]
) -> FabricProfile:
    tried = [_with(known[name], choice) for choice in choices]
    return min(tried, key=lambda p: _error(({**known, name: p}).values(), series))


def _with(profile: FabricProfile, constants: dict[str, float]) -> FabricProfile:
    rounded = {field: float(f"{value:.3g}") for field, value in constants.items()}
    return msgspec.structs.replace(profile, constants=msgspec.structs.replace(profile.constants, **rounded))


def _error(profiles: Iterable[FabricProfile], series: list[Series]) -> float:
    network = Network(Fabrics(tuple(profiles)))
    priced = (network(Collective(op=s.op, num_bytes=REACHED_BYTES, group=s.group), s.device).seconds for s in series)
    return sum(abs(log(seconds / s.seconds[0])) for seconds, s in zip(priced, series))
