"""The roofline, with the quantisation that real kernels add: what a kernel takes on a device without measurements.

A kernel is bound by the matrix units, by device memory, or by how its tiles fill the SMs (Williams et al.,
2009, for the two roofs; NVIDIA's matrix multiplication guide for tile and wave quantisation). Peaks, bandwidths
and reachable fractions are the device's, with their sources, in the catalog.
"""

from __future__ import annotations

from math import ceil, inf

import msgspec

from meshwright.spec.hardware import Device
from meshwright.spec.workload import BIT_PRODUCTS, DTYPE_BYTES
from meshwright.work import AttentionCore, Convolution, Elementwise, Gemm, GroupedGemm, Scan, weight_bytes

#: Output tiles of one thread block, in elements; the library picks the fastest (cuBLAS, CUTLASS).
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
#: Output tiles of two SMs that multiply one together (PTX ISA, tcgen05.mma with cta_group::2; CUTLASS: 256 x 256).
PAIR_TILES = ((256, 256), (256, 128), (128, 256))
#: Output tiles of products of single bits for few rows, of which matrix units multiply 16 at once (PTX ISA,
#: mma.m16n8k256 of .b1): kernels that join bit planes are made for next tokens too (2409.17870).
BIT_TILES = ((16, 128), (32, 128))
#: L2 to SM read bandwidth, bytes per clock and SM (NVIDIA A100 whitepaper: 5120 B/clk over 80 of its SM ports).
L2_BYTES_PER_CLOCK = 64.0
#: Exponentials per clock and SM of the devices whose fraction of peak in attention is published: 16 special-function
#: lanes (FlashAttention-3, 2407.08608, section 3.1, for H100; NVIDIA states 5 T/s for 148 SMs of the B200).
EXP_PER_CLOCK = 16.0
#: Time from one kernel's start to when the next may start when it does nothing: launch latency on the device
#: side. Not measured here; CUDA-graph replays of empty kernels are reported between 1 and 3 us.
KERNEL_FLOOR_S = 2.0e-6
#: What typical shapes and kernels reach of the best the device has been seen to do, which is what is published.
#: gemm: median over bf16 products of more than 1e11 FLOP on A100, H100 and H200 (0.88 to 1.01 of the best by decade,
#: GEMM tables of NVIDIA AIConfigurator, SGLang 0.5). memory: not measured here; norms, softmax and dropout reduce
#: and draw random numbers between their reads, so they stay below a plain copy.
TYPICAL_OF_BEST = {"gemm": 0.92, "memory": 0.80, "attention_fwd": 0.92, "attention_bwd": 0.92}
#: Share of the SMs a collective's kernel occupies while it runs, which an overlapped product lacks: DeepSeek-V3 sets
#: 20 of 132 aside (2412.19437, section 3.2.2). Larger devices need no more than 20.
COLLECTIVE_SMS, COLLECTIVE_OF = 20, 132
#: Share of the peak that scans reach in operations by chunks: 0.067 and 0.093 on the H100, 0.105 on the H200, medians
#: of large scans of the gated delta rule (chunk_gated_delta_rule, SGLang 0.5.14 and TensorRT-LLM 1.3, tables of NVIDIA
#: AIConfigurator). Nobody's table has Mamba's: its kernels are taken to be like those (by their curve where there is
#: one), and on the vector units like other pointwise arithmetic.
SCAN_OF_PEAK = {"delta": 0.09, "ssd": 0.09, "selective": 0.35}
#: Kernels of a scan by chunks: decay, products within chunks, states, from state to state, outputs (state-spaces/mamba,
#: ssd_combined.py).
SCAN_KERNELS = 5
#: Fabrics whose devices are no GPUs (TPU, Gaudi): a few large matrix units fed from on-chip memory beside the cores,
#: and engines of the fabric's own that move data without either.
OWN_ENGINES = ("ici", "roce")
#: Fractions of peak where the catalog has no published figure; every use is flagged.
DEFAULT_EFFICIENCY = {"gemm": 0.70, "memory": 0.70, "attention_fwd": 0.55, "attention_bwd": 0.45}


def efficiency(device: Device, name: str) -> tuple[float, bool]:
    """(fraction of peak that typical kernels of a class reach, published?)."""
    value = getattr(device.efficiency, name) if device.efficiency is not None else None
    if value is None:
        return DEFAULT_EFFICIENCY[name], False
    return value * TYPICAL_OF_BEST[name], True


