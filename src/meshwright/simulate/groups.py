"""Steps of drawn batches under groups of ranks that are formed anew for every batch.

The ranks of dp and cp are one axis of as many data-parallel slices, each with microbatches of its own: in every round a
slice has its part of the documents that its group shares (``assign/groups.py``), or of several groups one in the other.
A microbatch is bound to those, with the exchanges of its groups on their own links, and priced by the common costs. The
slices meet where the plan's parameters and gradients are exchanged. What a group is taken to need while groups are
formed is a line through a few of those prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, combinations, groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign.draws import Drawn, draw
from meshwright.assign.groups import GroupCosts, Grouped, GroupProblem, Round, form_groups
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.lower import Lowered, bind, structured
from meshwright.lower.bind import Binder
from meshwright.lower.known import Known
from meshwright.lower.place import Mesh
from meshwright.lower.program import Program
from meshwright.lower.roles import MessageRole, PassRole, Role, TransferRole
from meshwright.lower.stages import GroupShare, Stages
from meshwright.lower.structure import Structure
from meshwright.lower.tier_sizes import WAY_WORDS
from meshwright.plan import Plan
from meshwright.plan.facets.sequence import STATIC
from meshwright.simulate.batches import Batches, GroupUse, mixing_flops
from meshwright.simulate.clock import times
from meshwright.simulate.engine import times as in_order
from meshwright.simulate.price import Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate, timed
from meshwright.simulate.unfolded import Placed, Unfolded, mixed
from meshwright.spec.cluster import Cluster
from meshwright.spec.items import Batch, Item, document
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: The documents of a rank in a round: of each of its groups the size, and the lengths of the documents that it shares.
Load = tuple[tuple[int, tuple[int, ...]], ...]
#: Names of what moves activations to other tiers.
LEAVES = tuple(f"activations {WAY_WORDS[way]}" for way in ("d2h", "nvme_write"))
#: Loads of ranks that are priced each on its own; the others lie between two of them.
PRICED = 65


def varying(role: Role) -> bool:
    """Return whether a rank's documents change the work of a role: passes, messages between stages that have their
    tokens, and the way of their activations to other tiers and back."""
    return isinstance(role, PassRole | MessageRole) or (isinstance(role, TransferRole) and role.what == "activations")


def row_tokens(load: Load) -> int:
    """Return the tokens of a rank with a load."""
    return sum(-(-sum(lengths) // size) for size, lengths in load)


def apart(plan: Plan, cp: int = 1) -> Plan:
    """Return the plan with groups of one size, `cp`, and rows of one microbatch each."""
    layout = plan.layout
    ranks = layout.dp * layout.cp
    return msgspec.structs.replace(
        plan,
        layout=msgspec.structs.replace(layout, cp=cp, dp=ranks // cp),
        pipeline=msgspec.structs.replace(plan.pipeline, microbatch=1),
        sequence=msgspec.structs.replace(plan.sequence, groups=STATIC),
    )


def capacity(plan: Plan, train: Train) -> int:
    """Return the tokens that a rank holds at a time: those of a microbatch in groups of the plan's own size."""
    return train.seq_len * plan.pipeline.microbatch // plan.layout.cp


