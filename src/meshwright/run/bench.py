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

import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from meshwright.plan import Pipeline, Plan
from meshwright.run.attention import attend
from meshwright.run.collect import gather_async, reduce_scatter_async
from meshwright.run.data import Batch
from meshwright.run.fsdp import sharded_unit
from meshwright.run.launch import World, start
from meshwright.run.mesh import Group, alone
from meshwright.run.record import Off, Recorder, Recording, install
from meshwright.run.settings import DTYPES, Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

REPEATS = 5
#: One repeat of a short operation runs it until so much time has gone by.
SPAN_S = 20e-3
#: Work between two collectives of a step, seconds on a core of its own.
BETWEEN_S = 2e-3
GEMM_M, GEMM_NK = (16.0, 64.0, 256.0, 1024.0, 4096.0), (32.0, 128.0, 512.0, 2048.0)
#: Products of more operations than a core does in about a fifth of a second say nothing new.
LARGEST_FLOPS = 4e9
ATTENTION = ((4.0, 16.0, 64.0), (32.0, 128.0, 512.0, 2048.0), (16.0, 32.0, 64.0, 128.0))
LARGEST_SCORES = 2e7
ELEMENTWISE = tuple(4.0**e for e in range(5, 14))
COLLECTIVE_BYTES = tuple(4.0**e for e in range(4, 13))
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
#: Units of fully sharded parameters: bytes, parameters of each (those of a Llama's layer), repeats.
STAGED_BYTES, STAGED_PARAMETERS, STAGED_REPEATS = tuple(4.0**e for e in range(7, 14)), 9, 12


class Layer(NamedTuple):
    """A small model whose passes are timed: `gated` is Llama's shape, else GPT's."""

    hidden: int
    ffn: int
    heads: int
    gated: bool
    seq: int
    microbatch: int


LAYERS = (
    Layer(64, 176, 4, True, 64, 1),
    Layer(128, 344, 4, True, 128, 1),
    Layer(256, 688, 4, True, 128, 2),
    Layer(256, 1024, 8, False, 256, 1),
    Layer(384, 1024, 6, True, 256, 2),
    Layer(512, 2048, 8, False, 256, 2),
    Layer(128, 512, 4, False, 64, 2),
)
LAYERS_EACH, MICROBATCHES = 3, 4
VOCAB = 1024


class Timed(msgspec.Struct, frozen=True):
    """Mean seconds of the repeats, their interquartile range over the median and, of a collective, the seconds that a
    rank's processor was busy with it."""

    seconds: float
    spread: float
    busy: float = 0.0


class PassTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor took for one model on one core, seconds: a forward, a backward (both of a microbatch through
    the whole model), the optimizer."""

    layer: Layer
    forward: Timed
    backward: Timed
    optimizer: Timed
    step: Timed


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, as plain numbers; grids are this module's constants. ``collectives`` by ``op ranks``;
    ``staging``: what fully sharded parameters cost a rank's processor beside their exchange, ``gather`` and ``reduce``
    by bytes."""

    kind: str
    cores: int
    memory_bytes: int
    name: str
    dtypes: tuple[str, ...]
    gemm: dict[str, list[Timed]]
    attention: dict[str, list[Timed]]
    attention_backward: dict[str, list[Timed]]
    elementwise: list[Timed]
    collectives: dict[str, list[Timed]]
    staging: dict[str, list[Timed]]
    passes: list[PassTimes]
    comm_slowdown: float
    seconds: float


