"""Figures of a GPU that iterations of serving are made of: products of few rows, launches, and copies to the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import torch

from meshwright.run.bench.forward import eager_s, graph_s
from meshwright.run.environment import prefer
from meshwright.run.world import World

#: Sizes of weights that a product's copies have together at least: several times what a GPU's cache keeps.
FAR_BYTES = 512 << 20
#: Kernels of a chain whose launches are timed.
CHAIN = 400


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of products by ``(m, n, k)``, of a kernel in a chain (``launch_eager_s``, ``launch_graph_s``), and of
    copies from and to pinned memory by bytes."""

    products: list[tuple[int, int, int, float]]
    launch_eager_s: float
    launch_graph_s: float
    to_device: list[tuple[int, float]]
    to_host: list[tuple[int, float]]


def figures(
    world: World, rows: Sequence[int], weights: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> dict[str, object]:
    """Measure products of so many `rows` with `weights` [n, k] in 16 bits, and copies of these `sizes`, as plain values
    of :class:`DeviceFigures`."""
    prefer()
    torch.cuda.set_device(world.device)
    with torch.no_grad():
        products = [(m, n, k, _product_s(m, n, k, world.device)) for n, k in weights for m in rows]
        x = torch.zeros(1024, device=world.device)

        def chain() -> None:
            for _ in range(CHAIN):
                x.add_(1.0)

        copies = [_copies_s(size, world.device) for size in sizes]
        found = DeviceFigures(
            products=products,
            launch_eager_s=eager_s(chain) / CHAIN,
            launch_graph_s=graph_s(chain) / CHAIN,
            to_device=[(size, there) for size, (there, _) in zip(sizes, copies, strict=True)],
            to_host=[(size, back) for size, (_, back) in zip(sizes, copies, strict=True)],
        )
    return msgspec.to_builtins(found)


def _product_s(m: int, n: int, k: int, device: torch.device) -> float:
    """Seconds of a product whose weights come from memory, not from a cache."""
    count = max(2, min(64, FAR_BYTES // (2 * n * k)))
    weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return graph_s(lambda: [torch.nn.functional.linear(x, weight) for weight in weights]) / count


def _copies_s(size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a copy of so many bytes to the device, and back."""
    host, there = (
        torch.zeros(size, dtype=torch.uint8, pin_memory=True),
        torch.zeros(size, dtype=torch.uint8, device=device),
    )
    repeats = max(3, min(50, (256 << 20) // size))
    out = []
    for source, target in ((host, there), (there, host)):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        target.copy_(source, non_blocking=True)
        marks[0].record()
        for mark in marks[1:]:
            target.copy_(source, non_blocking=True)
            mark.record()
        torch.cuda.synchronize(device)
        seconds = sorted(a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks))
        out.append(seconds[repeats // 2])
    return out[0], out[1]


__all__ = ["DeviceFigures", "figures"]
