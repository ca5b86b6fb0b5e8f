"""Emulated steps by the executor itself: for policies whose steps differ, and whose exchanges are encoded.

A script (:mod:`meshwright.run.emulate.script`) repeats one step of messages that carry nothing. Here every rank is the
executor on a host of its own, whose passes alone are slept (:mod:`meshwright.run.emulate.slept`), so that any rule,
code and round is what it is in training. What a rank computes for real, beside the passes, is timed in a warm-up and
told to the prediction, as the links are; cores that ranks share make it as much longer.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from functools import partial
from statistics import fmean

import msgspec
import numpy as np

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.lower.program import Site
from meshwright.plan import Plan
from meshwright.run import launch
from meshwright.run.emulate.hosts import Hosts
from meshwright.run.emulate.measure import COMPUTE_S, Emulated, refuse_sizes
from meshwright.run.emulate.network import Links, calibrate, emulated, emulated_costs
from meshwright.run.emulate.slept import SleptJob, SleptPasses, steps
from meshwright.run.environment import num_cores
from meshwright.simulate.price import Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.simulate.stragglers import straggling
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.timeline import unpack
from meshwright.world.crowd import ALIKE
from meshwright.world.slow import SlowStep
from meshwright.world.trace import JobWorld

#: Axes that the executor's passes exchange on, whose passes are not slept whole.
AXES = ("tp", "cp", "pp")
#: Bytes that a rank holds of a parameter at most: value, gradient, moments, and what a code and an average keep.
PARAMETER_BYTES = 40
#: Steps of the warm-up at least: connections open their windows as they send.
WARMUP_STEPS = 3


def refuse_executed(model: Model, plan: Plan) -> None:
    """Raise U003 for a plan whose steps cannot be executed with passes that sleep."""
    layout = plan.layout
    wrong = [f"{axis}{getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    wrong += ["zero3"] * (layout.zero == 3) + [f"ep{plan.experts.ep}"] * (plan.experts.ep > 1)
    wrong += ["several pools"] * bool(plan.several)
    wrong += ["rounds that grow"] * (read(plan.sync.policy).growth is not None)
    wrong += ["sums by hosts, where every rank is a process of one"] * read(plan.sync.policy).hosted
    wrong += ["public text"] * (read(plan.sync.policy).taught is not None)
    if wrong:
        raise MeshwrightError.one(
            "U003",
            f"sync={plan.sync.policy} with {', '.join(wrong)}: such steps are not slept whole",
            place="meshwright emulate",
            help="emulate it with dp alone, or train it for real: meshwright run --link",
        )
    needed, room = model.num_params * PARAMETER_BYTES * layout.num_ranks, _free_bytes()
    if needed > room:
        raise MeshwrightError.one(
            "U003",
            f"{layout.num_ranks} ranks hold real tensors of {model.num_params:,} parameters: {needed / 1e9:,.1f} GB, "
            f"and {room / 1e9:,.1f} GB are free",
            place="meshwright emulate",
            help="emulate a smaller model of the same shape, or fewer ranks",
        )


def _free_bytes() -> float:
    """Bytes of memory that programs can still have; without limit where the system does not say."""
    try:
        with open("/proc/meminfo") as table:  # noqa: PTH123
            lines = dict(line.split(":", 1) for line in table)
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float("inf")


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
    world: JobWorld | None = None,
) -> Emulated:
    """Execute the steps of `plan` on emulated hosts, as :func:`meshwright.run.emulate.measure.emulate` runs a script;
    in a `world` its ranks compute at paces of their own.

    Raises:
        MeshwrightError: every violation of the plan; U001 when this machine cannot emulate, U002 when it failed, U003
            for plans and sizes that are not emulated.
    """
    plan = plan.on(cluster.num_devices)
    refuse_sizes(model, cluster, train, plan, ranks_per_host)
    refuse_executed(model, plan)
    num_hosts = plan.layout.num_ranks // ranks_per_host
    with Hosts(num_hosts, rate_bits_s, ranks_per_host, delay_s=delay_s, patient=True) as hosts:
        begun()
        links, limits = calibrate(hosts), {"repeats": repeats, "scale": scale, "world": world}
        return executed(hosts, links, model, cluster, train, plan, expected=expected, **limits)


def executed(
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
    world: JobWorld | None = None,
) -> Emulated:
    """Predict and execute a legal plan on hosts that are there and measured. A repeat is a round, where replicas take
    steps of their own; its steps count as their mean. `expected` is called with the seconds that all steps should take,
    without what ranks compute beside their passes."""
    target = emulated(cluster, links, hosts)
    if scale is None:
        unscaled = emulated_costs(cluster, links, 1.0, executed=True)
        once = _passes(simulate(plan, model, target, train, unscaled), Pricer(unscaled))
        scale = compute_s / (plan.num_microbatches(train.global_batch) * sum((*once.forward_s, *once.backward_s)))
    costs = emulated_costs(cluster, links, scale, executed=True)
    run = simulate(plan, model, target, train, costs)
    passes = _passes(run, Pricer(costs))
    every = max(1, read(plan.sync.policy).when)
    warmup = -(-WARMUP_STEPS // every) * every
    before = predict(model, target, train, plan, costs=costs, detail=False, world=world)
    identity = before.timeline.identity
    num_steps, ranks = repeats * every, plan.layout.num_ranks
    paces = () if world is None else tuple(map(tuple, _paces(world, ranks, warmup + num_steps).T.tolist()))
    job = SleptJob(model, plan, train, passes, warmup, num_steps, identity, paces)
    enter = partial(hosts.enter, preferred=True)
    expected((warmup + num_steps) * before.step_time_s)
    done = launch.start(steps, job, num_ranks=ranks, device="cpu", enter=enter)
    crowd = max(1.0, ranks / num_cores())
    told = emulated_costs(cluster, links, scale, executed=True, outside_s=done["busy_s"] * crowd)
    prediction = predict(model, target, train, plan, costs=told, detail=False, world=world)
    same_s = None if world is None else _same_steps_s(prediction, told, world, (warmup, warmup + num_steps))
    seconds = done["step_s"]
    rounds = tuple(fmean(seconds[i : i + every]) for i in range(0, len(seconds), every))
    timeline = unpack(b64decode(done["timeline"]))
    return Emulated(
        prediction=prediction,
        apart_s=prediction.step_time_s,
        links=links,
        cluster=target,
        scale=scale,
        steps_s=rounds,
        disturbed=0,
        late_s=0.0,
        timeline=msgspec.structs.replace(timeline, identity=msgspec.structs.replace(identity, source="measured")),
        shaped_by=hosts.shaped_by,
        executed=True,
        same_steps_s=same_s,
        sent_bytes=done["sent"] / len(seconds),
        outside_s=done["busy_s"] * crowd,
    )


def _paces(world: JobWorld, num_ranks: int, num_steps: int) -> np.ndarray:
    """Times that the passes of every rank take in every step [steps, ranks]."""
    return (world.slow or SlowStep(seed=world.seed)).varying(world.jitter or ALIKE, num_ranks, num_steps)


def _same_steps_s(prediction: Prediction, costs: Costs, world: JobWorld, among: tuple[int, int]) -> float:
    """Seconds of a step, predicted for the paces that the measured steps had."""
    run = simulate(prediction.plan, prediction.model, prediction.cluster, prediction.train, costs)
    slow = world.slow or SlowStep(seed=world.seed)
    return straggling(run, costs, slow, world.jitter or ALIKE, among).mean_s


def _passes(run: Simulated, pricer: Pricer) -> SleptPasses:
    """Seconds of every module's forward and backward."""
    stages, site = run.lowered.stages, _site(run)
    (composition,) = stages.compositions
    which = {name: [stages.layer_pass(unit, name) for unit in composition.units] for name in ("F", "BW")}
    forward, backward = ([float(pricer.layer(one, site).parts.sum()) for one in which[name]] for name in ("F", "BW"))
    return SleptPasses(tuple(forward), tuple(backward))


def _site(run: Simulated) -> Site:
    return next(program.site for program in run.lowered.programs if program.kind == "pass")
