"""Line plots: curves over one quantity, on axes that are linear or logarithmic, with bounds across or along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log, log10

import msgspec

from meshwright.report.figure import Drawing, round_values

WIDTH, HEIGHT = 460.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 18.0, 56.0, 42.0


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """An axis from `low` to `high`, with the text of its values and its title."""

    low: float
    high: float
    title: str
    text: Callable[[float], str]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one; what is beyond lies at the end."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            return (log(value) - log(self.low)) / (log(self.high) - log(self.low))
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Round values, at most seven."""
        if self.logarithmic:
            return round_values(self.low, self.high, 6)
        power = 10.0 ** floor(log10((self.high - self.low) / 6))
        step = next(k * power for k in (1.0, 2.0, 2.5, 5.0, 10.0) if (self.high - self.low) / (k * power) <= 6)
        return [k * step for k in range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)]


class PlotLine(msgspec.Struct, frozen=True, kw_only=True):
    """A named curve through points; ``dots``: each is marked, with its text in ``titles`` if there are any;
    ``stepped``: it keeps a value until the next point. ``joined``: without that it is a cloud of dots."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    stepped: bool = False
    dashed: bool = False
    joined: bool = True
    titles: Sequence[str] = ()
    radius: float = 3.0


def spanned(values: Sequence[float], title: str, text: Callable[[float], str], logarithmic: bool = False) -> Scale:
    """Return an axis that holds all values: from zero, or of a logarithmic one from the least."""
    high = max(values, default=1.0) or 1.0
    if not logarithmic:
        return Scale(low=0.0, high=1.06 * high, title=title, text=text)
    positive = [v for v in values if v > 0] or [high]
    low = min(positive)
    return Scale(low=low / 1.15, high=max(high, low * 1.5) * 1.15, title=title, text=text, logarithmic=True)


def line_plot(
    label: str,
    title: str,
    x: Scale,
    y: Scale,
    lines: Sequence[PlotLine],
    *,
    across: Sequence[tuple[float, str]] = (),
    along: Sequence[tuple[float, str]] = (),
    named_above: bool = False,
) -> Drawing:
    """Return the plot; `across` are bounds of y and `along` bounds of x, each with its name, which stands at the upper
    end where `named_above`. `label` is the plot in words."""
    drawing = Drawing(WIDTH, HEIGHT, label)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def at(a: float, b: float) -> tuple[float, float]:
        return LEFT + x.share(a) * (right - LEFT), bottom - y.share(b) * (bottom - TOP)

    drawing.text(LEFT, 20, title, size=14)
    for value in y.ticks:
        height = at(x.low, value)[1]
        drawing.line([(LEFT, height), (right, height)], "line")
        drawing.text(LEFT - 8, height + 4, y.text(value), role="muted", anchor="end")
    end = -1e9
    for value in x.ticks:
        place, words = at(value, y.low)[0], x.text(value)
        drawing.line([(place, bottom), (place, bottom + 4)], "muted")
        if place - 3.5 * len(words) > end:
            drawing.text(place, bottom + 18, words, role="muted", anchor="middle")
            end = place + 3.5 * len(words)
    drawing.line([(LEFT, bottom), (right, bottom)], "muted")
    drawing.text((LEFT + right) / 2, HEIGHT - 7, x.title, role="muted", anchor="middle")
    for line in lines:
        _curve(drawing, line, at)
    for value, name in across:
        height = at(x.low, value)[1]
        drawing.line([(LEFT, height), (right, height)], "bad", width=1.5, dashed=True)
        drawing.text(right, height - 5, name, role="bad", anchor="end", size=11)
    for value, name in along:
        place = at(value, y.low)[0]
        drawing.line([(place, TOP), (place, bottom)], "bad", width=1.5, dashed=True)
        before = place > (LEFT + right) / 2
        side, height = ("end", -6) if before else ("start", 6), TOP + 8 if named_above else bottom - 8
        drawing.text(place + side[1], height, name, role="bad", anchor=side[0], size=11)
    _names(drawing, [line for line in lines if line.name])
    return drawing


def _curve(drawing: Drawing, line: PlotLine, at: Callable[[float, float], tuple[float, float]]) -> None:
    points = [at(a, b) for a, b in line.points]
    if line.stepped:
        points = [p for i, (a, b) in enumerate(points) for p in (((a, points[i - 1][1]),) if i else ()) + ((a, b),)]
    if len(points) > 1 and line.joined:
        drawing.line(points, line.colour, width=2, dashed=line.dashed)
    if line.dots or len(points) == 1 or not line.joined:
        titles = line.titles or [f"{line.name}: {b:.4g} at {a:.4g}" for a, b in line.points]
        for place, title in zip(points, titles):
            drawing.dot(*place, line.colour, radius=line.radius, title=title)


def _names(drawing: Drawing, lines: Sequence[PlotLine]) -> None:
    """Which colour is which, in a row below the title, or two."""
    place, row = LEFT, 38.0
    for line in lines:
        width = 6.2 * len(line.name) + 30
        if place > LEFT and place + width > WIDTH:
            place, row = LEFT, row + 15
        if line.joined:
            drawing.line([(place, row - 4), (place + 12, row - 4)], line.colour, width=3, dashed=line.dashed)
        else:
            drawing.dot(place + 6, row - 4, line.colour, radius=4)
        drawing.text(place + 17, row, line.name, role="muted", size=11)
        place += width
