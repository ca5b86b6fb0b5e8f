"""A reinforcement-learning job as a sheet: where the time of both sides goes, the age of what is trained on, splits of
the devices, memory."""

from __future__ import annotations

from meshwright.answer.rollout_answer import DevicesSpent, RolloutPrediction
from meshwright.quantity import big, gibibytes, seconds
from meshwright.report.sheet import Lines, Remarks, Sheet, SheetGrid, SheetSection, Spent, sizes


def sheet(prediction: RolloutPrediction) -> Sheet:
    """Return the answer as a sheet."""
    low, high = prediction.step_s.interval or (prediction.step_s.value,) * 2
    fits = "fits" if prediction.fits else "does not fit"
    took = f"a step in {seconds(prediction.step_s.value)} [{seconds(low)}, {seconds(high)}]"
    rates = f"{prediction.trajectories_per_s:.3g} trajectories/s | {big(prediction.tokens_per_s)} tokens/s"
    trains, generates = prediction.devices
    apart = prediction.rollout.apart
    sections = (*map(_side, prediction.spent), *_ages(prediction), *_against(prediction), *_splits(prediction))
    return Sheet(
        name=f"{prediction.model.name} on {prediction.cluster.name}, trained on its own answers",
        fits=prediction.fits,
        headline=f"{fits} | {took} | {rates}" if prediction.step_s.value else fits,
        question=(
            ("model", prediction.model.name),
            ("cluster", prediction.cluster.name),
            ("rollouts", prediction.rollout.text()),
            ("control", prediction.rollout.control),
            ("devices", f"{trains} train, {generates} generate" if apart else "all, in turn"),
            ("plan of training", prediction.plan.text()),
            ("of generation", prediction.generates.text()),
        ),
        sections=sections,
        memory=prediction.memory,
        held=tuple(
            Lines(
                f"Memory of {rank.rank} (x{rank.multiplicity})",
                sizes(rank.alive),
                [f"{gibibytes(rank.peak_bytes)} of {gibibytes(rank.capacity_bytes)}"],
            )
            for rank in prediction.memory
        ),
        assumptions=prediction.assumptions,
        cautions=prediction.cautions,
    )


def _side(spent: DevicesSpent) -> Spent:
    doing = {"training": "train", "generating": "generate"}.get(spent.side, "generate, then train")
    causes = [(name, took, "") for name, took in spent.seconds.items()]
    return Spent(f"A step on the {spent.devices} devices that {doing}", sum(spent.seconds.values()), causes)


def _ages(prediction: RolloutPrediction) -> list[SheetSection]:
    if not prediction.spent:
        return []
    mean, most = prediction.staleness
    rows = [
        ("age of parameters behind an answer", f"{mean:.3g} updates in the mean, {most} at most"),
        ("new parameters on their way", f"{seconds(prediction.sending.seconds)} a step"),
        ("tokens of answers", f"{big(prediction.answered_per_s)} a second are trained on"),
    ]
    if prediction.interruptions:
        again = f"{prediction.recomputed:.2g} tokens computed again for each token of an answer"
        rows.append(("updates during an answer", f"{prediction.interruptions:.2g} in the mean, {again}"))
    return [Lines("Answers", rows)]


def _against(prediction: RolloutPrediction) -> list[SheetSection]:
    other, speedup = prediction.against, prediction.speedup
    if other is None:
        return []
    said = ["it does not fit"]
    if speedup is not None:
        idle = f"its devices idle for {100 * other.spent[0].idle:.0f}%"
        said = [f"{speedup:.2f} times as fast: there a step takes {seconds(other.step_s.value)}, {idle}"]
        said += [] if other.fits else ["it would not fit"]
    return [Remarks("Against all devices that generate, then train", said)]


def _splits(prediction: RolloutPrediction) -> list[SheetSection]:
    if not prediction.splits:
        return []
    rows, chosen = [], -1
    for number, one in enumerate(prediction.splits):
        idle = f"{100 * one.idle_generating:.0f}%", f"{100 * one.idle_training:.0f}%"
        took, note = seconds(one.step_s) if one.step_s else "-", "" if one.fits else "does not fit"
        rows.append((str(one.generating), str(one.training), took, *idle, str(one.staleness_max), note))
        chosen = number if one.generating == prediction.devices[1] else chosen
    heads = ("generate", "train", "a step", "idle generating", "idle training", "oldest", "")
    return [SheetGrid("Splits of the devices that were tried", heads, rows, chosen=chosen)]
