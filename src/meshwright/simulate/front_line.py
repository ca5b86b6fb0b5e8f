"""The front of a serving engine: one process that takes a request after the other before the scheduler sees them.

It reads a request from its connection, makes tokens of its prompt and hands it on, for ``serial_s`` and
``serial_token_s`` for each of these tokens (:class:`meshwright.simulate.served.HostTimes`). Requests that come together
wait for one another: the k-th is through when both it and the one before it are there, and its own time is over
(Lindley 1952, a queue of one server). :class:`FrontLine` is that for loops of events; the functions of compiled loops
do the same over flat arrays, for engines side by side.

Tokens leave the same way: one process makes text of every token and writes it to its connection, for ``stream_s`` each,
and those of an iteration are out together (:func:`streamed`). The engine does not wait for it. Where a batch's tokens
take longer than its iterations, that is how fast tokens come, the next request of a closed loop comes later, and first
tokens wait behind all others.
"""

from __future__ import annotations

from meshwright.native import Bytes, Float64s, Int64s, OutFloat64s, OutInt64s, part

#: Places of an engine's ``front``: requests that have stood in its line so far, and those that are through.
STOOD, THROUGH, FRONTS = range(3)
#: Places of a lone engine's ``serial_s`` and ``free_s`` for tokens that leave.
STREAM, OUT = 2, 1
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
def streamed(
    times: int, tokens: int, first_s: float, last_s: float, stream_s: float, free_s: float
) -> tuple[float, float]:
    """Let the tokens of so many iterations out, as many of each, from when the line is free; the first iteration ends
    at ``first_s``, the last at ``last_s``, and none is shorter than the one before it. Return when those of these two
    are out.

    The k-th is out once the longest of these is over: all behind what stood there, all behind the first, or (as ends
    lie ever further apart) its own alone behind the last."""
    each = stream_s * tokens
    first = (free_s if free_s > first_s else first_s) + each
    last = first + each * (times - 1)
    return first, last if last > last_s + each else last_s + each


@part
def made_of(
    first: int,
    count: int,
    run: Int64s,
    new: Int64s,
    prompt: Int64s,
    output: Int64s,
    computed: Int64s,
    generated: Int64s,
    right_at: Int64s,
    right: Bytes,
) -> int:
    """Return the tokens of answers that an iteration makes at so many places from the ``first`` on, with guesses that
    come true."""
    made = 0
    for i in range(first, first + count):
        r = run[i]
        drafted = new[i] - (prompt[r] + generated[r] - computed[r])
        if drafted >= 0 and generated[r] < output[r]:
            made += 1
            if drafted > 0:
                come = right[right_at[r] + generated[r]]
                made += come if come < drafted else drafted
    return made


@part
def follow(
    r: int,
    at_s: float,
    coming: int,
    known: int,
    wide: int,
    arrival: OutFloat64s,
    serial_s: Float64s,
    prompt: Int64s,
    front: OutInt64s,
    free_s: OutFloat64s,
    line: OutInt64s,
    entry_s: OutFloat64s,
) -> int:
    """Let request ``r`` of a closed loop come to the one engine there is, behind those of the ``known`` who are there
    by then; return who of these is ``coming`` next."""
    while coming < known and arrival[coming] <= at_s:
        stand(0, coming, arrival[coming], wide, serial_s, prompt, front, free_s, line, entry_s)
        coming += 1
    arrival[r] = at_s
    stand(0, r, at_s, wide, serial_s, prompt, front, free_s, line, entry_s)
    return coming


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
