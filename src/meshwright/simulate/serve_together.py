"""Decoding together, as the clock sees it: what the sequences of a batch share is counted once for all of them."""

from __future__ import annotations

import heapq
from math import inf


class DecodingTogether:
    """The sequences that decode a token each in every iteration of theirs, of requests that have ``made`` so many
    tokens of their ``output`` [n], the ``last`` of them at that time.

    ``ticks`` are the iterations that they went through, ``last_s`` when the last one was over. What a member has made
    is as of its joining, and is brought up to date when it leaves; ``fresh`` ones have been in no iteration yet."""

    def __init__(self, output: list[int], made: list[int], last: list[float]):
        self.output, self.made, self.last = output, made, last
        self.ticks, self.last_s = 0, -1.0
        self.numbers: tuple[int, ...] = ()
        self.since: dict[int, int] = {}
        self.fresh: set[int] = set()
        self.due: list[tuple[int, int, int]] = []

    def follow(self, numbers: tuple[int, ...]) -> None:
        """Let those of the given numbers be the members."""
        if numbers is self.numbers:
            return
        since, ticks = self.since, self.ticks
        new = [number for number in numbers if number not in since]
        if len(since) + len(new) > len(numbers):  # not all members are among them
            for number in since.keys() - set(numbers):
                self.leave(number)
        self.numbers = numbers
        for number in new:
            since[number] = ticks
            self.fresh.add(number)
            heapq.heappush(self.due, (ticks + self.output[number] - self.made[number], number, ticks))

    def leave(self, number: int) -> None:
        """Let a member go on by itself; nothing for others."""
        since = self.since.pop(number, None)
        if since is None:
            return
        self.numbers = ()
        self.made[number] += self.ticks - since
        if number in self.fresh:
            self.fresh.remove(number)
        else:
            self.last[number] = self.last_s

    def left(self) -> float:
        """Return the iterations until the first of them is answered."""
        while self.due and self.since.get(self.due[0][1]) != self.due[0][2]:
            heapq.heappop(self.due)
        return self.due[0][0] - self.ticks if self.due else inf

    def tick(self, times: int, first_s: float, end_s: float) -> tuple[dict[float, int], list[int]]:
        """Let them go through so many iterations, the first of which ends at `first_s` and the last at `end_s`; returns
        how many had a gap of so many seconds before the first token of it, and who is answered."""
        gaps: dict[float, int] = {}
        for number in self.fresh:
            if self.last[number] >= 0:
                gap = first_s - self.last[number]
                gaps[gap] = gaps.get(gap, 0) + 1
        rest = len(self.since) - len(self.fresh)
        if rest:
            gap = first_s - self.last_s
            gaps[gap] = gaps.get(gap, 0) + rest
        self.fresh.clear()
        self.ticks += times
        self.last_s = end_s
        answered, due = [], self.due
        while due and due[0][0] <= self.ticks:
            _, number, joined = due[0]
            if self.since.get(number) == joined:
                self.leave(number)
                answered.append(number)
            heapq.heappop(due)
        return gaps, answered
