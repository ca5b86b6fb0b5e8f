"""From a step to a bill: money and energy of a step, time and cost of a whole training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, isinf, sqrt
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.prediction import Money, TrainingRun
from meshwright.answer.recoveries import RecoveryWay, state_of, ways
from meshwright.causes import JOB
from meshwright.errors import MeshwrightError
from meshwright.lower import Lowered
from meshwright.plan import Plan
from meshwright.quantity import seconds
from meshwright.simulate.job import HOPELESS, JobSizes, expected_s, run_job
from meshwright.spec.cluster import Cluster
from meshwright.spec.workload import Train
from meshwright.timeline import UNKNOWN, Identity
from meshwright.world.decider import LogEntry
from meshwright.world.history import history
from meshwright.world.trace import JobWorld, changes, unknown_nodes

#: Time from an interruption to the first new step: detection, restart, loading. Assumed; flagged where shown.
RESTART_S = 600.0
#: Time between checkpoints where nobody knows how often nodes fail or what a checkpoint takes. Assumed.
USUAL_CHECKPOINT_S = 1800.0
#: Quantiles of the 80% interval.
INTERVAL = (0.1, 0.9)
#: (what, seconds or None for "not included", note)
Line = tuple[str, float | None, str]


def money(cluster: Cluster, plan: Plan, train: Train, step_s: float, *, useful: float = 0.0) -> Money:
    """Price by the device-hour; energy at the devices' rated power and their hosts', times the site's overhead.
    `useful` are the tokens of a step that count, all of them if left out."""
    n, total = plan.num_ranks, cluster.num_devices
    hourly = cluster.total_price_usd_hour()
    usd = None if hourly is None else hourly * n / total * step_s / 3600
    watts = _watts(cluster)
    drawn = None if watts is None else watts * n / total * (cluster.pue or 1.0)
    joules = None if drawn is None else drawn * step_s
    tokens = useful or train.tokens_per_step
    return Money(
        usd_per_step=usd,
        usd_per_million_tokens=None if usd is None else usd / tokens * 1e6,
        joules_per_step=joules,
        joules_per_token=None if joules is None else joules / tokens,
        power_w=drawn,
        source=f"{price_source(cluster)}, rated power from the catalog, all devices at rated power, "
        + (f"PUE {cluster.pue:g}" if cluster.pue else "without the site's overhead (PUE not known)"),
    )


def price_source(cluster: Cluster) -> str:
    """Return the source of the cluster's price, in words."""
    said = cluster.sources.get("price_usd_hour", "")
    if cluster.price_usd_hour is not None:
        return f"price {said}" if said else "price from the cluster's description"
    return "device price from the catalog"


def _watts(cluster: Cluster) -> float | None:
    """Rated power of all devices and their hosts; None when a vendor does not say."""
    watts = 0.0
    for island in cluster.islands:
        if island.device.tdp_w is None:
            return None
        optics = island.device.optics.power_w if island.device.optics is not None else 0.0
        watts += island.num_devices * (island.device.tdp_w + optics + island.node.power_w / island.node.devices)
    return watts


