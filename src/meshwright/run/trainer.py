"""One rank of a training run: the plan's stages, exchanged, scheduled and updated, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.assign.packing import shape
from meshwright.lower import order
from meshwright.lower.partition import segments, stage_layers
from meshwright.plan import Plan
from meshwright.run.attention import local_positions
from meshwright.run.average import averages
from meshwright.run.data import Batch
from meshwright.run.fsdp import Sharded
from meshwright.run.mesh import Mesh, members
from meshwright.run.model import Pass, Shared, Stage
from meshwright.run.optimizer import Optimizer
from meshwright.run.parameters import Maker, initialise
from meshwright.run.pieces import Piece
from meshwright.run.pipeline import Pipeline
from meshwright.run.record import recorder
from meshwright.run.rotary import tables
from meshwright.run.settings import DTYPES, Settings
from meshwright.run.sync import Bucket
from meshwright.schedules.actions import Actions
from meshwright.spec import naming
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.due import due_after
from meshwright.sync.fragments import (
    DENSE,
    EXPERT,
    GRADIENTS,
    TIED,
    Fragment,
    by_units,
    fragments,
    gradients_due,
    stored,
)
from meshwright.sync.policy import read

#: Parameters by where they are and of which kind: ((stage, segment), kind).
Parts = dict[tuple[tuple[int, int], str], list[torch.nn.Parameter]]


class StepResult(NamedTuple):
    """Mean loss per token, tokens trained and the gradient's norm before clipping, over the whole job; loss and norm
    over the replica of this rank where replicas take steps of their own. A loss that is not finite was not applied:
    ``updated`` is False and parameters are as before, or, of such replicas, those of the last average lost."""

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
        self.shape = shape(train, plan.pipeline.microbatch)
        #: Called on every rank right before the optimizer writes: asynchronous checkpoints finish their copies.
        self.before_update: list[Callable[[], None]] = []
        word = settings.precision or plan.precision.compute or train.dtype
        self.dtype = DTYPES[word]
        half = self.dtype in (torch.bfloat16, torch.float16)
        self.masters = torch.float32 if half and plan.precision.master == "fp32" else self.dtype
        self.grads = torch.float32 if half and plan.precision.grads == "fp32" else self.dtype
        fully = plan.layout.gathers_again
        shared = Shared(
            model=model,
            plan=plan,
            mesh=mesh,
            make=Maker(mesh.device, self.masters if fully else self.dtype),
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
        parts = _parts(self.stages, model)
        self.fragments = self._fragments(parts, actions)
        self.exchanges = self._sharded() if fully else self._buckets(parts)
        held = [h for exchange in self.exchanges for h in exchange.held()]
        self.optimizer = Optimizer(held, train.optimizer, settings, mesh["worker"], mesh.device)
        self.averages = averages(self.fragments, _kinds(parts), self.optimizer, mesh)
        #: Steps between two times at which all replicas hold the same parameters.
        self.every = max(fragment.every for fragment in self.fragments)
        self.replica, self.replicas = _replica(mesh)
        self._sound = True
        self.positions = local_positions(
            self.shape.row_tokens,
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
            due=due_after(actions, gradients_due(plan.layout)),
            final=self._final,
        )
        self.rotary = self._rotary(self.positions)

    # -- building

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        model = self.model
        rotated = [a for a in model.attentions if a.rotary]
        if not rotated:
            return None
        width = int(rotated[0].head_dim * model.numerics.rope_fraction)
        return tables(positions, width, model.numerics, self.dtype)

    def _sharded(self) -> list[Sharded]:
        replica = next(self.mesh[f.replica.name] for f in self.fragments if f.what == GRADIENTS)
        return [Sharded(s, self.mesh, replica, params=self.dtype, grads=self.grads) for s in self.stages.values()]

    def _fragments(self, parts: Parts, actions: Actions) -> tuple[Fragment, ...]:
        """What is exchanged of this rank's parameters."""
        sizes: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        for (units, kind), parameters in parts.items():
            count = sum(p.numel() for p in parameters)
            sizes.setdefault(units, {})[kind] = count, count
        grads, weights, masters = (t.itemsize for t in (self.grads, self.dtype, self.masters))
        of = stored(self.plan, self.train)._replace(grads=grads, weights=weights, masters=masters, moments=masters)
        return fragments(self.plan, self.model, actions, sizes, of, read(self.plan.sync.policy))

    def _buckets(self, parts: Parts) -> list[Bucket]:
        """One bucket per layer segment and kind of parameter, in the order of the forward."""
        out = []
        for (units, kind), found in by_units(self.fragments).items():
            if not kind:  # of no parameters
                continue
            bucket = Bucket(parts[units, kind], found, self.mesh, grads=self.grads, masters=self.masters)
            for module in _segments(self.stages[units[0]])[units[1]]:
                module.register_forward_pre_hook(lambda *_, bucket=bucket: bucket.ready())
            out.append(bucket)
        return out

    def _message(self) -> torch.Tensor:
        layout = self.plan.layout
        length = self.shape.row_tokens // layout.cp // (layout.tp if layout.sp else 1)
        sizes = (length, self.shape.together, self.model.hidden)
        return torch.empty(sizes, dtype=self.dtype, device=self.mesh.device)

    def _final(self, stage: int) -> None:
        for exchange in self.exchanges:
            if exchange.stage == stage:
                exchange.final = True

    # -- training

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on this data-parallel rank's rows [rows of a global batch / dp, row tokens + 1]."""
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
        if self.averages:
            finite = self._averaged(finite)
        if finite:
            self.publish()
            self.step_count += 1
        record.step_end()
        return StepResult(loss, batch.num_targets or self.train.tokens_per_step, norm, finite)

    def _averaged(self, finite: bool) -> bool:
        """Average with the other replicas at the end of a round, unless a step of one of them was not finite since the
        last average: that is learnt, and said, at the end alone."""
        self._sound &= finite
        if (self.step_count + 1) % self.every:
            return True
        sound = torch.tensor(float(self._sound), device=self.mesh.device)
        dist.all_reduce(sound, op=dist.ReduceOp.MIN, group=self.mesh["world"].handle)
        self._sound = True
        if sound:
            for average in self.averages:
                average.run()
        return bool(sound)

    @property
    def joined(self) -> bool:
        """Whether all replicas hold the same parameters: always, but within a round of steps of their own."""
        return self.step_count % self.every == 0

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
        if self.joined:
            for average in self.averages:
                average.begin()
        self.publish()

    def pieces(self, *, shared: bool = False) -> list[Piece]:
        """Parameters and moments this rank holds, live. Those of replicas that take steps of their own are states of
        their own; `shared`: named as those of a job whose replicas hold the same."""
        found = self.optimizer.pieces()
        if shared or not self.averages:
            return found
        found += [piece for average in self.averages for piece in average.pieces()]
        return [piece._replace(key=f"{piece.key}@{self.replica}") if self.replica else piece for piece in found]

    def passes(self, batch: Batch) -> list[Pass]:
        """The microbatches of a batch, cut to this context-parallel rank."""
        (length, _, size), device = self.shape, self.mesh.device
        count = self.plan.num_microbatches(self.train.global_batch)
        if batch.tokens.shape != (count * size, length + 1):
            raise ValueError(f"a batch of shape {tuple(batch.tokens.shape)} for {count} x {size} rows of {length}")
        tokens = batch.tokens.to(device)
        targets = tokens[:, 1:] if batch.targets is None else batch.targets.to(device)
        at = self.positions
        first = self.mesh["dp"].index * count * size
        out = []
        for i in range(count):
            some = slice(i * size, (i + 1) * size)
            numbers = torch.arange(first + i * size, first + (i + 1) * size, device=device)
            places, rotary = at, self.rotary
            if batch.positions is not None:
                places = batch.positions[some].to(device)[:, at]
                rotary = self._rotary(places)
            out.append(
                Pass(
                    tokens=tokens[some, :-1][:, at],
                    targets=targets[some][:, at],
                    positions=places,
                    documents=None if batch.documents is None else batch.documents[some].to(device),
                    rotary=rotary,
                    rows=at.unsqueeze(1) + numbers.unsqueeze(0) * length,
                    scale=self.replicas / (batch.num_targets or self.train.tokens_per_step),
                    step=self.step_count,
                )
            )
        return out


