"""The answer of a search as text: the best plans, their differences, why the others lost."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.quantity import big, gibibytes, seconds
from meshwright.report.page import Page
from meshwright.report.text import training_run
from meshwright.search.found import OBJECTIVES, Found, Ranked


def render(found: Found, console: Console) -> None:
    """Print the whole answer to `console`."""
    with Page(console) as page:
        page.print(Text(verdict(found), "bold green" if found.fits else "bold red"))
        page.print(Text(coverage(found), "dim"))
        if found.best:
            _table(found, page)
            _ties(found, page)
            _front(found, page)
            training_run(found.best[0].prediction, page)
        elif found.misses:
            page.title("Closest")
            page.rows(
                [
                    (Text(m.plan.text()), Text(f"lacks {gibibytes(m.lacks_bytes)}"), Text(m.remedy, "dim"))
                    for m in found.misses
                ]
            )
        page.title("Why plans were rejected")
        rows = sorted(found.pruned.items(), key=lambda item: -item[1])
        page.rows([(Text(big(n) if n >= 10**6 else str(n), justify="right"), Text(why)) for why, n in rows])


def verdict(found: Found) -> str:
    """The answer in one line."""
    if not found.best:
        return _none(found)
    first = found.best[0]
    sure = "proven best under the cost model" if found.proven_optimal else "best of what was looked at, not proven"
    return f"{first.plan.text()}: {_figure(found)}{seconds(first.prediction.step_time_s)} a step, {sure}"


def _none(found: Found) -> str:
    """The answer where no plan can be shown: that nothing fits is said only where everything was looked at."""
    if not found.stopped:
        return "nothing fits" if found.proven_optimal else "nothing that was looked at fits"
    if found.evaluated:
        return f"stopped too early to say: none of the {found.evaluated:,} plans evaluated so far fits"
    return "stopped before any plan was evaluated: whether one fits is not known"


def _figure(found: Found) -> str:
    """What was asked for besides the step time: dollars or joules per token, if the catalog knows them."""
    money = found.best[0].prediction.money
    value = {"cost": money.usd_per_million_tokens, "energy": money.joules_per_token}.get(found.objective)
    return "" if value is None else f"{shown(found.objective, value)}, "


def coverage(found: Found) -> str:
    """How much of the space was looked at, and how."""
    space = "plans listed when it was stopped" if found.stopped else "plans in the space"
    return (
        f"{found.covered:,} {space}: {found.evaluated:,} evaluated, {found.bounded:,} bounded one by one, "
        f"{sum(found.pruned.values()):,} rejected, in {seconds(found.seconds)} ({found.strategy})"
    )


def cells(ranked: Ranked) -> tuple[str, ...]:
    """A row of the table: step time and its interval, MFU, room, cost, plan."""
    p = ranked.prediction
    low, high = p.step_time_interval_s
    usd = p.money.usd_per_million_tokens
    return (
        seconds(p.step_time_s),
        f"{low:.3g} - {high:.3g} s",
        f"{p.mfu:.1%}",
        gibibytes(p.tightest.headroom_bytes),
        "-" if usd is None else f"${usd:.3g}/Mtok",
        p.plan.text() + (f" (also: {', '.join(ranked.also)})" if ranked.also else ""),
    )


HEADS = ("step", "80% interval", "MFU", "room", "cost", "plan")


def _table(found: Found, page: Page) -> None:
    page.title("Best plans")
    rows = [tuple(Text(h, "dim") for h in ("", *HEADS))]
    for place, ranked in enumerate(found.best, 1):
        mark = "=" if ranked.tie is not None else str(place)
        rows.append((Text(mark), *map(Text, cells(ranked))))
    page.rows(rows)
    for ranked in found.best[1:]:
        page.quiet(f"{ranked.plan.text()}: {ranked.delta}")


def _ties(found: Found, page: Page) -> None:
    tied = [r for r in found.best if r.tie is not None]
    if not tied:
        return
    page.title("Ties with the first (=): the 80% interval of the paired difference includes zero")
    page.rows(
        [
            (
                Text(r.plan.text()),
                Text(f"{r.tie.low_s * 1e3:+.3g} to {r.tie.high_s * 1e3:+.3g} ms"),
                Text(f"measure {r.tie.measure}", "dim"),
            )
            for r in tied
        ]
    )


def _front(found: Found, page: Page) -> None:
    first, second = found.objectives
    page.title(f"Pareto front of {OBJECTIVES[first]} and {OBJECTIVES[second]} (evaluated plans)")
    rows = [(_value(first, v[0]), _value(second, v[1]), Text(plan.text())) for plan, v in found.pareto[:8]]
    page.rows(rows)


def _value(objective: str, value: float) -> Text:
    return Text(shown(objective, value), justify="right")


def shown(objective: str, value: float) -> str:
    """A value of an objective with its unit."""
    if objective == "step":
        return seconds(value)
    if objective == "headroom":
        return f"{gibibytes(-value)} free"
    return f"${value:.4g}/Mtok" if objective == "cost" else f"{value:.4g} J/token"
