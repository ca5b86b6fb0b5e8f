"""A stage of a plan as one peer computes it: a trainer of the rank that has the stage, alone, whose passes come one by
one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch
import torch.distributed as dist

from meshwright.plan import Plan
from meshwright.plan.facets.passes import Passes
from meshwright.run.codecs import on_tensors
from meshwright.run.data import Corpus
from meshwright.run.job import Job
from meshwright.run.mesh import AxisGroup, ProcessMesh, coordinates, expert_coordinates, members
from meshwright.run.parts import Pass
from meshwright.run.pieces import TensorPiece
from meshwright.run.swarm.parcels import as_bytes, of_bytes
from meshwright.run.trainer import Trainer
from meshwright.sync.codecs import codec


def pipeline_of(plan: Plan) -> Plan:
    """The plan of one pipeline with the stages of a swarm's plan."""
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, dp=1), passes=Passes())


def whole_of(plan: Plan) -> Plan:
    """The plan of one rank that holds all stages of a swarm's plan."""
    plan = pipeline_of(plan)
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, pp=1, stages=()))


def alone_at(plan: Plan, rank: int) -> ProcessMesh:
    """The mesh of a rank that exchanges nothing with the others of its job."""
    groups = {}
    for name, some in members(plan).items():
        for ranks in some:
            if rank in ranks:
                groups[name] = AxisGroup(name=name, ranks=ranks, index=ranks.index(rank))
    groups |= {name: AxisGroup(name=name, ranks=(0,), index=0) for name in ("world", "worker")}
    place = coordinates(plan, rank) | expert_coordinates(plan, rank)
    return ProcessMesh(
        plan=plan,
        rank=rank,
        world=plan.num_ranks,
        device=torch.device("cpu"),
        coordinates=place,
        groups=groups,
    )


def state_of(pieces: Iterable[TensorPiece]) -> bytes:
    """The values of pieces with their names, as bytes."""
    found = list(pieces)
    names = msgspec.json.encode([(p.key, p.parameter.name, p.values.nbytes) for p in found])
    return len(names).to_bytes(4, "little") + names + b"".join(as_bytes(p.values) for p in found)


def fill(pieces: Iterable[TensorPiece], state: bytes) -> None:
    """Put values that came as bytes in place of those of the pieces of the same names."""
    end = 4 + int.from_bytes(state[:4], "little")
    mine = {(p.key, p.parameter.name): p.values for p in pieces}
    for key, name, size in msgspec.json.decode(state[4:end], type=list[tuple[str, str, int]]):
        values = mine.get((key, name))
        if values is not None and size:
            values.copy_(of_bytes(state[end : end + size]).view(values.dtype))
        end += size


class PeerStage:
    """The stage ``number`` of a job after ``step`` steps."""

    def __init__(self, job: Job, number: int, step: int, state: bytes, corpus: Corpus):
        plan = pipeline_of(job.plan)
        self.number, self.last = number, plan.num_stages - 1
        self.trainer = Trainer(job.model, plan, job.train, alone_at(plan, number), settings=job.settings)
        fill(self.trainer.pieces(), state)
        self.trainer.set_step(step)
        self.trainer.settle()
        self.stage = self.trainer.stages[number]
        self.corpus = corpus
        self.code = codec(job.plan.passes.swarm.code)
        self.tensors = on_tensors(self.code.name)
        self.passes: list[Pass] = []
        self.summed: list[torch.Tensor] = []
        self.begin(step)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a microbatch's hidden states."""
        return tuple(self.trainer.hidden_states().shape)

    @property
    def wire_bytes(self) -> int:
        """The bytes of a message of hidden states."""
        message = self.trainer.hidden_states()
        return self.code.wire_bytes(message.numel(), message.itemsize)

    def begin(self, step: int) -> None:
        """A step begins."""
        self.trainer.step_count = step
        for exchange in self.trainer.exchanges:
            exchange.reset()
        self.passes = self.trainer.passes(self.corpus.batch(step))

    def compute(self, microbatch: int, backward: bool, body: bytes) -> tuple[bytes, float]:
        """One pass of a microbatch: what it makes, and the loss where the last stage's forward does."""
        taken = [body[i : i + self.wire_bytes] for i in range(0, len(body), self.wire_bytes)]
        values = [self._decoded(one) for one in taken]
        p, entered = self.passes[microbatch], values[0] if self.number else None
        if not backward:
            with torch.no_grad():
                out = self.stage(entered, p)
            return (b"", float(out)) if self.number == self.last else (self._encoded(out), 0.0)
        entered = None if entered is None else entered.requires_grad_()
        out = self.stage(entered, p)
        torch.autograd.backward(out, None if self.number == self.last else values[-1])
        return (b"" if entered is None else self._encoded(entered.grad)), 0.0

    def _encoded(self, values: torch.Tensor) -> bytes:
        return as_bytes(self.tensors.encode(values.contiguous().view(-1), 0))

    def _decoded(self, wire: bytes) -> torch.Tensor:
        message = self.trainer.hidden_states()
        return self.tensors.decode(of_bytes(wire), message.numel(), message.dtype, 0).view(message.shape)

    def sum(self, group: dist.ProcessGroup | None) -> float:
        """Sum the step's gradient over a group, beside this peer's own, which stays; the squares of the sum."""
        for exchange in self.trainer.exchanges:
            exchange.finish()
        self.summed = [exchange.mine().clone() for exchange in self.trainer.exchanges]
        for one in self.summed if group is not None else ():
            group.allreduce([one]).wait()
        return sum(float(torch.linalg.vector_norm(one.to(torch.float64))) ** 2 for one in self.summed)

    def update(self, norm: float) -> None:
        """Apply the sum, of a gradient that is so long in all."""
        trainer = self.trainer
        for exchange, one in zip(trainer.exchanges, self.summed):
            exchange.mine().copy_(one)
        trainer.optimizer.update(trainer.step_count, norm)
        trainer.publish()
        trainer.settle()
        trainer.step_count += 1

    def state(self) -> bytes:
        """The parameters and moments of the stage."""
        return state_of(self.trainer.pieces())
