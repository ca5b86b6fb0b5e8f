"""Remedies for an answer of "does not fit", from what is alive at the peak of the fullest rank."""

from __future__ import annotations

import msgspec

from meshwright.answer.prediction import Prediction, RankMemory
from meshwright.lower.residency import IN_FLIGHT, LOGITS
from meshwright.plan import check
from meshwright.plan.text import over
from meshwright.quantity import gibibytes, lacking
from meshwright.report.facts import limit_kw, tier
from meshwright.spec.layers import Moe

#: What a category of memory is called, as a prefix, and the ZeRO level that shards it (Rajbhandari et al.
#: 2019, 1910.02054) with the plan's word for it.
SHARDED_BY = (("optim", 1, "zero1"), ("grad", 2, "zero2"), ("param", 3, "fsdp"))
#: The category of the layers whose sharded parameters are whole for their turn.
GATHERED = "gathered parameters"
#: Least share of what is over that a remedy frees to be worth a line.
WORTH = 0.05
#: Portions of the tokens in which head and loss are advised to be computed.
PORTIONS = 16


def remedies(prediction: Prediction) -> tuple[str, ...]:
    """List the changes that would make a plan fit, from what is alive at the peak; empty when it fits."""
    if prediction.fits:
        return ()
    tight = prediction.tightest
    over = -tight.headroom_bytes
    behind = [
        f"{lacking(-one.headroom_bytes)} less in {tier(one)}: leave a part on the device (optimizer@0.5), shard it "
        "over more ranks, or move it to drives (:nvme)"
        for one in prediction.tiers
        if one.headroom_bytes < 0
    ]
    if behind and over <= 0:
        return tuple(behind)
    if over <= 0:
        share = limit_kw(prediction) * 1e3 / (prediction.money.power_w or 1.0)
        return (f"about {share:.0%} of the devices can be powered at their rated power: use fewer",)
    if prediction.plan.several:
        mine = prediction.memory.index(tight)
        pool = prediction.timeline.ranks[mine].pool
        what = f"give {pool} more devices (on=) or fewer layers (part=), or recompute, zero1 or a smaller mb in it"
        return (f"needs {lacking(over)} less on {tight.rank}:", what)
    peers = prediction.plan.passes.peers
    if peers and tight is not prediction.memory[0]:
        help = f"more peers than {peers} hold fewer experts each; or say devices with more memory"
        return (f"needs {lacking(over)} less on {tight.rank}:", help)
    found = _more_experts_apart(prediction, tight, over)
    found += [
        f"{word} frees {gibibytes(n)} of {what}{', enough by itself' if n >= over else ''}"
        for word, what, n in _sharding(prediction, tight)
    ]
    found += behind + _moved(prediction, tight, over) + _scored_in_portions(prediction, tight, over)
    activations = sum(b for name, b in tight.alive.items() if name.startswith("activation"))
    if activations > 0 and prediction.plan.memory.recompute != "full":
        # a flash kernel leaves selective recompute nothing to drop
        unfused = prediction.plan.memory.attention != "flash" and prediction.plan.memory.recompute == "none"
        words = "selective or full" if unfused else "full"
        found.append(f"recompute ({words}) frees part of {gibibytes(activations)} of activations")
    if prediction.plan.pipeline.microbatch > 1:
        found.append(f"mb{prediction.plan.pipeline.microbatch // 2} halves the activations of a microbatch")
    found.append(_split_further(prediction, tight))
    return (f"needs {lacking(over)} less on {tight.rank}; any of these, or several:", *found)


def _moved(prediction: Prediction, tight: RankMemory, over: float) -> list[str]:
    """The optimizer's state moved to the host, where that is legal and it is not there yet."""
    size = tight.alive.get("optimizer", 0.0)
    if prediction.plan.offload.any or size < WORTH * over or not _legal(prediction, "offload=optimizer"):
        return []
    enough = ", enough by itself" if size >= over else ""
    return [f"offload=optimizer moves {gibibytes(size)} of optimizer to the host{enough}"]


