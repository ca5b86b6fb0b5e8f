"""The layers whose gradients are encoded, chosen by the step that comes of it (Espresso, Wang et al. 2205.14465).

A step of a plan is lowered once, with all its layers encoded. Under another choice its tasks are the same ones with
other durations (what is not encoded takes no time to encode), so that a choice is one more pass of the engine over that
graph. Layers are tried one after the other, the largest and nearest to the output first (algorithm 1 of the paper);
from there, from all of them encoded, and from the best of the first or last layers, single layers and pairs are
exchanged as long as the step gets shorter. What is found is held against no layer and all of them under the whole
simulator, which knows of shared ports and cores too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import perf_counter

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.graph import TaskGraph
from meshwright.lower import structured
from meshwright.lower.bind import DECODE, Binder
from meshwright.lower.place import Mesh
from meshwright.lower.roles import CodeRole, ExchangeRole, PassRole, Role
from meshwright.lower.stages import Stages
from meshwright.lower.structure import Structure
from meshwright.lower.units import Unit, composition_of, unit_of
from meshwright.plan import Plan
from meshwright.quantity import seconds as shown
from meshwright.simulate.divide import SumChoice, divided
from meshwright.simulate.engine import makespans
from meshwright.simulate.price import Pricer
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.fragments import GRADIENTS
from meshwright.sync.options import runs
from meshwright.sync.policy import read

#: Steps that differ by less than this share are equally long.
EQUAL = 1e-9
#: Choices beside the best one that are timed at once at most, and those after which no better one is looked for.
BESIDE, MOST = 1000, 3000
Segment = tuple[Unit, ...]


class CodeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The ``layers`` of ``of`` whose gradients travel in ``codec``, chosen in ``seconds`` among so many ``tried``.
    ``step_s`` is the step of that choice, ``plain_s`` that of no layer and ``coded_s`` that of all."""

    layers: tuple[int, ...]
    of: int
    codec: str
    step_s: float
    plain_s: float
    coded_s: float
    tried: int
    seconds: float

    @property
    def text(self) -> str:
        """The choice in words."""
        return (
            f"gradients of {len(self.layers)} of {self.of} layers are encoded in {self.codec}, chosen in "
            f"{shown(self.seconds)} among {self.tried} timelines: with none a step would take {shown(self.plain_s)}, "
            f"with all {shown(self.coded_s)}"
        )


def decided(
    plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs
) -> tuple[Plan, CodeChoice | SumChoice | None]:
    """The plan with what its synchronisation left open (the layers that are encoded, or the parts of sums), and how it
    was chosen; the plan itself where it leaves nothing."""
    if plan.several or not read(plan.sync.policy).undecided:
        return plan, None
    if not read(plan.sync.policy).coded:
        return divided(plan, cluster)
    began, count = perf_counter(), model.num_layers
    every = _with(plan, range(count))
    mesh = Mesh(every, cluster)
    stages = Stages(every, model, train, mesh)
    binder = Binder(stages, mesh, costs.framework.defaults.bucket_bytes)
    tried = _Tried(structured(stages), binder, Pricer(costs), count)
    mask = fastest(tried.seconds, tried.sizes)
    choices = dict.fromkeys(((), tuple(np.flatnonzero(mask).tolist()), tuple(range(count))))
    steps = {c: simulate(_with(plan, c), model, cluster, train, costs).step_time_s for c in choices}
    best = min(choices, key=lambda c: (steps[c] > min(steps.values()) * (1 + EQUAL), len(c)))
    return _with(plan, best), CodeChoice(
        layers=best,
        of=count,
        codec=read(every.sync.policy).codec,
        step_s=steps[best],
        plain_s=steps[()],
        coded_s=steps[tuple(range(count))],
        tried=tried.count + len(choices),
        seconds=perf_counter() - began,
    )


def _with(plan: Plan, layers: range | tuple[int, ...]) -> Plan:
    """The plan with these layers encoded."""
    said = read(plan.sync.policy)
    words = msgspec.structs.replace(said, values=said.values | {"coded": runs(layers)}).text
    return msgspec.structs.replace(plan, sync=msgspec.structs.replace(plan.sync, policy=words))


