"""Replicas that learn labelled digits: held-out accuracies of ways to exchange, of optimizers and of batches.

Every figure is of real processes that train as ``meshwright run`` does, of some seconds in all; ``learnt.py`` says how
they are judged.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.papers.learnt import ASSUMPTIONS, accuracies, gained, jobs, lost, missing, shown
from meshwright.papers.outcome import AT_MOST, Check, Figure, Outcome, by_processes

#: Steps of a run of an epoch and a third, the batch of four replicas, and the workload of most of these runs.
STEPS, FOUR = 40, "batch=48,optimizer=momentum"
#: Faulty replicas among five, as many as a median of five tolerates, and steps of a run with them.
FAULTY, FAULTY_STEPS = "faulty=2", 28
#: A small batch, and one as many times as large (Goyal et al. go from 256 to 8,192, 32 times), for ten epochs.
SMALL, LARGER, EPOCHS_STEPS = 36, 8, 400
#: Steps of ten epochs of the large batch in which the learning rate rises: five epochs of ninety are as many of ten.
WARMUP = 3
#: Steps of a run with a momentum for each cluster.
CLUSTER_STEPS = 60
#: Samples that a batch which grows may have, its bound of the norm test, and steps of such a run.
MOST, GROW, GROWN_STEPS = 288, 0.5, 32
#: Steps of a run whose rounds grow.
QSR_STEPS = 64


def check(row: str, baseline: str, carry_out: Callable[[], Outcome], *more: str) -> Check:
    """Return the check of a `row` that is all training: what real processes come to against a `baseline`."""

    def find() -> Outcome:
        found = Outcome(baseline=baseline, missing=missing(row), assumptions=(*ASSUMPTIONS, *more))
        return by_processes(found, "training on digits", carry_out)

    return Check(find)


def flag_aggregator() -> Outcome:
    """Ways to combine gradients of five replicas, two of which send noise."""
    batch = "batch=45,optimizer=momentum"
    ways = {"sum": ("", 0.4), "median": (" sync=step:combine=median", 0.2)}
    ways |= {"trimmed": (" sync=step:combine=trimmed", 0.2), "flag": (" sync=step:combine=flag", 0.2)}
    runs = {
        name: jobs(f"dp5 mb9{word}", batch, rate, FAULTY_STEPS, world=FAULTY) for name, (word, rate) in ways.items()
    }
    found = accuracies(runs)
    what = "points of accuracy of the flag aggregator over"
    return Outcome(
        figures=(
            gained(f"{what} the sum, 2 of 5 workers sending noise", found["flag"], found["sum"]),
            gained(f"{what} the trimmed mean there", found["flag"], found["trimmed"]),
            gained(f"{what} the median there", found["flag"], found["median"]),
            shown("its accuracy there", found["flag"]),
            shown("that of the median there", found["median"]),
        )
    )


def terngrad_on_digits() -> Outcome:
    """Ternary gradients against whole ones."""
    runs = {"coded": jobs("dp4 mb12 sync=terngrad", FOUR, 0.1, STEPS), "whole": jobs("dp4 mb12", FOUR, 0.1, STEPS)}
    found = accuracies(runs)
    one = lost("", found["coded"], found["whole"])
    what = "points of accuracy on digits that ternary gradients of 4 workers lose"
    return Outcome(
        figures=(
            Figure(what, 2.0, one.ours, "points", AT_MOST, 1.0, f"its abstract: under 2% on GoogLeNet; here {one.why}"),
            shown("accuracy on digits with whole gradients", found["whole"]),
        )
    )


def gossip_overlapped() -> Outcome:
    """Neighbours' averages beside the compute against an all-reduce."""
    words = "dp4 mb12 sync=gossip:graph=exponential,overlap=yes"
    found = accuracies({"meets": jobs(words, FOUR, 0.1, STEPS), "sums": jobs("dp4 mb12", FOUR, 0.1, STEPS)})
    return Outcome(
        figures=(
            gained("points of accuracy over an all-reduce, 4 replicas on digits", found["meets"], found["sums"]),
            shown("accuracy on digits with an all-reduce", found["sums"]),
        )
    )


def kept_variance() -> Outcome:
    """Gossip whose averages are spread as far as what they are of, against averages as they are and an all-reduce."""
    ring = "dp4 mb12 sync=gossip:graph=ring"
    runs = {"kept": jobs(f"{ring},variance=kept", FOUR, 0.1, STEPS), "plain": jobs(ring, FOUR, 0.1, STEPS)}
    found = accuracies(runs | {"sums": jobs("dp4 mb12", FOUR, 0.1, STEPS)})
    return Outcome(
        figures=(
            gained("points of accuracy over averages as they are, a ring of 4 replicas", found["kept"], found["plain"]),
            lost("points of accuracy that the ring is behind an all-reduce", found["kept"], found["sums"]),
            shown("its accuracy", found["kept"]),
        )
    )


def savic() -> Outcome:
    """Local steps in shared scales against local steps of plain SGD."""
    sgd = "batch=48,optimizer=sgd"
    runs = {"scaled": jobs("dp4 mb12 sync=savic:h=10,least=0.001", sgd, 0.008, STEPS)}
    found = accuracies(runs | {"plain": jobs("dp4 mb12 sync=local:h=10", sgd, 0.8, STEPS)})
    return Outcome(
        figures=(
            gained("points of accuracy over local SGD, 4 replicas, 10 steps a round", found["scaled"], found["plain"]),
            shown("its accuracy", found["scaled"]),
        )
    )


