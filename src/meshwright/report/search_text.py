"""The answer of a search as text: the best plans, their differences, why the others lost."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.risk import USUAL_RISK
from meshwright.quantity import big, gibibytes, seconds
from meshwright.report.facts import priced_per
from meshwright.report.page import Page
from meshwright.report.text import training_run
from meshwright.search.found import OBJECTIVES, WITHIN, Excluded, Found, Ranked, value_of

#: Plans of the front that are listed.
FRONT = 8


#: A way to less memory that no plan of the space has.
LESS = "a fine-tune that trains adapters alone takes less: --train ...,phase=lora, and params=nf4 in a plan beside it"


def render(found: Found, console: Console) -> None:
    """Print the whole answer to `console`."""
    with Page(console) as page:
        page.print(Text(verdict(found), "bold green" if found.fits else "bold red"))
        page.print(Text(coverage(found), "dim"))
        for remark in filter(None, (demanded(found), *found.remarks)):
            page.print(Text(remark, "dim"))
        for line in sure(found):
            page.print(Text(line, "dim"))
        if found.best:
            _recommended(found, page)
            _table(found, page)
        for title, beyond in excluded(found):
            _excluded(title, beyond, page)
        if found.best:
            _front(found, page)
            training_run(found.best[0].prediction, page)
        elif found.misses:
            page.title("Closest")
            for miss in found.misses:
                page.print(Text(f"{miss.plan.text()}: lacks {gibibytes(miss.lacks_bytes)}"), indent=2)
                page.print(Text(miss.remedy, "dim"), indent=5)
            if "phase=" not in found.question[2]:
                page.quiet(LESS)
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
        what = "nothing" if found.proven_optimal else "nothing that was looked at"
        if found.engines:
            what += f" that {' or '.join(found.engines)} runs"
        return f"{what} leaves {gibibytes(found.room_bytes)} on every device" if found.room_bytes else f"{what} fits"
    if found.evaluated:
        return f"stopped too early to say: none of the {found.evaluated:,} plans evaluated so far fits"
    return "stopped before any plan was evaluated: whether one fits is not known"


def _figure(found: Found) -> str:
    """Return the objective besides the step time: dollars or joules per token, if the catalog knows them."""
    value = None if found.objective == "step" else value_of(found.objective, found.best[0].prediction)
    return "" if value is None else f"{shown(found.objective, value)}, "


def coverage(found: Found) -> str:
    """Return in words the part of the space that was searched, and how."""
    space = "plans listed when it was stopped" if found.stopped else "plans in the space"
    how = f"{found.strategy}, proven before: from the store" if found.recalled else found.strategy
    return (
        f"{found.covered:,} {space}: {found.evaluated:,} evaluated, {found.bounded:,} bounded one by one, "
        f"{sum(found.pruned.values()):,} rejected, in {seconds(found.seconds)} ({how})"
    )


def sure(found: Found) -> list[str]:
    """Return how sure the order is, and what to measure to be surer; nothing where one plan is shown."""
    if found.sure is None:
        return []
    one, rest = found.sure, len(found.best) - 1
    chance = f"the first is the fastest of the {rest + 1} with a probability of {one.best_probability:.0%}"
    if not one.alike:
        return [f"{chance}; none of the others is a tie with it"]
    ties = f"{one.alike} of the other {rest} are ties" if one.alike < rest else "every other one is a tie"
    lines = [f"{chance}; {ties} with it (=)"]
    if one.decides is not None:
        lines.append(
            f"to decide, measure {one.decides.measure} ({one.decides.share:.0%} of the uncertainty between the two "
            f"likeliest): {one.decides.command}"
        )
    return lines


def demanded(found: Found) -> str:
    """Return the demands on every plan in one line; "" where nothing was demanded."""
    parts = []
    if found.engines:
        parts.append(f"run by {' or '.join(found.engines)}")
    if found.room_bytes:
        parts.append(f"with {gibibytes(found.room_bytes)} left on every device")
    if found.usual:
        parts.append(f"for a chance of {USUAL_RISK:.0%} at most of running out of memory (--risk sets another)")
    if found.framework not in ("", "default"):
        parts.append(f"costs of {found.framework}")
    said = f"only plans {', '.join(parts)}" if parts else ""
    if found.usual and found.framework in ("", "default"):
        said += "; a framework that is named (--framework) has its memory predicted more surely, and needs less room"
    return said


def cells(ranked: Ranked) -> tuple[str, ...]:
    """A row of the table: step time and its interval, MFU, room, cost, and how many variants there are."""
    p = ranked.prediction
    usd = p.money.usd_per_million_tokens
    count = len(ranked.variants)
    return (
        seconds(p.step_time_s),
        between(*p.step_time_interval_s),
        f"{p.mfu:.1%}",
        gibibytes(p.tightest.headroom_bytes),
        "-" if usd is None else f"${usd:.3g}/{priced_per(p.train)}",
        f"{count} variant{'s' * (count > 1)} within {WITHIN:.0%}" if count else "",
    )


def between(low: float, high: float) -> str:
    """An interval of durations in one unit: ``47.9 - 71.2 s``."""
    scale, unit = (1.0, "s") if high >= 1 else (1e3, "ms") if high >= 1e-3 else (1e6, "us")
    return f"{low * scale:.3g} - {high * scale:.3g} {unit}"


def difference(low: float, high: float) -> str:
    """An interval around zero in one unit: ``-105 to +127 ms``."""
    scale, unit = (1.0, "s") if max(-low, high) >= 1 else (1e3, "ms") if max(-low, high) >= 1e-3 else (1e6, "us")
    return f"{low * scale:+.3g} to {high * scale:+.3g} {unit}"


def share(value: float) -> str:
    """A share in tenths of a percent."""
    return f"{value:.1%}" if value >= 0.0005 else "less than 0.1%"


def words(ranked: Ranked) -> str:
    """The plan, with the words of its other spellings."""
    return ranked.plan.text() + (f" (also: {', '.join(ranked.also)})" if ranked.also else "")


HEADS = ("step", "80% interval", "MFU", "room", "cost", "")


def _recommended(found: Found, page: Page) -> None:
    pick = found.recommended
    if pick is None:
        return
    page.title("Recommended")
    page.print(Text(pick.plan.text(), "bold"), indent=2)
    page.print(Text(f"{seconds(pick.prediction.step_time_s)} a step: {pick.why}"), indent=2)


def excluded(found: Found) -> list[tuple[str, Excluded]]:
    """Return the fastest plans that the engines asked for do not run and that leave too little room, each with its gain
    as a headline."""
    lines = []
    for beyond, but in (
        (found.unrunnable, f"not run by {' or '.join(found.engines)}"),
        (found.risky, f"leaves less than {gibibytes(found.room_bytes)}"),
    ):
        if beyond is not None:
            what = "Fits" if beyond.wins is None else f"Faster by {share(beyond.wins)}"
            lines.append((f"{what}, but {but}", beyond))
    return lines


def _excluded(title: str, beyond: Excluded, page: Page) -> None:
    page.title(title)
    room = gibibytes(beyond.headroom_bytes)
    page.print(Text(f"{beyond.plan.text()}: {seconds(beyond.step_time_s)} a step, {room} left"), indent=2)
    for reason in beyond.reasons:
        page.quiet(reason)


def _table(found: Found, page: Page) -> None:
    """Numbers on one line and the plan under them, so that its words stay together on narrow terminals."""
    page.title("Best of each family" if found.families else "Best plans")
    lines = [("", *HEADS), *((_mark(i, r), *cells(r)) for i, r in enumerate(found.best))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS) + 1)]
    for line, ranked in zip(lines, [None, *found.best]):
        shown = "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        page.print(Text(shown, "dim" if ranked is None else ""), indent=2, one_line=True)
        if ranked is not None:
            page.print(Text(words(ranked), "bold" if ranked is found.best[0] else ""), indent=5)
            for remark in _remarks(ranked):
                page.print(Text(remark, "dim"), indent=5)


def _mark(place: int, ranked: Ranked) -> str:
    return "=" if ranked.tie is not None else str(place + 1)


def _remarks(ranked: Ranked) -> list[str]:
    found = [f"against the one above: {ranked.delta}"] if ranked.delta else []
    if ranked.tie is not None:
        apart = difference(ranked.tie.low_s, ranked.tie.high_s)
        found.append(f"a tie with 1: {apart} (80%); to decide, measure {ranked.tie.measure}")
    return found


def _front(found: Found, page: Page) -> None:
    first, second = found.objectives
    page.title(f"Pareto front of {OBJECTIVES[first]} and {OBJECTIVES[second]} (evaluated plans)")
    lines = [(shown(first, v[0]), shown(second, v[1])) for _, v in found.pareto[:FRONT]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    room = max(20, page.width - sum(widths) - 8)
    for line, (plan, _) in zip(lines, found.pareto):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(line, widths))
        if len(plan.text()) <= room:
            page.print(Text(f"{cells}  {plan.text()}"), indent=2, one_line=True)
        else:
            page.print(Text(cells), indent=2)
            page.print(Text(plan.text()), indent=5)
    if len(found.pareto) > FRONT:
        page.quiet(f"and {len(found.pareto) - FRONT} more: --json or --report")


def shown(objective: str, value: float) -> str:
    """A value of an objective with its unit."""
    if objective == "step":
        return seconds(value)
    if objective == "headroom":
        return f"{gibibytes(-value)} free"
    return f"${value:.4g}/Mtok" if objective == "cost" else f"{value:.4g} J/token"
