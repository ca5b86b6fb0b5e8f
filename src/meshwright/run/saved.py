"""Activations on drives or in a host's memory: what a layer's forward saves for its backward leaves behind it, and is
back ahead of it.

Torch hands over every tensor that a backward will ask for (``saved_tensors_hooks``). Parameters and what several layers
share stay where they are; a tensor that is saved twice is written once. The backward asks for the layers in the
opposite order: when the first tensor of one is asked for, the layers before it begin to be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.plan.facets.offload import Offload
from meshwright.run.drives import Buffer, Drives, FileSlot
from meshwright.run.host_memory import Copied, DeviceBuffer, HostMemory, HostSlot
from meshwright.run.model import Stage
from meshwright.schedules.actions import BW, Actions, B, F

#: Tensors of fewer bytes stay in memory: counts, statistics of norms, a page of anything.
LEAST_BYTES = 4096


class SavedTensor:
    """A tensor that is on its way out, there, or back."""

    def __init__(self, layer: LayerTensors, tensor: torch.Tensor):
        self.layer = layer
        self.shape, self.dtype, self.num_bytes = tensor.shape, tensor.dtype, tensor.numel() * tensor.element_size()
        store = layer.saved.store
        self.slot: FileSlot | HostSlot = store.slot(self.num_bytes)
        self.buffer: Buffer | DeviceBuffer | None = store.buffer(self.num_bytes)
        self._values(self.buffer).copy_(tensor)
        self.request: Future | Copied = store.write(self.slot, self.buffer, **layer.said)
        self.users = 0

    def _values(self, buffer: Buffer | DeviceBuffer) -> torch.Tensor:
        return buffer.view(0, self.shape.numel(), self.dtype).view(self.shape)

    def written(self) -> None:
        """Wait until it is there, and let its memory go."""
        if self.buffer is not None:
            self.request.result()
            self.layer.saved.store.give_back(self.buffer)
            self.buffer = None

    def fetch(self) -> None:
        """Begin to read it."""
        if self.buffer is None:
            store = self.layer.saved.store
            self.buffer = store.buffer(self.num_bytes)
            self.request = store.read(self.slot, self.buffer, **self.layer.said)

    def get(self) -> torch.Tensor:
        """Return the tensor; once its last user has it, its room there is free."""
        self.layer.begin()
        self.fetch()
        self.request.result()
        found = self._values(self.buffer).clone()  # it lives as long as its user, of whose end nobody tells
        self.users -= 1
        if not self.users:
            self.drop()
        return found

    def drop(self) -> None:
        """Nobody asks for it any more."""
        store = self.layer.saved.store
        if self.buffer is not None:
            self.request.result()
            store.give_back(self.buffer)
            self.buffer = None
        store.release(self.slot)
        self.layer.tensors.remove(self)


class LayerTensors:
    """The tensors of one pass over one layer."""

    def __init__(self, saved: SavedTensors, said: dict[str, int], stay: set[int]):
        """`stay` are the addresses of memory that outlives the pass."""
        self.saved, self.said, self.stay = saved, said, stay
        self.tensors: list[SavedTensor] = []
        #: What is moved, by where it was, and that itself: while it lives nothing else has its place.
        self._known: dict[tuple, tuple[SavedTensor, torch.Tensor]] = {}
        self.begun = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedTensor:
        """Begin to move a tensor that a backward will ask for; or leave it as it is."""
        if tensor.numel() * tensor.element_size() < LEAST_BYTES or _place(tensor) in self.stay:
            return tensor
        key = tensor.data_ptr(), tensor._version, tuple(tensor.shape), tensor.stride(), tensor.dtype
        if key not in self._known:
            self._known[key] = SavedTensor(self, tensor.detach()), tensor
            self.tensors.append(self._known[key][0])
        one = self._known[key][0]
        one.users += 1
        return one

    def made(self) -> None:
        """The forward is over: its tensors may go."""
        self._known.clear()

    def begin(self) -> None:
        """Begin the layer's backward: the layers that come next are read from now on."""
        if not self.begun:
            self.begun = True
            self.saved.begins(self)


class SavedTensors:
    """The activations of a rank's layers in a `store`. No more than `room` layers are being written, or read ahead."""

    def __init__(self, store: Drives | HostMemory, room: int):
        self.store, self.room = store, room
        #: Layers in the order of their forwards, those whose backward is done taken out; those being written.
        self.layers: list[LayerTensors] = []
        self.writing: deque[LayerTensors] = deque()

    def over_stages(self, stages: Mapping[int, Stage], offload: Offload, actions: Actions, rank: int) -> None:
        """Move the activations that a plan keeps there: of the first layers of each stage, but of those whose
        backward comes while they would be under way."""
        for number, stage in stages.items():
            count, between = len(stage.layers), _between(actions, stages, rank, number)
            for layer, module in enumerate(stage.layers):
                used = 2 * (count - 1 - layer) + 1 + between
                if layer < offload.moved("activations", count) and used > self.room:
                    self.over(module, number, layer)

    def over(self, layer: nn.Module, stage: int, number: int) -> None:
        """Move what a layer's forwards save."""
        forward = layer.forward
        said = {"stage": stage, "layer": number}

        def moved(x: torch.Tensor, p):
            if not (torch.is_grad_enabled() and p.moves):
                return forward(x, p)
            shared = p.positions, p.documents, p.rows, *(p.rotary or ()), *(p.local or ()), *layer.parameters()
            mine = LayerTensors(self, said, {_place(one) for one in shared if one is not None})
            with saved_tensors_hooks(mine.pack, _unpack):
                out = forward(x, p)
            mine.made()
            self.layers.append(mine)
            self._behind(mine)
            return out

        layer.forward = moved

    def _behind(self, layer: LayerTensors) -> None:
        """A layer's forward is over: the memory of one a window before it goes."""
        self.writing.append(layer)
        while self.writing and (
            len(self.writing) >= self.room or all(t.request.done() for t in self.writing[0].tensors)
        ):
            for tensor in self.writing.popleft().tensors:
                tensor.written()

    def begins(self, layer: LayerTensors) -> None:
        """A layer's backward begins: those that come next are read, once they are written."""
        while self.writing:
            for tensor in self.writing.popleft().tensors:
                tensor.written()
        at = self.layers.index(layer)
        for one in self.layers[max(0, at - self.room + 1) : at]:
            for tensor in one.tensors:
                tensor.fetch()
        del self.layers[at]


def _between(actions: Actions, stages: Mapping[int, Stage], rank: int, stage: int) -> int:
    """The least layers that a rank computes between a stage's forward of a microbatch and the backward of it."""
    part = slice(actions.rank_ptr[rank], actions.rank_ptr[rank + 1])
    rows = list(zip(actions.kind[part].tolist(), actions.stage[part].tolist(), actions.microbatch[part].tolist()))
    layers = [len(stages[s].layers) for _, s, _ in rows]
    begun = {m: i for i, (kind, s, m) in enumerate(rows) if kind == F and s == stage}
    ends = {m: i for i, (kind, s, m) in enumerate(rows) if kind in (B, BW) and s == stage}
    return min((sum(layers[begun[m] + 1 : ends[m]]) for m in begun), default=0)


def _place(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _unpack(one: torch.Tensor | SavedTensor) -> torch.Tensor:
    return one.get() if isinstance(one, SavedTensor) else one
