"""Micro-benchmarks of this machine, as ``meshwright calibrate --here`` asks for them.

Every core runs the same work at the same time, as ranks do: what two cores share (memory, caches, clocks) is in the
figures. Each is the mean of repeats after a warm-up, because a step is a sum of many such operations and feels their
mean. Layers are timed as the executor runs them, which is where host times come from. On the CPU the time of what
computes is that of the processor, which other work on the machine does not lengthen.

Collectives are timed between 2 ranks and more, also more than there are cores, and between products as in a step: what
it costs to wait for the slower of ranks that do not keep time exactly, and to wake up again, is part of a collective.
Beside the time that passes stands the processor's time that a rank spends in it, on all its threads: ranks that share
cores wait for each other's processor time, and while a collective waits its core is free for others.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from math import log2

import msgspec
import torch
import torch.distributed as dist

from meshwright.run import bench_operators
from meshwright.run.attention import attend
from meshwright.run.bench_clock import REPEATS, Bench, Clock, Timed, mean
from meshwright.run.bench_exchange import COLLECTIVE_BYTES, OPS, STAGED_BYTES, collectives, staging
from meshwright.run.bench_model import (
    LAYERS,
    MICROBATCHES,
    STEPS,
    VOCAB,
    Layer,
    PassTimes,
    TimedModel,
    model_of,
    plan_of,
    train_of,
)
from meshwright.run.bench_operands import Pool, kept
from meshwright.run.environment import num_cores, only_cores, prefer
from meshwright.run.launch import World, start
from meshwright.run.mesh import Group
from meshwright.run.record import ResidentBytes
from meshwright.run.settings import DTYPES

#: Rows of products, and their columns and depths: dense where models of a laptop's size lie, with some that are no
#: powers of two, which fill vector registers otherwise (a line from power to power is up to a tenth too high there).
GEMM_M = (64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
GEMM_NK = (64.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 2048.0)
#: Products of more operations say nothing new on a core.
LARGEST_FLOPS = 1e9
#: Results of attention that are kept, so that new ones go elsewhere: several times what a core keeps near.
KEPT_BYTES = 32 << 20
ATTENTION = ((4.0, 8.0, 16.0, 64.0), (32.0, 128.0, 256.0, 512.0, 2048.0), (16.0, 32.0, 64.0, 128.0))
LARGEST_SCORES = 5e6
ELEMENTWISE = tuple(4.0**e for e in range(5, 14))


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, as plain numbers; grids are this module's constants. ``collectives`` by ``op ranks``;
    ``staging``: what fully sharded parameters cost a rank's processor beside their exchange, ``gather`` and ``reduce``
    by bytes; ``operators``: memory-bound operators of a model as the executor runs them, by name; ``base_bytes``: the
    memory of a rank beside its tensors; ``crowding``: what taking turns on a core costs
    (:func:`_crowding`)."""

    kind: str
    cores: int
    memory_bytes: int
    name: str
    dtypes: tuple[str, ...]
    gemm: dict[str, list[Timed]]
    attention: dict[str, list[Timed]]
    attention_backward: dict[str, list[Timed]]
    elementwise: list[Timed]
    operators: dict[str, list[Timed]]
    collectives: dict[str, list[Timed]]
    staging: dict[str, list[Timed]]
    passes: list[PassTimes]
    comm_slowdown: float
    base_bytes: float
    seconds: float
    crowding: float = 0.0


