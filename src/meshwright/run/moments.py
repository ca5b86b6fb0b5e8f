"""Moments on drives: the optimizer's state of each layer is read ahead of its update, and written back behind it.

As many layers as the plan's ``prefetch`` says, and the one at work, have room in memory; reading one waits until the
one a window before it is written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from meshwright.plan.facets.offload import Offload
from meshwright.run.drives import Buffer, Drives, FileSlot
from meshwright.run.pieces import HeldElements

#: State of a held piece by name.
State = dict[str, torch.Tensor]


class LayerState(NamedTuple):
    """The held pieces of one layer, by number, whose moments are one slot: each begins at a byte of it."""

    place: tuple[int, int]
    pieces: tuple[int, ...]
    starts: tuple[int, ...]
    slot: FileSlot


class Moments:
    """Moments of some layers' pieces on `drives`, all zero at first; `names` are those of each piece."""

    def __init__(
        self,
        drives: Drives,
        held: Sequence[HeldElements],
        layers: dict[tuple[int, int], list[int]],
        names: tuple[str, ...],
        room: int,
    ):
        """`layers` are the numbers of held pieces by layer, which is (stage, segment); `room` as many layers as there
        is memory for."""
        self.drives, self.names, self.room = drives, names, room
        self.masters = [h.master for h in held]
        self.layers = [self._laid(place, pieces) for place, pieces in layers.items()]
        #: Bytes of a buffer, which the largest of them needs.
        self.largest = max((one.slot.num_bytes for one in self.layers), default=0)
        #: Numbers of pieces that are updated here, none of whose moments is in memory before.
        self.away = self.absent = frozenset(i for one in self.layers for i in one.pieces)
        #: States that were taken out as a whole, to be saved or filled.
        self._out: dict[int, State] = {}
        for one in self.layers:
            buffer = drives.buffer(self.largest)
            buffer.values.zero_()
            drives.write(one.slot, buffer).result()
            drives.give_back(buffer)

    def _laid(self, place: tuple[int, int], pieces: Sequence[int]) -> LayerState:
        starts, at = [], 0
        for number in pieces:
            starts.append(at)
            at += len(self.names) * self.masters[number].numel() * self.masters[number].element_size()
        return LayerState(place, tuple(pieces), tuple(starts), self.drives.slot(at))

    def _views(self, one: LayerState, buffer: Buffer) -> dict[int, State]:
        """The moments of a layer's pieces in a buffer."""
        found = {}
        for number, start in zip(one.pieces, one.starts):
            master = self.masters[number]
            count = master.numel()
            size = count * master.element_size()
            found[number] = {
                name: buffer.view(start + i * size, count, master.dtype) for i, name in enumerate(self.names)
            }
        return found

    def each(self, update: Callable[[dict[int, State]], None]) -> None:
        """Call `update` with the moments of one layer after the other, which it changes in place."""
        self._out.clear()
        reads: deque[tuple[LayerState, Buffer, Future]] = deque()
        writes: deque[tuple[Buffer, Future]] = deque()
        waiting = deque(self.layers)

        def read_ahead() -> None:
            while waiting and len(reads) + len(writes) < self.room:
                one = waiting.popleft()
                buffer = self.drives.buffer(self.largest)
                reads.append((one, buffer, self.drives.read(one.slot, buffer, **_said(one))))

        def written() -> None:
            buffer, future = writes.popleft()
            future.result()
            self.drives.give_back(buffer)

        read_ahead()
        while reads:
            one, buffer, future = reads.popleft()
            future.result()
            update(self._views(one, buffer))
            writes.append((buffer, self.drives.write(one.slot, buffer, **_said(one))))
            while writes and (writes[0][1].done() or (len(writes) >= self.room and waiting)):
                written()
            read_ahead()
            if not reads and waiting:
                written()
                read_ahead()
        while writes:
            written()

    def taken(self) -> dict[int, State]:
        """Return the moments of all pieces in memory, as they are now: copies, which :meth:`put` writes back."""
        self._out = {}
        for one in self.layers:
            buffer = self.drives.buffer(self.largest)
            self.drives.read(one.slot, buffer).result()
            for number, state in self._views(one, buffer).items():
                self._out[number] = {name: values.clone() for name, values in state.items()}
            self.drives.give_back(buffer)
        return self._out

    def put(self) -> None:
        """Write back what was taken out, and filled since; nothing where nothing was."""
        for one in self.layers if self._out else ():
            buffer = self.drives.buffer(self.largest)
            for number, state in self._views(one, buffer).items():
                for name, values in state.items():
                    values.copy_(self._out[number][name])
            self.drives.write(one.slot, buffer).result()
            self.drives.give_back(buffer)
        self._out = {}


def _said(one: LayerState) -> dict[str, int]:
    return {"stage": one.place[0], "layer": one.place[1]}


def moments_on(
    drives: Drives,
    held: Sequence[HeldElements],
    parts: dict[tuple[tuple[int, int], str], list[torch.nn.Parameter]],
    offload: Offload,
    names: tuple[str, ...],
) -> Moments:
    """The moments by these `names` that a plan keeps on drives: of the first layers of each stage, as `parts` has their
    parameters by ((stage, segment), kind)."""
    of = {parameter.info.name: place for (place, _), some in parts.items() for parameter in some}
    segments = Counter(stage for stage, _ in {place for place, _ in parts})
    layers: dict[tuple[int, int], list[int]] = {}
    for number, h in enumerate(held):
        stage, segment = of[h.parameter.name]
        if segment < offload.moved("optimizer", segments[stage]):
            layers.setdefault((stage, segment), []).append(number)
    return Moments(drives, held, dict(sorted(layers.items())), names, offload.prefetch + 1)
