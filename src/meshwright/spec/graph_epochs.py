"""The workload of a graph network: how often the whole graph is passed, and how a cut of it leaves vertices apart.

``epochs=100,copies=2.3,skew=1.2`` passes it a hundred times; where its vertices are divided, each one's
numbers are needed on 2.3 other devices in the mean, and the busiest device has 1.2 times the mean of edges.
``cut=edges.npz`` counts both in a file whose vertices are numbered part by part, as partitioners order them; without
either the cut is one at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.words import SaidWords


class GraphEpochs(msgspec.Struct, frozen=True, kw_only=True):
    """``epochs`` over the whole graph. ``copies``: other devices that need a vertex, in the mean, where they divide
    vertices; below 0: as the edges of the file ``cut`` say, or a random cut. ``skew``: edges of the device that has
    most of them, over the mean; 0: as the file says, or as many on all."""

    epochs: int = 1
    copies: float = -1.0
    skew: float = 0.0
    cut: str = ""

    def text(self) -> str:
        """Return the form that :func:`parse_graph_epochs` reads back."""
        words = [f"epochs={self.epochs}"]
        words += [f"copies={self.copies:g}"] if self.copies >= 0 else []
        words += [f"skew={self.skew:g}"] if self.skew else []
        return ",".join(words + ([f"cut={self.cut}"] if self.cut else []))


def _whole(text: str) -> int | None:
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    return value or None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= 1e6 else None


#: Word -> what reads its value, and what that is.
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "epochs": (_whole, "how often the whole graph is passed, from 1"),
    "copies": (_number, "other devices that need a vertex, in the mean"),
    "skew": (lambda text: value if (value := _number(text)) and value >= 1 else None, "edges over the mean, from 1"),
    "cut": (lambda text: text or None, "a file of edges whose vertices are numbered part by part"),
}


def parse_graph_epochs(text: str, *, place: str = "--train") -> GraphEpochs:
    """Return what a text such as ``epochs=100,copies=2.3`` says.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W005 contradiction; all at once.
    """
    alien = dict.fromkeys(("seq", "batch"), "a whole graph is passed at a time, without batches of sequences")
    said = SaidWords(text, READERS, place=place, of="epochs over a whole graph", alien=alien, cased=frozenset({"cut"}))
    if "cut" in said.values and {"copies", "skew"} & said.values.keys():
        said.refuse("W005", "cut= counts what copies= and skew= say", "keep one of them")
    if said.wrong:
        raise MeshwrightError(said.wrong)
    return GraphEpochs(**said.values)
