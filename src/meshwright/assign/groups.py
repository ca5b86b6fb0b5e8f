"""Sequences onto groups of ranks of different sizes: which ranks share which documents of a global batch.

All ranks that replicate or shard the same parameters (data- and context-parallel ones together) are cut into groups of
neighbours whose sizes are powers of two, anew for every batch. A group shares its documents as context-parallel ranks
do. Ranks hold at most so many tokens at a time, so that a batch takes several *rounds*: a microbatch of every rank.

A way of forming them is a :class:`GroupMethod`, chosen by the word ``groups=`` of a plan. What a group's pass takes is
told by :class:`GroupCosts`, which are read off the common costs (``simulate/groups.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

#: Files of this package with ways of forming groups.
FILES = ("groups_apart", "groups_nested")
#: Numbers of rounds beyond the fewest that are tried, one more at a time, in a pipeline as many as it has stages.
MORE_ROUNDS = 3
#: Changes that are tried to improve the groups of a batch.
TRIES = 120


class GroupCosts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Seconds that a group's forward and backward pass takes, by its number of ranks (``degrees``, ascending powers of
    two): ``start_s + (token_s * tokens + pair_s * squares) / degree`` for so many tokens of all its documents and the
    sum of the squares of their lengths; exchanges inside the group are in them. ``floor_s``: no round takes less.
    ``hidden_from``: the forward of documents of at least so many tokens hides the way of their activations to the
    host."""

    degrees: tuple[int, ...]
    start_s: tuple[float, ...]
    token_s: tuple[float, ...]
    pair_s: tuple[float, ...]
    floor_s: float = 0.0
    hidden_from: int = 0

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """The four tables as arrays."""
        rest = (np.array(x, np.float64) for x in (self.start_s, self.token_s, self.pair_s))
        return (np.array(self.degrees, np.int64), *rest)

    def shares(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds that each document adds to a group of each degree, float64 [N, degrees]."""
        degrees, _, token, pair = self.arrays
        tokens = lengths.astype(np.float64)[:, None]
        return (token * tokens + pair * tokens**2) / degrees


class GroupProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Documents of ``lengths`` int64 [N] for ``ranks`` ranks that hold ``capacity`` tokens each at a time.
    ``together``: all ranks meet in every round (parameters are gathered for it); else when all rounds are over.
    ``stages``: ranks of a pipeline that pass every round one after the other; costs are of one of them.
    ``long``: of documents whose way to the host is hidden ranks hold so many times as many tokens, and move their
    activations."""

    lengths: NDArray[np.int64]
    ranks: int
    capacity: int
    costs: GroupCosts
    together: bool = True
    stages: int = 1
    long: int = 1

    def step_s(self, rounds: NDArray[np.float64] | list[float]) -> float:
        """Return the seconds of a step of rounds of so many: through a pipeline the costliest passes every stage, and
        all others follow or go ahead."""
        return float(sum(rounds)) + (self.stages - 1) * float(max(rounds, default=0.0))

    @property
    def least(self) -> NDArray[np.int64]:
        """The number of the smallest degree whose ranks hold each document, int64 [N]."""
        hidden = self.lengths >= self.costs.hidden_from
        held = self.capacity * np.where(hidden, self.long, 1)
        return np.searchsorted(np.array(self.costs.degrees, np.int64), -(-self.lengths // held))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The tokens of its ranks' room that each document takes, int64 [N]: all of them, but of one whose activations
        are moved no more than the room of as many ranks as hold it."""
        degrees = np.array(self.costs.degrees, np.int64)
        room = degrees[np.minimum(self.least, len(degrees) - 1)] * self.capacity
        return np.minimum(self.lengths, room) if self.long > 1 else self.lengths


class RankGroup(NamedTuple):
    """``size`` neighbouring ranks from ``first`` on, and the numbers of the documents that they share."""

    first: int
    size: int
    documents: tuple[int, ...]


#: The groups of one microbatch of every rank. A rank is in one of them, in none, or, where they are nested, in several.
Round = tuple[RankGroup, ...]


class Grouped(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of a batch, round by round. ``value`` is what all rounds take in seconds, by the problem's costs, and
    ``bound`` what no groups take less than. ``waits``: ranks whose groups change from round to round are taken to wait
    for the costliest of each round, also where nothing else makes all of them meet."""

    rounds: tuple[Round, ...]
    value: float
    bound: float
    waits: bool = False

    @property
    def gap(self) -> float:
        """The optimality gap, value over bound less 1."""
        return self.value / self.bound - 1.0 if self.bound else 0.0

    @property
    def degrees(self) -> dict[int, int]:
        """How many groups of each size there are, over all rounds."""
        sizes, counts = np.unique([g.size for groups in self.rounds for g in groups], return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist()))


class GroupMethod(msgspec.Struct, frozen=True, kw_only=True):
    """A way of forming groups: ``words`` say how. ``form`` gives the groups of the documents (numbers) of one round, or
    of all rounds at once where groups keep their ranks for a step, () where they do not fit; ``nested``: a rank may be
    in several groups of a round."""

    name: str
    words: str
    paper: str
    form: Callable[[GroupProblem, NDArray[np.int64]], Round]
    improve: Callable[[GroupProblem, Round, int], Round] | None = None
    nested: bool = False


def group_methods() -> dict[str, GroupMethod]:
    """Return every way of forming groups by its name."""
    found = [one for file in FILES for one in import_module(f"meshwright.assign.{file}").METHODS]
    return {one.name: one for one in found}


def form_groups(name: str, problem: GroupProblem) -> Grouped:
    """Form groups by the method of that name. Every document is in one group of one round, and no rank holds more than
    its capacity in any round.

    Raises:
        ValueError: a document that all ranks together cannot hold at once.
    """
    method, lengths = group_methods()[name], problem.lengths
    most = problem.costs.degrees[-1] * problem.capacity * problem.long
    if len(lengths) and problem.least.max() >= len(problem.costs.degrees):
        raise ValueError(f"a document of {lengths.max()} tokens, and {most} are the most that a group holds")
    if not len(lengths):
        return Grouped(rounds=(), value=0.0, bound=0.0)
    bound, rounds, value = least_seconds(problem), (), np.inf
    if not (problem.together or method.nested):  # groups that keep their ranks for the whole step
        groups = method.form(problem, np.arange(len(lengths)))
        if method.improve is not None:
            groups = method.improve(problem, groups, TRIES)
        rounds = _queued(problem, groups)
        value = max(problem.step_s(each) for each in _rank_seconds(problem, rounds).T.tolist())
    met, met_s = _in_rounds(method, msgspec.structs.replace(problem, together=True), value)
    if met_s < value:
        return Grouped(rounds=met, value=met_s, bound=min(met_s, bound), waits=not problem.together)
    return Grouped(rounds=rounds, value=value, bound=min(value, bound))


def _in_rounds(method: GroupMethod, problem: GroupProblem, limit_s: float) -> tuple[tuple[Round, ...], float]:
    """Form other groups for every round, at whose end all ranks meet, in as many rounds as are fastest; nothing is
    looked for that takes longer than `limit_s`. Return the rounds and their seconds."""
    lengths = problem.lengths
    fewest = max(1, -(-int(problem.sizes.sum()) // (problem.ranks * problem.capacity)))
    best = np.inf if method.improve is not None else limit_s  # what takes longer may be improved
    order, found = np.argsort(-lengths, kind="stable"), ()
    for count in range(fewest, len(lengths) + problem.stages, problem.stages):
        count = min(count, len(lengths))
        for parts in _parts(problem, order, count):
            rounds, seconds = [], []
            for part in parts:
                formed = method.form(problem, part)
                rounds.append(formed)
                seconds.append(_round_seconds(problem, formed) if formed else np.inf)
                if not formed or problem.step_s(seconds) >= best:
                    break
            else:
                best, found = problem.step_s(seconds), tuple(rounds)
        if (found or best < np.inf) and count >= fewest + MORE_ROUNDS * problem.stages:
            break
    if method.improve is not None:
        found = tuple(method.improve(problem, one, TRIES // len(found)) for one in found)
        best = problem.step_s([_round_seconds(problem, one) for one in found])
    return (_ordered(problem, found), best) if found else ((), np.inf)


def _ordered(problem: GroupProblem, rounds: tuple[Round, ...]) -> tuple[Round, ...]:
    """Return rounds in the order of a step: through a pipeline the cheapest first and last, while other stages wait."""
    if problem.stages == 1:
        return rounds
    cheapest = sorted(rounds, key=lambda one: _round_seconds(problem, one))
    return (*cheapest[::2], *cheapest[1::2][::-1])


def _round_seconds(problem: GroupProblem, groups: Round) -> float:
    """Return what a round takes in which all ranks meet."""
    return max(problem.costs.floor_s, float(_rank_seconds(problem, (groups,)).max()))


def _parts(problem: GroupProblem, order: NDArray[np.int64], count: int) -> Iterator[list[NDArray[np.int64]]]:
    """Yield ways of laying documents (in `order`, the longest first) into `count` rounds that all ranks hold: cut into
    runs of about as many tokens, so that those of a round are about as long; and the largest first into the first round
    with room, which needs fewest."""
    from meshwright.assign import Problem, solve

    sizes, room = problem.sizes, problem.ranks * problem.capacity
    lengths = sizes[order]
    upto = np.cumsum(lengths)
    ends = np.searchsorted(upto, upto[-1] * np.arange(1, count) / count, side="left") + 1
    ends = np.maximum(ends, np.arange(1, count))
    ends = np.maximum.accumulate(np.minimum(ends, len(lengths) - np.arange(count - 1, 0, -1)))
    parts = np.split(order, ends)
    if max(int(sizes[part].sum()) for part in parts) <= room:
        yield parts
    packed = solve("first-fit", Problem(sizes=lengths, capacity=room))
    if packed.num_bins == count:
        yield [order[packed.bin_of == k] for k in range(count)]


def _queued(problem: GroupProblem, groups: Round) -> tuple[Round, ...]:
    """Lay each group's documents into microbatches that its ranks hold, the k-th of all groups in round k."""
    from meshwright.assign import Problem, solve

    queues: list[list[RankGroup]] = []
    for group in groups:
        some = np.array(group.documents, np.int64)
        sizes = problem.sizes[some]
        held = solve("first-fit", Problem(sizes=sizes, capacity=group.size * problem.capacity))
        parts = [some[held.bin_of == k] for k in range(held.num_bins)]
        queues.append([group._replace(documents=tuple(part.tolist())) for part in parts])
    count = max(map(len, queues))
    return tuple(tuple(queue[k] for queue in queues if k < len(queue)) for k in range(count))


def _rank_seconds(problem: GroupProblem, rounds: tuple[Round, ...]) -> NDArray[np.float64]:
    """Return what each round takes on each rank, float64 [rounds, ranks]; ranks of groups that overlap wait for one
    another."""
    degrees = problem.costs.degrees
    out = np.zeros((len(rounds), problem.ranks))
    for k, groups in enumerate(rounds):
        for first, size, documents in groups:
            at = degrees.index(size)
            lengths = problem.lengths[list(documents)].astype(np.float64)
            seconds = problem.costs.token_s[at] * lengths.sum() + problem.costs.pair_s[at] * (lengths**2).sum()
            mine = slice(first, first + size)
            alone = out[k, mine] == 0.0
            out[k, mine] += seconds / size + np.where(alone, problem.costs.start_s[at], 0.0)
        for first, size, _ in sorted(groups, key=lambda g: g.size):  # the largest last: all it overlaps waits for it
            out[k, first : first + size] = out[k, first : first + size].max()
    return out


def rank_seconds(problem: GroupProblem, rounds: tuple[Round, ...]) -> NDArray[np.float64]:
    """Return what each round takes on each rank by the problem's costs, float64 [rounds, ranks]."""
    return _rank_seconds(problem, rounds)


def least_seconds(problem: GroupProblem) -> float:
    """Return seconds that no groups take less than: the time of all ranks that documents need where they need least,
    spread evenly over ranks, with the starts of the fewest rounds; or the document that takes longest where it takes
    least."""
    costs = problem.costs
    degrees, start, _, _ = costs.arrays
    each = costs.shares(problem.lengths)
    fits = np.arange(len(degrees)) >= problem.least[:, None]
    work = np.where(fits, each * degrees, np.inf).min(axis=1).sum() / problem.ranks
    alone = np.where(fits, each + start, np.inf).min(axis=1).max()
    rounds = max(1, -(-int(problem.sizes.sum()) // (problem.ranks * problem.capacity)))
    first, filled = float(start.min()), (problem.stages - 1) * float(alone)  # a pipeline fills with the costliest
    if not problem.together:
        return max(float(work) + first, problem.stages * float(alone))
    # one round has the document that takes longest; the others at least a start or the floor each
    return filled + max(
        float(work) + rounds * first, float(alone) + (rounds - 1) * max(costs.floor_s, first), rounds * costs.floor_s
    )
