"""Predict a training step: check, lower, price, simulate, and say why. The whole flow is :func:`predict`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from meshwright.answer.allot import allotted
from meshwright.answer.approximate import approximate, num_replicas
from meshwright.answer.asked import asked_memory
from meshwright.answer.clients import client_rounds
from meshwright.answer.experts import expert_answer, expert_assumptions, expert_cautions
from meshwright.answer.feed import feed_answer, feed_cautions, felt, with_data
from meshwright.answer.flops import dense_peak, executed_ratio, step_flops
from meshwright.answer.intervals import interval, interval_draws
from meshwright.answer.metrics import Metric, TrainMetrics
from meshwright.answer.outlook import money, training_run
from meshwright.answer.pools import pool_shares
from meshwright.answer.prediction import Money, Prediction, RankMemory, RoundTimes, TrainingRun
from meshwright.answer.provenance import assumptions, cautions, identity, warnings, with_pace
from meshwright.answer.rank_memory import dynamic_copies, fuller, rank_memory, spare_bytes
from meshwright.answer.replan import replanned
from meshwright.answer.sensitivity import sensitivities
from meshwright.answer.spread import batch_spread, drawn_assumptions, with_unequal
from meshwright.answer.stragglers import in_world, varied_assumption, with_waiting
from meshwright.answer.swarm import (
    of_peers,
    swarm_assumptions,
    swarm_attribution,
    swarm_cautions,
    swarm_in_world,
    swarm_timeline,
)
from meshwright.answer.tier_memory import tier_memory
from meshwright.answer.to_loss import equal_loss, more_tokens
from meshwright.causes import PRICED
from meshwright.cost import Costs, standard_on
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan, check
from meshwright.plan.facet import divisors
from meshwright.plan.facets.feedback import otherwise as fed_otherwise
from meshwright.plan.facets.overlap import otherwise
from meshwright.plan.facets.pipeline import MOST_IMAGES
from meshwright.plan.facets.sequence import STATIC
from meshwright.quantity import seconds
from meshwright.simulate import memory
from meshwright.simulate.attribute import attribution
from meshwright.simulate.batches import Batches, simulate_batches
from meshwright.simulate.decide import decided
from meshwright.simulate.groups import simulate_groups
from meshwright.simulate.lowering import lowered_by
from meshwright.simulate.simulated import Simulated
from meshwright.simulate.step import simulate
from meshwright.simulate.zoom import zooms
from meshwright.spec.cluster import Cluster
from meshwright.spec.feed import Feed
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.rounds import turns_of
from meshwright.timeline import Identity, MemoryTrace, Timeline, from_times
from meshwright.world.trace import JobWorld

T = TypeVar("T")


def predict(
    model: Model,
    cluster: Cluster,
    train: Train,
    plan: Plan,
    *,
    costs: Costs | None = None,
    detail: bool = True,
    world: JobWorld | None = None,
    feed: Feed | None = None,
) -> Prediction:
    """Step time, memory, utilisation and their reasons for one training step of `plan`.

    `costs` prices work items (default: :func:`meshwright.cost.standard_on`). Without `detail`
    the sensitivities and the layer zooms are left out, which a search does not need. The run over the workload's tokens
    meets what the `world` says; without one, failures as they are on average. With a `feed` the step is that from one
    to the next, waiting for its data included; without one its data is there.

    Raises:
        MeshwrightError: every violation that makes the plan illegal here (P codes); O003 and O004 for a world in which
            the run does not end, or that does not say enough, O005 for one of clients where the plan has none; W021
            for a feed of a plan that it does not go with.
    """
    costs = costs or standard_on(cluster, dtype=plan.pools[0].plan.precision.compute or train.dtype)
    plan, allotment = allotted(plan, model, cluster, train, costs)
    plan = plan.on(cluster.num_devices)
    found = check(plan, model, cluster, train)
    if found:
        raise MeshwrightError(found)
    plan, lowering = lowered_by(plan, model, cluster, train, costs, partial(spare_bytes, costs=costs))
    plan, choice = decided(plan, model, cluster, train, costs)
    # replicas with steps of their own, and pools, are timed on a typical batch
    typical = bool(plan.several) or not read(plan.sync.policy).exact
    draws = simulate_batches if plan.several or plan.sequence.groups == STATIC else simulate_groups
    batches = None if typical else draws(plan, model, cluster, train, costs)
    run = simulate(plan, model, cluster, train, costs) if batches is None else batches.typical
    run = swarm_in_world(run, costs, world)
    shown, even = (run, run) if batches is None else (batches.shown, batches.even)
    found, varied = in_world(run, costs, None if run.swarm is not None else world, drawn=batches is not None)
    shown, even = (shown, even) if found is run else (found, found)
    step, useful = (
        (shown.step_time_s, 0.0) if batches is None else (batches.mean_s, float(batches.drawn.useful().mean()))
    )
    own = step if varied is None else varied.mean_s
    told_feed, feed_assumptions = feed_answer(feed, model, cluster, train, plan, own)
    step = own if told_feed is None else told_feed.step_s
    who = identity(model, cluster, train, plan, costs, shown.lowered.graph)
    clients = client_rounds(run, model, cluster, train, plan, costs, world)
    ranks = asked_memory(run, rank_memory(run.wave or run, costs))
    if batches is not None and batches.staying is not None:
        ranks = fuller(ranks, rank_memory(batches.staying, costs))
    tiers = tier_memory(run, costs)
    shown_ranks = _of_classes(ranks, shown) if run.swarm is None else of_peers(run, ranks)
    if run.swarm is None:
        timeline = _timeline(shown, who, shown_ranks, costs, traced=detail)
        split = _attribution(shown, timeline)
    else:
        timeline, split = swarm_timeline(run, who), swarm_attribution(run, costs)
    if even is not shown:  # drawn steps, told apart from the same work in equal microbatches
        split = attribution(_timeline(even, who, ranks, costs, traced=False), even.priced.parts)
    split = split if batches is None else with_unequal(split, batches)
    split = split if varied is None else with_waiting(split, varied)
    split = with_data(split, told_feed)
    draws, rounds = interval_draws(even) * (own / even.step_time_s), _round(run)
    draws = draws if told_feed is None else told_feed.steps_of(draws)
    timeline = with_pace(timeline, cluster)
    within = interval(draws, step)
    job = world if world is not None and world.of_job and run.swarm is None else None
    bill = money(cluster, plan, train, step, useful=useful)
    metrics = _metrics(run, Metric(step, within), split["bubble"] / step, ranks, bill, batches)
    parts = run.lowered.parts
    resting = _of_all(assumptions(one, costs, one.stages.model, cluster, train, one.plan) for one in parts)
    told = _of_all(warnings(one, costs, one.stages.model, cluster, train, one.plan) for one in parts)
    doubts = _of_all(
        cautions(one, costs, one.stages.model, train, one.plan, mfu=metrics.mfu.value, step_s=step) for one in parts
    )
    equal = equal_loss(plan, model, train)
    routed = None if plan.several else expert_answer(run.lowered, model, train, plan)
    resting = (*resting, *expert_assumptions(routed, train, plan), *swarm_assumptions(run, world))
    resting = resting if varied is None else (*resting, varied_assumption(varied, world))
    resting = (*resting, *feed_assumptions)
    return Prediction(
        model=model,
        cluster=cluster,
        train=train,
        plan=plan,
        fits=all(r.headroom_bytes >= 0 for r in (*ranks, *tiers)) and _powered(cluster, bill.power_w),
        metrics=metrics,
        attribution=split,
        memory=shown_ranks,
        tiers=tiers,
        sensitivities=felt(sensitivities(run, costs), told_feed) if detail and run.swarm is None else (),
        assumptions=resting if batches is None else (*resting, *drawn_assumptions(batches, train)),
        warnings=told,
        cautions=(
            *feed_cautions(told_feed),
            *(_one_image(model, cluster, train, plan, costs, own) if detail else ()),
            *doubts,
            *(one.text for one in (lowering, choice, allotment) if one is not None),
            *approximate(plan, model, train, rounds),
            *otherwise(plan),
            *fed_otherwise(plan),
            *swarm_cautions(plan),
            *more_tokens(equal),
            *expert_cautions(routed, plan),
            *_growing(model, cluster, train, plan, costs, step),
        ),
        equal_loss=equal,
        money=bill,
        run=_run(
            run,
            model,
            cluster,
            plan,
            train,
            step,
            within,
            draws,
            job,
            useful=useful,
            identity=who,
            split=split,
            costs=costs,
        )
        if train.tokens
        else None,
        timeline=timeline,
        zooms=tuple(zoom for one in parts for zoom in zooms(one, costs)) if detail else (),
        stage_layers=tuple(one.stages.numbered(layers) for one in parts for layers in one.stages.layers),
        schedule_params=run.schedule_params,
        identity=who,
        pools=pool_shares(timeline, run.lowered, ranks),
        batches=None if batches is None else batch_spread(batches, train),
        round=rounds,
        stragglers=varied,
        clients=clients,
        swarm=run.swarm,
        choice=choice,
        memory_sigma=costs.framework.memory_sigma,
        experts=routed,
        feed=told_feed,
        filled=run.filled,
    )


def _run(
    run: Simulated,
    model: Model,
    cluster: Cluster,
    plan: Plan,
    train: Train,
    step_s: float,
    within: tuple[float, float],
    draws: Sequence[float],
    job: JobWorld | None,
    *,
    useful: float,
    identity: Identity,
    split: dict[str, float],
    costs: Costs,
) -> TrainingRun:
    """The run over the workload's tokens."""

    def on_fewer(devices: int) -> float | None:
        if plan.several:
            return None
        found = replanned(model, cluster, train, plan, devices, costs=costs)
        return found.step_time_s if found is not None and found.fits else None

    return training_run(
        run.lowered,
        cluster,
        plan,
        train,
        step_s,
        within,
        draws,
        job,
        useful=useful,
        identity=identity,
        passes_s=max(0.0, step_s - split["optimizer"] - split["dp"]),
        on_fewer=on_fewer,
    )


