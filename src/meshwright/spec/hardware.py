"""The hardware records: a device, the levels of the tree above it, and the node around it.

A cluster is a tree of levels from the inside out: devices in an NVLink domain or node, nodes under a rail or
leaf switch, leaves under a spine, islands on a WAN. A level is described by what one child's port into it can
carry, which is all that the price of a collective needs. Peaks are dense (no sparsity) and every number of the
catalog carries its source.
"""

from __future__ import annotations

from math import prod
from statistics import NormalDist
from typing import Literal

import msgspec

from meshwright.spec.wiring import Wiring

_NORMAL = NormalDist()

Topology = Literal["switch", "ring", "mesh", "torus", "pcie", "fat_tree", "dragonfly"]

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int1")
"""The data types a peak can be given for. ``fp32`` is the vector unit, ``tf32`` the matrix unit on fp32 input;
block-scaled formats (fp8_block, mxfp8, nvfp4) run at the peak of their element type."""


COPY_SHARE = 0.82
"""Rate of pinned copies over that of a PCI Express link: NVIDIA's bandwidthTest reaches 12.9 of 15.75 GB/s on
generation 3 and 26 of 31.5 on generation 4 (unverified); packet headers and flow control take the rest."""
USUAL_HOST_GB_S = 409.6
"""Memory bandwidth of a host of two sockets with eight channels of DDR4-3200 each (AMD EPYC 7002 datasheet: 204.8 GB/s
a socket), where nothing says another."""
STREAM_SHARE = 0.46
"""Share that all cores reach of their memory's peak in an optimizer's update: DeepSpeed's CPU Adam takes 2.57 s for 10
billion parameters of 30 bytes each on two Xeon Platinum 8168, 256 GB/s (Ren et al. 2021, arXiv 2101.06840, table 4;
unverified)."""


READ_SHARE = 0.8
"""Share that all cores reach of their memory's peak where they read alone: STREAM on servers of two sockets (from
memory, not read)."""
CORE_GFLOPS, PRODUCT_SHARE = 80.0, 0.7
"""Peak of one core in fp32, 1e9 operations a second: two units of 256 bits that multiply and add, at 2.5 GHz (AMD EPYC
7002 datasheet); and the share of it that large products reach (from memory, not read)."""
USUAL_CORES = 128
"""Cores of the host whose memory is :data:`USUAL_HOST_GB_S`, where nothing says another."""


