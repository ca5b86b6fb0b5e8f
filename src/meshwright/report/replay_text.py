"""A replay, for a terminal: how well the measured step is understood, then the step as it would be."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.quantity import seconds
from meshwright.replay.answer import Replay
from meshwright.report.page import Page

#: A replay further off than this does not understand the trace well enough for a what-if (dPRO, 2205.02473).
TRUSTED = 0.05


def render(replay: Replay, console: Console) -> None:
    """Print the replay to `console`."""
    with Page(console) as page:
        steps = f"the median of {replay.num_steps} steps" if replay.num_steps > 1 else "one step"
        line = f"measured {seconds(replay.measured_s)}/step ({steps}), replayed {seconds(replay.replayed_s)}"
        page.print(Text(f"{line}: {replay.error:+.1%}", "" if abs(replay.error) <= TRUSTED else "yellow"))
        if abs(replay.error) > TRUSTED:
            page.quiet(f"more than {TRUSTED:.0%} off: what follows compares with the replayed step")
        if not replay.changes:
            return
        style = "bold green" if replay.change <= 0 else "bold red"
        page.print(
            Text(f"{', '.join(replay.changes)}: {seconds(replay.step_time_s)}/step, {replay.change:+.1%}", style)
        )
        _table(replay, page)


def _table(replay: Replay, page: Page) -> None:
    page.title("Seconds per rank")
    rows = [("", "replayed", "then", "")]
    for name, (a, b) in replay.kinds.items():
        rows.append((name, seconds(a), seconds(b), f"{b / a - 1:+.1%}" if a else ""))
    for name, (a, b) in replay.exposed_s.items():
        rows.append((f"exposed {name}", seconds(a), seconds(b), f"{b / a - 1:+.1%}" if a > 1e-8 else ""))
    rows.append(("bubble", f"{replay.bubble[0]:.1%}", f"{replay.bubble[1]:.1%}", ""))
    page.rows(
        [
            tuple(Text(cell, "" if i else "dim", justify="right" if j else "left") for j, cell in enumerate(row))
            for i, row in enumerate(rows)
        ]
    )