def degrees(plan: Plan, model: Model) -> tuple[int, ...]:
    """Return the sizes that groups may have: powers of two that divide the ranks, and with ``ulysses`` the heads."""
    ranks = plan.layout.dp * plan.layout.cp
    heads = [a.heads // plan.layout.tp for a in model.attentions] if plan.sequence.algorithm == "ulysses" else []
    sizes = (1 << k for k in range(ranks.bit_length()))
    return tuple(size for size in sizes if ranks % size == 0 and not any(h % size for h in heads))


def meets_in_rounds(plan: Plan) -> bool:
    """Return whether all ranks meet in every round: parameters are gathered for it, or gradients scattered after it."""
    layout = plan.layout
    return layout.dp * layout.cp > 1 and (layout.gathers_again or layout.shards_gradients)


def by_operations(plan: Plan, model: Model, train: Train) -> GroupCosts:
    """Return costs by operations alone, in units of 10^12 of them, for who has no prices: exchanges take nothing."""
    sizes, long = degrees(plan, model), 4096
    token = 6e-12 * model.num_params
    pair = 3e-12 * mixing_flops(model, train, long) / long**2
    count = len(sizes)
    return GroupCosts(degrees=sizes, start_s=(0.0,) * count, token_s=(token,) * count, pair_s=(pair,) * count)


class GroupRounds:
    """Prices of ranks' loads under a plan with groups, for rounds of as many microbatches of every rank."""

    def __init__(self, plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs):
        self.plan, self.model, self.cluster, self.costs = plan, model, cluster, costs
        self.train = msgspec.structs.replace(train, pack="packed")
        self.one, self.pricer, self.known = apart(plan), Pricer(costs), Known()
        self.ranks, self.capacity = plan.layout.dp * plan.layout.cp, capacity(plan, train)
        self.mesh = Mesh(self.one, cluster)
        self.meshes = {d: Mesh(apart(plan, d), cluster) for d in degrees(plan, model)}
        self._known: dict[Load, Known] = {}
        self._varying: dict[Load, dict[Role, Program]] = {}  # the same in a step of any number of rounds
        self._ends: dict[int, dict] = {}  # passes of embedding and head, by the tokens of a rank

    def problem(self, lengths: NDArray[np.int64], found: GroupCosts) -> GroupProblem:
        """Return the problem of a batch of documents."""
        return GroupProblem(
            lengths=lengths,
            ranks=self.ranks,
            capacity=self.capacity,
            costs=found,
            together=meets_in_rounds(self.plan),
            stages=self.plan.layout.pp,
            long=self.plan.sequence.long,
        )

    def stages(self, load: Load, rounds: int) -> Stages:
        """Return the stages of a rank with a load in each of so many rounds, of one token where it has none."""
        tokens = row_tokens(load)
        known = self._known.get(load)
        if known is None:
            ends = self._ends.setdefault(tokens, {})
            known = self._known[load] = Known(params=self.known.params, ends=ends, sites=self.known.sites)
        shares = [GroupShare(self.meshes[size], _batch(lengths)) for size, lengths in load]
        mine: Batch = ((Item(max(1, tokens), 1.0), 1),)
        train = msgspec.structs.replace(self.train, global_batch=self.ranks * rounds)
        moves = self.plan.sequence.long == 1 or tokens > self.capacity
        return Stages(self.one, self.model, train, self.mesh, known, mine, shares=shares, moves=moves)

    def structure(self, rounds: int) -> Structure:
        """Return the structure of a step of so many rounds, all ranks alike."""
        return structured(self.stages((), rounds))

    def bound(self, load: Load, rounds: int) -> Lowered:
        """Return the step of ranks that all have the same load in each of so many rounds."""
        return bind(self.structure(rounds), self.stages(load, rounds), self._bucket)

    def programs(self, loads: Sequence[Load], rounds: int) -> list[tuple[Program, ...]]:
        """Return the programs of :meth:`bound` for each of some loads. What no documents change is bound once, and what
        they change once for a load."""
        roles, out = self.structure(rounds).roles, []
        alike: dict[Role, Program] = {}
        for load in loads:
            binder, own = Binder(self.stages(load, rounds), self.mesh, self._bucket), self._varying.setdefault(load, {})
            found: dict[Program, None] = {}  # numbered as the first role of each is
            for role in roles:
                known = own if varying(role) else alike
                program = known.get(role)
                if program is None:
                    program = known[role] = binder(role)
                found[program] = None
            out.append(tuple(found))
        return out

    @property
    def _bucket(self) -> int:
        """Bytes of the buckets in which gradients are reduced."""
        return self.costs.framework.defaults.bucket_bytes

    @cached_property
    def floor_s(self) -> float:
        """Seconds of the exchanges of parameters and gradients in a round, where they come with every round and
        overlap with its passes."""
        if not meets_in_rounds(self.plan):
            return 0.0
        one, two = (timed(self.bound((), m), self.costs, self.pricer).step_time_s for m in (1, 2))
        return two - one

    def typical(self, rounds: int, *, moves: bool) -> Simulated:
        """Return the step in groups of the plan's own size, whose ranks hold what they do at most: with activations
        that move, as many tokens as of long documents, else all on the device. Under a pipeline there are at least as
        many microbatches as the most rounds."""
        plan, train, long = self.plan, self.train, self.plan.sequence.long
        sequence = msgspec.structs.replace(plan.sequence, groups=STATIC, long=1)
        plan = msgspec.structs.replace(plan, sequence=sequence)
        if long > 1 and moves:
            pipeline = msgspec.structs.replace(plan.pipeline, microbatch=plan.pipeline.microbatch * long)
            plan = msgspec.structs.replace(plan, pipeline=pipeline)
            train = msgspec.structs.replace(train, global_batch=train.global_batch * long)
        elif not moves:
            plan = msgspec.structs.replace(plan, offload=msgspec.structs.replace(plan.offload, activations=""))
        if plan.layout.pp > 1:
            most = plan.layout.dp * plan.pipeline.microbatch * rounds
            train = msgspec.structs.replace(train, global_batch=max(train.global_batch, most))
        return simulate(plan, self.model, self.cluster, train, self.costs)

    def seconds(self, load: Load) -> float:
        """Return the seconds of a rank's passes over a load: of the pipeline's rank that takes longest."""
        lowered = self.bound(load, 1)
        durations = self.pricer.all(lowered.programs).durations
        passes = np.array([program.kind == "pass" for program in lowered.programs])
        keys = lowered.graph.cost_key
        mine, stream = passes[keys], lowered.graph.member[lowered.graph.member_ptr[:-1]]
        return float(np.bincount(stream[mine], weights=durations[keys][mine]).max())

    def hidden_from(self, longest: int) -> int:
        """Return the tokens from which on a document's forward, on as few ranks as hold it `long` times as densely, is
        no shorter than the way of its activations to other tiers; more than any has where none is so long."""
        long = self.plan.sequence.long
        length = 2 * self.capacity
        while long > 1 and length <= 2 * longest:
            size = next((d for d in self.meshes if d * self.capacity * long >= length), 0)
            if not size:
                break
            lowered = self.bound(((size, (length,)),), 1)
            durations, keys = self.pricer.all(lowered.programs).durations, lowered.graph.cost_key
            stream = lowered.graph.member[lowered.graph.member_ptr[:-1]]
            away = np.array([p.name in LEAVES for p in lowered.programs])[keys]
            forward = np.array([p.kind == "pass" and p.which == "F" for p in lowered.programs])[keys]
            sums = [np.bincount(stream[of], weights=durations[keys][of]).max() for of in (away, forward) if of.any()]
            if len(sums) == 2 and sums[0] <= sums[1]:
                return length
            length *= 2
        return 0 if long == 1 else 1 << 62

    def fitted(self, lengths: NDArray[np.int64]) -> GroupCosts:
        """Return the line through prices of full and of quarter groups, of documents as long as the mean of some
        `lengths` and as long as a group or the longest."""
        start, token, pair = [], [], []
        mean, longest = max(1, int(lengths.mean())), int(lengths.max())
        for size in self.meshes:
            full = size * self.capacity
            samples = [_filled(full, min(mean, full)), _filled(full // 4, min(mean, full // 4))]
            samples += [_filled(full, min(longest, full)), _filled(full // 2, min(longest, full // 2))]
            rows = [(1.0, sum(s) / size, sum(n * n for n in s) / size) for s in samples]
            found = _least_squares(np.array(rows), np.array([self.seconds(((size, s),)) for s in samples]))
            for table, value in zip((start, token, pair), found.tolist()):
                table.append(value)
        return GroupCosts(
            degrees=tuple(self.meshes),
            start_s=tuple(start),
            token_s=tuple(token),
            pair_s=tuple(pair),
            floor_s=self.floor_s,
            hidden_from=self.hidden_from(longest),
        )


def _batch(lengths: Sequence[int]) -> Batch:
    found, count = np.unique(np.array(lengths), return_counts=True)
    return tuple((document(n), c) for n, c in zip(found[::-1].tolist(), count[::-1].tolist()))


def _filled(tokens: int, length: int) -> tuple[int, ...]:
    """Documents of a length that fill so many tokens, the last with what is left."""
    length = max(1, length)
    whole, rest = divmod(max(1, tokens), length)
    return (length,) * whole + ((rest,) if rest else ())


def _least_squares(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return factors of 0 or more that explain seconds with the least relative error: of all sets of columns the best
    whose factors are."""
    best, found = np.inf, np.zeros(rows.shape[1])
    scaled = rows / seconds[:, None]
    for some in chain.from_iterable(combinations(range(rows.shape[1]), k) for k in range(1, rows.shape[1] + 1)):
        factors = np.linalg.lstsq(scaled[:, some], np.ones(len(seconds)), rcond=None)[0]
        error = float(((scaled[:, some] @ factors - 1) ** 2).sum())
        if factors.min() >= 0 and error < best:
            best, found = error, np.zeros(rows.shape[1])
            found[list(some)] = factors
    return found


def loads_of(problem: GroupProblem, rounds: tuple[Round, ...], waits: bool = False) -> list[list[Load]]:
    """Return the load by which each rank's time goes, [rounds][ranks]: its own, or, where groups overlap, that of the
    rank for which those that it is joined with wait; of all ranks the costliest where every one `waits` for it."""
    out = []
    for groups in rounds:
        parts: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(problem.ranks)]
        for first, size, numbers in groups:
            part = (size, tuple(sorted(problem.lengths[list(numbers)].tolist(), reverse=True)))
            for rank in range(first, first + size):
                parts[rank].append(part)
        mine: list[Load] = [tuple(sorted(part, reverse=True)) for part in parts]
        if max(map(len, mine)) > 1:
            alone = _seconds_of(problem, mine)
            for first, size, _ in sorted(groups, key=lambda g: g.size):
                costliest = first + int(np.argmax(alone[first : first + size]))
                mine[first : first + size] = [mine[costliest]] * size
                alone[first : first + size] = alone[costliest]
        if waits:
            mine = [mine[int(np.argmax(_seconds_of(problem, mine)))]] * problem.ranks
        out.append(mine)
    return out


def _seconds_of(problem: GroupProblem, loads: Sequence[Load]) -> NDArray[np.float64]:
    """Return the seconds of each load by the costs of the problem."""
    costs = problem.costs
    at = {size: k for k, size in enumerate(costs.degrees)}
    out = np.zeros(len(loads))
    for i, load in enumerate(loads):
        for size, lengths in load:
            k, each = at[size], np.array(lengths, np.float64)
            out[i] += (costs.token_s[k] * each.sum() + costs.pair_s[k] * (each * each).sum()) / size
        out[i] += max((costs.start_s[at[size]] for size, _ in load), default=0.0)
    return out


def documents_of(drawn: Drawn, number: int) -> NDArray[np.int64]:
    """Return the lengths of all documents of a drawn batch, in the order of its rows."""
    laid = drawn.laid
    rows = drawn.rows[number].ravel()
    return np.concatenate([laid.length[laid.row_ptr[r] : laid.row_ptr[r + 1]] for r in rows.tolist()])


def simulate_groups(plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs) -> Batches | None:
    """Draw batches, form groups for each and time them, for a legal plan with ``dp`` filled in; None where there are no
    lengths to draw from.

    Raises:
        MeshwrightError: P060 for documents that no group holds.
    """
    drawn = draw(train, plan.pipeline.microbatch)
    if drawn is None:
        return None
    batches = [documents_of(drawn, number) for number in range(drawn.num_draws)]
    made = GroupRounds(plan, model, cluster, train, costs)
    found = made.fitted(np.concatenate(batches))
    problems = [made.problem(lengths, found) for lengths in batches]
    longest, largest = max(int(lengths.max()) for lengths in batches), max(made.meshes)
    if max(int(problem.least.max()) for problem in problems) >= len(found.degrees):
        each = made.capacity * (plan.sequence.long if longest >= found.hidden_from else 1)
        raise MeshwrightError.one(
            "P060",
            f"a document has {longest:,} tokens, and the largest group, of {largest} ranks that hold {each:,} each, "
            f"holds {largest * each:,}",
            place=f"plan.sequence.groups = {plan.sequence.groups}",
            help="a smaller cp, by which a rank holds more, or more ranks",
        )
    grouped = [form_groups(plan.sequence.groups, problem) for problem in problems]
    loads = [loads_of(problem, one.rounds, one.waits) for problem, one in zip(problems, grouped)]
    return _timed(made, drawn, grouped, loads, found)


def _timed(
    made: GroupRounds, drawn: Drawn, grouped: list[Grouped], loads: list[list[list[Load]]], found: GroupCosts
) -> Batches:
    """Price the loads and run the clock, draws of as many rounds together."""
    distinct = sorted({load for each in loads for ranks in each for load in ranks})
    nothing = made.problem(np.zeros(0, np.int64), found)
    seconds = _seconds_of(nothing, distinct)
    sizes = [tuple(size for size, _ in load) for load in distinct]
    order = sorted(range(len(distinct)), key=lambda i: (sizes[i], seconds[i]))
    distinct, seconds = [distinct[i] for i in order], seconds[order]
    number = {load: i for i, load in enumerate(distinct)}
    chosen = _chosen([sizes[i] for i in order])
    steps, parts = np.zeros(len(grouped)), {}
    for rounds in sorted({len(one.rounds) for one in grouped}):
        draws = [d for d, one in enumerate(grouped) if len(one.rounds) == rounds]
        at = np.array([[number[load] for rank in zip(*loads[d]) for load in rank] for d in draws])
        placed = _between(seconds, chosen, at)
        structure = made.structure(rounds)
        programs = made.programs([distinct[i] for i in chosen], rounds)
        priced = [made.pricer.all(some) for some in programs]
        middle = made.bound(distinct[chosen[int(np.argmin(np.abs(seconds[chosen] - seconds[at].mean())))]], rounds)
        typical = timed(middle, made.costs, made.pricer)
        mean = mixed(priced, placed.weights)
        even = Simulated.of(middle, mean, times(middle, mean, made.costs), made.costs)
        unfolded = Unfolded(made.one, made.cluster, typical, structure, seconds[at], made.pricer, varying)
        shared = even.step_time_s / float(in_order(middle.graph, mean.durations)[1].max())
        of, shown = unfolded.timed(placed, priced, made.costs, shared if abs(shared - 1.0) > 1e-9 else 1.0)
        steps[draws] = of
        parts[rounds] = even, shown, len(unfolded.members)
    nearest = len(grouped[int(np.argmin(np.abs(steps - steps.mean())))].rounds)
    even, shown, classes = parts[nearest]
    count = len(grouped)
    degrees = sorted({size for one in grouped for size in one.degrees})
    use = GroupUse(
        method=made.plan.sequence.groups,
        rounds=sum(len(one.rounds) for one in grouped) / count,
        sizes={size: sum(one.degrees.get(size, 0) for one in grouped) / count for size in degrees},
        gap=max(one.gap for one in grouped),
        costs=found,
    )
    return Batches(
        drawn=drawn,
        typical=made.typical(max(parts), moves=True),
        even=even,
        shown=shown,
        steps_s=steps,
        classes=classes,
        distinct=len(distinct),
        priced=len(chosen),
        groups=use,
        staying=made.typical(max(parts), moves=False) if made.plan.sequence.long > 1 else None,
    )


def _chosen(sizes: list[tuple[int, ...]]) -> NDArray[np.int64]:
    """Choose loads to price, of those in the same sizes of groups the first, the last and some between them."""
    found, first = [], 0
    for _, some in groupby(sizes):
        count = len(list(some))
        priced = min(count, max(2, round(PRICED * count / len(sizes))))
        found.append(first + np.linspace(0, count - 1, priced).round().astype(np.int64))
        first += count
    return np.unique(np.concatenate(found))


def _between(seconds: NDArray[np.float64], chosen: NDArray[np.int64], at: NDArray[np.int64]) -> Placed:
    """Place loads (numbers in the order of their sizes and seconds) [draws, ranks x rounds] between priced ones."""
    low = np.clip(np.searchsorted(chosen, at, side="right") - 1, 0, max(0, len(chosen) - 2))
    high = np.minimum(low + 1, len(chosen) - 1)
    below, above = seconds[chosen][low], seconds[chosen][high]
    apart_s = np.where(above > below, above - below, 1.0)
    share = np.clip((seconds[at] - below) / apart_s, 0.0, 1.0)
    return Placed(batches=((),) * len(chosen), middle=(), low=low, share=share, distinct=len(seconds))
