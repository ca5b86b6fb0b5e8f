"""Software that nobody measured: the middle of the kinds of stack it may be, with their spread.

Every fitted profile is one stack, and stacks of one family weigh as one. What a question says (the precision of its
products, the year, kernels of one kind) is evidence: stacks that it does not fit weigh :data:`MISMATCH` as much. The
point is the weighted middle of their constants, each where steps pinned it; the interval knows how far they lie apart.
Leaving software out is leaving its profiles out of the middle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import exp, log, sqrt
from typing import NamedTuple

import msgspec

from meshwright.cost.framework import Framework, dated, frameworks, load
from meshwright.cost.relatives import GENERATIONS, generation
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Device
from meshwright.spec.workload import DTYPE_BYTES

#: The profiles whose words and defaults the middle takes: of today, and of the years before FlashAttention.
TODAY, UNFUSED = "default", "unfused"
#: From this year on training stacks came with FlashAttention (2205.14135 is of May 2022).
FLASH_SINCE = 2022.9
#: Weight of a stack that a piece of evidence does not fit, of one that it fits.
MISMATCH = 0.1
#: The constants that are taken from the stacks.
MIDDLE = (
    "elementwise_passes",
    "host_us_per_kernel",
    "host_us_per_collective",
    "host_us_per_pass",
    "host_us_per_dispatch",
    "host_us_per_step",
    "exchange_share",
)
#: Stacks differ at least so much (the log's standard deviation), however few of them were measured.
LEAST_APART = 0.3
#: Names that say a kind of kernels and no software.
KINDS = ("eager", "compiled")


class Evidence(NamedTuple):
    """The facts of a question that tell kinds of stack apart: ``bits`` of the operands of its products, whether it is
    ``old``, of before FlashAttention, the kind of its ``kernels`` ("" where nobody says; 8 bits are no eager stack's),
    and the generation of FlashAttention that it runs, 0 for the device's own and None where nobody says."""

    bits: int = 16
    old: bool = False
    kernels: str = ""
    flash: int | None = None

    @property
    def name(self) -> str:
        """The name of the middle under this evidence."""
        said = [self.kernels] if self.kernels else []
        said += ["8 bits"] if self.bits < 16 else []
        said += [] if self.flash is None else [f"flash {self.flash}"]
        return " ".join([UNFUSED if self.old else TODAY, *said])


def evidence(
    device: Device, dtype: str, *, year: float | None = None, kernels: str = "", flash: int | None = None
) -> Evidence:
    """Return what a question tells of its software. Products in fp16 where nobody says a year are of the time before
    bf16 became usual. Stacks that multiply 8 bits, and all on devices newer than FlashAttention's second generation,
    run attention kernels made for the device.
    """
    bits = 8 if DTYPE_BYTES[dtype] < 2 else 16
    old = dtype == "fp16" if year is None else year < FLASH_SINCE
    if flash is None and (bits < 16 or generation(device) > GENERATIONS.index("Hopper")):
        flash = 0
    return Evidence(bits=bits, old=old and bits == 16 and not device.cores, kernels=kernels, flash=flash)


def middle(found: Evidence, without: Collection[str] = (), known: Iterable[Framework] = ()) -> Framework:
    """The profile of software of which nobody knows more than `found`; `without`: profiles that are left out of those
    that are `known`, by default the catalog's."""
    base = load(UNFUSED if found.old else TODAY)
    families = weighed_families(found, without, known)
    constants = {}
    apart = {}
    for name in MIDDLE:
        stacks = told_by(families, name)
        if not stacks:
            continue
        total = sum(weight for weight, _ in stacks)
        mean = sum(weight * value for weight, value in stacks) / total
        constants[name] = float(f"{exp(mean):.3g}")
        apart[name] = max(LEAST_APART, sqrt(sum(w * (v - mean) ** 2 for w, v in stacks) / total))
    return msgspec.structs.replace(
        base,
        name=found.name,
        defaults=msgspec.structs.replace(base.defaults, flash=_flash(families) if found.flash is None else found.flash),
        passes_sigma=round(apart.get("elementwise_passes", LEAST_APART), 3),
        host_sigma=round(apart.get("host_us_per_kernel", LEAST_APART), 3),
        **constants,
    )


def weighed_families(
    found: Evidence, without: Collection[str] = (), known: Iterable[Framework] = ()
) -> dict[str, list[tuple[float, Framework]]]:
    """Return the stacks that steps were fitted to by family, each with its weight under this evidence."""
    families: dict[str, list[tuple[float, Framework]]] = {}
    for one in known or frameworks().values():
        if one.flagged or one.constants_of or one.name in without or not one.pinned:
            continue
        families.setdefault(one.family or one.name, []).append((_weight(one, found), one))
    return families


def told_by(families: dict[str, list[tuple[float, Framework]]], name: str) -> list[tuple[float, float]]:
    """Return the weight and the logarithm of a constant of every family whose steps pin it."""
    return [_of_family(some, name) for some in families.values() if any(name in one.pinned for _, one in some)]


def likened(one: Framework, known: Iterable[Framework]) -> Framework:
    """Return a profile that nobody measured with the times of the middle of the stacks that it is ``like``."""
    kind = "" if one.like == "any" else one.like
    of = middle(Evidence(old=one.defaults.attention == "unfused", kernels=kind), known=known)
    return msgspec.structs.replace(one, **{name: getattr(of, name) for name in MIDDLE})


def _weight(one: Framework, found: Evidence) -> float:
    # operands of 8 bits are quantised in kernels that hold more (Transformer Engine's) or are compiled (torchao's),
    # else it costs what the faster products save
    alike = one.kernels == found.kernels if found.kernels else found.bits == 16 or one.kernels != "eager"
    fits = (found.bits in one.bits, found.old == (one.defaults.attention == "unfused"), alike)
    return MISMATCH ** fits.count(False)


def _of_family(some: list[tuple[float, Framework]], name: str) -> tuple[float, float]:
    """A family's weight and the logarithm of its constant."""
    told = [(weight, log(getattr(one, name))) for weight, one in some if name in one.pinned]
    total = sum(weight for weight, _ in told)
    return max(weight for weight, _ in told), sum(weight * value for weight, value in told) / total


def _flash(families: dict[str, list[tuple[float, Framework]]]) -> int:
    """The generation of FlashAttention that most stacks of the kind run."""
    votes: dict[int, float] = {}
    for some in families.values():
        weight, one = max(some, key=lambda pair: pair[0])
        votes[one.defaults.flash] = votes.get(one.defaults.flash, 0.0) + weight
    return max(votes, key=lambda flash: votes[flash], default=0)


def software(cluster: Cluster, name: str = "", dtype: str = "bf16") -> Framework:
    """The profile that answers for the software called `name` on a cluster, with products of `dtype`: a fitted one, or
    the middle of the kinds it may be. "" is what the cluster's device names, if it names one.

    Raises:
        MeshwrightError: the profile is not there, as :func:`meshwright.cost.framework.load` says.
    """
    device = cluster.islands[0].device
    bare, year = dated(name)
    if not bare and device.framework:
        return load(device.framework, year)
    kind = bare.lower().strip()
    if kind and kind != TODAY and kind not in KINDS:
        return load(bare, year)
    return middle(evidence(device, dtype, year=year, kernels="" if kind == TODAY else kind))
