"""From a step to a bill: money and energy of a step, time and cost of a whole training run."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from meshwright.lower import Lowered
from meshwright.plan import Plan
from meshwright.prediction import Money, TrainingRun
from meshwright.spec.cluster import Cluster
from meshwright.spec.workload import Train

#: Time from an interruption to the first new step: detection, restart, loading. Assumed; flagged where shown.
RESTART_S = 600.0


def money(cluster: Cluster, plan: Plan, train: Train, step_s: float) -> Money:
    """Price by the device-hour; energy at the devices' rated power and their hosts', times the site's overhead."""
    n, total = plan.layout.num_ranks, cluster.num_devices
    hourly = cluster.total_price_usd_hour()
    usd = None if hourly is None else hourly * n / total * step_s / 3600
    watts = _watts(cluster)
    drawn = None if watts is None else watts * n / total * (cluster.pue or 1.0)
    joules = None if drawn is None else drawn * step_s
    tokens = train.tokens_per_step
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
    """Where the price of the cluster comes from, in words."""
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
        watts += island.num_devices * (island.device.tdp_w + island.node.power_w / island.node.devices)
    return watts


def training_run(
    lowered: Lowered,
    cluster: Cluster,
    plan: Plan,
    train: Train,
    step_s: float,
    interval_s: tuple[float, float],
    draws_s: Sequence[float],
) -> TrainingRun:
    """Time and cost for the workload's tokens: steps, checkpoints and failures as separate lines. `interval_s` and
    `draws_s` are of the step time `step_s`.

    Checkpoints go to the nodes' own drives at their rated speed, at Young's interval sqrt(2 d M) for a write time d
    and a mean time between interruptions M (Young, 1974); an interruption loses half an interval and a restart.
    """
    steps = -(-int(train.tokens) // train.tokens_per_step)
    compute = steps * step_s
    lines: list[tuple[str, float | None, str]] = [("steps", compute, f"{steps:,} steps of {step_s:.3f} s")]
    mtbf_h = cluster.interruption_hours()
    write = _checkpoint_seconds(lowered, cluster, plan)
    total = compute
    if mtbf_h is None or write is None:
        why = "no failure rate in the catalog" if mtbf_h is None else "no drive speed in the catalog"
        lines += [("checkpoints", None, why), ("failures", None, why)]
    else:
        mtbf = mtbf_h * 3600
        interval = sqrt(2 * write * mtbf)
        saved = compute / interval * write
        lost = (compute + saved) / mtbf * (interval / 2 + RESTART_S)
        lines += [
            ("checkpoints", saved, f"{write:.1f} s every {interval / 60:.0f} min, blocking, to local drives"),
            ("failures", lost, f"one every {mtbf / 3600:.1f} h, half an interval and {RESTART_S / 60:.0f} min each"),
        ]
        total += saved + lost
    lines.append(("data loading", None, "assumed to be hidden behind compute"))
    lines.append(("evaluation", None, "depends on the run"))
    hourly = cluster.total_price_usd_hour()
    usd = None if hourly is None else hourly * total / 3600
    whole = total / step_s  # seconds of the run for each second of a step: every line above goes with the step
    low, high = interval_s[0] * whole, interval_s[1] * whole
    return TrainingRun(
        tokens=train.tokens,
        num_steps=steps,
        seconds=total,
        usd=usd,
        lines=tuple(lines),
        num_devices=cluster.num_devices,
        seconds_interval=(low, high),
        usd_interval=None if hourly is None else (hourly * low / 3600, hourly * high / 3600),
        draws_s=tuple(float(draw) * whole for draw in draws_s),
        price_usd_hour=hourly,
        price_source=price_source(cluster),
    )


def _checkpoint_seconds(lowered: Lowered, cluster: Cluster, plan: Plan) -> float | None:
    """Parameters and optimizer state, written once, by all nodes at the speed of their drives."""
    node = cluster.islands[0].node
    if not node.nvme_gb_s:
        return None
    layout = plan.layout
    replicas = 1 if layout.zero >= 1 else layout.dp * layout.cp
    state = sum(
        (held.get("parameters", 0.0) / (1 if layout.zero == 3 else layout.dp * layout.cp))
        + held.get("optimizer", 0.0) / replicas
        for held in lowered.static_bytes
    )
    per_node = state / len(lowered.static_bytes) * node.devices
    return per_node / (node.nvme_gb_s * 1e9)
