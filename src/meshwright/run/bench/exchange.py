"""Micro-benchmarks of exchanges between the processes of this machine: collectives, and fully sharded parameters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.distributed as dist

from meshwright.run.bench.clock import BenchClock, TimedRepeats, mean
from meshwright.run.bench.operands import Operands
from meshwright.run.bench.scope import BenchScope
from meshwright.run.collect import gather_async, reduce_scatter_async
from meshwright.run.environment import prefer
from meshwright.run.fsdp import sharded_unit
from meshwright.run.mesh import AxisGroup
from meshwright.run.world import World

#: Work between two collectives of a step, seconds on a core of its own.
BETWEEN_S = 2e-3
#: A difference of two times is at least this share of the longer one: repeats differ by more than that, so nothing
#: smaller can be told apart from nothing.
LEAST = 0.02
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
#: Parameters of a unit of fully sharded ones: those of a Llama's layer.
STAGED_PARAMETERS = 9


def collectives(
    world: World, scope: BenchScope, progress: Callable[[str, int, int], None]
) -> dict[str, list[TimedRepeats]]:
    """Every operation at every size between the ranks of this job, by ``op ranks``."""
    prefer()
    title, total = f"collectives between {world.size} processes", len(OPS) * len(scope.collective_bytes)
    clock = BenchClock(world)
    group = AxisGroup(name="world", ranks=tuple(range(world.size)), index=world.rank, handle=dist.group.WORLD)
    out: dict[str, list[TimedRepeats]] = {}
    pool = Operands(clock.device, torch.float32, scope.pool_bytes)
    work = _work(clock, pool)
    for op in OPS:
        for size in scope.collective_bytes:
            if world.first:
                progress(title, sum(map(len, out.values())), total)
            run = _after(work, _collective(op, int(size), group, pool))
            count = scope.exchange_calls[size >= 1e6]
            clock.once(run, 2)
            pairs = [(clock.both(work, count), clock.both(run, count)) for _ in range(scope.exchange_repeats)]
            cost, busy = (_beyond(world, [(without[i], with_[i]) for without, with_ in pairs]) for i in (0, 1))
            spread = mean([with_[0] for _, with_ in pairs]).spread
            out.setdefault(f"{op} {world.size}", []).append(TimedRepeats(cost, spread, busy))
    if world.first:
        progress(title, total, total)
    return msgspec.to_builtins(out)


def _work(clock: BenchClock, pool: Operands) -> Callable[[], None]:
    """A piece of a layer, on memory as far away as a step's: about as long as there is between two collectives, and
    equally long on all ranks, as unequal work would be waited for in the collectives."""
    operands = itertools.cycle(pool.sets([(256, 512), (512, 512)], [(256, 512)]))

    def piece() -> None:
        a, b, out = next(operands)
        torch.nn.functional.silu(torch.mm(a, b, out=out), inplace=True)

    pieces = torch.tensor([max(1, int(BETWEEN_S / clock.time(piece).seconds))], device=clock.device)
    dist.broadcast(pieces, 0)
    count = int(pieces)

    def work() -> None:
        for _ in range(count):
            piece()

    return work


def _after(work: Callable[[], object], run: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        work()
        run()

    return both


def _beyond(world: World, pairs: list[tuple[float, float]]) -> float:
    """Return the seconds by which the second of each pair is longer than the first: the median over repeats, the mean
    over ranks; at least the share :data:`LEAST` of the second, below which nothing can be told from noise."""
    without, with_ = (torch.tensor([p[i] for p in pairs], dtype=torch.float64) for i in (0, 1))
    found = torch.stack([(with_ - without).median(), LEAST * with_.median()])
    on_device = found.to(torch.float32).to(world.device)
    dist.all_reduce(on_device)
    return max(on_device.tolist()) / world.size


def staging(world: World, scope: BenchScope) -> dict[str, list[TimedRepeats]]:
    """Measure the processor time of a rank for each unit of fully sharded parameters: copies of shards into buffers,
    buffers into parameters and gradients into buffers, and torch's own bookkeeping.

    Gathers are timed by themselves. The time of a reduction is that of a forward and backward, less one with whole
    parameters, less its two gathers."""
    prefer()
    group = AxisGroup(name="world", ranks=tuple(range(world.size)), index=world.rank, handle=dist.group.WORLD)
    out: dict[str, list[TimedRepeats]] = {"gather": [], "reduce": []}
    for size in scope.staged_bytes:
        width = max(1, int(size) // 4 // STAGED_PARAMETERS)
        plain, sharded = (_Unit(width).to(world.device) for _ in range(2))
        unit = sharded_unit(sharded, group)
        x = torch.ones(width, device=world.device, requires_grad=True)

        def step(module: torch.nn.Module, x: torch.Tensor = x) -> None:
            module(x).backward()
            for parameter in module.parameters():
                parameter.grad = None

        def gather(unit=unit) -> None:
            unit.unshard()
            unit.reshard()

        runs = (lambda plain=plain: step(plain), lambda unit=unit: step(unit), gather)
        timed = [mean([_own(run) for _ in range(scope.staged_repeats)][2:]) for run in runs]
        whole, cut, gathers = (t.seconds for t in timed)
        cost = torch.tensor([gathers, max(cut - whole - 2 * gathers, LEAST * cut)])
        dist.all_reduce(cost)
        for name, seconds in zip(out, (cost / world.size).tolist(), strict=True):
            out[name].append(TimedRepeats(seconds, max(t.spread for t in timed)))
    return msgspec.to_builtins(out)


def _own(run: Callable[[], object]) -> float:
    """Seconds of this thread's processor time."""
    begun = time.thread_time()
    run()
    return time.thread_time() - begun


class _Unit(torch.nn.Module):
    """As many parameters as a layer has, each read once forward and written a gradient of once backward."""

    def __init__(self, width: int):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.ones(width) for _ in range(STAGED_PARAMETERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(torch.dot(x, w) for w in self.weights)


def _collective(op: str, size: int, group: AxisGroup, pool: Operands) -> Callable[[], object]:
    """A collective of `size` bytes as nccl-tests counts them; each time from and to other memory."""
    n = group.size
    whole, shard = (max(1, size // 4 // n) * n,), (max(1, size // 4 // n),)

    def each(*given: tuple[int, ...], into: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
        return itertools.cycle(pool.sets(given, [into]))

    if op == "all_reduce":  # zeros stay what they are
        sums = each(into=whole)
        return lambda: dist.all_reduce(next(sums)[0])
    operands = each(shard if op == "all_gather" else whole, into=shard if op == "reduce_scatter" else whole)

    def run() -> None:
        given, out = next(operands)
        if op == "all_gather":
            gather_async(out, given, group).wait()
        elif op == "reduce_scatter":
            reduce_scatter_async(out, given, group).wait()
        elif op == "all_to_all":
            dist.all_to_all_single(out, given)
        else:  # to the next rank while the one before sends here: as pipeline ranks do
            works = [dist.isend(given, (group.index + 1) % n), dist.irecv(out, (group.index - 1) % n)]
            for work in works:
                work.wait()

    return run