def _scored_in_portions(prediction: Prediction, tight: RankMemory, over: float) -> list[str]:
    """Scores over the vocabulary that are never whole, where that is legal; their gradients are not counted."""
    word, freed = f"loss_portions={PORTIONS}", tight.alive.get(LOGITS, 0.0) * (1 - 1 / PORTIONS)
    if prediction.plan.memory.loss_portions > 1 or freed < WORTH * over or not _legal(prediction, word):
        return []
    return [f"{word} frees {gibibytes(freed)} of logits{', enough by itself' if freed >= over else ''}"]


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
    layout, prefixes = prediction.plan.layout, _sharded_prefixes(prediction)
    if layout.shard_group != layout.dp * layout.cp:
        return 0.0
    sharded = {name: held for name, held in tight.alive.items() if name.startswith(prefixes)}
    whole = _unscattered_bytes(prediction, tight) if layout.zero >= 2 else 0.0
    return max(0.0, sum(held for name, held in sharded.items() if name != IN_FLIGHT) - whole)


def _unscattered_bytes(prediction: Prediction, tight: RankMemory) -> float:
    """Gradients of the layer in flight, whole until they are scattered: as many bytes in 32 bits as the two layers that
    are gathered beside it take in 16."""
    if prediction.plan.layout.pp > 1:
        return 0.0
    return min(tight.alive.get(GATHERED, 0.0), tight.alive.get("gradients", 0.0))


def _more_experts_apart(prediction: Prediction, tight: RankMemory, over: float) -> list[str]:
    """A larger ep, within the scale-up domain if it can be, and what of the experts it takes off a rank: of state that
    is not sharded already, and of the layers that are gathered."""
    model, plan = prediction.model, prediction.plan
    mixtures = [(n, b.mlp) for n, b in zip(model.layers_by_kind, model.blocks) if isinstance(b.mlp, Moe)]
    larger = _legal_ep(prediction) if mixtures else None
    if larger is None:
        return []
    now = plan.experts.ep
    routed = sum(n * mlp.experts * mlp.expert_params(model.hidden) for n, mlp in mixtures)
    share = routed / now / (routed / now + model.num_params - routed)
    sharded = _sharded_prefixes(prediction)
    whole = {
        name: held
        for name, held in tight.alive.items()
        if name == GATHERED or (name.startswith(tuple(p for p, _, _ in SHARDED_BY)) and not name.startswith(sharded))
    }
    if "gradients" not in whole:
        whole["gradients"] = _unscattered_bytes(prediction, tight)
    freed = sum(whole.values()) * share * (1 - now / larger)
    if freed < WORTH * over:
        return []
    of = " and ".join(name for name, held in whole.items() if held)
    enough = ", enough by itself" if freed >= over else ""
    spread = f"ep{larger} spreads the experts, {routed / model.num_params:.0%} of the parameters, over {larger} ranks"
    return [f"{spread}: frees about {gibibytes(freed)} of {of}{enough}"]


def _legal_ep(prediction: Prediction) -> int | None:
    """The largest legal ep within a scale-up domain that is more than the plan's own, else the smallest beyond; None
    where there is none."""
    plan, domain = prediction.plan, min(island.domain_size for island in prediction.cluster.islands)
    most = max(mixture.experts for mixture in prediction.model.mixtures)
    legal = []
    for ep in range(plan.experts.ep + 1, min(most, plan.layout.num_ranks) + 1):
        if most % ep:
            continue
        other = msgspec.structs.replace(plan, experts=msgspec.structs.replace(plan.experts, ep=ep))
        if not check(other, prediction.model, prediction.cluster, prediction.train):
            legal.append(ep)
    inside = [ep for ep in legal if ep <= domain]
    return max(inside) if inside else min(legal, default=None)


def _sharded_prefixes(prediction: Prediction) -> tuple[str, ...]:
    """Categories of memory that the plan shards, as prefixes."""
    kept_whole, zero = _kept_whole(prediction), prediction.plan.layout.zero
    return tuple(prefix for prefix, level, _ in SHARDED_BY if zero >= level and prefix not in kept_whole)


def _kept_whole(prediction: Prediction) -> tuple[str, ...]:
    """Return the kinds of sharded state that a pipeline keeps whole: gathered parameters and, but for ZeRO-2,
    gradients, which accumulate to the last microbatch."""
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
        if name.startswith(prefix)
        and held > 0
        and layout.zero < level
        and prefix not in kept_whole
        and _legal(prediction, word)
    ]


def _legal(prediction: Prediction, word: str) -> bool:
    """Whether the plan may have one word more."""
    p = prediction
    return not check(over(p.plan, word), p.model, p.cluster, p.train)


def _next_power(value: float) -> int:
    power = 1
    while power < value:
        power *= 2
    return power
