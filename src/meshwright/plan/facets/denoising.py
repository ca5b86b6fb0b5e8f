"""Denoising: exchanges of a diffusion model's steps that bring what the step before left, and are not waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import KEYED, LAYER, STRUCTURE, Facet, Field, Form, names, wrong
from meshwright.spec.denoise import DENOISE

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

#: What the exchanges of a step may bring from the step before: keys and values of patches, or what stages pass on.
NONE, PATCHES, STAGES = "none", "patches", "stages"


class Denoising(msgspec.Struct, frozen=True, kw_only=True):
    """How denoising steps wait for one another.

    Attributes:
        stale: other ranks' ``patches`` are attended to as they were a step before, so that keys and values travel
            beside the step (DistriFusion, 2402.19481); or every one of the pipeline's ``stages`` reads what the one
            before it found a step earlier, so that all work at once (AsyncDiff, 2406.06911). Both change the images.
        halo: the share of its two neighbours' tokens that a patch attends to, and of no others (PCPP, 2412.02962);
            0: all tokens of all patches.
    """

    stale: str = NONE
    halo: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether images are those of one device."""
        return self.stale == NONE and not self.halo


def _alone(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Words that have nothing to act on."""
    said, layout = plan.denoising, plan.layout
    if said == Denoising():
        return
    place, word = f"denoising.stale = {said.stale}", f"stale={said.stale}" if said.stale != NONE else "halo="
    if train.phase != DENOISE:
        help = "drop it, or say images that are made: --denoise size=1024,steps=50"
        yield wrong("P076", f"{word} is about the steps of a diffusion model, and none are taken", place, help)
        return
    if said.stale == PATCHES and layout.cp == 1:
        yield wrong("P076", "stale=patches is about ranks that share an image, and cp=1", place, "say cp2 or more")
    if said.stale == STAGES and layout.pp == 1:
        yield wrong("P076", "stale=stages is about a pipeline, and pp=1", place, "say pp2 or more")
    patches = layout.cp > 1 and (said.stale == PATCHES or said.halo > 0)
    if patches and (plan.head_swap > 1 or plan.sequence.algorithm != "allgather"):
        how = "swaps their heads" if plan.head_swap > 1 else f"passes them round in a {plan.sequence.algorithm}"
        message = f"{word}: keys and values of patches are gathered, and the plan {how}"
        yield wrong("P076", message, place, "say allgather")
    if said.halo and layout.cp == 1:
        message = "halo= is the share of neighbours' patches, and cp=1 has none"
        yield wrong("P076", message, f"denoising.halo = {said.halo:g}", "say cp2 or more")


def _share(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= 1.0 else None


FIELDS = (
    Field(
        name="stale",
        help="what a denoising step reads as it was a step before: other ranks' patches, or what stages pass on",
        form=names(NONE, PATCHES, STAGES),
        spelled=KEYED,
        place=340,
        decides=(STRUCTURE, LAYER),
    ),
    Field(
        name="halo",
        help="share of its two neighbours' tokens that a patch of an image attends to (0: all of all patches)",
        form=Form(
            read=_share,
            write=lambda value: f"{value:g}",
            wanted="a share from 0 to 1",
            ordered=True,
            kind=float,
        ),
        spelled=KEYED,
        place=341,
        decides=(LAYER,),
    ),
)
FACET = Facet(
    name="denoising",
    help="how denoising steps wait for one another",
    record=Denoising,
    fields=FIELDS,
    rules=(_alone,),
)
