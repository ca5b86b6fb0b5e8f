"""Completed placements: what a user's annotations leave open, chosen so that a step is shortest, and its price.

One axis after the other, the outermost first: on each, operators are taken in their order, and of the placements of all
tensors that are still read the cheapest ways to each are kept (dynamic programming over what is alive, cut to
``BEAM``). A step is priced operator by operator by the common costs, exchanges between them, with nothing overlapped;
the largest rank of an uneven cut sets the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import msgspec

from meshwright.answer.placed_prices import ALONE, PlacedMove, PlacedPrices, cut
from meshwright.cost import Costs
from meshwright.layers.algebra import REPLICATE, AxisMesh, Placement
from meshwright.layers.signatures import SIGNATURES, dual, wanted
from meshwright.lower.state import updated_bytes
from meshwright.plan import Plan
from meshwright.plan.placements import Annotations
from meshwright.plan.tensors import PlacedProgram, PlacedStep, TensorNetwork, TensorOperator, backward, forward
from meshwright.spec.cluster import Cluster
from meshwright.spec.workload import Train
from meshwright.work import AttentionCore, Elementwise, Gemm

#: Ways to lie that are kept at a point of the network.
BEAM = 128
#: Placements that hidden states between layers may have: any but terms of a sum.
BETWEEN = (0, 1, 2, REPLICATE)


class PlacedPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A completed program with its price: seconds of a step in operators and in exchanges, the exchanges one by one,
    and the bytes of weights on the rank with the most."""

    program: PlacedProgram
    compute_s: float
    exchange_s: float
    moves: tuple[PlacedMove, ...]
    weight_bytes: float

    @property
    def step_s(self) -> float:
        """Seconds of a step with nothing overlapped."""
        return self.compute_s + self.exchange_s

    def totals(self) -> dict[tuple[str, str], tuple[int, float, float]]:
        """Number, bytes and seconds of a step's exchanges by operation and axis."""
        found: dict[tuple[str, str], tuple[int, float, float]] = {}
        for m in self.moves:
            count, size, seconds = found.get((m.op, m.axis), (0, 0.0, 0.0))
            found[m.op, m.axis] = count + m.times, size + m.times * m.num_bytes, seconds + m.times * m.seconds
        return found


def complete(
    network: TensorNetwork, said: Annotations, cluster: Cluster, train: Train, costs: Costs
) -> PlacedPrediction:
    """Place what annotations leave open, and price a step of it."""
    prices = PlacedPrices(said.mesh, cluster, train.dtype, costs)
    placed: list[_OnAxis] = []
    update_bytes = updated_bytes(Plan(), train)
    for axis, (name, _) in enumerate(said.mesh.axes):
        fixed = {tensor: places[name] for tensor, places in said.said.items() if name in places}
        placed.append(_Axis(network, prices, axis, fixed, placed, update_bytes).best())
    homes = {name: tuple(one.homes[name] for one in placed) for name in placed[0].homes}
    parts = tuple(
        tuple(PlacedStep(op, *_across([one.chosen[number, at] for one in placed])) for at, op in enumerate(operators))
        for number, operators in enumerate(network.parts)
    )
    program = PlacedProgram(mesh=said.mesh, network=network, parts=parts, homes=homes)
    return _priced(program, prices, update_bytes)


def _across(signatures: Sequence[tuple[int, ...]]) -> tuple[tuple[Placement, ...], Placement]:
    """The placements of an operator's inputs and of its result, from its signature on every axis."""
    *ins, out = zip(*signatures)
    return tuple(ins), out


def _operator_seconds(
    prices: PlacedPrices, op: TensorOperator, network: TensorNetwork, shapes: Sequence[Sequence[int]]
) -> float:
    """Seconds of an operator forward and backward, whose inputs and result have these shapes on a rank."""
    read = [prod(s) * network.tensors[n].each for n, s in zip((*op.inputs, op.output), shapes)]
    if 0 in read or op.kind == "relay":
        return 0.0
    rows = prod(shapes[0][:2])
    if op.kind in ("product", "scores"):
        k, n = read[0] // rows, read[-1] // rows
        return sum(prices.price(_gemm(prices, *sizes)) for sizes in ((rows, n, k), (rows, k, n), (k, n, rows)))
    if op.kind == "attention":
        (b, q_len, groups), kv_len, a = shapes[0], shapes[1][1], network.block.attention
        # the ranks' last queries see the most
        core = AttentionCore(
            batch=b,
            q_len=q_len,
            kv_len=kv_len,
            heads=groups * a.heads // a.kv_heads,
            kv_heads=groups,
            head_dim=a.head_dim,
            v_head_dim=a.head_dim,
            pairs=q_len * kv_len - q_len * (q_len - 1) / 2,
            dtype=prices.dtype,
        )
        return prices.price(core) + prices.price(msgspec.structs.replace(core, backward=True))
    once = sum(read) * prices.element
    return prices.price(Elementwise(num_bytes=once)) + prices.price(Elementwise(num_bytes=1.5 * once))


