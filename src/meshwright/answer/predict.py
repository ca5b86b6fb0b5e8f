"""Predict a training step: check, lower, price, simulate, and say why. The whole flow is :func:`predict`."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from meshwright import layers
from meshwright.answer.outlook import money, training_run
from meshwright.answer.prediction import Prediction, RankMemory, Sensitivity
from meshwright.answer.provenance import assumptions, cautions, identity, warnings
from meshwright.answer.rank_memory import dynamic_copies, rank_memory
from meshwright.causes import CAUSE, ERROR_CLASS, PRICED
from meshwright.cost import Costs, standard_on
from meshwright.cost.roofline import peak_flops
from meshwright.errors import MeshwrightError
from meshwright.layers.kind import Flops, Tokens
from meshwright.plan import Plan, check
from meshwright.simulate import memory
from meshwright.simulate.attribute import attribution
from meshwright.simulate.clock import times
from meshwright.simulate.engine import makespans
from meshwright.simulate.price import Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.simulate.zoom import zooms
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.timeline import Identity, Timeline, from_times
from meshwright.world.trace import JobWorld

#: Draws of the correlated errors behind the interval.
NUM_DRAWS = 20
#: Repeats of the same step differ by this much (docs/accuracy.md, the noise floor): no prediction is surer.
LEAST_SIGMA = 0.03


def predict(
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    *,
    costs: Costs | None = None,
    detail: bool = True,
    world: JobWorld | None = None,
) -> Prediction:
    """Step time, memory, utilisation and their reasons for one training step of `plan`.

    `costs` prices work items (default: :func:`meshwright.cost.standard_on`). Without `detail`
    the sensitivities and the layer zooms are left out, which a search does not need. The run over the workload's tokens
    meets what the `world` says; without one, failures as they are on average.

    Raises:
        MeshwrightError: every violation that makes the plan illegal here (P codes); O003 and O004 for a world in which
            the run does not end, or that does not say enough.
    """
    plan = plan.on(cluster.num_devices)
    found = check(plan, model, cluster, train)
    if found:
        raise MeshwrightError(found)
    costs = costs or standard_on(cluster)
    run = simulate(plan, model, cluster, train, costs)
    step = run.step_time_s
    who = identity(model, cluster, train, plan, costs, run.lowered.graph)
    ranks = rank_memory(run, costs, plan)
    timeline = _timeline(run, who, ranks, costs, plan, traced=detail)
    split = attribution(timeline, run.priced.parts)
    flops, executed = model_flops(model, train), _executed_ratio(run)
    peak = _peak_flops(run, plan, train)
    mfu = flops / (peak * step)
    draws = interval_draws(run)
    interval = _interval(draws, step)
    bill = money(cluster, plan, train, step)
    return Prediction(
        model=model,
        cluster=cluster,
        train=train,
        plan=plan,
        fits=all(r.headroom_bytes >= 0 for r in ranks) and _powered(cluster, bill.power_w),
        step_time_s=step,
        step_time_interval_s=interval,
        bound_s=needed_flops(model, train) / _peak_flops(run, plan, train, computing=True),
        tokens_per_s_per_gpu=train.tokens_per_step / step / plan.layout.num_ranks,
        mfu=mfu,
        hfu=flops * executed / (peak * step),
        bubble=split["bubble"] / step,
        attribution=split,
        memory=ranks,
        sensitivities=sensitivities(run, costs, plan, model, cluster, train) if detail else (),
        assumptions=assumptions(run.lowered, costs, model, cluster, train, plan),
        warnings=warnings(run.lowered, costs, model, cluster, train, plan),
        cautions=cautions(run.lowered, costs, model, train, plan, mfu=mfu, step_s=step),
        money=bill,
        run=training_run(run.lowered, cluster, plan, train, step, interval, draws, world) if train.tokens else None,
        timeline=timeline,
        zooms=zooms(run.lowered, costs) if detail else (),
        stage_layers=run.lowered.stages.layers,
        schedule_params=run.schedule_params,
        identity=who,
    )


def _powered(cluster: Cluster, power_w: float | None) -> bool:
    return cluster.power_limit_w is None or power_w is None or power_w <= cluster.power_limit_w


def _timeline(
    run: Simulated, who: Identity, ranks: tuple[RankMemory, ...], costs: Costs, plan: Plan, *, traced: bool
) -> Timeline:
    graph = run.lowered.graph
    dynamic = graph.memory.categories if graph.memory is not None else ()
    constant = tuple({c: size for c, size in r.alive.items() if c not in dynamic} for r in ranks)
    copies = dynamic_copies(costs, plan)
    return from_times(
        graph,
        run.start_s,
        run.end_s,
        parts={cause: run.priced.parts[:, i] for i, cause in enumerate(PRICED) if run.priced.parts[:, i].any()},
        memory=memory.traces(graph, run.start_s, run.end_s, constant, copies) if traced else (),
        identity=who,
    )


def model_flops(model: Model, train: Train) -> float:
    """Operations of one step by the convention of published MFU (Chowdhery et al. 2204.02311, appendix B): 6 per
    parameter of the matrix products and token, and attention as if every pair of the sequence counted."""
    return _flops(model, train, masked=False)


def needed_flops(model: Model, train: Train) -> float:
    """Operations a step cannot do without: as :func:`model_flops`, but pairs that a causal mask hides are free."""
    return _flops(model, train, masked=True)


def _flops(model: Model, train: Train, *, masked: bool) -> float:
    """The sum over layers: forward once, backward twice; a frozen base has no weight gradients."""
    batch, rows, found = train.microbatch(train.global_batch), train.global_batch, Flops()
    for count, layer in model.all_layers:
        tokens = Tokens(model=model, batch=batch, rows=rows, stream=layer.stream, masked=masked and train.causal)
        one = layers.of(layer).flops(layer, tokens)
        found = found + Flops(weights=count * one.weights, mixing=count * one.mixing)
    return float(found.weights) * (2.0 if train.lora is not None else 3.0) + found.mixing * 3.0


def _executed_ratio(run: Simulated) -> float:
    """Operations executed over operations without recompute, from the priced tasks."""
    keys = run.lowered.graph.cost_key
    flops, repeated = float(run.priced.flops[keys].sum()), float(run.priced.repeated[keys].sum())
    return flops / (flops - repeated) if flops > repeated else 1.0


def _peak_flops(run: Simulated, plan: Plan, train: Train, *, computing: bool = False) -> float:
    """Dense peak of all devices: at 16 bits (what MFU is quoted against, also below 16 bits), or at the compute
    precision when `computing`."""
    dtype = plan.precision.compute or train.dtype
    if not computing and dtype != "fp32":
        dtype = "bf16"
    per_slice = plan.layout.tp * plan.layout.cp
    return sum(
        peak_flops(device, dtype) * per_slice * slice_.multiplicity
        for slice_ in run.lowered.mesh.slices
        for device in slice_.devices
    )


def interval_draws(run: Simulated) -> np.ndarray:
    """Step times under draws of the correlated errors: one factor per error class and one for the framework for the
    whole step, log-normal, stratified so that few draws represent the distribution. The factor of a framework that was
    fitted to whole steps is what their spread leaves after the classes', and never less than a repeat's.
    Deterministic."""
    classes = sorted(set(ERROR_CLASS.values()))
    rng = np.random.default_rng(0)
    normal = np.array([_normal((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
    sigma = class_sigma(run)
    draws = {c: np.exp(rng.permutation(normal) * sigma[c]) for c in classes}
    factors = np.array([draws[ERROR_CLASS[cause]] for cause in PRICED])
    turn = rng.permutation(normal)
    graph, durations = run.lowered.graph, np.vstack([run.priced.parts.sum(axis=1), (run.priced.parts @ factors).T])
    alone, *drawn = makespans(graph, np.ascontiguousarray(durations)).tolist()
    # where ranks share cores or ports a step takes longer than in order, and its draws as much longer
    shared = run.step_time_s / alone if abs(run.step_time_s - alone) > 1e-9 * alone else 1.0
    steps = np.array(drawn) * shared
    sigma = run.step_sigma
    if run.fitted:
        known = float(np.std(np.log(steps)))
        sigma = max(LEAST_SIGMA, max(0.0, sigma**2 - known**2) ** 0.5)
    return np.exp(turn * sigma) * steps


def class_sigma(run: Simulated) -> dict[str, float]:
    """Relative error of each class in this step: that of its estimates, weighted by the time they stand for."""
    count = np.bincount(run.lowered.graph.cost_key, minlength=len(run.priced.parts))
    seconds, spread = count @ run.priced.parts, count @ run.priced.spread
    out = {}
    for name in set(ERROR_CLASS.values()):
        mine = [i for i, cause in enumerate(PRICED) if ERROR_CLASS[cause] == name]
        total = float(seconds[mine].sum())
        out[name] = float(spread[mine].sum()) / total if total else 0.0
    return out


def used_levels(run: Simulated) -> dict[str, None]:
    """Names of the levels that some collective or message of the step crosses, from the inside out."""
    context = run.lowered.stages.context()
    groups = [context.tp_group, context.cp_inner, context.cp_outer, context.ep_group, context.etp_group]
    for program in run.lowered.programs:
        groups += [move.group for move in (program.moves[:1] if program.kind == "send" else program.moves)]
    return {hop.name: None for group in dict.fromkeys(groups) for hop in group.hops}


def _normal(quantile: float) -> float:
    return NormalDist().inv_cdf(quantile)


def _interval(draws: np.ndarray, step: float) -> tuple[float, float]:
    """80% interval around the step time."""
    low, high = np.quantile(draws, [0.1, 0.9])
    return min(float(low), step), max(float(high), step)


def sensitivities(
    run: Simulated, costs: Costs, plan: Plan, model: Model, cluster: Cluster, train: Train
) -> tuple[Sensitivity, ...]:
    """What 10% more of each resource does to the step: the same graph re-priced and re-timed."""
    levels = used_levels(run)
    named = [("gemm", "matrix units 10% faster"), ("attention", "attention kernels 10% faster")]
    named.append(("elementwise", "device memory 10% faster"))
    if run.priced.parts[:, CAUSE["host"]].any():
        named.append(("host", "host 10% faster"))
    named += [(level, f"{level} links 10% faster") for level in levels]
    out = []
    for name, what in named:
        faster = costs.faster(name, 1.1)
        _, end = times(run.lowered, Pricer(faster).all(run.lowered.programs), faster)
        change = float(end.max()) / run.step_time_s - 1
        if abs(change) > 5e-5:
            out.append(Sensitivity(name=name, what=what, change=change))
    return tuple(sorted(out, key=lambda s: s.change))
