"""Relatives of a device: how far apart two are for their kernels, and what of a kernel's curve changes between them.

A curve's constants are fractions of the hardware's own figures, so a curve of one device prices another one. What
changes beside the figures: times that are cycles (starts, waves, steps) go with the clock; a device whose power does
not suffice for all of its arithmetic clocks lower, its matrix units too; kernels of an older kind of matrix instruction
reach less of the peak of a newer one.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from meshwright import catalog
from meshwright.cost.roofline import peak_flops
from meshwright.spec.cluster import load_device
from meshwright.spec.hardware import Device

#: Generations of one vendor's devices in order.
GENERATIONS = ("Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", "Blackwell Ultra")

#: Distances, in octaves of what a multiprocessor computes in a clock: of an octave of multiprocessors, of another
#: precision, and of the roofline for numbers of 16 bits and more, and for fewer, of whose quantising it knows nothing.
#: Fitted, rounded, by leaving out each device, all of its relatives and each precision of it, over all operations.
OCTAVE_OF_SMS, OTHER_PRECISION, ROOFLINE_APART = 2.0, 2.0, (4.0, 8.0)
#: Devices no farther apart than this are variants of one another.
VARIANTS = 0.5

#: Watts per 1e12 operations a second of the vector units in fp32 below which a device of 16 nm clocks lower under load.
#: Fitted on those that do: P4 (75 W, 91% of the clock), T4 (70 W, 55%, whose 12 nm are a denser 16) and L4 (72 W, 43%).
VECTOR_WATTS = 16.0
#: The same of later processes, over that: what foundries say that power falls by at the same speed (from memory, but
#: for 30% from 7 to 5 nm: TSMC, 5 nm technology): 45 and 60% from 16 nm to 8 and 7.
OF_16_NM = {16: 1.0, 12: 1.0, 8: 0.55, 7: 0.4, 4: 0.28}

#: Watts per 1e12 operations a second of 16-bit products below which a device of 4 nm whose matrix units wait for the
#: threads clocks lower. The L40S (350 W) reaches 0.57 of its peak in large products and the RTX PRO 6000 (600 W) 0.82;
#: what one tells of the other is the same for any value that limits both, and mends them both: left out in turn, their
#: large products come out 5% too fast and 8% too slow, where they were 26% too fast and 37% too slow. With this one
#: those of the A100 come out right from theirs (with 1.25 they are 3% too slow, with 1.53 3% too fast).
MATRIX_WATTS, MATRIX_NM = 1.4, 4

#: Share of the peak that mma.sync reaches on devices with asynchronous matrix instructions (Luo et al. 2402.13499, for
#: the H100; unverified): what FlashAttention-2 is written in.
SYNCHRONOUS_SHARE = 0.63
#: Operations that keep the matrix units busy enough for a power limit to tell.
PRODUCTS = ("gemm", "grouped_gemm")
#: Kernels of training written in it.
FLASH = ("flash_fwd", "flash_bwd")
#: Rate of a backward kernel over that of the forward one (FlashAttention-2, Dao 2307.08691: up to 63 and 73% of the
#: A100's peak).
BACKWARD_SHARE = 0.63 / 0.73


class Ratios(NamedTuple):
    """Ratios of a device to the owner of a curve that is carried to it: of the clock under its power limit, of the rate
    of the kernel beside what the peaks say, and of the length of a cycle."""

    clock: float
    rate: float
    cycle: float


def asynchronous(device: Device) -> bool:
    """Whether the matrix instructions run beside the threads that issue them and read shared memory (wgmma of compute
    capability 9, tcgen05 of 10): kernels are written anew for those. Workstation Blackwell (12) has none."""
    return device.architecture == "Hopper" or device.paired_sms


def generation(device: Device) -> int:
    """Place of a device's generation among its vendor's; the first for those not named."""
    return GENERATIONS.index(device.architecture) if device.architecture in GENERATIONS else 0


def apart(owner: Device, device: Device, fitted: str, dtype: str) -> float:
    """Return the distance of a device from the owner of a curve in a precision `fitted`, for work in `dtype`: in
    octaves of what a multiprocessor computes in a clock."""
    lanes = abs(log2(_lanes(owner, fitted) / _lanes(device, dtype)))
    sms = abs(log2(owner.num_sms / device.num_sms))
    return lanes + OCTAVE_OF_SMS * sms + (OTHER_PRECISION if fitted != dtype else 0.0)


def _lanes(device: Device, dtype: str) -> float:
    """FLOP of one multiprocessor in a clock."""
    return peak_flops(device, dtype) / device.num_sms / _clock(device)


def _clock(device: Device) -> float:
    return (device.clock_mhz or 1500.0) * 1e6


def change(owner: Device, device: Device, *, ops: tuple[str, str], dtypes: tuple[str, str]) -> Ratios:
    """Return what changes between two devices, of the operation and the precision that a curve was fitted to and that
    are asked for."""
    limits = [under_power(d, dtype) for d, dtype in zip((owner, device), dtypes)]
    variants = 1.0
    if ops[1] in PRODUCTS:  # attention waits for exponentials, and draws less
        variants = clock_under_limit(device, dtypes[1]) / clock_under_limit(owner, dtypes[0])
    rate = _instructions(ops[1], device) / _instructions(ops[0], owner)
    if ops[1] in PRODUCTS:  # those that wait for memory leave the power for it
        rate *= products_under_power(device, dtypes[1]) / products_under_power(owner, dtypes[0])
    if ops[1] == "flash_bwd" and ops[0] != ops[1]:
        rate *= BACKWARD_SHARE
    return Ratios(limits[1] / limits[0] * variants, rate, _clock(owner) * limits[0] / (_clock(device) * limits[1]))


def _instructions(op: str, device: Device) -> float:
    """Share of the matrix units' peak that the instructions of a kernel can reach."""
    return SYNCHRONOUS_SHARE if op in FLASH and asynchronous(device) else 1.0


