"""Levels that the words of a cluster make: the standard node and network of a device or machine, changed as words say.

:mod:`meshwright.spec.cluster_words` reads the words; here they are built in, or it is said what of them a device does
not have. Speeds are catalog data (:mod:`meshwright.spec.links`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from meshwright.errors import Diagnostic
from meshwright.spec import wired_words as wired
from meshwright.spec.cluster_words import DELAY, Words, bad
from meshwright.spec.hardware import Level, Node, source_of
from meshwright.spec.links import by_word, networks

#: How far above a port's rate a number or a NIC may lie: datasheets round.
ROUNDED = 1.05


class Standard(msgspec.Struct, frozen=True):
    """Standard node that words change, the levels around it, and whose they are. ``like`` are the node and the levels
    of a machine of the catalog that has the network a word names."""

    name: str
    scale_up: str
    node: Node
    levels: tuple[Level, ...]
    like: tuple[str, Node, tuple[Level, ...]] | None = None


def on(words: Words, standard: Standard, per_node: int, place: str) -> tuple[Node, tuple[Level, ...], list[Diagnostic]]:
    """The node and levels that words make of a device's or machine's own, for nodes of `per_node` devices (`standard`'s
    node is already cut to them), and everything that the device does not have."""
    inner, pcie_gb_s, wrong = _inside(words, standard, place)
    node, outer = standard.node, tuple(level for level in standard.levels if level.scale_out)
    if pcie_gb_s is not None:
        sources = {**node.sources, "pcie_gb_s": by_word()[words.inside].source("gb_s")}
        node = msgspec.structs.replace(node, pcie_gb_s=pcie_gb_s, sources=sources)
    if words.link is not None or words.nics is not None:
        wrong += _no_network(words, standard, node, place)
        node, outer = _between(words, standard, node, per_node)
    if words.wired.kind:
        outer = wired.joined(words.wired, node, outer)
    outer = tuple(delayed(level, words.delay_s or 0.0) for level in outer)
    levels = (*inner, *outer)
    if words.shared:
        levels = tuple(msgspec.structs.replace(level, shared_ports=True) for level in levels)
    return words.tiers.on(node), levels, wrong


def _inside(words: Words, standard: Standard, place: str) -> tuple[tuple[Level, ...], float | None, list[Diagnostic]]:
    """The levels inside a scale-up domain, the host link's rate where a word says it, and what the device lacks."""
    levels = tuple(level for level in standard.levels if not level.scale_out)
    word = words.inside or ("nvlink" if words.nvlink_gb_s is not None else "")
    has_nvlink = [level for level in levels if level.name.startswith("nvlink")]
    if not word:
        return levels, None, []
    if word in ("nvlink", "nvswitch"):
        if not has_nvlink or (word == "nvswitch" and has_nvlink[0].name != "nvlink"):
            what = "has no NVLink" if not has_nvlink else "has NVLink bridges between two cards, no NVSwitch"
            help = f"drop {word}" if not has_nvlink else "say nvlink"
            generation = _generation(standard.node.pcie_gb_s)
            return levels, None, [bad("C013", f"{standard.name} {what}", place, f"{help}, or say {generation}")]
        return _nvlink(words, word, levels, has_nvlink[0], standard, place)
    link = by_word().get(word)
    if link is None:  # nonvlink, pcie: as fast as the device's own
        link = by_word()[_generation(standard.node.pcie_gb_s)]
    if link.gb_s > ROUNDED * standard.node.pcie_gb_s:
        message = f"{standard.name} is on PCIe of {standard.node.pcie_gb_s:g} GB/s, {link.name} is {link.gb_s:g}"
        return levels, None, [bad("C013", message, place, f"say {_generation(standard.node.pcie_gb_s)}")]
    said = f"said: {word}; {link.source('gb_s')}"
    sources = {"gb_s": said, "latency_us": link.source("latency_us"), "*": said}
    level = Level(name="pcie", arity=standard.node.devices, gb_s=link.gb_s, latency_us=link.latency_us,
                  topology=link.topology, sources=sources)  # fmt: skip
    return (level,), link.gb_s if words.inside in by_word() else None, []


def _generation(gb_s: float) -> str:
    """The fastest generation of PCI Express that a rate is enough for."""
    rates = {link.name: link.gb_s for link in by_word().values() if link.kind == "pcie"}
    return max((name for name, rate in rates.items() if rate <= ROUNDED * gb_s), key=rates.__getitem__, default="pcie3")


