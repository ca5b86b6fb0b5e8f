"""A prediction as text: verdict, waterfall beside the roofline bound, memory, what would help, what it rests on.

Rich decides on colour (``NO_COLOR`` is honoured) and width; below 80 columns descriptions give way to names.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.prediction import Prediction, RankMemory
from meshwright.causes import BY_NAME
from meshwright.quantity import gibibytes, seconds
from meshwright.report import facts, feed_text
from meshwright.report.bars import bar, stacked
from meshwright.report.page import WIDE, Page
from meshwright.report.remedies import remedies

COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_black")
ASCII_FILL = "#=+*%o~."


def render(prediction: Prediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        for part in (
            _verdict,
            _waterfall,
            _pools,
            _filled,
            _batches,
            _stragglers,
            _clients,
            _swarm,
            _feed,
            _memory,
            _sensitivities,
            _money,
            training_run,
            _assumptions,
            _warnings,
        ):
            part(prediction, page)


def _verdict(prediction: Prediction, page: Page) -> None:
    pieces = facts.verdict(prediction)
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) + 3 <= page.width:
            lines[-1] += f" | {piece}"
        else:
            lines.append(piece)
    answer = Text("\n".join(lines))
    answer.stylize("bold green" if prediction.fits else "bold red", 0, len(pieces[0]))
    page.print(answer)
    for caution in prediction.cautions:
        page.print(Text(f"! {caution}", "yellow"), indent=2)
    for remedy in remedies(prediction):
        page.print(Text(remedy), indent=2)
    page.print()
    page.rows([(Text(what, "dim"), Text(value)) for what, value in facts.headline(prediction)])


def _waterfall(prediction: Prediction, page: Page) -> None:
    page.title("Where the step goes")
    bars = facts.waterfall(prediction)
    wide = page.width >= WIDE
    whole = max(prediction.step_time_s, sum(b.seconds for b in bars), prediction.bound_s) or 1.0
    names = [b.what if wide else b.name for b in bars if b.seconds]
    width = max(page.width - max(map(len, [*names, "roofline bound"])) - 24, 8)

    def row(name: str, start: float, length: float, style: str) -> tuple[Text, ...]:
        drawn = Text(bar(start / whole, length / whole, width, unicode=page.unicode), style)
        share = f"{length / prediction.step_time_s:.1%}" if prediction.step_time_s else ""
        return Text(name), Text(seconds(length), justify="right"), Text(share, "dim", justify="right"), drawn

    rows = [row("roofline bound", 0.0, prediction.bound_s, "bright_black")]
    for b in bars:
        if b.seconds:
            rows.append(row(b.what if wide else b.name, b.start_s, b.seconds, _cause_colour(b.name)))
    rows.append(row("step time", 0.0, prediction.step_time_s, "bold"))
    page.rows(rows)
    absent = [b.name for b in bars if not b.seconds]
    if absent:
        page.quiet(f"nothing in: {', '.join(absent)}")


def _cause_colour(name: str) -> str:
    return BY_NAME[name].ink if name in BY_NAME else "blue"


def _pools(prediction: Prediction, page: Page) -> None:
    lines = facts.pools(prediction)
    if lines:
        page.title("Pools")
        page.rows([(Text(what), Text(value), Text(note, "dim")) for what, value, note in lines])


def _filled(prediction: Prediction, page: Page) -> None:
    lines = facts.filled(prediction)
    if lines:
        page.title("Frozen layers")
        page.rows([(Text(what), Text(value), Text(note, "dim")) for what, value, note in lines])


def _batches(prediction: Prediction, page: Page) -> None:
    lines = facts.batches(prediction)
    if lines:
        page.title("Over drawn batches")
        page.rows([(Text(what), Text(value), Text(note, "dim")) for what, value, note in lines])


def _clients(prediction: Prediction, page: Page) -> None:
    lines = facts.clients(prediction)
    if lines:
        page.title("Clients of the server")
        page.rows([(Text(what), Text(value), Text(note, "dim")) for what, value, note in lines])


def _swarm(prediction: Prediction, page: Page) -> None:
    lines = facts.swarm(prediction)
    if lines:
        page.title("Peers that have the experts" if prediction.plan.passes.peers else "Swarm of peers")
        page.rows([(Text(what), Text(value), Text(note, "dim")) for what, value, note in lines])


def _stragglers(prediction: Prediction, page: Page) -> None:
    lines = facts.stragglers(prediction)
    if lines:
        page.title("Ranks that vary")
        page.rows([(Text(what), Text(value), Text(note, "dim")) for what, value, note in lines])


def _feed(prediction: Prediction, page: Page) -> None:
    lines = feed_text.lines(prediction)
    if lines:
        page.title("Is it the data?")
        page.rows([(Text(what), Text(value), Text(note, "dim")) for what, value, note in lines])


def _memory(prediction: Prediction, page: Page) -> None:
    tight = prediction.tightest
    page.title(f"Memory of the fullest rank: {tight.rank} (x{tight.multiplicity})")
    parts = facts.alive(tight)
    page.print(_memory_bar(tight, [num_bytes for _, num_bytes in parts], page), one_line=True)
    rows = []
    for index, (name, num_bytes) in enumerate(parts):
        mark = "■" if page.unicode else ASCII_FILL[index % len(ASCII_FILL)]
        share = Text(f"{num_bytes / tight.capacity_bytes:.1%}" if tight.capacity_bytes else "", "dim", justify="right")
        label = Text(f"{mark} ", COLOURS[index % len(COLOURS)]).append(name, "default")
        rows.append((label, Text(gibibytes(num_bytes), justify="right"), share))
    page.rows(rows)
    over = tight.headroom_bytes < 0
    used = f"{gibibytes(tight.peak_bytes)} of {gibibytes(tight.capacity_bytes)} at {seconds(tight.at_s)}"
    room = f"{gibibytes(abs(tight.headroom_bytes))} {'over (| is the capacity)' if over else 'free'}"
    page.print(Text(f"{used}, {room}; {facts.fitting(prediction)}", "bold red" if over else ""), indent=2)
    for (where, used, what), one in zip(facts.tiers(prediction), prediction.tiers):
        short = f", {gibibytes(-one.headroom_bytes)} over" if one.headroom_bytes < 0 else ""
        page.print(Text(f"{where}: {used}{short} ({what})", "bold red" if short else ""), indent=2)


def _memory_bar(tight: RankMemory, sizes: list[float], page: Page) -> Text:
    """The categories side by side within the capacity; where they exceed it, ``|`` marks it inside the bar."""
    scale, width = max(tight.capacity_bytes, tight.peak_bytes) or 1.0, max(page.width - 6, 10)
    filled = Text()
    for index, count in enumerate(stacked([size / scale for size in sizes], width)):
        fill = "█" if page.unicode else ASCII_FILL[index % len(ASCII_FILL)]
        filled.append(fill * count, COLOURS[index % len(COLOURS)])
    filled.append("." * (width - len(filled)), "dim")
    if tight.headroom_bytes < 0:
        at = int(tight.capacity_bytes / scale * width)
        filled = Text.assemble(filled[:at], ("|", "bold red"), filled[at + 1 :])
    return Text.assemble("  [", filled, "]")


def _sensitivities(prediction: Prediction, page: Page) -> None:
    if not prediction.sensitivities:
        return
    page.title("What would help most")
    page.rows(
        [(Text(facts.percent(change), justify="right"), Text(what)) for _, what, change in facts.ranked(prediction, 6)]
    )


def _money(prediction: Prediction, page: Page) -> None:
    page.title("Cost and energy")
    page.rows([(Text(what), Text(value)) for what, value in facts.money(prediction)])
    if prediction.money.source:
        page.quiet(f"source: {prediction.money.source}")


def training_run(prediction: Prediction, page: Page) -> None:
    """Print time and cost of the whole run, if its tokens are known."""
    lines = facts.training_run(prediction)
    if lines:
        page.title("Training run")
        page.rows([(Text(what), Text(time), Text(note, "dim")) for what, time, note in lines])


def _assumptions(prediction: Prediction, page: Page) -> None:
    """One line each, their sources numbered and listed once below."""
    if not prediction.assumptions:
        return
    page.title("Assumptions (! = not confirmed)")
    sources = {source: n for n, source in enumerate(dict.fromkeys(a.source for a in prediction.assumptions), 1)}
    page.rows(
        [
            (
                Text("!" if a.flagged else " ", "bold yellow"),
                Text(a.name),
                Text(a.value),
                Text(f"[{sources[a.source]}]", "dim", justify="right"),
            )
            for a in prediction.assumptions
        ]
    )
    page.rows([(Text(f"[{n}]", "dim", justify="right"), Text(source, "dim")) for source, n in sources.items()])


def _warnings(prediction: Prediction, page: Page) -> None:
    if prediction.warnings:
        page.title("Before you believe it")
        page.rows([(Text("!", "bold yellow"), Text(warning)) for warning in prediction.warnings])
