"""Find the best serving plans for a question: the verb of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic

import msgspec
import numpy as np

from meshwright.answer.serving import predict_serving
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError, nearest
from meshwright.plan import Plan
from meshwright.search.interrupt import stopping
from meshwright.search.serving.evaluate import TOLERANCE, ServingEvaluator, at_speed, rate_of, usd_hour
from meshwright.search.serving.found import (
    AT_RATE,
    BOUNDED,
    FRONT,
    OBJECTIVES,
    RankedServing,
    ServingFound,
    ServingTie,
)
from meshwright.search.serving.objectives import LEAST, RULES, Chosen
from meshwright.search.serving.space import ServingCandidate, default
from meshwright.search.serving.walk import NO_ROOM, ServingWalk, nothing_legal
from meshwright.search.space import Space
from meshwright.search.walk import Stopped
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve

#: Said where a plan that was allowed is among the best.
APPROXIMATE = (
    "weights or caches of fewer bits, which were allowed, are among the best: the model computes something else"
)
#: Candidates that are simulated where none keeps the objectives, to name the nearest.
NEAR = 64


def find_serving(
    model: Model,
    clusters: Sequence[Cluster],
    serve: Serve,
    *,
    spaces: Sequence[Space] = (),
    requests: Requests | None = None,
    costs: Costs | None = None,
    profile: EngineProfile | None = None,
    objective: str = "devices",
    front: Sequence[str] = (),
    most_rates: bool = False,
    top: int = 5,
    report: Callable[[ServingWalk], None] | None = None,
) -> ServingFound:
    """The `top` best layouts by `objective`, each with its best engine and number of replicas, and why others lost.

    Each of `clusters` (of one island) is searched in its own space, the default one unless said, and any number of its
    devices may be left free. `front` names the values of the Pareto front; with `most_rates` each of the best is also
    tried at greater rates. `report` is called with the walk a few times a second. Ctrl-C ends the walk at its next
    look; what was found until then is the answer.

    Raises:
        MeshwrightError: R004 for an unknown objective, R014 for one that nothing is known of, R005 when no plan is
            legal, and what is wrong with the requests.
    """
    began = monotonic()
    front = tuple(front) or ("devices", "throughput", "e2e")
    _tellable(objective, front, clusters, serve, most_rates)
    if requests is None:
        serve = serve.for_context(model.max_seq_len)
        requests = serve.drawn()
    profile = profile or engine_profile(serve.engine.profile)
    costs = costs or serving_costs(profile.library)
    spaces = tuple(spaces) or tuple(default(model, cluster, serve) for cluster in clusters)
    evaluators = [ServingEvaluator(model, cluster, serve, requests, costs, profile) for cluster in clusters]
    walk = ServingWalk(evaluators, spaces, report, apart=objective in LEAST)
    if not (walk.lines or walk.pairs):
        raise nothing_legal(model.name, " ".join(c.name for c in clusters), serve.text())
    chosen, stopped = [], False
    with stopping(walk.stop):
        try:
            RULES[objective](walk, chosen, top)
        except Stopped:
            stopped = True
        near = None if chosen or stopped else _nearest(walk)
        walk.stop.over = True
        walk.end()
    chosen.sort(key=lambda one: one.order)
    best = [_ranked(walk, one, most_rates, first=one is chosen[0]) for one in chosen[:top]]
    for one in chosen[top:]:
        walk.lose(one.candidate, "a better plan is shown", one.why)
    return ServingFound(
        model=model.name,
        clusters=tuple(clusters),
        serve=serve,
        space=spaces[0],
        objective=objective,
        best=tuple(_with_ties(walk, best)),
        nearest=None if near is None else _ranked(walk, near, False),
        losers=walk.losers({one.candidate for one in best}),
        covered=walk.covered,
        simulated=walk.simulated,
        proven=not stopped,
        stopped=stopped,
        seconds=monotonic() - began,
        front=front,
        points=tuple((c, values) for c, values in _points(walk, front)),
        remarks=(APPROXIMATE,) if any(_approximate(one.candidate, serve) for one in best) else (),
    )


def _approximate(candidate: ServingCandidate, serve: Serve) -> bool:
    """Whether a model computes something else under a candidate than in its usual precision and the workload's."""
    usual = Plan().precision
    return candidate.engine.kv != serve.engine.kv or any(p.plan.precision != usual for p in candidate.phases)


