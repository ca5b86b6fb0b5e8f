"""The answer: what a training step of a plan is predicted to take, hold and cost, and why.

A prediction is a number with an interval and a source. Everything a report, a comparison or a script needs is
in this record; nothing in it has to be computed again.
"""

from __future__ import annotations

from importlib import import_module
from math import log
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.answer.drawn import BatchSpread
from meshwright.answer.expert_metrics import ExpertAnswer
from meshwright.answer.fed_answer import FeedAnswer
from meshwright.answer.metrics import TrainMetrics
from meshwright.answer.risk import fit_probability, peak_interval
from meshwright.dataframe import dataframe
from meshwright.plan import Plan
from meshwright.quantity import gibibytes, seconds
from meshwright.simulate.decide import CodeChoice
from meshwright.simulate.divide import SumChoice
from meshwright.spec.cluster import Cluster
from meshwright.spec.goal import Goal
from meshwright.spec.model import Model
from meshwright.spec.network_bill import network_bill
from meshwright.spec.workload import Train
from meshwright.sync.tokens import TokensFactor
from meshwright.timeline import Identity, Timeline, Zoom

if TYPE_CHECKING:
    from pandas import DataFrame

    from meshwright.lower.filling import Filled
    from meshwright.simulate.clients import ClientRounds
    from meshwright.simulate.stragglers import Stragglers
    from meshwright.simulate.swarm import SwarmRun

FORMAT_VERSION = 1

#: Memory that an allocator has reserved and no tensor uses any more, given back when nothing else is left.
GIVEN_BACK = "buffers in flight"


class Assumption(msgspec.Struct, frozen=True):
    """An assumption of an answer, which the user did not state: its name, its value, its source."""

    name: str
    value: str
    source: str
    flagged: bool = False


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of one rank class: capacity, peak, what is alive at the peak (bytes by category) and when."""

    rank: str
    multiplicity: int
    capacity_bytes: float
    peak_bytes: float
    at_s: float
    alive: dict[str, float]

    @property
    def headroom_bytes(self) -> float:
        """Capacity that is free or given back when it is needed; negative when the rank runs out of memory."""
        return self.capacity_bytes - self.needed_bytes

    @property
    def needed_bytes(self) -> float:
        """The peak without what is given back when it is needed."""
        return self.peak_bytes - self.alive.get(GIVEN_BACK, 0.0)


class TierMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a tier behind the devices (``host`` or ``nvme``) on the fullest node of an island: what its
    ``num_ranks`` hold there together, bytes by category, of what it has room for."""

    tier: str
    island: str
    num_ranks: int
    capacity_bytes: float
    peak_bytes: float
    alive: dict[str, float]

    @property
    def headroom_bytes(self) -> float:
        """Room that is left; negative where the state does not fit."""
        return self.capacity_bytes - self.peak_bytes


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """The relative change of the step time when one thing gets 10% better: ``change`` -0.021 is 2.1% faster."""

    name: str
    what: str
    change: float


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """Cost and energy of a step, and the power drawn meanwhile; None where the catalog has no price or power."""

    usd_per_step: float | None
    usd_per_million_tokens: float | None
    joules_per_step: float | None
    joules_per_token: float | None
    source: str
    power_w: float | None = None


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of a training run and how it comes out: ``value`` (days or US dollars, as ``limit``) with its 80%
    interval, and the ``probability`` that it stays within the limit."""

    what: str
    limit: float
    value: float
    interval: tuple[float, float]
    probability: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    """Time and cost for the workload's tokens. ``lines`` are (what, seconds or None for "not included", note).

    ``draws_s`` are the seconds of the run under draws of the errors of the costs: step time and run time go together,
    so the 80% intervals are the step's. How often devices fail is taken as known. ``price_usd_hour`` is that of all
    ``num_devices`` for an hour, from ``price_source``. ``timeline`` is what happens in the first draw of a world, event
    by event; None where failures are as on average.
    """

    tokens: float
    num_steps: int
    seconds: float
    usd: float | None
    lines: tuple[tuple[str, float | None, str], ...]
    num_devices: int
    seconds_interval: tuple[float, float]
    usd_interval: tuple[float, float] | None
    draws_s: tuple[float, ...]
    price_usd_hour: float | None
    price_source: str
    timeline: Timeline | None = None

    def to_json(self) -> dict[str, Any]:
        """The run as plain values, without its timeline."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in self.__struct_fields__ if name != "timeline"}

    @property
    def days(self) -> float:
        return self.seconds / 86_400

    @property
    def device_hours(self) -> float:
        return self.num_devices * self.seconds / 3600

    def probability(self, seconds: float) -> float:
        """The probability that the run ends within so many seconds: the draws are products of log-normal errors, so
        one log-normal distribution is laid through them. Without errors it is 0 or 1."""
        logs = [log(draw) for draw in self.draws_s]
        if len(logs) < 2 or stdev(logs) < 1e-9:
            return float(self.seconds <= seconds)
        return NormalDist(fmean(logs), stdev(logs)).cdf(log(seconds))

    def against(self, goal: Goal | None) -> tuple[Limit, ...]:
        """The limits of a goal; a budget is left out where no price is known."""
        found = []
        if goal is not None and goal.days is not None:
            low, high = (s / 86_400 for s in self.seconds_interval)
            chance = self.probability(goal.days * 86_400)
            found.append(
                Limit(what="deadline", limit=goal.days, value=self.days, interval=(low, high), probability=chance)
            )
        if goal is not None and goal.budget_usd is not None and self.usd is not None and self.usd_interval is not None:
            chance = self.probability(goal.budget_usd / self.usd * self.seconds)
            found.append(
                Limit(
                    what="budget",
                    limit=goal.budget_usd,
                    value=self.usd,
                    interval=self.usd_interval,
                    probability=chance,
                )
            )
        return tuple(found)


class RoundTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of replicas that average their parameters every ``every`` of them, in so many ``parts`` at different steps
    of a round, applied ``delay`` steps later (their staleness): seconds of an ``inner`` step, and of one that exchanges
    a part, with what others take longer for it; where replicas meet some others alone, in so many ``turns`` of a round,
    with others each time. The step time of a prediction is their mean over a round.

    ``waits_s`` are seconds of a round that steps wait for a part that has not arrived, ``part_bytes`` the most that a
    rank sends of one, and ``hidden_gbit_s`` the rate at which no step waits for it, None where it is applied at once:
    the demand on a rank's link."""

    every: float
    inner_s: float
    averaging_s: float
    parts: int = 1
    turns: int = 0
    delay: int = 0
    waits_s: float = 0.0
    part_bytes: float = 0.0
    hidden_gbit_s: float | None = None


class PoolShare(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's part in a step: the share of the step that its busiest ranks compute (``busy``), and that the mean of
    its ranks waits for other stages and pools (``waits``); peak and capacity of its fullest rank in bytes. The
    ``bottleneck`` is the pool whose ranks compute most."""

    name: str
    num_ranks: int
    busy: float
    waits: float
    peak_bytes: float
    capacity_bytes: float
    bottleneck: bool


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted training step: the question, the verdict, its metrics, and why.

    The question is ``model``, ``cluster``, ``train`` and ``plan`` (resolved: ``dp`` filled in). The verdict is whether
    it ``fits``; ``warnings`` are things the user should know before believing the answer, ``cautions`` those of them
    that belong beside its first line. ``metrics`` are its numbers with their intervals; the most asked of them have
    names here too (``step_time_s``). Why is in the ``attribution`` (seconds by cause), the ``memory`` of every rank
    class, the ``timeline`` and the ``assumptions``. ``schedule_params`` are what a schedule made for given times was
    given: with them the run has the same order. ``goal`` is what the training run was asked to stay within. ``batches``
    say how steps differ where documents do; ``round`` where replicas average now and then: the timeline is that of the
    step that averages. ``stragglers``: how steps vary in a world in which ranks do. ``clients``: the rounds of those of
    a server. ``swarm``: the steps of peers that are chosen as it goes. ``choice``: how the layers whose gradients are
    encoded, or the parts of sums, were chosen, where the plan left that open. ``equal_loss``: how many times the tokens
    of ``sync=step`` the plan takes to its loss, where it trains differently and that is known. ``pools`` say what each
    of several does. ``memory_sigma``: the relative error of its peaks of memory. ``tiers``: what hosts and drives hold,
    where state lies there. ``experts``: how they are loaded, where the question says how tokens are routed. ``feed``:
    what steps wait for data, which they then include; the timeline does not. ``filled``: how full of frozen layers
    waits are.
    """

    model: Model
    cluster: Cluster
    train: Train
    plan: Plan
    fits: bool
    metrics: TrainMetrics
    attribution: dict[str, float]
    memory: tuple[RankMemory, ...]
    sensitivities: tuple[Sensitivity, ...]
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]
    money: Money
    run: TrainingRun | None
    timeline: Timeline
    zooms: tuple[Zoom, ...]
    stage_layers: tuple[tuple[int, ...], ...]
    schedule_params: dict[str, Any]
    identity: Identity
    goal: Goal | None = None
    cautions: tuple[str, ...] = ()
    batches: BatchSpread | None = None
    round: RoundTimes | None = None
    stragglers: Stragglers | None = None
    clients: ClientRounds | None = None
    swarm: SwarmRun | None = None
    choice: CodeChoice | SumChoice | None = None
    equal_loss: TokensFactor | None = None
    pools: tuple[PoolShare, ...] = ()
    memory_sigma: float = 0.0
    tiers: tuple[TierMemory, ...] = ()
    experts: ExpertAnswer | None = None
    feed: FeedAnswer | None = None
    filled: Filled | None = None

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return self.metrics.step_time_s.value

    @property
    def step_time_interval_s(self) -> tuple[float, float]:
        """The 80% interval of the step time, seconds."""
        return self.metrics.step_time_s.interval or (self.step_time_s, self.step_time_s)

    @property
    def bound_s(self) -> float:
        """Seconds of the roofline: the model's own operations at peak rate with nothing else."""
        return self.metrics.bound_s.value

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens a second of each device, or images where the workload's are counted."""
        return self.metrics.tokens_per_s_per_gpu.value

    @property
    def images_per_s(self) -> float | None:
        """Images a second of all devices; None where the model reads tokens."""
        return self.train.global_batch / self.step_time_s if self.train.image else None

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, a share of the peak."""
        return self.metrics.mfu.value

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: recomputed operations count too."""
        return self.metrics.hfu.value

    @property
    def bubble(self) -> float:
        """The share of the step that ranks wait for other stages."""
        return self.metrics.bubble.value

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of the goal, and how the training run comes out."""
        return () if self.run is None else self.run.against(self.goal)

    @property
    def good(self) -> bool:
        """Whether it fits, and its training run stays within every limit of the goal."""
        return self.fits and all(limit.met for limit in self.limits)

    @property
    def num_devices(self) -> int:
        return self.plan.num_ranks

    @property
    def peak_memory_bytes(self) -> float:
        return max(m.peak_bytes for m in self.memory)

    @property
    def peak_memory_interval_bytes(self) -> tuple[float, float]:
        """The 80% interval of the peak, bytes."""
        return peak_interval(self.peak_memory_bytes, self.memory_sigma)

    @property
    def p_fit(self) -> float:
        """The probability that the rank class with the least headroom has enough memory."""
        tight = self.tightest
        return fit_probability(tight.needed_bytes, tight.capacity_bytes, self.memory_sigma)

    @property
    def power_over_w(self) -> float:
        """Watts drawn above what the site can deliver; 0 when it can, or when no limit is known."""
        limit, drawn = self.cluster.power_limit_w, self.money.power_w
        return max(0.0, drawn - limit) if limit is not None and drawn is not None else 0.0

    @property
    def tightest(self) -> RankMemory:
        """The rank class with the least headroom."""
        return min(self.memory, key=lambda m: m.headroom_bytes)

    def __repr__(self) -> str:
        low, high = self.step_time_interval_s
        tight, usd, counted = self.tightest, self.money.usd_per_million_tokens, self.train.counted
        largest = sorted(self.attribution.items(), key=lambda item: -item[1])[:4]
        lines = (
            f"Prediction: {'fits' if self.fits else 'does not fit'}, {seconds(self.step_time_s)} a step "
            f"(80% within {seconds(low)} and {seconds(high)})",
            f"{self.model.name} on {self.cluster.name}, {self.train.text()}",
            f"plan {self.plan.text()}",
            f"{self.tokens_per_s_per_gpu:,.0f} {counted}/s/GPU, MFU {self.mfu:.1%}, bubble {self.bubble:.1%}"
            + ("" if usd is None else f", ${usd:.3g} per million {counted}"),
            f"{gibibytes(tight.peak_bytes)} of {gibibytes(tight.capacity_bytes)} on {tight.rank}",
            ", ".join(f"{name} {spent / self.step_time_s:.1%}" for name, spent in largest if spent),
        )
        return "\n  ".join(lines)

    def _repr_html_(self) -> str:
        """The verdict and its pictures for a notebook. By name, since reports are made of predictions."""
        return import_module("meshwright.report.notebook").fragment(self)

    def to_dataframe(self) -> DataFrame:
        """One row for pandas, so that many predictions concatenate to a table: the question, the answer (seconds,
        bytes, US dollars), and ``attribution.gemm`` and the like in seconds.

        Raises:
            MeshwrightError: X021 when pandas is not installed.
        """
        low, high = self.step_time_interval_s
        row = {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "num_devices": self.num_devices,
            "workload": self.train.text(),
            "plan": self.plan.text(),
            "fits": self.fits,
            "p_fit": self.p_fit,
            "step_time_low_s": low,
            "step_time_high_s": high,
        }
        row |= {name: None if metric is None else metric.value for name, metric in self.metrics.items()}
        row |= {f"attribution.{cause}": spent for cause, spent in self.attribution.items()}
        return dataframe([row])

    def to_json(self) -> dict[str, Any]:
        """The prediction as plain values, seconds and bytes, without the timeline (that is ``--trace``)."""
        parts = ("swarm", self.swarm), ("feed", self.feed), ("frozen", self.filled), ("clients", self.clients)
        return {
            "format_version": FORMAT_VERSION,
            "identity": self.identity.said(),
            "model": self.model.name,
            "cluster": self.cluster.name,
            "num_devices": self.num_devices,
            "workload": self.train.text(),
            "plan": self.plan.text(),
            "dp": None if self.plan.several else self.plan.layout.dp,
            "fits": self.fits,
            "step_time_s": self.step_time_s,
            "step_time_interval_s": list(self.step_time_interval_s),
            "bound_s": self.bound_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "images_per_s": self.images_per_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "bubble": self.bubble,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_memory_interval_bytes": list(self.peak_memory_interval_bytes),
            "p_fit": self.p_fit,
            "metrics": msgspec.to_builtins(self.metrics),
            "round": msgspec.to_builtins(self.round),
            "choice": msgspec.to_builtins(self.choice),
            "equal_loss": msgspec.to_builtins(self.equal_loss),
            "stragglers": msgspec.to_builtins(self.stragglers),
            "attribution": self.attribution,
            "memory": [msgspec.to_builtins(m) for m in self.memory],
            "tiers": [msgspec.to_builtins(tier) for tier in self.tiers],
            "sensitivities": [msgspec.to_builtins(s) for s in self.sensitivities],
            "assumptions": [msgspec.to_builtins(a) for a in self.assumptions],
            "warnings": [*self.cautions, *self.warnings],
            "money": msgspec.to_builtins(self.money),
            "network": msgspec.to_builtins(network_bill(self.cluster)),
            "training_run": None if self.run is None else self.run.to_json(),
            "goal": [msgspec.to_builtins(limit) | {"met": limit.met} for limit in self.limits],
            "stage_layers": [list(s) for s in self.stage_layers],
            "batches": msgspec.to_builtins(self.batches),
            "pools": [msgspec.to_builtins(pool) for pool in self.pools],
            **{name: None if one is None else one.to_json() for name, one in parts},
        }
