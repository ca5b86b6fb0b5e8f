"""The operators that slower kinds of devices compute in fewer bits, chosen by what varies and by the step that comes of
it (QSync, Zhao et al., 2024, arXiv 2407.02327).

All operators of a kind are lowered first, which makes the shortest step that lowering can make, or a longer one where
casts cost more than products gain: the shorter of the two is the bound, of those that fit a device's memory. From there
operators are raised again, those first whose gradients vary most when they are lowered, as a run has measured (``run
--variances``), for as long as the simulated step is no longer than the bound and its memory fits: an operator in fewer
bits saves its input in them, beside the wide one where others read that. Casts are work of their own, so that an
operator whose casts cost what its product gains is raised too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import msgspec

from meshwright.assign.raising import raised
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.lowered import OPERATORS, operators, read, written
from meshwright.quantity import lacking
from meshwright.quantity import seconds as shown
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: A step that is longer than the bound by no more than this share is as short.
AS_SHORT = 1e-3
Operator = tuple[str, int]


class LoweredChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The operators in fewer bits of every kind that left them open: how many of ``of``, and the part of the variance
    that lowering all of them would bring. ``step_s`` is the step of the choice, ``wide_s`` that of no lowered operator
    and ``low_s`` that of all; ``wide_over_bytes`` is the memory that some device lacks with none lowered."""

    chosen: tuple[int, ...]
    of: int
    variance: float
    step_s: float
    wide_s: float
    low_s: float
    tried: int
    seconds: float
    wide_over_bytes: float = 0.0

    @property
    def text(self) -> str:
        """The choice in words."""
        over = self.wide_over_bytes
        more = f" and need {lacking(over)} more than a device has" if over else ""
        return (
            f"{' and '.join(map(str, self.chosen))} of {self.of} operators are in fewer bits, chosen in "
            f"{shown(self.seconds)} among {self.tried} steps, with {self.variance:.1%} of the variance of gradients "
            f"that all would bring: with none a step would take {shown(self.wide_s)}{more}, with all "
            f"{shown(self.low_s)}"
        )


def undecided(plan: Plan) -> bool:
    """Whether a plan leaves to a prediction which operators are lowered."""
    return any(one.file for one in map(read, plan.kinds.lowered) if one is not None)


def variances(path: str, model: Model) -> dict[Operator, float]:
    """The variance of gradients that each operator of a model brings when it is lowered, of a file.

    Raises:
        MeshwrightError: P063 for a file that cannot be read, or of another model.
    """
    try:
        said = json.loads(Path(path).read_text())["variances"]
        found = {(word, layer): float(value) for word in OPERATORS for layer, value in enumerate(said[word])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{path} has no variances of operators: {type(error).__name__}: {error}"
        help = "meshwright run ... --variances FILE.json writes one"
        raise MeshwrightError.one("P063", message, place=f"lowered=...:{path}", help=help) from None
    if set(found) != set(operators(model)):
        message = f"{path} has {len(found)} operators, and {model.name} has {len(operators(model))}"
        raise MeshwrightError.one("P063", message, place=f"lowered=...:{path}", help="measure this model")
    return found


def lowered_by(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    train: Train,
    costs: Costs,
    spare_bytes: Callable[[Simulated], float] = lambda run: 0.0,
) -> tuple[Plan, LoweredChoice | None]:
    """The plan with the operators chosen that it left open, and how; the plan itself where it leaves none.
    `spare_bytes` are those that are left of the memory of the fullest device in a step, negative where it lacks some;
    where neither all nor none lowered fit, steps alone decide."""
    if plan.several or not undecided(plan):
        return plan, None
    began, said = perf_counter(), plan.kinds.lowered
    open_ = [k for k, text in enumerate(said) if (one := read(text)) is not None and one.file]
    files = {k: variances(read(said[k]).file, model) for k in open_}
    every = frozenset((k, word, layer) for k in open_ for word, layer in operators(model))
    tried = 0

    def plan_of(some: frozenset) -> Plan:
        texts = list(said)
        for k in open_:
            texts[k] = written(read(said[k]).dtype, {(word, layer) for kind, word, layer in some if kind == k})
        return msgspec.structs.replace(plan, kinds=msgspec.structs.replace(plan.kinds, lowered=tuple(texts)))

    def step(some: frozenset) -> tuple[float, float]:
        """Seconds of a step, and the bytes that the fullest device has to spare."""
        nonlocal tried
        tried += 1
        run = simulate(plan_of(some), model, cluster, train, costs)
        return run.step_time_s, spare_bytes(run)

    def within(some: frozenset) -> bool:
        seconds, spare = step(every - some)
        return seconds <= bound and (spare >= 0 or not held)

    (wide, spare), (low, low_spare) = step(frozenset()), step(every)
    held = [seconds for seconds, left in ((wide, spare), (low, low_spare)) if left >= 0]
    bound = min(held or (wide, low)) * (1 + AS_SHORT)
    order = sorted(every, key=lambda o: (-files[o[0]][o[1:]], o))
    chosen = every - raised(order, within)
    total = sum(files[k][word, layer] for k, word, layer in every)
    kept = sum(files[k][word, layer] for k, word, layer in chosen)
    return plan_of(chosen), LoweredChoice(
        chosen=tuple(sum(kind == k for kind, *_ in chosen) for k in open_),
        of=len(operators(model)),
        variance=kept / total if total else 0.0,
        step_s=step(chosen)[0],
        wide_s=wide,
        low_s=low,
        tried=tried,
        seconds=perf_counter() - began,
        wide_over_bytes=max(0.0, -spare),
    )


__all__ = ["LoweredChoice", "lowered_by", "undecided", "variances"]
