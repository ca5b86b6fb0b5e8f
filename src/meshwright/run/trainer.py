"""One rank of a training run: the plan's stages, exchanged, scheduled and updated, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from meshwright.assign.groups import GroupCosts
from meshwright.assign.packing import shape
from meshwright.lower import order
from meshwright.lower.filling import FrozenOrder
from meshwright.plan import Plan
from meshwright.plan.facets.sequence import STATIC
from meshwright.plan.slices import Portions, own_plan
from meshwright.run import fp8
from meshwright.run.adapt import adapt
from meshwright.run.adversary import opposed
from meshwright.run.attention import local_positions
from meshwright.run.average import Rounds
from meshwright.run.away import StateAway
from meshwright.run.batch_norm import RunningStatistics
from meshwright.run.coded import CodedSum
from meshwright.run.compiled import needed
from meshwright.run.connect import connect
from meshwright.run.curvature import curvature_of
from meshwright.run.data import Batch
from meshwright.run.encoded import FrozenEncoder, parted
from meshwright.run.exchanges import Types, begin_alike, built, exchanges_of, fragments_of, parts_of
from meshwright.run.feedback import DirectFeedback
from meshwright.run.groups import GroupRows
from meshwright.run.helper import Helper
from meshwright.run.hot import HotChoice
from meshwright.run.lessons import Lessons
from meshwright.run.links import Link
from meshwright.run.lora.base import Base
from meshwright.run.mesh import ProcessMesh
from meshwright.run.messages import message_of, with_whole_tokens
from meshwright.run.microbatches import grouped, passes_of
from meshwright.run.optimizer import Optimizer, stepping
from meshwright.run.parameters import Maker
from meshwright.run.parts import Pass, Shared
from meshwright.run.pieces import TensorPiece, alike
from meshwright.run.pipeline import RankPipeline
from meshwright.run.pools import places
from meshwright.run.projected import ProjectedSteps, projected_step
from meshwright.run.record import recorder
from meshwright.run.referenced import ReferencedSteps
from meshwright.run.result import StepResult
from meshwright.run.rotary import rotaries
from meshwright.run.routing import routers
from meshwright.run.selection_bias import SelectionBiases
from meshwright.run.settings import Settings
from meshwright.run.spread import SpreadByPart, part_of_name
from meshwright.run.sync import PARTS, Bucket
from meshwright.schedules.actions import Actions
from meshwright.spec import naming
from meshwright.spec.encoded import is_encoded
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.due import due_after
from meshwright.sync.fragments import final_due
from meshwright.sync.policy import read

if TYPE_CHECKING:
    from meshwright.run.routes import Routes


class Trainer:
    """Trains `model` under a legal, executable `plan` on the rank that `mesh` is. `schedule_params`: the times that a
    schedule made for given ones is made for, as a prediction has them; equal times when they are left out."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        train: Train,
        mesh: ProcessMesh,
        *,
        settings: Settings | None = None,
        schedule_params: Mapping[str, Any] | None = None,
        portions: Portions | None = None,
        group_costs: GroupCosts | None = None,
        frozen_order: FrozenOrder | None = None,
    ):
        """`portions`: what each data-parallel rank has of a step where they have not as much. `group_costs`: those by
        which groups of ranks are formed for every batch, as a prediction has them; so is `frozen_order` of what frozen
        layers run."""
        self.portions, counts = portions or Portions(), portions.counts if portions else ()
        if not plan.several:  # told by `portions` for each rank
            plan = own_plan(plan, self.portions, mesh["dp"].index)
        batch = counts[mesh["dp"].index] * plan.layout.dp * plan.pipeline.microbatch if counts else train.global_batch
        needed(plan, mesh.device.type)
        self.settings, whole = settings or Settings(), (model, plan, train)
        model, plan, train = parted(*whole)
        self.places = places(plan, model, mesh.rank, batch, schedule_params or {}, 2 if train.adversarial else 1)
        #: Where this rank is among the plan's pools; its own plan is its pool's.
        self.place = own = self.places.own
        plan = with_whole_tokens(own.pool.plan, model)
        self.model, self.plan, self.train, self.mesh, settings = model, plan, train, mesh, self.settings
        self.schedule_params = dict(schedule_params or {})
        #: Steps that are done, and sequences of the text that were trained on before this trainer began.
        self.step_count = self.sequences = 0
        self.shape = shape(train, plan.pipeline.microbatch)
        #: Weights of the microbatches, where they count otherwise than alike.
        self.weights: tuple[float, ...] = ()
        #: Which path each sequence is of, where the policy has paths.
        self.routes: Routes | None = None
        #: Called on every rank right before the optimizer writes: asynchronous checkpoints finish their copies.
        self.before_update: list[Callable[[], None]] = []
        #: Called before the exchange that no rank leaves until all have come to it.
        self.before_totals: list[Callable[[], None]] = []
        self.types = types = Types.of(plan, train, settings.precision)
        #: What encodes the samples of steps, where the model has frozen layers that do.
        encodes = *whole, mesh, types.compute, settings.seed, frozen_order
        self.encoder = FrozenEncoder(*encodes) if is_encoded(whole[0]) else None
        low = "" if settings.precision else fp8.word_of(plan, train)
        fp8.needed(low, mesh.device)
        shared = Shared(
            model=model,
            plan=plan,
            mesh=mesh,
            make=Maker(mesh.device, types.held(plan), frozen=None if train.lora is None else types.compute),
            names=naming.names(model),
            dropout=settings.dropout if train.dropout else 0.0,
            seed=settings.seed,
            causal=train.causal and model.flows[0].causal,
            train=train,
            node_ranks=settings.node_ranks,
            low=low,
            feedback=DirectFeedback.of(
                plan, model.hidden, settings.seed, torch.empty(0, dtype=types.compute, device=mesh.device)
            ),
        )
        self.feedback = shared.feedback
        actions = own.actions
        self.stages = built(shared, actions, own.layers)
        self.statistics = RunningStatistics(self.stages.values(), mesh, read(plan.sync.policy).rule.decider is not None)
        self.routers = routers(self.stages)
        self.base = None if train.lora is None else Base(self.stages, mesh["shard"])
        self.kinds = parts = parts_of(self.stages, model, plan)
        self.fragments = () if own.frozen else fragments_of(parts, plan, model, train, actions, types)
        self.away = (
            StateAway(plan.offload, mesh.device, settings.drives) if plan.offload.any and self.fragments else None
        )
        link = None if self.away is None else self.away.link
        known = self.fragments, parts, self.stages, mesh, types, settings.seed, self.portions.hold, link
        self.exchanges = exchanges_of(*known) if self.fragments else []
        if self.portions.dtypes:
            begin_alike(self.exchanges, mesh, self.portions.dtypes)
        self.coded = [one for one in self.exchanges if one.coded]
        #: Sums whose code chooses ranks as it goes.
        self.adapted = [b.code for b in self.coded if isinstance(getattr(b, "code", None), CodedSum)]
        self.adapted = [code for code in self.adapted if code.code.adapts]
        held = [h for exchange in self.exchanges for h in exchange.held()]
        policy = read(plan.sync.policy)
        kind, applied, scaled = stepping(policy, train.optimizer, settings)
        self.spread: SpreadByPart | None = None
        of: list[int] = []
        if train.grow or train.align:
            of = [part_of_name(h.parameter.parts[0].name, shared.names) for h in held]
            self.spread = SpreadByPart(self.exchanges, shared.names, mesh["data"].size, train.align)
        moved = None if self.away is None else self.away.updates(held, parts, self.exchanges)
        among = mesh["worker"], mesh.device, of
        self.optimizer = Optimizer(held, kind, applied, *among, train.clusters, moved, scaled, types.moments)
        self.biases = SelectionBiases(self.routers, held, model, mesh["worker"], train.bias_rate)
        self.heat = HotChoice(self.routers, model, mesh["worker"], by_step=plan.experts.hot_by == "step")
        if self.away is not None:
            self.away.activations(self.stages, actions, mesh["pp"].index)
        self.parts = of
        self.projected: ProjectedSteps | None = None
        if policy.rule.forwards:
            said = policy["apart"], policy["levels"]
            self.projected = ProjectedSteps(self.exchanges, self.optimizer, mesh["data"], settings, *said)
        apart = [f for f in self.fragments if not f.served]  # clients exchange with a server alone
        self.referenced: ReferencedSteps | None = None
        if policy.reference:
            said = mesh["world"], policy.reference, settings.seed
            self.referenced = ReferencedSteps(self.exchanges, self.optimizer, *said)
        self.rounds = Rounds(policy, apart, parts, self.optimizer, mesh, settings.seed)
        self.curvature = curvature_of(policy, self.optimizer, settings.seed, self.rounds.replica)
        self._update_early()
        self.groups: GroupRows | None = None
        if plan.sequence.groups != STATIC:
            self.groups = GroupRows(plan, model, train, mesh, group_costs)
        self.positions = local_positions(
            self.shape.row_tokens,
            plan.layout.cp,
            mesh["cp"].index,
            plan.sequence.algorithm,
            shared.causal and not plan.sequence.one_piece,
            ulysses=plan.sequence.ulysses,
        ).to(mesh.device)
        before, after = self._links()
        self.pipeline = self.pipeline_of(actions, before, after)
        links = [link.edges() for link in (before, after, self.encoder) if link is not None]
        connect([*self.pipeline.edges(), *itertools.chain(*links)], mesh.rank, mesh.device)
        self.rotary = rotaries(self.positions, model, types.compute)
        self.helper = Helper(self) if mesh["dp"].index >= plan.trainers else None
        self.lessons = Lessons.of(self)
        self.adversary = opposed(self, train.adversarial)

    # -- building

    def pipeline_of(
        self,
        actions: Actions,
        before: Link | None = None,
        after: Link | None = None,
        judged: bool = False,
        due: bool = True,
    ) -> RankPipeline:
        """Return what runs some actions of this rank; `judged`: without gradients, which are reduced where `due`."""
        plan = self.plan
        if (self.projected is not None) != judged:  # those that are judged have been made so before
            actions = actions.forwards()
        return RankPipeline(
            actions,
            self.mesh,
            self.stages,
            message=partial(message_of, self),
            blocking_sends=not plan.overlap.pp,
            due=np.zeros(len(actions.kind), bool) if judged or not due else due_after(actions, final_due(plan.layout)),
            final=self._final,
            before=before,
            after=after,
            frozen=self.place.frozen or self.projected is not None or judged,
            feedback=self.feedback,
            between=None if judged else self.encoder,
        )

    def _links(self, **said: bool) -> tuple[Link | None, Link | None]:
        length, hidden = self.shape.row_tokens, self.model.hidden
        return self.places.links(self.mesh, length=length, hidden=hidden, dtype=self.types.compute, **said)

    def forwards(self) -> RankPipeline:
        """The passes of a step without their backwards: those of held-out text."""
        actions = self.pipeline.actions if self.adversary is None else self.adversary.pipeline.actions
        return self.pipeline_of(actions, *self._links(backward=False), judged=True)

    def take(self, batch: int) -> None:
        """Go on with global batches of so many sequences, in as many more microbatches."""
        self.train = msgspec.structs.replace(self.train, global_batch=batch)
        params = self.schedule_params
        self.pipeline = self.pipeline_of(order(self.plan, self.plan.num_microbatches(batch), params))

    def hidden_states(self, tokens: int = 0) -> torch.Tensor:
        """An empty buffer of a microbatch's hidden states, as stages send them; of one row of so many `tokens` here."""
        layout = self.plan.layout
        length = (tokens or self.shape.row_tokens // layout.cp) // (layout.tp if layout.sp else 1)
        sizes = (length, 1 if tokens else self.shape.together, self.model.hidden)
        return torch.empty(sizes, dtype=self.types.compute, device=self.mesh.device)

    def _final(self, stage: int) -> None:
        for exchange in self.exchanges:
            if exchange.stage == stage:
                exchange.final = True

    def _update_early(self) -> None:
        """Have layers updated within the backward, where the policy says so."""
        if not read(self.plan.sync.policy).early:
            return
        at = 0
        for bucket in self.exchanges:
            held = sum(1 for _ in bucket.held())
            bucket.whole = partial(self._updated, bucket, range(at, at + held))
            at += held

    def _updated(self, bucket: Bucket, held: range) -> None:
        """A layer's gradient is whole: update it, and send it if it is due."""
        self.wait_to_write()
        with recorder().span("optimizer"):
            self.optimizer.update(self.step_count, 0.0, held)
        self.rounds.updated(bucket.of, self.step_count + 1)

    # -- training

    def step(self, batch: Batch, following: Batch | None = None) -> StepResult:
        """One optimizer step on this data-parallel rank's rows [rows of a global batch / dp, row tokens + 1], or, with
        groups of ranks, on all of a global batch. Those that look ahead are told the batch `following`."""
        record = recorder()
        record.step_begin(self.step_count)
        if self.projected is not None:
            return projected_step(self, self.projected, batch)
        passes = self.passes(batch, trained=True) if self.helper is None else []
        if self.encoder is not None and following is not None:
            self.encoder.begin(passes_of(self, following))
        if self.adversary is not None and not self.adversary.ready:  # there is no step before
            self.adversary.find(passes, self.wait_to_write)
        if self.referenced is not None:
            self.wait_to_write()  # to go half-way is a write as well
            self.referenced.begin(self.step_count, partial(self._gradients, passes))
            self.publish()
        if self.curvature is not None:
            self.wait_to_write()
            self.curvature.gather(self.step_count, partial(self._gradients, passes), self.publish)
        self.rounds.meet(self.step_count, (self.wait_to_write, self.settle), self.publish)
        total = self._gradients(passes, following)
        self.rounds.price()
        for wait in self.before_totals:
            wait()
        # every tensor-parallel rank has the whole loss of its tokens
        mine = total if self.mesh["tp"].index == 0 else torch.zeros_like(total)
        count = len(PARTS)
        if self.spread is None:
            loss, norm, _ = self.optimizer.totals(mine)
        else:
            squares = self.optimizer.squares(self.parts, count)
            loss, norm, rest = self.optimizer.totals(mine, *self.spread.squares(), *squares)
            self.seen = self.spread.seen(self.train.global_batch, rest[:count], rest[count:])
            if self.train.align:
                self.optimizer.rates = self.spread.rates
        finite = loss == loss and abs(loss) != float("inf") and norm == norm and norm != float("inf")
        if self.referenced is not None:
            self.referenced.end(finite)
            if not finite:
                self.publish()
        if finite:
            self.wait_to_write()
            if not self.rounds.policy.early:
                with record.span("optimizer"):
                    self.rounds.update(self.step_count, norm)
            self.biases.move(self.mesh.device)
            self.statistics.end()
        self.heat.choose(self.mesh.device)
        for one in self.coded:
            one.settle(finite)
        if self.adapted:
            adapt(self.adapted)
        finite = self.rounds.step(self.step_count + 1, finite)
        if finite:
            self.publish()
            self.step_count += 1
        record.step_end()
        told = self.train.tokens_per_step if self.encoder is None else self.encoder.per_step
        return StepResult(loss, batch.num_targets or told, norm, finite)

    def wait_to_write(self) -> None:
        """Let those end who still read what the optimizer is about to write."""
        for wait in self.before_update:
            wait()

    def _gradients(self, passes: list[Pass], following: Batch | None = None) -> torch.Tensor:
        """Run a step's passes and sum their gradients; this rank's part of the loss. While they are summed, find what
        the text of the batch `following` is moved by."""
        for exchange in self.exchanges:
            exchange.reset()
        for router in self.routers:
            router.begin_step()
        self.biases.begin()
        self.statistics.begin()
        self.heat.begin()
        every = passes if self.adversary is None else self.adversary.both(passes)
        if self.lessons is not None:
            self.lessons.begin()
        total = self.pipeline.run(every) if self.helper is None else self.helper.sums()
        if self.lessons is not None:
            self.lessons.learn()
        for one in self.coded:
            one.advance()
        if self.adversary is not None and following is not None:
            self.adversary.find(self.passes(following), self.wait_to_write)
        for exchange in self.exchanges:
            exchange.finish()
        return total

    def publish(self) -> None:
        """Copy the masters to the parameters that the forward uses, on every rank."""
        for exchange in self.exchanges:
            exchange.publish()
        if not self.plan.overlap.gathers_ahead:
            self.settle()

    def settle(self) -> None:
        """Wait until every parameter is whole."""
        for exchange in self.exchanges:
            exchange.ready()

    def set_step(self, step: int) -> None:
        """Go on as after so many steps: parameters and moments were loaded."""
        self.step_count = step
        self.optimizer.set_step(step)
        self.statistics.take()
        self.rounds.begin(step)
        for one in self.coded:
            one.set_step(step)
        if self.referenced is not None:
            self.referenced.set_step()
        self.publish()

    def pieces(self, *, shared: bool = False) -> list[TensorPiece]:
        """Parameters and moments this rank holds, live. Those of replicas that take steps of their own are states of
        their own; `shared`: named as those of a job whose replicas hold the same."""
        if self.place.frozen:
            return alike(self.stages.values(), self.mesh)
        found = [*self.optimizer.pieces(), *self.statistics.pieces(self.rounds.apart)]
        frozen = [] if self.encoder is None else self.encoder.saved()
        if shared:
            return [*found, *frozen]
        points = () if self.referenced is None else self.referenced.pieces()
        routes = () if self.routes is None else self.routes.pieces(self.mesh.first)
        moved = () if self.adversary is None else self.adversary.pieces()
        coded = (piece for one in self.coded for piece in one.pieces())
        return [*self.rounds.named(found), *frozen, *points, *routes, *moved, *coded]

    def common_pieces(self) -> list[TensorPiece]:
        """Parameters and moments that this rank holds at the end of a round, named as what every replica has in common:
        its parameters are, and its moments stand for those of any."""
        return [*self.pieces(shared=True), *self.rounds.pieces()] if self.rounds.apart else list(self.pieces())

    @property
    def copies(self) -> int:
        """Copies of a parameter that step together, each of which may keep what its code lost."""
        layout = self.plan.layout
        return layout.dp * layout.cp // (layout.shard_group if layout.zero else 1)

    @property
    def joined(self) -> bool:
        """Whether all replicas hold the same parameters: always, but within a round of steps of their own."""
        return self.rounds.joined(self.step_count)

    @property
    def round_ended(self) -> bool:
        """Whether the steps so far are whole rounds, at whose ends replicas may wait for one another."""
        return self.rounds.ended(self.step_count)

    def passes(self, batch: Batch, *, trained: bool = False) -> list[Pass]:
        """The microbatches of a batch, cut to this context-parallel rank; where ranks share documents in groups of
        their own, of a whole global batch, and in as many rounds as they take. Of a step that is `trained` on some may
        be encoded already."""
        found = grouped(self, batch) if self.groups is not None else passes_of(self, batch)
        return found if self.encoder is None else self.encoder.given(found, trained=trained)

    @property
    def looks_ahead(self) -> bool:
        """Whether a step begins to work on the batch of the next one."""
        return self.adversary is not None or (self.encoder is not None and self.encoder.ahead)

    def take_rounds(self, count: int) -> None:
        """Run so many microbatches, one a round of groups of ranks."""
        if count != 1 + max(microbatch for _, _, microbatch in self.pipeline.program):
            self.pipeline = self.pipeline_of(order(self.plan, count, self.schedule_params))
