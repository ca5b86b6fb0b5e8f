"""Executors: where an engine's iterations are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.run.serve.forward import ServedLayers
from meshwright.run.serve.packed import PackedTokens
from meshwright.run.serve.tables import BlockCopy, HostKey


class LocalExecutor:
    """The executor of one rank: all layers in this process."""

    def __init__(self, layers: ServedLayers):
        self.layers = layers

    def compute(self, packed: PackedTokens) -> torch.Tensor:
        """Return the scores [wanted, vocab] of an iteration's tokens."""
        return self.layers(packed)

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Copy blocks between device and host."""
        self.layers.kv.copy(copies, dropped)

    def hold(self, adapters: Sequence[int]) -> None:
        """Have these adapters on the device, and no others."""
        self.layers.adapters.hold(adapters)

    def close(self) -> None:
        """Give back the cache."""
        self.layers.kv = None