def _growing(model: Model, cluster: Cluster, train: Train, plan: Plan, costs: Costs, step_s: float) -> tuple[str, ...]:
    """A caution where the batch may grow: how long a step of the largest takes, and all tokens with the first and with
    that."""
    if not train.grow:
        return ()
    unit = plan.layout.dp * plan.pipeline.microbatch
    largest = msgspec.structs.replace(train, global_batch=max(unit, train.most // unit * unit), grow=0.0, most=0)
    later_s = predict(model, cluster, largest, plan, costs=costs, detail=False).step_time_s
    said = f"the batch may grow from {train.global_batch} to {largest.global_batch} sequences, whose step takes "
    if not train.tokens:
        return (said + seconds(later_s),)
    spent = [s * train.tokens / t.tokens_per_step for s, t in ((step_s, train), (later_s, largest))]
    return (said + f"{seconds(later_s)}: all tokens take from {seconds(min(spent))} to {seconds(max(spent))}",)


def _one_image(
    model: Model, cluster: Cluster, train: Train, plan: Plan, costs: Costs, step_s: float
) -> tuple[str, ...]:
    """A caution where images are computed one by one: how long a step takes with as many of a replica's at a time as
    fit, where that is less."""
    share = 0 if plan.several else train.global_batch // plan.layout.dp
    if not train.image or plan.several or plan.pipeline.microbatch > 1 or plan.layout.pp > 1:
        return ()
    for size in reversed([n for n in divisors(share) if 1 < n <= MOST_IMAGES]):
        larger = msgspec.structs.replace(plan, pipeline=msgspec.structs.replace(plan.pipeline, microbatch=size))
        found = predict(model, cluster, train, larger, costs=costs, detail=False)
        if found.fits and found.step_time_s < step_s:
            less = f"with mb{size} in the plan a step takes {seconds(found.step_time_s)}, not {seconds(step_s)}"
            return (f"mb1, the default, computes one image at a time: {less}",)
    return ()


def _round(run: Simulated) -> RoundTimes | None:
    """The steps of a round, where they are not alike."""
    one = run.round
    if one is None:
        return None
    most = max(part.num_bytes for part in one.parts)
    plan = run.lowered.plan
    policy = read(plan.sync.policy)
    turns = turns_of(policy, num_replicas(plan, policy))
    return RoundTimes(
        every=one.every,
        inner_s=one.inner_s,
        averaging_s=one.averaging_s,
        parts=1 if turns else len(one.parts),
        turns=turns,
        delay=one.lag,
        waits_s=one.waits_s,
        part_bytes=most,
        hidden_gbit_s=8e-9 * one.hidden_bytes_per_s if one.lag else None,
    )


def _attribution(run: Simulated, timeline: Timeline) -> dict[str, float]:
    """Seconds of a step by cause; of replicas that average now and then, in the mean over a round."""
    one = run.round
    split = attribution(timeline, run.priced.parts if one is None else one.sent)
    if run.moving is not None:
        more = attribution(
            from_times(run.moving.lowered.graph, run.moving.start_s, run.moving.end_s), run.moving.priced.parts
        )
        return {cause: seconds + run.share * more[cause] for cause, seconds in split.items()}
    if one is None:
        return split
    inner = attribution(from_times(run.lowered.graph, *one.times), one.causes)
    least = 1e-12 * one.mean_s  # what is left where two equal numbers are taken apart
    if len(one.parts) == 1 and not one.lag:
        split = {cause: one.over(inner[cause], seconds) for cause, seconds in split.items()}
        return {cause: seconds if seconds > least else 0.0 for cause, seconds in split.items()}
    # what all parts take to be sent has the causes of the part that is shown
    longer = {cause: max(0.0, seconds - inner[cause]) for cause, seconds in split.items()}
    whole = sum(longer.values())
    sends, applies = (
        sum(getattr(part, what) - one.inner_s for part in one.parts) / one.every for what in ("sends_s", "applies_s")
    )
    share = one.exchanges * sends / whole if whole > least else 0.0
    split = {cause: inner[cause] + share * longer[cause] for cause in split}
    split["optimizer"] += applies
    rest = one.mean_s - sum(split.values())  # what is waited for, and what exchanges slow
    split["dp"] += rest if abs(rest) > least else 0.0
    return split


def _metrics(
    run: Simulated,
    step: Metric,
    bubble: float,
    ranks: tuple[RankMemory, ...],
    bill: Money,
    batches: Batches | None,
) -> TrainMetrics:
    """The metrics of a step; of drawn batches those of their useful tokens."""
    lowered, train = run.lowered, run.lowered.parts[0].stages.train
    drawn = None if batches is None else batches.drawn
    tokens = train.tokens_per_step if drawn is None else float(drawn.useful().mean())
    flops, peak = step_flops(lowered, drawn), dense_peak(lowered)
    return TrainMetrics(
        step_time_s=step,
        bound_s=Metric(step_flops(lowered, drawn, needed=True) / dense_peak(lowered, computing=True)),
        tokens_per_s_per_gpu=Metric.per_step(tokens / sum(part.plan.num_ranks for part in lowered.parts), step),
        mfu=Metric.per_step(flops / peak, step),
        hfu=Metric.per_step(flops * executed_ratio(run) / peak, step),
        bubble=Metric(bubble),
        peak_memory_bytes=Metric(max(rank.peak_bytes for rank in ranks)),
        headroom_bytes=Metric(min(rank.headroom_bytes for rank in ranks)),
        usd_per_million_tokens=Metric.of_step(bill.usd_per_million_tokens, step),
        joules_per_token=Metric.of_step(bill.joules_per_token, step),
    )


def _of_all(found: Iterable[Iterable[T]]) -> tuple[T, ...]:
    """Return all members of the pools' collections in order, each once."""
    return tuple(dict.fromkeys(one for pool in found for one in pool))


def _powered(cluster: Cluster, power_w: float | None) -> bool:
    return cluster.power_limit_w is None or power_w is None or power_w <= cluster.power_limit_w


def _of_classes(ranks: tuple[RankMemory, ...], run: Simulated) -> tuple[RankMemory, ...]:
    """The memory of every rank class of a run, from that of each kind of slices: microbatches hold as many tokens."""
    if run.lowered.several:
        return ranks
    mesh, pp = run.lowered.mesh, run.lowered.plan.layout.pp
    if len(mesh.slices) * pp == len(ranks):
        return ranks
    of = (ranks[kind * pp + stage] for kind in mesh.kinds_of_slices for stage in range(pp))
    classes = run.lowered.graph.streams.ranks
    return tuple(
        msgspec.structs.replace(rank, rank=known.name, multiplicity=known.multiplicity)
        for rank, known in zip(of, classes)
    )


def _timeline(run: Simulated, who: Identity, ranks: tuple[RankMemory, ...], costs: Costs, *, traced: bool) -> Timeline:
    graph = run.lowered.graph
    dynamic = graph.memory.categories if graph.memory is not None else ()
    constant = tuple({c: size for c, size in r.alive.items() if c not in dynamic} for r in ranks)
    traces: list[MemoryTrace] = []
    for part in run.lowered.parts if traced else ():
        copies, own = dynamic_copies(costs, part.plan), constant[part.first : part.first + len(part.static_bytes)]
        own = own if run.lowered.several else constant
        traces += memory.traces(graph, run.start_s, run.end_s, own, copies, run.memory_order, part.first)
    return from_times(
        graph,
        run.start_s,
        run.end_s,
        parts={cause: run.priced.parts[:, i] for i, cause in enumerate(PRICED) if run.priced.parts[:, i].any()},
        memory=tuple(traces),
        identity=who,
    )
