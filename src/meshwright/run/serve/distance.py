"""The distance of an approximate cache: how far the scores of served answers are from those of whole caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from meshwright.run.serve.packed import PackedRow, PackedTokens
from meshwright.run.serve.sequence import ServedSequence

if TYPE_CHECKING:
    from meshwright.run.serve.computers import Executor

#: Answers that are compared, the first ones of an engine, and the tokens that such a text may have in any case.
COMPARED, TOKENS = 8, 2048


class ScoreDistance:
    """The distance of the last scores of an engine's first answers from those of the same text with whole caches.

    Each is computed once more, in one piece, if it is no longer than an iteration (`budget` tokens, 0 for any) or
    :data:`TOKENS`."""

    def __init__(self, budget: int):
        self.most, self.compared = max(budget, TOKENS) if budget else 0, 0
        self._apart = self._whole = 0.0
        self._noted: list[tuple[list[int], int, torch.Tensor]] = []

    @property
    def relative(self) -> float:
        """The root mean square of the differences, relative to that of the scores of whole caches."""
        return (self._apart / self._whole) ** 0.5 if self._whole else 0.0

    def note(self, one: ServedSequence, scores: torch.Tensor) -> None:
        """Note an answer that ends, with the scores [vocab] of its last token."""
        text = one.tokens[:-1]
        if self.compared + len(self._noted) < COMPARED and (not self.most or len(text) <= self.most):
            self._noted.append((text, one.adapter, scores.clone()))

    def compare(self, executor: Executor, adapters: bool) -> None:
        """Compute what was noted with whole caches; `adapters`: the engine has some."""
        noted, self._noted = self._noted, []
        for text, adapter, scores in noted:
            count, said = len(text), [adapter] if adapters else []
            row = PackedRow(count, 0, ())
            packed = PackedTokens(text, list(range(count)), [row], [count - 1], said, whole=True)
            whole = executor.compute(packed)[0].double()
            self._apart += (scores.double() - whole).square().sum().item()
            self._whole += whole.square().sum().item()
            self.compared += 1
