"""Steps whose compute varies from rank to rank and from step to step: what replicas wait for the slowest of them.

A rank's passes take a factor of what they are predicted to, drawn anew in every step. Replicas that sum gradients in
every step wait for the slowest of all; those that take steps of their own wait for whom they meet, when they meet
(:mod:`meshwright.simulate.meetings`). A replica's own step is the graph of the simulated one with longer passes: ranks
of one tensor- or context-parallel group, and data-parallel ranks of one replica, are as slow as the slowest of them.

Factors of different steps are independent of each other: a rank that is slow for minutes is said by ``slow=``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.graph import QUEUE, TaskGraph
from meshwright.plan import Plan
from meshwright.plan.slices import kinds
from meshwright.simulate.engine import makespans
from meshwright.simulate.meetings import Due, paced
from meshwright.simulate.rounds import PartTimes, Round, only
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.slowed import apart, factors
from meshwright.simulate.ticking import ended, meetings_of, num_units
from meshwright.simulate.unfolded import members
from meshwright.sync.fragments import NEIGHBOURS
from meshwright.sync.groups import Graph, Heard, graph
from meshwright.sync.paths import ModulePaths
from meshwright.sync.policy import read
from meshwright.sync.record import SyncPolicy
from meshwright.sync.rounds import due_at
from meshwright.world.crowd import Slowness
from meshwright.world.slow import SlowStep

#: Numbers that are drawn at most, steps that are simulated at most and at least where all wait for all, and rounds.
MOST_DRAWN, MOST_STEPS, LEAST_STEPS, ROUNDS, LEAST_ROUNDS = 4_000_000, 1024, 32, 64, 4
#: Points between which the seconds of a step are straight over the factor of its passes: they are straight by pieces.
POINTS = 65
#: Durations in one call of the engine, and tasks that are timed at most where every draw needs a graph of its own.
ROOM, MOST_TIMED = 2**22, 10**8
#: The part of the steps that is left out before replicas are as far apart as they get.
SETTLES = 0.25


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """Steps whose compute varies, over ``num_steps`` of them: seconds of a step in the mean over all (``mean_s``), the
    10th and 90th percentile of a step (of a round: of its mean step), a replica's own step in the mean (``own_s``),
    what it waits for others besides (``waits_s``), and the step in which nothing varies (``even_s``)."""

    num_steps: int
    mean_s: float
    p10_s: float
    p90_s: float
    own_s: float
    waits_s: float
    even_s: float

    @classmethod
    def of(
        cls, run: Simulated, num_steps: int, mean_s: float, steps_s: NDArray[np.float64], own_s: float
    ) -> Stragglers:
        """Build it from the mean step, drawn steps and a replica's own, of a simulated step in which nothing varies."""
        low, high = (float(q) for q in np.quantile(steps_s, [0.1, 0.9]))
        waits = max(0.0, mean_s - own_s)
        return cls(
            num_steps=num_steps,
            mean_s=mean_s,
            p10_s=low,
            p90_s=high,
            own_s=own_s,
            waits_s=waits,
            even_s=run.step_time_s,
        )


def straggling(
    run: Simulated, costs: Costs, slow: SlowStep, jitter: Slowness, among: tuple[int, int] | None = None
) -> Stragglers:
    """The steps of a simulated plan whose ranks compute at these paces; `among`: from one step to another, counted from
    0, as the first replica takes them.

    Raises:
        MeshwrightError: O006 for plans whose steps are not told apart by ranks, for slow links where replicas take
            steps of their own, and for ranks that there are not.
    """
    lowered = run.lowered
    sums_alone = not lowered.several and lowered.plan.trainers < lowered.plan.layout.dp
    if lowered.several or run.moving is not None or sums_alone:
        what = "a plan of several pools" if lowered.several else "steps that take a second pass now and then"
        what = "a plan with replicas that only sum (aux=)" if sums_alone else what
        raise MeshwrightError.one("O006", f"ranks that vary are not simulated in {what}", place="--world")
    policy = read(lowered.plan.sync.policy)
    if run.round is not None or policy.meets or policy.paths is not None:
        if slow.slowlink or slow.slownic:
            message = "slow links are not simulated in replicas that take steps of their own"
            raise MeshwrightError.one("O006", message, place="--world", help="leave slowlink= and slownic= out")
        return _meeting(run, costs, policy, slow, jitter, among)
    return _together(run, costs, slow, jitter, among)


