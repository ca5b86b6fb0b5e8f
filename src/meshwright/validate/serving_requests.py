"""Measured requests of a server, one by one: served again by the simulator with their own arrivals and lengths.

A folder ``serving_requests`` holds tables ``NAME_requests.csv`` (or .gz) of runs, and beside each ``NAME_configs.json``
with what every run served with: as LLMServingSim writes it (the arguments of a vLLM server, its own count of cache
blocks), or as the plan of a DistServe experiment. A run is scored by its mean times, and by how far the distributions
of its requests' times are apart (Kolmogorov and Smirnov's distance).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.answer.latency import Times, times_of, times_of_all
from meshwright.answer.replica import built, served_by
from meshwright.answer.serving_pools import ServedPools
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile, engines
from meshwright.cost.fabric import shipped
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan
from meshwright.plan import parse as parse_plan
from meshwright.spec import cluster as clusters
from meshwright.spec import model as models
from meshwright.spec.cluster import Cluster
from meshwright.spec.engine_words import EngineWords
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.validate import tables
from meshwright.validate.serving import dated, family, unsupported

#: The folder, and the table's name in messages.
FOLDER = "serving_requests"
#: Month in which the servers of a file of plans were measured: DistServe's branch is of the spring of 2024.
PLANS_DATE = "2024-04"
#: Its authors published the times of iterations, which are profiles of their own.
PLANS_ENGINE = "distserve"
#: What its evaluation launches both engines with (evaluation/2-benchmark-serving/2-start-api-server.py): tokens of a
#: cache block, share of a device's memory, most requests at a time, and bytes of the host that evicted caches go to.
PLANS_BLOCK, PLANS_MEMORY, PLANS_BATCH, PLANS_SWAP = 16, 0.92, 1024, 16 * 2.0**30
#: The same: most tokens of prompts in an iteration of vLLM, which it makes room for before it counts its cache, and of
#: DistServe's first half.
PLANS_TOKENS, HALVES_TOKENS = 65536, 32768


class Setup(NamedTuple):
    """The setup of a run: the engine's profile and its words, the plan, how many devices that has, and the cache
    blocks of each of its pools where the engine counted them."""

    words: EngineWords
    plan: str
    devices: int
    blocks: Mapping[str, int] = MappingProxyType({})


class RunScore(NamedTuple):
    """One run: its requests, errors of the means as fractions, distances of the distributions; or why it is not
    predicted."""

    run: str
    requests: int
    metrics: dict[str, float]
    unsupported: str = ""


def files(folder: Path) -> list[Path]:
    """Return the tables of requests in the folder beside the other tables."""
    inside = folder / FOLDER
    return sorted(p for p in inside.glob("*_requests.csv*") if p.name.endswith((".csv", ".csv.gz")))


class MeasuredRun(NamedTuple):
    """A run as a question, with the cache ``blocks`` of its pools by name where they are known, and its measured
    seconds to the first token and per token [requests] (``nan``: none)."""

    run: str
    model: Model
    cluster: Cluster
    serve: Serve
    plan: Plan
    requests: Requests
    measured: dict[str, np.ndarray]
    blocks: Mapping[str, int] = MappingProxyType({})

    def times(self, profile: EngineProfile, costs: Costs) -> Times:
        """Return the predicted times of its requests in an engine.

        Raises:
            MeshwrightError: V006 where its weights leave no room.
        """
        asked = (self.model, self.cluster, self.serve, self.plan, self.requests, costs, profile)
        if self.plan.several:
            return times_of(self.requests, ServedPools(*asked, blocks=self.blocks).served(self.requests))
        made = built(*asked)
        if made.replica is None:
            raise unsupported("the weights leave no room for a cache")
        return times_of_all(*served_by(self.serve, made.replica, self.requests, 1))


def scored(path: Path, told: Callable[[int], None] = lambda done: None) -> list[RunScore]:
    """Return the score of every run of a table.

    Raises:
        MeshwrightError: V001, V002 and V004 for a table, V001 for a file of configurations, that cannot be read.
    """
    out = []
    for done, (run, requests, found) in enumerate(runs(path)):
        told(done)
        try:
            if isinstance(found, MeshwrightError):
                raise found
            profile = engine_profile(found.serve.engine.profile)
            out.append(RunScore(run, requests, errors(found, found.times(profile, serving_costs(profile.library)))))
        except MeshwrightError as error:
            first = error.diagnostics[0]
            out.append(RunScore(run, requests, {}, f"{first.code} {first.message}"))
    return out


def runs(path: Path) -> Iterator[tuple[str, int, MeasuredRun | MeshwrightError]]:
    """Yield every run of a table by name, with its number of requests, as a question or with why it is none.

    Raises:
        MeshwrightError: V001, V002 and V004 for a table, V001 for a file of configurations, that cannot be read.
    """
    by_run: dict[str, list[dict[str, str]]] = {}
    for _, row in tables.numbered(path, FOLDER):
        by_run.setdefault(row["run"], []).append(row)
    configs = _configs(path)
    for run, rows in sorted(by_run.items()):
        try:
            found = _asked(run, rows, configs.get(run, {}), path)
        except MeshwrightError as error:
            found = error
        yield run, len(rows), found


def _configs(path: Path) -> dict[str, Any]:
    where = path.with_name(re.sub(r"_requests\.csv(\.gz)?$", "_configs.json", path.name))
    try:
        found = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise MeshwrightError.one("V001", f"cannot read what the runs served with: {wrong}", place=str(where)) from None
    return found if isinstance(found, dict) else {}


def _asked(run: str, rows: list[dict[str, str]], config: dict[str, Any], path: Path) -> MeasuredRun:
    """Return the question of a run.

    Raises:
        MeshwrightError: V006 when what it served with is not known; M and C codes for unknown models and devices.
    """
    rows = sorted(rows, key=lambda row: float(row["arrival_s"]))
    column = {name: np.array([float(row[name] or "nan") for row in rows]) for name in tables.NUMBERS[FOLDER]}
    setup = _setup(rows[0], config, path)
    requests = Requests(
        arrival_s=column["arrival_s"] - column["arrival_s"][0],
        prompt=column["prompt_tokens"].astype(np.int64),
        output=column["output_tokens"].astype(np.int64),
    )
    if setup.words.prefix_cache:
        requests = _named(requests, setup.words.block)
    model = msgspec.structs.replace(models.load(rows[0]["model"]), max_seq_len=0)
    cluster = _linked(clusters.load(f"{setup.devices}x{rows[0]['hardware']}"), config.get("cluster", {}))
    plan, serve = (
        parse_plan(setup.plan).on(cluster.num_devices),
        Serve(rate=1.0, prompt=1, output=1, engine=setup.words),
    )
    more = column["output_tokens"] - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        measured = {
            "ttft": column["first_token_s"] - column["arrival_s"],
            "tpot": np.where(more > 0, (column["last_token_s"] - column["first_token_s"]) / more, np.nan),
        }
    return MeasuredRun(run, model, cluster, serve, plan, requests, measured, setup.blocks)


def _named(requests: Requests, block: int) -> Requests:
    """Return requests of which nothing in common is known, with names for the blocks of each and of its answer: a
    request that is evicted finds again those that nobody has taken meanwhile."""
    ends = np.cumsum((requests.prompt + requests.output) // block)
    begins = np.concatenate([[0], ends])
    return msgspec.structs.replace(requests, hashes=np.arange(begins[-1]), hash_ptr=begins, hash_block=block)


def _linked(cluster: Cluster, said: dict[str, Any]) -> Cluster:
    """Return the cluster of a run with the link between its devices as LLMServingSim's configuration of the machine
    says it. These figures are what rings take, fitted to collectives of its authors' machine: so many 2^30 bytes a
    second, and nanoseconds of each step (its docs/reference/cluster-config.md). The port and its latency are those with
    which rings over such a fabric come to them. Where nothing is said the link is the catalog's."""
    rate, step_ns = said.get("link_bw"), said.get("link_latency")
    known = all(isinstance(value, int | float) and value > 0 for value in (rate, step_ns))
    if not known or cluster.num_devices < 2:
        return cluster
    (island,), pair = cluster.islands, Mesh(Plan(layout=Layout(dp=cluster.num_devices)), cluster).pair(0, 1)
    ring = shipped().find(pair.hops[0], island.device.name, island.device.scale_up)[0].constants
    port = {"gb_s": rate * 2**30 / 1e9 / ring.all_reduce, "latency_us": step_ns / 1e3 / ring.step_simple}
    levels = (level if level.scale_out else msgspec.structs.replace(level, **port) for level in island.levels)
    linked = msgspec.structs.replace(island, levels=tuple(levels))
    return msgspec.structs.replace(cluster, islands=(linked,))


