"""Rows of ``serving_runs`` as questions, predicted and scored: time per token, time to first token, throughput.

A row says model, devices, lengths and load; the engine is predicted with the profile that has its name, else with the
flagged default, under vLLM V1's policy. What a row leaves open is what its publication says
(:mod:`meshwright.validate.protocols`), never filled by looking at its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.serving import predict_serving
from meshwright.answer.serving_answer import ServingMetrics
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile, engines
from meshwright.cost.roofline import supports
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan import parse as parse_plan
from meshwright.spec import cluster as clusters
from meshwright.spec import model as models
from meshwright.spec.cluster import Cluster
from meshwright.spec.engine_words import KV_BYTES, EngineWords
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.validate.launches import LaunchedServer, launched
from meshwright.validate.protocols import closed_loop, protocol_of
from meshwright.validate.score import Unsupported
from meshwright.validate.tables import number, whole

#: Words of a plan for the precision of a row's weights and products.
PRECISIONS = {"fp8": "fp8", "fp4": "nvfp4", "bf16": "bf16", "fp16": "fp16", "": ""}
#: The same on devices without units for it: the weights alone are stored so, as engines' kernels of 16 bits read them.
STORED = {"nvfp4": "bf16 weights=nvfp4", "fp8": "bf16 weights=fp8"}
#: The same of models that are published so, by the method that their configuration names: which layers it is of.
PUBLISHED = {("fp4", "mxfp4"): "bf16 expert_weights=mxfp4"}
#: What an engine is called in tables, and here.
FAMILIES = (("tensorrt", "trtllm"), ("trtllm", "trtllm"), ("vllm", "vllm"), ("sglang", "sglang"))
#: What platforms are called that engines for NVIDIA's devices are ported to, by the maker of the device.
PORTS = {"AMD": "-rocm", "Intel": "-xpu"}
#: Requests of a rate where a row does not say how many, and at most.
USUAL_REQUESTS, MOST_REQUESTS = 300, 4000
#: Largest batch that engines are asked for in benchmarks of given batches and loads.
MAX_BATCH = 1024


class ServingScore(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row: (measured, predicted) of each time in seconds and of the throughput in tokens a second and device, None
    where the row has none; ``inside``: whether the measured value is in the 80% interval."""

    id: str
    key: str
    tpot: tuple[float, float] | None = None
    ttft: tuple[float, float] | None = None
    throughput: tuple[float, float] | None = None
    inside: bool | None = None


def scored(
    rows: Iterable[dict[str, str]], told: Callable[[int], None] = lambda done: None
) -> Iterator[tuple[dict[str, str], ServingScore | Unsupported]]:
    """Yield every row with its score, or with why it is not predicted."""
    costs: dict[str, Costs] = {}
    for done, row in enumerate(rows):
        told(done)
        key = f"{row['source']}/{row['hardware']}/{row['engine']}"
        library = engine_profile(profile_of(row)).library
        if library not in costs:
            costs[library] = serving_costs(library)
        try:
            metrics, devices = predicted(row, costs=costs[library])
        except MeshwrightError as error:
            first = error.diagnostics[0]
            yield (
                row,
                Unsupported(id=row["id"], key=key, faulty=False, reason=f"{first.code} {_plainly(first.message)}"),
            )
        else:
            yield row, _score(row, key, metrics, devices)


def _plainly(message: str) -> str:
    """Return a reason without the parts that differ from row to row."""
    return message.partition(":")[0].partition("(")[0].strip()


class ServingQuestion(NamedTuple):
    """A row as a question; ``devices`` of one replica."""

    model: Model
    cluster: Cluster
    serve: Serve
    plan: Plan
    requests: Requests
    devices: int


def asked(row: dict[str, str]) -> ServingQuestion:
    """Return the question of a row.

    Raises:
        MeshwrightError: V006 when the row cannot be expressed; M and C codes for unknown models and devices.
    """
    if row["precision"] not in PRECISIONS:
        raise unsupported(f"precision {row['precision']}")
    apart = row["mode"] == "disagg"
    layouts = [_layout(row, half) for half in (HALVES if apart else ("",))]
    serve, requests = _load(row)
    model = msgspec.structs.replace(models.load(row["model"]), max_seq_len=0)  # a benchmark may go beyond it
    begins, count = _placed(layouts, clusters.load_device(row["hardware"]).node.devices)
    cluster = clusters.load(f"{count}x{row['hardware']}")
    words = [f"{one.words(bool(model.mixtures))} {_precision(row, cluster)}".strip() for one in layouts]
    if apart:
        pools = zip(HALVES, words, layouts, begins, strict=True)
        text = " + ".join(
            f"{half}=[{said} dp{one.workers} on={begin}:{begin + one.devices}]" for half, said, one, begin in pools
        )
        words = [f"{text} prefill->decode:kv"]
    devices = sum(one.devices for one in layouts)
    return ServingQuestion(model, cluster, serve, parse_plan(words[0]), requests, devices)


