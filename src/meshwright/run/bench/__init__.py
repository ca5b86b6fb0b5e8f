"""Micro-benchmarks of this machine, as ``meshwright calibrate --here`` asks for them.

Every core runs the same work at the same time, as ranks do: what two cores share (memory, caches, clocks) is in the
figures. Each is the mean of repeats after a warm-up, because a step is a sum of many such operations and feels their
mean. Layers are timed as the executor runs them, which is where host times come from. On the CPU the time of what
computes is that of the processor, which other work on the machine does not lengthen. On a GPU kernels wait in its queue
until all of a repeat are issued, so that the time is the device's alone; what issuing them takes shows in the layers.

Collectives are timed between 2 ranks and more, also more than there are cores, and between products as in a step: what
it costs to wait for the slower of ranks that do not keep time exactly, and to wake up again, is part of a collective.
Beside the time that passes stands the processor's time that a rank spends in it, on all its threads: ranks that share
cores wait for each other's processor time, and while a collective waits its core is free for others.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import log2
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.run.ahead import load_ahead
from meshwright.run.bench import kernels, operators
from meshwright.run.bench.clock import REPEATS, Bench, BenchClock, TimedRepeats, mean
from meshwright.run.bench.drives import DriveFigures
from meshwright.run.bench.drives import figures as drive_figures
from meshwright.run.bench.exchange import OPS, collectives, staging
from meshwright.run.bench.model import MICROBATCHES, STEPS, VOCAB, ModelTimes, TimedModel, model_of, plan_of, train_of
from meshwright.run.bench.operands import Operands
from meshwright.run.bench.pace import num_timed, paces
from meshwright.run.bench.scope import FULL, QUICK, BenchScope, TimedLayer, on_kind
from meshwright.run.bench.store import KeptParts
from meshwright.run.environment import num_cores, one_thread, only_cores, prefer
from meshwright.run.launch import start
from meshwright.run.record import ResidentBytes
from meshwright.run.settings import DTYPES
from meshwright.run.world import World

#: Told what is measured, how much of it is done and how much there is. Must be picklable where GPUs are.
Progress = Callable[[str, int, int], None]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a machine, as plain numbers; grids are those of the ``scope``. ``collectives`` by
    ``op ranks``; ``staging``: what fully sharded parameters cost a rank's processor beside their exchange,
    ``gather`` and ``reduce`` by bytes; ``operators``: memory-bound operators of a model as the executor runs them, by
    name; ``base_bytes``: the memory of a rank beside its tensors; ``crowding``: what taking turns on a core costs
    (:func:`_crowding`); ``drives``: rates of those for temporary files; ``pace``: seconds of the reference probe
    (:mod:`.pace`) in every round; ``others``: the most of a round's time in which other work had the cores; ``made``:
    when it was measured, seconds since 1970."""

    kind: str
    cores: int
    memory_bytes: int
    name: str
    dtypes: tuple[str, ...]
    gemm: dict[str, list[TimedRepeats]]
    attention: dict[str, list[TimedRepeats]]
    attention_backward: dict[str, list[TimedRepeats]]
    elementwise: list[TimedRepeats]
    operators: dict[str, list[TimedRepeats]]
    collectives: dict[str, list[TimedRepeats]]
    staging: dict[str, list[TimedRepeats]]
    passes: list[ModelTimes]
    comm_slowdown: float
    base_bytes: float
    seconds: float
    crowding: float = 0.0
    scope: BenchScope = FULL
    drives: DriveFigures | None = None
    pace: dict[str, list[float]] = {}
    others: float = 0.0
    made: int = 0


def _silent(what: str, done: int, total: int) -> None:
    pass


def measure(
    *, device: str = "auto", most_ranks: int = 8, scope: BenchScope = FULL, progress: Progress = _silent,
    file: Path | None = None,
) -> Machine:  # fmt: skip
    """Time this machine: its kernels on all cores at once, collectives between 2 to `most_ranks` processes, layers. A
    rank has one thread. What has been measured is kept in `file`, part by part, and taken from there by the next to ask
    for the same.

    Raises:
        RankDied: L001 when one of the processes ended.
    """
    with one_thread():
        return _measured(device, most_ranks, scope, progress, file)


