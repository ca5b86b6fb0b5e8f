"""Operands of micro-benchmarks: memory as far away as a step finds it.

A step goes through far more memory than a core keeps near: what a kernel reads was written by the one before it or a
pass ago, and what it writes goes to memory that was last touched a pass or a step ago. A loop over one set of operands
times a cache instead, and the tables of a core's address translation, which cover a few MiB: on one processor
memory-bound operators took up to twice as long in a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch

#: Bytes that a benchmark's operands go through on a GPU before any is used again: several times what its second-level
#: cache keeps. On a processor the scope says how many: several times what a core keeps.
CUDA_BYTES = 256 << 20
#: Sets of operands at most: a model whose tensors are small has few enough that they stay near a core.
MOST_SETS = 256
#: Operands begin where a vector register and a line of a cache do.
ALIGNED = 64


class Operands:
    """Memory of one type that benchmarks read, and as much that they write."""

    def __init__(self, device: torch.device, dtype: torch.dtype, cpu_bytes: int):
        self.num_bytes = CUDA_BYTES if device.type == "cuda" else cpu_bytes
        self.device, self.dtype = device, dtype
        self.read = self.written = torch.empty(0)

    def sets(
        self, read: Sequence[tuple[int, ...]], written: Sequence[tuple[int, ...]] = ()
    ) -> list[tuple[torch.Tensor, ...]]:
        """Tensors of these shapes, those to read before those to write, as often as the pool has room: to be used in
        turn. What is to be read is standard normal, and nothing that is to be written is among it."""
        reading, writing = ([_length(shape, self.dtype) for shape in shapes] for shapes in (read, written))
        each = max(sum(reading), sum(writing))
        count = max(1, min(MOST_SETS, self.num_bytes // (sum(reading + writing) * self.dtype.itemsize)))
        if len(self.read) < count * each:
            self.read = torch.randn(count * each, device=self.device).to(self.dtype)
            self.written = torch.zeros_like(self.read)
        return [
            (
                *_tensors(self.read, number * sum(reading), read, reading),
                *_tensors(self.written, number * sum(writing), written, writing),
            )
            for number in range(count)
        ]


def kept(run: Callable[[], tuple[torch.Tensor, ...]], num_bytes: int) -> Callable[[], None]:
    """`run`, the last of its results kept, `num_bytes` in all: new ones go to memory that was not just used."""
    results: deque[tuple[tuple[torch.Tensor, ...], int]] = deque()
    held = 0

    def keeping() -> None:
        nonlocal held
        found = run()
        size = sum(x.nbytes for x in found)
        results.append((found, size))
        held += size
        while held > num_bytes or len(results) > MOST_SETS:
            held -= results.popleft()[1]

    return keeping


def _tensors(
    memory: torch.Tensor, at: int, shapes: Sequence[tuple[int, ...]], lengths: Sequence[int]
) -> Iterator[torch.Tensor]:
    for shape, length in zip(shapes, lengths, strict=True):
        yield memory.narrow(0, at, prod(shape)).view(shape)
        at += length


def _length(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Elements that a tensor takes in a pool."""
    each = max(1, ALIGNED // dtype.itemsize)
    return -(-prod(shape) // each) * each
