"""The report's colours, light and dark, and what they are held to.

Text has at least 4.5:1 contrast on what it stands on and marks at least 3:1 (WCAG 2.2, 1.4.3 and 1.4.11). Marks
are never told apart by colour alone: every one has a label, a row of its own or an entry in a table.
"""

from __future__ import annotations

from meshwright.causes import BY_NAME

THEMES: dict[str, dict[str, str]] = {
    "light": {
        "page": "#f6f7f9",
        "surface": "#ffffff",
        "raised": "#eef1f5",
        "lane": "#f3f5f8",
        "line": "#dfe4ea",
        "ink": "#14181f",
        "muted": "#566072",
        "accent": "#1d5fb8",
        "good": "#1b7a3d",
        "bad": "#b3261e",
        "warn": "#8a5a00",
    },
    "dark": {
        "page": "#0d1015",
        "surface": "#14181f",
        "raised": "#1e242d",
        "lane": "#191e26",
        "line": "#2c343f",
        "ink": "#e8ebf0",
        "muted": "#9ba6b5",
        "accent": "#7db4f5",
        "good": "#5fd08a",
        "bad": "#ff8f86",
        "warn": "#e7b95a",
    },
}
MARKS: dict[str, dict[str, str]] = {
    "light": {
        "blue": "#2f69b8",
        "sky": "#4a8fd0",
        "teal": "#0b7a75",
        "green": "#5a8f29",
        "ochre": "#ac8600",
        "orange": "#cf6a1a",
        "red": "#b8342c",
        "rose": "#c25b9b",
        "purple": "#6f4fb3",
        "grey": "#7a8594",
    },
    "dark": {
        "blue": "#5a96e6",
        "sky": "#a3cdf7",
        "teal": "#35b3a8",
        "green": "#9ccf63",
        "ochre": "#e6c34a",
        "orange": "#f0974f",
        "red": "#e8695e",
        "rose": "#f0a1cd",
        "purple": "#a78ae8",
        "grey": "#8793a3",
    },
}
KINDS: dict[str, str] = {
    "F": "blue",
    "B": "teal",
    "BW": "teal",
    "W": "ochre",
    "recompute": "green",
    "optimizer": "purple",
    "op": "sky",
}
QUEUES: dict[str, str] = {
    "tp": "orange",
    "cp": "rose",
    "ep": "ochre",
    "dp": "red",
    "dp_gather": "red",
    "pp_forward": "rose",
    "link_forward": "rose",
    "link_backward": "rose",
    "pp_backward": "rose",
    "copy": "grey",
    "host": "grey",
    "outer": "red",
    "h2d": "green",
    "d2h": "green",
    "nvme": "ochre",
}
#: Colours of the memory categories, in the order in which they are stacked: of all orders the one whose neighbours
#: differ most for the eye that sees least of it.
STACK = ("blue", "ochre", "sky", "green", "teal", "purple", "red", "rose", "orange", "grey")


def cause_colour(name: str) -> str:
    """The mark of a cause of the step, grey for one that has none."""
    return BY_NAME[name].colour if name in BY_NAME else "grey"


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` in [0, 1] (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on `colour`; always at least 4.5:1."""
    return max("#ffffff", "#000000", key=lambda ink: contrast(colour, ink))


def css(theme: str) -> str:
    """The theme as CSS custom properties: ``--ink``, and ``--mark-blue`` with ``--on-blue`` for text on it."""
    marks = MARKS[theme]
    lines = [f"--{name}: {colour};" for name, colour in THEMES[theme].items()]
    lines += [f"--mark-{name}: {colour}; --on-{name}: {ink_on(colour)};" for name, colour in marks.items()]
    return " ".join(lines)