def measure(*, device: str = "auto", most_ranks: int = 8, say: Callable[[str], None] = lambda _: None) -> Machine:
    """Time this machine: its kernels on all cores at once, collectives between 2 to `most_ranks` processes, layers.

    Raises:
        RankDied: L001 when one of the processes ended.
    """
    begun = time.perf_counter()
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    cores = torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1
    busy = min(cores, 8)
    say(f"kernels and layers on {busy} {'GPU' if kind == 'cuda' else 'core'}{'s' * (busy != 1)}")
    kernels = start(_kernels, num_ranks=busy, device=kind)
    collectives: dict[str, list[Timed]] = {}
    say("fully sharded layers between 2 processes")
    staging = start(_staging, num_ranks=2, device=kind) if kind == "cpu" or cores > 1 else {}
    ranks = 2
    while ranks <= (min(most_ranks, cores) if kind == "cuda" else most_ranks):
        say(f"collectives between {ranks} processes")
        collectives |= msgspec.convert(start(_collectives, num_ranks=ranks, device=kind), dict[str, list[Timed]])
        ranks *= 2
    found = msgspec.convert(kernels, dict[str, object])
    return msgspec.convert(
        found
        | {"collectives": collectives, "staging": staging, "cores": cores, "kind": kind}
        | {"seconds": time.perf_counter() - begun},
        Machine,
        strict=False,
    )


def _kernels(world: World) -> dict[str, object]:
    clock = _Clock(world)
    dtypes = ("bf16", "fp32") if world.device.type == "cuda" else ("fp32",)
    out: dict[str, object] = {"dtypes": dtypes, "memory_bytes": _memory(world.device), "name": _name(world.device)}
    out["gemm"] = {d: list(_gemms(clock, DTYPES[d])) for d in dtypes}
    out["attention"] = {d: list(_attentions(clock, DTYPES[d], backward=False)) for d in dtypes}
    out["attention_backward"] = {d: list(_attentions(clock, DTYPES[d], backward=True)) for d in dtypes}
    out["elementwise"] = list(_elementwise(clock))
    # on the CPU exchanges and products share cores, and the time of both is known
    out["comm_slowdown"] = _slowdown(clock, world) if world.device.type == "cuda" else 0.0
    out["passes"] = [_passes(clock, layer, dtypes[0]) for layer in LAYERS]
    return msgspec.to_builtins(out)


class _Clock:
    """Times functions on all processes of a job at once."""

    def __init__(self, world: World):
        self.world, self.device = world, world.device
        self.now = time.perf_counter if self.device.type == "cuda" else time.process_time

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def together(self) -> None:
        """All processes go on from here at about the same time."""
        self.sync()
        if self.world.size > 1:
            dist.barrier()

    def once(self, run: Callable[[], object], count: int) -> float:
        self.sync()
        begun = self.now()
        for _ in range(count):
            run()
        self.sync()
        return (self.now() - begun) / count

    def both(self, run: Callable[[], object], count: int) -> tuple[float, float]:
        """Seconds of a call: those that pass, and those of this process's processor time."""
        self.together()
        begun, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            run()
        self.sync()
        return (time.perf_counter() - begun) / count, (time.process_time() - busy) / count

    def time(self, run: Callable[[], object], *, count: int = 0) -> Timed:
        """Mean over the repeats of `count` calls each (0: as many as fill a span)."""
        self.once(run, 2)
        count = count or max(1, int(SPAN_S / max(self.once(run, 1), 1e-7)))
        self.together()
        return mean([self.once(run, count) for _ in range(REPEATS)])


