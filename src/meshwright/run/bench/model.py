"""Small models as the executor trains them, timed: what a layer, a pass and a step cost beside their kernels."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.plan import Pipeline, Plan
from meshwright.run.bench.clock import BenchClock, TimedRepeats
from meshwright.run.bench.scope import TimedLayer
from meshwright.run.data import Batch
from meshwright.run.mesh import alone
from meshwright.run.record import Off, Recorder, Recording, install
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.architecture import Model
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MICROBATCHES = 4
#: Steps of a timed model in every round, after one that finds its operands again.
STEPS = 2
VOCAB = 1024
#: What lies between the tasks of a step takes a microsecond at least.
LEAST_S = 1e-6


class ModelTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds of the executor for one model on one core: a forward, a backward (both of a microbatch through
    the whole model), the optimizer, a step, and what of that is ``between`` all of these. ``kept_bytes``: saved by a
    forward for its backward."""

    layer: TimedLayer
    forward: TimedRepeats
    backward: TimedRepeats
    optimizer: TimedRepeats
    step: TimedRepeats
    between: TimedRepeats
    kept_bytes: float = 0.0


class TimedModel:
    """One model trained by the executor on every core, each for itself, a few steps a round."""

    def __init__(self, clock: BenchClock, layer: TimedLayer, dtype: str):
        self.clock, self.layer = clock, layer
        self.train, mesh = train_of(layer, dtype), alone(device=clock.device)
        self.trainer = Trainer(model_of(layer), plan_of(layer), self.train, mesh, settings=Settings())
        self.seconds: dict[str, list[float]] = {"F": [], "BW": [], "optimizer": [], "step": [], "between": []}
        self.kept_bytes = self._kept()

    def batch(self, step: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(step)
        size = self.train.global_batch, self.layer.seq + 1
        return Batch(torch.randint(0, VOCAB, size, generator=generator), None)

    def _kept(self) -> float:
        """Return the bytes that a forward saves for its backward, parameters left out, each storage once."""
        parameters = {p.untyped_storage().data_ptr() for s in self.trainer.stages.values() for p in s.parameters()}
        seen: set[int] = set()
        total, backward = 0, False

        def keep(x: torch.Tensor) -> torch.Tensor:
            nonlocal total, backward
            if backward:  # the next microbatch's forward: storages are used again
                seen.clear()
                backward = False
            storage = x.untyped_storage()
            if storage.data_ptr() not in parameters | seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
            return x

        def give(x: torch.Tensor) -> torch.Tensor:
            nonlocal backward
            backward = True
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            self.trainer.step(self.batch())
        return total / MICROBATCHES

    def around(self) -> None:
        clock = self.clock
        now = time.perf_counter_ns if clock.device.type == "cuda" else time.process_time_ns
        record = Recorder(device=clock.device, warmup=1, now=now)
        install(record)
        try:
            for step in range(1 + STEPS):
                batch = self.batch(step)
                clock.together()
                begun = clock.now()
                self.trainer.step(batch)
                clock.sync()
                if step:
                    self.seconds["step"].append(clock.now() - begun)
        finally:
            install(Off())
        spans, inside = record.recording(), np.zeros(STEPS)
        for kind in ("F", "BW", "optimizer"):
            seconds, step = _seconds(spans, kind)
            self.seconds[kind] += seconds.tolist()
            np.add.at(inside, step - step.min(), seconds)
        # of each step by itself: a difference of means would be of the repeats' noise
        beyond = np.array(self.seconds["step"][-STEPS:]) - inside
        self.seconds["between"] += np.maximum(beyond, LEAST_S).tolist()


def _seconds(spans: Recording, kind: str) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Durations of every span of a kind on the compute queue, and the step that each is of."""
    wanted = [i for i, said in enumerate(spans.labels) if said.kind == kind and said.queue == "compute"]
    chosen = np.isin(spans.label, wanted)
    return (spans.end_ns[chosen] - spans.start_ns[chosen]) * 1e-9, spans.step[chosen]


def model_of(layer: TimedLayer) -> Model:
    """A timed model."""
    return transformer(
        layers=layer.layers, hidden=layer.hidden, heads=layer.heads, vocab=VOCAB, ffn=layer.ffn, gated=layer.gated,
        max_seq_len=layer.seq,
    )  # fmt: skip


def train_of(layer: TimedLayer, dtype: str) -> Train:
    """Return the workload on which a layer's model was trained."""
    return Train(global_batch=MICROBATCHES * layer.microbatch, seq_len=layer.seq, dtype=dtype)


def plan_of(layer: TimedLayer) -> Plan:
    """The plan a timed model ran."""
    return msgspec.structs.replace(alone().plan, pipeline=Pipeline(microbatch=layer.microbatch))
