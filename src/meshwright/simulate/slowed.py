"""A step with slow ranks and links: data-parallel replicas apart, and every task as much longer as what it runs on.

Ranks of one tensor- or context-parallel group wait for one another inside of every pass, and are as slow as the slowest
of them. A collective is as slow as the slowest link of a ring over its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.graph import KIND, QUEUE, QUEUES, TaskGraph
from meshwright.lower import Lowered, bind, structured
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.simulate import engine
from meshwright.simulate.price import Priced, Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.world.slow import SlowStep


class SlicesApart(NamedTuple):
    """The step of a plan with its data-parallel slices in classes of their own, priced, and the real ranks of every
    class and pipeline rank."""

    lowered: Lowered
    priced: Priced
    ranks: dict[tuple[int, int], list[int]]


def apart(run: Simulated, costs: Costs, members: Sequence[tuple[int, ...]] = ()) -> SlicesApart:
    """The step of a simulated plan, with slices in classes of these `members` (indices along dp), () for each alone.

    Raises:
        MeshwrightError: O006 for plans whose steps are not told apart by ranks.
    """
    lowered = run.lowered
    if lowered.several:
        raise MeshwrightError.one("O006", "slow ranks are not simulated in a plan of several pools", place="--world")
    plan, stages = lowered.plan, lowered.stages
    if plan.trainers < plan.layout.dp:
        message = f"ranks are slow in passes, and {plan.layout.dp - plan.trainers} of the plan's replicas only sum"
        raise MeshwrightError.one("O006", message, place="--world", help="drop aux= from sync=, or the slow ranks")
    members = tuple(members) or tuple((d,) for d in range(plan.layout.dp))
    mesh = Mesh(plan, lowered.mesh.cluster, apart=members)
    unfolded = Stages(plan, stages.model, stages.train, mesh, stages.known, stages.batch)
    found = bind(structured(unfolded, run.schedule_params or None, {}), unfolded, costs.framework.defaults.bucket_bytes)
    return SlicesApart(found, Pricer(costs).all(found.programs), _ranks(plan.layout, members))


def slowed(run: Simulated, costs: Costs, slow: SlowStep) -> Simulated:
    """The step of a simulated plan, whose ranks are alike, when some of them and some links are slow.

    Raises:
        MeshwrightError: O006 for ranks that there are not, and for plans whose steps are not told apart by ranks.
    """
    plan = run.lowered.plan
    found, priced, ranks = apart(run, costs)
    factor = factors(found.graph, ranks, slow, plan.layout.num_ranks)
    keyed, back = np.unique(np.stack((found.graph.cost_key, factor)), axis=1, return_inverse=True)
    keys, times = keyed[0].astype(np.int64), keyed[1]
    graph = msgspec.structs.replace(
        found.graph,
        cost_key=back.reshape(-1).astype(np.int32),
        keys=tuple(found.graph.keys[key] for key in keys.tolist()),
        streams=_named(found.graph, ranks, plan.layout),
    )
    longer = _longer(priced, keys, times)
    # ports and cores that ranks share lengthen the slow step as they do the even one
    even = float(engine.times(found.graph, priced.durations)[1].max(initial=0.0))
    shared = run.step_time_s / even if even > 0 else 1.0
    start, end = engine.times(graph, longer.durations)
    whole: Lowered = msgspec.structs.replace(
        found, graph=graph, programs=tuple(found.programs[key] for key in keys.tolist())
    )
    out = Simulated.of(whole, longer, (start * shared, end * shared), costs, run.schedule_params)
    return msgspec.structs.replace(out, step_sigma=run.step_sigma, fitted=run.fitted)


def _ranks(layout, members: Sequence[tuple[int, ...]]) -> dict[tuple[int, int], list[int]]:
    """The real ranks of every class of slices and pipeline rank."""
    found: dict[tuple[int, int], list[int]] = {}
    class_of = {d: number for number, some in enumerate(members) for d in some}
    for rank in range(layout.num_ranks):
        place = (class_of[rank // layout.stride("dp") % layout.dp], rank // layout.stride("pp") % layout.pp)
        found.setdefault(place, []).append(rank)
    return found


def factors(graph: TaskGraph, ranks: dict, slow: SlowStep, num_ranks: int) -> NDArray[np.float64]:
    """Times that every task takes over what it would [tasks]."""
    computing = slow.computing(num_ranks)
    classes = [ranks[max(one.slice, 0), one.stage] for one in graph.streams.ranks]
    own = np.array([max(computing[some]) for some in classes])
    stage, microbatch = graph.attribute("stage").tolist(), graph.attribute("microbatch").tolist()
    of_stream = graph.streams.rank
    home = {
        (graph.streams.ranks[of_stream[graph.member[graph.member_ptr[i]]]].slice, stage[i], microbatch[i]): int(
            of_stream[graph.member[graph.member_ptr[i]]]
        )
        for i in np.flatnonzero(graph.kind == KIND["F"]).tolist()
    }
    out = np.ones(graph.num_tasks)
    for i in range(graph.num_tasks):
        members = of_stream[graph.member[graph.member_ptr[i] : graph.member_ptr[i + 1]]].tolist()
        queue = QUEUES[graph.streams.queue[graph.member[graph.member_ptr[i]]]]
        if queue == "compute":
            out[i] = max(own[members])
        elif graph.kind[i] == KIND["send"]:
            step = 1 if graph.streams.queue[graph.member[graph.member_ptr[i]]] == QUEUE["pp_forward"] else -1
            one = graph.streams.ranks[members[0]]
            target = home.get((one.slice, stage[i] + step, microbatch[i]))
            if target is not None:
                out[i] = max(slow.sending(a, b) for a, b in zip(classes[members[0]], classes[target]))
        else:
            out[i] = _ring([rank for member in members for rank in classes[member]], slow)
    return out


def _ring(ranks: list[int], slow: SlowStep) -> float:
    """Times that a collective over ranks takes: those of the slowest link of a ring over them."""
    inside = sorted(set(ranks))
    if len(inside) < 2 or not (slow.slowlink or slow.slownic):
        return 1.0
    return max(slow.sending(a, b) for a, b in zip(inside, (*inside[1:], inside[0])))


def _named(graph: TaskGraph, ranks: dict, layout):
    """The streams of the graph, whose rank classes say which replica they are of, as those of a run do."""
    wide = layout.dp > 1
    named = tuple(
        msgspec.structs.replace(
            one,
            slice=-1,
            at=(("dp", max(one.slice, 0)),) if wide else (),
            multiplicity=len(ranks[max(one.slice, 0), one.stage]),
        )
        for one in graph.streams.ranks
    )
    return msgspec.structs.replace(graph.streams, ranks=named)


def _longer(priced: Priced, keys: NDArray[np.int64], times: NDArray[np.float64]) -> Priced:
    """The prices of keys, each so many times as long."""
    return Priced(
        parts=priced.parts[keys] * times[:, None],
        spread=priced.spread[keys] * times[:, None],
        flops=priced.flops[keys],
        repeated=priced.repeated[keys],
        wait=priced.wait[keys] * times,
    )
