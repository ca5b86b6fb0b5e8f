"""The answer to a question of a reinforcement-learning job."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.answer.metrics import Metric
from meshwright.answer.prediction import FORMAT_VERSION, Assumption, RankMemory
from meshwright.answer.rollout_sides import ParametersSent
from meshwright.plan import Plan
from meshwright.quantity import seconds
from meshwright.simulate.rollouts import RolledOut
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.rollout import Rollout
from meshwright.spec.workload import Train

#: A part of a step below this is rounding.
ROUNDING = 1e-9


class DevicesSpent(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a step goes on the devices of a ``side``: seconds by cause, in the mean over its devices; the
    last of them is ``idle``."""

    side: str
    devices: int
    seconds: dict[str, float]

    @classmethod
    def of(cls, side: str, devices: int, step_s: float, causes: dict[str, float]) -> DevicesSpent:
        """Return the causes with what is left of a step as ``idle``."""
        idle = step_s - sum(causes.values())
        idle = idle if idle > ROUNDING * step_s else 0.0
        return cls(side=side, devices=devices, seconds=causes | {"idle": idle})

    @property
    def idle(self) -> float:
        """The share of a step in which a device waits."""
        return self.seconds["idle"] / sum(self.seconds.values())


class RolloutPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A job that generates and trains. ``plan`` is that of the devices that train, ``generates`` of those that
    generate; ``devices`` counts both, the same where they take turns. ``step_s`` is the time from step to step in the
    steady state, in which ``trained_tokens`` (prompts and answers) are trained on, ``answered_tokens`` of answers.
    ``staleness`` is the mean and the largest age of groups in updates. ``interruptions`` are the updates that came
    while an answer was generated, in the mean, and ``recomputed`` the tokens computed again for that, for each token of
    an answer. ``splits`` are the numbers of generating devices that were tried, ``against`` the same job where all
    devices generate, then train. ``simulated`` is None where the weights leave no room."""

    model: Model
    cluster: Cluster
    train: Train
    plan: Plan
    rollout: Rollout
    generates: Plan
    devices: tuple[int, int]
    fits: bool
    memory: tuple[RankMemory, ...]
    sending: ParametersSent
    step_s: Metric
    assumptions: tuple[Assumption, ...]
    cautions: tuple[str, ...]
    trained_tokens: float = 0.0
    answered_tokens: float = 0.0
    spent: tuple[DevicesSpent, ...] = ()
    staleness: tuple[float, int] = (0.0, 0)
    interruptions: float = 0.0
    recomputed: float = 0.0
    splits: tuple[SplitOfDevices, ...] = ()
    against: RolloutPrediction | None = None
    simulated: RolledOut | None = None

    @property
    def trajectories_per_s(self) -> float:
        """Trajectories trained on in a second."""
        return self._rate(self.rollout.trajectories)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and answers trained on in a second."""
        return self._rate(self.trained_tokens)

    @property
    def answered_per_s(self) -> float:
        """Tokens of answers trained on in a second."""
        return self._rate(self.answered_tokens)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the job whose devices generate, then train; None where that was not asked."""
        other = self.against
        if other is None or not other.step_s.value or not self.step_s.value:
            return None
        return other.step_s.value / self.step_s.value

    def _rate(self, amount: float) -> float:
        return amount / self.step_s.value if self.step_s.value else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        low, high = self.step_s.interval or (self.step_s.value, self.step_s.value)
        return {
            "format_version": FORMAT_VERSION,
            "model": self.model.name,
            "cluster": self.cluster.name,
            "train": self.train.text(),
            "plan": self.plan.text(),
            "rollout": self.rollout.text(),
            "generates": self.generates.text(),
            "devices": {"training": self.devices[0], "generating": self.devices[1]},
            "fits": self.fits,
            "step_s": self.step_s.value,
            "step_interval_s": [low, high],
            "trajectories_per_s": self.trajectories_per_s,
            "tokens_per_s": self.tokens_per_s,
            "answered_tokens_per_s": self.answered_per_s,
            "staleness_mean": self.staleness[0],
            "staleness_max": self.staleness[1],
            "interruptions": self.interruptions,
            "recomputed": self.recomputed,
            "gathered_s": self.sending.gathered_s,
            "sent_s": self.sending.sent_s,
            "attribution": [{**msgspec.to_builtins(one), "idle": one.idle} for one in self.spent],
            "memory": msgspec.to_builtins(self.memory),
            "splits": [msgspec.to_builtins(one) for one in self.splits],
            "against": None if self.against is None else self.against.to_json(),
            "speedup": self.speedup,
            "assumptions": msgspec.to_builtins(self.assumptions),
            "warnings": list(self.cautions),
        }

    def __str__(self) -> str:
        return f"{self.rollout.text()}: a step in {seconds(self.step_s.value)}"


class SplitOfDevices(msgspec.Struct, frozen=True, kw_only=True):
    """One split of a cluster that was tried: devices that generate and train, seconds from step to step, the idle
    shares of both, the largest age of a group, and whether it fits."""

    generating: int
    training: int
    step_s: float
    idle_generating: float
    idle_training: float
    staleness_max: int
    fits: bool

    @classmethod
    def of(cls, one: RolloutPrediction) -> SplitOfDevices:
        """Return the row of a prediction."""
        idle = {spent.side: spent.idle for spent in one.spent}
        return cls(
            generating=one.devices[1],
            training=one.devices[0],
            step_s=one.step_s.value,
            idle_generating=idle.get("generating", 0.0),
            idle_training=idle.get("training", 0.0),
            staleness_max=one.staleness[1],
            fits=one.fits,
        )
