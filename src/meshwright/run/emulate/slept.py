"""Training steps by the executor itself with passes that are slept: every exchange, code, round and update is real.

The modules of a rank's stage sleep for what their passes take on the device and hand on gradients of random values, so
that what follows is what follows in training: buckets start their exchange when their last gradient is there, replicas
average at the end of a round, codecs encode real tensors. A sleep that follows another starts where that one was meant
to end, as on a device whose queue is full.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.plan import Plan
from meshwright.run.beside import computed_s
from meshwright.run.data import Batch
from meshwright.run.gather import gather
from meshwright.run.mesh import build
from meshwright.run.record import Off, Recorder, install
from meshwright.run.settings import Settings
from meshwright.run.traffic import sent_bytes
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.timeline import Identity, Timeline, pack

#: What a host may do between two kernels without the device waiting for it.
AHEAD_S = 0.005
#: Steps whose spans are kept, and spread of the gradients' values.
KEPT_STEPS, SPREAD = 5, 1e-3


class SleptPasses(NamedTuple):
    """Seconds of a forward and a backward of every module of a rank, from the embedding to the head."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class SleptJob(NamedTuple):
    """Steps as every rank is told them: after ``warmup`` steps ``steps`` are timed. ``paces`` are the factors of the
    passes of every rank in each of them, where ranks are not alike."""

    model: Model
    plan: Plan
    train: Train
    passes: SleptPasses
    warmup: int
    steps: int
    identity: Identity
    paces: tuple[tuple[float, ...], ...] = ()


class _Device:
    """A device that does one thing after the other, by the host's clock, and takes ``pace`` times as long for it."""

    def __init__(self) -> None:
        self.free, self.pace = 0.0, 1.0

    def run(self, seconds: float) -> None:
        now = time.monotonic()
        self.free = max(self.free, now - AHEAD_S) + seconds * self.pace
        time.sleep(max(0.0, self.free - now))


class _Pass(torch.autograd.Function):
    """A module's passes: forward sleeps, backward sleeps and hands on gradients."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        module.device.run(module.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        module = ctx.module
        module.device.run(module.backward_s)
        for parameter, gradient in module.gradients:
            parameter.sink.add(gradient)
            for _ in range(getattr(parameter, "contributions", 1) - 1):  # of slices or portions that slept as one
                parameter.sink.bucket.arrived()
        return grad, None


class _Slept:
    """A module that sleeps in place of computing."""

    def __init__(self, device: _Device, forward_s: float, backward_s: float, parameters: list[nn.Parameter]):
        self.device, self.forward_s, self.backward_s = device, forward_s, backward_s
        generator = torch.Generator().manual_seed(0)
        self.gradients = [
            (p, (torch.randn(p.shape, generator=generator) * SPREAD).to(p.dtype)) for p in parameters if p.requires_grad
        ]

    def begin(self, p: Any) -> torch.Tensor:
        """Return the hidden states of a stage that begins with the embedding. What came before was waited for."""
        self.device.free = time.monotonic()
        return _Pass.apply(torch.ones((), requires_grad=True), self)

    def __call__(self, x: torch.Tensor, p: Any) -> torch.Tensor:
        return _Pass.apply(x, self)


def sleep_passes(trainer: Trainer, passes: SleptPasses, pace: Iterable[float] = ()) -> None:
    """Have the modules of a trainer's one stage sleep, in each step as many times as long as the next `pace` says."""
    (stage,) = trainer.stages.values()
    modules = [stage.embedding, *stage.layers, stage.head]
    device, seen = _Device(), set()
    for module, forward_s, backward_s in zip(modules, *passes, strict=True):
        own = [p for p in module.parameters() if p not in seen]
        seen |= set(own)
        slept = _Slept(device, forward_s, backward_s, own)
        module.forward = slept.begin if module is stage.embedding else slept
    run, paces = trainer.pipeline.run, iter(pace)

    def paced(some: Any) -> torch.Tensor:
        device.pace = next(paces, 1.0)
        return run(some)

    trainer.pipeline.run = paced


def steps(world: World, job: SleptJob) -> dict[str, Any]:
    """Time the steps of a job on the rank `world`.

    Returns:
        ``step_s`` of this rank, ``sent`` bytes of its host in them, ``busy_s`` that its thread computed in a step
        of the warm-up after its passes, and the ``timeline`` of the last steps.
    """
    mesh = build(job.plan)
    trainer = Trainer(job.model, job.plan, job.train, mesh, settings=Settings())
    sleep_passes(trainer, job.passes, job.paces[mesh.rank] if job.paces else ())
    rows = job.train.global_batch // job.plan.layout.dp
    batch = Batch(torch.zeros(rows, job.train.seq_len + 1, dtype=torch.int64), None)
    busy = _busy_s(trainer, batch, job.warmup)
    recorder = Recorder(rank=mesh.rank, warmup=max(0, job.steps - KEPT_STEPS), keep=KEPT_STEPS)
    install(recorder)
    ends, sent = [time.monotonic()], sent_bytes() or 0
    for _ in range(job.steps):
        trainer.step(batch)
        ends.append(time.monotonic())
    sent = (sent_bytes() or 0) - sent
    trainer.settle()
    install(Off())
    timeline = gather(recorder, job.plan, identity=job.identity)
    return {
        "step_s": [b - a for a, b in pairwise(ends)],
        "sent": sent,
        "busy_s": busy,
        "timeline": b64encode(pack(timeline or Timeline.bare(identity=job.identity))).decode(),
    }


def _busy_s(trainer: Trainer, batch: Batch, count: int) -> float:
    """Do so many steps; the seconds of each that this thread computes after the last pass (codes, averages, updates:
    what no sleep hides), and that one beside it computes (sums that go round), in the mean."""
    passes, at = trainer.pipeline.run, [0.0]

    def noted(some: Any) -> torch.Tensor:
        loss = passes(some)
        at[0] = time.thread_time()
        return loss

    trainer.pipeline.run, busy, before = noted, 0.0, computed_s()
    for _ in range(count):
        trainer.step(batch)
        busy += time.thread_time() - at[0]
    busy += computed_s() - before
    trainer.pipeline.run = passes
    return busy / count
