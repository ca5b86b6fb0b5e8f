"""Memory of a step: the bytes each rank holds all the time, and those that every pass allocates and frees."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.graph import GraphBuilder, MemoryEvents
from meshwright.lower.compute import Compute
from meshwright.lower.exchange import Reduced
from meshwright.lower.facts import Facts
from meshwright.lower.messages import ErrorsArrived
from meshwright.lower.stages import Stages
from meshwright.lower.state import gathered_bytes, static_bytes, unscattered_bytes
from meshwright.lower.taught import predictions_bytes
from meshwright.lower.tier_sizes import tier_bytes
from meshwright.lower.tiers import Saved, Tiered
from meshwright.lower.units import Composition, Unit, composition_of
from meshwright.plan import Plan
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.spec.workload import Train
from meshwright.sync.due import rounds

#: Gradients of a stage that accumulate whole until its round ends.
IN_FLIGHT = "gradients in flight"
#: Logits that the loss saves for its backward.
LOGITS = "logits"
#: Entries of each composition: activations that F saves, and that W, a split B and a whole backward free; a workspace
#: and its end; logits and their end.
SAVED, FREED_BY_W, FREED_BY_B, FREED_BY_BW, WORKSPACE, WORKSPACE_END, KEPT_LOGITS, LOGITS_END = range(8)
NUM_ENTRIES = 8
#: The output's error, which waits for backwards that it enters.
ERRORS = "errors of the output"
#: Activations of one segment on their way: those on the device, and those that the host or its drives keep.
MOVED = "activations"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Entries that memory events refer to: NUM_ENTRIES of each distinct composition, in blocks of one entry; then the
    whole gradients of some layers as they appear, then as they are scattered; then activations of some layers without
    logits, as they are saved and as they are freed; then, where there are any, ``errors`` of a microbatch's output."""

    compositions: tuple[Composition, ...] = ()
    gradients: tuple[tuple[Unit, ...], ...] = ()
    segments: tuple[tuple[Unit, ...], ...] = ()
    errors: bool = False

    def __len__(self) -> int:
        return NUM_ENTRIES * len(self.compositions) + 2 * (len(self.gradients) + len(self.segments) + self.errors)

    def bytes_of(self, stages: Stages) -> np.ndarray:
        """Bytes of every entry for one plan, freed ones negative."""
        kept = [stages.activations(c) for c in self.compositions]
        saved, held, working, logits = (
            np.array([getattr(a, field) for a in kept]) for field in ("saved", "held", "working", "logits")
        )
        saved = saved - logits
        whole = np.array([unscattered_bytes(stages.plan, stages.total_params(units)) for units in self.gradients])
        blocks = (saved, -held, held - saved, 0.0 - saved, working, -working, logits, -logits, whole, -whole)
        if self.segments:
            some = [stages.activations(composition_of(units)) for units in self.segments]
            moved = np.array([a.saved - a.logits for a in some])
            blocks = (*blocks, moved, -moved)
        if self.errors:
            c = stages.context()
            size = np.array([c.shard_tokens * c.hidden * c.element])
            blocks = (*blocks, size, -size)
        return np.concatenate(blocks)

    def of_events(self, stages: Stages, codes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Bytes of memory events with entries `codes`, each of the sizes of the class of slices that its rank is of."""
        if not stages.plan.kinds.computed:
            return self.bytes_of(stages)[codes]
        tables = np.array([self.bytes_of(one) for one in stages.each])
        return tables[ranks // stages.plan.layout.pp, codes]


class _Codes:
    """Numbers of entries while a graph is drafted: positive where bytes are allocated, negative where freed."""

    def __init__(self, facts: Facts):
        #: Those of the stages, and behind them that of public text.
        held = facts.compositions if facts.taught is None else (*facts.compositions, facts.taught)
        self.distinct = {c: i for i, c in enumerate(dict.fromkeys(held))}
        self.gradients: dict[tuple[Unit, ...], int] = {}
        self.segments: dict[tuple[Unit, ...], int] = {}
        self._of_stage = np.array([self.distinct[c] for c in held])

    def entry(self, which: int, stage: np.ndarray) -> np.ndarray:
        sign = 1 if which in (SAVED, WORKSPACE, KEPT_LOGITS) else -1
        return sign * (which * len(self.distinct) + self._of_stage[stage] + 1)

    def whole(self, units: tuple[tuple[Unit, ...], ...]) -> np.ndarray:
        numbers = [self.gradients.setdefault(one, len(self.gradients)) for one in units]
        return NUM_ENTRIES * len(self.distinct) + np.array(numbers, np.int64) + 1

    def of_segments(self, units: list[tuple[Unit, ...]]) -> np.ndarray:
        """Entries of the activations of some segments as they are saved, known once all whole gradients are."""
        numbers = [self.segments.setdefault(one, len(self.segments)) for one in units]
        return NUM_ENTRIES * len(self.distinct) + 2 * len(self.gradients) + np.array(numbers, np.int64) + 1

    def of_errors(self) -> int:
        """The entry of an error as it comes, known once all others are; it goes by the next."""
        return NUM_ENTRIES * len(self.distinct) + 2 * (len(self.gradients) + len(self.segments)) + 1


def add_memory(
    builder: GraphBuilder,
    facts: Facts,
    orders: list[Actions],
    computes: list[Compute],
    reduced: Reduced,
    tiered: Tiered,
    taught: tuple[list[np.ndarray], list[np.ndarray]] = ([], []),
    arrived: list[ErrorsArrived] | tuple[ErrorsArrived, ...] = (),
) -> Sizes:
    """Add activation and workspace events to every pass; return the entries that they refer to.

    A forward allocates what its backward needs. A full backward frees it; a split one frees all but what the
    weight gradient needs, which W frees. Where gradients are scattered after rounds, a round's first weight gradient
    allocates its stage's whole, and every reduction frees the part that it has scattered. `taught` are the forwards and
    backwards of public text, and `arrived` errors of the output, of every class of slices.
    """
    codes, losing = _Codes(facts), np.array(facts.losing)
    rounded = facts.pp > 1 and facts.scatters
    if rounded:
        whole = codes.whole(tuple(c.units for c in facts.compositions))
        scattered = codes.whole(reduced.units) + len(codes.gradients)
    for index, (actions, compute) in enumerate(zip(orders, computes)):
        starts = np.searchsorted(compute.action, np.arange(len(actions)))
        ends = np.append(starts[1:], len(compute.action)) - 1
        first, last = compute.task[starts], compute.task[ends]
        where = index * facts.pp + actions.rank_of()
        place = actions.stage.astype(np.int64) * actions.num_microbatches + actions.microbatch
        later = np.isin(place, place[actions.kind == W])
        for kind in (F, B, W, BW):
            at = np.flatnonzero(actions.kind == kind)
            if not len(at):
                continue
            stage = actions.stage[at]
            # those that leave the device do so layer by layer, below
            if kind == F and not facts.frozen and not tiered.saved:
                builder.memory(first[at], where[at], False, codes.entry(SAVED, stage), "activations")
            elif kind != F and not tiered.saved:
                first_half = (kind == B) & later[at]  # its W comes, where weights have gradients at all
                for which, some in ((FREED_BY_W if kind == W else FREED_BY_BW, ~first_half), (FREED_BY_B, first_half)):
                    if some.any():
                        freed = codes.entry(which, stage[some])
                        builder.memory(last[at][some], where[at][some], True, freed, "activations")
            losses = at[losing[stage]] if kind != W and not facts.frozen else at[:0]
            if len(losses):
                task, which = (first, KEPT_LOGITS) if kind == F else (last, LOGITS_END)
                entry = codes.entry(which, actions.stage[losses])
                builder.memory(task[losses], where[losses], kind != F, entry, LOGITS)
            builder.memory(first[at], where[at], False, codes.entry(WORKSPACE, stage), "workspace")
            builder.memory(last[at], where[at], True, codes.entry(WORKSPACE_END, stage), "workspace")
        if rounded:
            begins = np.flatnonzero(rounds(actions)[0])
            builder.memory(first[begins], where[begins], False, whole[actions.stage[begins]], IN_FLIGHT)
            builder.memory(reduced.task, index * facts.pp + reduced.rank, True, -scattered, IN_FLIGHT)
    _add_taught(builder, codes, np.array([len(facts.compositions)]), *taught)
    for index, one in enumerate(tiered.saved):
        _add_moved(builder, facts, codes, index * facts.pp, one, facts.pp * len(orders))
    if facts.direct:
        for index, one in enumerate(arrived):
            _add_errors(builder, codes, index * facts.pp, orders[index], computes[index], one)
    return Sizes(
        compositions=tuple(codes.distinct),
        gradients=tuple(codes.gradients),
        segments=tuple(codes.segments),
        errors=facts.direct,
    )


def _add_errors(
    builder: GraphBuilder, codes: _Codes, first: int, actions: Actions, compute: Compute, arrived: ErrorsArrived
) -> None:
    """Add the events of the output's error: of the last stage's own rank from its forward on, of another from the
    message on, until the last backward there that it enters."""
    entry = codes.of_errors()
    made = compute.forward[1][-1]
    builder.memory(made, first + compute.home[-1], True, entry, ERRORS)
    builder.memory(arrived.task, first + arrived.rank, False, entry, ERRORS)
    ends = np.append(np.flatnonzero(np.diff(compute.action)), len(compute.action) - 1)  # the last task of each action
    back = np.flatnonzero(np.isin(actions.kind, (B, BW)))[::-1]
    where = actions.rank_of()[back].astype(np.int64) * actions.num_microbatches + actions.microbatch[back]
    _, latest = np.unique(where, return_index=True)
    chosen = back[latest]
    builder.memory(compute.task[ends[chosen]], first + actions.rank_of()[chosen], True, -(entry + 1), ERRORS)


def _add_taught(
    builder: GraphBuilder, codes: _Codes, stage: np.ndarray, public: list[np.ndarray], lessons: list[np.ndarray]
) -> None:
    """Add the events of public text, whose layers are those of `stage`: kept from its forwards to its backwards."""
    for index, (made, learnt) in enumerate(zip(public, lessons)):
        events = [(made, SAVED, "activations"), (made, KEPT_LOGITS, LOGITS)]
        events += [(learnt, FREED_BY_BW, "activations"), (learnt, LOGITS_END, LOGITS)]
        events += [(task, which, "workspace") for task in (made, learnt) for which in (WORKSPACE, WORKSPACE_END)]
        for task, which, category in events:
            at_end = which not in (SAVED, KEPT_LOGITS, WORKSPACE)
            builder.memory(task, index, at_end, codes.entry(which, stage), category)


def _add_moved(builder: GraphBuilder, facts: Facts, codes: _Codes, first: int, one: Saved, hosts: int) -> None:
    """Add the events of activations that leave the device and come back: there, and where they lie meanwhile, which is
    counted for a rank class of its own (`hosts` behind the device's)."""
    units = [facts.compositions[s].segments[k] for s, k in zip(one.stage.tolist(), one.segment.tolist())]
    entry = codes.of_segments(units)
    freed = -(entry + len(codes.segments))
    where, left = first + one.rank, one.gone >= 0
    builder.memory(one.made, where, False, entry, MOVED)
    builder.memory(one.gone[left], where[left], True, freed[left], MOVED)
    builder.memory(one.back[left], where[left], False, entry[left], MOVED)
    builder.memory(one.used, where, True, freed, MOVED)
    builder.memory(one.gone[left], where[left] + hosts, False, entry[left], MOVED)
    builder.memory(one.back[left], where[left] + hosts, True, freed[left], MOVED)


def held_stages(stages: Stages, actions: Actions) -> list[list[int]]:
    """The stages that every pipeline rank holds."""
    held: list[list[int]] = [[] for _ in range(stages.plan.layout.pp)]
    for stage, ranks in enumerate(actions.stage_ranks):
        for rank in ranks:
            held[rank].append(stage)
    return held


def constant_bytes(stages: Stages, actions: Actions, part: float | None = None) -> tuple[dict[str, float], ...]:
    """Constant bytes of every pipeline rank of every class of slices by category: the state of the stages it holds, and
    ZeRO-3's gathered copies. `part`: as if every rank held such a part of the state that is sharded."""
    held = stages.mesh.held if part is None else (part,) * len(stages.mesh.slices)
    uneven = stages.plan.kinds.hold or part is not None
    places = list(zip(stages.each, held))
    known = {(s, one): _constant(s, actions, one if uneven else None) for s, one in dict.fromkeys(places)}
    return tuple(bytes_of for place in places for bytes_of in known[place])


def _constant(stages: Stages, actions: Actions, part: float | None) -> tuple[dict[str, float], ...]:
    """Constant bytes of every pipeline rank that holds such a part of the sharded state."""
    held = held_stages(stages, actions)
    known: dict[tuple[int, ...], dict[str, float]] = {}  # equal stages are one object
    each: dict[int, dict[str, float]] = {}
    for composition in stages.compositions:
        if id(composition) not in each:
            some = tuple(u for u in composition.units if not u.plain)
            sums = (stages.total_params(units) for units in (composition.units, some))
            each[id(composition)] = static_bytes(stages.plan, stages.train, *sums, part)
    out = []
    for mine in held:
        same = tuple(id(stages.compositions[s]) for s in mine)
        if same not in known:
            known[same] = _static(stages, mine, each)
        out.append(known[same])
    return tuple(out)


def perturbation_bytes(plan: Plan, train: Train, hidden: int) -> float:
    """Bytes of what the embedded text of a rank's next batch is moved by, as it is computed with."""
    layout = plan.layout
    tokens = train.tokens_per_step / (layout.dp * layout.cp * (layout.tp if layout.sp else 1))
    return tokens * hidden * (4.0 if (plan.precision.compute or train.dtype) == "fp32" else 2.0)


def feedback_bytes(stages: Stages, held: list[int]) -> float:
    """Bytes of the random matrices that a rank multiplies the output's error by: those of all places that it enters on
    the rank, or one, with the last stage, whose product all get."""
    direct, c = stages.plan.feedback.direct, stages.context()
    assert direct is not None
    blocks = sum(u.is_block for stage in held for u in stages.compositions[stage].units)
    count = int(len(stages.compositions) - 1 in held) if direct.shared else direct.points * blocks
    return count * float(c.hidden) ** 2 * c.element


def _static(stages: Stages, held: list[int], each: dict[int, dict[str, float]]) -> dict[str, float]:
    plan = stages.plan
    out: dict[str, float] = dict(tier_bytes(stages, held)[""]) if plan.offload.any else {}
    gathered = 0.0
    for stage in held:
        composition = stages.compositions[stage]
        for name, size in each[id(composition)].items() if not plan.offload.any else ():
            out[name] = out.get(name, 0.0) + size
        if plan.layout.zero == 3:
            parts = [gathered_bytes(plan, stages.total_params(s), stages.train) for s in composition.segments]
            # without a pipeline two layers are gathered at a time; under one the stage stays gathered
            gathered += sum(sorted(parts)[-2:]) / plan.offload.tiles if plan.layout.pp == 1 else sum(parts)
    if gathered:
        out["gathered parameters"] = gathered
    if plan.layout.hpz:  # of all layers, once the last forward has left its own behind
        held_bytes = sum(
            gathered_bytes(plan, stages.total_params(stages.compositions[s].units), stages.train) for s in held
        )
        out["second copy of weights"] = held_bytes / plan.layout.hpz
    if stages.train.adversarial and 0 in held:
        out["perturbation"] = perturbation_bytes(plan, stages.train, stages.model.hidden)
    if plan.feedback.direct is not None:
        out["feedback matrices"] = feedback_bytes(stages, held)
    if stages.taught is not None:
        out["predictions"] = float(predictions_bytes(stages))
    if plan.layout.shards_gradients and plan.layout.pp == 1:
        # the layer in flight has its gradient whole until it is scattered
        segments = [s for stage in held for s in stages.compositions[stage].segments]
        whole = max(unscattered_bytes(plan, stages.total_params(s)) for s in segments)
        out["gradients"] += whole / plan.offload.tiles
    return out


def freed_first(memory: MemoryEvents) -> MemoryEvents:
    """Return the memory events with those that free first: a split backward may leave more for W than it frees."""
    order = np.argsort(memory.num_bytes > 0, kind="stable")
    return msgspec.structs.replace(
        memory,
        **{name: getattr(memory, name)[order] for name in ("task", "rank", "at_end", "num_bytes", "category")},
    )
