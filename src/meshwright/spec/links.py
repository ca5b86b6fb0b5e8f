"""Links by the words people use for them: ``25gbe``, ``roce200``, ``hdr``, ``efa``, ``pcie4``, as catalog data.

A link says what one port carries and how long one hop takes. Between nodes it is a network (``tcp``: Ethernet under the
kernel's sockets; ``rdma``: NICs that read and write device memory), inside a node PCI Express and NVLink.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from meshwright import catalog
from meshwright.spec.hardware import Topology, sourced
from meshwright.spec.rate_words import rate_bits_s

#: Bits/s of a port that a word may say (``100mbit``): from a modem's to more than any port's.
RATES_BITS_S = (1e4, 1e13)
#: The link whose sockets a rate that is said has.
SOCKETS = "1gbe"
#: Kinds of links inside a node.
INSIDE = ("pcie", "nvlink")


class LinkKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of link.

    Attributes:
        name: the word itself, also the name of the level it makes.
        gb_s: of one port, per direction, in 1e9 bytes/s; networks are given in ``gbit_s`` (1e9 bits/s) instead.
        latency_us: one hop, one way.
        per: NICs of a node where nobody says: one for the ``node``, or those of the ``device``'s standard node.
        machines: machines of the catalog that have this network; their NICs are taken where the device is theirs.
    """

    name: str
    title: str
    kind: Literal["tcp", "rdma", "pcie", "nvlink"]
    latency_us: float
    topology: Topology
    sources: dict[str, str]
    gbit_s: float = 0.0
    gb_s: float = 0.0
    per: Literal["node", "device"] = "node"
    machines: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def port_gb_s(self) -> float:
        """The bandwidth of one port, per direction, in 1e9 bytes/s."""
        return self.gb_s or self.gbit_s / 8

    def source(self, field: str) -> str:
        """Return the source of a number."""
        return sourced(self.sources, field)


@cache
def links() -> dict[str, LinkKind]:
    """Every link of the catalog by its name, those inside nodes last."""
    found = [msgspec.convert({"name": name, **row}, LinkKind) for name, row in catalog.tables("links").items()]
    return {link.name: link for link in sorted(found, key=lambda link: (link.kind in INSIDE, _family(link.name)))}


def _family(name: str) -> tuple[str, int]:
    """Letters, then the number: 100gbe comes after 25gbe."""
    digits = "".join(c for c in name if c.isdigit())
    return name.replace(digits, ""), int(digits or 0)


@cache
def by_word() -> dict[str, LinkKind]:
    """Every word for a link, in small letters; how many NVLinks a device has is its own, so they have none."""
    found = (link for link in links().values() if link.kind != "nvlink")
    return {word: link for link in found for word in (link.name, *link.aliases)}


def named(word: str) -> LinkKind | None:
    """The link of a word: one of the catalog, or sockets over a link of a rate that is said, such as ``100mbit``."""
    known = by_word().get(word)
    bits = rate_bits_s(word) if known is None else None
    if bits is None or not RATES_BITS_S[0] <= bits <= RATES_BITS_S[1]:
        return known
    usual = links()[SOCKETS]
    sources = {**usual.sources, "gbit_s": f"said: {word}"}
    title = f"a link of {bits / 1e6:g} Mbit/s, TCP sockets"
    return msgspec.structs.replace(usual, name=word, title=title, gbit_s=bits / 1e9, sources=sources, aliases=())


def networks() -> tuple[LinkKind, ...]:
    """The links between nodes."""
    return tuple(link for link in links().values() if link.kind not in INSIDE)
