"""Controls of a plan: what each shows, which values it offers, and the plan after one of them is moved.

A stop of a control is a value that is legal with the rest of the plan as it is, or with what :mod:`repair` changes
along with it, which is said beside it. Values that no legal plan has are not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from meshwright import schedules
from meshwright.plan import Plan
from meshwright.plan.facets import fields
from meshwright.plan.facets.overlap import OVERLAPS
from meshwright.plan.written import write
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import TRAINED_DTYPES, Train
from meshwright.ui.repair import MOST_CHUNKS, MOST_MICROBATCH, Effort, RepairPlace, changed, divisors, nearest

#: Stops of one control: more are thinned out, as nobody slides over a thousand.
MOST_STOPS = 24
#: Plans looked at for all stops together, which take some 15 us each.
MOST_LOOKS = 4_000


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the plan that the page can set, and the values worth offering."""

    facet: str
    field: str
    values: Callable[[Plan, RepairPlace], Iterable[Any]]

    @property
    def word(self) -> str:
        """The plan's word for the field, without its number."""
        return {"microbatch": "mb"}.get(self.field, self.field)

    def of(self, plan: Plan) -> Any:
        return getattr(getattr(plan, self.facet), self.field)

    def put(self, plan: Plan, value: Any) -> Plan:
        """`plan` with this value; a schedule brings its own number of chunks, a number of chunks its schedule."""
        if self.field == "schedule":
            return changed(plan, "pipeline", schedule=value, vpp=_chunks(value, plan.pipeline.vpp))
        plan = changed(plan, self.facet, **{self.field: value})
        if self.field == "vpp" and value > 1 and plan.pipeline.schedule == "1f1b":
            plan = changed(plan, "pipeline", schedule="interleaved")
        if self.field == "vpp" and value == 1 and plan.pipeline.schedule == "interleaved":
            plan = changed(plan, "pipeline", schedule="1f1b")
        if self.field == "recompute" and value == "none":
            plan = changed(plan, "memory", layers=0)
        if self.field == "zero" and value == 0:
            plan = changed(plan, "layout", shard=0)
        return plan


def _chunks(schedule: str, now: int) -> int:
    family = schedules.get(schedule)
    if family.vpps:
        return now if now in family.vpps else family.default_vpp
    return now if now > 1 else family.default_vpp


def _devices(plan: Plan, place: RepairPlace) -> Iterable[int]:
    return divisors(place.cluster.num_devices)


def _heads(plan: Plan, place: RepairPlace) -> Iterable[int]:
    most = max((a.heads for a in place.model.attentions), default=place.cluster.num_devices)
    return (d for d in divisors(place.cluster.num_devices) if d <= most)


def _stages(plan: Plan, place: RepairPlace) -> Iterable[int]:
    return (d for d in divisors(place.cluster.num_devices) if d <= place.model.num_layers)


def _experts(plan: Plan, place: RepairPlace) -> Iterable[int]:
    counts = [mixture.experts for mixture in place.model.mixtures]
    return divisors(min(counts)) if counts else (1,)


def _microbatches(plan: Plan, place: RepairPlace) -> Iterable[int]:
    return (mb for mb in range(1, MOST_MICROBATCH + 1) if place.train.global_batch % mb == 0)