def contention(device: Device) -> float:
    """Relative slowdown of kernels while a collective is overlapped; processor cores share time instead."""
    if device.cores:
        return 0.0
    if device.comm_slowdown is not None:
        return device.comm_slowdown
    if device.scale_up in OWN_ENGINES:
        return 0.0
    return COLLECTIVE_SMS / max(COLLECTIVE_OF, device.num_sms)


def streaming_share(device: Device) -> float:
    """Share of the SMs whose own ports to the L2 carry what the device memory gives, at most 1: what a kernel that
    waits for memory needs of the device, while others have the rest."""
    return min(1.0, device.memory_gb_s * 1e9 / (device.num_sms * _l2_per_sm(device)))


#: The data type of products of single bits.
BITS = "int1"
#: What the matrix units multiply in formats whose values share scales.
ELEMENTS = {"fp8_row": "fp8", "fp8_block": "fp8", "mxfp8": "fp8", "mxfp8_mxfp4": "fp8", "nvfp4": "fp4"}


def peak_flops(device: Device, dtype: str) -> float:
    """Dense peak of the matrix units for a compute precision; fp32 means TF32-free arithmetic."""
    element = ELEMENTS.get(dtype, dtype)
    peaks = device.peak_flops
    if dtype in BIT_PRODUCTS and BITS in peaks:  # one product of bits for each pair of them
        weight, value = BIT_PRODUCTS[dtype]
        return peaks[BITS] / (weight * value)
    for name in (element, "fp8" if element == "fp4" else "", "bf16", "fp16", "fp32"):
        if name in peaks:
            return peaks[name]
    return max(peaks.values())


def supports(device: Device, dtype: str) -> bool:
    """Whether the hardware multiplies this precision."""
    element = BITS if dtype in BIT_PRODUCTS else ELEMENTS.get(dtype, dtype)
    return element in device.peak_flops


def gemm_seconds(work: Gemm, device: Device) -> float:
    """Seconds of a (batched) matrix product: the best tile and split of k, or the memory roof if higher."""
    fraction, _ = efficiency(device, "gemm")
    per_sm = peak_flops(device, work.dtype) * fraction / device.num_sms
    l2_per_sm = _l2_per_sm(device)
    element = DTYPE_BYTES[work.dtype]
    best = float("inf")
    pairs = [(*tile, 2) for tile in PAIR_TILES] if device.paired_sms else []
    tiles_of_one = (*TILES, *BIT_TILES) if work.dtype in BIT_PRODUCTS else TILES
    for tm, tn, sms in [*((*tile, 1) for tile in tiles_of_one), *pairs]:
        tiles = work.batch * ceil(work.m / tm) * ceil(work.n / tn)
        step = max(2.0 * tm * tn / per_sm, (tm * element + tn * weight_bytes(work)) / l2_per_sm) / sms
        at_once = device.num_sms // sms
        for split in (1, 2, 4, 8) if tiles < at_once and work.k >= 1024 else (1,):
            waves = ceil(tiles * split / at_once)
            seconds = waves * ceil(work.k / split) * step
            if split > 1:
                seconds += split * work.batch * work.m * work.n * 4.0 / _memory(device)
            best = min(best, seconds)
    return max(best, work.num_bytes / _memory(device)) + KERNEL_FLOOR_S


def grouped_gemm_seconds(work: GroupedGemm, device: Device) -> float:
    """Seconds of one grouped product: the tiles of all experts fill the SMs together."""
    rows = work.rows * work.imbalance / work.groups
    if work.weight_gradient:
        one = Gemm(m=work.k, n=work.n, k=max(1, round(rows)), batch=work.groups, dtype=work.dtype)
    else:
        one = Gemm(m=max(1, round(rows)), n=work.n, k=work.k, batch=work.groups, dtype=work.dtype, weights=work.weights)
    return max(gemm_seconds(one, device), work.num_bytes / _memory(device) + KERNEL_FLOOR_S)