def _gemm(prices: PlacedPrices, m: int, n: int, k: int) -> Gemm:
    return Gemm(m=m, n=n, k=k, dtype=prices.dtype, out_bytes=prices.element)


class _OnAxis(msgspec.Struct, frozen=True):
    """Choices on one axis: signatures by (part, operator), and where every tensor lies."""

    seconds: float
    chosen: dict[tuple[int, int], tuple[int, ...]]
    homes: dict[str, int]


#: A tensor that is still read: where it lies, where else it is by now, and where gradients of it are left.
_Alive = tuple[int, frozenset, frozenset]


class _Axis:
    """The search on one axis, given the axes before it."""

    def __init__(
        self,
        network: TensorNetwork,
        prices: PlacedPrices,
        axis: int,
        fixed: dict[str, int],
        before: Sequence[_OnAxis],
        update_bytes: float,
    ):
        self.update_bytes = update_bytes
        self.network, self.prices, self.fixed, self.before = network, prices, fixed, before
        name, self.size = prices.mesh.axes[axis]
        self.alone = AxisMesh(((name, self.size),))
        self.sizes = prices.mesh.sizes[: axis + 1]
        self._moves: dict[tuple, float] = {}

    def best(self) -> _OnAxis:
        """The cheapest ways of all three parts that agree on the hidden states between them."""
        found = None
        for between in (self.fixed["hidden"],) if "hidden" in self.fixed else self._between():
            ways, homes = [], {}
            for part, times in enumerate(self.network.times):
                way = self._part(part, between, homes)
                homes |= way.homes
                ways.append((way, times))
            seconds = sum(way.seconds * times for way, times in ways)
            if found is None or seconds < found.seconds:
                chosen = {key: signature for way, _ in ways for key, signature in way.chosen.items()}
                found = _OnAxis(seconds, chosen, homes)
        assert found is not None
        return found

    def _between(self) -> list[int]:
        """Placements of hidden states that leave no rank without a part."""
        shape = cut(self.network.tensors["hidden"].shape, [one.homes["hidden"] for one in self.before], self.sizes[:-1])
        return [p for p in BETWEEN if p < 0 or shape[p] >= self.size]

    def _part(self, part: int, between: int, known: dict[str, int]) -> _OnAxis:
        """The cheapest way through a part that begins and ends with hidden states at a placement; weights that are
        `known` lie where they do."""
        operators = self.network.parts[part]
        last = {name: at for at, op in enumerate(operators) for name in op.inputs}
        start = {"hidden": (between, frozenset([between]), frozenset())} if part else {}
        ways: dict[tuple, tuple[float, dict, dict]] = {self._key(start): (0.0, {}, dict.fromkeys(start, between))}
        for at, op in enumerate(operators):
            after: dict[tuple, tuple[float, dict, dict]] = {}
            for state, (seconds, chosen, homes) in sorted(ways.items(), key=lambda way: way[1][0])[:BEAM]:
                for signature in self._signatures(part, at, op, between):
                    cost, alive, mine = self._step(part, at, op, signature, dict(state), known)
                    alive = {n: v for n, v in alive.items() if last.get(n, -1) > at or n == op.output != "hidden"}
                    key = self._key(alive)
                    if key not in after or seconds + cost < after[key][0]:
                        after[key] = (seconds + cost, chosen | {(part, at): signature}, homes | mine)
            ways = after
        return _OnAxis(*min(ways.values(), key=lambda way: way[0]))

    def _signatures(self, part: int, at: int, op: TensorOperator, between: int) -> list[tuple[int, ...]]:
        """The signatures of an operator that leave no rank without a part, or all where none does."""
        if op.kind == "relay":
            place = between if op.output == "hidden" else self.fixed.get(op.output)
            if place is not None:
                return [(place, place)]
        names = (*op.inputs, op.output)
        full = [
            signature
            for signature in SIGNATURES[op.kind]
            if all(
                p < 0 or self._local(part, at, i, name, REPLICATE)[p] >= self.size
                for i, (name, p) in enumerate(zip(names, signature))
            )
        ]
        return full or list(SIGNATURES[op.kind])

    @staticmethod
    def _key(alive: dict[str, _Alive]) -> tuple:
        return tuple(sorted(alive.items(), key=lambda one: one[0]))

    def _step(
        self, part: int, at: int, op: TensorOperator, signature: tuple[int, ...], alive: dict[str, _Alive], known: dict
    ) -> tuple[float, dict[str, _Alive], dict[str, int]]:
        """The price of an operator in a signature, with the moves of its inputs and of their gradients; what is alive
        behind it, and where its tensors lie."""
        *ins, out = signature
        shapes = [
            self._local(part, at, i, name, p) for i, (name, p) in enumerate(zip((*op.inputs, op.output), signature))
        ]
        seconds, homes = _operator_seconds(self.prices, op, self.network, shapes), {op.output: out}
        for name, place in zip(op.inputs, ins):
            (left,) = dual((place,), (out,))
            home, has, grads = alive.get(name, (None, frozenset(), frozenset()))
            if home is None:  # a weight, read here for the first time
                home = known.get(name, self.fixed.get(name, place))
                homes[name], has = home, frozenset([home])
                if name not in known:
                    seconds += self._updated(name, home)
            if place not in has:
                seconds += self._moved(name, home, place)
            if left not in grads:
                seconds += self._moved(name, left, *wanted((home,)))
            if not self.network.tensors[name].weight:
                alive[name] = (home, has | {place}, grads | {left})
        alive[op.output] = (out, frozenset([out]), frozenset())
        return seconds, alive, homes

    def _local(self, part: int, at: int, i: int, name: str, place: int) -> tuple[int, ...]:
        """The shape of an operator's input or result on the largest rank, cut by this axis and those before it."""
        places = [*(one.chosen[part, at][i] for one in self.before), place]
        return cut(self.network.tensors[name].shape, places, self.sizes)

    def _updated(self, name: str, home: int) -> float:
        """Seconds of the optimizer over a rank's part of a weight; its kernels are started for all weights at once."""
        tensor, places = self.network.tensors[name], [*(one.homes[name] for one in self.before), home]
        numbers = prod(cut(tensor.shape, places, self.sizes)) * tensor.each
        return self.prices.price(Elementwise(num_bytes=numbers * self.update_bytes, kernels=0, fused=True))

    def _moved(self, name: str, source: int, target: int) -> float:
        """Seconds of moving a tensor or its gradient from one placement to another on this axis."""
        if source == target:
            return 0.0
        key = (name, source, target)
        if key not in self._moves:
            tensor = self.network.tensors[name]
            shape = cut(tensor.shape, [one.homes[name] for one in self.before], self.sizes[:-1])
            moves = self.prices.exchanges(self.alone, (source,), (target,), shape, tensor.each)
            self._moves[key] = sum(seconds for *_, seconds in moves)
        return self._moves[key]


