"""The protocols of an engine's computers: who computes its iterations, and who guesses next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright.run.serve.packed import PackedTokens
from meshwright.run.serve.sequence import ServedSequence
from meshwright.run.serve.tables import BlockCopy, HostKey
from meshwright.serving.batching import Share


class Executor(Protocol):
    """A computer of iterations: the layers of a model with their blocks, in this process or in several."""

    def compute(self, packed: PackedTokens) -> torch.Tensor:
        """Return the scores [wanted, vocab] of an iteration's tokens."""

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Copy blocks between device and host, before the next iteration."""

    def forget(self, firsts: Sequence[int]) -> None:
        """Give back what is kept beside blocks of sequences that left, by their first blocks."""

    def hold(self, adapters: Sequence[int]) -> None:
        """Have the adapters of these numbers on the device, and no others."""

    def send(self, blocks: Sequence[int]) -> None:
        """Send what lies in these blocks now to the other half of a divided engine."""

    def expect(self, number: int, count: int) -> None:
        """Receive so many blocks of a request from the other half, which sends them next."""

    def here(self, number: int) -> bool:
        """Whether the blocks of a request that are expected are here."""

    def place(self, number: int, blocks: Sequence[int]) -> None:
        """Write what was received of a request to these blocks; none forgets it."""

    def close(self) -> None:
        """Give back all that is held."""


class Drafter(Protocol):
    """A guesser of next tokens."""

    def guess(self, asked: Sequence[tuple[ServedSequence, Share, Sequence[int]]]) -> list[list[int]]:
        """Return up to as many guesses as each share was drafted, of sequences with their shares and block tables."""

    def follow(self, others: Sequence[tuple[ServedSequence, Share, Sequence[int]]]) -> None:
        """Note what the model computes of sequences without guesses in the same iteration."""

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Copy blocks as the model does."""
