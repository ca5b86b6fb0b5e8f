"""A machine's network ports, processors, memory and drives as ibstat, ``/sys`` and ``/proc`` describe them."""

from __future__ import annotations

import re

import msgspec

_PORT = re.compile(r"\s*Port (\d+):")


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One network port that is up: ``kind`` is ``infiniband``, ``roce`` or ``ethernet``; rate of one direction."""

    name: str
    kind: str
    gbit_s: float


def ibstat_ports(text: str) -> tuple[Port, ...]:
    """The active ports of ``ibstat``; those of a card on Ethernet are RoCE."""
    found, card, port = [], "", {}
    for line in [*text.splitlines(), "CA ''"]:
        begins = re.match(r"CA '(.*)'", line.strip())
        if begins or _PORT.fullmatch(line.rstrip()):
            found += _active(card, port)
            card, port = (begins[1], {}) if begins else (card, {"": ""})
        elif port:
            key, _, value = line.strip().partition(":")
            port[key.lower()] = value.strip()
    return tuple(found)


def _active(card: str, port: dict[str, str]) -> list[Port]:
    return sysfs_port(card, port.get("state", ""), port.get("rate", ""), port.get("link layer", "")) if port else []


def sysfs_port(card: str, state: str, rate: str, layer: str) -> list[Port]:
    """A port of ``/sys/class/infiniband/CARD/ports/1``: ``4: ACTIVE``, ``400 Gb/sec (4X NDR)``, ``InfiniBand``; empty
    where it is not active."""
    number = re.match(r"\s*(\d{1,6}(?:\.\d+)?)", rate)
    if "active" not in state.lower() or number is None or float(number[1]) <= 0:
        return []
    kind = "roce" if layer.strip().lower() == "ethernet" else "infiniband"
    kind = "efa" if card.startswith(("efa", "rdmap")) else kind
    return [Port(name=card, kind=kind, gbit_s=float(number[1]))]


def ethernet_port(name: str, state: str, speed: str) -> list[Port]:
    """A port of ``/sys/class/net``: ``up``, and Mbit/s, which is -1 where nobody knows."""
    mbit = speed.strip()
    if state.strip() != "up" or not (mbit.isascii() and mbit.isdigit() and 0 < int(mbit[:9]) < 10**8):
        return []
    return [Port(name=name, kind="ethernet", gbit_s=int(mbit) / 1000)]


def cores(cpuinfo: str) -> int:
    """Processor cores of ``/proc/cpuinfo``, each once however many threads it runs; 0 where it does not say."""
    seen, processors, socket = set(), 0, "0"
    for line in cpuinfo.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "processor":
            processors += 1
        elif key == "physical id":
            socket = value
        elif key == "core id":
            seen.add((socket, value))
    return len(seen) or processors


def memory_bytes(meminfo: str) -> int:
    """Memory of ``/proc/meminfo``; 0 where it does not say."""
    match = re.search(r"^MemTotal:\s*(\d{1,15}) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def drive_bytes(sectors: str) -> int:
    """Capacity by ``/sys/block/nvme0n1/size``, which counts 512 bytes."""
    count = sectors.strip()
    return int(count) * 512 if count.isascii() and count.isdigit() and len(count) < 16 else 0
