"""A diagnosis in words: suspects, what they cost, and who waits for whom."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from meshwright.quantity import seconds
from meshwright.replay.diagnose import Diagnosis, Suspect
from meshwright.report.page import Page

FORMAT_VERSION = 1
#: What is said of each kind of suspect.
SAID = {
    "rank": "computes slowly",
    "nic": "sends and receives slowly",
    "link": "exchange slowly with one another",
    "group": "exchange slowly, and no other group tells which of them",
    "hung": "hangs: all that it needs is done",
}
#: Rows of ranks that are shown.
SHOWN = 8


def to_json(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain values."""
    return {
        "format_version": FORMAT_VERSION,
        "ranks": list(found.names),
        "suspects": [
            msgspec.to_builtins(one)
            | {"names": [found.names[rank] for rank in one.ranks]}
            | {"factor": one.factor if np.isfinite(one.factor) else None}
            for one in found.suspects
        ],
        "slowdown": found.slowdowns.whole,
        "slowdowns": msgspec.to_builtins(found.slowdowns),
        "waits_s": found.waits_s.tolist(),
        "steps": found.num_steps,
    }


def render(found: Diagnosis, console: Console) -> None:
    """Print a diagnosis."""
    slow = found.slowdowns
    with Page(console) as page:
        page.print(Text(_verdict(found), "bold"))
        page.quiet(
            f"step {seconds(slow.step_s)}, {seconds(slow.ideal_s)} without stragglers: {slow.whole:.3f} times as long; "
            f"{found.num_steps} step{'s' * (found.num_steps != 1)} looked at"
        )
        if found.suspects:
            page.title("Suspects")
            page.rows([_suspect(one, found) for one in found.suspects])
        worst = sorted(slow.by_rank, key=lambda rank: -slow.by_rank[rank])[:SHOWN]
        page.title("By rank")
        head = [Text(""), *(Text(word, "dim", justify="right") for word in ("alone", "waits", "waited for"))]
        page.rows([head, *(_rank(rank, found) for rank in worst)])
        page.quiet(
            "alone: times as long the step takes with this rank's times and all others' ideal; seconds of a step"
        )


def _verdict(found: Diagnosis) -> str:
    if not found.suspects:
        return "nothing is slow: all ranks and links are alike"
    first = found.suspects[0]
    who = " and ".join(found.names[rank] for rank in first.ranks)
    return f"{who}: {SAID[first.what]}"


def _suspect(one: Suspect, found: Diagnosis) -> tuple[Text, ...]:
    who = ", ".join(found.names[rank] for rank in one.ranks)
    factor = f"{one.factor:.2f} x" if np.isfinite(one.factor) else ""
    return (
        Text(who),
        Text(factor, justify="right"),
        Text(f"{SAID[one.what]} ({one.seen} observation{'s' * (one.seen != 1)})", "dim"),
    )


def _rank(rank: int, found: Diagnosis) -> tuple[Text, ...]:
    waits, waited = found.waits_s[:, rank].sum(), found.waits_s[rank].sum()
    cells = (f"{found.slowdowns.by_rank[rank]:.3f}", seconds(float(waits)), seconds(float(waited)))
    return (Text(found.names[rank]), *(Text(cell, justify="right") for cell in cells))
