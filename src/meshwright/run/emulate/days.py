"""A job over days, replayed in seconds on emulated hosts, beside the simulation of the same job in the same world.

The job of a question, with its checkpoints and the world that it meets, is made small: a step on emulated hosts stands
for many of its steps, and every other time of it (between failures, of checkpoints, restarts and repairs) is divided by
the same factor. One decider answers for the small job as it is simulated (``simulate/job.py``) and as real processes
live through it (:mod:`.lifetime`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile, zip_longest
from math import ceil, inf

import msgspec

from meshwright.answer.outlook import WholeJob, whole_job
from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.cost import standard_on
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.run.emulate.hosts import Hosts
from meshwright.run.emulate.lifetime import BETWEEN_S
from meshwright.run.emulate.measure import COMPUTE_S, Prepared, prepare, refuse
from meshwright.run.emulate.network import Links, calibrate, emulated_costs
from meshwright.run.emulate.orders import Lived
from meshwright.simulate.job import JobRun, JobSizes, run_job
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.world.decider import LogEntry
from meshwright.world.recovery import Recovery
from meshwright.world.trace import JobWorld, WorldEvent, changes, unknown_nodes

#: How far from its simulated time an event of the job, its end included, may be measured: a share of the job's length.
TOLERANCE = 0.05
#: The shortest restart: processes need about so long to start and to meet. And the longest job here.
LEAST_RESTART_S, MOST_S = 0.5, 1800.0
PLACE = "meshwright emulate --world"


class EmulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job made small, as it was ``simulated`` and as it was ``lived``, times in seconds of the emulation, each of
    which is ``faster`` seconds of the job.

    ``prediction`` is of a step on the emulated hosts, ``whole`` the job as it was asked for and ``whole_s`` its seconds
    in the same world, simulated with all its steps; ``sizes`` and ``decider`` are of the small job, in whose steps are
    the ``pause_s`` between them.
    """

    prediction: Prediction
    scale: float
    whole: WholeJob
    whole_s: float
    faster: float
    sizes: JobSizes
    decider: Recovery
    simulated: JobRun
    lived: Lived
    tolerance: float = TOLERANCE
    pause_s: float = BETWEEN_S

    @property
    def error(self) -> float:
        """(simulated - measured) / measured, of the whole job."""
        return self.simulated.seconds / self.lived.seconds - 1

    @property
    def pairs(self) -> tuple[tuple[LogEntry | None, LogEntry | None], ...]:
        """Return the simulated and the measured log, event by event; None where only one has another."""
        return tuple(zip_longest(self.simulated.log, self.lived.run.log))

    @property
    def agrees(self) -> bool:
        """Whether both have the same events, decided alike, each at its simulated time within the
        ``tolerance``, a share of the job's length."""
        within = self.tolerance * self.simulated.seconds
        return all(same(*pair) and abs(pair[0].at_s - pair[1].at_s) <= within for pair in self.pairs)


def same(simulated: LogEntry | None, measured: LogEntry | None) -> bool:
    """Whether two entries of a log say the same event, answered by the same decisions."""
    if simulated is None or measured is None:
        return False
    return (simulated.event, simulated.decisions) == (measured.event, measured.decisions)