def mean(seconds: Iterable[float]) -> Timed:
    """Of the repeats, without the slowest tenth: what a machine does once in a while is no part of an operation."""
    ordered = sorted(seconds)
    kept = ordered[: max(1, len(ordered) - len(ordered) // 10)]
    spread = ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]
    return Timed(sum(kept) / len(kept), spread / ordered[len(ordered) // 2])


def _gemms(clock: _Clock, dtype: torch.dtype) -> Iterable[Timed]:
    """Every point of the grid; a product too large to time grows from the one before it along m."""
    for m in GEMM_M:
        for n in GEMM_NK:
            for k in GEMM_NK:
                m_, n_, k_ = int(m), int(n), int(k)
                scale = 1
                while 2.0 * m_ * n_ * k_ > LARGEST_FLOPS and m_ > 16 and clock.device.type == "cpu":
                    m_, scale = m_ // 2, scale * 2
                a = torch.randn(m_, k_, device=clock.device).to(dtype)
                b = torch.randn(n_, k_, device=clock.device).to(dtype)
                # into memory that is there: a step's allocations are used again, those of a loop may be given back
                out = a @ b.T
                found = clock.time(lambda a=a, b=b, out=out: torch.mm(a, b.T, out=out))
                yield Timed(found.seconds * scale, found.spread)


def _attentions(clock: _Clock, dtype: torch.dtype, *, backward: bool) -> Iterable[Timed]:
    lone = Group(name="cp", ranks=(0,), index=0)
    for heads in ATTENTION[0]:
        for tokens in ATTENTION[1]:
            for width in ATTENTION[2]:
                h, s, d, scale = int(heads), int(tokens), int(width), 1
                while h * s * s > LARGEST_SCORES and h > 1:
                    h, scale = h // 2, scale * 2
                q, k, v = (
                    torch.randn(1, s, h, d, device=clock.device).to(dtype).requires_grad_(backward) for _ in range(3)
                )

                def forward(q=q, k=k, v=v) -> torch.Tensor:
                    return attend(q, k, v, cp=lone, algorithm="ring")

                if not backward:
                    with torch.no_grad():
                        found = clock.time(forward)
                else:
                    out = forward()
                    grad = torch.randn_like(out)
                    found = clock.time(
                        lambda out=out, grad=grad, q=q, k=k, v=v: torch.autograd.grad(
                            out, (q, k, v), grad, retain_graph=True
                        )
                    )
                yield Timed(found.seconds * scale, found.spread)


def _elementwise(clock: _Clock) -> Iterable[Timed]:
    """One kernel that reads two tensors and writes a third: so many bytes in all."""
    for size in ELEMENTWISE:
        x = torch.randn(max(1, int(size / 12)), device=clock.device)
        y = torch.randn_like(x)
        out = x * y
        yield clock.time(lambda x=x, y=y, out=out: torch.mul(x, y, out=out))


def _slowdown(clock: _Clock, world: World) -> float:
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


def _passes(clock: _Clock, layer: Layer, dtype: str) -> PassTimes:
    """One model trained by the executor for a few steps on every core, each for itself."""
    model = transformer(
        layers=LAYERS_EACH, hidden=layer.hidden, heads=layer.heads, vocab=VOCAB, ffn=layer.ffn, gated=layer.gated,
        max_seq_len=layer.seq,
    )  # fmt: skip
    train = Train(global_batch=MICROBATCHES * layer.microbatch, seq_len=layer.seq, dtype=dtype)
    mesh = alone(device=clock.device)
    plan = msgspec.structs.replace(mesh.plan, pipeline=Pipeline(microbatch=layer.microbatch))
    trainer = Trainer(model, plan, train, mesh, settings=Settings())
    record = Recorder(device=clock.device, warmup=2, now=time.process_time_ns)
    install(record)
    steps = []
    for step in range(2 + 2 * REPEATS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (train.global_batch, layer.seq + 1), generator=generator)
        clock.together()
        begun = clock.now()
        trainer.step(Batch(tokens, None))
        clock.sync()
        steps.append(clock.now() - begun)
    install(Off())
    spans = record.recording()
    return PassTimes(
        layer=layer,
        forward=mean(_seconds(spans, "F")),
        backward=mean(_seconds(spans, "BW")),
        optimizer=mean(_seconds(spans, "optimizer")),
        step=mean(steps[2:]),
    )


def _seconds(spans: Recording, kind: str) -> list[float]:
    """Durations of every span of a kind on the compute queue."""
    wanted = [i for i, said in enumerate(spans.labels) if said.kind == kind and said.queue == "compute"]
    chosen = [i for i, label in enumerate(spans.label.tolist()) if label in wanted]
    return ((spans.end_ns[chosen] - spans.start_ns[chosen]) * 1e-9).tolist()


def plan_of(layer: Layer) -> Plan:
    """The plan a timed model ran."""
    return msgspec.structs.replace(alone().plan, pipeline=Pipeline(microbatch=layer.microbatch))


def _collectives(world: World) -> dict[str, list[Timed]]:
    clock = _Clock(world)
    group = Group(name="world", ranks=tuple(range(world.size)), index=world.rank, handle=dist.group.WORLD)
    out: dict[str, list[Timed]] = {}
    a, b = torch.randn(256, 512, device=world.device), torch.randn(512, 512, device=world.device)
    products = max(1, int(BETWEEN_S / clock.time(lambda: a @ b).seconds * min(1.0, world.size / world.local_size)))

    def work() -> None:
        for _ in range(products):
            a @ b

    for op in OPS:
        for size in COLLECTIVE_BYTES:
            run = _collective(op, int(size), group, world.device)
            count = 10 if size < 1e6 else 4

            def both(run: Callable[[], object] = run) -> None:
                work()
                run()

            clock.once(both, 2)
            pairs = [(clock.both(work, count), clock.both(both, count)) for _ in range(REPEATS)]
            cost, busy = (_beyond(world, [(without[i], with_[i]) for without, with_ in pairs]) for i in (0, 1))
            spread = mean([with_[0] for _, with_ in pairs]).spread
            out.setdefault(f"{op} {world.size}", []).append(Timed(cost, spread, busy))
    return msgspec.to_builtins(out)


def _beyond(world: World, pairs: list[tuple[float, float]]) -> float:
    """What the second of each pair takes longer than the first, over repeats and ranks; not less than what can be told
    apart from nothing."""
    without, with_ = (torch.tensor([p[i] for p in pairs], dtype=torch.float64) for i in (0, 1))
    found = torch.stack([(with_ - without).median(), 0.02 * with_.median()])
    on_device = found.to(torch.float32).to(world.device)
    dist.all_reduce(on_device)
    return max(on_device.tolist()) / world.size


def _staging(world: World) -> dict[str, list[Timed]]:
    """What a unit of fully sharded parameters costs a rank's processor: torch copies shards into buffers, buffers into
    parameters, gradients into buffers, and does its own bookkeeping. Gathers are asked for by themselves; a reduction
    is what a forward and backward take more than with parameters that are whole, less its two gathers."""
    group = Group(name="world", ranks=tuple(range(world.size)), index=world.rank, handle=dist.group.WORLD)
    out: dict[str, list[Timed]] = {"gather": [], "reduce": []}
    for size in STAGED_BYTES:
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
        found = [[_own(run) for _ in range(STAGED_REPEATS)] for run in runs]
        whole, cut, gathers = (torch.tensor(f[2:]).median() for f in found)
        cost = torch.stack([gathers, (cut - whole - 2 * gathers).clamp(min=0.1 * gathers)])
        dist.all_reduce(cost)
        for name, seconds in zip(out, (cost / world.size).tolist(), strict=True):
            out[name].append(Timed(seconds, 0.1))
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


def _collective(op: str, size: int, group: Group, device: torch.device) -> Callable[[], object]:
    """A collective of `size` bytes as nccl-tests counts them."""
    n = group.size
    whole = torch.ones(max(1, size // 4 // n) * n, device=device)
    shard = torch.ones(len(whole) // n, device=device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if op == "all_gather":
        return lambda: gather_async(whole, shard, group).wait()
    if op == "reduce_scatter":
        return lambda: reduce_scatter_async(shard, whole, group).wait()
    if op == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole)

    def send() -> None:
        """To the next rank while the one before sends here: as pipeline ranks do."""
        got = torch.empty_like(whole)
        works = [dist.isend(whole, (group.index + 1) % n), dist.irecv(got, (group.index - 1) % n)]
        for work in works:
            work.wait()

    return send


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
