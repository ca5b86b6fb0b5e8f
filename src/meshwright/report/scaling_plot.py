"""Time and cost over the number of devices as a drawing: one panel each, both axes logarithmic, intervals as bands."""

from __future__ import annotations

from math import log

import msgspec

from meshwright.quantity import big
from meshwright.report.facts import usd
from meshwright.report.figure import Drawing, round_values
from meshwright.search.scaling import Point, Scaling

#: Colours of the curves, in their order; every one is named where it ends.
COLOURS = ("blue", "orange", "teal", "purple", "ochre", "rose", "green", "red")
LEFT, RIGHT, TOP, BOTTOM = 74.0, 24.0, 46.0, 42.0


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Something over the number of devices: ``rows`` of (point, low, value, high); ``limit`` is a line across."""

    name: str
    title: str
    rows: tuple[tuple[Point, float, float, float], ...]
    limit: float | None
    limit_name: str


def panels(scaling: Scaling) -> list[Panel]:
    """Days, and US dollars or device-hours."""
    days, cost = [], []
    for p in scaling.fitting:
        run = p.run
        low, high = (s / run.seconds for s in run.seconds_interval)
        spent = scaling.spent(p)
        days.append((p, run.days * low, run.days, run.days * high))
        if spent is not None:
            cost.append((p, spent * low, spent, spent * high))
    if not days:
        return []
    goal = scaling.goal
    return [
        Panel(
            name="days",
            title="days to train",
            rows=tuple(days),
            limit=goal.days,
            limit_name="" if goal.days is None else f"deadline {goal.days:g} days",
        ),
        Panel(
            name="cost",
            title="cost in US dollars" if scaling.in_dollars else "device-hours (no price is known)",
            rows=tuple(cost),
            limit=goal.budget_usd if scaling.in_dollars else None,
            limit_name="" if goal.budget_usd is None else f"budget {usd(goal.budget_usd)}",
        ),
    ]


def figure(scaling: Scaling, width: float = 560.0, height: float = 340.0) -> Drawing:
    """Both panels, one below the other."""
    found = panels(scaling)
    whole = Drawing(width, height * max(len(found), 1), "Time and cost of the training run over the number of devices")
    for i, panel in enumerate(found):
        draw(whole, panel, scaling, width, height, top=i * height)
    return whole


def panel_figure(panel: Panel, scaling: Scaling, width: float = 560.0, height: float = 340.0) -> Drawing:
    """One panel."""
    alone = Drawing(width, height, f"{panel.title} over the number of devices, with 80% intervals")
    draw(alone, panel, scaling, width, height)
    return alone


def draw(figure: Drawing, panel: Panel, scaling: Scaling, width: float, height: float, top: float = 0.0) -> None:
    """Put a panel on a figure, `top` units down."""
    counts = sorted({row[0].cluster.num_devices for row in panel.rows})
    values = [v for row in panel.rows for v in row[1:]] + ([panel.limit] if panel.limit else [])
    x_low, x_high = counts[0] / 1.25, counts[-1] * 1.25
    y_low, y_high = min(values) / 1.15, max(values) * 1.15

    def x(count: float) -> float:
        return LEFT + (log(count) - log(x_low)) / (log(x_high) - log(x_low)) * (width - LEFT - RIGHT)

    def y(value: float) -> float:
        share = (log(value) - log(y_low)) / (log(y_high) - log(y_low))
        return top + height - BOTTOM - share * (height - TOP - BOTTOM)

    figure.text(LEFT, top + 20, panel.title, size=14)
    for value in round_values(y_low, y_high):
        figure.line([(LEFT, y(value)), (width - RIGHT, y(value))], "line")
        figure.text(LEFT - 8, y(value) + 4, _short(panel, value, scaling), role="muted", anchor="end")
    end = -1e9
    for count in counts:
        label = big(count) if count >= 10_000 else str(count)
        if x(count) - 4 * len(label) > end:
            figure.text(x(count), top + height - BOTTOM + 18, label, role="muted", anchor="middle")
            end = x(count) + 4 * len(label)
        figure.line([(x(count), top + height - BOTTOM), (x(count), top + height - BOTTOM + 4)], "muted")
    figure.line([(LEFT, top + height - BOTTOM), (width - RIGHT, top + height - BOTTOM)], "muted")
    figure.text((LEFT + width - RIGHT) / 2, top + height - 6, "devices", role="muted", anchor="middle")
    if panel.limit:
        figure.line([(LEFT, y(panel.limit)), (width - RIGHT, y(panel.limit))], "bad", width=1.5, dashed=True)
        figure.text(width - RIGHT, y(panel.limit) - 5, panel.limit_name, role="bad", anchor="end")
    curves = list(dict.fromkeys(point.curve for point in scaling.points))
    for i, curve in enumerate(curves):
        rows = [row for row in panel.rows if row[0].curve == curve]
        if rows:
            _curve(figure, rows, COLOURS[i % len(COLOURS)], x, y, scaling)
    _names(figure, curves, width, top)


def _names(figure: Drawing, curves: list[str], width: float, top: float) -> None:
    """Which colour is which, where there are several."""
    at = LEFT
    for i, curve in enumerate(curves if len(curves) > 1 else ()):
        if at + 7 * len(curve) + 20 > width:
            break
        figure.dot(at + 4, top + 33, COLOURS[i % len(COLOURS)], radius=4)
        figure.text(at + 12, top + 37, curve, role="muted", size=11)
        at += 6.2 * len(curve) + 30


def _curve(figure: Drawing, rows: list, colour: str, x, y, scaling: Scaling) -> None:
    """A line through the values with its band, or a bar where there is one value; what is chosen has a ring."""
    ats = [x(row[0].cluster.num_devices) for row in rows]
    if len(rows) > 1:
        above = [(a, y(row[3])) for a, row in zip(ats, rows)]
        below = [(a, y(row[1])) for a, row in zip(ats, rows)]
        figure.area([*above, *below[::-1]], colour)
        figure.line([(a, y(row[2])) for a, row in zip(ats, rows)], colour, width=2)
    for a, (point, low, value, high) in zip(ats, rows):
        if len(rows) == 1:
            figure.line([(a, y(low)), (a, y(high))], colour, width=3, opacity=0.5)
        if any(point is chosen for chosen in (scaling.cheapest, scaling.fastest, scaling.nearest)):
            figure.dot(a, y(value), colour, radius=8, hollow=True)
        figure.dot(a, y(value), colour, title=said(point))


def said(point: Point) -> str:
    """A point in one line."""
    run = point.run
    spent = f"{big(run.device_hours)} device-hours" if run.usd is None else usd(run.usd)
    return f"{point.text}: {run.days:.3g} days, {spent}, {point.prediction.plan.text()}"


def _short(panel: Panel, value: float, scaling: Scaling) -> str:
    return f"${big(value)}" if panel.name == "cost" and scaling.in_dollars else big(value)
