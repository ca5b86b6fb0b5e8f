"""The answer to a serving question: verdict, metrics of requests, what the ranks hold, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.usage import Usage
from meshwright.plan import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.serve import Serve
from meshwright.timeline import Identity, Timeline


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A time of requests in seconds: mean, percentiles, and the 80% interval of the mean."""

    mean: float
    p50: float
    p90: float
    p99: float
    mean_interval: tuple[float, float] | None = None


class ServingMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a serving workload; times in seconds.

    ``itl_s`` is the time between two tokens of a request, ``queue_s`` from arrival to the first iteration.
    ``throughput_tokens_per_s`` counts tokens of answers from the first arrival to the last token,
    ``goodput_req_per_s`` the requests that kept every objective, ``attainment`` their share.
    """

    ttft_s: Summary
    tpot_s: Summary
    itl_s: Summary
    e2e_s: Summary
    queue_s: Summary
    throughput_tokens_per_s: float
    throughput_interval: tuple[float, float] | None
    throughput_req_per_s: float
    goodput_req_per_s: float
    attainment: float


class Kept(NamedTuple):
    """An objective and how it comes out: the metric, its bound in seconds, the share that has to keep it, the value at
    that percentile, and whose it is, a priority or a client, where it is not everybody's."""

    metric: str
    bound_s: float
    share: float
    value_s: float
    of: str = ""

    @property
    def said(self) -> str:
        """The metric, its percentile and whose it is: ``TTFT p90 of priority 1``."""
        return f"{self.metric[:-2].upper()} p{self.share * 100:g}" + (f" of {self.of}" if self.of else "")

    @property
    def met(self) -> bool:
        """Whether the percentile is within the bound."""
        return self.value_s <= self.bound_s


class GroupMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of some requests: those of one tenant, priority or class of objectives (``kind``). ``attainment`` is
    the share that kept the objectives it is held to."""

    kind: str
    name: str
    requests: int
    ttft_s: Summary
    tpot_s: Summary
    e2e_s: Summary
    attainment: float


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """The fairness between tenants. Service is tokens of prompts and twice those generated.

    ``service_gap_tokens`` is the largest difference of service that two tenants had in any time through which both
    waited, ``jain_index`` Jain's of the service a second that tenants had while others waited too (1: all the same,
    1/n: one of n had everything), ``contended`` the share of the time in which two or more waited."""

    service_gap_tokens: float
    jain_index: float
    contended: float


class ServedPool(NamedTuple):
    """A pool of replicas in an answer: its role, the devices of each replica, the cache blocks of one and the most that
    were held, its largest batch, iterations and preemptions, and the share of the time that it computes."""

    name: str
    role: str
    replicas: int
    devices: int
    kv_blocks: int
    peak_kv_blocks: int
    peak_batch: int
    iterations: int
    preemptions: int
    busy: float


class KvTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """The caches that went from pool to pool: how many ``requests``, the bytes that arrived of the mean one on all
    ranks together, the seconds from when a first token was there and room for its cache until that was there
    (``moved_s``), and the seconds of the mean request by stage of its life (``stages_s``), which sum to its whole
    time."""

    requests: int
    mean_bytes: float
    moved_s: Summary
    stages_s: dict[str, float]


class BesideServing(msgspec.Struct, frozen=True, kw_only=True):
    """A replica whose devices are shared with a best-effort ``job`` ("": none), one on each.

    ``share`` is the mean share of the multiprocessors that the job had, ``there`` the share of the time in which it had
    any, and ``evicted`` how often it was taken off. Requests' iterations took ``slowdown`` times as long as alone.
    Kernels ran in ``busy`` of the time at most, a job's as long as it has any share; in ``busy_alone`` those of
    requests; these ``needed`` that share of the multiprocessors. ``speed`` is the job's over that on whole devices
    alone, ``samples_per_s`` of all its devices."""

    replica: int
    devices: int
    job: str
    share: float
    there: float
    evicted: int
    slowdown: float
    busy_alone: float
    busy: float
    needed: float
    speed: float = 0.0
    samples_per_s: float = 0.0
    samples_interval: tuple[float, float] = (0.0, 0.0)


class PowerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A row of servers behind one supply of ``budget_w``, which feeds ``rated_servers`` at their rated power.

    The plan's ``servers`` draw ``mean_w`` on average and at most ``peak_w`` (of two seconds). At the same requests a
    second for each, ``most_servers`` are fed without the brake and with every objective kept; at these the row draws at
    most ``most_peak_w``, clocks of low priority are capped in ``capped_low`` of the time, all in ``capped_all``, and
    requests take so many times as long as with full clocks, those of low priority (``slower_low``) and others."""

    policy: str
    budget_w: float
    rated_servers: int
    servers: int
    peak_w: float
    mean_w: float
    most_servers: int
    most_interval: tuple[int, int]
    most_peak_w: float
    capped_low: float
    capped_all: float
    slower_low: float
    slower_high: float


class ServingPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted serving workload: the question, the verdict, its metrics, and why.

    ``fits``: weights, workspace and one request's cache are within the memory of every rank; without that there are no
    metrics. ``kv_blocks`` are a replica's (of several pools the fullest one's), ``preemptions`` of all, of which
    ``swaps`` went to the host's memory.
    ``hit_rate`` is the share of the prompts' tokens that were found in the cache. ``attribution`` is the seconds of all
    replicas by cause (``idle``: nobody to serve), ``usage`` what their devices do. ``query_s`` is the time from a query
    of several requests to the last of its answers, ``withdrawn`` the requests that became needless before they were
    answered, which no other metric counts. ``groups`` are the metrics of tenants, priorities and classes of objectives
    where there are several. ``timeline`` has the state of every replica over time, a record of every request and the
    gaps between tokens. ``pools`` are those of a plan of several, ``kv_blocks`` then those of the one with the fewest,
    and ``transfers`` what went between them. ``beside`` are the jobs on the same devices by replica, and ``without``
    the metrics of the same requests without them; ``power`` is of a row of servers.
    """

    model: Model
    cluster: Cluster
    serve: Serve
    plan: Plan
    fits: bool
    metrics: ServingMetrics | None
    objectives: tuple[Kept, ...]
    num_requests: int
    kv_blocks: int
    peak_kv_blocks: int
    peak_batch: int
    preemptions: int
    iterations: int
    hit_rate: float
    swaps: int
    attribution: dict[str, float]
    usage: Usage | None = None
    groups: tuple[GroupMetrics, ...] = ()
    query_s: Summary | None = None
    withdrawn: int = 0
    fairness: Fairness | None = None
    memory: tuple[RankMemory, ...]
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]
    timeline: Timeline
    identity: Identity
    pools: tuple[ServedPool, ...] = ()
    transfers: KvTransfers | None = None
    beside: tuple[BesideServing, ...] = ()
    without: ServingMetrics | None = None
    power: PowerAnswer | None = None

    @property
    def good(self) -> bool:
        """Whether it fits and keeps every objective."""
        return self.fits and all(one.met for one in self.objectives)

    @property
    def tightest(self) -> RankMemory:
        """The rank with the least headroom."""
        return min(self.memory, key=lambda rank: rank.headroom_bytes)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values, without the timeline."""
        metrics = msgspec.to_builtins(self.metrics) if self.metrics else dict.fromkeys(ServingMetrics.__struct_fields__)
        return {
            "format_version": 1,
            "fits": self.fits,
            "good": self.good,
            **metrics,
            "objectives": [one._asdict() | {"met": one.met} for one in self.objectives],
            "requests": self.num_requests,
            "kv_blocks": self.kv_blocks,
            "peak_kv_blocks": self.peak_kv_blocks,
            "peak_batch": self.peak_batch,
            "preemptions": self.preemptions,
            "iterations": self.iterations,
            "hit_rate": self.hit_rate,
            "swaps": self.swaps,
            "query_s": msgspec.to_builtins(self.query_s),
            "withdrawn": self.withdrawn,
            "groups": msgspec.to_builtins(self.groups),
            "fairness": msgspec.to_builtins(self.fairness),
            **self._used(),
            "peak_memory_bytes": max(rank.peak_bytes for rank in self.memory),
            "memory": msgspec.to_builtins(self.memory),
            "attribution": self.attribution,
            "model": self.model.name,
            "cluster": self.cluster.name,
            "num_devices": self.plan.num_ranks,
            "serve": self.serve.text(),
            "plan": self.plan.text(),
            "pools": [one._asdict() for one in self.pools],
            "transfers": msgspec.to_builtins(self.transfers),
            "beside": msgspec.to_builtins(self.beside),
            "power": msgspec.to_builtins(self.power),
            "without_beside": msgspec.to_builtins(self.without),
            "assumptions": msgspec.to_builtins(self.assumptions),
            "warnings": list(self.warnings),
            "identity": self.identity.said(),
        }

    def _used(self) -> dict[str, Any]:
        """The use of devices as plain values."""
        found = msgspec.to_builtins(self.usage) if self.usage else dict.fromkeys(Usage.__struct_fields__)
        return found | {"usage_source": found.pop("source")}