def _measured(
    device: str, most_ranks: int, scope: BenchScope, progress: Progress, file: Path | None
) -> Machine:  # fmt: skip
    begun = time.perf_counter()
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    if kind == "cpu":  # once here, not in every process of every part
        load_ahead()
    cores, scope = torch.cuda.device_count() if kind == "cuda" else num_cores(), on_kind(scope, kind)
    busy = num_timed(kind)
    known = KeptParts(file, _identity(kind, cores, scope))
    rounds = _rounds(known, scope, progress, busy, kind)
    drives = known.part("drives", drive_figures)
    base = known.part("memory", lambda: start(_base, scope, num_ranks=busy, device=kind))
    # on a GPU a stream of its own hides the copies
    staged = known.part("staging", lambda: start(staging, scope, num_ranks=2, device=kind)) if kind == "cpu" else {}
    exchanges: dict[str, list[TimedRepeats]] = {}
    ranks = 2
    while ranks <= (min(most_ranks, cores) if kind == "cuda" else most_ranks):
        between = partial(start, collectives, scope, progress, num_ranks=ranks, device=kind)
        found = known.part(f"collectives between {ranks} processes", between)
        exchanges |= msgspec.convert(found, dict[str, list[TimedRepeats]])
        ranks *= 2
    crowding = slowdown = 0.0
    if kind == "cpu" and 1 < cores < most_ranks:
        with only_cores(2):
            crowding = known.part("more processes than cores", lambda: start(_crowding, num_ranks=8, device=kind))
    if kind == "cuda" and busy > 1:  # on the CPU exchanges and products share cores, and the time of both is known
        slowdown = known.part("exchanges beside products", lambda: start(_slowdown, num_ranks=busy, device=kind))
    return msgspec.convert(
        {
            **rounds[0]["machine"], **_timed(rounds), "pace": _pace(rounds), "made": rounds[0]["made"],
            "others": max(r["others"] for r in rounds),
            "passes": _passes(rounds, scope), "collectives": exchanges, "staging": staged, "cores": cores,
            "kind": kind, "crowding": crowding, "comm_slowdown": slowdown, "drives": drives, "base_bytes": base,
            "seconds": time.perf_counter() - begun, "scope": scope,
        },
        Machine,
        strict=False,
    )  # fmt: skip


def _identity(kind: str, cores: int, scope: BenchScope) -> dict[str, Any]:
    """The identity of a measurement, which kept parts must share: machine, software and sizes."""
    name = _name(torch.device(kind))
    return {"machine": name, "kind": kind, "cores": cores, "torch": str(torch.__version__), "scope": scope, "form": 4}


def _rounds(known: KeptParts, scope: BenchScope, progress: Progress, busy: int, kind: str) -> list[dict[str, Any]]:
    """Rounds through kernels and models: a machine's speed changes over minutes, and repeats that are rounds see all of
    it. Rounds beyond those of the scope go through what still spreads."""
    rounds: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for number in range(scope.most_rounds):
        wanted = None if number < scope.rounds else _unsettled(rounds, scope)
        late = wanted is not None and time.perf_counter() - begun > scope.patience_s > 0
        if late or (wanted is not None and not any(wanted.values())):
            break
        title = f"kernels and layers on {busy} {'GPU' if kind == 'cuda' else 'core'}{'s' * (busy != 1)}"
        title += f", round {number + 1}"
        once = partial(start, _round, scope, wanted, title, progress, num_ranks=busy, device=kind)
        rounds.append(known.part(title, once))
    return rounds


def _round(
    world: World, scope: BenchScope, wanted: Mapping[str, list[int]] | None, title: str, progress: Progress
) -> dict[str, Any]:
    """Seconds of every benchmark, by ``kind dtype-or-operator``, and of every model; None for those not `wanted`."""
    prefer()  # what is measured is this machine without other work
    clock = BenchClock(world, scope.span_s)
    probed = paces(world)
    pace, passed = {name: busy for name, (_, busy) in probed.items()}, sum(seconds for seconds, _ in probed.values())
    dtypes = ("bf16", "fp32") if world.device.type == "cuda" else ("fp32",)
    machine = {"dtypes": dtypes, "memory_bytes": _memory(world.device), "name": _name(world.device)}
    benches = _benches(clock, dtypes, scope)
    asked = {key: range(len(many)) for key, many in benches.items()} if wanted is None else wanted
    models = range(len(scope.layers)) if wanted is None else wanted[MODELS]
    total = sum(len(asked[key]) for key in benches) + len(models)
    done = itertools.count(1)

    def tell() -> None:
        if world.first:
            progress(title, next(done), total)

    if world.first:
        progress(title, 0, total)
    seconds: dict[str, list[float | None]] = {}
    for key, many in benches.items():
        seconds[key] = [None] * len(many)
        for i in asked[key]:
            seconds[key][i] = clock.repeat(many[i])
            tell()
    timed: list[Any] = [None] * len(scope.layers)
    for i in models:
        model = TimedModel(clock, scope.layers[i], dtypes[0])
        model.around()
        timed[i] = {"seconds": model.seconds, "kept_bytes": model.kept_bytes}
        tell()
    found = {"machine": machine, "seconds": seconds, "models": timed, "pace": pace, "made": round(time.time())}
    found |= {"others": max(0.0, 1 - sum(pace.values()) / passed)}
    return msgspec.to_builtins(found)


