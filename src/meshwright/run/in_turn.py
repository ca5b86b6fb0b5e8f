"""Plans of one job trained in turn, a step of each after the other, every one recorded.

What disturbs one step disturbs its neighbours, so that a change of plan is seen where two runs one after the other
would only show that the machine was busier. This is how a what-if that a trace predicted is confirmed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.plan import Plan
from meshwright.run import clocks, launch, mesh
from meshwright.run.data import Batch
from meshwright.run.environment import prefer
from meshwright.run.gather import gather
from meshwright.run.record import Off, Recorder, install
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.timeline import Identity
from meshwright.trace.chrome import write

#: Steps of each plan before the first one that counts.
WARMUP = 3


def in_turn(model: Model, plans: Sequence[Plan], train: Train, folder: str | Path, *, steps: int = 9) -> list[Path]:
    """The traces of `steps` steps of each plan, all of as many ranks, on the CPU; files in `folder`, in the plans'
    order. The processes run before other work of this machine where that is allowed.

    Raises:
        RankDied: L001 when a process ends before its time.
        MeshwrightError: X104 when a trace cannot be written.
    """
    files = [str(Path(folder) / f"{i}.json.gz") for i in range(len(plans))]
    launch.start(_train, model, tuple(plans), train, files, steps, num_ranks=plans[0].layout.num_ranks, device="cpu")
    return [Path(f) for f in files]


def _train(world: World, model: Model, plans: tuple[Plan, ...], train: Train, files: list[str], steps: int) -> None:
    prefer()
    trainers = [Trainer(model, plan, train, mesh.build(plan), settings=Settings()) for plan in plans]
    recorders = [Recorder(rank=world.rank, warmup=WARMUP) for _ in plans]
    before = clocks.probe()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab, (train.global_batch, train.seq_len + 1), generator=draw)
    try:
        for _ in range(WARMUP + steps):
            for trainer, recorder in zip(trainers, recorders):
                dp = trainer.mesh["dp"]
                count = train.global_batch // dp.size
                install(recorder)
                dist.barrier()
                trainer.step(Batch(tokens[dp.index * count : (dp.index + 1) * count], None))
                trainer.settle()
    finally:
        install(Off())
    for trainer, recorder, file in zip(trainers, recorders, files):
        timeline = gather(recorder, trainer.plan, before=before, identity=Identity(model=model.name))
        if timeline is not None:
            write(timeline, file)


def skewed(offset_s: float, drift: float, *, wait_s: float = 0.2) -> dict[str, float]:
    """Two processes, the second with a clock that is `offset_s` ahead and gains `drift` seconds a second: how far its
    measured clock is from the truth, and how far it says it may be, in nanoseconds."""
    return launch.start(_skewed, offset_s, drift, wait_s, num_ranks=2, device="cpu")


def _skewed(world: World, offset_s: float, drift: float, wait_s: float) -> dict[str, float]:
    zero = time.perf_counter_ns()

    def now() -> int:
        true = time.perf_counter_ns()
        return true if world.first else int(true + offset_s * 1e9 + drift * (true - zero))

    probes = []
    for wait in (wait_s, 0.0):
        probes.append(clocks.probe(now=now))
        time.sleep(wait)
    clock = clocks.line(*probes)
    here, true = now(), time.perf_counter_ns()
    found = float(clock.to_reference(torch.tensor([here]).numpy())[0])
    answer = torch.tensor([abs(found - true), clock.error_ns], dtype=torch.float64)
    dist.broadcast(answer, src=1)
    error_ns, bound_ns = answer.tolist()
    return {"error_ns": error_ns, "bound_ns": bound_ns}
