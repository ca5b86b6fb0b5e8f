"""The answer: what a training step of a plan is predicted to take, hold and cost, and why.

A prediction is a number with an interval and a source. Everything a report, a comparison or a script needs is
in this record; nothing in it has to be computed again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.plan import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.timeline import Timeline, Zoom

FORMAT_VERSION = 1

#: Memory that an allocator has reserved and no tensor uses any more, given back when nothing else is left.
GIVEN_BACK = "buffers in flight"
#: Where step time goes, in the order it is shown. Sums to the step time (mean over ranks).
ATTRIBUTION: tuple[tuple[str, str], ...] = (
    ("gemm", "matrix multiplications"),
    ("attention", "attention kernels"),
    ("elementwise", "norms, activations and other memory-bound kernels"),
    ("recompute", "forward work repeated for the backward"),
    ("host", "launch overhead that kernels do not hide"),
    ("optimizer", "optimizer update"),
    ("tp", "exposed tensor-parallel communication"),
    ("cp", "exposed context-parallel communication"),
    ("ep", "exposed expert-parallel communication"),
    ("pp", "exposed pipeline sends"),
    ("dp", "exposed data-parallel communication"),
    ("bubble", "pipeline bubble: waiting for other stages"),
)


class Assumption(msgspec.Struct, frozen=True):
    """Something the answer rests on that the user did not say: what, its value, where it comes from."""

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
        return self.capacity_bytes - self.peak_bytes + self.alive.get(GIVEN_BACK, 0.0)


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """What the step time does when one thing gets 10% better: ``change`` -0.021 is 2.1% faster."""

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


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    """Time and cost for the workload's tokens. ``lines`` are (what, seconds or None for "not included", note)."""

    tokens: float
    num_steps: int
    seconds: float
    usd: float | None
    lines: tuple[tuple[str, float | None, str], ...]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted training step.

    ``plan`` is resolved (``dp`` filled in). ``step_time_interval_s`` is the 80% interval. ``mfu`` counts the model's
    own operations (6 per active parameter and token, and attention's), ``hfu`` the recomputed ones too, both
    over the devices' dense peak at the compute precision. ``bound_s`` is the roofline: the same operations
    at peak rate with nothing else. ``warnings`` are things the user should know before believing the answer.
    ``schedule_params`` are what a schedule made for given times was given: with them the run has the same order.
    """

    model: Model
    cluster: Cluster
    train: Train
    plan: Plan
    fits: bool
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    bound_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    hfu: float
    bubble: float
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
    identity: dict[str, str]

    @property
    def num_devices(self) -> int:
        return self.plan.layout.num_ranks

    @property
    def peak_memory_bytes(self) -> float:
        return max(m.peak_bytes for m in self.memory)

    @property
    def power_over_w(self) -> float:
        """Watts drawn above what the site can deliver; 0 when it can, or when no limit is known."""
        limit, drawn = self.cluster.power_limit_w, self.money.power_w
        return max(0.0, drawn - limit) if limit is not None and drawn is not None else 0.0

    @property
    def tightest(self) -> RankMemory:
        """The rank class with the least headroom."""
        return min(self.memory, key=lambda m: m.headroom_bytes)

    def to_json(self) -> dict[str, Any]:
        """The prediction as plain values, seconds and bytes, without the timeline (that is ``--trace``)."""
        layout = self.plan.layout
        return {
            "format_version": FORMAT_VERSION,
            "identity": self.identity,
            "model": self.model.name,
            "cluster": self.cluster.name,
            "num_devices": self.num_devices,
            "workload": self.train.text(),
            "plan": self.plan.text(),
            "dp": layout.dp,
            "fits": self.fits,
            "step_time_s": self.step_time_s,
            "step_time_interval_s": list(self.step_time_interval_s),
            "bound_s": self.bound_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "bubble": self.bubble,
            "peak_memory_bytes": self.peak_memory_bytes,
            "attribution": self.attribution,
            "memory": [msgspec.to_builtins(m) for m in self.memory],
            "sensitivities": [msgspec.to_builtins(s) for s in self.sensitivities],
            "assumptions": [msgspec.to_builtins(a) for a in self.assumptions],
            "warnings": list(self.warnings),
            "money": msgspec.to_builtins(self.money),
            "training_run": msgspec.to_builtins(self.run),
            "stage_layers": [list(s) for s in self.stage_layers],
        }
