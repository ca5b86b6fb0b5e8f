"""What every report says of a prediction, in words and numbers, before it is laid out as text or as HTML."""

from __future__ import annotations

import msgspec

from meshwright.lower.residency import IN_FLIGHT
from meshwright.prediction import ATTRIBUTION, Limit, Prediction, RankMemory, TrainingRun
from meshwright.quantity import big, gibibytes, seconds

NOT_INCLUDED = "not included"
#: What a category of memory is called, as a prefix, and the ZeRO level that shards it (Rajbhandari et al.
#: 2019, 1910.02054) with the plan's word for it.
SHARDED_BY = (("optim", 1, "zero1"), ("grad", 2, "zero2"), ("param", 3, "fsdp"))


class Bar(msgspec.Struct, frozen=True):
    """One step of the waterfall: from ``start_s`` on, ``seconds`` long; ``share`` of the whole step."""

    name: str
    what: str
    start_s: float
    seconds: float
    share: float


def waterfall(prediction: Prediction) -> tuple[Bar, ...]:
    """The attribution entries one after the other, in the order of :data:`ATTRIBUTION`, entries it does not name
    behind them. They end at their own sum, which is the step time."""
    named = dict(ATTRIBUTION)
    names = [n for n in named if n in prediction.attribution] + [n for n in prediction.attribution if n not in named]
    at, bars = 0.0, []
    for name in names:
        length = prediction.attribution[name]
        share = length / prediction.step_time_s if prediction.step_time_s else 0.0
        bars.append(Bar(name, named.get(name, name), at, length, share))
        at += length
    return tuple(bars)


def verdict(prediction: Prediction) -> tuple[str, ...]:
    """The answer in pieces: whether it fits, step time with its 80% interval, rate, utilisation."""
    low, high = prediction.step_time_interval_s
    unit = seconds(prediction.step_time_s).split()[-1]
    return (
        fit(prediction),
        f"{seconds(prediction.step_time_s)}/step [{_bare(low, unit)}, {_bare(high, unit)}]",
        f"{prediction.tokens_per_s_per_gpu:,.0f} tokens/s/GPU",
        f"MFU {prediction.mfu:.0%}",
    )


def fit(prediction: Prediction) -> str:
    """``fits: 43.2 GiB of 79.6 GiB``, or by how much it does not and where."""
    tight = prediction.tightest
    if prediction.fits:
        return f"fits: {gibibytes(tight.peak_bytes)} of {gibibytes(tight.capacity_bytes)}"
    over = []
    if tight.headroom_bytes < 0:
        over.append(f"{gibibytes(-tight.headroom_bytes)} over on {tight.rank}")
    if prediction.power_over_w:
        over.append(f"{prediction.power_over_w / 1e3:,.1f} kW over the site's {_limit_kw(prediction):,.1f} kW")
    return "does not fit: " + ", ".join(over)


def _limit_kw(prediction: Prediction) -> float:
    return (prediction.cluster.power_limit_w or 0.0) / 1e3


def _bare(value: float, unit: str) -> str:
    """Seconds without the unit where it is the verdict's own, so that the interval reads ``[8.20, 9.80]``."""
    text = seconds(value)
    return f"{float(text.split()[0]):.3g}" if text.endswith(f" {unit}") else text


def remedies(prediction: Prediction) -> tuple[str, ...]:
    """What would make an answer of "does not fit" fit, from what is alive at the peak; empty when it fits."""
    if prediction.fits:
        return ()
    tight = prediction.tightest
    over = -tight.headroom_bytes
    if over <= 0:
        share = _limit_kw(prediction) * 1e3 / (prediction.money.power_w or 1.0)
        return (f"about {share:.0%} of the devices can be powered at their rated power: use fewer",)
    found = [
        f"{word} frees {gibibytes(n)} of {what}{', enough by itself' if n >= over else ''}"
        for word, what, n in _sharding(prediction, tight)
    ]
    activations = sum(b for name, b in tight.alive.items() if name.startswith("activation"))
    if activations > 0 and prediction.plan.memory.recompute != "full":
        # a flash kernel leaves selective recompute nothing to drop
        unfused = prediction.plan.memory.attention != "flash" and prediction.plan.memory.recompute == "none"
        words = "selective or full" if unfused else "full"
        found.append(f"recompute ({words}) frees part of {gibibytes(activations)} of activations")
    if prediction.plan.pipeline.microbatch > 1:
        found.append(f"mb{prediction.plan.pipeline.microbatch // 2} halves the activations of a microbatch")
    found.append(_split_further(prediction, tight))
    return (f"needs {gibibytes(over)} less on {tight.rank}; any of these, or several:", *found)