def _nvlink(
    words: Words, word: str, levels: tuple[Level, ...], level: Level, standard: Standard, place: str
) -> tuple[tuple[Level, ...], None, list[Diagnostic]]:
    """The levels with NVLink of the rate that was said, or switched."""
    changed, wrong = level, []
    if words.nvlink_gb_s is not None:
        own = 2 * level.gb_s
        if words.nvlink_gb_s > ROUNDED * own:
            message = f"nvlink={words.nvlink_gb_s:g} is more than {standard.name} has: {own:g} GB/s, both directions"
            wrong.append(bad("C013", message, place, f"nvlink={own:g} or less, or another device"))
        said = f"said: nvlink={words.nvlink_gb_s:g} GB/s of one device, both directions together"
        changed = msgspec.structs.replace(changed, gb_s=words.nvlink_gb_s / 2, sources={**level.sources, "gb_s": said})
    if word == "nvswitch":
        changed = msgspec.structs.replace(changed, topology="switch")
    return tuple(changed if one is level else one for one in levels), None, wrong


def _no_network(words: Words, standard: Standard, node: Node, place: str) -> Iterator[Diagnostic]:
    """List why a network is impossible: chips joined without NICs, ports faster than the slot they sit in."""
    link, said = words.link, words.nic or f"nics={words.nics}"
    if standard.scale_up == "ici":
        yield bad("C013", f"{standard.name} is joined by its own links (ICI), not by NICs", place, f"drop {said}")
    elif words.nics == 0:
        yield bad("C013", "nics=0: a node without a port reaches no other", place, "nics=1 or more, or leave it out")
    elif link is not None and standard.like is None and link.port_gb_s > ROUNDED * node.pcie_gb_s:
        slower = [one for one in networks() if one.kind == link.kind and one.port_gb_s <= ROUNDED * node.pcie_gb_s]
        alike = [one for one in slower if _letters(one.name) == _letters(link.name)]
        best = max(alike or slower, key=lambda one: one.port_gb_s)
        message = f"a port of {link.name} carries {link.port_gb_s:g} GB/s, a slot of this node {node.pcie_gb_s:g}"
        yield bad("C013", message, place, f"at most {best.name} on {standard.name}'s PCIe")


def delayed(level: Level, delay_s: float) -> Level:
    """A network whose packets take so much longer."""
    if not delay_s:
        return level
    said = f"said: {DELAY}={delay_s * 1e3:g}ms, over {level.latency_us:g} us: {source_of(level, 'latency_us')}"
    latency_us = level.latency_us + delay_s * 1e6
    return msgspec.structs.replace(level, latency_us=latency_us, sources={**level.sources, "latency_us": said})


def _letters(name: str) -> str:
    return re.sub(r"[^a-z_]", "", name)


def _between(words: Words, standard: Standard, node: Node, per_node: int) -> tuple[Node, tuple[Level, ...]]:
    """The node's NICs as said, and the one flat network they make; only the NICs where no network is named."""
    link = words.link
    sources = {**node.sources}
    if link is not None and standard.like is not None:
        name, like, levels = standard.like
        nics = words.nics if words.nics is not None else max(1, round(like.nics * per_node / like.devices))
        sources |= {"nics": f"said: {words.nic}, as {name} has it", "nic_gbit_s": like.sources.get("*", "")}
        node = msgspec.structs.replace(node, nics=nics, nic_gbit_s=like.nic_gbit_s, sources=sources)
        return node, tuple(level for level in levels if level.scale_out)
    if words.nics is not None:
        nics, why = words.nics, f"said: nics={words.nics}"
    elif link.per == "node":
        nics, why = 1, f"assumed: one port a node, as {link.name} is usually had; say nics="
    else:
        nics, why = max(1, node.nics), f"assumed: as many as {standard.name}'s standard node has; say nics="
    sources["nics"] = why
    if link is None:
        node = msgspec.structs.replace(node, nics=nics, sources=sources)
        return node, tuple(level for level in standard.levels if level.scale_out)
    sources["nic_gbit_s"] = f"said: {words.nic}; {link.source('gbit_s')}"
    # sockets go through the host's memory, whatever devices reach of a port past it
    direct = node.direct_gb_s if link.kind == "rdma" else 0.0
    node = msgspec.structs.replace(node, nics=nics, nic_gbit_s=link.gbit_s, direct_gb_s=direct, sources=sources)
    flat = "; assumed: a network that carries all ports at once"
    level = Level(
        name=link.name,
        arity=0,
        gb_s=nics * link.port_gb_s,
        latency_us=link.latency_us,
        topology=link.topology,
        scale_out=True,
        sources={
            "gb_s": f"{why}; {link.title}, {link.source('gbit_s')}{flat}",
            "latency_us": link.source("latency_us"),
            "*": f"said: {words.nic}{flat}",
        },
    )
    return node, (level,)
