"""The outcome of a run, and the prediction beside it: step time, rate, utilisation, memory, each with its error.

A measured step time is the median of the steps after a warm-up, or their mean where replicas average now and then, with
the span of the middle 80% of them: the predicted one is right when it lies within (:mod:`meshwright.compare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.text import Text

from meshwright.answer.prediction import Prediction
from meshwright.causes import JOB
from meshwright.compare import Comparison, Pair
from meshwright.quantity import gibibytes, seconds
from meshwright.report.compare_text import drifted, percent
from meshwright.report.page import Page

if TYPE_CHECKING:
    from meshwright.run.elastic.launcher import ElasticRun
    from meshwright.run.recover import Recovered

FORMAT_VERSION = 1


def to_json(prediction: Prediction, summary: Mapping[str, Any], comparison: Comparison | None) -> dict[str, Any]:
    """The outcome of a run as plain values; `summary` is that of :mod:`meshwright.run.loop` without its timeline, and
    `comparison` None where no step was done."""
    out = {
        "format_version": FORMAT_VERSION,
        "model": prediction.model.name,
        "cluster": prediction.cluster.name,
        "workload": prediction.train.text(),
        "plan": prediction.plan.text(),
        "num_ranks": prediction.num_devices,
        **summary,
    }
    if comparison is not None:
        out["step_time_span_s"] = list(comparison.measured.spread_s)
        out["compared"] = {
            p.name: {"predicted": p.predicted, "measured": p.measured, "error": p.error} for p in _pairs(comparison)
        }
        out["comparison"] = comparison.to_json()
    return out


def render(prediction: Prediction, summary: Mapping[str, Any], comparison: Comparison | None, console: Console) -> None:
    """Print the outcome of a run, and the prediction beside it."""
    with Page(console) as page:
        page.print(Text(_verdict(prediction, summary), "bold"))
        if comparison is None:
            return
        page.title("Predicted and measured")
        head = (Text(""), *(Text(w, "dim", justify="right") for w in ("predicted", "measured", "error")), Text(""))
        page.rows([head, *(_row(pair, summary, comparison) for pair in _pairs(comparison))])
        if "data" in summary:
            page.quiet(_data(summary["data"]))
        if "grown" in summary:
            page.quiet(_batches(summary["grown"]))
        elsewhere = another_machine(prediction, str(summary["device"]))
        for line in (*([elsewhere] if elsewhere else ()), *drifted(comparison)):
            page.print(Text(line, "bold yellow"))
        basis = _basis(prediction, summary, comparison)
        page.quiet(f"{basis}; error is predicted over measured, less one")
        if prediction.model.mixtures and prediction.train.routing is None and prediction.plan.experts.ep > 1:
            page.quiet(
                "experts were predicted as chosen equally often: --routing FILE.json writes how often each was, "
                "and --train routing=FILE.json predicts with it"
            )


def _pairs(c: Comparison) -> tuple[Pair, ...]:
    """The quantities of a run as a whole that both sides have."""
    return (c.step_time_s, *c.rates, *((c.peak_memory_bytes,) if c.peak_memory_bytes is not None else ()))


def recovered_json(prediction: Prediction, found: Recovered, comparison: Comparison | None) -> dict[str, Any]:
    """The outcome of a run that met failures, as plain values."""
    return to_json(prediction, found.summary, comparison) | {
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
        words = {cause.name: cause.words for cause in JOB}
        rows = [(words.get(cause, cause), spent) for cause, spent in found.by_cause.items() if spent]
        page.rows([(Text(cause), Text(seconds(spent), justify="right")) for cause, spent in rows])
        error = found.simulated_s / found.seconds - 1
        page.quiet(
            f"{seconds(found.seconds)} in all; the same world simulated with this run's step and restart time: "
            f"{seconds(found.simulated_s)} ({error:+.1%})"
        )


def elastic_json(prediction: Prediction, found: ElasticRun) -> dict[str, Any]:
    """The outcome of an elastic run, as plain values."""
    return to_json(prediction, found.summary, None) | {
        "losses": found.losses,
        "elastic": {
            "seconds": found.seconds,
            "failures": found.failures,
            "recoveries": msgspec.to_builtins(found.recoveries),
            "log": msgspec.to_builtins(found.log),
        },
    }


def render_elastic(found: ElasticRun, console: Console) -> None:
    """Print what processes an elastic run lost, and how it went on."""
    with Page(console) as page:
        page.title(f"{found.failures} process{'es' * (found.failures != 1)} lost")
        for one in found.recoveries:
            again = f"{one.repeated} step{'s' * (one.repeated != 1)} again"
            again = again if one.source == "memory" else f"whose state comes from {one.source}"
            page.rows(
                [
                    (
                        Text(f"after {seconds(one.at_s)}"),
                        Text(f"{one.seconds:.2f} s", justify="right"),
                        Text(f"{one.ranks} ranks go on from step {one.step}, {again}: {one.cause}", "dim"),
                    )
                ]
            )
        page.quiet(f"{len(found.losses):,} steps in {seconds(found.seconds)}; the last has loss {found.losses[-1]:.6f}")


def _data(waited: Mapping[str, float]) -> str:
    """A line on what steps waited for their batches."""
    count = waited["workers"]
    who = f"{count} process{'es' * (count > 1)} beside each rank" if count else "the step's own process"
    both = f"{seconds(waited['predicted_s'])} a step predicted, {seconds(waited['measured_s'])} measured"
    return f"waiting for data: {both}; {who} made batches, one in {seconds(waited['make_s'])} as measured before"


def _batches(grown: Mapping[str, Any]) -> str:
    """A line on the batches of a run whose batch grew."""
    steps = ", ".join(f"{count} of {batch}" for batch, count in grown["steps"].items())
    both = f"{seconds(grown['predicted_s'])} predicted, {seconds(grown['measured_s'])} measured"
    return f"steps by batch: {steps} sequences; all of them {both}; what is shown above is of the last batch"


def render_clients(found: Mapping[str, Any], console: Console) -> None:
    """Print what clients and their server did, and what a simulation of the same world says."""
    with Page(console) as page:
        page.title("Clients of the server")
        steps, versions = found["steps"], found["versions"]
        answers = sum(v["answers"] for v in versions)
        behind = sum(v["staleness"] * v["answers"] for v in versions) / max(1, answers)
        rows = [
            ("versions", f"{len(versions):,}", f"of {answers:,} answers, {behind:.2f} versions behind in the mean"),
            ("steps", f"{sum(steps):,}", f"{min(steps):,} to {max(steps):,} a client; {found['merged']:,} merged"),
            ("sent", f"{found['up_bytes'] / 2**20:,.1f} MiB", f"up, and {found['down_bytes'] / 2**20:,.1f} MiB down"),
        ]
        rows += _jobs(found) if "groups" in found else []
        page.rows([(Text(what), Text(value, justify="right"), Text(note, "dim")) for what, value, note in rows])
        if found["seconds"]:
            page.quiet(
                f"{seconds(found['seconds'])} in all; the same world simulated with this run's steps and messages: "
                f"{seconds(found['simulated_s'])} ({found['simulated_s'] / found['seconds'] - 1:+.1%})"
            )


def _jobs(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """A row for every job of merged tasks, with the affinities of its tasks towards one another, and what held-out text
    says of them."""
    rows = []
    for tasks in found["groups"]:
        ahead = ", ".join(str(task + 1) for task in tasks)
        pairs = [found["affinity"][i][j] for i in tasks for j in tasks if i != j] if found["affinity"] else []
        said = [f"mean affinity {sum(pairs) / len(pairs):+.1e} of a loss"] if pairs else []
        losses = ", ".join(format(found["judged"][task], ".4f") for task in tasks) if found["judged"] else ""
        said += [f"held-out loss {losses}"] if losses else []
        rows.append((f"job {len(rows) + 1}", ahead, "tokens ahead" + "".join(f"; {one}" for one in said)))
    return rows


def render_swarm(found: Mapping[str, Any], console: Console) -> None:
    """Print what the peers of a swarm did, and what a simulation of the same world says."""
    asked = "left_out" in found
    own = "passes, messages and steps" if asked else "passes and sums, and messages that take no time"
    with Page(console) as page:
        page.title("Peers that have the experts" if asked else "Swarm of peers")
        passes, sent = found["passes"], f"{found['sent_bytes'] / 2**20:,.1f} MiB"
        told = ["gone" if stage < 0 else "there" if asked else f"stage {stage}" for stage in found["stages"]]
        per = ", ".join(f"{count:,} ({state})" for count, state in zip(passes, told))
        changes = f"{found['joined']} joined, {found['moved']} changed their stage; {found['again']:,} passes again"
        if asked:
            changes = f"{found['joined']} joined; {found['left_out']:.1%} of answers were left out"
        rows = [
            ("passes", f"{sum(passes):,}", f"of the peers: {per}"),
            ("lost", f"{found['lost']:,}", changes),
            ("sent", sent, "a step, to and from peers"),
        ]
        page.rows([(Text(what), Text(value, justify="right"), Text(note, "dim")) for what, value, note in rows])
        if found["simulated_s"]:
            page.quiet(
                f"{seconds(found['seconds'])} in all; the same world simulated with this run's {own}: "
                f"{seconds(found['simulated_s'])} "
                f"({found['simulated_s'] / found['seconds'] - 1:+.1%})"
            )


def _verdict(prediction: Prediction, summary: Mapping[str, Any]) -> str:
    count = summary["last_step"] - summary["first_step"] + 1
    what = f"{prediction.model.name} under {prediction.plan.text()} on {prediction.num_devices} x {summary['device']}"
    if not summary["step_s"]:
        return f"nothing to do: {what} has {summary['last_step']} steps"
    stopped = ", then stopped on request" if summary["stopped"] else ""
    losses = summary["losses"]
    right = summary.get("accuracy") or {}
    held = f"; held out, {list(right.values())[-1]:.2%} classified rightly" if right else ""
    return f"trained {count} steps of {what}{stopped}: loss {losses[0]:.4f} to {losses[-1]:.4f}{held}"


def _row(pair: Pair, summary: Mapping[str, Any], c: Comparison) -> tuple[Text, ...]:
    shown = {"step time": seconds, "peak memory": gibibytes, "MFU": "{:.2%}".format}
    write, held = shown.get(pair.name, "{:,.0f}".format), summary["peak_bytes"]  # else a rate
    remark = ""
    if pair.name == "step time":
        remark = "80% of steps in {} to {}".format(*map(seconds, c.measured.spread_s))
    if pair.name == "peak memory" and len(held) > 1:
        remark = f"{gibibytes(min(held))} to {gibibytes(max(held))} over the ranks"
    cells = (write(pair.predicted), write(pair.measured), "" if pair.error is None else percent(pair.error))
    return (Text(pair.name), *(Text(cell, justify="right") for cell in cells), Text(remark, "dim"))


def another_machine(prediction: Prediction, device: str) -> str:
    """A sentence where the prediction is of accelerators and the run was one of processors, whose times say nothing of
    each other; else ""."""
    predicted = prediction.cluster.islands[0].device
    if device != "cpu" or predicted.synchronous:
        return ""
    return (
        f"predicted for {predicted.title}, measured on this machine's processor: the errors compare two machines; to "
        f"predict this one: meshwright calibrate --here, then --on {prediction.num_devices}xhere"
    )


def _basis(prediction: Prediction, summary: Mapping[str, Any], c: Comparison) -> str:
    skipped = len(summary["step_s"]) - c.measured.num_steps
    warm = f" after {skipped} to warm up" if skipped else ""
    what = "median" if prediction.round is None else "mean over the last whole rounds"
    profiles = [one.name for one in prediction.assumptions if one.name.startswith("framework profile")]
    costs = f" with the {profiles[0]}" if profiles else ""
    return f"{what} of {c.measured.num_steps} steps{warm}, predicted for {prediction.cluster.name}{costs}"
