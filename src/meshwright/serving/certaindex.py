"""Certaindex: a query of several requests ends as soon as its answer is settled (Fu et al. 2024, 2412.20993).

The paper measures how certain an answer is, by how far samples agree or what a reward model says, and stops a query
whose answer does not change any more. How soon that is depends on the model and the question; here a workload says
after how many of its requests each query is certain. Those that are not answered by then are withdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Certaindex:
    """The requests of every query (``members``), how many of them have to be ``needed``, and how many were answered;
    ``gone`` are those withdrawn."""

    def __init__(self, program: np.ndarray, needed: np.ndarray):
        self.program, self.needed = program.tolist(), needed.tolist()
        self.members: dict[int, list[int]] = {}
        for number, one in enumerate(self.program):
            if one >= 0 and self.needed[number]:
                self.members.setdefault(one, []).append(number)
        self.answered: dict[int, set[int]] = {one: set() for one in self.members}
        self.gone: set[int] = set()

    def settles(self, finished: Sequence[int]) -> list[int]:
        """Note that requests are answered, and return those that nobody needs any more."""
        asked = {}
        for number in finished:
            query = self.program[number]
            if query in self.answered and number not in self.gone:
                self.answered[query].add(number)
                asked[query] = self.needed[number]
        found = [
            one
            for query in sorted(asked)
            if len(self.answered[query]) >= asked[query]
            for one in self.members[query]
            if one not in self.answered[query] and one not in self.gone
        ]
        self.gone.update(found)
        return found
