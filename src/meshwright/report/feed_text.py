"""The feed of a step as text: what steps wait for data, what is full, and how many workers are enough."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.fed_answer import ENOUGH, FeedAnswer
from meshwright.answer.prediction import Prediction
from meshwright.quantity import seconds
from meshwright.report.page import Page
from meshwright.simulate.reservoir import StreamedSteps

#: First steps whose waits are shown.
EARLY = 4


def lines(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of a step with its data; empty where nothing says how it is fed."""
    told = prediction.feed
    if told is None:
        return []
    out = [
        ("a step", seconds(told.step_s), f"{seconds(told.own_s)} by itself; the first waits {seconds(told.first_s)}"),
        ("waiting for data", seconds(told.wait_s), f"{told.waits:.1%} of a step: {_bound(told)}"),
    ]
    if len(told.early_s) > 1:
        early = ", ".join(seconds(one) for one in told.early_s[:EARLY])
        out.append(("the first steps", "from a cold start", f"wait {early}"))
    if told.copy_s:
        out.append(("copied to the device", seconds(told.copy_s), "as the step begins; to_device=ahead hides it"))
    if told.stream is not None:
        return out + _streamed(told, told.stream)
    parts = ", ".join(f"{stage} {seconds(took)}" for stage, took in told.stages.items() if took)
    maker = "producers make a batch" if "producers" in told.used else "a worker makes a batch"
    out.append((maker, f"in {seconds(told.make_s)}", parts or "of nothing that takes time"))
    who = "the step itself" if not told.workers and "producers" not in told.used else f"{told.workers} workers each"
    who = "producers" if "producers" in told.used else who
    out.append(("read by", f"{told.readers} ranks", f"{told.a_node} on a node, {who}, {told.ahead} batches ahead"))
    used = ", ".join(f"{name} {share:.0%}" for name, share in told.used.items())
    out.append(("used at full pace", used or "nothing that is shared", "while no step waits"))
    if "producers" not in told.used:
        out.append(("enough", _enough(told), f"steps wait at most {ENOUGH:.0%} of the time"))
    for one in told.tried:
        out.append((f"with {one.workers} workers", f"{seconds(one.step_s)} a step", f"{one.waits:.1%} waiting"))
    return out


def _streamed(told: FeedAnswer, stream: StreamedSteps) -> list[tuple[str, str, str]]:
    return [
        ("fresh samples", f"{stream.fresh:.0%} of a batch", f"each is trained on {stream.uses:.3g} times in the mean"),
        ("producers wait", f"{stream.held:.0%} of the time", "for room in the reservoir, where nothing was trained on"),
        ("read by", f"{told.readers} ranks", f"{told.a_node} on a node, each with a reservoir of its own"),
    ]


def _bound(told: FeedAnswer) -> str:
    if told.bound == "step":
        return "the step sets the pace"
    if told.bound == "workers":
        return "the producers set the pace" if "producers" in told.used else "the workers set the pace"
    return f"full: {', '.join(told.full)}"


def _enough(told: FeedAnswer) -> str:
    if told.enough is not None:
        return f"{told.enough} worker{'s' * (told.enough != 1)} a reader, {told.enough * told.a_node} a node"
    return f"no number: full before: {', '.join(told.full)}" if told.full else "no number that was tried"


def changed(before: Prediction, after: Prediction, console: Console) -> None:
    """Print a step as it is fed, and under other words of its feed."""
    old, new = before.feed, after.feed
    assert old is not None and new is not None, "steps that are fed"
    with Page(console) as page:
        both = f"{seconds(old.step_s)} -> {seconds(new.step_s)}"
        page.print(Text(f"{old.step_s / new.step_s:.3f} times as fast: {both}", "bold"))
        rows = [("feed", old.words, new.words), ("waiting for data", f"{old.waits:.1%}", f"{new.waits:.1%}")]
        rows += [("", _bound(old), _bound(new)), ("enough", _enough(old), _enough(new))]
        page.print()
        page.rows([(Text(name, "dim"), Text(a), Text(b)) for name, a, b in rows])