def fastest(seconds: Callable[[np.ndarray], np.ndarray], sizes: np.ndarray) -> np.ndarray:
    """Which layers [L] to encode for the shortest step, as few as that takes: `seconds` (choices [n, L]) gives that of
    each choice, `sizes` [L] are those of the layers' gradients."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], -i))  # the largest, then the nearest to the output
    starts = []
    for start, tries in ((False, order), (True, order[::-1])):
        mask = np.full(len(sizes), start)
        now = seconds(mask[None])[0]
        for layer in tries:
            other = mask.copy()
            other[layer] = not start
            then = seconds(other[None])[0]
            if _better(then, now, other, mask):
                mask, now = other, then
        starts.append((mask, now))
    first = np.tri(len(sizes), dtype=bool)
    for ends in (first, ~first):  # the first layers, and the last ones
        times = seconds(ends)
        least = int(np.argmin(times))
        starts.append((ends[least], times[least]))
    starts.sort(key=lambda one: one[1])
    (best, least), left = starts[0], MOST
    for start in starts:
        mask, now, tried = _improved(seconds, *start, left)
        left -= tried
        if _better(now, least, mask, best):
            best, least = mask, now
    return best


def _improved(
    seconds: Callable[[np.ndarray], np.ndarray], mask: np.ndarray, now: float, most: int
) -> tuple[np.ndarray, float, int]:
    """The choice that no other of one layer more or less, or of another layer in place of one, is shorter than, or the
    best one after `most` are tried; its seconds, and how many were tried."""
    tried = 0
    while tried < most:
        ways = [(i,) for i in range(len(mask))]
        ways += [(int(i), int(j)) for i in np.flatnonzero(mask) for j in np.flatnonzero(~mask)]
        others = np.repeat(mask[None], len(ways[:BESIDE]), axis=0)
        for row, way in zip(others, ways):
            row[list(way)] ^= True
        found = seconds(others)
        tried += len(others)
        least = int(np.argmin(found))
        if not _better(found[least], now, others[least], mask):
            break
        mask, now = others[least], found[least]
    return mask, now, tried


def _better(then: float, now: float, other: np.ndarray, mask: np.ndarray) -> bool:
    """Whether a choice is shorter than another, or as long with fewer layers."""
    if abs(then - now) > EQUAL * now:
        return bool(then < now)
    return bool(other.sum() < mask.sum())


class _Tried:
    """The steps of one plan under choices of the layers that are encoded."""

    def __init__(self, structure: Structure, binder: Binder, pricer: Pricer, num_layers: int):
        self.binder, self.pricer, self.count = binder, pricer, 0
        self.roles, facts, graph = structure.roles, structure.facts, structure.graph
        self._facts, self._known = facts, {}
        number = graph.cost_key
        self.graph: TaskGraph = msgspec.structs.replace(graph, cost_key=np.arange(graph.num_tasks, dtype=np.int32))
        usual = np.array([pricer(binder(role)).seconds for role in structure.roles])
        self.base = usual[number]
        self.sizes = np.zeros(num_layers)
        for composition, first in zip(facts.compositions, facts.first_layers):
            for i, units in enumerate(composition.segments):
                self.sizes[first + i] += sum(f.num_bytes for f in binder.fragments(units) if f.what == GRADIENTS)
        held = self._held(number)
        self.several = [task for task in held if len(held[task]) > 1 or self._decodes(number[task])]
        one = [task for task in held if task not in set(self.several)]
        self.role_of, self.held = {task: int(number[task]) for task in held}, held
        self.task = np.array(one, np.int64)
        self.layer = np.array([held[task][0][0] for task in one], np.int64)
        self.plain, self.coded = (
            np.array([self._price(self.role_of[t], ((held[t][0][1], on),)) for t in one]) for on in (False, True)
        )

    def seconds(self, choices: np.ndarray) -> np.ndarray:
        """The step of each choice [n, L] of the layers, in seconds [n]."""
        self.count += len(choices)
        draws = np.repeat(self.base[None], len(choices), axis=0)
        draws[:, self.task] = np.where(choices[:, self.layer], self.coded, self.plain)
        for task in self.several:
            held, role = self.held[task], self.role_of[task]
            for draw, mask in zip(draws, choices):
                draw[task] = self._price(role, tuple((units, bool(mask[layer])) for layer, units in held))
        return makespans(self.graph, draws)

    def _decodes(self, role: int) -> bool:
        return isinstance(self.roles[role], CodeRole) and self.roles[role].what == DECODE

    def _held(self, number: np.ndarray) -> dict[int, tuple[tuple[int, Segment], ...]]:
        """The layers, by number and units, that the duration of a task depends on the code of."""
        graph, found = self.graph, {}
        stage, segment = graph.attribute("stage"), graph.attribute("layer")
        for task, role in enumerate(self.roles[n] for n in number.tolist()):
            before = graph.dep[graph.dep_ptr[task] : graph.dep_ptr[task + 1]].tolist()
            if isinstance(role, PassRole) and GRADIENTS in role.beside:
                found[task] = ((int(segment[task]), role.units),)
            elif isinstance(role, ExchangeRole) and role.what == GRADIENTS:
                found[task] = self._of(role, int(stage[task]), int(segment[task]))
                encodes = [t for t in before if isinstance(self.roles[number[t]], CodeRole)]
                found.update((t, found[task]) for t in encodes)
            elif isinstance(role, CodeRole) and role.what == DECODE:
                places = sorted({place for t in before for place in found[t]}, key=lambda place: place[0])
                found[task] = tuple(places)
        return found

    def _of(self, role: ExchangeRole, stage: int, segment: int) -> tuple[tuple[int, Segment], ...]:
        first, composition = self._facts.first_layers[stage], self._facts.compositions[stage]
        if role.units == composition.units:
            return tuple((first + i, units) for i, units in enumerate(composition.segments))
        return ((first + segment, role.units),)

    def _price(self, role: int, some: tuple[tuple[Segment, bool], ...]) -> float:
        """Seconds of a role with some of its layers encoded."""
        key = role, frozenset(Counter(some).items())
        if key not in self._known:
            self._known[key] = self._priced(self.roles[role], some)
        return self._known[key]

    def _priced(self, role: Role, some: tuple[tuple[Segment, bool], ...]) -> float:
        if isinstance(role, CodeRole) and not any(on for _, on in some):
            return 0.0
        mixed = composition_of(tuple(_plainly(u, not on) for units, on in some for u in units))
        return self.pricer(self.binder(msgspec.structs.replace(role, units=mixed.units))).seconds


def _plainly(unit: Unit, plain: bool) -> Unit:
    return unit_of(unit.kind, unit.recompute, plain=plain, lowered=unit.lowered)