def emulate_job(
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    world: JobWorld,
    *,
    num_steps: int,
    rate_bits_s: float,
    delay_s: float = 0.0,
    scale: float | None = None,
    ranks_per_host: int = 1,
    compute_s: float = COMPUTE_S,
    begun: Callable[[], None] = lambda: None,
    expected: Callable[[float], None] = lambda seconds: None,
) -> EmulatedJob:
    """Live through the whole run of a workload in the first draw of a `world`, with `num_steps` steps on emulated hosts
    in the place of all its steps. Rates and scales are those of :func:`.measure.emulate`; `begun` is called once
    the question is found to be good, `expected` with the seconds that the job should take, before it begins.

    Raises:
        MeshwrightError: what :func:`.measure.emulate` raises; O003 and O004 as a prediction in that world does; U005
            for a job that cannot be made so small, or in which nothing happens.
    """
    plan = plan.on(cluster.num_devices)
    refuse(model, cluster, train, plan, ranks_per_host)
    whole = _whole(model, cluster, train, plan, world)
    every = _every(whole, num_steps)
    everything = run_job(
        whole.job, Recovery(save_every=whole.save_every, spares=world.spares), changes(world, whole.mtbf_s, 0)
    )
    _check_eventful(world, whole, everything)
    ranks = plan.layout.num_ranks
    with Hosts(ranks // ranks_per_host, rate_bits_s, ranks_per_host, delay_s=delay_s) as hosts:
        begun()
        links = calibrate(hosts)
        ready = prepare(hosts, links, model, cluster, train, plan, scale=scale, compute_s=compute_s)
        step_s = ready.prediction.step_time_s + BETWEEN_S
        faster = whole.job.num_steps * whole.job.step_s / (num_steps * step_s)
        sizes = _small(whole.job, num_steps, step_s, faster)
        decider = Recovery(save_every=every, spares=world.spares)
        slowed = _Slowed(ready, links, step_s, (model, train, plan))
        happens = [
            (_sooner(change, faster, cluster.islands[0].devices_per_node) for change in changes(world, whole.mtbf_s, 0))
            for _ in ("simulated", "lived")
        ]
        simulated = run_job(sizes, decider, (slowed.event(change) for change in happens[0]))
        _check_lengths(sizes, simulated, faster)
        expected(simulated.seconds)
        timeout_s = 60.0 + 3 * simulated.seconds
        met = tuple(takewhile(lambda change: change.at_s < timeout_s, happens[1]))
        lived = hosts.live(ready.script, sizes, decider, met, timeout_s=timeout_s)
    return EmulatedJob(
        prediction=ready.prediction, scale=ready.scale, whole=whole, whole_s=everything.seconds, faster=faster,
        sizes=sizes, decider=decider, simulated=simulated, lived=lived,
    )  # fmt: skip


def _whole(model: Model, cluster: Cluster, train: Train, plan: Plan, world: JobWorld) -> WholeJob:
    """The job that is asked for, on the question's own cluster."""
    costs = standard_on(cluster, cluster.islands[0].device.framework or "meshwright")
    asked = predict(model, cluster, train, plan, costs=costs, detail=False)
    lowered = simulate(plan, model, cluster, train, costs).lowered
    if (world.recovery, world.saving) != ("checkpoint", "blocking"):
        raise _cannot("an emulated job goes on from checkpoints that it waits for", "leave recovery= and saving= out")
    found = whole_job(lowered, cluster, asked.run.num_steps, asked.step_time_s, world)
    found.check(world)
    nodes = sum(island.num_nodes for island in cluster.islands)
    if wrong := unknown_nodes(world.trace or (), nodes, f"--world {world.source}"):
        raise MeshwrightError(wrong)
    return found


def _every(whole: WholeJob, num_steps: int) -> int:
    """Steps between the checkpoints of a job of so many steps."""
    if num_steps > whole.job.num_steps:
        raise _cannot(
            f"the job has {whole.job.num_steps:,} steps, and {num_steps:,} are to stand for them",
            f"--steps {whole.job.num_steps} or fewer",
        )
    every = whole.save_every * num_steps / whole.job.num_steps
    if every < 1:
        least = ceil(whole.job.num_steps / whole.save_every)
        stand = whole.job.num_steps / num_steps
        raise _cannot(
            f"the job saves every {whole.save_every:,} steps, and a step here stands for {stand:,.1f} of them",
            f"--steps {least} or more, or save less often: checkpoint=, in --world",
        )
    return round(every)


def _check_eventful(world: JobWorld, whole: WholeJob, run: JobRun) -> None:
    """Refuse a world in which nothing happens before the job has ended."""
    first = next(changes(world, whole.mtbf_s, 0)).at_s
    if first >= run.seconds:
        shown = f"{first:,.0f} s, and the job ends after {run.seconds:,.0f} s"
        raise _cannot(
            f"nothing happens to the job: the first event comes after {shown}",
            "name earlier failures, a smaller mtbf= or another seed=, or train longer: --tokens",
        )


def _sooner(change: WorldEvent, faster: float, devices_per_node: int) -> WorldEvent:
    """Return the event at its time in the small job; a node that it names is told by its first rank."""
    back_s = None if change.back_s is None else change.back_s / faster
    node = change.node * devices_per_node if change.node >= 0 else change.node
    return WorldEvent(change.at_s / faster, change.slowdown, node, back_s)


def _small(job: JobSizes, num_steps: int, step_s: float, faster: float) -> JobSizes:
    return JobSizes(
        num_steps=num_steps,
        step_s=step_s,
        save_s=job.save_s / faster,
        restart_s=job.restart_s / faster,
        repair_s=job.repair_s / faster,
    )


def _check_lengths(sizes: JobSizes, simulated: JobRun, faster: float) -> None:
    """Refuse restarts in which no process could start, and jobs that take too long here."""
    if simulated.failures and sizes.restart_s < LEAST_RESTART_S:
        times = LEAST_RESTART_S / sizes.restart_s if sizes.restart_s else inf
        help = f"say restart={LEAST_RESTART_S * faster:.0f}s or longer in --world"
        if sizes.num_steps * times * sizes.step_s < MOST_S:
            help += f", or --steps {ceil(sizes.num_steps * times)} or more"
        raise _cannot(
            f"a restart is {sizes.restart_s:.3g} s here, where one second is {faster:,.0f} of the job, and processes "
            f"need {LEAST_RESTART_S:g} s to start",
            help,
        )
    if simulated.seconds > MOST_S:
        raise _cannot(
            f"the job would take {simulated.seconds:,.0f} s here",
            f"at most {MOST_S:,.0f} s: fewer --steps, or a smaller --scale",
        )


class _Slowed:
    """Tells slowdowns of the kernels as slowdowns of a step, whose messages take as long as before."""

    def __init__(self, ready: Prepared, links: Links, step_s: float, asked: tuple[Model, Train, Plan]):
        self.ready, self.links, self.step_s, self.asked = ready, links, step_s, asked
        self.known: dict[float, float] = {1.0: 1.0}

    def event(self, change: WorldEvent) -> WorldEvent:
        """The event, told of steps where it is told of kernels."""
        kernels = change.slowdown
        if kernels is None:
            return change
        if kernels not in self.known:
            model, train, plan = self.asked
            costs = emulated_costs(self.ready.cluster, self.links, self.ready.scale * kernels)
            step = simulate(plan, model, self.ready.cluster, train, costs)
            self.known[kernels] = (step.step_time_s + BETWEEN_S) / self.step_s
        return WorldEvent(change.at_s, self.known[kernels])


def _cannot(message: str, help: str) -> MeshwrightError:
    """U005: this job is not replayed at this scale."""
    return MeshwrightError.one("U005", message, place=PLACE, help=help)