def under_power(device: Device, dtype: str) -> float:
    """Return the clock of a device while all of its vector units multiply and add, over its usual one: an operation
    takes the same energy at every clock once the voltage can fall no further, so that the clock goes as the power."""
    if dtype != "fp32" or not device.tdp_w or device.process_nm not in OF_16_NM:
        return 1.0
    needed = VECTOR_WATTS * OF_16_NM[device.process_nm] * peak_flops(device, dtype) / 1e12
    return min(1.0, device.tdp_w / needed)


def products_under_power(device: Device, dtype: str) -> float:
    """Return the rate of large products on a device's matrix units over what its peak says, where its power does not
    suffice for all of them at its usual clock: the clock goes as the power, as with the vector units. Products of fewer
    bits take as much less as there are more of them."""
    alike = device.process_nm == MATRIX_NM and device.vendor == "NVIDIA" and not asynchronous(device)
    if not alike or not device.tdp_w or dtype == "fp32":
        return 1.0
    return min(1.0, device.tdp_w / (MATRIX_WATTS * peak_flops(device, "bf16") / 1e12))


def clock_under_limit(device: Device, dtype: str) -> float:
    """Return the clock of a device over that of the one it is a variant of, at most 1: below 1 where it has the same
    rated peak and a lower power limit.

    Dynamic power goes as the clock times the voltage squared, and the voltage as the clock, so the clock goes as the
    cube root. Variants rated lower by their maker (H100 NVL: 0.84 at 400 of 700 W, the law 0.83) say so themselves."""
    original = device.differs_from.partition(":")[0]
    if original not in catalog.names("devices") or not device.tdp_w:
        return 1.0
    base = load_device(original)
    if not base.tdp_w or peak_flops(base, dtype) != peak_flops(device, dtype):
        return 1.0
    return min(1.0, (device.tdp_w / base.tdp_w) ** (1 / 3))
