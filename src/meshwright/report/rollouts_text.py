"""A reinforcement-learning job as text: the verdict, where the time of both sides goes, the age of what is trained on,
splits of the devices, memory, and what it rests on."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.rollout_answer import RolloutPrediction
from meshwright.quantity import big, gibibytes, seconds
from meshwright.report.page import Page


def render(prediction: RolloutPrediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        for part in (_verdict, _sides, _ages, _against, _splits, _memory, _basis):
            part(prediction, page)


def _verdict(prediction: RolloutPrediction, page: Page) -> None:
    low, high = prediction.step_s.interval or (prediction.step_s.value,) * 2
    fits = "fits" if prediction.fits else "does not fit"
    style = "bold green" if prediction.fits else "bold red"
    took = f"a step in {seconds(prediction.step_s.value)} [{seconds(low)}, {seconds(high)}]"
    rates = f"{prediction.trajectories_per_s:.3g} trajectories/s | {big(prediction.tokens_per_s)} tokens/s"
    page.print(Text(f"{fits} | {took} | {rates}" if prediction.step_s.value else fits, style))
    for caution in prediction.cautions:
        page.print(Text(f"! {caution}", "yellow"), indent=2)
    trains, generates = prediction.devices
    where = f"{trains} train" if prediction.rollout.apart else "all, in turn"
    rows = [
        ("model", prediction.model.name),
        ("cluster", prediction.cluster.name),
        ("rollouts", prediction.rollout.text()),
        ("control", prediction.rollout.control),
        ("devices", f"{where}, {generates} generate" if prediction.rollout.apart else where),
        ("plan of training", prediction.plan.text()),
        ("of generation", prediction.generates.text()),
    ]
    page.print()
    page.rows([(Text(name, "dim"), Text(value)) for name, value in rows])


def _sides(prediction: RolloutPrediction, page: Page) -> None:
    for spent in prediction.spent:
        page.title(f"A step on the {spent.devices} devices that {_doing(spent.side)}")
        whole = sum(spent.seconds.values())
        rows = [(name, seconds(took), f"{100 * took / whole:.1f}%") for name, took in spent.seconds.items()]
        page.rows([(Text(name, "dim"), Text(took), Text(share)) for name, took, share in rows])


def _doing(side: str) -> str:
    return {"training": "train", "generating": "generate"}.get(side, "generate, then train")


def _ages(prediction: RolloutPrediction, page: Page) -> None:
    if not prediction.spent:
        return
    mean, most = prediction.staleness
    rows = [
        ("age of parameters behind an answer", f"{mean:.3g} updates in the mean, {most} at most"),
        ("new parameters on their way", f"{seconds(prediction.sending.seconds)} a step"),
        ("tokens of answers", f"{big(prediction.answered_per_s)} a second are trained on"),
    ]
    if prediction.interruptions:
        again = f"{prediction.recomputed:.2g} tokens computed again for each token of an answer"
        rows.append(("updates during an answer", f"{prediction.interruptions:.2g} in the mean, {again}"))
    page.title("Answers")
    page.rows([(Text(name, "dim"), Text(value)) for name, value in rows])


def _against(prediction: RolloutPrediction, page: Page) -> None:
    other, speedup = prediction.against, prediction.speedup
    if other is None:
        return
    page.title("Against all devices that generate, then train")
    if speedup is None:
        page.quiet("it does not fit")
        return
    idle = f"its devices idle for {100 * other.spent[0].idle:.0f}%"
    page.quiet(f"{speedup:.2f} times as fast: there a step takes {seconds(other.step_s.value)}, {idle}")
    if not other.fits:
        page.quiet("it would not fit")


def _splits(prediction: RolloutPrediction, page: Page) -> None:
    if not prediction.splits:
        return
    page.title("Splits of the devices that were tried")
    head = ("generate", "train", "a step", "idle generating", "idle training", "oldest", "")
    rows = [tuple(Text(name, "dim") for name in head)]
    for one in prediction.splits:
        idle = f"{100 * one.idle_generating:.0f}%", f"{100 * one.idle_training:.0f}%"
        took = seconds(one.step_s) if one.step_s else "-"
        cells = (str(one.generating), str(one.training), took, *idle, str(one.staleness_max))
        note = "" if one.fits else "does not fit"
        best = "bold" if one.generating == prediction.devices[1] else ""
        rows.append(tuple(Text(cell, best) for cell in (*cells, note)))
    page.rows(rows)


def _memory(prediction: RolloutPrediction, page: Page) -> None:
    for rank in prediction.memory:
        page.title(f"Memory of {rank.rank} (x{rank.multiplicity})")
        page.rows([(Text(name, "dim"), Text(gibibytes(size))) for name, size in rank.alive.items()])
        page.quiet(f"{gibibytes(rank.peak_bytes)} of {gibibytes(rank.capacity_bytes)}")


def _basis(prediction: RolloutPrediction, page: Page) -> None:
    page.title("Assumptions")
    rows = [(a, "yellow" if a.flagged else "dim") for a in prediction.assumptions]
    page.rows([(Text(a.name, style), Text(f"{a.value} ({a.source})")) for a, style in rows])
