"""Pieces of the training state that a process holds, in terms of the whole model, so that any other plan reads them.

A local parameter is a tensor of its own; it stands for blocks of one or more tensors of the published model (a fused
query-key-value matrix for three of them, a stack of experts for many). :class:`Part` names each. A
:class:`TensorPiece` is a run of a local tensor's elements together with what they are: a parameter or a moment of its
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from meshwright.run.mesh import ProcessMesh

#: The state of the parameters themselves.
PARAM = "param"
#: The state of parameters that make samples and are not trained: one for all replicas.
FROZEN = "frozen"
#: The state of tensors that are no parameters: the factor that a code's next power iteration begins with.
FACTOR = "code_factor"
#: The point at which all replicas know the gradient of all.
POINT = "reference_point"
#: The path of each sequence, and what each path counts in judging one.
ROUTE, JUDGED = "route_of", "route_judged"
#: What clients and their server have on the way: models that tasks began with, and messages.
CLIENT = "client_state"
#: What a rank moves the embedded text of its next batch by.
PERTURBATION = "perturbation"
#: States of tensors that are no parameters, or none that are trained.
ALONE = (FROZEN, FACTOR, ROUTE, JUDGED, CLIENT, PERTURBATION)


def job_state(job: int) -> str:
    """Return what the parameters of one of several jobs are called in a checkpoint."""
    return f"{PARAM}@job-{job}"


class Part(NamedTuple):
    """``local[select]`` (transposed first when ``transposed``) is the block of the tensor ``name`` that begins at
    ``offset``; the whole tensor has ``shape``. Names and shapes are those of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    select: tuple[slice | int, ...]
    transposed: bool = False

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The block inside the local tensor, in the orientation of the published one; shares its storage."""
        block = local[self.select]
        return block.T if self.transposed else block

    def region(self, block: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the position of a block of this shape in the published tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, block, strict=True))


class Parameter(NamedTuple):
    """A local parameter: its tensor's shape, the published blocks in it, and the name it has in the module."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class HeldElements(NamedTuple):
    """Elements [start, stop) of a parameter that this rank's optimizer updates: ``master`` 1-D, its ``gradient``
    after the exchange, and on how many ranks of the job they are (``copies``)."""

    parameter: Parameter
    start: int
    stop: int
    master: torch.Tensor
    gradient: torch.Tensor
    copies: int
    decays: bool
    owner: bool
    #: The gradient where the master is, in the memory of a host that updates it; None where that is the device.
    arrived: torch.Tensor | None = None


class TensorPiece(NamedTuple):
    """Elements [``start``, ``stop``) of the flattened local tensor of ``parameter``, of the state ``key``
    (``param``, ``exp_avg``, ``exp_avg_sq``): ``values`` is the live 1-D tensor of stop - start elements.
    ``owner``: this process writes it (its copies elsewhere are equal)."""

    key: str
    parameter: Parameter
    start: int
    stop: int
    values: torch.Tensor
    owner: bool


def alike(stages: Iterable[nn.Module], mesh: ProcessMesh) -> list[TensorPiece]:
    """Return the parameters of stages that are not trained, which every replica holds alike."""
    out, first = [], mesh["dp"].index == 0
    for parameter in (p for stage in stages for p in stage.parameters()):
        owner = first and mesh["tp"].index % parameter.copies == 0
        flat = parameter.detach().view(-1)
        out.append(TensorPiece(PARAM, parameter.info, 0, len(flat), flat, owner))
    return out
