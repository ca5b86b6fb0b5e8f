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

    def room(self, blocks: int, block: int, budget: tuple[str, float] | None = None) -> None:
        """Make room for so many cache blocks, under a budget of that name and number where one is said."""
        self.layers.cache(blocks, block, budget)

    def compute(self, packed: PackedTokens) -> torch.Tensor:
        """Return the scores [wanted, vocab] of an iteration's tokens."""
        return self.layers(packed)

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Copy blocks between device and host."""
        self.layers.kv.copy(copies, dropped)

    def forget(self, firsts: Sequence[int]) -> None:
        """Give back what is kept beside blocks of sequences that left, by their first blocks."""
        self.layers.kv.forget(firsts)

    def hold(self, adapters: Sequence[int]) -> None:
        """Have these adapters on the device, and no others."""
        self.layers.adapters.hold(adapters)

    def send(self, blocks: Sequence[int]) -> None:
        """Send what lies in these blocks now to the other half of a divided engine."""
        self.layers.port.send(self.layers.kv, blocks)

    def expect(self, number: int, count: int) -> None:
        """Receive so many blocks of a request from the other half."""
        self.layers.port.expect(number, self.layers.kv, count)

    def here(self, number: int) -> bool:
        """Return whether the blocks of a request that are expected are here."""
        return self.layers.port.here(number)

    def place(self, number: int, blocks: Sequence[int]) -> None:
        """Write what was received of a request to these blocks; none forgets it."""
        self.layers.port.place(number, self.layers.kv, blocks)

    def close(self) -> None:
        """Give back the cache."""
        self.layers.kv = None
