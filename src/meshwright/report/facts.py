"""Facts of a prediction that every report states, in words and numbers, before they are laid out as text or HTML."""

from __future__ import annotations

import msgspec

from meshwright.answer.prediction import Limit, Prediction, RankMemory, TierMemory, TrainingRun
from meshwright.causes import WORDS
from meshwright.quantity import big, gibibytes, lacking, seconds
from meshwright.simulate.clients import Version
from meshwright.spec.network_bill import network_bill
from meshwright.spec.workload import REORDERED, Train
from meshwright.sync.merged import MergedTasks
from meshwright.sync.policy import read

NOT_INCLUDED = "not included"


class Bar(msgspec.Struct, frozen=True):
    """One step of the waterfall: from ``start_s`` on, ``seconds`` long; ``share`` of the whole step."""

    name: str
    what: str
    start_s: float
    seconds: float
    share: float


def waterfall(prediction: Prediction) -> tuple[Bar, ...]:
    """The attribution entries one after the other, in the order of :data:`~meshwright.causes.STEP`, entries it
    does not name behind them. They end at their own sum, which is the step time."""
    names = [n for n in WORDS if n in prediction.attribution] + [n for n in prediction.attribution if n not in WORDS]
    at, bars = 0.0, []
    for name in names:
        length = prediction.attribution[name]
        share = length / prediction.step_time_s if prediction.step_time_s else 0.0
        bars.append(Bar(name, WORDS.get(name, name), at, length, share))
        at += length
    return tuple(bars)


def verdict(prediction: Prediction) -> tuple[str, ...]:
    """The answer in pieces: whether it fits, step time with its 80% interval (``[8.2, 9.8]`` where all are in one unit,
    else ``[507 ms, 1.027 s]``), rate, utilisation."""
    unit = seconds(prediction.step_time_s).split()[-1]
    ends = [seconds(value) for value in prediction.step_time_interval_s]
    if all(end.endswith(f" {unit}") for end in ends):
        ends = [f"{float(end.split()[0]):.3g}" for end in ends]
    return (
        fit(prediction),
        f"{seconds(prediction.step_time_s)}/step [{', '.join(ends)}]",
        f"{prediction.tokens_per_s_per_gpu:,.0f} {prediction.train.counted}/s/GPU",
        f"MFU {prediction.mfu:.0%}",
    )


def fit(prediction: Prediction) -> str:
    """``fits: 43.2 GiB of 79.6 GiB``, or by how much it does not and where."""
    tight = prediction.tightest
    if prediction.fits:
        return f"fits: {gibibytes(tight.peak_bytes)} of {gibibytes(tight.capacity_bytes)}"
    over = []
    if tight.headroom_bytes < 0:
        over.append(f"{lacking(-tight.headroom_bytes)} over on {tight.rank}")
    over += [
        f"{lacking(-one.headroom_bytes)} over in {tier(one)}" for one in prediction.tiers if one.headroom_bytes < 0
    ]
    if prediction.power_over_w:
        over.append(f"{prediction.power_over_w / 1e3:,.1f} kW over the site's {limit_kw(prediction):,.1f} kW")
    return "does not fit: " + ", ".join(over)


def tier(one: TierMemory) -> str:
    """A tier of the fullest node in words: ``the host of 8 ranks``."""
    return f"the {'host' if one.tier == 'host' else 'drives'} of {one.num_ranks} rank{'s' * (one.num_ranks > 1)}"


