"""Sums over a group of values that travel in a codec or are combined by all, with what the codec keeps between
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.run import beside
from meshwright.run.beside import Beside, stream_of
from meshwright.run.codecs import on_tensors
from meshwright.run.collect import all_gather_single
from meshwright.run.combine import combined
from meshwright.run.mesh import AxisGroup
from meshwright.run.orthonormal import all_orthonormal
from meshwright.run.pieces import FACTOR, Parameter, Part, TensorPiece
from meshwright.run.record import recorder
from meshwright.run.ringed import ring_sum
from meshwright.sync.codecs import Codec, Factors, Tensor, codec
from meshwright.sync.codecs.lgreco import candidates
from meshwright.sync.codecs.powersgd import begun, summed
from meshwright.sync.fragments import SIGN, TIED, Fragment
from meshwright.sync.record import ADDED

#: What a codec lost, what gathers with momentum, and a gradient from which differences are sent: states of a rank, in
#: checkpoints.
LOST, GATHERED, OWN_REFERENCE = "code_lost", "code_momentum", "code_reference"
#: Types of values on their way.
_CARRIED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Sent(NamedTuple):
    """A message on its way: what arrives, the collective, the values that were encoded and their bytes."""

    arrives: torch.Tensor
    work: dist.Work
    values: torch.Tensor
    own: torch.Tensor
    seed: int


def drawn_seed(code: Codec, seed: int, step: int, place: str, rank: int) -> int:
    """The seed of what a code draws for an exchange: of every rank its own, or the same for all."""
    who = rank if code.drawn == "own" else -1
    mixed = blake2b(repr((seed, step, place, who)).encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little") >> 1


class CodedSum:
    """The sum over a group of `length` values like `like`, in the codec of a fragment; where that combines what arrives
    in another way, as many times the result as there are ranks. :meth:`begin` sends what this rank has, :meth:`end`
    gives the sum; :meth:`settle` says whether it was used. ``seed`` and ``step`` decide what is
    drawn."""

    def __init__(self, fragment: Fragment, group: AxisGroup, length: int, like: torch.Tensor, seed: int = 0):
        self.code, self.tensors = codec(fragment.codec), on_tensors(fragment.codec)
        #: Whether every rank gets what every other has, and how it makes one of it where that is not the sum.
        self.collected = fragment.collected
        self.combined = None if fragment.combine in ADDED else combined(fragment.combine)
        self.group, self.length, self.seed, self.step = group, length, seed, 0
        self.place = fragment.kind if fragment.kind == TIED else f"{fragment.units}{fragment.kind}"
        self.label = {"stage": fragment.units[0], "layer": fragment.units[1]}
        #: What is sent within a backward or applied steps later goes beside everything else.
        self.queue = "outer" if fragment.lag or (fragment.every > 1 and fragment.beside) else "dp"
        self.state: dict[str, torch.Tensor] = {}
        #: Values of a step by which ranks or codes are chosen.
        self.measured: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        if self.code.feedback:
            self.state[LOST] = like.new_zeros(length)
        if self.code.correction:
            self.state[GATHERED] = like.new_zeros(length)
        if self.code.factors is not None:
            self.factors = self.code.factors(length, fragment.tensors)
            self.plain = _between(self.factors, length) if fragment.tensors else []
            #: Room for the factors of as many columns as any choice has; those that are not used are zero.
            self.room = [one._replace(rank=self._most(one)) for one in self.factors]
            first = [torch.from_numpy(begun(one)).to(like) for one in self.room]
            for q, one in zip(first, self.factors):
                q[..., one.rank :] = 0
            self.state[FACTOR] = torch.cat([*(q.view(-1) for q in first), like.new_empty(0)])
        self.kind = fragment.kind
        if self.code.levels:  # the place of the code in use among them
            self.state[FACTOR] = like.new_zeros(1)
            self.use(self.code.usual)
        #: Whether the sign of the sum is the result.
        self.signed = fragment.update == SIGN
        self._after: dict[str, torch.Tensor] = {}
        self._sent: _Sent | None = None
        self.stream = stream_of(like) if self.code.ring else None
        self._hops: tuple[Beside, int] | None = None
        self._rounds: Any = None
        self._second: tuple[torch.Tensor, dist.Work | None] | None = None

    def begin(self, values: torch.Tensor, **said: Any) -> None:
        """Start sending values [length]; `said` is added to the spans."""
        self.said, self._after = said, {}
        if self.code.correction:
            self._after[GATHERED] = self.state[GATHERED] * self.code.correction + values
            values = self.state[LOST] + self._after[GATHERED]
        elif self.code.feedback:
            values = values + (self.state[LOST] * self.code.decay if self.code.decay != 1 else self.state[LOST])
        if self.code.ring:
            token = recorder().start("all_reduce", self.queue, **self._label(values.nbytes))
            self._hops = (
                beside.begin(partial(ring_sum, form=self.tensors, group=self.group), values, self.stream),
                token,
            )
            return
        if self.code.factors is not None:
            self._rounds = summed(self.matrices(values), self._begun(), all_orthonormal)
            first = torch.cat([*(p.reshape(-1) for p in next(self._rounds)), *(values[a:b] for a, b in self.plain)])
            self._sent = _Sent(first, self._start(first), values, first, 0)
            return
        self._values = values if self.code.levels else None
        seed = self._seed() if self.code.drawn else 0
        wire = self.tensors.encode(values, seed)
        if not self.collected:
            arrives = wire.clone() if self.code.feedback else wire
            work = self._start(arrives.view(_CARRIED.get(self.code.summed, values.dtype)))
        else:
            wire = self._padded(wire) if self.code.varies else wire
            arrives = wire.new_empty(self.group.size * len(wire))
            token = recorder().start("all_gather", self.queue, **self._label(arrives.nbytes))
            work = all_gather_single(arrives, wire, group=self.group.handle, async_op=True)
            recorder().watch(work, token)
        self._sent = _Sent(arrives, work, values, wire, seed)

    def _padded(self, wire: torch.Tensor) -> torch.Tensor:
        """Bytes that say themselves where they end, and as many more as the longest of all has."""
        most = torch.tensor(len(wire), device=wire.device)
        with recorder().span("all_reduce", self.queue, **self._label(8)):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group.handle)
        return torch.cat((wire, wire.new_zeros(int(most) - len(wire))))

    def matrices(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The matrices [times, rows, columns] among values, those of no known shape with zeros at their end."""
        whole = self._whole(values)
        return [whole[f.start : f.end].view(f.times, f.rows, f.columns) for f in self.factors]

    def _whole(self, values: torch.Tensor) -> torch.Tensor:
        """Values with zeros behind them, as far as the last matrix goes."""
        padding = max([one.end for one in self.factors], default=0) - self.length
        return torch.cat((values, values.new_zeros(padding))) if padding > 0 else values

    def _most(self, one: Factors) -> int:
        """The largest rank that may be chosen for a matrix."""
        return max(candidates(Tensor(one.rows, one.columns), self.code.usual)) if self.code.adapts else one.rank

    def _begun(self) -> list[torch.Tensor]:
        """The factors [times, columns, rank] that the next power iteration begins with."""
        qs = self.state[FACTOR].split([f.right for f in self.room])
        return [q.view(r.times, r.columns, r.rank)[..., : f.rank] for q, r, f in zip(qs, self.room, self.factors)]

    def _kept_factors(self, qs: Iterable[torch.Tensor]) -> torch.Tensor:
        """Factors in the room for them."""
        room = []
        for q, r in zip(qs, self.room):
            room.append(q.new_zeros((r.times, r.columns, r.rank)))
            room[-1][..., : q.shape[-1]] = q
        return torch.cat([*(whole.view(-1) for whole in room), self.state[FACTOR].new_empty(0)])

    def cut_to(self, ranks: list[int]) -> None:
        """Go on with factors of other ranks: those there are, and columns as in a new run."""
        kept, self.factors = self._begun(), tuple(f._replace(rank=r) for f, r in zip(self.factors, ranks))
        first = [torch.from_numpy(begun(one)).to(q) for q, one in zip(kept, self.factors)]
        for q, old in zip(first, kept):
            width = min(q.shape[-1], old.shape[-1])
            q[..., :width] = old[..., :width]
        self.state[FACTOR].copy_(self._kept_factors(first))

    def use(self, level: int) -> None:
        """Go on in another of the codes that are chosen among."""
        self.state[FACTOR].fill_(level)
        self.tensors = on_tensors(self.code.levels[level])

    def set_step(self, step: int) -> None:
        """Go on as after so many steps, with the ranks of the factors, or the code, that were loaded."""
        self.step = step
        if self.code.levels:
            self.use(int(self.state[FACTOR][0]))
        elif self.code.adapts:
            qs = self.state[FACTOR].split([f.right for f in self.room])
            used = [int((q.view(-1, r.rank) != 0).any(0).sum()) for q, r in zip(qs, self.room)]
            self.factors = tuple(f._replace(rank=max(1, rank)) for f, rank in zip(self.factors, used))

    def _start(self, carried: torch.Tensor) -> dist.Work:
        """Start the sum of a message."""
        token = recorder().start("all_reduce", self.queue, **self._label(carried.nbytes))
        work = dist.all_reduce(carried, group=self.group.handle, async_op=True)
        recorder().watch(work, token)
        return work

    def _label(self, num_bytes: int) -> dict[str, Any]:
        return self.label | self.said | {"group": self.group.ranks, "num_bytes": num_bytes}

    def _seed(self) -> int:
        """The seed of this exchange: of every rank its own, or the same for all."""
        return drawn_seed(self.code, self.seed, self.step, self.place, self.group.index)

    def end(self) -> torch.Tensor:
        """Wait for the messages of all: their sum [length]."""
        if self._hops is not None:
            (hops, token), self._hops = self._hops, None
            total = hops.wait()
            recorder().stop(token)
            return total
        self.advance()
        sent, self._sent = self._sent, None
        sent.work.wait()
        if self._rounds is not None:
            return self._factored(sent)
        decode = partial(self._decoded, sent)
        if not self.collected:
            total = decode(sent.arrives)
        elif self.combined is not None:
            every = [decode(wire) for wire in sent.arrives.chunk(self.group.size)]
            total = self.combined(every) * self.group.size
        elif self.tensors.total is not None:
            total = self.tensors.total(sent.arrives.chunk(self.group.size), self.length, sent.values.dtype)
        else:
            every = sent.arrives.chunk(self.group.size)
            total = decode(every[0])
            for wire in every[1:]:
                total = total + decode(wire)
        if self.code.feedback:
            arrived = decode(sent.own)
            self._after[LOST] = sent.values - arrived
            if self.code.correction:
                self._after[GATHERED][arrived != 0] = 0
        return self._signs(total, sent.values) if self.signed else total

    def _signs(self, total: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The signs of a sum, or what the step's norm tells every rank where a rank's own values are no numbers."""
        return total.sign_() if bool(torch.isfinite(values).all()) else total.fill_(float("nan"))

    def _decoded(self, sent: _Sent, wire: torch.Tensor) -> torch.Tensor:
        return self.tensors.decode(wire, self.length, sent.values.dtype, sent.seed)

    def advance(self) -> None:
        """Wait for the first of two messages and start the second, where there is one: of sums that end one after the
        other, all second ones are then on their way together."""
        if self._rounds is None or self._second is not None:
            return
        sent, factors = self._sent, self.factors
        sent.work.wait()
        lefts = sent.arrives[: sum(f.left for f in factors)].split([f.left for f in factors])
        qs = self._rounds.send([p.view(f.times, f.rows, f.rank) for p, f in zip(lefts, factors)])
        second = torch.cat([*(q.reshape(-1) for q in qs), sent.values.new_empty(0)])
        self._second = second, self._start(second) if len(second) else None

    def _factored(self, sent: _Sent) -> torch.Tensor:
        """The second factors' sums, and the products of both, with what travelled as it is."""
        factors, (second, work), self._second = self.factors, self._second, None
        if work is not None:
            work.wait()
        rights = [q.view(f.times, f.columns, f.rank) for q, f in zip(second.split([f.right for f in factors]), factors)]
        try:
            self._rounds.send(rights)
        except StopIteration as done:
            lefts = done.value[0]
        self._rounds = None
        self._after[FACTOR] = self._kept_factors(rights)
        values = self._whole(sent.values)
        total, lost = torch.empty_like(values), torch.zeros_like(values)
        for f, p, q in zip(factors, lefts, rights):  # what is lost without another copy of the products
            of = (one[f.start : f.end].view(f.times, f.rows, f.columns) for one in (values, total, lost))
            mine, product, left = of
            torch.bmm(p, q.mT, out=product)
            torch.baddbmm(mine, p, q.mT, alpha=-1 / self.group.size, out=left)
        at = sum(f.left for f in factors)
        for begin, end in self.plain:
            total[begin:end] = sent.arrives[at : at + end - begin]
            at += end - begin
        self._values = sent.values if self.code.adapts else None
        total, self._after[LOST] = total[: self.length], lost[: self.length]
        return total

    def settle(self, used: bool) -> None:
        """Keep what the codec has for the next time, unless the sum was not used: then all is as before."""
        if used:
            self.state |= self._after
            self.step += 1
        if self.code.adapts:
            self.measured = self._values if used and self.step % self.code.adapts == 0 else None
        self._after = {}

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The states that have an element for each value, live."""
        for key in (LOST, GATHERED):
            if key in self.state:
                yield key, self.state[key]

    def factor_pieces(self, owner: bool, where: str = "0") -> Iterator[TensorPiece]:
        """The factor that the next power iteration begins with, live: a tensor of its own, of the shard `where`."""
        factor = self.state.get(FACTOR)
        if factor is not None:
            name = f"{FACTOR}.{self.place}.{where}"
            part = Part(name, (factor.numel(),), (0,), (slice(None),))
            about = Parameter(name, (factor.numel(),), (part,))
            yield TensorPiece(FACTOR, about, 0, factor.numel(), factor.view(-1), owner)


def _between(factors: tuple[Factors, ...], length: int) -> list[tuple[int, int]]:
    """The runs of values (first, end) that are of no matrix."""
    edges = [0, *(edge for one in factors for edge in (one.start, one.end)), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2]) if begin < end]


class Added(NamedTuple):
    """Values of a piece, and the parts of whose sum they are a ``share``."""

    values: torch.Tensor
    parts: list[torch.Tensor]
    share: float = 1.0


Anew = list[Added]


def of_code(key: str) -> bool:
    """Whether a state is what a codec keeps."""
    return key.partition("@")[0] in (LOST, GATHERED, FACTOR, OWN_REFERENCE)


def laid_anew(pieces: Iterable[TensorPiece], before: int, now: int) -> tuple[list[TensorPiece], Anew]:
    """Divide what codecs kept of `before` copies among as many as there are `now`: each takes its own and those `now`,
    twice `now` and so on further, so that nothing is lost on the way. A factor begins as in a new run.

    Returns:
        The pieces to read, and for each of the rank's own values those that it is the sum of.
    """
    wanted, anew = [], []
    for piece in pieces:
        key, _, mine = piece.key.partition("@")
        if key not in (LOST, GATHERED, OWN_REFERENCE):
            continue
        parts = []
        for old in range(int(mine or 0), before, now):
            parts.append(torch.zeros_like(piece.values))
            wanted.append(piece._replace(key=f"{key}@{old}" if old else key, values=parts[-1]))
        if parts:
            anew.append(Added(piece.values, parts))
    return wanted, anew
