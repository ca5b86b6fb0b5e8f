"""Partitions that nobody trains: in memory, or each in a file on drives, read ahead where that is said."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class NodePart(NamedTuple):
    """A partition of a table: rows [rows, dim] and what the optimizer keeps [rows, 0, 1 or dim]."""

    rows: Tensor
    state: Tensor

    @property
    def packed(self) -> Tensor:
        """Both side by side, as they are sent and stored."""
        return torch.cat([self.rows, self.state], dim=1).contiguous()


def unpacked(both: Tensor, dim: int) -> NodePart:
    """Return the partition whose rows are the first `dim` columns."""
    return NodePart(both[:, :dim].contiguous(), both[:, dim:].contiguous())


class DriveParts:
    """Partitions in files of a folder, with the bytes that were read to be trained and written."""

    def __init__(self, folder: Path, dim: int):
        self.folder, self.dim = folder, dim
        self.read_bytes = self.written_bytes = 0
        self.ahead: dict[int, Future[NodePart]] = {}
        self.thread = ThreadPoolExecutor(1)
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, item: int) -> Path:
        return self.folder / f"partition-{item:05}.npy"

    def __setitem__(self, item: int, part: NodePart) -> None:
        both = part.packed.numpy()
        np.save(self._file(item), both, allow_pickle=False)
        self.written_bytes += both.nbytes

    def __getitem__(self, item: int) -> NodePart:
        return unpacked(torch.from_numpy(np.load(self._file(item), allow_pickle=False)), self.dim)

    def pop(self, item: int) -> NodePart:
        """Read a partition to train it; it is written again when it is stored."""
        waited = self.ahead.pop(item, None)
        part = self[item] if waited is None else waited.result()
        self.read_bytes += part.rows.nbytes + part.state.nbytes
        return part

    def begin(self, items: Iterable[int]) -> None:
        """Begin to read partitions that will be asked for, beside whatever else is done."""
        for item in items:
            self.ahead[item] = self.thread.submit(self.__getitem__, item)