def errors(run: MeasuredRun, times: Times) -> dict[str, float]:
    """Return the errors of the predicted times of a run's requests: of their means, and the distributions' distance."""
    found = {}
    for name, told in run.measured.items():
        mine = getattr(times, name)
        known = ~np.isnan(told) & ~np.isnan(mine)
        found[f"{name}_mean_ape"] = abs(float(mine[known].mean() / told[known].mean()) - 1)
        found[f"{name}_bias"] = float(mine[known].mean() / told[known].mean()) - 1
        found[f"{name}_ks"] = distance(mine[known], told[known])
    return found


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference of two samples' cumulative distributions (Kolmogorov-Smirnov)."""
    at = np.sort(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def _setup(row: dict[str, str], config: dict[str, Any], path: Path) -> Setup:
    """Return what a run served with.

    Raises:
        MeshwrightError: V006 when its configuration is not there, or of a kind that is not predicted.
    """
    if "meta" in config:
        return _of_server(row, config["meta"])
    plan = config.get("plan", {})
    if not plan:
        raise unsupported("what the run served with is not stated")
    if plan.get("prefill") == "unknown":
        raise unsupported("plan not stated")
    if plan.get("prefill"):
        return _of_halves(plan["prefill"], plan["decode"], lambda tp, pp: _cache_tokens(path, row["model"], tp, pp))
    tp, pp = int(plan.get("tp", 1)), int(plan.get("pp", 1))
    name = f"{PLANS_ENGINE}-{family(row['engine'])}"
    words = EngineWords(
        policy="vllm-v0",
        profile=dated(name if name in engines() else family(row["engine"]), PLANS_DATE),
        block=PLANS_BLOCK,
        budget=PLANS_TOKENS,
        max_batch=PLANS_BATCH,
        memory=PLANS_MEMORY,
    )
    return Setup(words, f"tp{tp} pp{pp}", tp * pp)


def _of_halves(prefill: str, decode: str, counted: Callable[[int, int], int]) -> Setup:
    """Return the setup of DistServe's engine: a replica of each half, next to each other, whose caches hold what the
    engine `counted` for its layout (0: what the devices' memory leaves). What has no room is swapped."""
    halves = {"prefill": prefill, "decode": decode}
    layouts = {name: parse_plan(half).on(1).layout for name, half in halves.items()}
    middle, end = layouts["prefill"].num_ranks, sum(one.num_ranks for one in layouts.values())
    plan = f"prefill=[{prefill} dp1 on=0:{middle}] + decode=[{decode} dp1 on={middle}:{end}] prefill->decode:kv"
    words = EngineWords(
        policy="vllm-v0",
        profile=dated(PLANS_ENGINE, PLANS_DATE),
        block=PLANS_BLOCK,
        budget=HALVES_TOKENS,
        max_batch=PLANS_BATCH,
        memory=PLANS_MEMORY,
        preempt="swap",
        host_bytes=PLANS_SWAP,
    )
    tokens = {name: counted(one.tp, one.pp) for name, one in layouts.items()}
    return Setup(words, plan, end, {name: count // PLANS_BLOCK for name, count in tokens.items()})


def _of_server(row: dict[str, str], meta: dict[str, Any]) -> Setup:
    """Return the setup of a vLLM server from its arguments and its own count of cache blocks, where it is known."""
    said, cache = meta.get("engine_kwargs", {}), meta.get("kv_cache", {})
    words = EngineWords(
        profile=dated(family(row["engine"]), ""),
        max_batch=int(said.get("max_num_seqs") or EngineWords().max_batch),
        budget=int(said.get("max_num_batched_tokens") or 0),
        block=int(cache.get("block_size") or EngineWords().block),
        kv_blocks=int(cache.get("num_gpu_blocks") or 0),
        memory=float(cache.get("gpu_memory_utilization") or EngineWords().memory),
        prefix_cache=bool(cache.get("enable_prefix_caching")),
    )
    tp, pp = (int(said.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline"))
    return Setup(words, f"tp{tp} pp{pp}", tp * pp)


def _cache_tokens(path: Path, model: str, tp: int, pp: int) -> int:
    """Return the tokens that the cache of a plan holds as the engine counted them, 0 where it is not known."""
    where = path.with_name(path.name.partition("_")[0] + "_max_num_tokens.csv")
    if not where.is_file():
        return 0
    lines = [line.split(",") for line in where.read_text(encoding="utf-8").splitlines()[1:]]
    return next((int(n) for name, a, b, n in lines if (name, a, b) == (model, str(tp), str(pp))), 0)


def summary(found: list[RunScore]) -> dict[str, dict[str, float]]:
    """Return the metrics by run, and over all runs that are predicted their means."""
    out: dict[str, dict[str, float]] = {}
    for one in found:
        out[one.run] = {"requests": one.requests, "unsupported": int(bool(one.unsupported)), **one.metrics}
    known = [one for one in found if one.metrics]
    total = {"requests": sum(one.requests for one in known), "unsupported": len(found) - len(known)}
    means = {name: float(np.mean([one.metrics[name] for one in known])) for name in (known[0].metrics if known else ())}
    return out | {"all": total | means}