def training_run(
    lowered: Lowered,
    cluster: Cluster,
    plan: Plan,
    train: Train,
    step_s: float,
    interval_s: tuple[float, float],
    draws_s: Sequence[float],
    world: JobWorld | None = None,
    *,
    useful: float = 0.0,
    identity: Identity = UNKNOWN,
    passes_s: float = 0.0,
    on_fewer: Callable[[int], float | None] = lambda devices: None,
) -> TrainingRun:
    """Time and cost for the workload's tokens: steps, checkpoints and failures as separate lines. `interval_s` and
    `draws_s` are of the step time `step_s`; `useful` are the tokens of a step that count, all of them if left out, and
    `identity` says what is asked. `passes_s` are the seconds of a step in which its state does not change, and
    `on_fewer` gives those of a step on fewer devices, None where there is no plan for so few.

    Checkpoints go to the nodes' own drives at their rated speed, at Young's interval sqrt(2 d M) for a write time d
    and a mean time between interruptions M (Young, 1974); failures take what they do on average (Daly, 2006). In a
    `world` they are simulated instead, once for each of its draws.

    Raises:
        MeshwrightError: O004 when the world does not say what the catalog does not know either.
    """
    steps = ceil(train.tokens / useful) if useful else -(-int(train.tokens) // train.tokens_per_step)
    sizes = whole_job(lowered, cluster, steps, step_s, world or JobWorld())
    happened = None
    if world is None:
        lines = _expected(sizes)
        total = sum(seconds for _, seconds, _ in lines if seconds is not None)
        whole = total / step_s  # seconds of the run for each second of a step: lost work aside, lines go with it
        low, high = interval_s[0] * whole, interval_s[1] * whole
        drawn = [float(draw) * whole for draw in draws_s]
    else:
        island = cluster.islands[0]
        nodes = sum(one.num_nodes for one in cluster.islands)
        wrong = unknown_nodes(world.trace or (), nodes, f"--world {world.source}")
        if wrong:
            raise MeshwrightError(wrong)
        state = state_of(lowered, cluster, sum(_stored_bytes(part) for part in lowered.parts))
        found = [
            (way, *_simulated(sizes, way, world, step_s, draws_s))
            for way in ways(
                world, sizes.job, sizes.save_every, sizes.mtbf_s, state, passes_s, island.num_nodes,
                lambda nodes: on_fewer(nodes * island.devices_per_node),
            )
        ]  # fmt: skip
        # of several ways the one that is done first is told in full, after the others' totals
        _, lines, total, drawn, log = min(found, key=lambda one: one[2])
        if len(found) > 1:
            best = min(found, key=lambda one: one[2])[0].name
            lines = [*(_told(one, best) for one in found), *lines]
        happened = history(log, identity)
        low, high = (float(q) for q in np.quantile(drawn, INTERVAL))
    lines.append(("data loading", None, "assumed to be hidden behind compute"))
    lines.append(("evaluation", None, "depends on the run"))
    hourly = cluster.total_price_usd_hour()
    return TrainingRun(
        tokens=train.tokens,
        num_steps=steps,
        seconds=total,
        usd=None if hourly is None else hourly * total / 3600,
        lines=tuple(lines),
        num_devices=cluster.num_devices,
        seconds_interval=(low, high),
        usd_interval=None if hourly is None else (hourly * low / 3600, hourly * high / 3600),
        draws_s=tuple(drawn),
        price_usd_hour=hourly,
        price_source=price_source(cluster),
        timeline=happened,
    )


class WholeJob(NamedTuple):
    """A job, the steps between its checkpoints, and the mean seconds between its failures; None where it is not known
    what a checkpoint or a failure takes, for the reasons in ``lacks``."""

    job: JobSizes
    save_every: int
    mtbf_s: float | None
    lacks: tuple[str, ...]

    def check(self, world: JobWorld, way: RecoveryWay | None = None) -> None:
        """Raise O004 where the `world` leaves out what the catalog does not know either, and O003 where a job with its
        failures does not end on average: a simulation would go through all of them to find that out."""
        if self.lacks:
            help = "say mtbf= or name a trace" if self.mtbf_s is None and world.trace is None else "say save=30s"
            raise MeshwrightError.one("O004", f"the world does not say enough: {'; '.join(self.lacks)}", help=help)
        job, every = (self.job, self.save_every) if way is None else (way.job, way.every)
        if way is not None and job.regroup_s:
            job = msgspec.structs.replace(job, restart_s=job.regroup_s)
        alone_s = job.num_steps * job.step_s + -(-job.num_steps // every) * job.save_s + job.restart_s
        if world.trace is None and expected_s(job, every, self.mtbf_s) > HOPELESS * alone_s:
            work_s = every * job.step_s
            raise MeshwrightError.one(
                "O003",
                f"failures come every {seconds(self.mtbf_s)}, a checkpoint after {seconds(work_s)}"
                f" of steps and {seconds(job.save_s)} to write it: on average the job takes over {HOPELESS:,.0f} times "
                "what it would without failures",
                help="save more often, restart faster, or use fewer nodes",
            )


def whole_job(lowered: Lowered, cluster: Cluster, steps: int, step_s: float, world: JobWorld) -> WholeJob:
    """The sizes of a job as the world says them, else as the catalog knows them."""
    mtbf_h = cluster.interruption_hours()
    mtbf_s = world.mtbf_s or (None if mtbf_h is None else mtbf_h * 3600)
    save_s = _checkpoint_seconds(lowered, cluster) if world.save_s is None else world.save_s
    lacks = []
    if mtbf_s is None and world.trace is None:
        lacks.append("no failure rate in the catalog")
    if save_s is None:
        lacks.append("no drive speed in the catalog")
    every_s = world.checkpoint_s
    if every_s is None:
        every_s = sqrt(2 * save_s * mtbf_s) if save_s and mtbf_s else USUAL_CHECKPOINT_S
    job = JobSizes(
        num_steps=steps,
        step_s=step_s,
        save_s=save_s or 0.0,
        restart_s=RESTART_S if world.restart_s is None else world.restart_s,
        repair_s=world.repair_s,
    )
    return WholeJob(job, min(steps, max(1, round(every_s / step_s))), mtbf_s, tuple(lacks))


def _expected(sizes: WholeJob) -> list[Line]:
    """The lines of a run whose failures are as their mean."""
    job, every = sizes.job, sizes.save_every
    lines: list[Line] = [("steps", job.num_steps * job.step_s, f"{job.num_steps:,} steps of {job.step_s:.3f} s")]
    if sizes.lacks:
        return [*lines, *((what, None, sizes.lacks[0]) for what in ("checkpoints", "failures"))]
    saved = -(-job.num_steps // every) * job.save_s
    lost = max(0.0, expected_s(job, every, sizes.mtbf_s) - lines[0][1] - saved)
    if isinf(lost):
        apart = every * job.step_s / 3600
        never = f"one every {sizes.mtbf_s / 3600:.1f} h, a checkpoint every {apart:,.0f} h: the run never ends"
        return [*lines, ("checkpoints", saved, _saves(job, every)), ("failures", None, never)]
    often = f"one every {sizes.mtbf_s / 3600:.1f} h: work since a checkpoint and {job.restart_s / 60:.0f} min each"
    return [*lines, ("checkpoints", saved, _saves(job, every)), ("failures", lost, often)]


def _simulated(
    sizes: WholeJob, way: RecoveryWay, world: JobWorld, step_s: float, draws_s: Sequence[float]
) -> tuple[list[Line], float, list[float], tuple[LogEntry, ...]]:
    """The lines of the mean run in a world that goes on in one way, its seconds, those of every draw (failures and step
    time drawn), and the log of the first draw."""
    sizes.check(world, way)
    runs = [run_job(way.job, way.decider, changes(world, sizes.mtbf_s, draw)) for draw in range(world.draws)]
    count, job = len(runs), way.job
    mean = {cause.name: sum(run.by_cause[cause.name] for run in runs) / count for cause in JOB}
    failures = sum(run.failures for run in runs) / count
    ready = "a spare for every failed node" if world.spares is None else f"{world.spares} spare nodes"
    notes = {
        "steps": f"{job.num_steps:,} steps of {job.step_s:.3f} s"
        + ("" if len(job.step_of) < 2 else ", or on fewer nodes"),
        "checkpoints": way.keeps,
        "lost": f"work since a checkpoint, {failures:,.1f} failures on average",
        "restarts": f"{way.restarts}; {ready}",
        "waiting": f"for one of the failed nodes, each back after {seconds(job.repair_s)}",
    }
    lines: list[Line] = [(cause.words, mean[cause.name], notes[cause.name]) for cause in JOB]
    # the errors of the costs stretch steps, drawn again for every draw of the world
    others = [run.seconds - run.by_cause["steps"] for run in runs]
    factors = [float(draw) / step_s for draw in draws_s]
    drawn = [
        run.by_cause["steps"] * factors[i % len(factors)] + rest for i, (run, rest) in enumerate(zip(runs, others))
    ]
    return lines, sum(mean.values()), drawn, runs[0].log


def _told(one: tuple, best: str) -> Line:
    """The line of one way to go on among several."""
    way, _, total, *_ = one
    return f"by {way.name}", total, f"{way.keeps}{'; told below' if way.name == best else ''}"


def _saves(job: JobSizes, every: int) -> str:
    return f"{job.save_s:.1f} s every {every:,} steps, {every * job.step_s / 60:.3g} min, blocking"


def _checkpoint_seconds(lowered: Lowered, cluster: Cluster) -> float | None:
    """Parameters and optimizer state, written once, by all nodes at the speed of their drives."""
    node = cluster.islands[0].node
    if not node.nvme_gb_s:
        return None
    state = sum(_stored_bytes(part) for part in lowered.parts)
    per_node = state / len(lowered.static_bytes) * node.devices
    return per_node / (node.nvme_gb_s * 1e9)


def _stored_bytes(lowered: Lowered) -> float:
    """Bytes of a checkpoint, summed over the rank classes of one pool."""
    layout = lowered.plan.layout
    replicas = 1 if layout.zero >= 1 else layout.dp * layout.cp
    return sum(
        (held.get("parameters", 0.0) / (1 if layout.zero == 3 else layout.dp * layout.cp))
        + held.get("optimizer", 0.0) / replicas
        for held in lowered.static_bytes
    )