def alone(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the islands of a cluster as clusters of their own; replicas of unlike devices are searched apart."""
    if len(cluster.islands) == 1:
        return (cluster,)
    return tuple(Cluster(name=island.name, islands=(island,)) for island in cluster.islands)


def _tellable(
    objective: str, front: Sequence[str], clusters: Sequence[Cluster], serve: Serve, most_rates: bool
) -> None:
    """Raise R004 for names that are none, and R014 for what cannot be told of this question."""
    if objective not in OBJECTIVES:
        help = nearest(objective, list(OBJECTIVES))
        place = f"--objective {objective}"
        raise MeshwrightError.one("R004", f"no objective {objective!r} of serving", place=place, help=help)
    for name in front:
        if name not in FRONT:
            help = nearest(name, list(FRONT))
            raise MeshwrightError.one("R004", f"no value {name!r} of a front", place="--pareto", help=help)
    for word in ("zoo", "peers"):
        if (value := getattr(serve.engine, word)) is not None:
            message = f"a search places whole models on replicas, and {word}= has parts of one on each"
            help = "predict plans one by one: --plan dp8, --plan tp2 dp4"
            raise MeshwrightError.one("W014", message, place=f"--serve {word}={value.text()}", help=help)
    wrong = []
    if (objective in BOUNDED or most_rates) and not any(serve.objective_classes):
        wrong.append(("no bounds on latencies are said", "add --slo ttft=500ms,tpot=50ms@p90"))
    if (objective in AT_RATE or most_rates) and not (serve.rate or serve.trace or serve.windows or serve.clients):
        wrong.append(("requests come at no rate", "say rate= or trace=, or ask for --objective throughput"))
    if "cost" in (objective, *front) and any(c.total_price_usd_hour() is None for c in clusters):
        without = ", ".join(c.name for c in clusters if c.total_price_usd_hour() is None)
        wrong.append((f"no price of {without} is known", "say it: --price 2.10, or ask for the fewest devices"))
    if wrong:
        raise MeshwrightError(
            MeshwrightError.one(
                "R014", f"{objective} cannot be told: {why}", place="--objective", help=help
            ).diagnostics[0]
            for why, help in wrong
        )


def _points(walk: ServingWalk, front: tuple[str, ...]):
    """Yield the values of the front of every candidate that was simulated and keeps the objectives; where none does,
    of all."""
    keeping = any(judged.good for judged in walk.judged.values())
    for candidate, judged in walk.judged.items():
        m = judged.metrics
        if m is None or not (judged.good or keeping is False):
            continue
        values = {
            "devices": float(candidate.num_devices),
            "throughput": m.throughput_tokens_per_s,
            "goodput": m.goodput_req_per_s,
            "e2e": m.e2e_s.p90,
            "ttft": m.ttft_s.p90,
            "tpot": m.tpot_s.p90,
        }
        if "cost" in front:
            values["cost"] = usd_hour(walk.of(candidate).cluster, candidate.num_devices) or inf
        yield candidate, tuple(values[name] for name in front)


def _nearest(walk: ServingWalk) -> Chosen | None:
    """The candidate that misses the objectives by the smallest factor, of those whose bounds miss them least; None
    where nothing has room."""
    found: list[tuple[float, float, ServingCandidate]] = []
    for line in walk.lines:
        if walk.lost[line.at(line.counts[-1])][0] == NO_ROOM:
            continue
        bounds = walk.of(line).bounds(line.phase, line.engine)
        least = max((floor.ratio for floor in bounds.floors()), default=0.0)
        found.append((least, bounds.least_replicas() / line.counts[-1], line.at(line.counts[-1])))
    best: Chosen | None = None
    found.sort(key=lambda one: (max(1.0, one[0]), max(1.0, one[1]), one[0], one[2].num_devices))
    for least, _, candidate in found[:NEAR]:
        if best is not None and least >= best.order[0]:
            continue
        judged = walk.of(candidate).judged(candidate, whole=True)
        walk.judged[candidate] = judged
        walk.lose(candidate, walk.lost[candidate][0], judged.why)
        if best is None or judged.ratio < best.order[0]:
            best = Chosen(candidate, (judged.ratio,), judged.why)
    for candidate, judged in walk.judged.items():
        apart = len(candidate.phases) > 1 and judged.metrics is not None
        if apart and (best is None or judged.ratio < best.order[0]):
            best = Chosen(candidate, (judged.ratio,), judged.why)
    return best


def _ranked(walk: ServingWalk, chosen: Chosen, most_rates: bool, first: bool = True) -> RankedServing:
    """A chosen candidate with its prediction, which has intervals where they are quick, or it is the `first`."""
    candidate, evaluator = chosen.candidate, walk.of(chosen.candidate)
    speed = 1.0 if chosen.speed is None else chosen.speed
    serve = at_speed(candidate.over(evaluator.serve), speed)
    most = evaluator.most_rate(candidate) if most_rates and chosen.speed is None else chosen.speed
    prediction = predict_serving(
        evaluator.model,
        evaluator.cluster,
        serve,
        candidate.plan,
        requests=evaluator.requests.faster(speed),
        costs=evaluator.costs,
        profile=evaluator.profile,
        detail=first or candidate.pools is None,
    )
    return RankedServing(
        candidate=candidate,
        cluster=evaluator.cluster,
        prediction=prediction,
        usd_hour=usd_hour(evaluator.cluster, candidate.num_devices),
        most_rate=None if most is None else most * rate_of(evaluator.requests),
        sure=float((evaluator.draws(candidate, speed)[1:] <= 1.0).mean()) if any(serve.objective_classes) else None,
        variants=chosen.variants,
    )


def _with_ties(walk: ServingWalk, best: list[RankedServing]) -> list[RankedServing]:
    """The best with those marked that cannot be told from the first: as many devices or as great a rate, and the
    difference of the largest value over its bound within what the costs are unsure of."""
    out = []
    for one in best:
        tie = None
        if out and one.prediction.objectives and _alike(one, best[0]):
            difference = walk.of(one.candidate).draws(one.candidate) - walk.of(best[0].candidate).draws(
                best[0].candidate
            )
            low, high = np.quantile(difference[1:], [0.1, 0.9]).tolist()
            tie = ServingTie(low, high) if low <= 0 <= high else None
        out.append(msgspec.structs.replace(one, tie=tie))
    return out


def _alike(one: RankedServing, best: RankedServing) -> bool:
    if one.most_rate is not None and best.most_rate is not None:
        return one.most_rate >= best.most_rate * (1 - TOLERANCE)
    return one.candidate.num_devices == best.candidate.num_devices and one.usd_hour == best.usd_hour
