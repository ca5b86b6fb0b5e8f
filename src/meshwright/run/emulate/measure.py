"""Predict a plan on emulated hosts, run it on them, and lay the two side by side."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median, quantiles
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.causes import CAUSE, of_kind
from meshwright.compare.measured import COLLECTIVES, in_turn, real_rank
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.graph import KIND, KINDS
from meshwright.lower import Lowered
from meshwright.plan import Plan, Sync, check
from meshwright.run.emulate.hosts import EmulatedTimes, Hosts
from meshwright.run.emulate.network import Links, calibrate, emulated, emulated_costs
from meshwright.run.emulate.script import Script, script_of
from meshwright.simulate import engine
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.timeline import Identity, Timeline
from meshwright.world.slow import SlowStep
from meshwright.world.trace import JobWorld

#: What the busiest rank's kernels take in a step when nobody says a scale.
COMPUTE_S = 0.6
MAX_RANKS = 32
#: A sleep that ends so late was not slept on a machine that ran; steps are then measured again, in so many rounds.
STOOD_STILL_S, ROUNDS = 0.005, 4


class Emulated(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's prediction beside its measured steps.

    Exchanges that meet on a rank's port share it (``simulate/ports.py``); ``apart_s`` is the predicted step if they
    passed each other. ``steps_s`` are the measured step times after the
    warm-up, ``timeline`` all of them one after another, every rank apart. ``disturbed`` steps more were left out,
    because the machine stood still in them. ``late_s`` is the 95th percentile of how much later than meant a sleep
    ended: far below a task's length, or the machine was too busy to believe the steps.

    ``shaped_by`` says what kept the rate and the delay of links.

    Of steps that were ``executed`` (:mod:`meshwright.run.emulate.executed`) ``steps_s`` are the means of whole rounds,
    ``sent_bytes`` those of a rank's link in a step, headers included, and ``outside_s`` what a rank computed in a step
    beside its passes. ``same_steps_s``: a step predicted for the paces that ranks had in the measured ones, where these
    vary; the prediction is the mean over many.
    """

    prediction: Prediction
    apart_s: float
    links: Links
    cluster: Cluster
    scale: float
    steps_s: tuple[float, ...]
    disturbed: int
    late_s: float
    timeline: Timeline
    shaped_by: str = "tbf"
    executed: bool = False
    sent_bytes: float = 0.0
    outside_s: float = 0.0
    same_steps_s: float | None = None

    @property
    def step_time_s(self) -> float:
        """The median of the measured steps, or where ranks vary from step to step their mean."""
        return median(self.steps_s) if self.same_steps_s is None else fmean(self.steps_s)

    @property
    def spread_s(self) -> tuple[float, float]:
        """Fastest and slowest step."""
        return min(self.steps_s), max(self.steps_s)

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, of the same paces where ranks vary."""
        return (self.same_steps_s or self.prediction.step_time_s) / self.step_time_s - 1

    @property
    def apart_error(self) -> float:
        """The relative error of the predicted step in which exchanges do not share ports."""
        return self.apart_s / self.step_time_s - 1


def emulate(
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    *,
    rate_bits_s: float,
    delay_s: float = 0.0,
    repeats: int = 5,
    scale: float | None = None,
    ranks_per_host: int = 1,
    begun: Callable[[], None] = lambda: None,
    expected: Callable[[float], None] = lambda seconds: None,
    slow: SlowStep | None = None,
) -> Emulated:
    """Run `plan` on emulated hosts with links of `rate_bits_s` and `delay_s`, whose kernels take `scale` times what
    they take on `cluster`'s devices, and on `slow` ranks longer. `begun` is called once nothing is left to refuse,
    `expected` with the seconds that all steps should take, before the first.

    Raises:
        MeshwrightError: every violation of the plan; U001 when this machine cannot emulate, U002 when it failed, U003
            for sizes that are not emulated.
    """
    plan = plan.on(cluster.num_devices)
    refuse(model, cluster, train, plan, ranks_per_host)
    ranks = plan.layout.num_ranks
    with Hosts(ranks // ranks_per_host, rate_bits_s, ranks_per_host, delay_s=delay_s) as hosts:
        begun()
        links, limits = calibrate(hosts), {"repeats": repeats, "scale": scale, "slow": slow}
        return on_hosts(hosts, links, model, cluster, train, plan, expected=expected, **limits)


def refuse(model: Model, cluster: Cluster, train: Train, plan: Plan, ranks_per_host: int) -> None:
    """Raise what :func:`emulate` raises for a plan that is illegal or not emulated step by step."""
    refuse_sizes(model, cluster, train, plan, ranks_per_host)
    if plan.sync != Sync():
        raise MeshwrightError.one(
            "U003",
            f"sync={plan.sync.policy}: steps of a round differ, and those of a script are all alike",
            place="meshwright emulate",
            help="drop sync, or leave --world out: then steps are executed",
        )


def refuse_sizes(model: Model, cluster: Cluster, train: Train, plan: Plan, ranks_per_host: int) -> None:
    """Raise the violations of a plan, and U003 for ranks that are too many or too few for the hosts."""
    found = check(plan, model, cluster, train)
    if found:
        raise MeshwrightError(found)
    ranks = plan.layout.num_ranks
    if ranks > MAX_RANKS or ranks % ranks_per_host or len(cluster.islands) != 1:
        islands = f" on {len(cluster.islands)} islands" if len(cluster.islands) > 1 else ""
        raise MeshwrightError.one(
            "U003",
            f"{ranks} ranks{islands}, {ranks_per_host} a host, are not emulated",
            place="meshwright emulate",
            help=f"at most {MAX_RANKS} ranks, a whole number of hosts, one island",
        )


def on_hosts(
    hosts: Hosts,
    links: Links,
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    *,
    repeats: int = 5,
    scale: float | None = None,
    compute_s: float = COMPUTE_S,
    expected: Callable[[float], None] = lambda seconds: None,
    slow: SlowStep | None = None,
) -> Emulated:
    """Predict and run a legal plan on hosts that are there and measured; without a `scale` the busiest rank's kernels
    take `compute_s`. `expected` is called with the seconds that all steps should take."""
    ready = prepare(hosts, links, model, cluster, train, plan, scale=scale, compute_s=compute_s, slow=slow)
    run, prediction, script = ready.run, ready.prediction, ready.script
    lowered = run.lowered
    expected((repeats + 1) * prediction.step_time_s)
    timeout = 60.0 + 10 * (repeats + 1) * prediction.step_time_s
    measured, disturbed = _undisturbed(hosts, script, repeats, timeout)
    steps = measured.times[:, :, 1].max(axis=1)
    sleeps = measured.late[measured.late != 0]
    return Emulated(
        prediction=prediction,
        apart_s=float(engine.times(lowered.graph, run.priced.durations)[1].max()),
        links=links,
        cluster=ready.cluster,
        scale=ready.scale,
        steps_s=tuple(steps.tolist()),
        disturbed=disturbed,
        shaped_by=hosts.shaped_by,
        late_s=quantiles(sleeps.tolist(), n=20)[-1] if len(sleeps) > 1 else 0.0,
        timeline=in_turn(
            [
                timeline_of(lowered, script, measured, number, prediction.timeline.identity)
                for number in range(len(steps))
            ],
            steps.tolist(),
        ),
    )


class Prepared(NamedTuple):
    """A step that is ready for emulated hosts: they as a ``cluster``, how many times slower than its device a rank
    computes, the step predicted and simulated there, and what every rank does."""

    cluster: Cluster
    scale: float
    prediction: Prediction
    run: Simulated
    script: Script


def prepare(
    hosts: Hosts,
    links: Links,
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    *,
    scale: float | None,
    compute_s: float = COMPUTE_S,
    slow: SlowStep | None = None,
) -> Prepared:
    """Return a legal plan's step, ready for hosts that are there and measured; without a `scale` the busiest rank's
    kernels take `compute_s`."""
    target = emulated(cluster, links, hosts)
    if scale is None:
        scale = compute_s * _slowing(model, cluster, target, train, plan, links)
    costs = emulated_costs(cluster, links, scale)
    world = None if slow is None else JobWorld(slow=slow, of_job=False)
    prediction = predict(model, target, train, plan, costs=costs, detail=False, world=world)
    run = simulate(plan, model, target, train, costs)
    script = script_of(run.lowered, costs)
    if slow is not None:
        for ops, factor in zip(script.ranks, slow.computing(len(script.ranks)).tolist()):
            for op in ops:
                op.seconds *= factor
    return Prepared(target, scale, prediction, run, script)


def _undisturbed(hosts: Hosts, script: Script, repeats: int, timeout_s: float) -> tuple[EmulatedTimes, int]:
    """`repeats` steps after a warm-up in which no sleep ended far too late, and how many others there were: a machine
    that stood still says nothing of the plan. All of them where so many cannot be had in a few rounds."""
    final = [
        first + max(i for i, op in enumerate(ops) if script.streams[op.stream] == "compute")
        for first, ops in zip(script.first_op, script.ranks)
    ]  # nothing waits for a rank's last kernel, so its waking does not matter
    times, late = [], []
    for _ in range(ROUNDS):
        found = hosts.run(script, repeats + 1, timeout_s=timeout_s)
        times.append(found.times[1:])
        late.append(found.late[1:])
        everything = EmulatedTimes(times=np.concatenate(times), late=np.concatenate(late))
        mattered = np.delete(everything.late, final, axis=1).max(axis=1, initial=0.0)
        good = np.flatnonzero(mattered <= STOOD_STILL_S)
        if len(good) >= repeats:
            break
    bad = len(mattered) - len(good)
    chosen = good[:repeats] if len(good) >= repeats else np.arange(len(mattered))
    return EmulatedTimes(times=everything.times[chosen], late=everything.late[chosen]), bad


def _slowing(model: Model, cluster: Cluster, target: Cluster, train: Train, plan: Plan, links: Links) -> float:
    """Return the factor on kernel times with which the busiest rank's kernels take one second a step."""
    costs: Costs = emulated_costs(cluster, links, 1.0)
    run = simulate(plan, model, target, train, costs)
    graph, parts = run.lowered.graph, run.priced.parts
    kernels = parts[:, [CAUSE[cause] for cause in of_kind("kernel")]].sum(axis=1)[graph.cost_key]
    rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    return 1 / float(np.bincount(rank, weights=kernels).max())


