"""Placements of prefill and decode apart as text: the best first, and what each layout of a half does alone."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.report.page import Page
from meshwright.report.serving_text import verdict
from meshwright.search.serving.split import SplitFound

#: Placements that are listed.
MOST = 8


def render(found: SplitFound, console: Console) -> None:
    """Print the placements to `console`."""
    with Page(console) as page:
        if found.answer is not None:
            page.print(Text(" | ".join(verdict(found.answer)), "bold green" if found.good else "bold red"))
            page.print(Text(found.answer.plan.text()), indent=2)
        else:
            page.print(Text("no placement of prefill and decode apart has devices enough", "bold red"))
        page.title(f"Placements ({found.strategy}), by requests/s for each device")
        head = ("prefill", "decode", "replicas", "requests/s for each device", "")
        rows = [tuple(Text(cell, "dim") for cell in head)]
        for one in found.placements[:MOST]:
            rest = "" if one.plan else "too many devices for the rate asked"
            cells = (one.prefill, one.decode, f"{one.prefills} and {one.decodes}", f"{one.rate_per_device:.3g}", rest)
            rows.append(tuple(map(Text, cells)))
        page.rows(rows)
        for title, rates in (("Prompts alone", found.prefill_rates), ("Answers alone", found.decode_rates)):
            page.title(f"{title}, requests/s for each device")
            page.rows([(Text(plan), Text(f"{rate:.3g}", justify="right")) for plan, rate in rates.items()])