def clusters() -> Outcome:
    """Momentum for each cluster of the data against one momentum."""
    one = f"batch={SMALL},optimizer=momentum"
    runs = {"each": jobs(f"dp1 mb{SMALL}", f"{one},clusters=4", 0.1, CLUSTER_STEPS)}
    found = accuracies(runs | {"one": jobs(f"dp1 mb{SMALL}", one, 0.1, CLUSTER_STEPS)})
    return Outcome(
        figures=(
            gained(
                f"points of accuracy over one momentum, four clusters, {CLUSTER_STEPS} steps",
                found["each"],
                found["one"],
            ),
            shown("its accuracy", found["each"]),
        )
    )


def large_batch() -> Outcome:
    """A batch eight times as large with the rate scaled and warmed up, against the small one for as many samples."""
    steps, batch = EPOCHS_STEPS // LARGER, SMALL * LARGER
    words = f"dp2 mb{batch // 2}", f"batch={batch},optimizer=momentum"
    runs = {"small": jobs(f"dp1 mb{SMALL}", f"batch={SMALL},optimizer=momentum", 0.1, EPOCHS_STEPS)}
    runs["scaled"] = jobs(*words, 0.1 * LARGER, steps, warmup=WARMUP, warmup_from=1 / LARGER)
    runs["same rate"] = jobs(*words, 0.1, steps)
    found = accuracies(runs)
    what = f"points of accuracy on digits that a batch {LARGER} times as large loses, its rate scaled and warmed up"
    return Outcome(
        figures=(
            lost(what, found["scaled"], found["small"]),
            shown("accuracy on digits with the large batch at the rate of the small one", found["same rate"]),
            shown("accuracy on digits with the small batch", found["small"]),
        )
    )


def growing() -> Outcome:
    """AdaGrad on batches that the norm test grows, against small and large ones for about as many samples."""
    small = f"batch={SMALL},optimizer=adagrad"
    grown = jobs("dp2 mb18", f"{small},grow={GROW},most={MOST}", 0.16, GROWN_STEPS)
    from meshwright.run.trials import trained

    ended = trained(grown)
    samples = sum(one.samples for one in ended) / len(ended)
    runs = {"small": jobs(f"dp1 mb{SMALL}", small, 0.16, round(samples / SMALL))}
    runs["large"] = jobs(f"dp1 mb{MOST}", f"batch={MOST},optimizer=adagrad", 0.08, round(samples / MOST))
    found, one = accuracies(runs), [trial.accuracy for trial in ended]
    what = f"points of accuracy of batches that grow from {SMALL} to {MOST}"
    return Outcome(
        figures=(
            lost(f"{what} behind the small ones", one, found["small"]),
            gained(f"{what} over the large ones", one, found["large"]),
            Figure("steps over those of small batches", None, GROWN_STEPS * SMALL / samples, "x"),
            shown("their accuracy", one),
        )
    )


def qsr() -> Outcome:
    """Rounds that grow as the rate falls, against rounds that do not and against every step."""
    down = {"decay_steps": QSR_STEPS, "min_lr": 0.0}
    word = f"qsr:h=4,growth=0.44,rate=0.2,steps={QSR_STEPS}"
    runs = {"grows": jobs(f"dp4 mb12 sync={word}", FOUR, 0.2, QSR_STEPS, **down)}
    runs["stays"] = jobs("dp4 mb12 sync=local:h=8", FOUR, 0.2, QSR_STEPS, **down)
    found = accuracies(runs | {"every": jobs("dp4 mb12", FOUR, 0.4, QSR_STEPS, **down)})
    over = gained("", found["grows"], found["every"])
    why = f"its abstract: of ViT-B on ImageNet, 16 GPUs, where 64 gain 0.84; here {over.why}"
    what = "points of accuracy over data parallelism"
    return Outcome(
        figures=(
            Figure(f"{what}, 4 replicas on digits", 1.16, over.ours, "points", "within", 0.1, why, headline=True),
            gained("points of accuracy over rounds of 8 steps", found["grows"], found["stays"]),
            shown("its accuracy", found["grows"]),
        )
    )


CHECKS: dict[str, Check] = {
    "flag-aggregator": check(
        "flag-aggregator",
        "sums, medians and trimmed means of the same gradients",
        flag_aggregator,
        "two of five workers send normal numbers ten times as long as their gradients; the paper has up to 3 of 15",
    ),
    "decent-practice": check("decent-practice", "gradients summed by all replicas in every step", gossip_overlapped),
    "vanishing-variance": check("vanishing-variance", "averages of neighbours as they are", kept_variance),
    "savic-local": check("savic-local", "local steps of plain SGD", savic, "scales are 0.001 at least"),
    "discover-vr": check("discover-vr", "SGD with one momentum for all data", clusters),
    "adadagrad": check("adadagrad", "AdaGrad on batches that stay", growing),
    "qsr": check("qsr", "data parallelism, and local steps in rounds of one length", qsr),
}