def measure(*, device: str = "auto", most_ranks: int = 8, say: Callable[[str], None] = lambda _: None) -> Machine:
    """Time this machine: its kernels on all cores at once, collectives between 2 to `most_ranks` processes, layers.

    Raises:
        RankDied: L001 when one of the processes ended.
    """
    begun = time.perf_counter()
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    cores = torch.cuda.device_count() if kind == "cuda" else num_cores()
    busy = min(cores, 8)
    say(f"kernels and layers on {busy} {'GPU' if kind == 'cuda' else 'core'}{'s' * (busy != 1)}")
    kernels = start(_kernels, num_ranks=busy, device=kind)
    exchanges: dict[str, list[Timed]] = {}
    base = start(_base, num_ranks=busy, device=kind)
    say("fully sharded layers between 2 processes")
    # on a GPU a stream of its own hides the copies
    staged = start(staging, num_ranks=2, device=kind) if kind == "cpu" else {}
    ranks = 2
    while ranks <= (min(most_ranks, cores) if kind == "cuda" else most_ranks):
        say(f"collectives between {ranks} processes")
        exchanges |= msgspec.convert(start(collectives, num_ranks=ranks, device=kind), dict[str, list[Timed]])
        ranks *= 2
    crowding = 0.0
    if kind == "cpu" and 1 < cores < most_ranks:
        say("more processes than cores")
        with only_cores(2):
            crowding = start(_crowding, num_ranks=8, device=kind)
    found = msgspec.convert(kernels, dict[str, object])
    return msgspec.convert(
        found
        | {"collectives": exchanges, "staging": staged, "cores": cores, "kind": kind}
        | {"crowding": crowding}
        | {"base_bytes": base, "seconds": time.perf_counter() - begun},
        Machine,
        strict=False,
    )


def _kernels(world: World) -> dict[str, object]:
    prefer()  # what is measured is this machine without other work
    clock = Clock(world)
    dtypes = ("bf16", "fp32") if world.device.type == "cuda" else ("fp32",)
    out: dict[str, object] = {"dtypes": dtypes, "memory_bytes": _memory(world.device), "name": _name(world.device)}
    pools = {d: Pool(clock.device, DTYPES[d]) for d in ("fp32", *dtypes)}
    benches: dict[tuple[str, str], list[Bench]] = {("elementwise", ""): list(_elementwise(pools["fp32"]))}
    for d in dtypes:
        benches["gemm", d] = list(_gemms(pools[d]))
        benches["attention", d] = list(_attentions(pools[d], backward=False))
        benches["attention_backward", d] = list(_attentions(pools[d], backward=True))
    for name, many in bench_operators.benches(clock.device, DTYPES[dtypes[0]]).items():
        benches["operators", name] = many
    models = [TimedModel(clock, layer, dtypes[0]) for layer in LAYERS]
    rounds: dict[tuple[str, str], list[list[float]]] = {key: [] for key in benches}
    for _ in range(REPEATS):
        for key, many in benches.items():
            rounds[key].append(clock.around(many))
        for model in models:
            model.around()
    for (kind, name), seconds in rounds.items():
        timed = [mean(repeats) for repeats in zip(*seconds, strict=True)]
        if name:
            out.setdefault(kind, {})[name] = timed
        else:
            out[kind] = timed
    # on the CPU exchanges and products share cores, and the time of both is known
    out["comm_slowdown"] = _slowdown(clock, world) if world.device.type == "cuda" else 0.0
    out["passes"] = [model.times() for model in models]
    return msgspec.to_builtins(out)