class Level(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One level of the tree: `arity` children joined under one parent.

    Attributes:
        name: what joins the children here ("nvlink", "node", "rail", "leaf", "spine", "fabric", "wan").
        arity: children under one parent. In a device's standard levels, the most that fit (0: no limit).
        gb_s: bandwidth of ONE child's port into this level, per direction, in 1e9 bytes/s. A child of level 0
            is a device, of the first scale-out level a node, of the next one a leaf group, and so on.
        latency_us: one hop through this level, one way: hardware and transport, without software launch.
        topology: how the children are joined: "switch" and "fat_tree" any to any, "mesh" direct links between
            all pairs, "ring" and "torus" neighbours only, "pcie" one shared host bridge, "dragonfly" groups.
        oversubscription: each child gets ``gb_s / oversubscription`` when all children send at once.
        in_network_reduction: the switches can add up (NVLink SHARP, InfiniBand SHARP).
        scale_out: the traffic leaves the node through its NICs.
        shared_ports: exchanges of a child that are under way at once share its port. Else they are timed as if each
            had it to itself, which is quicker to work out and right where they do not meet.
        shape: sides of a torus or grid, product = arity; empty when the topology has no dimensions.
        busbw_gb_s: what collectives of 256 MiB over all devices under this scale-out level reached when measured, by
            operation (all_reduce, all_gather, reduce_scatter): the bus bandwidth that nccl-tests prints, in 1e9
            bytes/s. Takes the place of what the catalog knows of the fabric at scale.
        wiring: the switches behind a level between nodes and how flows are routed through them; None: no flow meets
            another but at a port.
        sources: field -> where the number comes from; "*" for all fields not named.
    """

    name: str
    arity: int
    gb_s: float
    latency_us: float
    topology: Topology
    oversubscription: float = 1.0
    in_network_reduction: bool = False
    scale_out: bool = False
    shared_ports: bool = False
    shape: tuple[int, ...] = ()
    busbw_gb_s: dict[str, float] = {}
    wiring: Wiring | None = None
    sources: dict[str, str] = {}

    @property
    def busy_gb_s(self) -> float:
        """Bandwidth of one child's port, per direction, when all children send at once."""
        return self.gb_s / self.oversubscription


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One host without its devices: network ports, memory, drives, cores and power.

    Attributes:
        devices: devices attached to one host (a device is what a rank drives: a GPU, a GCD, a TPU chip).
        nics: network ports used for device traffic, each of `nic_gbit_s` (1e9 bits/s, per direction).
        pcie_gb_s: host to device bandwidth of one device, per direction (PCIe, or NVLink-C2C).
        copy_gb_s: what pinned copies between one device and host memory reach per direction while all devices copy; 0:
            not measured, and `COPY_SHARE` of `pcie_gb_s` is meant.
        host_memory_gb_s: peak bandwidth of the host's memory, all sockets together; 0: unknown, and
            `USUAL_HOST_GB_S` is meant.
        nvme_gb_s: sequential read of all local drives together; 0 when the host has none.
        nvme_write_gb_s: sequential write of all of them together; 0: unknown, and as fast as they are read.
        host_tflops: peak of the host's processors in products, all sockets together, 1e12 operations/s; 0: unknown, and
            `CORE_GFLOPS` of each of `cpus` is meant.
        power_w: what the host draws under load besides its devices' own power.
        root_port_gb_s: what one of the host's PCIe root ports carries, both directions together; 0: all that its
            devices do.
        root_port_devices: devices behind the root port that has most of them.
        numa_nodes: parts of the host's memory that are near to some of its devices and cores each: its sockets, as a
            rule.
        direct_gb_s: what devices reach of one network port past the host's memory (peer to peer), per direction; 0: as
            much as the port carries.
    """

    devices: int
    nics: int
    nic_gbit_s: float
    host_memory_bytes: int
    pcie_gb_s: float
    cpus: int = 0
    nvme_gb_s: float = 0.0
    nvme_bytes: int = 0
    power_w: float = 0.0
    sources: dict[str, str] = {}
    copy_gb_s: float = 0.0
    host_memory_gb_s: float = 0.0
    nvme_write_gb_s: float = 0.0
    host_tflops: float = 0.0
    root_port_gb_s: float = 0.0
    root_port_devices: int = 1
    numa_nodes: int = 2
    direct_gb_s: float = 0.0

    @property
    def copies_gb_s(self) -> float:
        """Copies between one device and host memory, per direction, in 1e9 bytes/s."""
        return self.copy_gb_s or COPY_SHARE * self.pcie_gb_s

    @property
    def streamed_gb_s(self) -> float:
        """The host's memory as its cores update state in it, in 1e9 bytes/s."""
        return STREAM_SHARE * (self.host_memory_gb_s or USUAL_HOST_GB_S)

    @property
    def read_gb_s(self) -> float:
        """The host's memory as its cores read it, in 1e9 bytes/s."""
        return READ_SHARE * (self.host_memory_gb_s or USUAL_HOST_GB_S)

    @property
    def product_flops(self) -> float:
        """Operations a second of large products on all cores of the host."""
        return PRODUCT_SHARE * (self.host_tflops * 1e12 or (self.cpus or USUAL_CORES) * CORE_GFLOPS * 1e9)

    @property
    def writes_gb_s(self) -> float:
        """Sequential writes of all local drives together, in 1e9 bytes/s."""
        return self.nvme_write_gb_s or self.nvme_gb_s

    @property
    def nic_gb_s(self) -> float:
        """All NICs of the node together, per direction, in 1e9 bytes/s."""
        return self.nics * self.nic_gbit_s / 8


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Published fractions of the peak that good kernels reach on this device, for the untuned roofline.

    ``gemm``: large dense matrix products in bf16; ``memory``: streaming kernels, of `memory_gb_s`;
    ``attention_fwd`` and ``attention_bwd``: FlashAttention, of the bf16 peak. Absent: not published.
    """

    gemm: float | None = None
    memory: float | None = None
    attention_fwd: float | None = None
    attention_bwd: float | None = None
    source: str = ""


class Near(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A second processor of a device, on the logic dies beneath its memory: it reads `memory_gb_s` (1e9 bytes/s), more
    than goes out to the first one, and computes `peak_flops` by data type, less (Duplex, Yun et al. 2409.01141)."""

    memory_gb_s: float
    peak_flops: dict[str, float]
    source: str = ""


class Optics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A processor of light beside a device, on the host's PCI Express: it multiplies by random matrices that never
    change, `peak_flops` operations a second, and draws `power_w` (Launay et al. 2012.06373)."""

    peak_flops: float
    power_w: float = 0.0
    source: str = ""


#: What stands in the name of a device before the rates of a processor near its memory, or of one of light: prices are
#: kept by name.
NEAR, OPTICS = "+near", "+optics"


class Device(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One accelerator as a rank sees it.

    Attributes:
        memory_bytes: capacity the driver reports as total, else the datasheet's; the source says which.
        memory_gb_s: device memory bandwidth, datasheet, in 1e9 bytes/s.
        peak_flops: dense FLOP/s by data type (`DTYPES`); a type not named is not supported in hardware.
        num_sms: streaming multiprocessors, compute units or cores that share the work of a kernel.
        paired_sms: two multiprocessors multiply one tile together, each reading half of its operands.
        triggers: memory watches a kernel's stores, starts the exchange of what is finished and sums what arrives, with
            no multiprocessor's help (T3, 2401.16677); no device on sale does.
        exponentials_per_clock: of one multiprocessor's special-function units; what attention waits for beside its
            products. NVIDIA's have 16 from Pascal to Blackwell; of other vendors' none is published and 16 stands.
        clock_mhz: the clock the matrix peak is stated at (sustained, so at times below the boost clock).
        l2_bytes: the cache all cores share: L2, or the cache behind it where the L2 is split.
        tdp_w: the most power one device draws; None where the vendor does not say.
        process_nm: the generation of the process its dies are made in, by its name in nanometres; 0: not said.
        price_usd_hour: a typical on-demand price of one device for one hour; the source gives offer and year.
        mtbf_hours: hours of one device per unexpected interruption of the job it runs, from any cause.
        scale_up: the fabric inside the node ("nvlink4", "pcie5", "xgmi", "ici").
        cores: > 0: the device is one of so many processor cores, which a node's ranks share when there are more of
            them, and which run the kernels they issue themselves, so that issuing takes its time as well.
        crowding: of cores: share by which what ranks compute takes longer for every doubling of those that take turns
            on a core.
        comm_slowdown: share of its speed that compute loses while a collective runs beside it; None: what the
            device's fabric makes likely.
        speed_spread: relative standard deviation of how fast devices of one kind are, by how they were made and cooled;
            those that wait for one another go at the pace of the slowest. What users of five GPU clusters saw: 8% from
            one end of a box plot's whiskers to the other, which are 5.4 standard deviations apart (Sinha et al., SC
            2022, arXiv 2208.11035).
        framework: the framework profile that is meant when a prediction names none.
        near: the processor beside its memory, if it has one: products and attention run where they take less time.
        optics: the processor of light beside it, if it has one: projections by fixed random matrices run where they
            take less time.
        node, levels: the standard node and the standard tree around it, used when a cluster is only a count.
    """

    name: str
    title: str
    vendor: str
    architecture: str
    memory_bytes: int
    memory_gb_s: float
    peak_flops: dict[str, float]
    num_sms: int
    scale_up: str
    node: Node
    levels: tuple[Level, ...]
    sources: dict[str, str]
    paired_sms: bool = False
    triggers: bool = False
    exponentials_per_clock: float = 16.0
    clock_mhz: float | None = None
    tdp_w: float | None = None
    process_nm: int = 0
    l2_bytes: int | None = None
    idle_w: float | None = None
    price_usd_hour: float | None = None
    mtbf_hours: float | None = None
    efficiency: Efficiency | None = None
    aliases: tuple[str, ...] = ()
    differs_from: str = ""
    cores: int = 0
    crowding: float = 0.0
    comm_slowdown: float | None = None
    speed_spread: float = 0.015
    framework: str = ""
    near: Near | None = None
    optics: Optics | None = None

    @property
    def alone(self) -> Device:
        """The device without the processors near its memory and of light."""
        name = self.name.partition(OPTICS)[0].partition(NEAR)[0]
        return msgspec.structs.replace(self, name=name, near=None, optics=None)

    def lit(self, optics: Optics) -> Device:
        """The device with a processor of light."""
        rates = f"{optics.peak_flops / 1e12:g}:{optics.power_w:g}"
        title = f"{self.title} with a processor of light"
        return msgspec.structs.replace(self, name=f"{self.name}{OPTICS}{rates}", title=title, optics=optics)

    def beside(self, near: Near) -> Device:
        """The device with a processor near its memory."""
        title = f"{self.title} with a processor near its memory"
        rates = f"{near.memory_gb_s:g}:{max(near.peak_flops.values()) / 1e12:g}"
        return msgspec.structs.replace(self, name=f"{self.name}{NEAR}{rates}", title=title, near=near)

    @property
    def synchronous(self) -> bool:
        """Whether issuing a kernel and running it are the same processor's work."""
        return self.cores > 0

    def slowest_of(self, count: int) -> float:
        """Return the straggler factor: time of the slowest of `count` devices over that of one of median speed.

        It is the expected largest of so many draws of a normal variable (Blom's approximation, 1958). Cores of one
        processor are alike."""
        if count <= 1 or not self.speed_spread or self.cores:
            return 1.0
        return 1.0 + self.speed_spread * _NORMAL.inv_cdf((count - 0.375) / (count + 0.25))

    @property
    def domain_size(self) -> int:
        """Devices of the largest group that needs no NIC: the standard scale-up domain."""
        return prod(level.arity for level in self.levels if not level.scale_out)


def source_of(record: Device | Level | Node, field: str) -> str:
    """Return the source of a number of a record; "" when there is none."""
    return sourced(record.sources, field)


def sourced(sources: dict[str, str], field: str) -> str:
    """Where a number comes from by the sources beside it. What a cluster reached was measured there, whatever the rest
    of its description comes from."""
    return sources.get(field, "" if field == "busbw_gb_s" else sources.get("*", ""))