def tiers(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(where, how much of what there is, of what) of every tier behind the devices."""
    found = []
    for one in prediction.tiers:
        used = sorted(((size, name) for name, size in one.alive.items() if size), reverse=True)
        said = ", ".join(f"{name} {gibibytes(size)}" for size, name in used)
        found.append((tier(one), f"{gibibytes(one.peak_bytes)} of {gibibytes(one.capacity_bytes)}", said))
    return found


def fitting(prediction: Prediction) -> str:
    """``fits with a probability of 97%``: how sure the peak is enough for."""
    percent = 100 * prediction.p_fit
    said = "over 99%" if percent > 99 else "under 1%" if percent < 1 else f"{percent:.0f}%"
    return f"fits with a probability of {said}"


def limit_kw(prediction: Prediction) -> float:
    """Return the power limit of the site in kW, 0 where no limit is known."""
    return (prediction.cluster.power_limit_w or 0.0) / 1e3


def alive(memory: RankMemory) -> list[tuple[str, float]]:
    """(category, bytes) alive at the peak, the largest first, without empty ones."""
    return sorted(((n, b) for n, b in memory.alive.items() if b), key=lambda pair: -pair[1])


def ranked(prediction: Prediction, count: int | None = None) -> list[tuple[str, str, float]]:
    """(name, what, change of the step time) of the sensitivities, the most helpful first."""
    chosen = sorted(prediction.sensitivities, key=lambda s: s.change)[:count]
    return [(s.name, s.what, s.change) for s in chosen]


def percent(change: float) -> str:
    """``-2.1%``; without a sign where it rounds to nothing."""
    return "0.0%" if abs(change) < 5e-4 else f"{change:+.1%}"


def money(prediction: Prediction) -> list[tuple[str, str]]:
    """(what, value) for cost and energy, per step and per million tokens (or images); says so where the catalog has no
    figure."""
    m = prediction.money
    per_million = None if m.joules_per_token is None else m.joules_per_token * 1e6
    return [
        ("cost per step", usd(m.usd_per_step)),
        (f"cost per million {prediction.train.counted}", usd(m.usd_per_million_tokens)),
        ("energy per step", _energy(m.joules_per_step)),
        (f"energy per million {prediction.train.counted}", _energy(per_million)),
        *_network(prediction),
    ]


def priced_per(train: Train) -> str:
    """``Mtok``: the unit that prices are per, in short."""
    return "Mimg" if train.image else "Msmp" if train.features else "Mtok"


def _network(prediction: Prediction) -> list[tuple[str, str]]:
    """Parts of the network between nodes, where its switches are described."""
    found = network_bill(prediction.cluster)
    if found is None:
        return []
    price = "no price known" if found.usd is None else usd(found.usd)
    power = "no power known" if found.watts is None else f"{found.watts / 1000:,.1f} kW"
    return [("network", f"{found.switches:,} switches, {found.transceivers:,} transceivers: {price}, {power}")]


def pools(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(pool, how busy it is, note) of every pool; empty where there is one."""
    found = []
    for one in prediction.pools:
        others = " and ".join(other.name for other in prediction.pools if other.bottleneck)
        note = "the bottleneck" if one.bottleneck else f"waits for {others}"
        memory = f"{gibibytes(one.peak_bytes)} of {gibibytes(one.capacity_bytes)}"
        busy = f"computes {one.busy:.0%} of the step"
        found.append((f"{one.name} ({one.num_ranks:,})", busy, f"{note}; ranks idle {one.waits:.0%}; {memory}"))
    return found


def clients(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of the rounds of clients; empty where replicas are none."""
    c = prediction.clients
    if c is None or not c.versions:
        return []
    count, last = len(c.steps), c.versions[-1]
    tokens, counted = prediction.train.tokens_per_step / count, prediction.train.counted
    a_step = c.seconds * count / c.merged
    return [
        ("a version", seconds(last.at_s / len(c.versions)), f"{len(c.versions):,} in {seconds(c.seconds)}"),
        ("a step of all", seconds(a_step), f"{tokens * c.merged / c.seconds:,.0f} {counted}/s of {count:,} clients"),
        ("at work", f"{c.busy:.0%}", f"of the time; {min(c.steps):,} to {max(c.steps):,} steps a client"),
        ("not merged", f"{c.wasted / max(1, sum(c.steps)):.1%}", f"of {sum(c.steps):,} steps; {c.left:,} tasks left"),
        ("staleness", f"{c.staleness:.2f}", "versions that an answer is behind, in the mean"),
        ("sent", f"{gibibytes(c.up_bytes)} up", f"and {gibibytes(c.down_bytes)} down, through the server's port"),
        *_jobs(read(prediction.plan.sync.policy).merged, c.versions),
    ]


def _jobs(merged: MergedTasks | None, versions: tuple[Version, ...]) -> list[tuple[str, str, str]]:
    """A row on the rounds of all tasks, and one on those of their groups, where tasks are merged and split."""
    if merged is None:
        return []
    ends, rows = [0.0, *(version.at_s for version in versions)], []
    for what, some in (("all tasks", ends[: merged.rounds + 1]), ("groups", ends[merged.rounds :])):
        if len(some) > 1:
            note = f"a round, of {len(some) - 1:,} in {seconds(some[-1] - some[0])}"
            rows.append((what, seconds((some[-1] - some[0]) / (len(some) - 1)), note))
    return rows


def swarm(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of steps that peers take, or have the experts of; empty where ranks are fixed."""
    s = prediction.swarm
    if s is None:
        return []
    steps = s.step_s
    passes = [peer.passes / len(steps) for peer in s.peers]
    spread = f"{seconds(min(steps))} to {seconds(max(steps))} in {len(steps)} steps"
    busy = [peer.busy for peer in s.peers]
    what = "waits for experts" if prediction.plan.passes.peers else "sums gradients"
    lines = [
        ("a step", seconds(s.mean_s), f"{spread}; {seconds(s.waited_s or s.sum_s)} of it {what}"),
        ("passes", f"{sum(passes):,.0f}", f"a step; {min(passes):,.1f} to {max(passes):,.1f} a peer"),
        ("at work", f"{sum(busy) / len(busy):.0%}", f"of the time; {min(busy):.0%} to {max(busy):.0%} a peer"),
        ("sent", gibibytes(s.sent_bytes), "a step, to and from peers"),
    ]
    if s.left_out or (prediction.plan.passes.peers and s.lost):
        told = f"{s.joined} joined; {s.left_out:.1%} of answers were left out"
        lines.append(("lost", f"{s.lost} peers", told))
    elif s.lost or s.moved:
        told = f"{s.joined} joined, {s.moved} changed their stage; {s.again:,} passes were done again"
        lines.append(("lost", f"{s.lost} peers", told))
    return lines


def filled(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of frozen layers beside those that are trained; empty where there are none."""
    f = prediction.filled
    if f is None:
        return []
    ranks = prediction.plan.layout.pp
    places = {"before": "before the step", "waits": "in waits, whole microbatches", "parts": "in waits, in parts"}
    through = f"a rank in the mean, forward through {f.layers} layers; {places[f.way]}"
    lines = [
        ("passes", seconds(f.frozen_s / ranks), through),
        ("waits", seconds(f.waits_s / ranks), f"a rank in the mean, of {seconds(f.trained_s)} that are trained"),
        ("waits filled", f"{f.share:.1%}", f"with {f.inside_s / f.frozen_s:.1%} of the passes" if f.frozen_s else ""),
    ]
    return lines if f.way != "before" else lines[:2]


def stragglers(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of steps whose compute varies; empty where it does not."""
    s = prediction.stragglers
    if s is None:
        return []
    spread = f"80% between {seconds(s.p10_s)} and {seconds(s.p90_s)}"
    return [
        ("a step", seconds(s.mean_s), f"{s.mean_s / s.even_s - 1:+.1%} of one in which nothing varies; {spread}"),
        ("a replica's own", seconds(s.own_s), "in the mean, were it waiting for nobody"),
        ("waiting", seconds(s.waits_s), f"{s.waits_s / s.mean_s:.1%} of a step, for slower replicas"),
    ]


def batches(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of how steps differ between drawn batches; empty where sequences are whole."""
    b = prediction.batches
    if b is None:
        return []
    of_step = f"{b.unequal_s / prediction.step_time_s:.1%} of it is waiting that unequal microbatches cause"
    lines = [
        ("mean step", seconds(b.mean_s), of_step),
        ("p10, p50, p90", ", ".join(map(seconds, (b.p10_s, b.p50_s, b.p90_s))), f"of {b.num_draws} drawn batches"),
        ("useful tokens", f"{b.useful:.1%}", f"{b.useful_tokens:,.0f} a step in {b.documents:,.0f} documents"),
    ]
    if b.gap or b.packing in ("packed", "balanced", REORDERED):
        lines.append((f"{b.packing} documents", f"{b.gap:.2%}", "from the best that could be, at most"))
    return lines


def usd(value: float | None) -> str:
    if value is None:
        return f"{NOT_INCLUDED}: no price known"
    digits = 0 if abs(value) >= 1000 else 2 if abs(value) >= 1 else 4
    return f"${value:,.{digits}f}"


def _energy(joules: float | None) -> str:
    if joules is None:
        return f"{NOT_INCLUDED}: no power known"
    kilowatt_hours = joules / 3.6e6
    return f"{kilowatt_hours:,.3g} kWh" if kilowatt_hours < 1000 else f"{kilowatt_hours / 1000:,.3g} MWh"


def training_run(prediction: Prediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of the run over the workload's tokens, its total first, then its parts, what it costs and how
    it stands to the goal; empty when it was not asked for."""
    run = prediction.run
    if run is None:
        return []
    low, high = run.seconds_interval
    whole = seconds(run.seconds) + ("" if run.usd is None else f", {usd(run.usd)}")
    total = ("in all", whole, f"80% between {span(low, high)}; {big(run.tokens)} {prediction.train.counted}")
    lines = [(what, NOT_INCLUDED if value is None else seconds(value), note) for what, value, note in run.lines]
    return [total, *lines, *_bill(run), *(limit(found, prediction.fits) for found in prediction.limits)]


def _bill(run: TrainingRun) -> list[tuple[str, str, str]]:
    """List the lines of the cost of the run: devices x hours x price."""
    hours = f"{run.num_devices:,} device{'' if run.num_devices == 1 else 's'} for {run.seconds / 3600:,.1f} h"
    lines = [("device-hours", big(run.device_hours), hours)]
    if run.usd is None or run.price_usd_hour is None or run.usd_interval is None:
        return [*lines, ("cost", NOT_INCLUDED, "no public price in the catalog: say one with --price 2.10")]
    each = run.price_usd_hour / run.num_devices
    low, high = run.usd_interval
    note = f"80% between {usd(low)} and {usd(high)}; ${each:,.2f} a device-hour, {run.price_source}"
    return [*lines, ("cost", usd(run.usd), note)]


def limit(found: Limit, fits: bool) -> tuple[str, str, str]:
    """A limit in words: whether it is met, and how likely that is."""
    met = "met" if found.met and fits else "met if it fitted" if found.met else "not met"
    return found.what, met, chance(found)


def chance(found: Limit) -> str:
    """``P(<= 30 days) = 83%``."""
    bound = f"{found.limit:g} days" if found.what == "deadline" else usd(found.limit)
    return f"P(<= {bound}) = {share(found.probability)}"


def share(probability: float) -> str:
    """A probability in whole percent; never more certain than it is."""
    if probability > 0.995:
        return "over 99%"
    if probability < 0.005:
        return "under 1%"
    return f"{probability:.0%}"


def span(low: float, high: float) -> str:
    """``26.1 and 38.2 days``: two durations, the unit once where it is the same."""
    first, second = seconds(low), seconds(high)
    same = first.split()[-1] == second.split()[-1]
    return f"{first.split()[0] if same else first} and {second}"


def headline(prediction: Prediction) -> list[tuple[str, str]]:
    """(what, value) of the question: model, cluster, workload, plan."""
    count = prediction.num_devices
    return [
        ("model", prediction.model.name),
        ("cluster", f"{prediction.cluster.name} ({count:,} device{'' if count == 1 else 's'} used)"),
        ("workload", prediction.train.text()),
        ("plan", prediction.plan.text()),
    ]
