"""Beliefs about a stack's constants before its own steps are looked at: by those of other stacks, and their spread.

Stacks are alike, versions of one stack more so: a constant's logarithm lies around the middle of the other families
(``cost/unknown.py``) as far as families lie apart, and around what steps of another version say as far as versions do
(the two levels of a hierarchical model; Gelman and Hill 2006, chapter 12). Both spreads are those of the catalog's
profiles. A constant that few stacks pin has the spread of all constants as that of one stack more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import exp, log, sqrt
from typing import NamedTuple

from meshwright.cost import Framework, frameworks
from meshwright.cost.unknown import Evidence, told_by, weighed_families

#: What is fitted: constant, unit, smallest and largest value that is believable.
CONSTANTS: dict[str, tuple[str, float, float]] = {
    "elementwise_passes": ("bytes moved over bytes needed", 1.0, 8.0),
    "host_us_per_kernel": ("us", 2.0, 200.0),
    "host_us_per_collective": ("us", 5.0, 300.0),
    "ring_steps": ("times", 1.0, 20.0),
    "host_us_per_pass": ("us", 10.0, 10_000.0),
    "host_us_per_dispatch": ("us", 10.0, 10_000.0),
    "host_us_per_step": ("us", 100.0, 10_000.0),
    "exchange_share": ("fraction", 0.05, 1.0),
}
#: The usual size of a constant that no other stack pins.
USUAL = {
    "elementwise_passes": 2.0,
    "host_us_per_kernel": 40.0,
    "host_us_per_collective": 40.0,
    "ring_steps": 2.0,
    "host_us_per_pass": 100.0,
    "host_us_per_dispatch": 100.0,
    "host_us_per_step": 2000.0,
    "exchange_share": 1.0,
}
#: Constants of the network under a job, which no other stack tells.
OF_NETWORKS = ("ring_steps",)


class Belief(NamedTuple):
    """A belief about the constants: the mean and the standard deviation of the logarithm of each."""

    mean: dict[str, float]
    sigma: dict[str, float]

    def constants(self) -> dict[str, float]:
        """Return the constants at the means, to three digits."""
        return {name: float(f"{exp(mean):.3g}") for name, mean in self.mean.items()}


def among_others(
    profile: Framework, bits: int, without: Collection[str] = (), known: Iterable[Framework] = ()
) -> Belief:
    """Return what the families of stacks but those of some names say of one of this kind with operands of `bits`."""
    kind = Evidence(bits=bits, old=profile.defaults.attention == "unfused", kernels=profile.kernels)
    families = weighed_families(kind, without, known)
    mean, squares, count = {}, {}, {}
    for name in CONSTANTS:
        told = [] if name in OF_NETWORKS else told_by(families, name)
        total = sum(weight for weight, _ in told)
        mean[name] = sum(weight * value for weight, value in told) / total if told else log(USUAL[name])
        squares[name] = sum((value - mean[name]) ** 2 for _, value in told)
        count[name] = len(told)
    variance = _variances(squares, {name: max(0, n - 1) for name, n in count.items()})
    # the middle of n stacks is itself an n-th of their variance off
    return Belief(mean, {name: sqrt(variance[name] * (1 + 1 / max(1, count[name]))) for name in CONSTANTS})


def between_versions(known: Iterable[Framework] = ()) -> dict[str, float]:
    """Return how far versions of one family lie apart: the standard deviation of each constant's logarithm."""
    families = weighed_families(Evidence(), (), known or frameworks().values()).values()
    squares, count = dict.fromkeys(CONSTANTS, 0.0), dict.fromkeys(CONSTANTS, 0)
    for some in families:
        for name in CONSTANTS:
            values = [log(getattr(one, name)) for _, one in some if name in one.pinned]
            mean = sum(values) / max(1, len(values))
            squares[name] += sum((value - mean) ** 2 for value in values)
            count[name] += max(0, len(values) - 1)
    return {name: sqrt(one) for name, one in _variances(squares, count).items()}


def _variances(squares: dict[str, float], count: dict[str, int]) -> dict[str, float]:
    """Variance of each constant from its sum of squares and degrees of freedom; that of all counts as one more. Where
    nothing is known of any, they are off by a factor of four."""
    freedom = sum(count.values())
    usual = sum(squares[name] for name, n in count.items() if n) / freedom if freedom else log(4.0) ** 2
    return {name: (squares[name] * (n > 0) + usual) / (n + 1) for name, n in count.items()}


def with_versions(before: Belief, versions: Iterable[tuple[Belief, Belief]], apart: dict[str, float]) -> Belief:
    """Return a belief narrowed by what steps of other versions say: of each what was believed of it before them and
    after; only the difference is theirs, and it is as sure as two versions are alike (`apart`)."""
    precision = {name: before.sigma[name] ** -2 for name in before.mean}
    weighted = {name: before.mean[name] * precision[name] for name in before.mean}
    for prior, after in versions:
        for name in after.mean:
            if name in OF_NETWORKS:
                continue
            told = after.sigma[name] ** -2 - prior.sigma[name] ** -2
            if told <= 0:
                continue
            said = (after.mean[name] * after.sigma[name] ** -2 - prior.mean[name] * prior.sigma[name] ** -2) / told
            sure = 1 / (1 / told + 2 * apart[name] ** 2)
            precision[name] += sure
            weighted[name] += said * sure
    mean = {name: weighted[name] / precision[name] for name in precision}
    return Belief(mean, {name: one**-0.5 for name, one in precision.items()})