def attention_seconds(work: AttentionCore, device: Device) -> float:
    """Seconds of a fused attention kernel.

    Its fraction of peak is published for head_dim 128 and 16 exponentials per clock and SM. Narrower heads do the same
    exponentials for fewer products, so the fraction falls, and with more exponentials per clock it rises: time per pair
    goes as head_dim + e, e = matrix FLOP per clock and SM / (4 x exponentials per clock and SM), of a backward 10 for
    its five products. Blocks of 128 queries fill the SMs in waves.
    """
    fraction, _ = efficiency(device, "attention_bwd" if work.backward else "attention_fwd")
    peak = peak_flops(device, work.dtype if work.dtype in ("fp16", "bf16", "fp32") else "bf16")
    clock = (device.clock_mhz or 1500.0) * 1e6
    per_clock = peak / (device.num_sms * clock) / (10.0 if work.backward else 4.0)
    width = (work.head_dim + work.v_head_dim) / 2
    narrow = (1 + per_clock / device.exponentials_per_clock / width) / (1 + per_clock / EXP_PER_CLOCK / 128)
    blocks = work.batch * work.heads * ceil(work.q_len / 128)
    waves = ceil(blocks / device.num_sms) * device.num_sms / blocks
    compute = work.flops / peak * max(1.0, narrow * waves / fraction)  # wide heads approach the peak, never pass it
    return max(compute, work.num_bytes / _memory(device)) + KERNEL_FLOOR_S * (3 if work.backward else 1)


def scan_seconds(work: Scan, device: Device) -> float:
    """Seconds of a scan by chunks: a few dependent kernels of small products, or the vector units token by token."""
    memory = work.num_bytes / _memory(device)
    if work.seq_len == 1:  # a fused step, on the vector units
        return max(work.flops / peak_flops(device, "fp32"), memory) + KERNEL_FLOOR_S
    if work.rule == "selective":
        compute = work.flops / (peak_flops(device, "fp32") * SCAN_OF_PEAK["selective"])
        return max(compute, memory) + KERNEL_FLOOR_S
    compute = work.flops / (peak_flops(device, "bf16") * SCAN_OF_PEAK[work.rule])
    return max(compute, memory) + SCAN_KERNELS * KERNEL_FLOOR_S


def convolution_seconds(work: Convolution, device: Device) -> float:
    """Return the seconds of a short convolution: its bytes over the reachable bandwidth, plus a kernel's start."""
    return work.num_bytes / _memory(device) + KERNEL_FLOOR_S


def near_seconds(work: Gemm | GroupedGemm | AttentionCore, device: Device) -> float:
    """Return the seconds of an operator on the processor near a device's memory: its operations or its bytes,
    whichever take longer, at the usual fractions of peaks that nobody has measured, plus a kernel's start; infinite
    for a precision that it does not compute in."""
    near = msgspec.structs.replace(device, peak_flops=device.near.peak_flops)
    if not supports(near, work.dtype):
        return inf
    attention = isinstance(work, AttentionCore)
    fraction = (
        DEFAULT_EFFICIENCY["gemm"]
        if not attention
        else DEFAULT_EFFICIENCY["attention_bwd" if work.backward else "attention_fwd"]
    )
    compute = work.flops / (peak_flops(near, work.dtype) * fraction)
    memory = work.num_bytes / (device.near.memory_gb_s * 1e9 * DEFAULT_EFFICIENCY["memory"])
    return max(compute, memory) + KERNEL_FLOOR_S


def optical_seconds(work: Gemm, device: Device) -> float:
    """Return the seconds of a product with a fixed random matrix on a device's processor of light: its operations, or
    the longer of the copies of its operand there and of its result back over PCI Express, whichever take longer, plus a
    kernel's start; infinite where there is none."""
    if device.optics is None:
        return inf
    copied = max(work.m * work.k * DTYPE_BYTES[work.dtype], work.m * work.n * work.out_bytes)
    return max(work.flops / device.optics.peak_flops, copied / (device.node.copies_gb_s * 1e9)) + KERNEL_FLOOR_S


def elementwise_seconds(work: Elementwise, device: Device) -> float:
    """Seconds of memory-bound kernels: bytes over the reachable bandwidth, plus a start per kernel."""
    return work.num_bytes / _memory(device) + work.kernels * KERNEL_FLOOR_S


def _memory(device: Device) -> float:
    return device.memory_gb_s * 1e9 * efficiency(device, "memory")[0]


def _l2_per_sm(device: Device) -> float:
    if device.scale_up in OWN_ENGINES:
        return inf
    return L2_BYTES_PER_CLOCK * (device.clock_mhz or 1500.0) * 1e6