def _stages(shared: Shared, actions: Actions) -> dict[int, Stage]:
    """The virtual stages this rank holds, by number."""
    plan, layers = shared.plan, stage_layers(shared.plan, shared.model)
    me, last = shared.mesh["pp"].index, len(layers) - 1
    out: dict[int, Stage] = {}
    for number, ranks in enumerate(actions.stage_ranks):
        if me not in ranks:
            continue
        modes = tuple(plan.memory.mode(position) for position in range(len(layers[number])))
        tied = out[0].embedding if number == last and number and 0 in out and shared.model.tied_embeddings else None
        out[number] = Stage(shared, number, layers[number], modes, first=number == 0, last=number == last, tied=tied)
    return out


def _segments(stage: Stage) -> tuple[tuple[torch.nn.Module, ...], ...]:
    """Modules that are exchanged together."""
    before, after = ((m,) if m is not None else () for m in (stage.embedding, stage.head))
    return segments(tuple(stage.layers), before, after)


def _replica(mesh: Mesh) -> tuple[int, int]:
    """Which of the sets of ranks that step together this rank is in, by their first ranks, and how many there are."""
    size = mesh["worker"].size
    firsts = sorted({group[0] for group in members(mesh.plan)["worker"]})
    return firsts.index(mesh["worker"].ranks[0]), mesh.world // size


def _kinds(parts: Parts) -> dict[str, Any]:
    """Where every parameter is and of which kind, by its name."""
    return {parameter.info.name: key for key, some in parts.items() for parameter in some}


def _parts(stages: dict[int, Stage], model: Model) -> Parts:
    """The parameters of every kind in every segment of the stages."""
    table = naming.names(model).embedding if model.tied_embeddings else None
    out: Parts = {}
    for number, stage in stages.items():
        for segment, modules in enumerate(_segments(stage)):
            for parameter in (p for module in modules for p in module.parameters()):
                kind = EXPERT if parameter.expert else TIED if parameter.info.name == table else DENSE
                out.setdefault(((number, segment), kind), []).append(parameter)
    return out
