"""Relatives of a device: the generations of a vendor's devices, and how unlike their kernels are."""

from __future__ import annotations

from meshwright.cost.carried import NEAR, OTHER, SAME
from meshwright.cost.roofline import peak_flops
from meshwright.spec.hardware import Device

#: Generations of one vendor's devices in order; the distance between two is how unlike their kernels are.
GENERATIONS = ("Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", "Blackwell Ultra")


def clock_under_limit(owner: Device, device: Device, dtype: str) -> float:
    """Return the clock of a device over that of its curves' owner, at most 1: below 1 where it is a variant of the
    owner with the same rated peak and a lower power limit.

    Dynamic power goes as the clock times the voltage squared, and the voltage as the clock, so the clock goes as the
    cube root. Variants rated lower by their maker (H100 NVL: 0.84 at 400 of 700 W, the law 0.83) say so themselves."""
    variant = device.differs_from.partition(":")[0] == owner.name
    if not variant or not owner.tdp_w or not device.tdp_w or peak_flops(owner, dtype) != peak_flops(device, dtype):
        return 1.0
    return min(1.0, (device.tdp_w / owner.tdp_w) ** (1 / 3))


def asynchronous(device: Device) -> bool:
    """Whether the matrix instructions run beside the threads that issue them and read shared memory (wgmma of compute
    capability 9, tcgen05 of 10): kernels are written anew for those. Workstation Blackwell (12) has none."""
    return device.architecture == "Hopper" or device.paired_sms


def nearness(owner: Device, device: Device) -> str:
    """Return how near a device is to the owner of a curve, in the words of ``cost.carried``."""
    if asynchronous(owner) != asynchronous(device):
        return OTHER
    return SAME if owner.architecture == device.architecture else NEAR


def generation(device: Device) -> int:
    """Place of a device's generation among its vendor's; the first for those not named."""
    return GENERATIONS.index(device.architecture) if device.architecture in GENERATIONS else 0


def distance(owner: Device, device: Device, kinship: int) -> tuple[float, ...]:
    """Return the distance of two devices for a curve: kind of matrix instructions, generation, then precision, then
    ratios of bandwidth and cores."""
    order = [GENERATIONS.index(d.architecture) if d.architecture in GENERATIONS else 99 for d in (owner, device)]
    size = abs(owner.memory_gb_s / device.memory_gb_s - 1) + abs(owner.num_sms / device.num_sms - 1)
    unlike = asynchronous(owner) != asynchronous(device)
    return (owner.name != device.name, unlike, abs(order[0] - order[1]), kinship, size)
