"""What makes a plan illegal for a model, a cluster and a workload. No costs are needed: what does not fit in memory is
found by predicting, and is another kind of no.

Every rule is a function that yields its violations; all of them are asked, so one run tells everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan import Plan
from meshwright.plan.slices import kinds, meet_inside
from meshwright.spec.cluster import Cluster
from meshwright.spec.layers import Moe
from meshwright.spec.model import Model
from meshwright.spec.workload import OPTIMIZER_MOMENTS, Train

#: Microbatches times layers of one step: far above what anybody runs, and what still takes seconds to simulate.
MAX_PASSES = 2_000_000


def violations(plan: Plan, model: Model, cluster: Cluster, train: Train) -> list[Diagnostic]:
    """All violations, in the order of the rules; empty for a legal plan. An open ``dp`` is filled in first."""
    plan = plan.on(cluster.num_devices)
    rules = (
        _ranks, _tensor, _stages, _batch, _shares, _context, _experts, _zero, _recompute, _precision, _order, _positions
    )  # fmt: skip
    return [d for rule in rules for d in rule(plan, model, cluster, train)]


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=f"plan.{place}", help=help)


def divisors(number: int, limit: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, limit) + 1) if number % d == 0)


def _ranks(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout, have = plan.layout, cluster.num_devices
    if layout.num_ranks == have:
        return
    other = layout.tp * layout.pp * layout.cp
    product = f"tp{layout.tp} * pp{layout.pp} * cp{layout.cp} * dp{layout.dp} = {layout.num_ranks}"
    if layout.num_ranks > have:
        message = f"the plan needs {layout.num_ranks} ranks and {cluster.name} has {have} devices"
    else:
        message = f"the plan has {layout.num_ranks} ranks and {cluster.name} has {have} devices"
    if other > have:
        help = "take smaller axes"
    elif have % other == 0:
        help = f"with these tp, pp and cp, dp is {have // other}"
    else:
        help = f"tp, pp and cp must divide {have}; to leave devices out, say a smaller cluster"
    yield _bad("P010", message, product, help)


def _tensor(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    tp = plan.layout.tp
    if tp == 1:
        return
    for kind, block in enumerate(model.blocks):
        where = f"{model.name}, layer kind {kind}" if len(model.blocks) > 1 else model.name
        for a in block.attentions:
            if a.heads % tp:
                yield _bad(
                    "P011",
                    f"tp={tp} does not divide num_heads={a.heads} ({where})",
                    f"layout.tp = {tp}",
                    f"valid tp: {divisors(a.heads, cluster.num_devices)}",
                )
            elif not a.kv_lora_rank and a.kv_heads % tp and tp % a.kv_heads:
                yield _bad(
                    "P011",
                    f"tp={tp} and num_kv_heads={a.kv_heads} do not divide each other ({where})",
                    f"layout.tp = {tp}",
                    f"valid tp: {divisors(a.kv_heads, cluster.num_devices)}, or a multiple of {a.kv_heads}",
                )
        width = block.mlp.shared_ffn if isinstance(block.mlp, Moe) else getattr(block.mlp, "ffn", 0)
        if width % tp:
            yield _bad(
                "P011",
                f"tp={tp} does not divide the MLP width {width} ({where})",
                f"layout.tp = {tp}",
                f"valid tp: {divisors(width, cluster.num_devices)}",
            )
    if plan.layout.sp and train.seq_len // plan.layout.cp % tp:
        yield _bad(
            "P012",
            f"sequence parallelism shards {train.seq_len // plan.layout.cp} tokens over tp={tp}, which does not divide",
            f"layout.tp = {tp}",
            "choose a tp that divides the sequence on a rank, or say nosp",
        )


def _stages(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout, count = plan.layout, plan.num_stages
    if layout.stages:
        if len(layout.stages) != count:
            yield _bad(
                "P013",
                f"stages= names {len(layout.stages)} stages and pp{layout.pp} * vpp{plan.pipeline.vpp} makes {count}",
                f"layout.stages = {layout.stages}",
                f"give {count} numbers",
            )
        if sum(layout.stages) != model.num_layers:
            yield _bad(
                "P013",
                f"stages= hold {sum(layout.stages)} layers and {model.name} has {model.num_layers}",
                f"layout.stages = {layout.stages}",
                f"the numbers must add up to {model.num_layers}",
            )
    elif count > model.num_layers:
        yield _bad(
            "P013",
            f"{count} stages for {model.num_layers} layers leave stages empty ({model.name})",
            f"pp{layout.pp} * vpp{plan.pipeline.vpp}",
            f"at most {model.num_layers} stages",
        )


def _batch(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    per_wave = plan.layout.dp * plan.pipeline.microbatch
    if plan.layout.shares:
        return
    if train.global_batch % per_wave:
        lower = train.global_batch // per_wave * per_wave
        near = " or ".join(str(b) for b in (lower, lower + per_wave) if b)
        yield _bad(
            "P014",
            f"global batch {train.global_batch} is not a multiple of dp{plan.layout.dp} * mb{plan.pipeline.microbatch} "
            f"= {per_wave}",
            f"pipeline.microbatch = {plan.pipeline.microbatch}",
            f"the batch is never changed for you: take batch={near}, or a dp and mb whose product divides it",
        )
        return
    yield from _microbatches(plan, model, train.global_batch // per_wave)


def _microbatches(plan: Plan, model: Model, microbatches: int) -> Iterator[Diagnostic]:
    """What a pipeline must say to this many microbatches."""
    if microbatches * model.num_layers > MAX_PASSES:
        yield _bad(
            "P024",
            f"{microbatches:,} microbatches through {model.num_layers} layers are more than a step is simulated for",
            f"pipeline.microbatch = {plan.pipeline.microbatch}",
            f"at most {MAX_PASSES // model.num_layers:,} microbatches: take a smaller batch, or a larger dp or mb",
        )
    family = schedules.get(plan.pipeline.schedule)
    yield from family.legality(plan.layout.pp, microbatches, plan.pipeline.vpp)


def _shares(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout, mb = plan.layout, plan.pipeline.microbatch
    if not layout.shares or layout.num_ranks != cluster.num_devices:
        return
    place = f"layout.shares = {layout.shares}"
    found = kinds(layout, cluster)
    if len(layout.shares) != len(found):
        are = "; ".join(f"{len(k.members)} on {' + '.join(dict.fromkeys(d.name for d in k.devices))}" for k in found)
        yield _bad(
            "P025",
            f"shares= names {len(layout.shares)} kinds of data-parallel slices and this layout has {len(found)}: {are}",
            place,
            f"give {len(found)} numbers" if len(found) > 1 else "drop shares: all slices are alike",
        )
        return
    total = mb * sum(len(kind.members) * share for kind, share in zip(found, layout.shares))
    if total != train.global_batch or min(layout.shares) < 1:
        sums = " + ".join(f"{len(kind.members)} x {share}" for kind, share in zip(found, layout.shares))
        yield _bad(
            "P025",
            f"({sums}) microbatches of mb{mb} are {total} sequences and the global batch is {train.global_batch}",
            place,
            "every slice takes at least one microbatch, and together they take the batch",
        )
        return
    if layout.shards_gradients:
        yield _bad(
            "P026",
            "sharded gradients are exchanged as often as there are microbatches, which is not as often on all slices",
            f"layout.zero = {layout.zero} with shares",
            "say zero1, or drop shares",
        )
    if not meet_inside(layout, plan.experts.ep * plan.etp, found):
        yield _bad(
            "P026",
            f"ep{plan.experts.ep} exchanges tokens between slices in every microbatch, and they do not run as many",
            f"experts.ep = {plan.experts.ep} with shares",
            "take an ep that stays inside slices of one kind, or drop shares",
        )
    for share in layout.shares:
        yield from _microbatches(plan, model, share)


def _context(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    cp, algorithm, swap = plan.layout.cp, plan.sequence.algorithm, plan.sequence.ulysses
    if swap > 1 and (algorithm == "ulysses" or cp % swap or swap >= cp):
        inner = [n for n in range(2, cp) if cp % n == 0]
        yield _bad(
            "P015",
            f"ulysses{swap} swaps heads among {swap} ranks inside a ring or an allgather of cp={cp} / {swap}"
            + (", and ulysses is neither" if algorithm == "ulysses" else ""),
            f"sequence.ulysses = {swap}",
            f"valid inside cp{cp}: {', '.join(f'ulysses{n}' for n in inner) or 'none'}"
            + (f"; or ulysses alone for all {cp}" if cp > 1 else ""),
        )
        return
    if cp == 1:
        return
    outer = cp // swap
    pieces = lcm(2 * outer, cp) if algorithm != "ulysses" and train.causal else cp
    if train.seq_len % pieces:
        why = (
            "balanced causal attention takes an early and a late piece a rank"
            if pieces > cp
            else "each rank takes one piece"
        )
        yield _bad(
            "P015",
            f"a sequence of {train.seq_len} tokens does not divide into {pieces} pieces ({why})",
            f"layout.cp = {cp}",
            f"choose a cp such that {'2 * cp' if pieces > cp else 'cp'} divides {train.seq_len}",
        )
    if plan.head_swap > 1:
        word = "cp" if algorithm == "ulysses" else "ulysses"
        for attention in model.attentions:
            heads = attention.heads // plan.layout.tp
            if heads % plan.head_swap:
                yield _bad(
                    "P015",
                    f"ulysses splits a rank's {heads} heads over {word}={plan.head_swap}, which does not divide",
                    f"layout.cp = {cp}" if word == "cp" else f"sequence.ulysses = {swap}",
                    f"valid {word}: {divisors(heads, cluster.num_devices)}; or ring",
                )
    if plan.memory.attention == "unfused" and algorithm == "ring":
        yield _bad(
            "P016",
            "ring attention merges partial softmaxes, which the unfused kernels do not give",
            "memory.attention = unfused",
            "say flash, or ulysses instead of ring",
        )


def _experts(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    ep, etp, layout = plan.experts.ep, plan.etp, plan.layout
    mixtures = model.mixtures
    if not mixtures:
        if ep > 1 or plan.experts.etp > 1:
            yield _bad("P017", f"{model.name} has no experts", f"experts.ep = {ep}", "drop ep and etp")
        return
    if layout.tp > 1 and not layout.sp:
        yield _bad(
            "P017",
            "a mixture of experts under tensor parallelism dispatches sequence shards",
            "layout.sp = False",
            "drop nosp",
        )
    for spec in mixtures:
        if spec.experts % ep:
            yield _bad(
                "P017",
                f"ep={ep} does not divide num_experts={spec.experts} ({model.name})",
                f"experts.ep = {ep}",
                f"valid ep: {divisors(spec.experts, cluster.num_devices)}",
            )
        if spec.ffn % etp:
            yield _bad(
                "P017",
                f"etp={etp} does not divide the expert width {spec.ffn} ({model.name})",
                f"experts.etp = {etp}",
                f"valid etp: {divisors(spec.ffn, layout.tp * layout.cp * layout.dp)}",
            )
    inner = layout.tp * layout.cp * layout.dp
    if inner % (ep * etp):
        yield _bad(
            "P018",
            f"ep{ep} * etp{etp} = {ep * etp} does not divide tp*cp*dp = {inner}: the expert mesh refactors those ranks",
            f"experts.ep = {ep}",
            f"valid ep at etp={etp}: {divisors(inner // etp, inner) if inner % etp == 0 else 'none'}",
        )


def _zero(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    layout = plan.layout
    if layout.shard and (layout.dp * layout.cp) % layout.shard:
        yield _bad(
            "P019",
            f"the sharding group of {layout.shard} does not divide dp*cp = {layout.dp * layout.cp}",
            f"layout.shard = {layout.shard}",
            f"valid: {divisors(layout.dp * layout.cp, 4096)}",
        )
    if layout.zero >= 2 and layout.pp > 1 and schedules.get(plan.pipeline.schedule).placement == "bidirectional":
        sharded = "parameters" if layout.zero == 3 else "gradients"
        yield _bad(
            "P020",
            f"{plan.pipeline.schedule} holds every stage on two ranks, which sharded {sharded} do not express",
            f"layout.zero = {layout.zero} with {plan.pipeline.schedule}",
            "say zero1, or another schedule",
        )


def _recompute(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    memory = plan.memory
    if memory.layers and memory.recompute == "none":
        yield _bad(
            "P021",
            f"recompute_layers={memory.layers} without a recompute mode",
            f"memory.layers = {memory.layers}",
            "say full or selective",
        )
    most = max(plan.layout.stages or (-(-model.num_layers // plan.num_stages),))
    if memory.layers > most:
        yield _bad(
            "P021",
            f"recompute_layers={memory.layers} and a chunk has at most {most} layers",
            f"memory.layers = {memory.layers}",
            f"at most {most}; 0 or nothing means all",
        )


def _precision(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    precision = plan.precision
    for name in ("grads", "moments"):
        if getattr(precision, name) == "none":
            yield _bad(
                "P022",
                f"{name}=none: there is nothing to train with",
                f"precision.{name} = none",
                "fp32, bf16 or fp16" if name == "grads" else "fp32, bf16 or fp8",
            )
    if train.optimizer not in OPTIMIZER_MOMENTS:
        yield _bad(
            "P022",
            f"unknown optimizer {train.optimizer!r}",
            "precision.moments",
            f"known: {', '.join(OPTIMIZER_MOMENTS)}",
        )

    compute = precision.compute or train.dtype
    if precision.params == "fp8" and compute in ("fp32", "fp16", "bf16"):
        yield _bad(
            "P022",
            f"params=fp8 keeps quantised weights only, and {compute} multiplies 16 bits or more",
            "precision.params = fp8",
            "say fp8, fp8_row, mxfp8 or fp8_block as well, or drop params=fp8",
        )


def _order(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    if plan.experts.ep > 1 and plan.layout.order[-1] != "pp" and plan.layout.pp > 1:
        yield _bad(
            "P023",
            "the expert mesh refactors tp, cp and dp, which must be neighbours on the cluster",
            f"layout.order = {'-'.join(plan.layout.order)}",
            "put pp last: order=tp-cp-dp-pp",
        )


def _positions(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    yield from beyond_positions(model, train)


def beyond_positions(model: Model, train: Train) -> Iterator[Diagnostic]:
    """W006 for a sequence beyond a table of learned positions, whatever the plan; rotary positions go on."""
    most = min(model.max_seq_len or model.learned_positions, model.learned_positions)
    if model.learned_positions and train.longest_document > most:
        help = f"at most seq={most}; documents of up to {most} tokens may be packed (lengths=)"
        message = f"{model.name} has learned positions for {most:,} tokens, not for {train.longest_document:,}"
        yield Diagnostic(code="W006", message=message, place=f"--train seq={train.seq_len}", help=help)
