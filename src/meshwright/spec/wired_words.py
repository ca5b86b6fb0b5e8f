"""Words of a cluster's short name for the switches between its nodes: ``rail-only,radix=128``, ``fat-tree,taper=2``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from meshwright.errors import nearest
from meshwright.spec.hardware import Level, Node
from meshwright.spec.wiring import KINDS, MOST_RADIX, ROUTINGS, Wiring, usual_radix

#: Words without a value, and the field and value that each means.
PLAIN: dict[str, tuple[str, object]] = {**{kind: ("kind", kind) for kind in KINDS}, "sharp": ("sharp", True)}
KEYS = ("radix", "taper", "routing", "qps")
FIELDS = ("kind", "radix", "taper", "routing", "connections", "sharp")
WAYS = tuple(dict.fromkeys(way for ways in ROUTINGS.values() for way in ways))


class SwitchWords(msgspec.Struct, frozen=True, kw_only=True):
    """Words about a network's switches, None or "" where nothing is said: the fields of
    :class:`meshwright.spec.wiring.Wiring`."""

    kind: str = ""
    radix: int | None = None
    taper: float | None = None
    routing: str = ""
    connections: int | None = None
    sharp: bool | None = None

    def words(self) -> list[str]:
        """The words, as a short name has them."""
        said = [self.kind] if self.kind else []
        said += [f"radix={self.radix}"] if self.radix is not None else []
        said += [f"taper={self.taper:g}"] if self.taper is not None else []
        said += [f"routing={self.routing}"] if self.routing else []
        said += [f"qps={self.connections}"] if self.connections is not None else []
        return [*said, "sharp"] if self.sharp else said


def meaning(key: str, value: str) -> tuple[str, object, str]:
    """(field, value, "") of a word with a value, or ("", what is wrong with it, help)."""
    if key == "routing":
        return (key, value, "") if value in WAYS else ("", "is no way to route flows", nearest(value, WAYS) or WAYS[0])
    if key == "taper":
        if re.fullmatch(r"\d{1,4}(\.\d{1,4})?", value):
            return key, float(value), ""
        return "", "is not a number: links down over links up of a leaf switch", "taper=2"
    if re.fullmatch(r"\d{1,6}", value):
        return ("connections" if key == "qps" else key), int(value), ""
    example = "qps=4" if key == "qps" else "radix=64"
    return "", f"is not a whole number up to {MOST_RADIX:,}", example


def alone(said: SwitchWords) -> Iterator[tuple[str, str]]:
    """Words that say nothing without a kind of network: message and help."""
    if not said.kind and said != SwitchWords():
        words = ", ".join(said.words())
        yield f"{words}: of what network is not said", f"one of {', '.join(KINDS)}, such as fat-tree,{said.words()[0]}"


def joined(said: SwitchWords, node: Node, levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """The levels between nodes as one, of the switches that are said: as fast as a node's ports, without a limit."""
    if not levels:
        return levels
    first = levels[0]
    given = {field: value for field in FIELDS if (value := getattr(said, field)) is not None and value != ""}
    wiring = Wiring(**{"radix": usual_radix(node.nic_gbit_s), "routing": ROUTINGS[said.kind][0], **given})
    level = msgspec.structs.replace(
        first,
        arity=0,
        topology="dragonfly" if said.kind == "dragonfly" else "fat_tree",
        oversubscription=1.0,
        shape=(),
        wiring=wiring,
        sources={**first.sources, "wiring": "said: " + ",".join(said.words())},
    )
    return (level,)