def _split_further(prediction: Prediction, tight: RankMemory) -> str:
    """How many ways tp and pp would have to split the model, as if everything held were split by them; what dp
    shards already is split over all ranks, and stays as large when tp and pp take ranks from dp."""
    layout, devices = prediction.plan.layout, prediction.cluster.num_devices
    shards, already = layout.tp * layout.pp, _sharded_bytes(prediction, tight)
    room = tight.capacity_bytes - already
    if room <= 0:
        needed = _next_power(layout.num_ranks * tight.peak_bytes / max(tight.capacity_bytes, 1.0))
        what = f"what is sharded over all {layout.num_ranks:,} ranks takes {gibibytes(already)} on each"
        return f"{what}: it takes about {needed:,} devices"
    enough = _next_power(shards * (tight.peak_bytes - already) / room)
    if enough > devices:
        return f"tp*pp would have to be about {enough}, more than the cluster's {devices:,} devices"
    return f"tp*pp of about {enough} instead of {shards} splits the model further"


def _sharded_bytes(prediction: Prediction, tight: RankMemory) -> float:
    """Bytes of the state that the plan shards over all of data parallelism."""
    layout = prediction.plan.layout
    if layout.shard_group != layout.dp * layout.cp:
        return 0.0
    kept_whole = _kept_whole(prediction)
    prefixes = tuple(prefix for prefix, level, _ in SHARDED_BY if layout.zero >= level and prefix not in kept_whole)
    sharded = {name: held for name, held in tight.alive.items() if prefixes and name.startswith(prefixes)}
    return sum(held for name, held in sharded.items() if name != IN_FLIGHT)


def _kept_whole(prediction: Prediction) -> tuple[str, ...]:
    """Under a pipeline gathered parameters are kept, and all but ZeRO-2 accumulate gradients whole to the last
    microbatch."""
    layout = prediction.plan.layout
    if layout.pp == 1:
        return ()
    return ("param",) if layout.zero == 2 else ("grad", "param")


def _sharding(prediction: Prediction, tight: RankMemory) -> list[tuple[str, str, float]]:
    """(plan word, category, bytes freed) of every ZeRO level above the plan's own."""
    layout = prediction.plan.layout
    group = layout.shard_group
    if group < 2:
        return []
    kept_whole = _kept_whole(prediction)
    return [
        (word, name, held * (1 - 1 / group))
        for prefix, level, word in SHARDED_BY
        for name, held in tight.alive.items()
        if name.startswith(prefix) and held > 0 and layout.zero < level and prefix not in kept_whole
    ]


def _next_power(value: float) -> int:
    power = 1
    while power < value:
        power *= 2
    return power


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
    """(what, value) for cost and energy, per step and per million tokens; says so where the catalog has no figure."""
    m = prediction.money
    per_million = None if m.joules_per_token is None else m.joules_per_token * 1e6
    return [
        ("cost per step", usd(m.usd_per_step)),
        ("cost per million tokens", usd(m.usd_per_million_tokens)),
        ("energy per step", _energy(m.joules_per_step)),
        ("energy per million tokens", _energy(per_million)),
    ]


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
    total = ("in all", whole, f"80% between {span(low, high)}; {big(run.tokens)} tokens")
    lines = [(what, NOT_INCLUDED if value is None else seconds(value), note) for what, value, note in run.lines]
    return [total, *lines, *_bill(run), *(limit(found, prediction.fits) for found in prediction.limits)]


def _bill(run: TrainingRun) -> list[tuple[str, str, str]]:
    """What the run costs: devices x hours x price."""
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
