"""Zoom: the operators of one layer and pass on their own timeline, one level below the step."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.lower import Lowered
from meshwright.lower.entry import graph_of, structure_of
from meshwright.simulate.engine import times
from meshwright.simulate.layer import estimates_of
from meshwright.spec.architecture import EMBEDDING, HEAD
from meshwright.timeline import Zoom, from_times
from meshwright.work import Collective

WORDS = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "backward"}


def zooms(lowered: Lowered, costs: Costs) -> tuple[Zoom, ...]:
    """A timeline per distinct unit (kind of layer and recompute mode) and pass of the plan, on its first device."""
    device = lowered.mesh.slices[0].devices[0]
    lag = device.slowest_of(lowered.num_ranks)
    passes = ("F", "B", "W") if any(p.which == "W" for p in lowered.programs) else ("F", "BW")
    units = dict.fromkeys(u for c in dict.fromkeys(lowered.stages.compositions) for u in c.units)
    out = []
    owner = f"{lowered.pool}: " if lowered.pool else ""
    for unit in units:
        several = len(lowered.stages.model.blocks) > 1
        label = {EMBEDDING: "embedding", HEAD: "head"}.get(
            unit.kind, "layer" + (f" of kind {unit.kind}" if several else "")
        )
        mode = "" if unit.recompute == "none" else f" with {unit.recompute} recompute"
        for which in passes:
            entries = lowered.stages.layer_pass(unit, which).entries
            if not entries:
                continue
            graph = graph_of(structure_of(entries))
            estimates = estimates_of(entries, device, costs, lag)
            seconds = np.array([e.seconds for e in estimates])
            start, end = times(graph, seconds)
            order = graph.attribute("layer")
            causes = [
                e.queue if isinstance(e.work, Collective) else "recompute" if e.again else estimate.cause
                for e, estimate in zip(entries, estimates)
            ]
            parts = {c: np.where([x == c for x in causes], seconds, 0.0) for c in dict.fromkeys(causes)}
            named = msgspec.structs.replace(
                graph,
                keys=tuple(f"{e.name} [{estimate.source}]" for e, estimate in zip(entries, estimates)),
                cost_key=order.astype(np.int32),
            )
            out.append(
                Zoom(
                    name=owner + f"{WORDS[which]} of the {label}{mode}"
                    if not unit.is_block
                    else owner + f"{WORDS[which]} of a {label}{mode}",
                    timeline=from_times(named, start, end, parts=parts),
                )
            )
    return tuple(out)
