"""A computation placed: for every join, on every axis of a mesh, which side is copied, or on which key both are cut.

One integer program decides for all steps at once, forward and backward: a signature of each step and a home of each
input, so that a step takes least seconds, those of operators and of the exchanges between the homes of tensors and
where they are read, under the memory of a rank. A copy of a tensor is made once for all that read it there. Nothing is
overlapped, and nothing is freed before the end of the step. The solver's bound says how far from the best the answer
may be. Tang et al., 2023, arXiv 2306.00088.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from meshwright.answer.join_work import local_bytes, step_seconds
from meshwright.answer.placed_prices import ALONE, PlacedMove, PlacedPrices
from meshwright.assign.program import LinearRow, ProgramAnswer, minimise
from meshwright.cost import Costs
from meshwright.errors import Diagnostic, Infeasible, MeshwrightError, nearest
from meshwright.layers.algebra import REPLICATE, AxisMesh, Placement
from meshwright.layers.derivative import derived
from meshwright.layers.joins import cut_along, homes, signatures, way
from meshwright.spec.cluster import Cluster
from meshwright.spec.computation import JOIN, UPDATE, Computation, ComputationStep

#: Axes of a mesh at most: the placements of a tensor are multiplied with each.
MOST_AXES = 2
#: Seconds of the solver for the whole, and for each way that was not taken.
LIMIT_S, WAY_LIMIT_S = 60.0, 5.0
#: A value and its bound that are nearer, relative, are one.
GAP = 1e-6
#: Columns of the program are microseconds.
MICRO = 1e6


class JoinedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step with the placements of its inputs and of its result, and the seconds of a rank's part of it."""

    step: ComputationStep
    ins: tuple[Placement, ...]
    out: Placement
    seconds: float


class JoinWay(msgspec.Struct, frozen=True, kw_only=True):
    """A way of making a join on an axis: whether it is taken, and the seconds of the fastest step that makes the join
    so (infinite where none fits)."""

    join: str
    axis: str
    way: str
    taken: bool
    step_s: float


class JoinedPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A computation with its backward on a mesh: ``steps`` placed, ``homes`` of all tensors, the exchanges of a step,
    bytes of the rank with the most and what it has room for, and seconds that no placement gets below."""

    computation: Computation
    mesh: AxisMesh
    steps: tuple[JoinedStep, ...]
    homes: dict[str, Placement]
    moves: tuple[PlacedMove, ...]
    held_bytes: float
    capacity_bytes: float
    bound_s: float
    ways: tuple[JoinWay, ...] = ()

    @property
    def compute_s(self) -> float:
        """Seconds in operators."""
        return sum(step.seconds for step in self.steps)

    @property
    def exchange_s(self) -> float:
        """Seconds in exchanges."""
        return sum(move.seconds for move in self.moves)

    @property
    def step_s(self) -> float:
        """Seconds of a step with nothing overlapped."""
        return self.compute_s + self.exchange_s

    @property
    def gap(self) -> float:
        """How far above the bound it is, relative; 0: nothing is faster."""
        over = self.step_s / self.bound_s - 1.0 if self.bound_s > 0 else 0.0
        return over if over > 10 * GAP else 0.0


def reads(steps: Sequence[JoinedStep], loss: str, num_axes: int) -> Iterator[tuple[str, Placement]]:
    """Yield where every tensor is read: by steps in their order, and the loss on every rank."""
    for placed in steps:
        yield from zip(placed.step.inputs, placed.ins)
    yield loss, (REPLICATE,) * num_axes


def mesh_of(computation: Computation, cluster: Cluster) -> AxisMesh:
    """The mesh that a computation says, or all devices as one axis.

    Raises:
        MeshwrightError: A004 for one of another size than the cluster or of too many axes, A003 for unequal devices.
    """
    devices = cluster.num_devices
    mesh = AxisMesh(computation.mesh or (("x", devices),))
    ranks = int(np.prod(mesh.sizes))
    place = f"[mesh] of {computation.name}"
    if len({island.device.name for island in cluster.islands}) > 1:
        help = "say one kind of device"
        raise MeshwrightError.one("A003", "a computation is placed on equal devices alone", place="--on", help=help)
    if ranks != devices:
        product = " * ".join(f"{axis} {size}" for axis, size in mesh.axes)
        message = f"the mesh has {product} = {ranks} ranks, and the cluster {devices}"
        raise MeshwrightError.one("A004", message, place=place, help="let the sizes agree, or drop [mesh]")
    if len(mesh.axes) > MOST_AXES:
        message = f"{len(mesh.axes)} axes: the choices of all joins are solved for {MOST_AXES} at most"
        raise MeshwrightError.one("A004", message, place=place, help="let two axes be one")
    return mesh


def placed_joins(
    computation: Computation,
    cluster: Cluster,
    costs: Costs,
    *,
    ways: bool = True,
    room: float | None = None,
) -> JoinedPrediction:
    """Derive the backward of a computation, and place all of it on a cluster. `ways`: price those that are not taken,
    too; `room`: bytes of a rank, those of the device if left out.

    Raises:
        Infeasible: A005 where it does not fit, however it is placed.
        MeshwrightError: A003 or A004, as :func:`mesh_of` says; L003 where the solver is not installed.
    """
    mesh = mesh_of(computation, cluster)
    prices = PlacedPrices(mesh, cluster, computation.dtype, costs)
    capacity = float(cluster.islands[0].device.memory_bytes) if room is None else room
    program = _JoinProgram(derived(computation), prices, capacity)
    answer = program.solve([], LIMIT_S)
    if answer.x is None:
        _too_large(program, capacity, computation)
    return program.read(answer, ways)


def _too_large(program: _JoinProgram, capacity: float, computation: Computation) -> None:
    if not np.isfinite(program.last.bound):
        least = program.least_bytes()
        message = f"a rank holds {least / 2**30:.3g} GiB at least and has {capacity / 2**30:.3g} GiB"
        help = "more devices (--on), smaller dims, or dtype with fewer bytes; nothing is freed before a step's end"
        raise Infeasible.one("A005", message, place=computation.name, help=help)
    message = f"no placement was found in {LIMIT_S:g} s"
    help = "fewer axes of the mesh, or fewer steps"
    raise Infeasible.one("A005", message, place=computation.name, help=help)


class _JoinProgram:
    """The integer program: a column for each signature of a step, each home of an input that no step updates, and each
    copy of a tensor that is moved from one placement to another."""

    def __init__(self, whole: Computation, prices: PlacedPrices, capacity: float):
        self.whole, self.prices, self.capacity = whole, prices, capacity
        self.sizes = prices.mesh.sizes
        self.cost: list[float] = []
        self.size: list[float] = []
        self.rows: list[LinearRow] = []
        self.steps = [list(signatures(step, whole, self.sizes)) for step in whole.steps]
        self.first: list[int] = []
        #: Columns by tensor and home, and by tensor, home and where it is read.
        self.home: dict[str, dict[Placement, list[int]]] = {}
        self.copy: dict[tuple[str, Placement, Placement], int] = {}
        self._columns()
        self.num_chosen = len(self.cost)
        self._copies()
        self._said()

    def _bytes(self, name: str, place: Placement) -> float:
        return local_bytes(self.whole, name, place, self.sizes, self.prices.element)

    def _column(self, seconds: float, num_bytes: float) -> int:
        self.cost.append(seconds * MICRO)
        self.size.append(num_bytes)
        return len(self.cost) - 1

    def _columns(self) -> None:
        """A column for each signature and each home; of each kind one is chosen."""
        updated = {step.inputs[0] for step in self.whole.steps if step.kind == UPDATE}
        for tensor in self.whole.inputs:
            if tensor.name not in updated:
                places = homes(self.whole, tensor.name, self.sizes)
                columns = {place: [self._column(0.0, self._bytes(tensor.name, place))] for place in places}
                self.home[tensor.name] = columns
                self._one([c for some in columns.values() for c in some])
        for step, found in zip(self.whole.steps, self.steps):
            self.first.append(len(self.cost))
            for ins, out in found:
                # an update is in place: its column says where the weight is at home
                name = step.inputs[0] if step.kind == UPDATE else step.output
                seconds = step_seconds(step, self.whole, ins, out, self.prices)
                column = self._column(seconds, self._bytes(name, out))
                self.home.setdefault(name, {}).setdefault(out, []).append(column)
            self._one(range(self.first[-1], len(self.cost)))

    def _one(self, columns: Iterable[int]) -> None:
        some = list(columns)
        self.rows.append(LinearRow(some, [1.0] * len(some), 1.0, 1.0))

    def _copies(self) -> None:
        """Columns of copies: a tensor is moved where it is read and not at home, once for all that read it so."""
        wanted: dict[tuple[str, Placement], list[list[int]]] = {}
        for step, first, found in zip(self.whole.steps, self.first, self.steps):
            for number, name in enumerate(step.inputs):
                if step.kind == UPDATE and number == 0:
                    continue
                by_place: dict[Placement, list[int]] = {}
                for column, (ins, _) in enumerate(found, first):
                    by_place.setdefault(ins[number], []).append(column)
                for place, columns in by_place.items():
                    wanted.setdefault((name, place), []).append(columns)
        whole = (REPLICATE,) * len(self.sizes)
        wanted.setdefault((self.whole.loss, whole), []).append([])  # every rank is told the loss
        for (name, place), readers in wanted.items():
            there = self.home[name].get(place, [])
            moved = []
            for home, columns in self.home[name].items():
                if home != place:
                    seconds = sum(s for *_, s in self.exchanges(name, home, place))
                    column = self.copy[name, home, place] = self._column(seconds, self._bytes(name, place))
                    self.rows.append(LinearRow([column, *columns], [-1.0] + [1.0] * len(columns), 0.0))
                    moved.append(column)
            for columns in readers:
                factors = [1.0] * (len(there) + len(moved)) + [-1.0] * len(columns)
                self.rows.append(LinearRow([*there, *moved, *columns], factors, 0.0 if columns else 1.0))

    def exchanges(self, name: str, source: Placement, target: Placement) -> Iterator[tuple[str, str, float, float]]:
        """Operation, axis, bytes and seconds of moving a tensor."""
        tensor, shape = self.whole.tensors[name], self.whole.shape(name)
        each = 1.0
        if tensor.rows_of:  # places of a sparse relation that have rows, and what a row takes over a number
            each = self.whole.row_bytes(name, self.prices.element) / self.prices.element
            each *= self.whole.numbers(name) / float(np.prod(np.array(shape, float)))
        return self.prices.exchanges(self.prices.mesh, source, target, shape, each)

    def solve(self, more: list[LinearRow], limit_s: float, cost: list[float] | None = None) -> ProgramAnswer:
        """The best solution under some more rows; `cost` in place of seconds, then without a limit of memory."""
        count, size = len(self.cost), np.array(self.size) / self.capacity
        # a tensor that no rank has room for alone is ruled out here: its bytes and seconds may be beyond a solver
        fit = size <= 1.0 if cost is None else np.ones(count, bool)
        size, seconds = np.where(fit, size, 0.0), np.where(fit, self.cost if cost is None else cost, 0.0)
        fits = [LinearRow(np.flatnonzero(size), size[size > 0], high=1.0)] if cost is None else []
        self.last = minimise(
            seconds,
            np.zeros(count),
            fit.astype(float),
            np.arange(count) < self.num_chosen,
            [*self.rows, *fits, *more],
            limit_s=limit_s,
            gap=GAP,
        )
        return self.last

    def ways(self, number: int, axis: int) -> dict[str, list[int]]:
        """Columns of a join's signatures by the way in which they make it on an axis."""
        found: dict[str, list[int]] = {}
        for column, (ins, out) in enumerate(self.steps[number], self.first[number]):
            words = way(self.whole.steps[number], tuple(p[axis] for p in (*ins, out)))
            found.setdefault(words, []).append(column)
        return found

    def _said(self) -> None:
        """Rows for what is said of joins.

        Raises:
            MeshwrightError: A004 for a name, an axis or a key that is none, all at once.
        """
        wrong: list[Diagnostic] = []
        numbers = {step.output: n for n, step in enumerate(self.whole.steps) if step.kind == JOIN}
        axes = [name for name, _ in self.prices.mesh.axes]
        for join, by_axis in self.whole.joins.items():
            for axis, key in by_axis.items():
                place = f"[joins] of {self.whole.name}: {join}{f'.{axis}' if axis else ''}"
                if join not in numbers or axis not in ("", *axes):
                    what, known = (join, list(numbers)) if join not in numbers else (axis, axes)
                    message = f"no {'join makes' if join not in numbers else 'axis of the mesh is called'} {what!r}"
                    wrong.append(Diagnostic(code="A004", message=message, place=place, help=nearest(what, known)))
                    continue
                step, first, found = (
                    self.whole.steps[numbers[join]],
                    self.first[numbers[join]],
                    self.steps[numbers[join]],
                )
                for at in [axes.index(axis)] if axis else range(len(axes)):
                    cuts = [cut_along(step, tuple(p[at] for p in (*ins, out))) for ins, out in found]
                    columns = [first + number for number, cut in enumerate(cuts) if cut == key]
                    self.rows.append(LinearRow(columns, [1.0] * len(columns), 1.0))
                    if not columns:
                        known = ", ".join(dict.fromkeys(cut for cut in cuts if cut))
                        message = f"{join} is not cut along {key!r} here"
                        wrong.append(Diagnostic(code="A004", message=message, place=place, help=f"known: {known}"))
        if wrong:
            raise MeshwrightError(dict.fromkeys(wrong))

    def least_bytes(self) -> float:
        """Bytes that the rank with the most holds at least."""
        scale = max(self.size)
        return self.solve([], LIMIT_S, [one / scale for one in self.size]).bound * scale

    def read(self, answer: ProgramAnswer, ways: bool) -> JoinedPrediction:
        """The solution as a placed computation."""
        assert answer.x is not None
        x = answer.x > 0.5
        steps, at_home = [], {}
        for step, first, found in zip(self.whole.steps, self.first, self.steps):
            number = next(i for i in range(len(found)) if x[first + i])
            ins, out = found[number]
            steps.append(JoinedStep(step=step, ins=ins, out=out, seconds=self.cost[first + number] / MICRO))
        for name, places in self.home.items():
            at_home[name] = next(place for place, columns in places.items() if any(x[c] for c in columns))
        moves, held = [], sum(self.size[column] for column in np.flatnonzero(x[: self.num_chosen]))
        for name, place in dict.fromkeys(reads(steps, self.whole.loss, len(self.sizes))):
            if place == at_home[name]:
                continue
            held += self._bytes(name, place)
            moves += [
                PlacedMove(
                    tensor=name,
                    gradient=name.startswith("d("),
                    op=op,
                    axis=axis,
                    num_bytes=num_bytes,
                    times=1,
                    seconds=seconds,
                )
                for op, axis, num_bytes, seconds in self.exchanges(name, at_home[name], place)
                if op not in ALONE
            ]
        found = JoinedPrediction(
            computation=self.whole,
            mesh=self.prices.mesh,
            steps=tuple(steps),
            homes=at_home,
            moves=tuple(moves),
            held_bytes=float(held),
            capacity_bytes=self.capacity,
            bound_s=max(0.0, answer.bound) / MICRO,
        )
        return msgspec.structs.replace(found, ways=tuple(self._ways(found, ways)))

    def _ways(self, found: JoinedPrediction, others: bool) -> list[JoinWay]:
        """The way that is taken of every join of two sides and more on every axis; with `others` all that there are,
        with the fastest step that makes each. What the file says of a join leaves no other."""
        out = []
        for number, placed in enumerate(found.steps):
            step = placed.step
            if step.kind != JOIN or len(step.inputs) < 2 or not any(step.read):
                continue
            for axis, (name, _) in enumerate(self.prices.mesh.axes):
                taken = way(step, tuple(p[axis] for p in (*placed.ins, placed.out)))
                said = {"", name} & self.whole.joins.get(step.output, {}).keys()
                for words, some in self.ways(number, axis).items() if others and not said else [(taken, [])]:
                    seconds = found.step_s
                    if words != taken:
                        answer = self.solve([LinearRow(some, [1.0] * len(some), 1.0)], WAY_LIMIT_S)
                        seconds = answer.value / MICRO if answer.x is not None else float("inf")
                    out.append(JoinWay(join=step.output, axis=name, way=words, taken=words == taken, step_s=seconds))
        return out
