"""Kinds of work that take turns in one run on joined processes, and what their times say of each other.

What disturbs a round disturbs all kinds in it, so that ratios are those of rounds. A turn leaves caches and memory as
it found use for them: kinds come in orders that even that out (:func:`orders`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import comb
from statistics import median
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from meshwright.run.mesh import ProcessMesh
from meshwright.spec.workload import Train

CONFIDENCE = 0.95

Seen = TypeVar("Seen")
Times = dict[str, list[float]]
"""Seconds of every counted turn, by kind."""


class Ratio(msgspec.Struct, frozen=True):
    """A ratio's median and interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(above: list[float], below: list[float], confidence: float = CONFIDENCE) -> Ratio:
    """Median of the rounds' ratios, between the innermost order statistics that hold the true median with this
    confidence, whatever the distribution (Thompson 1936): with n rounds, the k-th from either end with probability
    1 - 2 P(Binomial(n, 1/2) < k). With fewer than 6 rounds none does at 95%, and the ends are those of the rounds."""
    found = sorted(a / b for a, b in zip(above, below, strict=True))
    n, k, outside = len(found), 0, 0.0
    while k < n // 2 and (outside := outside + 2 * comb(n, k) / 2**n) <= 1 - confidence:
        k += 1
    k = max(k, 1)
    return Ratio(median(found), found[k - 1], found[n - k])


def orders(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """As few orders of n kinds as let each come at each place, and right after each other one, equally often: n of
    them, 2 n where n is odd (Williams, "Experimental designs balanced for the estimation of residual effects of
    treatments", 1949)."""
    n = len(kinds)
    first = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]  # 0, 1, n - 1, 2, n - 2, ...
    rows = [[(place + shift) % n for place in first] for shift in range(n)]
    if n % 2:
        rows += [row[::-1] for row in rows]
    return [tuple(kinds[i] for i in row) for row in rows]


def sequences(train: Train, vocab: int, mesh: ProcessMesh, number: int) -> torch.Tensor:
    """This rank's of a batch of random tokens that `number` says, [global_batch / dp, seq_len + 1]."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, vocab, (train.global_batch, train.seq_len + 1), generator=generator)
    return tokens.chunk(mesh["dp"].size)[mesh["dp"].index]


def take_turns(
    kinds: Mapping[str, Callable[[torch.Tensor], Seen]],
    batch: Callable[[int], torch.Tensor],
    *,
    repeats: int,
    warmup: int,
    check: Callable[[dict[str, Seen]], None] = lambda seen: None,
) -> dict[str, tuple[list[float], list[float]]]:
    """Elapsed and processor seconds of every counted turn of this process, by kind. A turn is one of `kinds` on the
    batch of its round; `check` is given what all of a round returned."""
    out: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in kinds}
    rows = orders(tuple(kinds))
    for number in range(-warmup, repeats):
        mine, seen = batch(number + warmup), {}
        for kind in rows[number % len(rows)]:
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            seen[kind] = kinds[kind](mine)
            if number >= 0:
                out[kind][0].append(time.perf_counter() - began)
                out[kind][1].append(time.process_time() - worked)
        check(seen)
    return out


def together(found: Sequence[Mapping[str, tuple[list[float], list[float]]]]) -> tuple[Times, Times]:
    """Of what all processes measured: elapsed seconds on the slowest, and processor seconds on all of them."""
    elapsed = {kind: [max(ranks) for ranks in zip(*(f[kind][0] for f in found))] for kind in found[0]}
    return elapsed, {kind: [sum(ranks) for ranks in zip(*(f[kind][1] for f in found))] for kind in found[0]}
