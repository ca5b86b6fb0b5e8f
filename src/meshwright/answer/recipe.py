"""The price of a recipe of data operators: as written, as Data-Juicer would fuse it, and in the fastest legal order.

Operators run one after the other over all samples that are left, as Data-Juicer runs them (Chen et al., 2309.02033).
Filters that share a context (the words of a text, its lines) may be one pass, which computes the context once and every
statistic of every sample, before any of them drops one. What is kept of a sample does not depend on what else is, so
that the samples before an operator are those that all before it keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import combinations
from typing import Any

import msgspec

from meshwright.assign.ordering import OrderedSteps, cheapest
from meshwright.errors import MeshwrightError
from meshwright.spec.recipe import DEDUPLICATOR, FILTER, DataRecipe

FORMAT_VERSION = 1
#: Filters of one context that are tried together in every subset, at most; of more all of them, or none.
MOST_SUBSETS = 8
#: Where a sum of seconds is the same.
ROUNDING = 1e-9


class RecipePass(msgspec.Struct, frozen=True, kw_only=True):
    """A pass over the samples: its operators, ``samples`` before and ``left`` after it, ``seconds`` and those of cores,
    the processes that a node has room for and their memory in bytes, bytes that it reads and writes on disks, and what
    sets its pace: ``cores``, ``disks`` or ``network``."""

    operators: tuple[str, ...]
    samples: float
    left: float
    seconds: float
    core_s: float
    processes: int
    memory_bytes: float
    moved_bytes: float
    bound: str


class PricedOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe in some order: its passes."""

    passes: tuple[RecipePass, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all passes."""
        return sum(one.seconds for one in self.passes)

    @property
    def core_s(self) -> float:
        """Seconds of cores of all passes."""
        return sum(one.core_s for one in self.passes)

    @property
    def memory_bytes(self) -> float:
        """Memory of a node's processes in the pass with most."""
        return max(one.memory_bytes for one in self.passes)

    @property
    def order(self) -> tuple[str, ...]:
        """Operators in their order."""
        return tuple(name for one in self.passes for name in one.operators)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        said = {"seconds": self.seconds, "core_s": self.core_s, "memory_bytes": self.memory_bytes}
        return said | {"passes": [msgspec.to_builtins(one) for one in self.passes]}


class RecipeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe as it is ``written``, as Data-Juicer's ``op_fusion`` has it with speeds that it probed (``fused``), and
    the ``fastest`` legal order, which is ``proved`` to be, or the best of a greedy rule. ``nodes`` are seconds of the
    fastest order of other numbers of nodes."""

    recipe: DataRecipe
    written: PricedOrder
    fused: PricedOrder
    fastest: PricedOrder
    proved: bool
    nodes: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        orders = {name: getattr(self, name).to_json() for name in ("written", "fused", "fastest")}
        nodes = [{"nodes": count, "seconds": seconds} for count, seconds in self.nodes]
        return {"format_version": FORMAT_VERSION, **orders, "proved": self.proved, "nodes": nodes}


def priced_recipe(recipe: DataRecipe) -> RecipeAnswer:
    """Return what a recipe takes in three orders.

    Raises:
        MeshwrightError: W023 for an operator whose process is larger than a node's memory.
    """
    found = fastest(recipe)
    return RecipeAnswer(
        recipe=recipe,
        written=ordered(recipe, [(i,) for i in range(len(recipe.operators))]),
        fused=ordered(recipe, as_fused(recipe)),
        fastest=ordered(recipe, found.groups),
        proved=found.proved,
        nodes=tuple(
            (count, ordered(msgspec.structs.replace(recipe, nodes=count), found.groups).seconds)
            for count in _counts(recipe.nodes)
        ),
    )


def fastest(recipe: DataRecipe) -> OrderedSteps:
    """Return the order of a recipe's operators that takes the least time, and which of them are one pass; of too many
    to look at all orders, the better one of a greedy order, the recipe's own and Data-Juicer's."""
    operators = recipe.operators
    before = [sum(1 << i for i in range(j) if operators[i].before(later)) for j, later in enumerate(operators)]
    kept = cache(partial(left_of, recipe))
    found = cheapest(before, units(recipe), lambda done, unit: priced_pass(recipe, done, unit, kept(done)).seconds)
    if found.proved:
        return found
    others = (tuple((i,) for i in range(len(operators))), tuple(as_fused(recipe)))
    tried = [OrderedSteps(some, ordered(recipe, some).seconds, False) for some in others if _legal(before, some)]
    return min(found, *tried, key=lambda one: one.cost)


def left_of(recipe: DataRecipe, done: int) -> tuple[float, float]:
    """Return the samples that a set of operators (bits) leaves, and the bytes of one."""
    samples, size = float(recipe.samples), recipe.sample_bytes
    for i, operator in enumerate(recipe.operators):
        if done >> i & 1:
            samples *= operator.keep
            size *= operator.grows
    return samples, size


def units(recipe: DataRecipe) -> list[tuple[int, ...]]:
    """Return the operators alone, and the filters of a context that may be one pass, which a node has memory for."""
    found = [(i,) for i in range(len(recipe.operators))]
    for context in recipe.contexts:
        mine = _filters(recipe, context)
        sizes = range(2, len(mine) + 1) if len(mine) <= MOST_SUBSETS else (len(mine),)
        found += [some for size in sizes for some in combinations(mine, size) if _fits(recipe, some)]
    return found


def as_fused(recipe: DataRecipe) -> list[tuple[int, ...]]:
    """Return the order that Data-Juicer's ``fuse_operators`` makes of probed speeds (``data_juicer/ops/op_fusion.py``):
    of filters one behind the other those of a context are one, and the faster come first; of equally fast ones those
    without a context, then contexts in the order in which they are known. Filters whose memory no node has together
    stay apart here."""
    out: list[tuple[int, ...]] = []
    run: list[int] = []

    def close() -> None:
        fused = [(i,) for i in run if not recipe.operators[i].shares]
        for context in recipe.contexts:
            some = tuple(i for i in run if recipe.operators[i].shares == context)
            fused += [some] if some and _fits(recipe, some) else [(i,) for i in some]
        out.extend(sorted(fused, key=lambda some: sum(_alone(recipe, i) for i in some)))
        run.clear()

    for i, operator in enumerate(recipe.operators):
        if operator.kind == FILTER:
            run.append(i)
        else:
            close()
            out.append((i,))
    close()
    return out


def ordered(recipe: DataRecipe, groups: Any) -> PricedOrder:
    """Return a recipe in the order of some groups of its operators, each a pass."""
    done, passes = 0, []
    for unit in groups:
        passes.append(priced_pass(recipe, done, unit))
        done |= sum(1 << i for i in unit)
    return PricedOrder(passes=tuple(passes))


def priced_pass(
    recipe: DataRecipe, done: int, unit: tuple[int, ...], before: tuple[float, float] | None = None
) -> RecipePass:
    """Return a pass of some operators over the samples that a set of others has left (`before`, where it is known).

    Raises:
        MeshwrightError: W023 for one whose process is larger than a node's memory.
    """
    mine = [recipe.operators[i] for i in unit]
    samples, size = before or left_of(recipe, done)
    left, after = samples, size
    for operator in mine:
        left *= operator.keep
        after *= operator.grows
    memory = sum(operator.memory_bytes for operator in mine)
    processes = recipe.processes
    if memory and recipe.memory_bytes:
        processes = min(processes, int(recipe.memory_bytes // memory))
        if not processes:
            names = ", ".join(operator.name for operator in mine)
            has = f"a node has {recipe.memory_bytes / 1e9:.3g} GB"
            message = f"a process of {names} needs {memory / 1e9:.3g} GB, and {has}"
            raise MeshwrightError.one("W023", message, place=names, help="more memory=, or operators that need less")
    contexts = {operator.shares for operator in mine if operator.shares}
    core_s = samples * (sum(o.takes_s for o in mine) + sum(recipe.contexts[name] for name in contexts))
    whole = (1 << len(recipe.operators)) - 1
    last = done | sum(1 << i for i in unit) == whole
    moved = (samples * size if recipe.cached or not done else 0.0) + (left * after if recipe.cached or last else 0.0)
    spent = {"cores": core_s / (processes * recipe.nodes)}
    if recipe.read_bytes_s:
        spent["disks"] = moved / (recipe.read_bytes_s * recipe.nodes)
    if recipe.nodes > 1 and recipe.shuffle_bytes_s and any(o.kind == DEDUPLICATOR for o in mine):
        # equal samples meet on one node: all but one part of them moves there
        away = samples * size * (1 - 1 / recipe.nodes)
        spent["network"] = away / (recipe.shuffle_bytes_s * recipe.nodes)
    bound = max(spent, key=lambda name: spent[name])
    return RecipePass(
        operators=tuple(operator.name for operator in mine),
        samples=samples,
        left=left,
        seconds=spent[bound],
        core_s=core_s,
        processes=processes,
        memory_bytes=processes * memory,
        moved_bytes=moved,
        bound=bound,
    )


def _filters(recipe: DataRecipe, context: str) -> list[int]:
    return [i for i, one in enumerate(recipe.operators) if one.kind == FILTER and one.shares == context]


def _legal(before: Sequence[int], groups: Iterable[tuple[int, ...]]) -> bool:
    """Whether every step has those before it that have to be (bits), in other groups."""
    done = 0
    for unit in groups:
        if any(before[i] & ~done for i in unit):
            return False
        done |= sum(1 << i for i in unit)
    return True


def _fits(recipe: DataRecipe, unit: tuple[int, ...]) -> bool:
    """Whether a node has the memory of one process of some operators together."""
    return not recipe.memory_bytes or sum(recipe.operators[i].memory_bytes for i in unit) <= recipe.memory_bytes


def _alone(recipe: DataRecipe, i: int) -> float:
    """Seconds of a core of an operator by itself, as a probe measures them."""
    operator = recipe.operators[i]
    return operator.takes_s + (recipe.contexts[operator.shares] if operator.shares else 0.0)


def _counts(nodes: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 < nodes:
        counts.append(counts[-1] * 2)
    return sorted({*counts, nodes})