def _benches(clock: BenchClock, dtypes: tuple[str, ...], scope: BenchScope) -> dict[str, list[Bench]]:
    pools = {d: Operands(clock.device, DTYPES[d], scope.pool_bytes) for d in ("fp32", *dtypes)}
    benches = {"elementwise": list(kernels.elementwise(pools["fp32"], scope))}
    for d in dtypes:
        benches[f"gemm {d}"] = list(kernels.gemms(pools[d], scope))
        benches[f"attention {d}"] = list(kernels.attentions(pools[d], scope, backward=False))
        benches[f"attention_backward {d}"] = list(kernels.attentions(pools[d], scope, backward=True))
    timed = operators.benches(clock.device, DTYPES[dtypes[0]], scope)
    return benches | {f"operators {name}": many for name, many in timed.items()}


#: What models are called among the benchmarks that are wanted again.
MODELS = "models"


def _repeats(rounds: list[dict[str, Any]], key: str) -> list[list[float]]:
    """The seconds of each benchmark of a kind, in the rounds that had it."""
    each = zip(*(r["seconds"][key] for r in rounds), strict=True)
    return [[s for s in seconds if s is not None] for seconds in each]


def _unsettled(rounds: list[dict[str, Any]], scope: BenchScope) -> dict[str, list[int]]:
    """List the benchmarks and models whose repeats spread by more than the scope allows, by kind and place."""

    def wide(seconds: list[float]) -> bool:
        return max(seconds) - min(seconds) > scope.spread * sorted(seconds)[len(seconds) // 2]

    again = {
        key: [i for i, seconds in enumerate(_repeats(rounds, key)) if wide(seconds)] for key in rounds[0]["seconds"]
    }
    steps = [_model_seconds(rounds, i)["step"] for i in range(len(scope.layers))]
    return again | {MODELS: [i for i, seconds in enumerate(steps) if mean(seconds).spread > scope.spread]}


def _timed(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Every benchmark's time, as the fields of a machine."""
    out: dict[str, Any] = {}
    for key in rounds[0]["seconds"]:
        timed = [mean(seconds) for seconds in _repeats(rounds, key)]
        kind, _, name = key.partition(" ")
        if name:
            out.setdefault(kind, {})[name] = timed
        else:
            out[kind] = timed
    return out


def _pace(rounds: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The seconds of the reference probe at the begin of every round, by what it times."""
    return {name: [r["pace"][name] for r in rounds] for name in rounds[0]["pace"]}


def _model_seconds(rounds: list[dict[str, Any]], model: int) -> dict[str, list[float]]:
    timed = [r["models"][model] for r in rounds if r["models"][model] is not None]
    return {name: [s for one in timed for s in one["seconds"][name]] for name in timed[0]["seconds"]}


def _passes(rounds: list[dict[str, Any]], scope: BenchScope) -> list[ModelTimes]:
    """Every model's times."""
    out = []
    for i, layer in enumerate(scope.layers):
        timed = (mean(seconds) for seconds in _model_seconds(rounds, i).values())
        named = dict(zip(("forward", "backward", "optimizer", "step", "between"), timed, strict=True))
        out.append(ModelTimes(layer=layer, kept_bytes=rounds[0]["models"][i]["kept_bytes"], **named))
    return out


def _slowdown(world: World) -> float:
    """Return the share of its speed that a GPU loses to products while an all-reduce runs beside them."""
    if world.size == 1:
        return 0.0
    clock = BenchClock(world)
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
    clock = BenchClock(world)
    model = TimedModel(clock, FULL.layers[len(FULL.layers) // 2], "fp32")
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


def _base(world: World, scope: BenchScope) -> float:
    """Memory of a rank that has trained the smallest model, beside its tensors."""
    model = TimedModel(BenchClock(world), min(scope.layers, key=lambda layer: layer.hidden * layer.layers), "fp32")
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
    "FULL", "MICROBATCHES", "OPS", "QUICK", "REPEATS", "VOCAB", "TimedLayer", "Machine", "ModelTimes", "Progress",
    "BenchScope",
    "TimedRepeats", "mean", "measure", "model_of", "plan_of", "train_of",
]  # fmt: skip
