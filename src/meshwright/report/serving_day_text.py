"""A day of serving as text: replicas hour by hour, what the day costs, and what a training job beside it gets."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.quantity import big, latency
from meshwright.report.page import Page
from meshwright.search.serving.day import DayPlanned, DayServed
from meshwright.search.serving.space import engine_words, words
from meshwright.spec.serve import Serve

HEADS = ("hour", "requests", "devices", "in time", "TTFT p90", "TPOT p90")


def render(found: DayPlanned, serve: Serve, console: Console) -> None:
    """Print the whole day to `console`."""
    with Page(console) as page:
        page.print()
        page.print(Text(verdict(found), "bold green" if found.good else "bold red"))
        layout = words(found.candidate.phases[0].plan).replace(" dp1", "").replace("dp1", "tp1")
        page.print(
            Text(
                f"replicas of {layout} {engine_words(found.candidate.engine, serve)}: one answers "
                f"{found.replica_rate:.3g} requests/s in time, {found.day.room:.0%} of that is kept free",
                "dim",
            )
        )
        page.title("Hour by hour, replicas following the rate")
        beside = found.training
        rows = [tuple(Text(head, "dim") for head in (*HEADS, *(("training",) if beside else ())))]
        for number, hour in enumerate(found.scaled.hours):
            cells = (
                str(number),
                f"{hour.requests:,}",
                str(hour.devices),
                f"{hour.attainment:.1%}",
                latency(hour.ttft_s),
                latency(hour.tpot_s),
                *((f"{beside.devices[number]} devices",) if beside else ()),
            )
            rows.append(tuple(Text(cell, justify="right") for cell in cells))
        page.rows(rows)
        page.title("The day")
        fixed = _total("as many as the highest rate needs", found, found.fixed)
        page.rows([fixed, _total("following the rate", found, found.scaled)])
        if found.scaled.resent:
            page.quiet(f"{found.scaled.resent:,} requests of lost replicas were sent again")
        _training(found, page)


def verdict(found: DayPlanned) -> str:
    """Return the answer in one line."""
    said = []
    for metric, bound, share, value in found.scaled.objectives:
        name = f"{metric[:-2].upper()} p{share * 100:g} {latency(value)}"
        said.append(f"{name} {'within' if value <= bound else 'misses'} {latency(bound)}")
    saved = 1 - found.scaled.device_hours / found.fixed.device_hours
    return f"{', '.join(said)} over the day; following the rate {'saves' if saved >= 0 else 'costs'} {abs(saved):.1%}"


def _total(what: str, found: DayPlanned, one: DayServed) -> tuple[Text, ...]:
    usd = found.usd(one)
    cells = [f"{one.device_hours:,.0f} device-hours", *([f"${usd:,.0f}"] if usd is not None else [])]
    return Text(what), *(Text(cell, justify="right") for cell in (*cells, f"{one.attainment:.2%} in time"))


def _training(found: DayPlanned, page: Page) -> None:
    beside = found.training
    if beside is None:
        return
    page.title("Training beside it")
    page.quiet(f"on what serving leaves free: {big(beside.tokens)} tokens a day, {beside.restarts} restarts")
    page.quiet(f"on the {beside.devices_apart} devices it never needs: {big(beside.tokens_apart)} tokens a day")
    page.rows(
        [
            (Text(str(one.devices), justify="right"), Text(f"{big(one.tokens_per_s)} tokens/s"), Text(one.plan, "dim"))
            for one in beside.plans
        ]
    )
