"""Checks of a cluster or device description: units mixed up, arities that do not multiply, ports too wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import msgspec

from meshwright.errors import nearest
from meshwright.spec.cluster_names import NodeType, wiring_faults
from meshwright.spec.cluster_tree import MOST_DEVICES, Cluster, Island
from meshwright.spec.hardware import DTYPES, Device, Efficiency, Level, Near, Node

Finding = tuple[str, str, str, str]
"""A violation: code, path of the key, message, help."""

# field -> (least, why less is wrong, most, why more is wrong). The limits are far outside any machine there is:
# they catch a factor of 8 or 1000, not a bold specification.
LIMITS: dict[str, tuple[float, str, float, str]] = {
    "memory_bytes": (1e8, "bytes are expected, this looks like GB", 1e15, "bytes are expected, this looks like bits"),
    "memory_gb_s": (10, "GB/s (1e9 bytes/s) are expected, this looks like TB/s", 1e6, "this looks like bytes/s"),
    "l2_bytes": (1e4, "bytes are expected, this looks like MB", 1e12, "bytes are expected"),
    "clock_mhz": (50, "MHz are expected, this looks like GHz", 1e5, "MHz are expected, this looks like Hz"),
    "tdp_w": (1, "watts are expected, this looks like kW", 1e5, "watts of one device are expected, this looks like mW"),
    "host_memory_bytes": (1e8, "bytes are expected, this looks like GB", 1e16, "bytes are expected"),
    "nvme_bytes": (1e8, "bytes are expected, this looks like TB", 1e18, "bytes are expected"),
    "pcie_gb_s": (0.5, "GB/s (1e9 bytes/s) are expected, this looks like TB/s", 1e4, "this looks like MB/s or bytes/s"),
    "nvme_gb_s": (0.01, "GB/s (1e9 bytes/s) are expected", 1e4, "this looks like MB/s or bytes/s"),
    "nvme_write_gb_s": (0.01, "GB/s (1e9 bytes/s) are expected", 1e4, "this looks like MB/s or bytes/s"),
    "copy_gb_s": (0.1, "GB/s (1e9 bytes/s) are expected", 1e4, "this looks like MB/s or bytes/s"),
    "host_tflops": (
        1e-3,
        "TFLOP/s (1e12 operations/s) are expected",
        1e5,
        "this looks like GFLOP/s or FLOP/s",
    ),
    "host_memory_gb_s": (1, "GB/s (1e9 bytes/s) are expected", 1e5, "this looks like MB/s or bytes/s"),
    "root_port_gb_s": (0.5, "GB/s (1e9 bytes/s) are expected", 1e4, "this looks like MB/s or bytes/s"),
    "root_port_devices": (1, "a count is expected", 1e3, "a count of devices is expected"),
    "numa_nodes": (1, "a count is expected", 1e3, "a count is expected"),
    "direct_gb_s": (0.1, "GB/s (1e9 bytes/s) are expected", 1e4, "this looks like MB/s or bytes/s"),
    "nic_gbit_s": (
        0.5,
        "Gbit/s of one NIC are expected, this looks like Tbit/s",
        2e4,
        "this looks like Mbit/s or bit/s",
    ),
    "power_w": (5, "watts are expected, this looks like kW", 1e6, "watts are expected, this looks like mW"),
    "gb_s": (1e-3, "GB/s (1e9 bytes/s) are expected, this looks like TB/s or less", 1e9, "this looks like bytes/s"),
    "latency_us": (0.01, "microseconds are expected, this looks like seconds", 1e6, "this looks like nanoseconds"),
    "speed_spread": (1e-4, "a fraction is expected, 0.015 for 1.5%", 0.2, "a fraction is expected, 0.015 for 1.5%"),
    "crowding": (1e-4, "a fraction is expected, 0.05 for 5%", 2, "a fraction is expected, 0.05 for 5%"),
    "mtbf_hours": (0.01, "hours are expected", 1e9, "hours are expected, this looks like seconds"),
    "price_usd_hour": (1e-3, "US dollars an hour are expected", 1e8, "US dollars an hour are expected"),
    "power_limit_w": (10, "watts are expected, this looks like kW or MW", 1e12, "watts are expected"),
    "pue": (1, "power usage effectiveness is never below 1", 5, "power usage effectiveness is a ratio, such as 1.1"),
}
FRACTIONS = ("gemm", "memory", "attention_fwd", "attention_bwd")
MAY_BE_ZERO = (
    "nvme_gb_s",
    "nvme_write_gb_s",
    "copy_gb_s",
    "host_memory_gb_s",
    "host_tflops",
    "root_port_gb_s",
    "direct_gb_s",
    "nvme_bytes",
    "power_w",
    "latency_us",
    "speed_spread",
    "crowding",
)
BUSBW = "the busbw column of nccl-tests, in 1e9 bytes/s"
REACHED_BY = ("all_reduce", "all_gather", "reduce_scatter")
"""Operations whose measured bus bandwidth tells what a network's connections need."""
DEVICE_PORT_GB_S = 5000
"""No device has scale-up ports this wide; NVLink 5 gives 900 GB/s per direction."""