def _together(
    run: Simulated, costs: Costs, slow: SlowStep, jitter: Slowness, among: tuple[int, int] | None
) -> Stragglers:
    """Replicas that meet inside of every step."""
    lowered, plan = run.lowered, run.lowered.plan
    ranks = plan.layout.num_ranks
    own = _Stretched(lowered.graph, run.priced.durations, run.step_time_s)
    first, last = among or (0, None)
    num_steps = last or int(np.clip(MOST_DRAWN // ranks, LEAST_STEPS, MOST_STEPS))
    if plan.layout.pp == 1 and not (slow.slowlink or slow.slownic):
        # all wait for the slowest, in every exchange of the step: it takes as long as were all like that one
        drawn = slow.varying(jitter, ranks, num_steps)[first:]
        steps = own.seconds(drawn.max(axis=1)[:, None])
        alone = own.seconds(_of_replicas(drawn, plan, plan.layout.cp).reshape(-1, 1))
        return Stragglers.of(run, len(steps), float(steps.mean()), steps, float(alone.mean()))
    found = apart(run, costs, members(plan, lowered.mesh, lowered.graph.num_tasks))
    links = msgspec.structs.replace(slow, slow=(), ranks=Slowness("listed", (1.0,)))
    sending = factors(found.lowered.graph, found.ranks, links, ranks)
    whole = _Stretched(found.lowered.graph, found.priced.durations, run.step_time_s, sending)
    num_steps = last or int(np.clip(MOST_TIMED // found.lowered.graph.num_tasks, LEAST_STEPS, num_steps))
    drawn = slow.varying(jitter, ranks, num_steps)[first:]
    classes = [found.ranks[one.slice if one.slice >= 0 else 0, one.stage] for one in whole.classes]
    steps = whole.seconds(np.stack([drawn[:, some].max(axis=1) for some in classes], axis=1))
    replicas = _of_replicas(drawn, plan, plan.layout.cp).transpose(0, 2, 1).reshape(-1, plan.layout.pp)
    some = replicas[: max(1, MOST_TIMED // lowered.graph.num_tasks)]
    alone = own.seconds(some[:, [one.stage for one in own.classes]])
    return Stragglers.of(run, len(steps), float(steps.mean()), steps, float(alone.mean()))


def _meeting(
    run: Simulated, costs: Costs, policy: SyncPolicy, slow: SlowStep, jitter: Slowness, among: tuple[int, int] | None
) -> Stragglers:
    """Replicas that take steps of their own."""
    lowered, plan, one = run.lowered, run.lowered.plan, run.round
    inner = only(lowered, run.priced, lambda program: False).priced.durations
    if one is None:  # neighbours that meet in every step: a round of one
        meets = [any(move.op == NEIGHBOURS for move in program.moves) for program in lowered.programs]
        inner = np.where(meets, 0.0, inner)
        both = np.stack((inner, run.priced.durations))
        inner_s = run.step_time_s * float(np.divide(*makespans(lowered.graph, both)))
        causes, part = run.priced.parts, PartTimes(run.step_time_s, inner_s, (), (), 0.0)
        one = Round(1, 0, inner_s, (part,), 0.0, causes, (), causes)
    together = policy.rule.together(plan)
    own, kinds_of = _Stretched(lowered.graph, inner, one.inner_s), _kinds(run, together)
    ranks, replicas = plan.layout.num_ranks, len(kinds_of)
    room = MOST_DRAWN // ranks
    if plan.layout.pp > 1:  # every draw goes through the graph
        room = min(room, MOST_TIMED // (lowered.graph.num_tasks * replicas))
    if policy.clocks is not None:
        units = among[1] if among is not None else num_units(policy.clocks, replicas)
        drawn = slow.varying(jitter, ranks, units)
        seconds = own.of_replicas(_of_replicas(drawn, plan, together), kinds_of)
        meets_s = one.parts[0].sends_s - one.inner_s
        ends_s = ended(policy.clocks, seconds, meetings_of(lowered, costs, meets_s))
        mean_s, steps = _rates(one, Due(np.zeros((0, 0)), np.zeros((0, 0)), np.arange(1, units + 1)), ends_s, among)
        own_s = float(seconds.mean()) + 2 * policy.clocks.rate(replicas) / replicas * meets_s
        return Stragglers.of(run, units, mean_s, steps, own_s)
    due = due_in(one, policy, room, 0 if among is None else -(-among[1] // int(one.every)))
    drawn = slow.varying(jitter, ranks, len(due.sent))
    seconds = own.of_replicas(_of_replicas(drawn, plan, together), kinds_of)
    met = graph(policy.group, replicas) if policy.meets else None
    model, lora = lowered.stages.model, lowered.stages.train.lora
    if policy.paths is not None and not (policy.fragments and model.tied_embeddings and lora is None):
        met = _sharing(policy.paths, replicas, len(one.parts))
    rates = [
        _rates(one, due, paced(one, due, some, seconds), among) for some in (met, _nobody(replicas, len(one.parts)))
    ]
    (mean_s, steps), (own_s, _) = rates
    return Stragglers.of(run, len(seconds), mean_s, steps, own_s)


def _nobody(replicas: int, parts: int) -> Graph:
    """The graph in which nobody meets another."""
    return Graph(name="", num_replicas=replicas, turns=(((),) * replicas,) * parts)


def _sharing(paths: ModulePaths, replicas: int, parts: int) -> Graph:
    """The graph in which replicas meet those that hold a module that they do."""
    found: list[set[int]] = [set() for _ in range(replicas)]
    for some in (some for level in range(len(paths.levels)) for some in paths.modules(level, replicas)):
        for one in some:
            found[one] |= set(some)
    turn = tuple(tuple(Heard(other, 1 / len(some)) for other in sorted(some - {one})) for one, some in enumerate(found))
    return Graph(name="", num_replicas=replicas, turns=(turn,) * parts)


def _rates(
    one: Round, due: Due, ends_s: NDArray[np.float64], among: tuple[int, int] | None
) -> tuple[float, NDArray[np.float64]]:
    """Seconds of a step in the mean, and of every round, once replicas are as far apart as they get; or of the first
    replica from one step on."""
    beside = one.slows_s / one.every  # what is beside the kernels slows them, in the mean over a round
    if among is not None:
        first, last = among
        taken = np.diff(ends_s[first - 1 : last, 0] if first else ends_s[:last, 0], prepend=() if first else (0.0,))
        return float(taken.mean()) + beside, taken + beside
    taken = np.diff(ends_s[due.ends - 1].mean(axis=1), prepend=0.0)
    lengths = np.diff(due.ends, prepend=0)
    if lengths.min() < lengths.max():  # rounds that grow, of which some may be left out: all replicas begin each anew
        even_s = one.inner_s + (one.averaging_s - one.inner_s) * len(lengths) / lengths.sum()
        taken *= one.mean_s / even_s
        return float(taken.sum() / lengths.sum()), taken / lengths
    settled = int(SETTLES * len(taken))
    mean_s = float(taken[settled:].sum() / lengths[settled:].sum()) + beside
    return mean_s, taken[settled:] / lengths[settled:] + beside


def due_in(one: Round, policy: SyncPolicy, most_steps: int, rounds: int = 0) -> Due:
    """Return what is due in so many `rounds`, 0 for as many as there is room for in these steps and a few at least; of
    rounds that grow, some over the whole run."""
    parts, lag = len(one.parts), one.lag
    if policy.growth is not None:
        lengths = np.diff(policy.growth.ends, prepend=0)
        while lengths.sum() > most_steps and len(lengths) > LEAST_ROUNDS:
            lengths = lengths[1::2]
    else:
        every = int(one.every)
        rounds = rounds or int(np.clip(most_steps // every, LEAST_ROUNDS, max(ROUNDS, MOST_STEPS // every)))
        lengths = np.full(rounds, every)
    ends = np.cumsum(lengths)
    sent, applied = (np.zeros((int(ends[-1]), parts), np.int32) for _ in range(2))
    for part in range(parts):
        at = ends - 1 if policy.growth is not None else ends - lengths + due_at(part, parts, int(one.every)) - 1
        sent[at, part] = 1
        late = at + lag
        applied[late[late < len(applied)], part] = 1
    return Due(sent, applied, ends)


def _of_replicas(drawn: NDArray[np.float64], plan: Plan, together: int) -> NDArray[np.float64]:
    """The factors of every replica's pipeline ranks, each its slowest rank's, where so many data-parallel ranks are one
    replica: [steps, pipeline ranks, replicas] of [steps, ranks]."""
    layout = plan.layout
    rank = np.arange(layout.num_ranks)
    cp, dp, pp = (rank // layout.stride(axis) % getattr(layout, axis) for axis in ("cp", "dp", "pp"))
    inside = cp + layout.cp * dp if layout.stride("cp") <= layout.stride("dp") else dp + layout.dp * cp
    place = inside // together + pp * (layout.dp * layout.cp // together)
    order = np.argsort(place, kind="stable")
    first = np.searchsorted(place[order], np.arange(place.max() + 1))
    return np.maximum.reduceat(drawn[:, order], first, axis=1).reshape(len(drawn), layout.pp, -1)


def _kinds(run: Simulated, together: int) -> list[set[int]]:
    """The kinds of devices of every replica."""
    plan = run.lowered.plan
    layout, found = plan.layout, kinds(plan.layout, run.lowered.mesh.cluster)
    kind_of = {d: number for number, kind in enumerate(found) for d in kind.members}
    out: list[set[int]] = [set() for _ in range(layout.dp * layout.cp // together)]
    for d in range(layout.dp):
        for c in range(layout.cp):
            inside = c + layout.cp * d if layout.stride("cp") <= layout.stride("dp") else d + layout.dp * c
            out[inside // together].add(kind_of[d])
    return out


class _Stretched:
    """The graph of a step whose passes take factors of what they do, one for each rank class. `step_s` is the step
    where all are 1: ports and cores that ranks share lengthen every step as they do that one. `sending` are factors of
    all tasks that stay."""

    def __init__(
        self,
        step: TaskGraph,
        durations: NDArray[np.float64],
        step_s: float,
        sending: NDArray[np.float64] | None = None,
    ):
        stream = step.member[step.member_ptr[:-1]]
        computes = step.streams.queue[stream] == QUEUE["compute"]
        of_task = np.where(computes, step.streams.rank[stream], -1)
        stays = np.ones(step.num_tasks) if sending is None else np.where(computes, 1.0, sending)
        keyed, back = np.unique(np.stack((step.cost_key, of_task, stays)), axis=1, return_inverse=True)
        self.graph = msgspec.structs.replace(
            step,
            cost_key=back.reshape(-1).astype(np.int32),
            keys=tuple(step.keys[int(key)] for key in keyed[0]),
        )
        self.classes = step.streams.ranks
        self.rank = keyed[1].astype(np.int64)
        self.durations = durations[keyed[0].astype(np.int64)] * keyed[2]
        even = float(makespans(self.graph, durations[keyed[0].astype(np.int64)][None])[0])
        self.shared = step_s / even if even > 0 else 1.0

    def seconds(self, factor: NDArray[np.float64], among: set[int] | None = None) -> NDArray[np.float64]:
        """Seconds of a step [draws] under factors [draws, rank classes], or [draws, 1] for all classes alike; `among`:
        of the slices of these kinds alone."""
        if factor.shape[1] == 1:
            low, high = float(factor.min()), float(factor.max())
            if high > low and len(factor) > POINTS:
                at = np.linspace(low, high, POINTS)
                return np.interp(factor[:, 0], at, self.seconds(at[:, None], among))
            factor = np.repeat(factor, len(self.classes), axis=1)
        out = [self._some(part, among) for part in self._pieces(factor)]
        return np.concatenate(out) * self.shared

    def _pieces(self, factor: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
        size = max(1, ROOM // len(self.durations))
        return (factor[i : i + size] for i in range(0, len(factor), size))

    def _some(self, factor: NDArray[np.float64], among: set[int] | None) -> NDArray[np.float64]:
        draws = np.where(self.rank >= 0, factor[:, self.rank], 1.0) * self.durations
        if among is not None:
            slices = np.array([max(one.slice, 0) for one in self.classes])
            draws = draws * np.where(self.rank >= 0, np.isin(slices[self.rank], list(among)), True)
        return makespans(self.graph, np.ascontiguousarray(draws))

    def of_replicas(self, factor: NDArray[np.float64], kinds: list[set[int]]) -> NDArray[np.float64]:
        """Seconds of every replica's own steps [steps, replicas] under factors [steps, pipeline ranks, replicas]."""
        num_steps, stages, replicas = factor.shape
        out = np.zeros((num_steps, replicas))
        several = len({one.slice for one in self.classes}) > 1
        for some in {frozenset(kind) for kind in kinds}:
            mine = [i for i, kind in enumerate(kinds) if kind == some]
            flat = factor[:, :, mine].transpose(0, 2, 1).reshape(-1, stages)
            if stages > 1:
                flat = flat[:, [one.stage for one in self.classes]]
            out[:, mine] = self.seconds(flat, set(some) if several else None).reshape(num_steps, len(mine))
        return out
