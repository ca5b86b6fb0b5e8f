"""Overlap: the communication that is overlapped with compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan.facet import EXCHANGE, KEYED, LAYER, STRUCTURE, Facet, Field, Form, unrun

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


OVERLAPS = ("dp", "tp", "pp", "ep")
#: A mark in a search's value, beside the overlapped exchanges: for those schedules alone whose usual overlap that is.
AS_DECIDED = "usual"


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """The communication overlapped with compute: ``dp`` gradient and parameter exchange, ``tp`` inside a layer
    (collective matmul, Wang et al. ASPLOS'23), ``pp`` sends between stages, ``ep`` the exchange of experts' tokens
    with another microbatch's layers (DeepSeek-V3, 2412.19437, section 3.2.1; Megatron-Core's 1F1B overlap of it)."""

    dp: bool = True
    tp: bool = False
    pp: bool = True
    ep: bool = False


def usual_of(ep: int, schedule: str) -> Overlap:
    """The overlap of plans whose words say none: the default, and the experts' exchange under a schedule made to hide
    it (DualPipe). Everything that leaves the overlap open asks this, predictions and searches alike."""
    return Overlap(ep=True) if ep > 1 and schedules.get(schedule).hides_experts else Overlap()


def usual(plan: Plan) -> Overlap:
    """The overlap of this plan if its words say none."""
    return usual_of(plan.experts.ep, plan.pipeline.schedule)


def _read(text: str) -> tuple[str, ...]:
    asked = tuple(sorted({word for word in text.split(",") if word and word != "none"}))
    unknown = [word for word in asked if word not in OVERLAPS]
    if unknown:
        help = f"choose among {', '.join(OVERLAPS)}, or none"
        raise MeshwrightError.one("P002", f"overlap={','.join(unknown)} is unknown", help=help)
    return asked


def _write(value: tuple[str, ...]) -> str:
    return ",".join(name for name in OVERLAPS if name in value) or "none"


def overlapped(overlap: Overlap) -> tuple[str, ...]:
    """Return the names of the overlapped exchanges, sorted, as a search writes them."""
    return tuple(sorted(name for name in OVERLAPS if getattr(overlap, name)))


def _words(plan: Plan) -> list[str]:
    return [] if plan.overlap == usual(plan) else [f"overlap={_write(overlapped(plan.overlap))}"]


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    if plan.overlap.ep:
        message = "expert exchange overlapped with compute is priced and not run"
        yield unrun("P033", message, plan, "overlap", "ep", ep=False)
    if plan.overlap.tp and plan.layout.tp > 1:
        message = "products sliced to overlap with their collective are priced and not run"
        yield unrun("P033", message, plan, "overlap", "tp", tp=False)


FIELDS = (
    Field(
        name="overlap",
        attribute=OVERLAPS,
        help="communication overlapped with compute (usual: as the schedule decides)",
        form=Form(
            read=_read,
            write=_write,
            wanted=f"some of {', '.join(OVERLAPS)}, or none",
            kind=tuple[str, ...],
        ),
        spelled=KEYED,
        place=290,
        decides=(STRUCTURE, LAYER, EXCHANGE),
        seen={LAYER: lambda plan: (plan.overlap.tp, plan.overlap.ep)},
        stored=lambda value: {name: name in value for name in OVERLAPS},
        of=overlapped,
        domain=lambda model, cluster, train: ((*overlapped(Overlap()), AS_DECIDED),),
        say=_words,
    ),
)
FACET = Facet(
    name="overlap",
    help="communication overlapped with compute",
    record=Overlap,
    fields=FIELDS,
    unexecutable=_unexecutable,
    usual=usual,
)
