"""A part of a device: fewer multiprocessors, less of the memory's rate, or a lower clock, as kernels there find it.

Kernels of two processes share one device by its multiprocessors (CUDA MPS gives each a share of them) and meet at its
memory; a clock that is capped slows what multiplies and leaves the memory's rate as it is. Both are devices of
smaller peaks, which the roofline prices like any other.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshwright.cost.chain import Costs, Estimate
from meshwright.cost.roofline import efficiency, peak_flops, streaming_share
from meshwright.cost.standard import BARE
from meshwright.spec.hardware import Device
from meshwright.work import AttentionCore, Gemm, GroupedGemm, VarlenAttention, Work

#: How many times a device's peak stands for one that nothing waits for.
WITHOUT_END = 1e6


class DevicePart(NamedTuple):
    """The part of a device that a kernel has: shares of its multiprocessors, of its memory's rate, of its clock, and of
    the rate at which multiprocessors read the L2."""

    sms: float = 1.0
    memory: float = 1.0
    clock: float = 1.0
    ports: float = 1.0


#: Parts on which kernels take the time of their memory traffic alone, and of their operations alone.
TRAFFIC, OPERATIONS = DevicePart(clock=WITHOUT_END), DevicePart(memory=WITHOUT_END)
#: The part on which nothing takes any time but the starts of kernels and exchanges with other devices.
STARTS = DevicePart(memory=WITHOUT_END, clock=WITHOUT_END, ports=WITHOUT_END)


def part_of(device: Device, part: DevicePart) -> Device:
    """Return the device that has the peaks of a part of another one, under a name of its own.

    Whoever has few multiprocessors reads no faster than their ports to the L2 do (:func:`streaming_share`).
    """
    if part == DevicePart():
        return device
    sms = max(1, round(device.num_sms * part.sms))
    share = sms / device.num_sms * part.clock
    memory = min(part.memory, part.ports * share / streaming_share(device))
    return msgspec.structs.replace(
        device,
        name=f"{device.name}, {part.sms:.4g} of its multiprocessors, {part.memory:.4g} of its memory's rate, "
        f"{part.clock:.4g} of its clock, {part.ports:.4g} of its ports",
        num_sms=sms,
        memory_gb_s=device.memory_gb_s * memory,
        clock_mhz=(device.clock_mhz or 1500.0) * part.clock * part.ports,
        peak_flops={name: peak * share for name, peak in device.peak_flops.items()},
    )


def untuned() -> Costs:
    """Return the roofline without tables, which prices a part of a device as it does the whole one."""
    return Costs(BARE, profile="roofline")


def arithmetic() -> Costs:
    """Return costs of matrix operations alone: of those that are needed, at the rate that large products reach."""
    return Costs(BARE, (_operations,), profile="operations")


def _operations(work: Work, device: Device) -> Estimate:
    if not isinstance(work, Gemm | GroupedGemm | AttentionCore | VarlenAttention):
        return Estimate(0.0, "elementwise", "no matrix operations", 0.0)
    rate = peak_flops(device, getattr(work, "dtype", "bf16")) * efficiency(device, "gemm")[0]
    return Estimate(work.flops / rate, "gemm", "operations over the rate of large products", 0.0)
