"""How fast the search is: seconds with the optimum proven, plans covered, bounds and evaluations a second.

Run: python -m bench.search [QUESTION ...]     questions: 8b, 405b (default: both)
"""

from __future__ import annotations

import argparse
from time import process_time

import meshwright as mw
from meshwright.search.bounds import CoreScope, compute_seconds, step_seconds
from meshwright.search.evaluate import Evaluator
from meshwright.search.find import find
from meshwright.search.regions import Regions
from meshwright.search.space import cores, default
from meshwright.search.strategies import exhaustive
from meshwright.search.walk import Walk

#: Name -> model, cluster, workload, and the seconds a warm search may take.
QUESTIONS = {
    "8b": ("llama3-8b", "8xh100", "batch=64,seq=8192", 1.0),
    "405b": ("llama3-405b", "16384xh100", "batch=2048,seq=8192", 10.0),
}
REGIONS = 40


def main() -> None:
    """Measure the chosen questions, warm."""
    parser = argparse.ArgumentParser(prog="python -m bench.search", description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="*", help=f"which: {', '.join(QUESTIONS)} (default: all)")
    find(*_asked("8b"), top=1)  # compiled code is loaded, catalogs are read
    for name in parser.parse_args().question or QUESTIONS:
        found = find(*_asked(name), top=1)
        print(
            f"{name}: {found.seconds:.2f} s (target {QUESTIONS[name][3]:g}), proven {found.proven_optimal}, "
            f"{found.covered:,} plans covered, {found.evaluated:,} evaluated, {found.bounded:,} bounded one by one"
        )
        print(f"{name}: {_bounds(name):,.0f} bounds/s, {_evaluations(name):,.0f} evaluations/s")


def _asked(name: str) -> tuple:
    model, cluster, train, _ = QUESTIONS[name]
    return mw.load_model(model), mw.load_cluster(cluster), mw.parse_train(train)


def _scopes(name: str) -> list[CoreScope]:
    model, cluster, train = _asked(name)
    space = default(model, cluster, train)
    found = []
    for core in cores(space, model, cluster, train):
        if core.tp * core.cp == cluster.islands[0].domain_size and len(found) < REGIONS:
            scope = CoreScope.of(space, core, model, cluster, train)
            usual = scope.inners.take(scope.inners.order == scope.inners.order[0])
            found.append(scope._replace(inners=usual))
    return found


def _bounds(name: str) -> float:
    """Plans bounded in a second of one core, layers priced and schedules timed on the way."""
    regions = Regions(Evaluator(*_asked(name)))
    scopes = _scopes(name)
    began, count = process_time(), 0
    for scope in scopes:
        costs = regions.costs(scope.core, scope.inners)
        paths_s, least = compute_seconds(regions, scope, costs)
        exchanged = regions.exchanges.exchanged(scope.core, scope.inners, scope.states)
        count += step_seconds(regions, scope, costs, paths_s, least, exchanged)[0].size
    return count / (process_time() - began)


def _evaluations(name: str) -> float:
    """Plans evaluated in a second of one core: those that a search evaluates, from nothing."""
    asked = _asked(name)
    walk = Walk(default(*asked), Evaluator(*asked), keep=1)
    exhaustive.run(walk)
    plans = [tried.plan for tried in walk.tried.values()]
    evaluator = Evaluator(*asked)
    began = process_time()
    for plan in plans:
        evaluator(plan)
    return len(plans) / (process_time() - began)


if __name__ == "__main__":
    main()