#: Pools of a row whose prompts are computed by some replicas, and whose answers by others, and their columns' prefixes.
HALVES = ("prefill", "decode")


class _RowLayout(NamedTuple):
    """The layout of replicas of a row: so many ``workers``, each with the ranks of an attention group (``tp``), the
    groups (``adp``), stages and ranks that the experts are split over."""

    workers: int
    tp: int
    adp: int
    pp: int
    ep: int

    @property
    def devices(self) -> int:
        """Devices of all of them."""
        return self.workers * self.tp * self.adp * self.pp

    def words(self, mixtures: bool) -> str:
        """Return the layout of one as a plan says it, of a model that has experts or has none."""
        return f"tp{self.tp * self.adp} adp{self.adp} pp{self.pp} ep{self.ep if mixtures else 1}"


def _placed(layouts: list[_RowLayout], node: int) -> tuple[list[int], int]:
    """Return the first devices of layouts on nodes of so many, whose replicas lie in as few as they can, and how many
    devices these nodes have."""
    begins, end = [], 0
    for one in layouts:
        size = min(one.tp * one.adp * one.pp, node)
        begins.append(-(-end // size) * size)
        end = begins[-1] + one.devices
    return begins, end if end <= node else -(-end // node) * node


def _layout(row: dict[str, str], half: str) -> _RowLayout:
    """Return the layout of a row, or of a ``half`` of one.

    Raises:
        MeshwrightError: V006 where it does not say how many ranks there are.
    """
    prefix = f"{half}_" if half else ""
    tp = whole(row, f"{prefix}tp")
    if not tp:
        raise unsupported("tensor parallelism not stated")
    workers = whole(row, f"{prefix}workers", 1) if half else 1
    adp, pp, ep = (whole(row, f"{prefix}{name}", 1) or 1 for name in ("dp", "pp", "ep"))
    if not half and ep > 1 and whole(row, "num_gpus") == tp * adp * pp * ep:
        tp *= ep  # the row's tp is that of the experts: the ranks that share attention split them further
    return _RowLayout(workers or 1, tp, adp, pp, ep)


def predicted(
    row: dict[str, str], profile: EngineProfile | None = None, costs: Costs | None = None
) -> tuple[ServingMetrics, int]:
    """Return the metrics of a row's question, and its devices; under a `profile` without intervals. Rows of one model
    and device share the prices that are in their `costs`.

    Raises:
        MeshwrightError: what :func:`asked` says; whatever refuses the question.
    """
    asking = asked(row)
    engine = profile or engine_profile(asking.serve.engine.profile)
    found = predict_serving(
        asking.model,
        asking.cluster,
        asking.serve,
        asking.plan,
        requests=asking.requests,
        profile=engine,
        costs=costs,
        detail=profile is None,
    )
    if found.metrics is None:
        raise unsupported("the weights leave no room for a cache")
    return found.metrics, asking.devices


def _precision(row: dict[str, str], cluster: Cluster) -> str:
    """Return the words of a plan for a row's precision on its devices."""
    published = models.config(row["model"]).get("quantization_config", {}).get("quant_method", "")
    if (row["precision"], published) in PUBLISHED:
        return PUBLISHED[row["precision"], published]
    word = PRECISIONS[row["precision"]]
    return word if supports(cluster.islands[0].device, word) else STORED.get(word, word)


def _load(row: dict[str, str]) -> tuple[Serve, Requests]:
    """Return the workload that a row describes, and its requests."""
    prompt, output = whole(row, "isl"), whole(row, "osl")
    if not prompt or not output:
        raise unsupported("lengths not stated")
    protocol = protocol_of(row)
    concurrency, batch, rate = whole(row, "concurrency"), whole(row, "batch_size"), number(row, "rate_req_s")
    shape = (
        whole(row, "tp", 1) or 1,
        whole(row, "dp", 1) or 1,
        concurrency or 0,
        prompt,
        output,
        row.get("engine_version", ""),
    )
    scripts = protocol.scripts if row["mode"] == "agg" else ()  # they launch one server
    words = launched(scripts, row, family(row["engine"]), LaunchedServer(row["precision"], *shape))
    kv = row.get("kv_dtype") or words.get("kv") or (protocol.kv if row["precision"] in ("fp8", "fp4") else "")
    profile = profile_of(row)
    policy = engine_profile(profile).policy if row["mode"] == "agg" else EngineWords().policy
    words |= {"kv": kv if kv in KV_BYTES else "bf16", "profile": profile, "policy": policy}
    engine = EngineWords(**{"max_batch": MAX_BATCH} | words)
    said = {"prompt": prompt, "output": output, "engine": engine}
    if row["load_type"] == "concurrency" and concurrency:
        serve = Serve(concurrency=concurrency, requests=concurrency * protocol.rounds, **said)
        return serve, closed_loop(protocol, concurrency, prompt, output)
    if row["load_type"] == "static_batch" and batch:
        serve = Serve(batch=batch, requests=batch, **said)
    elif row["load_type"] == "poisson_rate" and rate:
        serve = Serve(rate=rate, requests=min(whole(row, "num_requests") or USUAL_REQUESTS, MOST_REQUESTS), **said)
    else:
        raise unsupported(f"load {row['load_type']}")
    return serve, serve.drawn()


def family(engine: str) -> str:
    """Return the engine that a row names, without its version and those who ship it."""
    said = engine.lower()
    return next((name for word, name in FAMILIES if word in said), said.split()[0] if said.strip() else "")


def ported(row: dict[str, str]) -> str:
    """Return a row's engine, with the platform that it was ported to where that is not the one it is written for: its
    kernels are others there."""
    engine = family(row["engine"])
    try:
        vendor = clusters.load_device(row["hardware"]).vendor
    except MeshwrightError:
        return engine  # it is refused elsewhere
    return engine + PORTS.get(vendor, "") if engine in {name for _, name in FAMILIES} else engine


def profile_of(row: dict[str, str]) -> str:
    """Return the profile of a row's engine of the time it was measured, else the default."""
    return dated(ported(row), protocol_of(row).date)


def dated(engine: str, date: str) -> str:
    """Return the name of an engine's profile for a month (``2024-10``, "" today), else the default: the one that stands
    for versions until the first month from then on."""
    mine = [p for p in engines().values() if p.engine == engine]
    old = sorted((p.until, p.name) for p in mine if p.until and date and date <= p.until)
    return old[0][1] if old else next((p.name for p in mine if not p.until), "default")


def unsupported(reason: str) -> MeshwrightError:
    """Return the refusal of what is measured and not predicted."""
    return MeshwrightError.one("V006", reason)


def _score(row: dict[str, str], key: str, metrics: ServingMetrics, devices: int) -> ServingScore:
    def beside(column: str, value: float, scale: float = 1.0) -> tuple[float, float] | None:
        found = number(row, column)
        return (found * scale, value) if found else None

    tpot = beside("tpot_ms", metrics.tpot_s.mean, 1e-3)
    ttft = beside("ttft_ms", metrics.ttft_s.mean, 1e-3)
    rate = beside("throughput_tok_s_per_gpu", metrics.throughput_tokens_per_s / devices)
    inside = None
    if tpot is not None and metrics.tpot_s.mean_interval is not None:
        low, high = metrics.tpot_s.mean_interval
        inside = low <= tpot[0] <= high
    elif rate is not None and metrics.throughput_interval is not None:
        low, high = (edge / devices for edge in metrics.throughput_interval)
        inside = low <= rate[0] <= high
    return ServingScore(id=row["id"], key=key, tpot=tpot, ttft=ttft, throughput=rate, inside=inside)


def summary(found: list[ServingScore], unsupported: list[Unsupported]) -> dict[str, dict[str, float]]:
    """Return the metrics by ``source/hardware/engine`` and over all."""
    keys = sorted({s.key for s in found} | {u.key for u in unsupported})
    out = {}
    for key in [*keys, "all"]:
        mine = [s for s in found if key in (s.key, "all")]
        out[key] = _metrics(mine, sum(key in (u.key, "all") for u in unsupported))
    return out


def _metrics(rows: list[ServingScore], unsupported: int) -> dict[str, float]:
    out: dict[str, float] = {"rows": len(rows), "unsupported": unsupported}
    for name in ("tpot", "ttft", "throughput"):
        pairs = np.array([getattr(s, name) for s in rows if getattr(s, name) is not None]).reshape(-1, 2)
        if not len(pairs):
            continue
        ratio = pairs[:, 1] / pairs[:, 0] - 1
        out |= {
            f"{name}_rows": len(pairs),
            f"{name}_median_ape": float(np.median(np.abs(ratio))),
            f"{name}_mean_ape": float(np.abs(ratio).mean()),
            f"{name}_p90_ape": float(np.quantile(np.abs(ratio), 0.9)),
            f"{name}_bias": float(ratio.mean()),
        }
    covered = [s.inside for s in rows if s.inside is not None]
    return out | ({"coverage80": float(np.mean(covered))} if covered else {})


def line(row: dict[str, str], found: ServingScore | Unsupported) -> dict[str, object]:
    """Return a row's prediction as it is written beside others."""
    said = {"table": "serving_runs", **{name: row[name] for name in ("id", "source", "hardware", "flags")}}
    if isinstance(found, Unsupported):
        return said | {"unsupported": found.reason}
    for name in ("tpot", "ttft", "throughput"):
        pair = getattr(found, name)
        if pair is not None:
            said |= {f"measured_{name}": pair[0], f"predicted_{name}": pair[1]}
    return said | {"unsupported": ""}
