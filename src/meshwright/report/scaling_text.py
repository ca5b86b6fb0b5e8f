"""Time and cost over the number of devices as text: the answer, a table, and both curves drawn with their intervals."""

from __future__ import annotations

from math import log

from rich.console import Console
from rich.text import Text

from meshwright.quantity import big, gibibytes
from meshwright.report.facts import chance, share, usd
from meshwright.report.page import WIDE, Page
from meshwright.report.scaling_plot import Panel, panels
from meshwright.search.scaling import Point, Scaling

#: Width from which the table has room for some of its columns; intervals stand beside the curves too.
COLUMNS = {140: ("80% interval",), WIDE: ("room",), 72: ("in time", "in budget", "tokens/s", "images/s")}


def render(scaling: Scaling, console: Console) -> None:
    """Print the whole answer to `console`."""
    with Page(console) as page:
        first, *others = answer(scaling)
        page.print(Text(first, "bold green" if scaling.meeting else "bold red"))
        for line in others:
            page.print(Text(line))
        for remark in remarks(scaling):
            page.print(Text(remark, "dim"))
        if scaling.fitting:
            _table(scaling, page)
            for panel in panels(scaling):
                _drawn(panel, page)
        refused = [p for p in scaling.points if p.refused]
        if refused:
            page.title("No plan")
            page.rows([(Text(p.text), Text(p.refused, "dim")) for p in refused])


def answer(scaling: Scaling) -> list[str]:
    """The answer in a few lines: the cheapest in time, the fastest in budget; or the nearest miss."""
    if not scaling.fitting:
        return ["stopped before anything was found" if scaling.stopped else "nothing fits on any of them"]
    goal, limits = scaling.goal, _limits(scaling)
    if not scaling.meeting:
        near = scaling.nearest
        over = [f"{chance(limit)}" for limit in near.limits if not limit.met]
        return [f"none of them is {limits}", f"nearest: {brief(near, scaling)}; {', '.join(over)}"]
    lines = []
    where = f" {limits}" if limits else ""
    cheap, fast = scaling.cheapest, scaling.fastest
    words = {"cheapest": cheap, "fastest": fast}
    if cheap is fast:
        words = {"cheapest and fastest": cheap}
    elif goal.days is None and goal.budget_usd is not None:
        words = {"fastest": fast, "cheapest": cheap}
    for name, point in words.items():
        odds = "".join(f", {chance(limit)}" for limit in point.limits)
        lines.append(f"{name}{where}: {brief(point, scaling)}{odds}")
    return lines


def _limits(scaling: Scaling) -> str:
    goal = scaling.goal
    said = [] if goal.days is None else [f"within {goal.days:g} days"]
    said += [] if goal.budget_usd is None else [f"within {usd(goal.budget_usd)}"]
    return " and ".join(said)


def brief(point: Point, scaling: Scaling) -> str:
    """``64xh100, 23.4 days, $247,000``."""
    return f"{point.text}, {point.run.days:.3g} days, {spent(point, scaling)}"


def spent(point: Point, scaling: Scaling) -> str:
    """Return the cost of a point in words: dollars, or device-hours where it has no price."""
    cost = scaling.spent(point)
    if cost is None:
        return f"{big(point.run.device_hours)} device-hours, no public price"
    return usd(cost) if scaling.in_dollars else f"{big(cost)} device-hours"


def remarks(scaling: Scaling) -> list[str]:
    """List the remarks on all points: the run they share, the source of prices, and how sure the results are."""
    if not scaling.fitting:
        return []
    p = scaling.fitting[0].prediction
    sources = dict.fromkeys(x.run.price_source for x in scaling.fitting if x.run.usd is not None)
    found = [
        f"{p.model.name}, {p.train.text()}: the same run on every cluster, {p.train.global_batch:,} sequences a step"
    ]
    if sources:
        found.append(f"{'; '.join(sources)}; checkpoints and failures are in the time")
    without = [x.text for x in scaling.fitting if x.run.usd is None]
    if without:
        what = "no price is known" if not scaling.in_dollars else f"no public price of {', '.join(without)}"
        found.append(f"{what}: say what a device costs an hour with --price 2.10 or --price h800=2.10")
    if not all(x.proven for x in scaling.fitting):
        found.append("not every plan is proven best of its space")
    if scaling.stopped:
        found.append(f"stopped: {len(scaling.points)} of {scaling.asked} clusters were searched")
    return found