def _vpps(plan: Plan, place: RepairPlace) -> Iterable[int]:
    if plan.layout.pp == 1:  # without a pipeline chunks follow each other on the same rank
        return (1,)
    return range(1, min(place.model.num_layers // plan.layout.pp, MOST_CHUNKS) + 1)


def _always(*values: Any) -> Callable[[Plan, RepairPlace], Iterable[Any]]:
    return lambda plan, place: values


def _schedules(plan: Plan, place: RepairPlace) -> Iterable[str]:
    return tuple(dict.fromkeys((*schedules.families(), plan.pipeline.schedule)))


#: Name on the page -> the field it sets.
CONTROLS: dict[str, Control] = {
    "tp": Control(facet="layout", field="tp", values=_heads),
    "pp": Control(facet="layout", field="pp", values=_stages),
    "dp": Control(facet="layout", field="dp", values=_devices),
    "cp": Control(facet="layout", field="cp", values=_devices),
    "ep": Control(facet="experts", field="ep", values=_experts),
    "mb": Control(facet="pipeline", field="microbatch", values=_microbatches),
    "vpp": Control(facet="pipeline", field="vpp", values=_vpps),
    "schedule": Control(facet="pipeline", field="schedule", values=_schedules),
    "zero": Control(facet="layout", field="zero", values=_always(0, 1, 2, 3)),
    "recompute": Control(facet="memory", field="recompute", values=_always(*fields()["recompute"].form.names)),
    "sp": Control(facet="layout", field="sp", values=_always(False, True)),
    "algorithm": Control(facet="sequence", field="algorithm", values=_always(*fields()["algorithm"].form.names)),
    "compute": Control(facet="precision", field="compute", values=_always("", *TRAINED_DTYPES)),
    **{f"overlap_{name}": Control(facet="overlap", field=name, values=_always(False, True)) for name in OVERLAPS},
}


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """A value that can be chosen, and what else it changes, in words ("" for nothing)."""

    value: Any
    also: str


class Shown(msgspec.Struct, frozen=True):
    """A control's value and its stops."""

    value: Any
    stops: tuple[Choice, ...]


def moved(
    plan: Plan, name: str, value: Any, model: Model, cluster: Cluster, train: Train, *, effort: Effort | None = None
) -> Plan | None:
    """The nearest legal plan in which the control has the value; None when none is found with the effort."""
    control = CONTROLS[name]
    pinned = frozenset({(control.facet, control.field)})
    started = control.put(plan if name == "dp" else changed(plan, "layout", dp=0), value)
    found = nearest(started, RepairPlace(model, cluster, train, pinned, effort or Effort()))
    return None if found is None else _open(found, cluster)


def _open(plan: Plan, cluster: Cluster) -> Plan:
    """`plan` without its ``dp`` where that follows from the others."""
    free = changed(plan, "layout", dp=0)
    return free if free.on(cluster.num_devices).layout.dp == plan.layout.dp else plan


def shown(plan: Plan, model: Model, cluster: Cluster, train: Train) -> dict[str, Shown]:
    """Every control of a plan with its stops."""
    full = plan.on(cluster.num_devices)
    place = RepairPlace(model, cluster, train)
    before = write(changed(full, "layout", dp=0)).split()
    out, effort = {}, Effort(MOST_LOOKS)
    for name, control in CONTROLS.items():
        now = control.of(full)
        offered = []
        for value in _thinned(control.values(full, place), now):
            way = moved(plan, name, value, model, cluster, train, effort=effort)
            if way is not None:
                offered.append(Choice(value, "" if value == now else _also(before, way, control)))
        if all(stop.value != now for stop in offered):
            offered.append(Choice(now, ""))
        if all(isinstance(stop.value, int) for stop in offered):
            offered.sort(key=lambda stop: stop.value)
        out[name] = Shown(now, tuple(offered))
    return out


def _thinned(values: Iterable[Any], now: Any) -> list[Any]:
    found = list(values)
    if len(found) <= MOST_STOPS:
        return found
    step = -(-len(found) // MOST_STOPS)
    return [v for i, v in enumerate(found) if i < MOST_STOPS // 2 or i % step == 0 or v == now]


def _also(before: list[str], after: Plan, control: Control) -> str:
    """List the words that a move changes besides its own: ``pp2, mb1``; a number that is no longer said is one."""
    words = write(changed(after, "layout", dp=0)).split()
    own = write(changed(control.put(Plan(), control.of(after)), "layout", dp=0)).split()
    new = [w for w in words if w not in before and w not in own]
    said = {w.rstrip("0123456789") for w in (*words, *own)}
    for word in before:
        name = word.rstrip("0123456789")
        if name != word and name not in said and name != control.word:
            new.append(f"{name}1" if name != "zero" else "zero0")
        elif word in schedules.families() and word not in words and after.pipeline.schedule not in (*new, *own):
            new.append(after.pipeline.schedule)
    return ", ".join(dict.fromkeys(new))
