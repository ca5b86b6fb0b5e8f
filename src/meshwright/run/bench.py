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
from meshwright.run.bench_clock import REPEATS, Clock, Timed, mean
from meshwright.run.bench_exchange import COLLECTIVE_BYTES, OPS, STAGED_BYTES, collectives, staging
from meshwright.run.data import Batch
from meshwright.run.launch import World, start
from meshwright.run.mesh import Group, alone
from meshwright.run.record import Off, Recorder, Recording, install
from meshwright.run.settings import DTYPES, Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

GEMM_M, GEMM_NK = (16.0, 64.0, 256.0, 1024.0, 4096.0), (32.0, 128.0, 512.0, 2048.0)
#: Products of more operations than a core does in about a fifth of a second say nothing new.
LARGEST_FLOPS = 4e9
ATTENTION = ((4.0, 16.0, 64.0), (32.0, 128.0, 512.0, 2048.0), (16.0, 32.0, 64.0, 128.0))
LARGEST_SCORES = 2e7
ELEMENTWISE = tuple(4.0**e for e in range(5, 14))


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
    exchanges: dict[str, list[Timed]] = {}
    say("fully sharded layers between 2 processes")
    staged = start(staging, num_ranks=2, device=kind) if kind == "cpu" or cores > 1 else {}
    ranks = 2
    while ranks <= (min(most_ranks, cores) if kind == "cuda" else most_ranks):
        say(f"collectives between {ranks} processes")
        exchanges |= msgspec.convert(start(collectives, num_ranks=ranks, device=kind), dict[str, list[Timed]])
        ranks *= 2
    found = msgspec.convert(kernels, dict[str, object])
    return msgspec.convert(
        found
        | {"collectives": exchanges, "staging": staged, "cores": cores, "kind": kind}
        | {"seconds": time.perf_counter() - begun},
        Machine,
        strict=False,
    )


def _kernels(world: World) -> dict[str, object]:
    clock = Clock(world)
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


def _gemms(clock: Clock, dtype: torch.dtype) -> Iterable[Timed]:
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


def _attentions(clock: Clock, dtype: torch.dtype, *, backward: bool) -> Iterable[Timed]:
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


def _elementwise(clock: Clock) -> Iterable[Timed]:
    """One kernel that reads two tensors and writes a third: so many bytes in all."""
    for size in ELEMENTWISE:
        x = torch.randn(max(1, int(size / 12)), device=clock.device)
        y = torch.randn_like(x)
        out = x * y
        yield clock.time(lambda x=x, y=y, out=out: torch.mul(x, y, out=out))


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


def _passes(clock: Clock, layer: Layer, dtype: str) -> PassTimes:
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
    "ATTENTION", "COLLECTIVE_BYTES", "ELEMENTWISE", "GEMM_M", "GEMM_NK", "LAYERS", "LAYERS_EACH", "MICROBATCHES", "OPS",
    "REPEATS", "STAGED_BYTES", "VOCAB", "Layer", "Machine", "PassTimes", "Timed", "mean", "measure", "plan_of",
]  # fmt: skip