def heads(scaling: Scaling) -> tuple[str, ...]:
    """The heads of the table's columns."""
    goal = ("in time",) if scaling.goal.days is not None else ()
    goal += ("in budget",) if scaling.goal.budget_usd is not None else ()
    cost = "cost" if scaling.in_dollars else "device-hours"
    counted = next((p.prediction.train.counted for p in scaling.fitting), "tokens")
    return ("cluster", "days", "80% interval", cost, "80% interval", *goal, f"{counted}/s", "MFU", "room", "plan")


def cells(point: Point, scaling: Scaling) -> tuple[str, ...]:
    """A row of the table; = marks what cannot be told from the fastest, or from the cheapest."""
    p, run = point.prediction, point.run
    low, high = (s / run.seconds for s in run.seconds_interval)
    cost = scaling.spent(point)
    money = usd if scaling.in_dollars else big
    return (
        point.text,
        f"{run.days:.3g}{' =' if scaling.ties_in_time(point) else ''}",
        f"{run.days * low:.3g} - {run.days * high:.3g}",
        "-" if cost is None else f"{money(cost)}{' =' if scaling.ties_in_cost(point) else ''}",
        "-" if cost is None else f"{_short(cost * low, scaling)} - {_short(cost * high, scaling)}",
        *(share(limit.probability) for limit in point.limits),
        big(point.tokens_per_s),
        f"{p.mfu:.0%}",
        gibibytes(p.tightest.headroom_bytes),
        p.plan.text(),
    )


def _short(cost: float, scaling: Scaling) -> str:
    return f"${big(cost)}" if scaling.in_dollars else big(cost)


TIES = "= cannot be told from the fastest, or from the cheapest: the 80% interval of the difference includes zero"


def _table(scaling: Scaling, page: Page) -> None:
    page.title("Clusters")
    names, rows = heads(scaling), [cells(p, scaling) for p in scaling.fitting]
    left_out = [name for least, columns in COLUMNS.items() if page.width < least for name in columns]
    shown = [i for i, name in enumerate(names) if name not in left_out]
    out = [tuple(Text(names[i], "dim") for i in shown)]
    for point, row in zip(scaling.fitting, rows):
        style = "" if point.good else "dim"
        out.append(tuple(Text(row[i], style) for i in shown))
    page.rows(out)
    if any("=" in cell for row in rows for cell in (row[1], row[3])):
        page.quiet(TIES)


def _drawn(panel: Panel, page: Page) -> None:
    """Each value as a point on a logarithmic line, its interval around it, and where the limit is."""
    page.title(
        f"{panel.title[0].upper()}{panel.title[1:]}, logarithmic{f'; | {panel.limit_name}' if panel.limit else ''}"
    )
    values = [v for row in panel.rows for v in row[1:]] + ([panel.limit] if panel.limit else [])
    low, high = min(values) / 1.05, max(values) * 1.05
    names = [row[0].text for row in panel.rows]
    figures = [tuple(_figure(panel, v) for v in row[1:]) for row in panel.rows]
    intervals = [f"[{least}, {most}]" for least, _, most in figures]
    width = max(page.width - max(map(len, names)) - max(map(len, intervals)) - 18, 16)

    def at(value: float) -> int:
        return min(int((log(value) - log(low)) / (log(high) - log(low)) * width), width - 1)

    rows = []
    for (point, least, value, most), figure, interval in zip(panel.rows, figures, intervals):
        line = [" "] * width
        for i in range(at(least), at(most) + 1):
            line[i] = "─" if page.unicode else "-"
        if panel.limit:
            line[at(panel.limit)] = "│" if page.unicode else "|"
        line[at(value)] = "●" if page.unicode else "o"
        style = "green" if point.good else "red"
        cells = (Text(point.text), Text(figure[1], justify="right"), Text(interval, "dim"))
        rows.append((*cells, Text("".join(line).rstrip(), style)))
    page.rows(rows)


def _figure(panel: Panel, value: float) -> str:
    return f"{value:.3g}" if panel.name == "days" else big(value)
