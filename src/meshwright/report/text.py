"""A prediction as text: verdict, waterfall beside the roofline bound, memory, what would help, what it rests on.

Rich decides on colour (``NO_COLOR`` is honoured) and width; below 80 columns descriptions give way to names.
"""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.prediction import Prediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report import facts
from meshwright.report.bars import bar, is_unicode, stacked

#: Columns from which a row has room for its description.
WIDE = 100
COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_black")
ASCII_FILL = "#=+*%o~."


def render(prediction: Prediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    _verdict(prediction, console)
    _waterfall(prediction, console)
    _memory(prediction, console)
    _sensitivities(prediction, console)
    _money(prediction, console)
    _training_run(prediction, console)
    _assumptions(prediction, console)
    _warnings(prediction, console)


def _verdict(prediction: Prediction, console: Console) -> None:
    pieces = facts.verdict(prediction)
    line = Text(" | ".join(pieces))
    line.stylize("bold green" if prediction.fits else "bold red", 0, len(pieces[0]))
    console.print(line)
    for remedy in facts.remedies(prediction):
        console.print(Padding(Text(remedy), (0, 0, 0, 2)))
    console.print()
    _rows(console, [(Text(what, "dim"), Text(value)) for what, value in facts.headline(prediction)])


def _waterfall(prediction: Prediction, console: Console) -> None:
    _title(console, "Where the step goes")
    bars = facts.waterfall(prediction)
    wide = console.width >= WIDE
    whole = max(prediction.step_time_s, sum(b.seconds for b in bars), prediction.bound_s) or 1.0
    names = [b.what if wide else b.name for b in bars if b.seconds]
    width = max(console.width - max(map(len, [*names, "roofline bound"])) - 24, 8)
    unicode = is_unicode(console)

    def row(name: str, start: float, length: float, style: str) -> tuple[Text, ...]:
        drawn = Text(bar(start / whole, length / whole, width, unicode=unicode), style)
        share = f"{length / prediction.step_time_s:.1%}" if prediction.step_time_s else ""
        return Text(name), Text(seconds(length), justify="right"), Text(share, "dim", justify="right"), drawn

    rows = [row("roofline bound", 0.0, prediction.bound_s, "bright_black")]
    for b in bars:
        if b.seconds:
            rows.append(row(b.what if wide else b.name, b.start_s, b.seconds, _cause_colour(b.name)))
    rows.append(row("step time", 0.0, prediction.step_time_s, "bold"))
    _rows(console, rows)
    absent = [b.name for b in bars if not b.seconds]
    if absent:
        console.print(Padding(Text(f"nothing in: {', '.join(absent)}", "dim"), (0, 0, 0, 2)))


def _cause_colour(name: str) -> str:
    if name in ("tp", "cp", "ep", "pp", "dp"):
        return "yellow"
    return {"bubble": "red", "host": "red", "recompute": "magenta", "optimizer": "cyan"}.get(name, "blue")


def _memory(prediction: Prediction, console: Console) -> None:
    tight = prediction.tightest
    scale = max(tight.capacity_bytes, tight.peak_bytes) or 1.0
    used = f"{gibibytes(tight.peak_bytes)} of {gibibytes(tight.capacity_bytes)}"
    room = "free" if tight.headroom_bytes >= 0 else "over"
    _title(console, f"Memory of the fullest rank: {tight.rank} (x{tight.multiplicity})")
    parts, width = facts.alive(tight), max(console.width - 6, 10)
    unicode, line = is_unicode(console), Text("  [")
    cells = stacked([num_bytes / scale for _, num_bytes in parts], width)
    for index, count in enumerate(cells):
        fill = "█" if unicode else ASCII_FILL[index % len(ASCII_FILL)]
        line.append(fill * count, COLOURS[index % len(COLOURS)])
    line.append("." * max(width - sum(cells), 0), "dim").append("]")
    console.print(line, overflow="crop", no_wrap=True)
    rows = []
    for index, (name, num_bytes) in enumerate(parts):
        mark = "■" if unicode else ASCII_FILL[index % len(ASCII_FILL)]
        share = Text(f"{num_bytes / scale:.1%}", "dim", justify="right")
        label = Text(f"{mark} ", COLOURS[index % len(COLOURS)]).append(name, "default")
        rows.append((label, Text(gibibytes(num_bytes), justify="right"), share))
    _rows(console, rows)
    peak = f"{used} at {seconds(tight.at_s)}, {gibibytes(abs(tight.headroom_bytes))} {room}"
    console.print(Padding(Text(peak, "" if tight.headroom_bytes >= 0 else "bold red"), (0, 0, 0, 2)))


def _sensitivities(prediction: Prediction, console: Console) -> None:
    if not prediction.sensitivities:
        return
    _title(console, "What would help most")
    _rows(
        console,
        [(Text(f"{change:+.1%}", justify="right"), Text(what)) for _, what, change in facts.ranked(prediction, 6)],
    )


def _money(prediction: Prediction, console: Console) -> None:
    _title(console, "Cost and energy")
    _rows(console, [(Text(what), Text(value)) for what, value in facts.money(prediction)])
    if prediction.money.source:
        console.print(Padding(Text(f"source: {prediction.money.source}", "dim"), (0, 0, 0, 2)))


def _training_run(prediction: Prediction, console: Console) -> None:
    lines = facts.training_run(prediction)
    if lines:
        _title(console, "Training run")
        _rows(console, [(Text(what), Text(time), Text(note, "dim")) for what, time, note in lines])


def _assumptions(prediction: Prediction, console: Console) -> None:
    if not prediction.assumptions:
        return
    _title(console, "Assumptions (! = not confirmed)")
    mark = Text("!", "bold yellow")
    _rows(
        console,
        [
            (mark if a.flagged else Text(" "), Text(a.name), Text(a.value), Text(a.source, "dim"))
            for a in prediction.assumptions
        ],
    )


def _warnings(prediction: Prediction, console: Console) -> None:
    if prediction.warnings:
        _title(console, "Before you believe it")
        _rows(console, [(Text("!", "bold yellow"), Text(warning)) for warning in prediction.warnings])


def _title(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, "bold"))


def _rows(console: Console, rows: list[tuple[Text, ...]]) -> None:
    """A table without lines, indented by two; columns wrap rather than lose text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for index in range(max(map(len, rows), default=0)):
        table.add_column(justify=rows[0][index].justify or "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(Padding(table, (0, 0, 0, 2)))
