"""Clients of a server that learn labelled digits: accuracies by rounds and by time on a virtual clock.

Clients and server are those of ``meshwright run``, in one process (``run/by_clock.py``); a pass over a client's share
of a batch takes a second, and messages none. Their classes are uneven: shares of a Dirichlet distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any

from meshwright.papers.checks.images import check
from meshwright.papers.learnt import by_seed, first_at, gained, jobs, lost, shown
from meshwright.papers.outcome import Check, Figure, Outcome, above
from meshwright.world.crowd import Crowd, factors

if TYPE_CHECKING:
    from meshwright.run.by_clock import JudgedVersion

#: Clients, samples of a step of each, the concentration of their classes, and the accuracy that times are of.
CLIENTS, SHARE, SKEW, WANTED = 12, 12, 0.3, 0.7
#: One found: the versions of every seed.
Runs = Sequence[Sequence["JudgedVersion"]]


def trained(words: str, rate: float, steps: int, world: Crowd, clients: int = CLIENTS) -> Runs:
    """The judged versions of every seed, until so many steps of each client are merged."""
    from meshwright.run.trials import clocked

    plan, train = f"dp{clients} mb{SHARE} sync={words}", f"batch={clients * SHARE},optimizer=sgd"
    return clocked(jobs(plan, train, rate, steps), world)


def crowd(**said: Any) -> Crowd:
    """Clients with uneven classes."""
    return Crowd(skew=SKEW, **said)


def last(runs: Runs) -> list[float]:
    """The accuracy that each seed ends with."""
    return [one[-1].accuracy for one in runs]


def at(runs: Runs, seconds: Sequence[float]) -> list[float]:
    """The accuracy of the newest version at a time of each seed."""
    return [max((v for v in one if v.at_s <= t), key=lambda v: v.at_s).accuracy for one, t in zip(runs, seconds)]


def middle(runs: Runs) -> list[float]:
    """When half of the versions of each seed were there."""
    return [one[len(one) // 2].at_s for one in runs]


def faster(what: str, runs: Runs, against: Runs) -> Figure:
    """How many times sooner some runs come to the wanted accuracy than others; 0 where they never do."""
    ratios = []
    for one, other in zip(runs, against, strict=True):
        mine, theirs = first_at(one, WANTED), first_at(other, WANTED)
        ratios.append(0.0 if mine is None else inf if theirs is None else theirs.at_s / mine.at_s)
    why = by_seed(ratios, "times") if all(r < inf for r in ratios) else "the other does not come to it with every seed"
    return above(f"{what} to {WANTED:.0%} of the digits", min(fmean(ratios), 1e3), why=why)


def in_time(what: str, runs: Runs, against: Runs) -> Figure:
    """Points of accuracy ahead when the other has half of its versions."""
    when = middle(against)
    return gained(f"{what} when that has half of its versions", at(runs, when), at(against, when))


def favano() -> Outcome:
    """Favano and FedAvg where a third of the clients is eight times as slow."""
    world = crowd(speeds=factors("1/1/8"))
    waits = trained("fedavg:h=10,clients=4", 0.8, 16, world)
    goes_on = trained("favano:h=10,clients=4,every=10s", 1.6, 100, world)
    return Outcome(
        figures=(
            faster("time of FedAvg over that of FAVANO", goes_on, waits),
            in_time("points of accuracy of FAVANO over FedAvg", goes_on, waits),
            shown("accuracy of FAVANO after 100 steps of each client", last(goes_on)),
        )
    )


def fedfix() -> Outcome:
    """FedFix and FedAvg where clients are up to five times as slow."""
    world = crowd(speeds=factors("uniform:1-5"))
    waits, fixed = (trained(words, 0.8, 40, world) for words in ("fedavg:h=10", "fedfix:h=10,every=20s"))
    return Outcome(
        figures=(
            faster("time of FedAvg over that of FedFix", fixed, waits),
            in_time("points of accuracy of FedFix over FedAvg", fixed, waits),
            shown("accuracy of FedFix after 40 steps of each client", last(fixed)),
        )
    )


def fedcompass() -> Outcome:
    """FedCompass, FedAvg and FedBuff where speeds are exponential."""
    world, words = crowd(speeds=factors("exp:1")), ("fedcompass:h=20,least=4", "fedavg:h=20", "fedbuff:h=20,buffer=3")
    groups, waits, buffers = (trained(one, rate, 40, world) for one, rate in zip(words, (1.6, 0.8, 0.8)))
    return Outcome(
        figures=(
            faster("time of FedAvg over that of FedCompass", groups, waits),
            faster("time of FedBuff over that of FedCompass", groups, buffers),
            in_time("points of accuracy of FedCompass over FedAvg", groups, waits),
            in_time("points of accuracy of FedCompass over FedBuff", groups, buffers),
            shown("accuracy of FedCompass after 40 steps of each client", last(groups)),
        )
    )


def fedamd() -> Outcome:
    """Anchors and FedAvg, a third of the clients in each round."""
    plain = trained("fedavg:h=5,clients=4", 1.6, 20, crowd())
    anchored = trained("fedamd:h=5,clients=4,period=2", 0.2, 20, crowd())
    # half of its rounds are of anchors, which make no version
    rounds = [2 * len(one) for one in anchored], [len(one) for one in plain]
    reached = [[first_at(one, WANTED) for one in some] for some in (anchored, plain)]
    never = any(one is None for one in reached[0])
    counted = [
        1 + n * list(one).index(v) if v is not None else float("inf")
        for some, found, n in ((anchored, reached[0], 2), (plain, reached[1], 1))
        for one, v in zip(some, found)
    ]
    seeds = len(plain)
    ratios = [b / a if a < inf else 0.0 for a, b in zip(counted[:seeds], counted[seeds:])]
    why = "it does not come to it with every seed; " if never else ""
    return Outcome(
        figures=(
            above(f"rounds of FedAvg over those of FedAMD to {WANTED:.0%} of the digits", min(fmean(ratios), 1e3),
                  why=why + by_seed([min(r, 1e3) for r in ratios], "times")),
            gained(f"points of accuracy of FedAMD after {min(rounds[0])} rounds over FedAvg after {min(rounds[1])}",
                   last(anchored), last(plain)),
            shown("accuracy of FedAMD", last(anchored)),
        )
    )  # fmt: skip


def feddip() -> Outcome:
    """A model of which nine values of ten are cut, against the whole."""
    whole = trained("fedavg:h=5", 0.8, 60, crowd(), clients=6)
    cut = trained("feddip:h=5,rounds=8,every=2,last=0.9", 1.6, 60, crowd(), clients=6)
    random = trained("feddip:h=5,rounds=1,every=60,first=0.9,last=0.9,penalty=0", 3.2, 60, crowd(), clients=6)
    return Outcome(
        figures=(
            lost("points of accuracy lost with 90% of the matrices' values cut", last(cut), last(whole)),
            gained("points of accuracy over random masks of 90% from the first round on", last(cut), last(random)),
            shown("accuracy of the whole model", last(whole)),
        )
    )


def fedprox_on_digits() -> Outcome:
    """FedProx and FedAvg that drops stragglers, nine tasks of ten at half the speed."""
    world = crowd(jitter=factors("slow:0.9x2"))
    prox = trained("fedprox:h=20,clients=6,wait=0.17,mu=0.1", 0.8, 40, world)
    drops = trained("fedavg:h=20,clients=6,wait=0.17", 0.8, 20, world)
    after = min(len(one) for one in (*prox, *drops))
    return Outcome(
        figures=(
            gained(
                f"points of accuracy over FedAvg that drops stragglers on digits, after {after} rounds",
                [one[after - 1].accuracy for one in prox],
                [one[after - 1].accuracy for one in drops],
            ),
            shown(f"accuracy of FedProx on digits after {after} rounds", [one[after - 1].accuracy for one in prox]),
        )
    )


_HOW = f"{CLIENTS} clients with classes in shares of a Dirichlet distribution of {SKEW}, {SHARE} samples a step, no"
_HOW += " momentum; a step takes a second of a virtual clock, a message none"
CHECKS: dict[str, Check] = {
    "favano": check("favano", "FedAvg, which waits for its clients", favano, _HOW),
    "fedfix": check("fedfix", "FedAvg, which waits for its clients", fedfix, _HOW),
    "fedcompass": check("fedcompass", "FedAvg, which waits, and FedBuff, which does not", fedcompass, _HOW),
    "fedamd": check("fedamd", "FedAvg with as many steps a round", fedamd, _HOW),
    "feddip": check("feddip", "FedAvg of the whole model", feddip, _HOW.replace(str(CLIENTS), "6", 1)),
}
