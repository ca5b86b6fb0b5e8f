"""Small questions whose whole space can be evaluated plan by plan."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from meshwright import schedules
from meshwright.cost import Costs
from meshwright.plan import Plan, check
from meshwright.search.bounds import (
    ROUNDING,
    CoreScope,
    compute_seconds,
    even_share,
    memory_bytes,
    step_seconds,
    work_seconds,
)
from meshwright.search.evaluate import Evaluated, Evaluator
from meshwright.search.legal import legal
from meshwright.search.regions import Regions
from meshwright.search.settle import settled
from meshwright.search.space import (
    Space,
    cores,
    default,
    inners,
    pipelines,
    plan_of,
    states,
)
from meshwright.search.strategies.exhaustive import Region
from meshwright.search.walk import Walk
from meshwright.spec import cluster
from meshwright.spec.workload import Train
from tests.random_plans import GPT, LLAMA, MIXTURE

CLUSTERS = {name: cluster.load(name) for name in ("8xh100", "16xa100-80", "4xa100-80 + 4xh100")}


@st.composite
def questions(draw, clusters=tuple(CLUSTERS)):
    """(model, cluster, workload, space) with a few hundred plans."""
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    where = CLUSTERS[one_of(*clusters)]
    model = one_of(GPT, LLAMA, *([MIXTURE] if len(where.islands) == 1 else []))
    train = Train(global_batch=one_of(8, 16), seq_len=1024)
    families = list(schedules.families())
    space = default(model, where, train)
    chosen = {
        "tp": (1, 4) if len(where.islands) > 1 else (one_of(1, 2), 4),
        "cp": (1, one_of(1, 2)),
        "pp": (one_of(1, 2), 4),
        "mb": (1,),
        "ep": (one_of(1, 2),) if model is MIXTURE else (1,),
        "etp": (0,),
        "order": (("tp", "cp", "dp", "pp"), one_of(("tp", "cp", "pp", "dp"), ("dp", "tp", "cp", "pp"))),
        "sp": (True,),
        "algorithm": (one_of("ring", "ulysses", "allgather"),),
        "recompute": tuple(dict.fromkeys(("none", one_of("selective", "full")))),
        "schedule": tuple(dict.fromkeys(("1f1b", one_of(*families)))),
        "vpp": (1, 2),
        "zero": tuple(dict.fromkeys((one_of(0, 1), one_of(2, 3)))),
        "stages": ("even", "balanced") if len(where.islands) > 1 else ("even",),
    }
    if model is MIXTURE:
        chosen["ep"] = tuple(n for n in chosen["ep"] if n <= 2)
    return model, where, train, Space(domains=space.domains | {k: tuple(dict.fromkeys(v)) for k, v in chosen.items()})


def everything(space, model, where, train):
    """Every point of a space, plan by plan."""
    for core in cores(space, model, where, train):
        for inner in inners(space, core, model, where, train):
            for piped in pipelines(space, core, model, train):
                for state in states(space, core, where, train):
                    if legal(core, inner, piped, state, states(space, core, where, train), model.num_layers):
                        yield core, inner, piped, state


def walk_of(question, keep=1, costs: Costs | None = None, **options):
    model, where, train, space = question
    return Walk(space, Evaluator(model, where, train, costs), keep=keep, **options)


class Compared(NamedTuple):
    """A plan, what it takes, and every bound of its time [s] by name and of its memory [bytes]."""

    plan: Plan
    took: Evaluated
    bounds: dict[str, float]
    need_bytes: float
    used_bytes: float

    def over(self) -> dict[str, float]:
        """The bounds above what they bound, as a share of it."""
        found = {name: s / self.took.step_time_s - 1 for name, s in self.bounds.items()}
        found["memory"] = (self.need_bytes - 1) / self.used_bytes - 1
        return {name: share for name, share in found.items() if share > ROUNDING}


def compared(question, costs: Costs | None = None, *, rng=None, regions: int = 1000, plans: int = 100000):
    """Plans of a space with all that bounds them: of each region at most `plans`, of at most so many `regions`, which
    `rng` draws where there are more."""
    model, where, train, space = question
    rng = rng or np.random.default_rng(0)
    evaluator = Evaluator(model, where, train, costs)
    found = list(cores(space, model, where, train))
    for i in rng.permutation(len(found))[:regions].tolist():
        scope = CoreScope.of(space, found[i], model, where, train)
        if scope.size():
            yield from _compared(evaluator, scope, rng, plans, {*space["feedback"]} <= {"chain"})


def _compared(evaluator: Evaluator, scope: CoreScope, rng, most: int, chain: bool):
    model, where, train, core = evaluator.model, evaluator.cluster, evaluator.train, scope.core
    regions = Regions(evaluator, chain=chain)
    capacity = float(max(i.device.memory_bytes for i in where.islands))
    ideal = regions.glances.ideal_seconds(core, scope.inners)
    brief, one, which = regions.glances.costs(core, scope.inners)
    alike = scope._replace(inners=scope.inners.take(one))
    rough, work = compute_seconds(regions, alike, brief)[0][which], work_seconds(regions, alike, brief)[which]
    share = even_share(regions, core, brief)[which]
    costs = regions.costs(core, scope.inners)
    paths_s, least = compute_seconds(regions, scope, costs)
    exchanged = regions.exchanges.exchanged(core, scope.inners, scope.states)
    step_s, along_s = step_seconds(regions, scope, costs, paths_s, least, exchanged)
    region = Region(scope, costs, step_s, along_s, paths_s)
    need = memory_bytes(regions, scope, costs)
    for flat in rng.permutation(np.flatnonzero(scope.legal()))[:most].tolist():
        a, b, c = np.unravel_index(flat, step_s.shape)
        plan = settled(core, scope.inners[a], scope.pipelines[b], scope.states[c], evaluator)
        assert not check(plan, model, where, train), plan.text()
        took = evaluator(plan)
        bounds = {
            "kernels": ideal,
            "share": share[a],
            "work": work[a, b],
            "glance": rough[a, b],
            "paths": paths_s[a, b],
            "step": step_s[a, b, c],
            "timed": region.tightened_s(regions, flat),
        }
        yield Compared(plan, took, bounds, need[a, b, c], capacity - took.headroom_bytes)


__all__ = ["compared", "everything", "plan_of", "questions", "walk_of"]
