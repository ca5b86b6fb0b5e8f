"""Metrics of a workload: the numbers of an answer by name, each with its 80% interval.

A workload has metrics of its own: those of training are :class:`TrainMetrics`. Reports, comparisons and searches read a
metric by name, so that another workload's are shown by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec


class MetricKind(NamedTuple):
    """A metric in words, and what is better: ``less``, ``more``, or "" where that depends."""

    words: str
    better: str


#: Every metric by name.
METRICS = {
    "step_time_s": MetricKind("step time", "less"),
    "bound_s": MetricKind("roofline bound", "less"),
    "tokens_per_s_per_gpu": MetricKind("tokens/s/GPU", "more"),
    "mfu": MetricKind("MFU", "more"),
    "hfu": MetricKind("HFU", ""),
    "bubble": MetricKind("bubble", "less"),
    "peak_memory_bytes": MetricKind("peak of the fullest rank", "less"),
    "headroom_bytes": MetricKind("memory left on the fullest rank", "more"),
    "usd_per_million_tokens": MetricKind("dollars per token", "less"),
    "joules_per_token": MetricKind("joules per token", "less"),
}
#: The metrics that say how fast and how well used the devices are, which a comparison of two answers lists.
RATES = ("tokens_per_s_per_gpu", "mfu", "bubble")


class Metric(msgspec.Struct, frozen=True):
    """A number with its 80% interval; None where nothing says how sure it is."""

    value: float
    interval: tuple[float, float] | None = None

    @classmethod
    def per_step(cls, amount: float, step: Metric) -> Metric:
        """Build a rate: so much in a step whose length is uncertain, the least where that is longest."""
        low, high = step.interval or (step.value, step.value)
        return cls(amount / step.value, (amount / high, amount / low))

    @classmethod
    def of_step(cls, spent: float | None, step: Metric) -> Metric | None:
        """Build the metric of a quantity that grows in proportion to the step; None where it is not known."""
        if spent is None:
            return None
        low, high = step.interval or (step.value, step.value)
        return cls(spent, (spent * low / step.value, spent * high / step.value))


class TrainMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a training step.

    ``mfu`` counts the model's own operations (6 per active parameter and token, and attention's), ``hfu`` the
    recomputed ones too, both over the devices' dense peak at 16 bits (a run in fp32: at fp32). ``bound_s`` is the
    roofline: the operations that a step cannot do without, at the peak of the compute precision and with nothing else.
    ``bubble`` is the share of the step that ranks wait for other stages. What a token costs is None where the catalog
    has no price or power.
    """

    step_time_s: Metric
    bound_s: Metric
    tokens_per_s_per_gpu: Metric
    mfu: Metric
    hfu: Metric
    bubble: Metric
    peak_memory_bytes: Metric
    headroom_bytes: Metric
    usd_per_million_tokens: Metric | None
    joules_per_token: Metric | None

    def __getitem__(self, name: str) -> Metric | None:
        """The metric of that name, None where it is not known here.

        Raises:
            KeyError: training has no such metric.
        """
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def items(self) -> Iterator[tuple[str, Metric | None]]:
        """Every metric with its name."""
        return ((name, getattr(self, name)) for name in self.__struct_fields__)
