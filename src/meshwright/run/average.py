"""Rounds of replicas that take steps of their own: what they changed, averaged, and applied by an outer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from meshwright.run.coded import CodedSum
from meshwright.run.dual import DUAL, MIDDLE, PricedMean
from meshwright.run.mesh import ProcessMesh, members
from meshwright.run.mixing import HEARD, KNOWN, MixedMean
from meshwright.run.optimizer import Optimizer
from meshwright.run.outer import ARRIVED, MOMENTUM, OWN, OuterStep
from meshwright.run.pieces import JUDGED, ROUTE, HeldElements, TensorPiece
from meshwright.run.ticking import MOMENTA, Ticking, TickingValues
from meshwright.sync.fragments import MOMENTS, PARAMETERS, Fragment
from meshwright.sync.record import Outer, SyncPolicy
from meshwright.sync.rounds import begun, ended, since_due

#: The state that a change is measured from, in checkpoints.
BEGUN = "round_start"
#: Steps after which replicas that exchange nothing learn whether the run is to end.
LOOKED_UP = 100


class Average:
    """One fragment of what this rank holds: 1-D views of parameters or moments, averaged as one run of values."""

    def __init__(
        self,
        fragment: Fragment,
        held: Sequence[HeldElements],
        views: Sequence[torch.Tensor],
        mesh: ProcessMesh,
        seed: int = 0,
    ):
        self.group, self.held, self.views = mesh[fragment.replica.name], list(held), list(views)
        self.part, self.of = fragment.part, (fragment.units, fragment.kind)
        #: Which part of the values this rank has, among those of its shard and tensor-parallel ranks.
        self.place = f"{mesh[fragment.shard.name].index}.{mesh['tp'].index}"
        #: As many values as the longest shard has, so that every rank sends as much.
        self.length = max(ceil(fragment.num_elements / fragment.shard.size), sum(len(v) for v in views))
        self.sum = CodedSum(fragment, self.group, self.length, self.views[0], seed)
        self.outer = OuterStep(fragment.outer or Outer(), self.length, self.views[0], fragment.lag)
        #: What a replica's change counts in the mean, more or less than another's.
        self.weight = 1.0
        #: Values at the last average, where what changed since then is exchanged.
        self.begun = self._flat() if fragment.outer is not None or not self.sum.code.exact else None
        self.sending = False
        self._own: torch.Tensor | None = None

    def _flat(self) -> torch.Tensor:
        flat = torch.cat([view.detach() for view in self.views])
        return torch.cat((flat, flat.new_zeros(self.length - len(flat))))

    def begin(self) -> None:
        """Take the values as they are for those of the last average."""
        if self.begun is not None:
            self.begun.copy_(self._flat())

    def at(self, exchanges: int) -> None:
        """Go on as after so many exchanges."""
        self.sum.step = exchanges

    def send(self) -> None:
        """Start summing what this replica has, or what it changed, if that has not begun within the backward."""
        if self.sending:
            return
        flat = self._flat()
        change = flat if self.begun is None else flat - self.begun
        if self.group.alone:  # a module that nobody else holds
            self._own = change
        else:
            self.sum.begin(change if self.weight == 1 else change * self.weight, key="average")
        self.sending = True

    def arrive(self) -> None:
        """Wait for what is on its way, and keep it until it is applied."""
        if self.sending and ARRIVED in self.outer.state:
            self.outer.state[ARRIVED].copy_(self._mean())

    def apply(self) -> None:
        """Put the mean over the replicas, or where the outer step leads, in place of the values."""
        self.arrive()
        mean = self.outer.state.get(ARRIVED)
        mean = self._mean() if mean is None else mean
        self._put(mean if self.begun is None else self._stepped(mean))

    def turn(self) -> None:
        """Apply what was sent a round ago, and send what this one changed."""
        self.arrive()
        change = self._flat() - self.begun
        mean = self.outer.late(change, self.group.size)
        self.send()
        self._put(self._stepped(mean))

    def _stepped(self, mean: torch.Tensor) -> torch.Tensor:
        """The values after the outer step along a mean change."""
        self.begun.add_(self.outer.along(mean))
        return self.outer.mixed(self._flat(), self.begun) if self.outer.outer.mix else self.begun

    def _put(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            for view, part in zip(self.views, flat[: sum(map(len, self.views))].split([len(v) for v in self.views])):
                view.copy_(part)

    def _mean(self) -> torch.Tensor:
        """The mean of all replicas' values, as they come out of the code."""
        if self._own is not None:
            own, self._own, self.sending = self._own, None, False
            return own
        total = self.sum.end()
        self.sum.settle(True)
        self.sending = False
        return total / self.group.size

    def pieces(self) -> Iterable[TensorPiece]:
        """The values of the last average, what the outer step and the code keep, live, and what was on its way."""
        self.arrive()
        states = [] if self.begun is None else [(BEGUN, self.begun)]
        for key, values in (*states, *self.outer.state.items(), *self.sum.kept()):
            at = 0
            for h in self.held:
                size = h.stop - h.start
                yield TensorPiece(key, h.parameter, h.start, h.stop, values[at : at + size], h.owner)
                at += size
        yield from self.sum.factor_pieces(any(h.owner for h in self.held), self.place)


