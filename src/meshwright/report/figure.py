"""A drawing of lines, areas, dots and words, written as SVG or PNG from the same shapes.

Colours are roles of the palette. Inside a page they are the page's own (CSS custom properties, so that light and dark
follow it); a file of its own has one theme. PNG is drawn with Pillow, which brings its font along, so that a picture is
the same on every machine.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path

import msgspec
from markupsafe import Markup

from meshwright.errors import MeshwrightError
from meshwright.report import palette

Points = Sequence[tuple[float, float]]
#: Pixels of a PNG for each unit of the drawing, and how many of them are drawn for one, which smooths edges.
SCALE, SMOOTH = 2, 2
ANCHORS = {"start": "l", "middle": "m", "end": "r"}


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """``kind`` line, area, dot or text; ``at`` its points; ``role`` its colour; ``size`` a width, a radius or that of
    the letters; ``title`` what a pointer over it shows, or the text itself."""

    kind: str
    at: tuple[tuple[float, float], ...]
    role: str
    size: float = 1.0
    dashed: bool = False
    hollow: bool = False
    opacity: float = 1.0
    title: str = ""
    anchor: str = "start"


class Drawing:
    """Shapes on a plane of `width` by `height` units, the origin at the upper left. `label` is the picture in words."""

    def __init__(self, width: float, height: float, label: str):
        self.width, self.height, self.label = width, height, label
        self.shapes: list[Mark] = []

    def line(
        self, points: Points, role: str, *, width: float = 1.0, dashed: bool = False, opacity: float = 1.0
    ) -> None:
        self.shapes.append(Mark(kind="line", at=tuple(points), role=role, size=width, dashed=dashed, opacity=opacity))

    def area(self, points: Points, role: str, *, opacity: float = 0.18) -> None:
        self.shapes.append(Mark(kind="area", at=tuple(points), role=role, opacity=opacity))

    def dot(self, x: float, y: float, role: str, *, radius: float = 4.0, hollow: bool = False, title: str = "") -> None:
        self.shapes.append(Mark(kind="dot", at=((x, y),), role=role, size=radius, hollow=hollow, title=title))

    def text(
        self, x: float, y: float, text: str, *, role: str = "ink", anchor: str = "start", size: float = 12.0
    ) -> None:
        self.shapes.append(Mark(kind="text", at=((x, y),), role=role, size=size, title=text, anchor=anchor))

    def svg(self, theme: str = "") -> Markup:
        """The drawing as an ``<svg>`` element: in the colours of a theme, else in those of the page around it."""
        inside = Markup("\n").join(_svg(shape, theme) for shape in self.shapes)
        ground = Markup('<rect width="100%" height="100%" fill="{}"/>\n').format(_colour("surface", theme))
        return Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:g} {h:g}" role="img" aria-label="{label}" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, sans-serif">\n'
            "{ground}{inside}\n</svg>"
        ).format(w=self.width, h=self.height, label=self.label, ground=ground if theme else "", inside=inside)

    def png(self, theme: str = "light") -> bytes:
        """The drawing as a PNG, two pixels for each unit.

        Raises:
            MeshwrightError: L003 when Pillow is not installed.
        """
        try:
            from PIL import Image, ImageDraw
        except ImportError:
            help = 'pip install "meshwright[plot]"; .svg needs nothing'
            raise MeshwrightError.one("L003", "a .png needs Pillow, not installed here", help=help) from None
        whole = SCALE * SMOOTH
        size = ceil(self.width * whole), ceil(self.height * whole)
        image = Image.new("RGB", size, _colour("surface", theme))
        for shape in self.shapes:
            over = Image.new("RGBA", size, (0, 0, 0, 0)) if shape.opacity < 1 else None
            draw = ImageDraw.Draw(over if over is not None else image)
            _draw(draw, shape, _colour(shape.role, theme), _colour("surface", theme), whole)
            if over is not None:
                over.putalpha(over.getchannel("A").point(lambda a, o=shape.opacity: int(a * o)))
                image.paste(over, (0, 0), over)
        out = io.BytesIO()
        image.resize((size[0] // SMOOTH, size[1] // SMOOTH), Image.Resampling.LANCZOS).save(out, "PNG")
        return out.getvalue()

    def write(self, path: str | Path, theme: str = "light") -> None:
        """Write the drawing whole or not at all, in the format of the file's ending: .svg or .png.

        Raises:
            MeshwrightError: X104 when it cannot be written, L003 when a .png cannot be drawn here.
        """
        from meshwright.atomic import write_bytes

        png = Path(path).suffix.lower() == ".png"
        write_bytes(path, self.png(theme) if png else f"{self.svg(theme)}\n".encode())


def _colour(role: str, theme: str) -> str:
    if theme:
        return (palette.THEMES[theme] | palette.MARKS[theme])[role]
    return f"var(--{'mark-' if role in palette.MARKS['light'] else ''}{role})"


def _svg(shape: Mark, theme: str) -> Markup:
    colour, (x, y) = _colour(shape.role, theme), shape.at[0]
    if shape.kind == "text":
        form = '<text x="{:.1f}" y="{:.1f}" fill="{}" font-size="{:g}" text-anchor="{}">{}</text>'
        return Markup(form).format(x, y, colour, shape.size, shape.anchor, shape.title)
    if shape.kind == "dot":
        title = Markup("<title>{}</title>").format(shape.title) if shape.title else ""
        fill, ring = (_colour("surface", theme), colour) if shape.hollow else (colour, "none")
        form = '<circle cx="{:.1f}" cy="{:.1f}" r="{:g}" fill="{}" stroke="{}" stroke-width="2">{}</circle>'
        return Markup(form).format(x, y, shape.size, fill, ring, title)
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in shape.at)
    if shape.kind == "area":
        return Markup('<path d="{}Z" fill="{}" opacity="{:g}"/>').format(path, colour, shape.opacity)
    dashes = Markup(' stroke-dasharray="6 4"') if shape.dashed else ""
    form = '<path d="{}" fill="none" stroke="{}" stroke-width="{:g}" stroke-linejoin="round" opacity="{:g}"{}/>'
    return Markup(form).format(path, colour, shape.size, shape.opacity, dashes)


def _draw(draw, shape: Mark, colour: str, ground: str, whole: int) -> None:
    """One shape on a Pillow drawing of `whole` pixels a unit."""
    from PIL import ImageFont

    at = [(x * whole, y * whole) for x, y in shape.at]
    if shape.kind == "text":
        font = ImageFont.load_default(size=shape.size * whole)
        draw.text(at[0], shape.title, fill=colour, font=font, anchor=ANCHORS[shape.anchor] + "s")
    elif shape.kind == "dot":
        (x, y), r = at[0], shape.size * whole
        fill, ring = (ground, colour) if shape.hollow else (colour, None)
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill, outline=ring, width=2 * whole)
    elif shape.kind == "area":
        draw.polygon(at, fill=colour)
    else:
        for start, end in pairwise(at):
            for piece in _dashes(start, end, whole) if shape.dashed else [(start, end)]:
                draw.line(piece, fill=colour, width=round(shape.size * whole))


def _dashes(start: tuple[float, float], end: tuple[float, float], whole: int) -> list[tuple]:
    """The dashes of a line, six units long and four apart."""
    (x, y), (dx, dy) = start, (end[0] - start[0], end[1] - start[1])
    length = (dx * dx + dy * dy) ** 0.5
    if not length:
        return []
    cuts = [k * 10 * whole for k in range(int(length / (10 * whole)) + 1)]
    ends = [(c, min(c + 6 * whole, length)) for c in cuts]
    return [((x + dx * a / length, y + dy * a / length), (x + dx * b / length, y + dy * b / length)) for a, b in ends]


#: Steps of a logarithmic axis within a power of ten, the finest first.
STEPS = (
    (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 2.0, 5.0),
    (1.0, 3.0),
)


def round_values(low: float, high: float, most: int = 7) -> list[float]:
    """Round values from `low` to `high` of a logarithmic axis, as fine as `most` of them allow."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for steps in (*STEPS, (1.0,)):
        found = [k * 10.0**d for d in powers for k in steps if low * (1 - 1e-9) <= k * 10.0**d <= high * (1 + 1e-9)]
        if len(found) <= most:
            return found
    return found[:: ceil(len(found) / most)]
