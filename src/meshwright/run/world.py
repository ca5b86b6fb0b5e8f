"""The processes of a job as each sees it: its place, what it leaves behind, and how the death of one is told."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from meshwright.errors import Diagnostic, MeshwrightError


class World(NamedTuple):
    """This process's place: ``local_rank`` among the ``local_size`` processes of its machine ``host``."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


def meet() -> None:
    """Wait until all processes of the job are here."""
    with_gpus = dist.get_backend() == "nccl"
    dist.barrier(device_ids=[torch.cuda.current_device()] if with_gpus else None)


def add_up(values: torch.Tensor) -> torch.Tensor:
    """Add up a tensor over all processes, in place; as it is where there is one."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class RankDied(MeshwrightError):
    """A run that ended because of one of its processes: exit code 1."""

    exit_code = 1


class Report(msgspec.Struct, kw_only=True):
    """The report of a process that has ended: its result, or why there is none. ``consequence``: another rank was the
    cause."""

    result: Any = None
    diagnostics: list[Diagnostic] = []
    exit_code: int = 0
    cause: str = ""
    consequence: bool = False


def died(rank: int, host: str, cause: str, help: str = "") -> RankDied:
    """L001."""
    return RankDied(
        Diagnostic(
            code="L001",
            message=f"rank {rank} on {host} died: {cause}",
            help=help or "MESHWRIGHT_DEBUG=1 shows where; --resume goes on from the last checkpoint",
        )
    )
