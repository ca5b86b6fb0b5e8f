"""Gradients and parameters between the replicas of a rank: buckets of flat memory, one for the fragments of a kind of
parameters in a layer segment.

One mechanism for ZeRO-0, 1 and 2 (Rajbhandari et al. 1910.02054): gradients are summed into the shards of a sharding
group (of one rank without ZeRO), shards are summed over its replicas, the optimizer updates its shard, and shards are
gathered into whole parameters again. A bucket's exchange starts as soon as its last gradient of the step is there,
beside the rest of the backward (Li et al. 2006.15704), and its parameters are gathered beside the start of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from meshwright.run.ballot import Ballot
from meshwright.run.coded import CodedSum
from meshwright.run.collect import gather_async, reduce_scatter_async, scattered, summed
from meshwright.run.divided import DividedSum
from meshwright.run.host_memory import HostLink
from meshwright.run.host_update import HostMaster
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.run.pieces import HeldElements, TensorPiece
from meshwright.run.record import recorder
from meshwright.run.referenced_sum import ReferencedSum
from meshwright.run.shards import Awaited, Run, ShardCode
from meshwright.run.sink import GradientSink, hand_over
from meshwright.run.turns import InPieces, PieceTurns
from meshwright.run.uneven import UnevenShards
from meshwright.sync.fragments import GATHERED, GRADIENTS, LION, PROJECTED, REFERENCE, SELF, STEP, Fragment
from meshwright.sync.record import NO_CODEC

#: Parts of a model whose gradients are looked at apart.
PARTS = ("embedding", "blocks", "head")


class Where(NamedTuple):
    """Groups a bucket is exchanged over: ``shard`` holds one copy together, ``replica`` are its copies; ``tp``
    completes gradients that tensor-parallel ranks have parts of; ``twin`` the other rank of the pipeline with the
    same weights, if there is one."""

    shard: AxisGroup
    replica: AxisGroup
    tp: AxisGroup
    twin: AxisGroup | None = None

    @classmethod
    def of(cls, fragment: Fragment, mesh: ProcessMesh) -> Where:
        """Return the groups of this process that a fragment names."""
        twin = None if fragment.twin == SELF else mesh[fragment.twin.name]
        return cls(mesh[fragment.shard.name], mesh[fragment.replica.name], mesh["tp"], twin)


class Bucket:
    """Parameters that are exchanged together. Their storage becomes views of one flat tensor."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        fragments: Mapping[str, Fragment],
        mesh: ProcessMesh,
        *,
        grads: torch.dtype,
        masters: torch.dtype,
        seed: int = 0,
        hold: Sequence[int] = (),
        link: HostLink | None = None,
    ):
        """`seed` is that of codes that draw; `fragments` are those of these parameters, by what they carry. `hold` are
        relative sizes of the shards of every rank that has one, () for equal ones. `link` leads to the host's memory,
        where its processor updates these parameters."""
        gradient = fragments[GRADIENTS]
        self.parameters, self.where = list(parameters), Where.of(gradient, mesh)
        self.stage, segment = gradient.units
        self.of = gradient.units, gradient.kind
        self.label = {"stage": self.stage, "layer": segment}
        self.rounds, self.late = gradient.due != STEP, not gradient.beside
        #: What has the gradient's sum let tokens pass, in pieces.
        self.turns: PieceTurns | None = mesh["ep"].turns
        where, first = self.where, self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        ways = where.shard.size
        #: The shards, where they are not of equal size.
        self.uneven = UnevenShards(sum(sizes), hold, where.shard) if hold and ways > 1 else None
        self.length = sum(sizes) if self.uneven else -(-sum(sizes) // ways) * ways
        self.values = torch.zeros(self.length, dtype=first.dtype, device=first.device)
        self.grads = grads
        self._gradient: torch.Tensor | None = None
        #: Counts the times that gradients were summed from nothing.
        self.round = 0
        self.count = 0
        #: Contributions of a microbatch: of layers that are run in slices each parameter has several.
        self.contributions = sum(getattr(p, "contributions", 1) for p in self.parameters)
        self.exchanged = False
        self.starts = []
        at = 0
        for p, size in zip(self.parameters, sizes):
            view = self.values[at : at + size].view(p.shape)
            view.copy_(p.detach())
            p.data = view
            p.sink = GradientSink(self, at, p)
            p.register_post_accumulate_grad_hook(hand_over)
            self.starts.append(at)
            at += size
        self._known = {p.info.name: (p, start) for p, start in zip(self.parameters, self.starts)}
        width = self.length // ways
        self.lo, self.hi = where.shard.index * width, (where.shard.index + 1) * width
        if self.uneven is not None:
            self.lo, self.hi = self.uneven.mine
            width = self.hi - self.lo
        mine = self.values[self.lo : self.hi]
        #: The codes in which gradients are scattered and parameters gathered, by what is exchanged; the step.
        self.shards, self.step = {}, 0
        for what, f in fragments.items() if ways > 1 else ():
            if f.within != NO_CODEC:
                self.shards[what] = ShardCode(f.within, where.shard, [Run(0, width)], seed, f"{f.units}{f.kind}{what}")
        own = masters != first.dtype or GATHERED in self.shards  # what is gathered is less than what is updated
        #: The copy that the host updates, where it does.
        self.host = None if link is None else HostMaster(mine, masters, grads, link, self.label)
        self.master = self.host.master if self.host is not None else mine.to(masters, copy=True) if own else mine
        self.shard_gradient = None
        if ways > 1:
            self.shard_gradient = torch.zeros(width, dtype=grads, device=first.device)
        #: The sum between copies, where it is encoded or is another than the sum.
        self.code: CodedSum | ReferencedSum | Ballot | DividedSum | None = None
        if (gradient.sums or not gradient.plain) and not where.replica.alone:
            like = torch.empty(0, dtype=grads, device=first.device)
            if gradient.sums:
                self.code = DividedSum(gradient, where.replica, width, like)
            elif gradient.update == LION:
                self.code = Ballot(gradient, where.replica, width, like)
            elif gradient.update == REFERENCE:
                self.code = ReferencedSum(gradient, where.replica, width, like, seed)
            else:
                self.code = CodedSum(gradient, where.replica, width, like, seed)
        self._summed = False
        self._pending: tuple[dist.Work | Awaited | InPieces, torch.Tensor | None] | None = None
        #: The span of an exchange that cannot say when it is over, and ends where it is waited for.
        self._span = -1
        self._gather: dist.Work | Awaited | None = None
        self.final = False
        #: Whether parameters are trained without gradients.
        self.projected = gradient.apply == PROJECTED
        #: The part of the model of each parameter, where squares of this rank's own gradient are taken by them.
        self.parts: torch.Tensor | None = None
        self.squares: torch.Tensor | None = None
        #: Called when a step's gradient is whole, where replicas exchange none and layers are updated at once.
        self.whole: Callable[[], None] | None = None
        #: Puts something else in place of this rank's gradient [length], where its replica is faulty.
        self.spoiled: Callable[[torch.Tensor], None] | None = None

    # -- during the backward

    def gradient_buffer(self) -> torch.Tensor:
        """The flat gradient [length], begun anew with every step or, where gradients are sharded, every round."""
        if self.rounds and self._pending is not None:
            self._settle()
        if self._gradient is None:
            self._gradient = torch.empty(self.length, dtype=self.grads, device=self.values.device)
            self._gradient[self.starts[-1] + self.parameters[-1].numel() :].zero_()  # padding
            self.round += 1
        return self._gradient

    def arrived(self) -> None:
        """One contribution was added. The last one before a reduction is due starts the exchange."""
        self.exchanged = False
        if self.turns is not None:
            self.turns.go()
        self.count += 1
        if self.count == self.contributions:
            self.count = 0
            if not self.late and self.final:
                self.exchange()

    def exchange(self) -> None:
        """Start summing the gradient over the replicas."""
        self.exchanged, self.final = True, False
        whole = self.gradient_buffer()
        for parameter in self.parameters:
            parameter.sink.complete()
        self._complete(whole)
        if self.spoiled is not None:
            self.spoiled(whole)
        if self.parts is not None:
            self.squares = self._squares(whole)
        shard = self.where.shard
        if shard.alone:
            if self.code is not None:
                self.code.begin(whole)
            elif not self.where.replica.alone and self.turns is not None:
                said = {**self.label, **_said(whole, self.where.replica)}
                self._pending = (summed(self.turns, whole, self.where.replica, **said), None)
            elif not self.where.replica.alone:
                token = recorder().start("all_reduce", "dp", **self.label, **_said(whole, self.where.replica))
                work = dist.all_reduce(whole, group=self.where.replica.handle, async_op=True)
                recorder().watch(work, token)
                self._pending = (work, None)
            elif self.host is not None and self.code is None:
                self.host.leave(whole)  # nobody else has a part of it
            if self.whole is not None:
                self.whole()
            return
        out = torch.empty_like(self.shard_gradient) if self._summed else self.shard_gradient
        if GRADIENTS in self.shards:
            said = self.label | {"group": shard.ranks}
            self._pending = (self.shards[GRADIENTS].scatter(out, whole, **said), out)
            return
        if self.turns is not None:
            self._pending = (scattered(self.turns, whole, out, shard, **self.label, **_said(whole, shard)), out)
            return
        token = recorder().start("reduce_scatter", "dp", **self.label, **_said(whole, shard, self.uneven))
        work = self.uneven.reduce(out, whole) if self.uneven else reduce_scatter_async(out, whole, shard)
        self._span = recorder().watch(work.work if self.uneven else work, token, waited=True)
        self._pending = (work, out)

    def _squares(self, whole: torch.Tensor) -> torch.Tensor:
        """The squared lengths of this rank's gradient by part of the model, float64, elements that several ranks hold
        counted once among them."""
        views = [whole[at : at + p.numel()] for p, at in zip(self.parameters, self.starts)]
        wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
        squares = torch.stack(torch._foreach_norm(views, 2, wide)).to(torch.float64).square()
        twins = 1 if self.where.twin is None else self.where.twin.size
        copies = torch.tensor([p.copies * twins for p in self.parameters], dtype=torch.float64, device=whole.device)
        return squares.new_zeros(len(PARTS)).index_add_(0, self.parts, squares / copies)

    def _complete(self, whole: torch.Tensor) -> None:
        """Sum gradients that several tensor-parallel ranks have parts of, and those of the twin."""
        tp = self.where.tp
        for sums in {p.sums for p in self.parameters if p.sums > 1} if not tp.alone else ():
            views = [whole[at : at + p.numel()] for p, at in zip(self.parameters, self.starts) if p.sums == sums]
            parts = torch.cat(views)
            if sums == tp.size:
                dist.all_reduce(parts, group=tp.handle)
            else:
                every = [torch.empty_like(parts) for _ in range(tp.size)]
                dist.all_gather(every, parts, group=tp.handle)
                first = tp.index // sums * sums
                parts = torch.stack(every[first : first + sums]).sum(0)
            for view, part in zip(views, parts.split([v.numel() for v in views])):
                view.copy_(part)
        if self.where.twin is not None:
            with recorder().span("all_reduce", "dp", **self.label, **_said(whole, self.where.twin)):
                dist.all_reduce(whole, group=self.where.twin.handle)

    def _settle(self) -> None:
        """Wait for the exchange; a shard's sum is added to what earlier rounds left."""
        work, out = self._pending
        work.wait()
        recorder().stop(self._span)
        self._span = -1
        self._pending = None
        if out is None:
            return
        if self._summed:
            self.shard_gradient.add_(out)
        self._summed = True
        if self.rounds:
            self._gradient = None
            for parameter in self.parameters:
                parameter.sink.forget()

    # -- around the update

    def advance(self) -> None:
        """Start what a code sends after its first message."""
        if self.code is not None:
            self.code.advance()

    def finish(self) -> None:
        """The gradient is whole on return."""
        if self.late or not self.exchanged:
            self.exchange()
        if self._pending is not None:
            self._settle()
        if self.code is not None:
            if self.shard_gradient is not None:
                self.code.begin(self.shard_gradient)
            self.mine().copy_(self.code.end())
        elif self.shard_gradient is not None and not self.where.replica.alone:
            said = _said(self.shard_gradient, self.where.replica)
            with recorder().span("all_reduce", "dp", **self.label, **said):
                dist.all_reduce(self.shard_gradient, group=self.where.replica.handle)
        if self.host is not None:
            self.host.leave(self.mine()[: self.hi - self.lo])

    def mine(self) -> torch.Tensor:
        """The gradient of what this rank updates."""
        return self.gradient_buffer() if self.shard_gradient is None else self.shard_gradient

    def reset(self) -> None:
        """Forget the gradient: a step begins."""
        self.count, self.final, self.exchanged, self._summed = 0, False, False, False
        self.round += 1
        if self.host is not None:
            self.host.forget()
        for code in self.shards.values():
            code.begin(self.step)

    @property
    def coded(self) -> bool:
        """Whether something is encoded."""
        return self.code is not None or bool(self.shards)

    def settle(self, used: bool) -> None:
        """The exchanged gradient was used, or lost: the code goes on from it, or from before."""
        self.step += used
        if self.code is not None:
            self.code.settle(used)

    def set_step(self, step: int) -> None:
        """Go on as after so many steps."""
        self.step = step
        if self.code is not None:
            self.code.set_step(step)

    def publish(self) -> None:
        """The master copy has changed: cast it, and start gathering the shards of the others."""
        mine = self.values[self.lo : self.hi]
        if self.host is not None:
            self.host.settle()
        elif self.master.data_ptr() != mine.data_ptr():
            mine.copy_(self.master)
        if GATHERED in self.shards:
            code = self.shards[GATHERED]
            code.begin(self.step)
            self._gather = code.gather(self.values, mine.clone(), **self.label, group=self.where.shard.ranks)
        elif not self.where.shard.alone:
            said = _said(self.values, self.where.shard, self.uneven)
            token = recorder().start("all_gather", "dp_gather", **self.label, **said)
            if self.uneven is not None:
                self._gather = self.uneven.gather(self.values, mine.clone())
            else:
                self._gather = gather_async(self.values, mine.clone(), self.where.shard)
            recorder().watch(self._gather.work if self.uneven else self._gather, token)

    def ready(self) -> None:
        """Wait until the parameters are whole."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def held(self) -> Iterable[HeldElements]:
        """Yield the elements that this rank updates, parameter by parameter."""
        where = self.where
        whole = self.shard_gradient if self.shard_gradient is not None else self._held_gradient()
        twins = 1 if where.twin is None else where.twin.size
        for p, at in zip(self.parameters, self.starts):
            lo, hi = max(self.lo, at), min(self.hi, at + p.numel())
            if lo >= hi:
                continue
            inside = slice(lo - self.lo, hi - self.lo)
            first = where.twin is None or where.twin.index == 0
            yield HeldElements(
                parameter=p.info,
                start=lo - at,
                stop=hi - at,
                master=self.master[inside],
                gradient=whole[inside],
                copies=where.replica.size * p.copies * twins,
                decays=len(p.shape) > 1,
                owner=where.replica.index == 0 and where.tp.index % p.copies == 0 and first,
                arrived=None if self.host is None else self.host.gradient[inside],
            )

    def _held_gradient(self) -> torch.Tensor:
        """The gradient of what this rank updates; what is learnt by forward passes alone has none."""
        return self.values.new_empty(0) if self.projected else self.gradient_buffer()

    def pieces(self) -> Iterable[TensorPiece]:
        """Yield what the code keeps, live: of each rank its own, and the factor that all copies have alike."""
        if self.code is None:
            return
        replica = self.where.replica.index
        for key, values in self.code.kept():
            key = f"{key}@{replica}" if replica else key
            for h in self.held():
                parameter, at = self._known[h.parameter.name]
                first = self.where.twin is None or self.where.twin.index == 0
                owner = self.where.tp.index % parameter.copies == 0 and first
                mine = values[at + h.start - self.lo : at + h.stop - self.lo]
                yield TensorPiece(key, h.parameter, h.start, h.stop, mine, owner)
        yield from self.code.factor_pieces(replica == 0, f"{self.where.shard.index}.{self.where.tp.index}")


def _said(tensor: torch.Tensor, group: AxisGroup, uneven: UnevenShards | None = None) -> dict[str, object]:
    """Return the recorder's fields of an exchange: the ranks of its group and the tensor's bytes, padded as they travel
    where shards are uneven."""
    carried = uneven.carried if uneven is not None else tensor.numel()
    return {"group": group.ranks, "num_bytes": carried * tensor.element_size()}
