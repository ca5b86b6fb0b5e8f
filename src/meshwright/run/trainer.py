"""One rank of a training run: the plan's stages, exchanged, scheduled and updated, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from meshwright.lower import order
from meshwright.lower.compute import reduced_after
from meshwright.lower.partition import stage_layers
from meshwright.plan import Plan
from meshwright.run.attention import local_positions
from meshwright.run.data import Batch
from meshwright.run.fsdp import Sharded
from meshwright.run.mesh import Mesh
from meshwright.run.model import Pass, Shared, Stage
from meshwright.run.optimizer import Optimizer
from meshwright.run.parameters import Maker, initialise
from meshwright.run.pieces import Piece
from meshwright.run.pipeline import Pipeline
from meshwright.run.record import recorder
from meshwright.run.rotary import tables
from meshwright.run.settings import DTYPES, Settings
from meshwright.run.sync import Bucket, Where
from meshwright.schedules.actions import Actions
from meshwright.spec import naming
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


class StepResult(NamedTuple):
    """Mean loss per token, tokens trained and the gradient's norm before clipping, over the whole job. A loss that is
    not finite was not applied: ``updated`` is False and parameters are as before."""

    loss: float
    num_tokens: int
    grad_norm: float
    updated: bool = True


class Trainer:
    """Trains `model` under a legal, executable `plan` on the rank that `mesh` is. `schedule_params`: the times that a
    schedule made for given ones is made for, as a prediction has them; equal times when they are left out."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        train: Train,
        mesh: Mesh,
        *,
        settings: Settings | None = None,
        schedule_params: Mapping[str, Any] | None = None,
    ):
        self.model, self.plan, self.train, self.mesh = model, plan, train, mesh
        self.settings = settings = settings or Settings()
        self.step_count = 0
        #: Called on every rank right before the optimizer writes: asynchronous checkpoints finish their copies.
        self.before_update: list[Callable[[], None]] = []
        word = settings.precision or plan.precision.compute or train.dtype
        self.dtype = DTYPES[word]
        half = self.dtype in (torch.bfloat16, torch.float16)
        self.masters = torch.float32 if half and plan.precision.master == "fp32" else self.dtype
        self.grads = torch.float32 if half and plan.precision.grads == "fp32" else self.dtype
        self.fully = plan.layout.zero == 3 and plan.layout.pp == 1 and not mesh["shard"].alone
        shared = Shared(
            model=model,
            plan=plan,
            mesh=mesh,
            make=Maker(mesh.device, self.masters if self.fully else self.dtype),
            names=naming.names(model),
            dropout=settings.dropout if train.dropout else 0.0,
            seed=settings.seed,
            causal=train.causal,
        )
        actions = order(plan, plan.num_microbatches(train.global_batch), dict(schedule_params or {}))
        self.stages = _stages(shared, actions)
        for stage in self.stages.values():
            for parameter in stage.parameters():
                initialise(parameter, settings.seed)
        self.exchanges = self._sharded() if self.fully else self._buckets(actions)
        held = [h for exchange in self.exchanges for h in exchange.held()]
        self.optimizer = Optimizer(held, train.optimizer, settings, mesh["world"], mesh.device)
        self.positions = local_positions(
            train.seq_len,
            plan.layout.cp,
            mesh["cp"].index,
            plan.sequence.algorithm,
            train.causal,
            ulysses=plan.sequence.ulysses,
        ).to(mesh.device)
        self.pipeline = Pipeline(
            actions,
            mesh,
            self.stages,
            message=self._message,
            blocking_sends=not plan.overlap.pp,
            due=reduced_after(actions, plan.layout.shards_gradients),
            final=self._final,
        )
        self.rotary = None
        attention = model.blocks[0].attention
        if any(b.attention.rotary for b in model.blocks):
            width = int(attention.head_dim * model.numerics.rope_fraction)
            self.rotary = tables(self.positions, width, model.numerics, self.dtype)

    # -- building

    def _sharded(self) -> list[Sharded]:
        return [Sharded(s, self.mesh, params=self.dtype, grads=self.grads) for s in self.stages.values()]

    def _buckets(self, actions: Actions) -> list[Bucket]:
        """One bucket per layer segment and kind of parameter, in the order of the forward."""
        self.by_stage: dict[int, list[Bucket]] = {}
        me = self.mesh["pp"].index
        for number, stage in self.stages.items():
            made = self.by_stage[number] = []
            ranks = actions.stage_ranks[number]
            twin = self.mesh["mirror"] if len(ranks) == 2 else None
            for segment, modules in enumerate(_segments(stage)):
                groups: dict[str, list] = {}
                for module in modules:
                    for parameter in module.parameters():
                        groups.setdefault(self._kind(parameter, actions, me), []).append(parameter)
                for kind, parameters in groups.items():
                    bucket = self._bucket(parameters, kind, number, segment, twin)
                    made.append(bucket)
                    for module in modules:
                        module.register_forward_pre_hook(lambda *_, bucket=bucket: bucket.ready())
        return [bucket for buckets in self.by_stage.values() for bucket in buckets]

    def _kind(self, parameter, actions: Actions, me: int) -> str:
        if parameter.expert:
            return "expert"
        if not self.model.tied_embeddings or parameter.info.name != naming.names(self.model).embedding:
            return "dense"
        ends = actions.stage_ranks[0], actions.stage_ranks[-1]
        return "tied" if me in ends[0] and me in ends[1] else "tied apart"

    def _bucket(self, parameters: list, kind: str, stage: int, segment: int, twin) -> Bucket:
        mesh, zero = self.mesh, self.plan.layout.zero
        if kind == "expert":
            shard, replica = ("expert_shard", "expert_replica") if zero else ("self", "edp")
        else:
            shard, replica = ("shard", "replica") if zero else ("self", "data")
        return Bucket(
            parameters,
            Where(
                shard=mesh[shard],
                replica=mesh[replica],
                tp=mesh["tp"],
                twin=mesh["ends"] if kind == "tied apart" else twin,
            ),
            label={"stage": stage, "layer": segment},
            grads=self.grads,
            masters=self.masters,
            rounds=self.plan.layout.shards_gradients and not mesh[shard].alone,
            late=kind.startswith("tied") or not self.plan.overlap.dp,
        )

    def _message(self) -> torch.Tensor:
        layout = self.plan.layout
        length = self.train.seq_len // layout.cp // (layout.tp if layout.sp else 1)
        shape = (length, self.plan.pipeline.microbatch, self.model.hidden)
        return torch.empty(shape, dtype=self.dtype, device=self.mesh.device)

    def _final(self, stage: int) -> None:
        if not self.fully:
            for bucket in self.by_stage[stage]:
                bucket.final = True

    # -- training

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on this data-parallel rank's sequences [global_batch / dp, seq_len + 1]."""
        record = recorder()
        record.step_begin(self.step_count)
        for exchange in self.exchanges:
            exchange.reset()
        total = self.pipeline.run(self.passes(batch))
        for exchange in self.exchanges:
            exchange.finish()
        # every tensor-parallel rank has the whole loss of its tokens
        loss, norm = self.optimizer.totals(total if self.mesh["tp"].index == 0 else torch.zeros_like(total))
        finite = loss == loss and abs(loss) != float("inf") and norm == norm and norm != float("inf")
        if finite:
            for wait in self.before_update:
                wait()
            with record.span("optimizer"):
                self.optimizer.update(self.step_count, norm)
            self.publish()
            self.step_count += 1
        record.step_end()
        return StepResult(loss, self.train.tokens_per_step, norm, finite)

    def publish(self) -> None:
        """What the masters hold now becomes what the forward uses, on every rank."""
        for exchange in self.exchanges:
            exchange.publish()
        if not self.plan.overlap.dp:
            self.settle()

    def settle(self) -> None:
        """Wait until every parameter is whole."""
        for exchange in self.exchanges:
            exchange.ready()

    def set_step(self, step: int) -> None:
        """Go on as after so many steps: parameters and moments were loaded."""
        self.step_count = step
        self.optimizer.set_step(step)
        self.publish()

    def pieces(self) -> list[Piece]:
        """Parameters and moments this rank holds, live."""
        return self.optimizer.pieces()

    def passes(self, batch: Batch) -> list[Pass]:
        """The microbatches of a batch, cut to this context-parallel rank."""
        size, device = self.plan.pipeline.microbatch, self.mesh.device
        count = self.plan.num_microbatches(self.train.global_batch)
        if batch.tokens.shape != (count * size, self.train.seq_len + 1):
            raise ValueError(f"a batch of shape {tuple(batch.tokens.shape)} for {count} x {size} sequences")
        tokens = batch.tokens.to(device)
        at = self.positions
        first = self.mesh["dp"].index * count * size
        out = []
        for i in range(count):
            some = slice(i * size, (i + 1) * size)
            numbers = torch.arange(first + i * size, first + (i + 1) * size, device=device)
            out.append(
                Pass(
                    tokens=tokens[some, :-1][:, at],
                    targets=tokens[some, 1:][:, at],
                    positions=at,
                    documents=None if batch.documents is None else batch.documents[some].to(device),
                    rotary=self.rotary,
                    rows=at.unsqueeze(1) + numbers.unsqueeze(0) * self.train.seq_len,
                    scale=1.0 / self.train.tokens_per_step,
                    step=self.step_count,
                )
            )
        return out


def _stages(shared: Shared, actions: Actions) -> dict[int, Stage]:
    """The virtual stages this rank holds, by number."""
    plan, layers = shared.plan, stage_layers(shared.plan, shared.model)
    memory, me, last = plan.memory, shared.mesh["pp"].index, len(layers) - 1
    out: dict[int, Stage] = {}
    for number, ranks in enumerate(actions.stage_ranks):
        if me not in ranks:
            continue
        modes = tuple(
            memory.recompute if not memory.layers or i < memory.layers else "none" for i in range(len(layers[number]))
        )
        tied = out[0].embedding if number == last and number and 0 in out and shared.model.tied_embeddings else None
        out[number] = Stage(shared, number, layers[number], modes, first=number == 0, last=number == last, tied=tied)
    return out


def _segments(stage: Stage) -> list[list[torch.nn.Module]]:
    """Modules that are exchanged together: each layer, with the embedding or the head beside it, as ``lower`` cuts a
    stage."""
    out = [[layer] for layer in stage.layers] or [[]]
    if stage.embedding is not None:
        out[0].insert(0, stage.embedding)
    if stage.head is not None:
        out[-1].append(stage.head)
    return out
