"""Find the best plans for a question: the verb of this package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from time import monotonic

import msgspec

from meshwright.cost import Costs, standard_on
from meshwright.errors import MeshwrightError, nearest
from meshwright.outlook import money
from meshwright.plan import Plan, check
from meshwright.predict import predict, simulate
from meshwright.search.evaluate import Evaluator
from meshwright.search.found import OBJECTIVES, Found, Ranked, delta, pareto
from meshwright.search.misses import near_misses
from meshwright.search.space import Space, default, gathers_once
from meshwright.search.store import Store
from meshwright.search.ties import same_work, simplicity, tie
from meshwright.search.walk import Tried, Walk
from meshwright.simulate.simulated import Simulated
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

STRATEGIES = ("exhaustive", "beam", "anneal")


def find(
    model: Model,
    cluster: Cluster,
    train: Train,
    *,
    space: Space | None = None,
    costs: Costs | None = None,
    strategy: str = "exhaustive",
    top: int = 5,
    objective: str = "step",
    objectives: tuple[str, str] = ("step", "headroom"),
    store: str | Path | None = None,
    report: Callable[[Walk], None] | None = None,
) -> Found:
    """The `top` best plans by `objective`, with why the others lost.

    `space` is the default space unless said. `store` is a file that keeps what is evaluated. `report` is called with
    the walk a few times a second. A KeyboardInterrupt ends the walk; what was found until then is the answer.

    Raises:
        MeshwrightError: R004 for an unknown strategy or objective, R005 when no plan of the space is legal, R010 when
            the store cannot be used.
    """
    _known("strategy", strategy, STRATEGIES, "strategy")
    for name, option in ((objective, "objective"), *((name, "pareto") for name in objectives)):
        _known("objective", name, tuple(OBJECTIVES), option)
    began = monotonic()
    space = space or default(model, cluster, train)
    costs = costs or standard_on(cluster)
    evaluator = Evaluator(model, cluster, train, costs)
    with Store(store, model, cluster, train, costs) if store else nullcontext() as kept:
        walk = Walk(
            space,
            evaluator,
            keep=top,
            known=kept.known() if kept else None,
            record=kept.record if kept else None,
            report=report,
        )
        try:
            proven = import_module(f"meshwright.search.strategies.{strategy}").run(walk)
        except KeyboardInterrupt:
            proven = False
        walk.end()
    if not walk.covered and not walk.tried:
        raise MeshwrightError.one(
            "R005",
            f"no plan of this space is legal for {model.name} on {cluster.name} with {train.text()}",
            help="free a facet, or say a smaller cluster, whose devices the batch can be split over",
        )
    fitting = walk.fitting()
    misses = () if fitting else near_misses(walk)
    return Found(
        space=space,
        best=_ranked(_best(fitting, top), top, evaluator, space),
        misses=misses,
        covered=walk.covered,
        evaluated=len(walk.tried),
        bounded=walk.bounded,
        pruned=walk.counts(),
        proven_optimal=proven,
        seconds=monotonic() - began,
        strategy=strategy,
        objective=objective,
        objectives=objectives,
        pareto=pareto([(t.plan, tuple(_value(o, t, walk) for o in objectives)) for t in fitting]),
    )


def _known(what: str, name: str, names: tuple[str, ...], option: str) -> None:
    if name not in names:
        raise MeshwrightError.one("R004", f"no {what} {name!r}", place=f"--{option} {name}", help=nearest(name, names))


def _value(objective: str, tried: Tried, walk: Walk) -> float:
    """One objective of an evaluated plan; smaller is better. A price that is not known counts as device-seconds."""
    if objective == "step":
        return tried.step_time_s
    if objective == "headroom":
        return -tried.headroom_bytes
    spent = money(walk.cluster, tried.plan, walk.train, tried.step_time_s)
    if objective == "energy":
        return spent.joules_per_token
    priced = spent.usd_per_million_tokens
    return priced if priced is not None else tried.step_time_s * tried.plan.layout.num_ranks


def _best(fitting: list[Tried], top: int) -> list[Tried]:
    """The first `top`, and what takes as long as the last of them: a plan may have another spelling."""
    return [t for i, t in enumerate(fitting) if i < top or t.step_time_s == fitting[top - 1].step_time_s]


def _ranked(best: list[Tried], top: int, evaluator: Evaluator, space: Space) -> tuple[Ranked, ...]:
    """The best with their predictions. Those that cannot be told from the first come first, the simplest of them at
    the top; ties are with that one."""
    if not best:
        return ()
    asked = (evaluator.model, evaluator.cluster, evaluator.train)
    runs = {t.plan: simulate(t.plan, *asked, evaluator.costs) for t in best}
    best, also = _collapsed(best, runs)
    best = best[:top]
    fastest = runs[best[0].plan]
    tied = [t for t in best if tie(runs[t.plan], fastest) is not None]
    ordered = sorted(tied, key=lambda t: simplicity(t.plan)) + [t for t in best if t not in tied]
    first = runs[ordered[0].plan]
    out: list[Ranked] = []
    for t in ordered:
        prediction = predict(*asked, t.plan, costs=evaluator.costs, detail=False)
        why = tie(runs[t.plan], first) if out and t in tied else None
        changes = delta(out[-1].prediction, prediction) if out else ""
        words = (*also[t.plan], *_sharded_too(t, evaluator, space))
        out.append(Ranked(plan=t.plan, prediction=prediction, tie=why, delta=changes, also=words))
    return tuple(out)


def _collapsed(best: list[Tried], runs: dict[Plan, Simulated]) -> tuple[list[Tried], dict[Plan, list[str]]]:
    """The plans without other spellings of them, the simplest of each; and the words of those others."""
    kept: list[Tried] = []
    also: dict[Plan, list[str]] = {}
    for t in sorted(best, key=lambda t: (t.step_time_s, *simplicity(t.plan))):
        twin = next((k for k in kept if _alike(k, t) and same_work(runs[k.plan], runs[t.plan])), None)
        if twin is None:
            kept.append(t)
            also[t.plan] = []
        else:
            also[twin.plan].append(_instead(twin.plan, t.plan))
    return [t for t in best if t.plan in also], also


def _sharded_too(tried: Tried, evaluator: Evaluator, space: Space) -> list[str]:
    """ZeRO-3 where the space leaves it out because under this pipeline it is ZeRO-1 in other words."""
    plan, train = tried.plan, evaluator.train
    if plan.layout.zero != 1 or plan.layout.pp == 1 or 3 not in space["zero"] or not gathers_once(space, train):
        return []
    twin = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, zero=3))
    if check(twin, evaluator.model, evaluator.cluster, train):
        return []
    return [_instead(plan, twin)] if _alike(tried, Tried(twin, *evaluator(twin))) else []


def _alike(a: Tried, b: Tried) -> bool:
    """Equal times, and memory equal up to the rounding of its sum."""
    return a.step_time_s == b.step_time_s and abs(a.headroom_bytes - b.headroom_bytes) < 1


def _instead(plan: Plan, other: Plan) -> str:
    mine = plan.text().split()
    return " ".join(word for word in other.text().split() if word not in mine)