#: What keeps a fragment together, in one way or another.
Averaged = Average | MixedMean | PricedMean | TickingValues


class Rounds:
    """Keeps replicas together that take steps of their own: at their steps of a round, parts of the layers are sent,
    and applied at once or steps later. A plan whose replicas step together has rounds of one step and nothing to send.
    """

    def __init__(
        self,
        policy: SyncPolicy,
        fragments: Iterable[Fragment],
        parts: Mapping[Any, Any],
        optimizer: Optimizer,
        mesh: ProcessMesh,
        seed: int = 0,
    ):
        """`parts`: the parameters of each ((stage, segment), kind). `seed`: that of codes that draw."""
        self.policy, self.mesh, self.optimizer = policy, mesh, optimizer
        #: Which of the sets of ranks that step together this rank is in, by their first ranks, and how many there are.
        firsts = sorted({ranks[0] for ranks in members(mesh.plan)["worker"]})
        self.replica, self.replicas = firsts.index(mesh["worker"].ranks[0]), len(firsts)
        self.averages = _averages(fragments, parts, optimizer, mesh, seed)
        #: The clock of this replica, where each has one.
        self.ticking: Ticking | None = None
        if policy.clocks is not None:
            self.ticking = Ticking(policy.clocks, self.averages, self.replica, self.replicas, optimizer.settings.lr)
        self._sound, self._votes = True, dict[int, tuple[torch.Tensor, dist.Work]]()

    @property
    def apart(self) -> bool:
        """Whether replicas take steps of their own."""
        return bool(self.averages) or self.policy.differing_models

    def ended(self, step: int) -> bool:
        """Whether so many steps are whole rounds; those that exchange nothing look up now and then."""
        if not self.averages:
            return not self.policy.differing_models or step % LOOKED_UP == 0
        return ended(self.policy, step)

    def joined(self, step: int) -> bool:
        """Whether all replicas hold the same parameters after so many steps."""
        return not self.apart or (self.ended(step) and not self.policy.apart) or step == 0

    def weigh(self, sizes: Sequence[int]) -> None:
        """Count a replica's change by the data of its path, of which each has so much, among those that share a
        module (eqs. 2 and 3 of 2403.10616)."""
        firsts = sorted({ranks[0] for ranks in members(self.mesh.plan)["worker"]})
        of = {rank: firsts.index(some[0]) for some in members(self.mesh.plan)["worker"] for rank in some}
        data = {rank: sizes[self.policy.paths.path_of(one, self.replicas)] for rank, one in of.items()}
        for average in self.averages:
            every = [data[rank] for rank in average.group.ranks]
            average.weight = data[self.mesh.rank] * len(every) / sum(every)

    def meet(self, step: int, ready: Sequence[Callable[[], None]], publish: Callable[[], None]) -> None:
        """Meet whom the clock of this replica has it meet before its gradient step, once values are `ready` to be
        written, and `publish` them; nothing where it has no clock."""
        if self.ticking is not None:
            for wait in ready:
                wait()
            self.ticking.until_gradient(step)
            publish()

    def update(self, step: int, norm: float) -> None:
        """Step along the gradient: by the optimizer, pulled to the middle between neighbours where prices are kept,
        or as the clock of this replica has it."""
        settings = self.optimizer.settings
        if self.ticking is not None:
            self.ticking.after_gradient(step, settings.lr_at(step), settings.weight_decay)
            return
        self.optimizer.update(step, norm)
        self.pull(settings.lr_at(step))

    def price(self) -> None:
        """Add the prices of differing from neighbours to the gradients of a step, where replicas keep some."""
        for average in self.averages if self.policy.priced else ():
            average.price()

    def pull(self, rate: float) -> None:
        """Pull what took a step of a learning rate to the middle between neighbours, where replicas keep prices."""
        for average in self.averages if self.policy.priced else ():
            average.pull(rate)

    def step(self, count: int, finite: bool) -> bool:
        """End the step that makes so many. Parts that are due are sent, those that were sent long enough ago applied,
        unless a step of a replica was not finite since the last exchange: that is learnt, and said, then alone."""
        if not self.averages or self.ticking is not None:
            return finite
        self._sound &= finite
        sound, delay, when = True, self.policy.delay, self.policy.when
        for part in range(self.policy.parts):
            since = since_due(self.policy, part, count)
            if since == 0 and delay == when:
                sound &= self._exchange(part, "turn")
            elif since == 0 and delay:
                self._vote(part)
                for average in self._of(part):
                    average.send()
            elif since == 0:
                if not self.policy.meets:
                    self._vote(part)
                sound &= self._exchange(part, "send", "apply")
            elif since == delay and self._begun(part, count) > 0:
                sound &= self._exchange(part, "apply")
        return sound

    def updated(self, of: tuple[tuple[int, int], str], count: int) -> None:
        """Send what was updated within the backward of the step that makes so many, if it is due then."""
        for average in self.averages:
            if isinstance(average, Average) and average.of == of and not since_due(self.policy, average.part, count):
                average.send()

    def _begun(self, part: int, step: int) -> int:
        return begun(self.policy, part, step)

    def _of(self, part: int) -> list[Averaged]:
        return [average for average in self.averages if average.part == part]

    def _vote(self, part: int) -> None:
        """Start telling all whether the steps since the last exchange were finite."""
        flag = torch.tensor(float(self._sound), device=self.mesh.device)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.mesh["world"].handle, async_op=True)
        self._votes[part], self._sound = (flag, work), True

    def _exchange(self, part: int, *acts: str) -> bool:
        """Do these with a part, if the steps before it was sent were finite on all replicas; they were where it was not
        sent here, but by the run that this one goes on from."""
        flag, work = self._votes.pop(part, (None, None))
        if work is not None:
            work.wait()
        if self.policy.delay == self.policy.when or self.policy.meets:  # told while the next steps are taken
            self._vote(part)
        if flag is not None and not flag:
            return False
        for act in acts:
            for average in self._of(part):
                getattr(average, act)()
        return True

    def begin(self, step: int) -> None:
        """Go on as after so many steps: parameters were loaded."""
        for average in self.averages:
            average.at(self._begun(average.part, step))
            if self.joined(step):
                average.begin()

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield what rounds keep, live, as the first replica names it."""
        for average in self.averages:
            yield from average.pieces()

    def named(self, pieces: list[TensorPiece]) -> list[TensorPiece]:
        """The pieces of this rank and those of its rounds; of replicas that step apart each has states of its own."""
        if not self.apart:
            return pieces
        found = [*pieces, *self.pieces()]
        return [piece._replace(key=f"{piece.key}@{self.replica}") for piece in found] if self.replica else found


def of_round(key: str) -> bool:
    """Whether a state is what a round keeps, or which sequences replicas train on."""
    return key.partition("@")[0] in (BEGUN, ARRIVED, MOMENTUM, OWN, KNOWN, HEARD, DUAL, MIDDLE, *MOMENTA, ROUTE, JUDGED)


def _averages(
    fragments: Iterable[Fragment], parts: Mapping[Any, Any], optimizer: Optimizer, mesh: ProcessMesh, seed: int
) -> list[Averaged]:
    """The averages of what the optimizer holds."""
    kinds = {parameter.info.name: key for key, some in parts.items() for parameter in some}
    held: dict[Any, list[int]] = {}
    for number, h in enumerate(optimizer.held):
        held.setdefault(kinds[h.parameter.name], []).append(number)
    out = []
    for fragment in fragments:
        numbers = held.get((fragment.units, fragment.kind), [])
        mine = [optimizer.held[i] for i in numbers]
        kind = Average
        if fragment.mix is not None:
            kind = PricedMean if fragment.mix.priced else TickingValues if fragment.mix.clocks else MixedMean
        if fragment.what == PARAMETERS and mine:
            out.append(kind(fragment, mine, [h.master for h in mine], mesh, seed))
        elif fragment.what == MOMENTS and mine:
            out.append(kind(fragment, mine, [m for i in numbers for m in optimizer.moments(i)], mesh, seed))
    return out
