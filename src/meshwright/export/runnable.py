"""Engines as a search asks for them: who runs which plans, under whose costs.

Everything that runs plans is here by name: the targets of an export and Meshwright's own executor. ``torchtitan-toml``
is another form of ``torchtitan`` with the same reach, and is not asked about twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.errors import Diagnostic, Infeasible, nearest
from meshwright.export.engines import ENGINES, OWN, refusals
from meshwright.export.gap import Gap
from meshwright.export.request import ExportRequest
from meshwright.export.target import load
from meshwright.plan import Plan, parse
from meshwright.search.engines import Engine, impossible
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: Engines whose plans are asked about where nobody names one, and in which order they are named.
USUAL = ("megatron", "torchtitan", "deepspeed", "accelerate", OWN)
#: The catalog's profile of each engine that has one.
PROFILES = {
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
    "torchtitan-toml": "torchtitan",
    "deepspeed": "deepspeed",
}
#: Values besides the default space's: Megatron-LM overlaps the sends of chunks alone, so a plain 1F1B has to say that
#: it waits for them; DeepSpeed without ZeRO reduces gradients after the last backward.
NEEDS = {"megatron": {"overlap": (("dp",),)}, "deepspeed": {"overlap": ((),)}}
#: What to name an engine that is no target.
LABELS = {OWN: "Meshwright"}


def engine(name: str, model: Model, cluster: Cluster, train: Train) -> Engine:
    """An engine of :data:`ENGINES`, for the plans of one question."""

    def refuses(plan: Plan) -> Sequence:
        return refusals(name, ExportRequest(model=model, cluster=cluster, train=train, plan=plan))

    label = LABELS.get(name) or load(name).title
    return Engine(name=name, label=label, refuses=refuses, needs=NEEDS.get(name, {}), own=name == OWN)


def unknown(names: Iterable[str], place: str) -> list[Diagnostic]:
    """R012 for every name that is no engine, with the nearest."""
    return [
        Diagnostic(code="R012", message=f"no engine {name!r}", place=place, help=nearest(name, list(ENGINES)))
        for name in names
        if name not in ENGINES
    ]


def able(engines: Sequence[Engine], cluster: Cluster) -> tuple[list[Engine], list[str]]:
    """The engines that the question itself does not rule out, and why the others are.

    Raises:
        Infeasible: E001 for all that stands in the way of each, where none is left.
    """
    found = {e.name: impossible(e, _plans(cluster.num_devices)) for e in engines}
    left = [e for e in engines if not found[e.name]]
    if engines and not left:
        raise Infeasible([_refused(e, refusal) for e in engines for refusal in found[e.name]])
    return left, [_refused(e, refusal).message for e in engines for refusal in found[e.name]]


def _plans(devices: int) -> list[Plan]:
    """Plans that have little in common."""
    words = ["zero0", "fsdp", *(["tp2 zero1", "pp2 zero1 1f1b"] if devices % 2 == 0 else [])]
    return [parse(text).on(devices) for text in words]


def _refused(engine: Engine, refusal: Gap) -> Diagnostic:
    return Diagnostic(
        code="E001",
        message=f"{engine.label} cannot run {refusal.value}, whatever the plan: {refusal.reason}",
        place=refusal.facet,
        help=refusal.help,
    )


def profile(names: Sequence[str]) -> str:
    """The framework profile of the one engine that is asked for; "" for several, or where the catalog has none."""
    return PROFILES.get(names[0], "") if len(names) == 1 else ""