class _Priced:
    """A handler of a program's walk that adds up what it takes."""

    def __init__(self, program: PlacedProgram, prices: PlacedPrices, times: int):
        self.program, self.prices, self.times = program, prices, times
        self.compute_s, self.moves = 0.0, Counter[PlacedMove]()

    def _exchange(self, name: str, source: Placement, target: Placement, gradient: bool) -> None:
        tensor = self.program.network.tensors[name]
        found = self.prices.exchanges(self.program.mesh, source, target, tensor.shape, tensor.each)
        for op, axis, size, seconds in found:
            if op not in ALONE and size:
                self.moves[
                    PlacedMove(
                        tensor=name.rstrip("'"),
                        gradient=gradient,
                        op=op,
                        axis=axis,
                        num_bytes=size,
                        times=self.times,
                        seconds=seconds,
                    )
                ] += 1

    def move(self, name: str, source: Placement, target: Placement) -> None:
        self._exchange(name, source, target, False)

    def collect(self, name: str, found: Sequence[Placement], target: Placement, *, made: bool) -> None:
        for source in found:
            self._exchange(name, source, target, True)

    def run(self, step: PlacedStep) -> None:
        op, tensors, sizes = step.operator, self.program.network.tensors, self.program.mesh.sizes
        names = (*op.inputs, op.output)
        shapes = [cut(tensors[n].shape, p, sizes) for n, p in zip(names, (*step.ins, step.out))]
        self.compute_s += self.times * _operator_seconds(self.prices, op, self.program.network, shapes)

    def back(self, step: PlacedStep) -> None:
        """Nothing more: operators are priced with their backward."""


def _priced(program: PlacedProgram, prices: PlacedPrices, update_bytes: float) -> PlacedPrediction:
    """The price of a step."""
    compute, moves = 0.0, []
    for part, times in enumerate(program.network.times):
        handler = _Priced(program, prices, times)
        forward(program, part, handler)
        backward(program, part, handler)
        compute += handler.compute_s
        moves += [msgspec.structs.replace(m, times=m.times * count) for m, count in handler.moves.items()]
    held = {n: t for n, t in program.network.tensors.items() if t.weight}
    inside = {n for op in program.network.parts[1] for n in op.inputs}
    weights = sum(
        prod(cut(t.shape, program.homes[n], program.mesh.sizes))
        * t.each
        * (program.network.layers if n in inside else 1)
        for n, t in held.items()
    )
    compute += prices.price(Elementwise(num_bytes=weights * update_bytes, kernels=8, fused=True))
    return PlacedPrediction(
        program=program,
        compute_s=compute,
        exchange_s=sum(m.seconds * m.times for m in moves),
        moves=tuple(moves),
        weight_bytes=weights * prices.element,
    )
