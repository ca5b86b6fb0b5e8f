"""Find the best plans for a question: the verb of this package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from time import monotonic

from meshwright.cost import Costs, standard
from meshwright.errors import MeshwrightError, nearest
from meshwright.outlook import money
from meshwright.predict import predict, simulate
from meshwright.search.evaluate import Evaluator
from meshwright.search.found import OBJECTIVES, Found, Ranked, delta, pareto
from meshwright.search.misses import near_misses
from meshwright.search.space import Space, default
from meshwright.search.store import Store
from meshwright.search.ties import simplicity, tie
from meshwright.search.walk import Tried, Walk
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
    _known("strategy", strategy, STRATEGIES)
    for name in (objective, *objectives):
        _known("objective", name, tuple(OBJECTIVES))
    began = monotonic()
    space = space or default(model, cluster, train)
    costs = costs or standard()
    evaluator = Evaluator(model, cluster, train, costs)
    with Store(store, model, cluster, train, costs) if store else nullcontext() as kept:
        walk = Walk(
            space,
            evaluator,
            keep=top,
            objective=objective,
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
            help="free a facet, or use fewer devices: --fix devices=... (a divisor that the batch can be split over)",
        )
    fitting = walk.fitting()
    misses = () if fitting else near_misses(walk)
    return Found(
        space=space,
        best=_ranked(fitting[:top], evaluator),
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


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise MeshwrightError.one("R004", f"no {what} {name!r}", place=f"--{what} {name}", help=nearest(name, names))


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


def _ranked(best: list[Tried], evaluator: Evaluator) -> tuple[Ranked, ...]:
    """The best with their predictions. Those that cannot be told from the first come first, the simplest of them at
    the top; ties are with that one."""
    if not best:
        return ()
    asked = (evaluator.model, evaluator.cluster, evaluator.train)
    runs = {t.plan: simulate(t.plan, *asked, evaluator.costs) for t in best}
    fastest = runs[best[0].plan]
    tied = [t for t in best if tie(runs[t.plan], fastest) is not None]
    ordered = sorted(tied, key=lambda t: simplicity(t.plan)) + [t for t in best if t not in tied]
    first = runs[ordered[0].plan]
    out: list[Ranked] = []
    for t in ordered:
        prediction = predict(*asked, t.plan, costs=evaluator.costs, detail=False)
        why = tie(runs[t.plan], first) if out and t in tied else None
        changes = delta(out[-1].prediction, prediction) if out else ""
        out.append(Ranked(plan=t.plan, prediction=prediction, tie=why, delta=changes))
    return tuple(out)