def timeline_of(lowered: Lowered, script: Script, measured: EmulatedTimes, step: int, identity: Identity) -> Timeline:
    """The spans of one measured step, with the keys of the simulated one, for every real rank. A message ends when it
    has arrived, which its receiver knows; a collective starts when its last rank comes, as waiting is no part of it."""
    graph, times = lowered.graph, measured.times[step]
    own = [r // lowered.mesh.layout.stride("pp") % lowered.mesh.layout.pp for r in range(len(script.ranks))]
    rows: list[tuple[int, int, int, float, float]] = []  # task, rank, stream, start, end
    together: dict[tuple[int, int], list[int]] = {}  # (task, channel) -> rows
    sent: dict[tuple[int, int], int] = {}  # (task, sending rank) -> row
    for rank, ops in enumerate(script.ranks):
        at, began, ended = script.first_op[rank], {}, {}
        channel = {op.task: op.channel for op in ops}
        for i, op in enumerate(ops):
            start, end = times[at + i]
            began[op.task] = min(began.get(op.task, start), start)
            ended[op.task] = max(ended.get(op.task, end), end)
        for task in sorted(began):
            for stream in graph.member[graph.member_ptr[task] : graph.member_ptr[task + 1]]:
                if graph.streams.rank[stream] == own[rank]:
                    sent[task, rank] = len(rows)
                    if KINDS[graph.kind[task]] in COLLECTIVES:
                        together.setdefault((task, channel[task]), []).append(len(rows))
                    rows.append((task, rank, int(stream), began[task], ended[task]))
    arrived: dict[tuple[int, int], float] = {}
    for rank, ops in enumerate(script.ranks):
        for i, op in enumerate(ops):
            source = op.peer if op.what == "recv" else -1
            if (
                graph.kind[op.task] == KIND["send"]
                and graph.streams.rank[graph.member[graph.member_ptr[op.task]]] != own[rank]
            ):
                source = source if source >= 0 else arrived_from(ops, op)
                key = (op.task, source)
                arrived[key] = max(arrived.get(key, 0.0), float(times[script.first_op[rank] + i, 1]))
    task, rank, stream, start, end = (np.array(column) for column in zip(*rows))
    for key, at in arrived.items():
        end[sent[key]] = at
    for members in together.values():
        start[members] = np.minimum(start[members].max(), end[members])
    return Timeline(
        ranks=tuple(real_rank(lowered.mesh.layout, r) for r in range(len(script.ranks))),
        task=task.astype(np.int32),
        rank=rank.astype(np.int32),
        queue=graph.streams.queue[stream],
        kind=graph.kind[task],
        attributes=graph.attributes[:, task],
        start_s=start.astype(np.float64),
        end_s=end.astype(np.float64),
        waited_for=_waited(lowered, task, rank, stream, start, end),
        cost_key=graph.cost_key[task],
        keys=graph.keys,
        identity=identity,
    )


def arrived_from(ops, op) -> int:
    """Who sent what `op` gathers."""
    return next(o.peer for o in ops if o.what == "recv" and o.task == op.task)


def _waited(lowered: Lowered, task, rank, stream, start, end) -> np.ndarray:
    """For every span the one whose end let it start: of those before it on its stream and of what its task depends on,
    here or from another rank, the last to end."""
    graph = lowered.graph
    spans: dict[int, list[int]] = {}
    last: dict[tuple[int, int], int] = {}
    before = np.full(len(task), -1)
    for i in np.argsort(start, kind="stable").tolist():
        before[i] = last.get((int(rank[i]), int(stream[i])), -1)
        last[int(rank[i]), int(stream[i])] = i
        spans.setdefault(int(task[i]), []).append(i)
    out = np.full(len(task), -1, np.int32)
    for i, t in enumerate(task.tolist()):
        among = [int(before[i])] if before[i] >= 0 else []
        for d in graph.dep[graph.dep_ptr[t] : graph.dep_ptr[t + 1]].tolist():
            here = [s for s in spans.get(d, ()) if rank[s] == rank[i]]
            among += here or spans.get(d, [])
        among = [s for s in among if end[s] <= start[i] + 1e-3 and s != i]
        if among:
            out[i] = max(among, key=lambda s: end[s])
    return out
