"""Find the best plans for a question: the verb of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from math import inf
from pathlib import Path
from time import monotonic

import msgspec

from meshwright.answer.outlook import money
from meshwright.answer.risk import USUAL_RISK
from meshwright.cost import Costs, standard_on
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.plan import Plan, parse
from meshwright.plan.facets.passes import FIXED
from meshwright.plan.legality import beyond_positions, violations
from meshwright.quantity import gibibytes
from meshwright.search.besides import beyond_engines, beyond_risk, to_recommend, walked
from meshwright.search.draws import SharedDraws, sureness
from meshwright.search.engines import Demands, Runnable
from meshwright.search.evaluate import Evaluator
from meshwright.search.families import PlanFamily, family_of
from meshwright.search.found import OBJECTIVES, PROVABLE, Found, NearMiss, Ranked, pareto
from meshwright.search.interrupt import stopping
from meshwright.search.misses import near_misses
from meshwright.search.ranking import ranked
from meshwright.search.recommend import recommended
from meshwright.search.restrict import fed
from meshwright.search.space import Space, default
from meshwright.search.store import Store
from meshwright.search.walk import Stopped, Tried, Walk, Wanted
from meshwright.search.ways import with_way
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: How plans are compared where documents differ in length, which an answer says.
MEAN_DOCUMENTS = (
    "plans are compared, and the best proven, with the mean of the documents in every microbatch; "
    "the times of the best are the mean of their drawn batches"
)
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
    families: bool = False,
    objective: str = "step",
    objectives: tuple[str, str] = ("step", "headroom"),
    demands: Demands | None = None,
    recommend: bool = False,
    robust: bool = False,
    store: str | Path | None = None,
    report: Callable[[Walk], None] | None = None,
    first: Iterable[Plan] = (),
    kernels: dict | None = None,
    cap_s: float = inf,
) -> Found:
    """The `top` best plans by `objective`, or with `families` the best plans of the best families, with why the others
    lost.

    `space` is the default space unless said. `demands` are kept by every plan that is found; the fastest that fits and
    that the engines asked for do not run is named. `recommend` also names the plan to take (``search/recommend.py``),
    if `robust` the one with the least worst-case regret. `store` is a file that keeps what is evaluated. `report` is
    called with the walk a few times a second. Ctrl-C ends the walk at its next look; what was found until then is the
    answer. `first` are plans to look at first, where the space has them: a good one makes the search shorter. `kernels`
    is what earlier searches of the same model and workload under the same `costs` left, on other numbers of the same
    devices; an empty dictionary for the first of them. With `cap_s` plans with longer steps are of no use, and none may
    be found.

    Every plan uses every device, so the fastest is the cheapest too and the one that takes the least energy: what is
    proven of the step time is proven of those.

    Raises:
        MeshwrightError: R002 for a space with frozen layers, R004 for an unknown strategy or objective, R014 for one
            that nothing is known of, R005 when no plan of the space is legal, R010 when the store cannot be used.
    """
    _known("strategy", strategy, STRATEGIES, "strategy")
    _known("objective", objective, PROVABLE, "objective")
    for name in objectives:
        _known("objective", name, tuple(OBJECTIVES), "pareto")
    _tellable(cluster, {"objective": (objective,), "pareto": objectives})
    began = monotonic()
    demands = demands or Demands()
    costs = costs or standard_on(cluster, dtype=train.dtype)
    space = space or default(model, cluster, train, costs.framework.defaults.gather)
    if {*(space["passes"] or ())} - {FIXED}:
        message = "a search prices steps whose order is known, and peers are chosen as a step goes"
        help = "leave passes= out, and predict the plans found with it"
        raise MeshwrightError.one("R002", message, place="--fix passes", help=help)
    if {*(space["fill_layers"] or ())} - {0}:
        message = "a search does not choose among plans whose first layers are frozen: its bounds are of a step without"
        help = "leave fill_layers= out, and predict the plans found with it"
        raise MeshwrightError.one("R002", message, place="--fix fill_layers", help=help)
    space = fed(space)
    evaluator = Evaluator(model, cluster, train, costs, kernels)
    engines = demands.engines or demands.others
    runnable = Runnable(demands.engines) if demands.engines else None
    room = demands.room_bytes or demands.usual_room_bytes
    wanted = Wanted(keep=top, families=families, room_bytes=room, runnable=runnable, cap_s=cap_s)
    with Store(store, model, cluster, train, costs) if store else nullcontext() as kept:
        walk = Walk(
            space,
            evaluator,
            known=kept.known() if kept else None,
            record=kept.record if kept else None,
            report=report,
            wanted=wanted,
            keeper=kept,
        )
        with stopping(walk.stop):
            proven = walked(walk, strategy, first)
            usual, sought = room > demands.room_bytes, proven
            if usual and proven and not walk.fitting():
                usual, sought = False, False  # nothing has the room that is recommended
                roomless = msgspec.structs.replace(wanted, room_bytes=0.0)
                walk = walk.again(roomless, "plans that may not fit: ")
                proven = walked(walk, strategy, first)
            stopped, fitting = walk.stopped, walk.fitting()
            misses = () if fitting or stopped or cap_s < inf else _closest(walk)
            beyond = beyond_engines(walk, strategy) if runnable and proven else None
            risky = beyond_risk(walk, strategy) if usual and fitting and recommend and proven else None
            roomy = to_recommend(walk, strategy, engines) if fitting and recommend and sought else []
            walk.stop.over = True
            walk.end()
            shared = SharedDraws(evaluator, walk.capacity_bytes + walk.wanted.room_bytes)
            best = ranked(_best(fitting, top, families), top, walk, shared)
            pick = recommended(walk, roomy, engines, shared, robust=robust) if best and recommend else None
            pick = with_way(pick, walk, engines) if pick else None
    if not walk.covered and not walk.tried and not stopped:
        unlearned = list(beyond_positions(model, train))
        if unlearned:
            raise MeshwrightError(unlearned)
        why = _why_none(space, model, cluster, train)
        raise MeshwrightError.one(
            "R005",
            f"no plan of this space is legal for {model.name} on {cluster.name} with {train.text()}",
            help=f"{why}take back a --fix or a --bound, or say another batch or cluster",
        )
    evaluated = {t.plan: t for t in (*fitting, *roomy)}.values()
    points = tuple((t.plan, tuple(_value(o, t, walk) for o in objectives)) for t in evaluated)
    return Found(
        question=(model.name, cluster.name, train.text()),
        space=space,
        best=best,
        sure=sureness(shared, [r.plan for r in best], [r.standing for r in best]) if best else None,
        recommended=pick,
        unrunnable=beyond,
        risky=risky,
        usual=usual,
        misses=misses,
        covered=walk.covered,
        evaluated=len(walk.tried),
        bounded=walk.bounded,
        pruned=walk.counts(),
        proven_optimal=proven,
        stopped=stopped,
        recalled=walk.recalled,
        seconds=monotonic() - began,
        strategy=strategy,
        families=families,
        framework=costs.framework.name,
        engines=tuple(engine.label for engine in demands.engines),
        room_bytes=walk.wanted.room_bytes,
        objective=objective,
        objectives=objectives,
        pareto=pareto(points),
        points=points,
        remarks=(
            *(() if train.lengths is None else (MEAN_DOCUMENTS,)),
            *((_unsure(room, best[0]),) if best and room > walk.wanted.room_bytes else ()),
        ),
    )


def _unsure(room_bytes: float, first: Ranked) -> str:
    """Say that no plan is as sure to fit as is usual."""
    return (
        f"no plan leaves {gibibytes(room_bytes)} on every device, so that it fits with a probability of "
        f"{1 - USUAL_RISK:.0%}: the first does with {first.prediction.p_fit:.0%}"
    )


def _closest(walk: Walk) -> tuple[NearMiss, ...]:
    """The plans that come closest to fitting; none when somebody does not wait for them."""
    try:
        return near_misses(walk)
    except Stopped:
        return ()


def _known(what: str, name: str, names: tuple[str, ...], option: str) -> None:
    if name in names:
        return
    help = nearest(name, names)
    if option == "objective" and name in ("headroom", "memory", "room"):
        help = "memory left is a front of its own: --pareto step,headroom"
    raise MeshwrightError.one("R004", f"no {what} {name!r}", place=f"--{option} {name}", help=help)


def _tellable(cluster: Cluster, asked: dict[str, tuple[str, ...]]) -> None:
    """R014 for every objective of `asked` (option -> objectives) that devices of the cluster have no figures for."""
    wrong = []
    devices = {i.device.name: i.device for i in cluster.islands}
    for option, names in asked.items():
        if "cost" in names and cluster.total_price_usd_hour() is None:
            without = ", ".join(name for name, device in devices.items() if device.price_usd_hour is None)
            help = f"say it: --price 2.10, or --price {without.partition(',')[0]}=2.10; or ask for the step time"
            wrong.append(("cost", option, f"no price of {without} is known", help))
        if "energy" in names and any(device.tdp_w is None for device in devices.values()):
            without = ", ".join(name for name, device in devices.items() if device.tdp_w is None)
            wrong.append(("energy", option, f"no rated power of {without} is known", "ask for the step time"))
    if wrong:
        raise MeshwrightError(
            Diagnostic(code="R014", message=f"{what} cannot be told: {why}", place=f"--{option}", help=help)
            for what, option, why, help in wrong
        )


def _value(objective: str, tried: Tried, walk: Walk) -> float:
    """One objective of an evaluated plan; smaller is better."""
    if objective == "step":
        return tried.step_time_s
    if objective == "headroom":
        return -tried.headroom_bytes
    spent = money(walk.cluster, tried.plan, walk.train, tried.step_time_s)
    return spent.joules_per_token if objective == "energy" else spent.usd_per_million_tokens


def _best(fitting: list[Tried], top: int, families: bool) -> list[Tried]:
    """The first `top` plans or families, and what takes as long as the last of them: a plan may have another
    spelling."""
    if not families:
        return [t for i, t in enumerate(fitting) if i < top or t.step_time_s == fitting[top - 1].step_time_s]
    first: dict[PlanFamily, float] = {}
    for t in fitting:
        first.setdefault(family_of(t.plan), t.step_time_s)
    chosen = dict(list(first.items())[:top])
    return [t for t in fitting if family_of(t.plan) in chosen]


def _why_none(space: Space, model: Model, cluster: Cluster, train: Train) -> str:
    """Return what is wrong with the plan of a space's least sizes, to be said where no plan of it is legal; "" if that
    is no reason."""
    least = [f"{name}{min(space[name])}" for name in ("tp", "pp", "cp", "ep", "mb") if 1 not in (space[name] or (1,))]
    plan = parse(" ".join(least) or "tp1").on(cluster.num_devices)
    wrong = [found.message for found in violations(plan, model, cluster, train)][:2]
    return f"{', and '.join(wrong)}: " if wrong else ""