def _gemms(pool: Pool) -> Iterable[Bench]:
    """Every point of the grid; a product too large to time grows from the one before it along m."""
    for m in GEMM_M:
        for n in GEMM_NK:
            for k in GEMM_NK:
                scale = 1
                while 2.0 * m * n * k > LARGEST_FLOPS * scale and m > 16 * scale and pool.device.type == "cpu":
                    scale *= 2
                yield Bench(partial(_product, int(m) // scale, int(n), int(k), pool), scale)


def _product(m: int, n: int, k: int, pool: Pool) -> Callable[[], object]:
    """Results go into memory that is there: a step's allocations are used again, those of a loop may be given back."""
    operands = itertools.cycle(pool.sets([(m, k), (n, k)], [(m, n)]))

    def product() -> None:
        left, right, result = next(operands)
        torch.mm(left, right.T, out=result)

    return product


def _attentions(pool: Pool, *, backward: bool) -> Iterable[Bench]:
    for heads in ATTENTION[0]:
        for tokens in ATTENTION[1]:
            for width in ATTENTION[2]:
                h, s, d, scale = int(heads), int(tokens), int(width), 1
                while h * s * s > LARGEST_SCORES and h > 1:
                    h, scale = h // 2, scale * 2
                yield Bench(partial(_core, h, s, d, pool, backward), scale)


def _core(h: int, s: int, d: int, pool: Pool, backward: bool) -> Callable[[], object]:
    lone = Group(name="cp", ranks=(0,), index=0)
    operands = pool.sets([(1, s, h, d)] * (4 if backward else 3))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, cp=lone, algorithm="ring")

    if not backward:
        inputs = itertools.cycle(operands)
        return kept(torch.no_grad()(lambda: (forward(*next(inputs)),)), KEPT_BYTES)
    done = [(forward(*(x.requires_grad_() for x in inputs)), inputs, grad) for *inputs, grad in operands]
    again = itertools.cycle(done)

    def gradients() -> tuple[torch.Tensor, ...]:
        out, inputs, grad = next(again)
        return torch.autograd.grad(out, inputs, grad, retain_graph=True)

    return kept(gradients, KEPT_BYTES)


def _elementwise(pool: Pool) -> Iterable[Bench]:
    """One kernel that reads two tensors and writes a third: so many bytes in all."""

    def make(size: float) -> Callable[[], object]:
        shape = (max(1, int(size / 12)),)
        operands = itertools.cycle(pool.sets([shape, shape], [shape]))

        def kernel() -> None:
            x, y, out = next(operands)
            torch.mul(x, y, out=out)

        return kernel

    return [Bench(partial(make, size)) for size in ELEMENTWISE]


def _slowdown(clock: Clock, world: World) -> float:
    """Share of its speed that a core loses to products while an all-reduce runs beside them."""
    if world.size == 1:
        return 0.0
    a, b = torch.randn(256, 512, device=world.device), torch.randn(512, 512, device=world.device)
    buffer = torch.randn(4 << 20, device=world.device)
    count = max(1, int(0.02 / clock.time(lambda: a @ b).seconds))
    shares = []
    for _ in range(REPEATS):
        clock.together()
        plain = clock.once(lambda: a @ b, count)
        clock.together()
        begun = time.perf_counter()
        dist.all_reduce(buffer)
        clock.sync()
        reducing = time.perf_counter() - begun
        clock.together()
        work = dist.all_reduce(buffer, async_op=True)
        begun = time.perf_counter()
        beside = clock.once(lambda: a @ b, max(count, int(2 * reducing / plain)))
        both = time.perf_counter() - begun
        work.wait()
        # what the products took longer than alone, over the time the exchange was under way
        shares.append((both - both * plain / beside) / reducing)
    found = torch.tensor([sorted(shares)[len(shares) // 2]], device=world.device)
    dist.all_reduce(found)
    return float(min(1.0, max(0.0, float(found) / world.size)))


def _crowding(world: World) -> float:
    """The share by which a step of a model takes longer for every doubling of the ranks on two cores, each of which has
    a model of its own."""
    prefer()
    clock = Clock(world)
    model = TimedModel(clock, LAYERS[len(LAYERS) // 2], "fp32")
    model.around()
    shares = []
    for _ in range(REPEATS):
        busy = []
        for turn in (range(2), range(world.size)):
            clock.together()
            if world.rank in turn:
                busy.append(clock.once(lambda: model.trainer.step(model.batch()), STEPS))
        if world.rank < 2:
            shares.append(busy[1] / busy[0] - 1)
    found = torch.tensor(shares or [0.0]).median()
    dist.all_reduce(found)
    return max(0.0, float(found) / 2 / log2(world.size / 2))


def _base(world: World) -> float:
    """Memory of a rank that has trained the smallest model, beside its tensors."""
    model = TimedModel(Clock(world), min(LAYERS, key=lambda layer: layer.hidden * layer.layers), "fp32")
    model.trainer.step(model.batch())
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        return float(total - free - torch.cuda.memory_reserved(world.device))
    held = sum(piece.values.nbytes for piece in model.trainer.pieces())
    return float(ResidentBytes()() - held)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "processor"


__all__ = [
    "ATTENTION", "COLLECTIVE_BYTES", "ELEMENTWISE", "GEMM_M", "GEMM_NK", "LAYERS", "MICROBATCHES", "OPS",
    "REPEATS", "STAGED_BYTES", "VOCAB", "Layer", "Machine", "PassTimes", "Timed", "mean", "measure", "model_of",
    "plan_of", "train_of",
]  # fmt: skip
