"""A prediction beside what a run of the same plan measured: step time, rate, utilisation, memory, each with its error.

A measured step time is the median of the steps after a warm-up, with the span of the middle 80% of them: the predicted
one is right when it lies within.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.text import Text

from meshwright.answer.prediction import Prediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.page import Page

if TYPE_CHECKING:
    from meshwright.run.recover import Recovered

FORMAT_VERSION = 1
#: Steps that only warm up: so many, or a quarter of a short run.
WARM_UP = 5


class Pair(msgspec.Struct, frozen=True):
    """One quantity, predicted and measured, in SI units."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a run as they were: seconds each after warm-up, and what follows from their median."""

    step_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def median_s(self) -> float:
        return median(self.step_s)

    @property
    def span_s(self) -> tuple[float, float]:
        """The middle 80% of the steps."""
        if len(self.step_s) < 2:
            return self.step_s[0], self.step_s[0]
        cuts = quantiles(self.step_s, n=10, method="inclusive")
        return cuts[0], cuts[-1]


def measured(step_s: list[float], peak_bytes: list[int]) -> Measured:
    """What a run measured, its warm-up left out; `step_s` has at least one step."""
    skipped = min(WARM_UP, len(step_s) // 4)
    return Measured(step_s=tuple(step_s[skipped:]), peak_bytes=tuple(peak_bytes))


def pairs(prediction: Prediction, found: Measured) -> tuple[Pair, ...]:
    """The quantities that both have."""
    tokens, step = prediction.train.tokens_per_step, found.median_s
    return (
        Pair("step time", prediction.step_time_s, step),
        Pair("tokens/s", tokens / prediction.step_time_s, tokens / step),
        Pair("MFU", prediction.mfu, prediction.mfu * prediction.step_time_s / step),
        Pair("peak memory", prediction.peak_memory_bytes, float(max(found.peak_bytes))),
    )


def to_json(prediction: Prediction, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a run as plain values; `summary` is that of :mod:`meshwright.run.loop`."""
    out = {
        "format_version": FORMAT_VERSION,
        "model": prediction.model.name,
        "cluster": prediction.cluster.name,
        "workload": prediction.train.text(),
        "plan": prediction.plan.text(),
        "num_ranks": prediction.num_devices,
        **summary,
    }
    if summary["step_s"]:
        found = measured(summary["step_s"], summary["peak_bytes"])
        out["step_time_span_s"] = list(found.span_s)
        out["compared"] = {
            p.name: {"predicted": p.predicted, "measured": p.measured, "error": p.error}
            for p in pairs(prediction, found)
        }
    return out


def render(prediction: Prediction, summary: Mapping[str, Any], console: Console) -> None:
    """Print the outcome of a run, and the prediction beside it."""
    with Page(console) as page:
        page.print(Text(_verdict(prediction, summary), "bold"))
        if not summary["step_s"]:
            return
        found = measured(summary["step_s"], summary["peak_bytes"])
        page.title("Predicted and measured")
        head = (Text(""), *(Text(w, "dim", justify="right") for w in ("predicted", "measured", "error")), Text(""))
        page.rows([head, *(_row(pair, found) for pair in pairs(prediction, found))])
        page.quiet(f"{_basis(prediction, summary, found)}; error is predicted over measured, less one")


def recovered_json(prediction: Prediction, found: Recovered) -> dict[str, Any]:
    """The outcome of a run that met failures, as plain values."""
    return to_json(prediction, found.summary) | {
        "world": {
            "seconds": found.seconds,
            "simulated_s": found.simulated_s,
            "error": found.simulated_s / found.seconds - 1,
            "failures": found.failures,
            "step_s": found.step_s,
            "restart_s": found.restart_s,
            "by_cause": found.by_cause,
            "log": msgspec.to_builtins(found.log),
        }
    }


def render_recovered(found: Recovered, console: Console) -> None:
    """Print what the failures of a run cost, and what a simulation of the same world says."""
    with Page(console) as page:
        page.title(f"{found.failures} failures")
        rows = [(cause, spent) for cause, spent in found.by_cause.items() if spent]
        page.rows([(Text(cause), Text(seconds(spent), justify="right")) for cause, spent in rows])
        error = found.simulated_s / found.seconds - 1
        page.quiet(
            f"{seconds(found.seconds)} in all; the same world simulated with this run's step and restart time: "
            f"{seconds(found.simulated_s)} ({error:+.1%})"
        )


def _verdict(prediction: Prediction, summary: Mapping[str, Any]) -> str:
    count = summary["last_step"] - summary["first_step"] + 1
    what = f"{prediction.model.name} under {prediction.plan.text()} on {prediction.num_devices} x {summary['device']}"
    if not summary["step_s"]:
        return f"nothing to do: {what} has {summary['last_step']} steps"
    stopped = ", then stopped on request" if summary["stopped"] else ""
    losses = summary["losses"]
    return f"trained {count} steps of {what}{stopped}: loss {losses[0]:.4f} to {losses[-1]:.4f}"


def _row(pair: Pair, found: Measured) -> tuple[Text, ...]:
    shown = {"step time": seconds, "peak memory": gibibytes, "MFU": "{:.2%}".format, "tokens/s": "{:,.0f}".format}
    write = shown[pair.name]
    remark = ""
    if pair.name == "step time":
        remark = "80% of steps in {} to {}".format(*map(seconds, found.span_s))
    if pair.name == "peak memory" and len(found.peak_bytes) > 1:
        remark = f"{gibibytes(min(found.peak_bytes))} to {gibibytes(max(found.peak_bytes))} over the ranks"
    error = "" if pair.error is None else f"{pair.error:+.1%}"
    cells = (write(pair.predicted), write(pair.measured), error)
    return (Text(pair.name), *(Text(cell, justify="right") for cell in cells), Text(remark, "dim"))


def _basis(prediction: Prediction, summary: Mapping[str, Any], found: Measured) -> str:
    skipped = len(summary["step_s"]) - len(found.step_s)
    warm = f" after {skipped} to warm up" if skipped else ""
    return f"median of {len(found.step_s)} steps{warm}, predicted for {prediction.cluster.name}"
