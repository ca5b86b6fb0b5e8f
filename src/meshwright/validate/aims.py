"""Aims of accuracy as data (which rows, which figure, how small or large), and the figures that a run reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from meshwright.validate.run import Table
from meshwright.validate.score import Scored, metrics


class Aim(NamedTuple):
    """A figure of some training steps: ``least`` says whether more is better."""

    what: str
    rows: Callable[[Scored], bool]
    metric: str
    value: float
    least: bool = False


def _source(*names: str) -> Callable[[Scored], bool]:
    return lambda s: s.key.split("/")[0] in names


def _papers(first: int, last: int) -> Callable[[Scored], bool]:
    wanted = {f"papers:{i}" for i in range(first, last + 1)}
    return lambda s: s.id in wanted


def _second_table(s: Scored) -> bool:
    return _source("megatron_sc21_a100")(s) and not _papers(0, 19)(s)


AIMS = (
    Aim("Megatron-LM at SC'21, Table 1 (papers:0-9)", _papers(0, 9), "mean_ape", 0.05),
    Aim("the same plans with other times (papers:10-19)", _papers(10, 19), "mean_ape", 0.10),
    Aim("Megatron-LM at SC'21, Table 2", _second_table, "mean_ape", 0.10),
    Aim("MegaScale", _source("megascale_nsdi24"), "mean_ape", 0.05),
    Aim("vTrain, several nodes", _source("vtrain_multi"), "mean_ape", 0.08),
    Aim("vTrain, several nodes", _source("vtrain_multi"), "regret_mean", 0.02),
    Aim("vTrain, several nodes", _source("vtrain_multi"), "spearman", 0.85, least=True),
    Aim("vTrain, one node", _source("vtrain_single"), "mean_ape", 0.15),
    Aim("vTrain, one node", _source("vtrain_single"), "regret_mean", 0.08),
    Aim("vTrain, one node", _source("vtrain_single"), "spearman", 0.85, least=True),
    Aim("Megatron-Bridge", _source("megatron_bridge_perf"), "mean_ape", 0.10),
    Aim("MLPerf Training", _source("mlperf_training"), "mean_ape", 0.10),
    Aim("TorchTitan", _source("torchtitan_bench"), "mean_ape", 0.10),
    Aim("llm-foundry", _source("llm_foundry_bench"), "mean_ape", 0.10),
    Aim("BLOOM's preparation, 384 A100", _source("bigscience_prequel"), "mean_ape", 0.12),
    Aim("nanotron sweep, clean rows", _source("hf_ultrascale_bench"), "mean_ape", 0.25),
    Aim("nanotron sweep, clean rows", _source("hf_ultrascale_bench"), "regret_mean", 0.15),
    Aim("nanotron sweep, clean rows", _source("hf_ultrascale_bench"), "spearman", 0.85, least=True),
    Aim("nanotron sweep, all labelled rows", _source("hf_ultrascale_bench"), "oom_accuracy", 0.97, least=True),
    Aim("nanotron sweep, all labelled rows", _source("hf_ultrascale_bench"), "oom_recall", 0.95, least=True),
    Aim("peak memory, wherever its kind is stated", lambda s: True, "memory_mean_ape", 0.10),
)
NAMES = {
    "mean_ape": "mean error of time",
    "regret_mean": "mean regret",
    "spearman": "rank correlation",
    "oom_accuracy": "out-of-memory accuracy",
    "oom_recall": "out-of-memory recall",
    "memory_mean_ape": "mean error of peak memory",
}


class AimReached(NamedTuple):
    """An aim with the figure that a run reached; ``trivial``: the plain formula's mean error on the same rows."""

    aim: Aim
    rows: int
    value: float
    trivial: float | None

    @property
    def met(self) -> bool:
        return self.value >= self.aim.value if self.aim.least else self.value <= self.aim.value


def reached(steps: Table) -> Iterator[AimReached]:
    """Every aim that this table has rows for."""
    sound = [s.without_time() if s.faulty else s for s in steps.scored]
    for aim in AIMS:
        found = metrics([s for s in sound if aim.rows(s)])
        if aim.metric in found:
            trivial = found.get("trivial_mean_ape") if aim.metric == "mean_ape" else None
            yield AimReached(aim, int(found[_count(aim.metric)]), found[aim.metric], trivial)


def _count(metric: str) -> str:
    if metric.startswith("memory"):
        return "memory_rows"
    return "rows" if metric.startswith("oom") else "timed_rows"