def findings(record: Any, path: str) -> Iterator[Finding]:
    """Everything wrong with a record whose fields have the right types."""
    yield from limits(msgspec.structs.asdict(record), path)
    if isinstance(record, Device):
        yield from _device(record, path)
    elif isinstance(record, NodeType):
        yield from _standard(record.levels, record.node, path)
    elif isinstance(record, Efficiency):
        yield from _efficiency(record, path)
    elif isinstance(record, Near):
        yield from _peaks(record.peak_flops, path)
    elif isinstance(record, Level):
        yield from _level(record, path)
    elif isinstance(record, Node):
        yield from _node(record, path)
    elif isinstance(record, Island):
        yield from _island(record, path)
    elif isinstance(record, Cluster):
        yield from _cluster(record, path)


def _at(path: str, field: str, value: Any) -> str:
    return f"{path}.{field} = {value!r}" if path else f"{field} = {value!r}"


def limits(values: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Numbers out of range, also of a record that is not complete."""
    for field, value in values.items():
        if field not in LIMITS or value is None or isinstance(value, tuple) or (value == 0 and field in MAY_BE_ZERO):
            continue
        least, low, most, high = LIMITS[field]
        if not least <= value <= most:
            why = low if value < least else high
            yield "C008", _at(path, field, value), f"{field} is out of range: {why}", f"between {least:g} and {most:g}"


def _peaks(peak_flops: Mapping[str, float], path: str) -> Iterator[Finding]:
    for dtype, flops in peak_flops.items():
        if dtype not in DTYPES:
            yield "C005", _at(path, f"peak_flops.{dtype}", flops), "unknown data type", nearest(dtype, DTYPES)
        elif not 1e9 <= flops <= 1e18:
            why = "FLOP/s are expected, this looks like TFLOP/s" if flops < 1e9 else "this is more than any device has"
            yield "C008", _at(path, f"peak_flops.{dtype}", flops), f"peak is out of range: {why}", "write 989.4e12"
    if not peak_flops:
        yield (
            "C006",
            path or "peak_flops",
            "a device needs the peak of at least one data type",
            "peak_flops.bf16 = 312e12",
        )


def _device(device: Device, path: str) -> Iterator[Finding]:
    yield from _peaks(device.peak_flops, path)
    if device.num_sms < 1:
        yield "C008", _at(path, "num_sms", device.num_sms), "a device has at least one core", ""
    yield from _standard(device.levels, device.node, path)


def _standard(levels: tuple[Level, ...], node: Node, path: str) -> Iterator[Finding]:
    """The standard node and levels of a device or a machine type."""
    yield from _scale_up_ports(levels, f"{path}.levels" if path else "levels")
    domain = prod(level.arity for level in levels if not level.scale_out)
    if domain % node.devices:
        yield (
            "C009",
            _at(path, "node.devices", node.devices),
            f"a scale-up domain of {domain} devices is not whole nodes of {node.devices}",
            "the arities of the scale-up levels multiply to node.devices or a multiple",
        )
    if (
        not levels
        or not levels[-1].scale_out
        or [i for i, level in enumerate(levels) if level.arity == 0] != [len(levels) - 1]
    ):
        yield (
            "C009",
            f"{path}.levels" if path else "levels",
            "the outermost standard level, and no other, is a network without limit",
            "end with a level that has scale_out = true and arity = 0",
        )


def _efficiency(efficiency: Efficiency, path: str) -> Iterator[Finding]:
    for field in FRACTIONS:
        value = getattr(efficiency, field)
        if value is not None and not 0 < value <= 1:
            yield "C008", _at(path, field, value), f"{field} is a fraction of the peak, above 0 and at most 1", ""
    if not efficiency.source:
        yield "C006", path, "an efficiency needs its source", 'source = "paper or vendor document"'


def _level(level: Level, path: str) -> Iterator[Finding]:
    if level.arity < 0:
        yield "C008", _at(path, "arity", level.arity), "arity counts children, it cannot be negative", ""
    if level.oversubscription < 1:
        yield (
            "C008",
            _at(path, "oversubscription", level.oversubscription),
            "oversubscription is children's ports over what the level carries, never below 1",
            "a 1:7 tapered level has oversubscription = 7",
        )
    if level.shape and prod(level.shape) != level.arity and level.arity > 0:
        yield (
            "C009",
            _at(path, "shape", list(level.shape)),
            f"the sides multiply to {prod(level.shape)}, arity is {level.arity}",
            "make the sides multiply to the arity",
        )
    if level.wiring is not None and not level.scale_out:
        yield "C008", f"{path}.wiring", "switches are those of a scale-out level", "give it with what joins nodes"
    yield from _reached(level, path)


def _reached(level: Level, path: str) -> Iterator[Finding]:
    """Measured bus bandwidths name operations that tell of rings and trees, and no ring passes a port faster."""
    if level.busbw_gb_s and not level.scale_out:
        help = "give it with the level that nodes are joined by"
        yield "C008", f"{path}.busbw_gb_s", "measured bus bandwidths are those over a scale-out level", help
    for op, value in level.busbw_gb_s.items():
        at = f"{path}.busbw_gb_s.{op}" if path else f"busbw_gb_s.{op}"
        if op not in REACHED_BY:
            guess = nearest(op, REACHED_BY)
            yield "C008", at, f"not one of {', '.join(REACHED_BY)}", f"did you mean {guess}?" if guess else ""
        elif not 1e-3 <= value <= 2 * level.gb_s:
            why = f"{value:g} GB/s: a ring passes each port once, which carries {level.gb_s:g} GB/s"
            yield "C008", at, why, BUSBW


def _node(node: Node, path: str) -> Iterator[Finding]:
    for field, least in (("devices", 1), ("nics", 0), ("cpus", 0)):
        if getattr(node, field) < least:
            yield "C008", _at(path, field, getattr(node, field)), f"{field} must be at least {least}", ""


def _scale_up_ports(levels: tuple[Level, ...], path: str) -> Iterator[Finding]:
    for i, level in enumerate(levels[:1]):
        if not level.scale_out and level.gb_s > DEVICE_PORT_GB_S:
            yield (
                "C008",
                _at(f"{path}[{i}]", "gb_s", level.gb_s),
                "gb_s is one device's port in GB/s (1e9 bytes/s) per direction; this looks like Gbit/s or MB/s",
                "NVLink 4 is 450, PCIe 5 x16 is 63",
            )


def _island(island: Island, path: str) -> Iterator[Finding]:
    yield from _scale_up_ports(island.levels, f"{path}.levels")
    if not island.levels:
        yield "C006", f"{path}.levels", "an island needs at least one level", ""
    for i, level in enumerate(island.levels):
        if level.arity < 1:
            yield (
                "C009",
                _at(f"{path}.levels[{i}]", "arity", level.arity),
                "an island's level has a definite number of children",
                "arity = 0 (no limit) is only for the standard levels of a device or machine",
            )
    outside = [i for i, level in enumerate(island.levels) if level.scale_out]
    if outside and any(not level.scale_out for level in island.levels[outside[0] :]):
        yield (
            "C009",
            f"{path}.levels",
            "a scale-up level cannot lie outside a scale-out level",
            "list inner levels first",
        )
    if all(level.arity > 0 for level in island.levels):
        yield from _ports(island, path)
        for message, help in wiring_faults(island):
            yield "C009", f"{path}.levels", message, help


def not_whole_nodes(domain: int, devices: int) -> tuple[str, str]:
    """Message and help for scale-up levels that do not make whole nodes."""
    return (
        f"a scale-up domain of {domain} devices is not whole nodes of {devices}",
        f"make the arities of the levels inside a node multiply to {devices}, or say the node: [islands.node] with "
        f"devices = {domain}, nics, nic_gbit_s, host_memory_bytes and pcie_gb_s; without it the device's is meant",
    )


def _ports(island: Island, path: str) -> Iterator[Finding]:
    """No level is wider than the NICs below it, and a scale-up domain is whole nodes."""
    domain, devices = island.domain_size, island.node.devices
    if island.num_devices > devices and domain % devices:
        yield "C009", _at(f"{path}.node", "devices", devices), *not_whole_nodes(domain, devices)
        return
    child = 1
    port = next((level.gb_s for level in island.levels if level.scale_out), 0.0)
    for i, level in enumerate(island.levels):
        for op, value in level.busbw_gb_s.items():
            if port and 2 * port < value <= 2 * level.gb_s:
                why = f"{value:g} GB/s: a ring passes each node's port once, which carries {port:g} GB/s"
                yield "C008", f"{path}.levels[{i}].busbw_gb_s.{op}", why, BUSBW
        most = max(1, child // devices) * island.node.nic_gb_s
        if level.scale_out and level.gb_s > 1.01 * most:
            ratio = level.gb_s / most if most else 0
            why = "; 8 times as much: this looks like Gbit/s" if 7.5 <= ratio <= 8.5 else ""
            yield (
                "C008",
                _at(f"{path}.levels[{i}]", "gb_s", level.gb_s),
                f"one child of this level has NICs for {most:g} GB/s per direction{why}",
                "gb_s is the child's port in GB/s: nodes below it x nics x nic_gbit_s / 8",
            )
        child *= level.arity


def _cluster(cluster: Cluster, path: str) -> Iterator[Finding]:
    if all(level.arity > 0 for island in cluster.islands for level in island.levels):
        if cluster.num_devices > MOST_DEVICES:
            message = f"{cluster.num_devices:,} devices are more than {MOST_DEVICES:,}"
            yield "C015", "islands", message, "check the arities; the largest clusters there are have some 200,000"
    if not cluster.islands:
        yield "C006", "islands", "a cluster needs at least one island", ""
    joined = prod(level.arity for level in cluster.interconnect)
    if joined != len(cluster.islands) and (cluster.interconnect or len(cluster.islands) > 1):
        yield (
            "C009",
            "interconnect",
            f"the interconnect joins {joined} islands, the cluster has {len(cluster.islands)}",
            "the arities of the interconnect levels multiply to the number of islands",
        )
