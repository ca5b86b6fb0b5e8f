"""The front of a serving engine: one process that takes a request after the other before the scheduler sees them.

It reads a request from its connection, makes tokens of its prompt and hands it on, for ``serial_s`` and
``serial_token_s`` for each of these tokens (:class:`meshwright.simulate.served.HostTimes`). Requests that come together
wait for one another: the k-th is through when both it and the one before it are there, and its own time is over
(Lindley 1952, a queue of one server). :class:`FrontLine` is that for loops of events; the functions of compiled loops
do the same over flat arrays, for engines side by side.
"""

from __future__ import annotations

from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, part

#: Places of an engine's ``front``: requests that have stood in its line so far, and those that are through.
STOOD, THROUGH, FRONTS = range(3)
#: Later than anything.
NEVER = 1e300


class FrontLine:
    """The front of one engine: when it is free again, and how many requests stand in its line."""

    __slots__ = ("free_s", "serial_s", "serial_token_s", "standing")

    def __init__(self, serial_s: float, serial_token_s: float):
        self.serial_s, self.serial_token_s = serial_s, serial_token_s
        self.free_s, self.standing = 0.0, 0

    @property
    def there(self) -> bool:
        """Whether it takes any time."""
        return self.serial_s > 0 or self.serial_token_s > 0

    def stand(self, at_s: float, prompt: int) -> float:
        """Let a request come that has a prompt of so many tokens; return when it is through."""
        begin = self.free_s if self.free_s > at_s else at_s
        self.free_s = begin + self.serial_s + self.serial_token_s * prompt
        self.standing += 1
        return self.free_s


@part
def stand(
    d: int,
    r: int,
    at_s: float,
    wide: int,
    serial_s: Float64s,
    prompt: Int64s,
    front: OutInt64s,
    free_s: OutFloat64s,
    line: OutInt64s,
    entry_s: OutFloat64s,
) -> float:
    """Let request ``r`` come to engine ``d``; return when it is through."""
    begin = free_s[d] if free_s[d] > at_s else at_s
    free_s[d] = begin + serial_s[2 * d] + serial_s[2 * d + 1] * prompt[r]
    entry_s[r] = free_s[d]
    line[d * wide + front[d * FRONTS + STOOD]] = r
    front[d * FRONTS + STOOD] += 1
    return free_s[d]


@part
def first_through(
    num_engines: int,
    wide: int,
    front: Int64s,
    line: Int64s,
    entry_s: Float64s,
    came_s: Float64s,
) -> int:
    """Return which request is through the front of any engine next: of those that are through at the same time, the
    one that came first; -1 where nobody stands at any."""
    best = -1
    for d in range(num_engines):
        if front[d * FRONTS + THROUGH] < front[d * FRONTS + STOOD]:
            r = line[d * wide + front[d * FRONTS + THROUGH]]
            if (
                best < 0
                or entry_s[r] < entry_s[best]
                or (entry_s[r] == entry_s[best] and (came_s[r], r) < (came_s[best], best))
            ):
                best = r
    return best


@part
def enter(
    now: float,
    coming: int,
    known: int,
    tail: int,
    wide: int,
    arrival: Float64s,
    serial_s: Float64s,
    prompt: Int64s,
    front: OutInt64s,
    free_s: OutFloat64s,
    line: OutInt64s,
    entry_s: OutFloat64s,
    queue: OutInt64s,
) -> tuple[int, int]:
    """Let those of the ``known`` come to the one engine there is who are there by now, and put those that are through
    its front behind the ``tail`` of its queue; return who is ``coming`` next, and the new tail."""
    while coming < known and arrival[coming] <= now:
        stand(0, coming, arrival[coming], wide, serial_s, prompt, front, free_s, line, entry_s)
        coming += 1
    while front[THROUGH] < front[STOOD] and entry_s[line[front[THROUGH]]] <= now:
        queue[tail] = line[front[THROUGH]]
        front[THROUGH] += 1
        tail += 1
    return coming, tail


@part
def next_entry(
    coming: int,
    known: int,
    arrival: Float64s,
    serial_s: Float64s,
    prompt: Int64s,
    front: Int64s,
    free_s: Float64s,
    line: Int64s,
    entry_s: Float64s,
) -> float:
    """Return when the next request is through the front of the one engine there is."""
    if front[THROUGH] < front[STOOD]:
        return entry_s[line[front[THROUGH]]]
    if coming >= known:
        return NEVER
    begin = free_s[0] if free_s[0] > arrival[coming] else arrival[coming]
    return begin + serial_s[0] + serial_s[1] * prompt[coming]
