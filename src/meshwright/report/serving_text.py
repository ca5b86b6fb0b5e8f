"""A serving prediction as text: verdict, latencies, where the replicas' time goes, memory, what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from meshwright.answer.prediction import RankMemory
from meshwright.answer.serving_answer import ServingPrediction, Summary
from meshwright.answer.serving_check import WHOLE_PROMPTS
from meshwright.causes import WORDS
from meshwright.quantity import gibibytes, latency
from meshwright.report.bars import bar
from meshwright.report.facts import usd
from meshwright.report.page import Page

#: The values of a pool.
POOL_HEADS = ("role", "replicas", "busy", "cache blocks", "largest batch", "preemptions")
#: The values of a job beside requests.
BESIDE_HEADS = ("share", "speed", "samples/s", "iterations", "kernels run", "taken off")
#: The values of a group of requests.
GROUP_HEADS = ("requests", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "kept")
#: Groups of requests that are listed.
MOST_GROUPS = 12
#: The times of a request, in words.
LATENCIES = {
    "ttft_s": "time to first token (TTFT)",
    "tpot_s": "time per output token (TPOT)",
    "itl_s": "between two tokens (ITL)",
    "e2e_s": "end to end (E2E)",
    "queue_s": "waiting for the first iteration",
}


def render(prediction: ServingPrediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        for part in PARTS:
            part(prediction, page)


def _verdict(prediction: ServingPrediction, page: Page) -> None:
    lines = [""]
    for piece in verdict(prediction):
        joined = f"{lines[-1]} | {piece}" if lines[-1] else piece
        lines[-1:] = [joined] if len(joined) <= page.width else [lines[-1], piece]
    page.print(Text("\n".join(lines), "bold green" if prediction.good else "bold red"))
    for line in room_made_by(prediction):
        page.print(Text(line), indent=2)
    for warning in prediction.warnings:
        page.print(Text(f"! {warning}", "yellow"), indent=2)
    rows = [("model", prediction.model.name), ("cluster", prediction.cluster.name), ("plan", prediction.plan.text())]
    page.print()
    page.rows(
        [
            (Text(a, "dim"), Text(b))
            for a, b in [*rows, ("requests", prediction.serve.text()), ("served", served(prediction))]
        ]
    )


def served(prediction: ServingPrediction) -> str:
    """How many requests, by which replicas."""

    def counted(replicas: int, devices: int) -> str:
        return f"{replicas} replica{'s' if replicas > 1 else ''} of {devices} device{'s' if devices > 1 else ''}"

    layouts = [pool.plan.layout for pool in prediction.plan.pools]
    replicas = " and ".join(counted(layout.dp, layout.num_ranks // layout.dp) for layout in layouts)
    return f"{prediction.num_requests:,} requests by {replicas}"


def _beside(prediction: ServingPrediction, page: Page) -> None:
    """The jobs beside the requests, and what requests have without them."""
    rows = beside_rows(prediction)
    if not rows:
        return
    page.title("Jobs on the same devices")
    _table(page, BESIDE_HEADS, rows)
    page.quiet(without_jobs(prediction))


def _table(page: Page, heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> None:
    """Print rows, whose first cell has no head: `words` columns of words, then columns of numbers."""
    sides = ["left"] * words + ["right"] * (len(heads) + 1 - words)
    shown = [tuple(Text(cell, "dim", justify=side) for cell, side in zip(("", *heads), sides))]
    page.rows(shown + [tuple(Text(cell, justify=side) for cell, side in zip(row, sides)) for row in rows])


def beside_rows(prediction: ServingPrediction) -> list[tuple[str, ...]]:
    """The job beside each replica, and its values under :data:`BESIDE_HEADS`."""
    return [
        (
            one.job or "no job",
            f"{one.share:.1%}",
            f"{one.speed:.1%}",
            f"{one.samples_per_s:,.3g}",
            f"{one.slowdown:.2f}x",
            f"{one.busy_alone:.0%} to {one.busy:.0%}",
            f"{one.evicted:,}",
        )
        for one in prediction.beside
    ]


def without_jobs(prediction: ServingPrediction) -> str:
    """Return what requests have without jobs beside them, in words; "" where there are none."""
    alone = prediction.without
    if alone is None:
        return ""
    return (
        f"without them: TTFT p90 {latency(alone.ttft_s.p90)}, TPOT p90 {latency(alone.tpot_s.p90)}, "
        f"{alone.attainment:.1%} of the requests within their objectives"
    )


def _power(prediction: ServingPrediction, page: Page) -> None:
    """The row of servers that draws from one supply."""
    rows = power_rows(prediction)
    if rows:
        page.title("Power of the row")
        page.rows([(Text(what), Text(value, justify="right"), Text(about, "dim")) for what, value, about in rows])


def power_rows(prediction: ServingPrediction) -> list[tuple[str, ...]]:
    """(what, value, note) of the row of servers; empty where there is none."""
    row = prediction.power
    if row is None:
        return []
    low, high = row.most_interval
    more = f"{row.most_servers / row.rated_servers - 1:+.0%}" if row.rated_servers else "-"
    drawn = [
        ("may draw", f"{row.budget_w / 1e3:,.4g} kW", f"{_servers(row.rated_servers)} at rated power"),
        ("draws", f"{row.mean_w / 1e3:,.4g} kW", f"{_servers(row.servers)}, at most {row.peak_w / 1e3:,.4g} kW"),
        ("servers it feeds", f"{row.most_servers}", f"{more}, {low} to {high}; the same requests a second for each"),
    ]
    if not row.most_servers:  # there is no row to say more of
        return drawn
    return [
        *drawn,
        ("with these", f"{row.most_peak_w / 1e3:,.4g} kW", "at most"),
        ("low priority capped", f"{row.capped_low:.1%}", f"of the time, all servers {row.capped_all:.1%}"),
        ("requests take", f"{row.slower_low:.3f}x", f"as long at low priority, {row.slower_high:.3f}x at high"),
    ]


def _servers(number: int) -> str:
    return f"{number} server" if number == 1 else f"{number} servers"


def _pools(prediction: ServingPrediction, page: Page) -> None:
    """The pools and what goes between them."""
    found = prediction.transfers
    if found is None:
        return
    page.title("Pools")
    _table(page, POOL_HEADS, pool_rows(prediction), words=2)
    page.quiet(handed(prediction))
    page.title("A request's life, on average")
    page.rows([(Text(name), Text(latency(value), justify="right")) for name, value in found.stages_s.items()])


def pool_rows(prediction: ServingPrediction) -> list[tuple[str, ...]]:
    """The name of each pool, and its values under :data:`POOL_HEADS`."""
    return [
        (
            pool.name,
            pool.role,
            f"{pool.replicas} x {pool.devices}",
            f"{pool.busy:.1%}",
            f"{pool.peak_kv_blocks:,} of {pool.kv_blocks:,}",
            f"{pool.peak_batch:,}",
            f"{pool.preemptions:,}",
        )
        for pool in prediction.pools
    ]


def handed(prediction: ServingPrediction) -> str:
    """How many caches went from pool to pool, and how fast, in words; "" where none did."""
    found = prediction.transfers
    if found is None:
        return ""
    moved = found.moved_s
    return (
        f"{found.requests:,} caches of {gibibytes(found.mean_bytes)} on average were sent, in {latency(moved.mean)} "
        f"(p99 {latency(moved.p99)})"
    )


def verdict(prediction: ServingPrediction) -> tuple[str, ...]:
    """Return the answer in pieces: whether it fits, whether each objective is kept, and the rate of answers."""
    if prediction.metrics is None:
        tight = prediction.tightest
        share = prediction.serve.engine.memory
        room = f"{gibibytes(tight.capacity_bytes * share)} of {gibibytes(tight.capacity_bytes)}"
        held = gibibytes(sum(_without_cache(tight).values()))
        return (f"does not fit: {held} without the cache of a request", f"{room} are for serving (memory={share:g})")
    said = ["fits" if prediction.fits else f"does not fit: {gibibytes(-prediction.tightest.headroom_bytes)} over"]
    for one in prediction.objectives:
        at = f"{one.said} {latency(one.value_s)}"
        said.append(f"{at} within {latency(one.bound_s)}" if one.met else f"{at} misses {latency(one.bound_s)}")
    metrics = prediction.metrics
    said.append(f"{metrics.throughput_tokens_per_s:,.0f} tokens/s")
    if prediction.objectives:
        said.append(f"goodput {metrics.goodput_req_per_s:.3g} requests/s ({metrics.attainment:.1%})")
    return tuple(said)


def room_made_by(prediction: ServingPrediction) -> tuple[str, ...]:
    """Return what would make room where not even one request fits, by what fills the memory most."""
    if prediction.metrics is not None:
        return ()
    words, tight = prediction.serve.engine, prediction.tightest
    held, room = _without_cache(tight), tight.capacity_bytes * words.memory
    said = [f"needs more than {gibibytes(sum(held.values()) - room)} less on {tight.rank}; any of these, or several:"]
    if held["weights"] > room / 2:
        said.append("more devices to a replica: a larger tp or pp, or ep of a mixture of experts")
        said.append("fewer bytes a weight: weights=int8 or weights=int4 in --plan (meshwright explain weights)")
    if held.get("workspace", 0.0) > room / 4:
        whole = words.policy in (*WHOLE_PROMPTS, "flover")
        how = f"max_batch= ({words.max_batch:,} now), or a policy that cuts prompts (vllm-v1)" if whole else "budget="
        said.append(f"fewer tokens an iteration, whose activations are the workspace: a smaller {how}")
    if words.draft and words.draft not in ("ngram", "mtp"):
        said.append(f"a smaller draft= than {words.draft}, or draft=ngram, which has no weights")
    if held.get("job beside", 0.0) > room / 4:
        said.append("a smaller job than beside= says: fewer parameters, or a smaller mb= of it")
    if words.memory < 0.9:
        said.append(f"a larger share of the device for serving than memory={words.memory:g}")
    return tuple(said)


def _without_cache(rank: RankMemory) -> dict[str, float]:
    return {name: size for name, size in rank.alive.items() if name != "keys and values"}


def _latencies(prediction: ServingPrediction, page: Page) -> None:
    metrics = prediction.metrics
    if metrics is None:
        return
    page.title("Latency of a request")
    rows = [_row(words, getattr(metrics, name)) for name, words in LATENCIES.items()]
    if prediction.query_s is not None:
        rows.append(_row("a query, to its last answer", prediction.query_s))
    _table(page, ("mean", "80% interval", "p50", "p90", "p99"), rows)
    page.quiet(
        f"batches of up to {prediction.peak_batch}, {prediction.iterations:,} iterations, "
        f"{prediction.peak_kv_blocks:,} of {prediction.kv_blocks:,} cache blocks, "
        f"{prediction.preemptions:,} preemptions"
        + (f", {prediction.swaps:,} of them to the host's memory" if prediction.swaps else "")
        + (f", {prediction.withdrawn:,} requests withdrawn" if prediction.withdrawn else "")
        + (f", {prediction.hit_rate:.1%} of the prompts' tokens found in the cache" if prediction.hit_rate else "")
    )


def _row(words: str, summary: Summary) -> tuple[str, ...]:
    between = " to ".join(map(latency, summary.mean_interval)) if summary.mean_interval else ""
    return words, latency(summary.mean), between, *map(latency, (summary.p50, summary.p90, summary.p99))


def _groups(prediction: ServingPrediction, page: Page) -> None:
    if not prediction.groups:
        return
    page.title("By whose requests they are")
    _table(page, GROUP_HEADS, group_rows(prediction)[:MOST_GROUPS])
    if len(prediction.groups) > MOST_GROUPS:
        page.quiet(f"{len(prediction.groups) - MOST_GROUPS} more are in --json")
    if prediction.fairness is not None:
        page.quiet(fairness(prediction))


def group_rows(prediction: ServingPrediction) -> list[tuple[str, ...]]:
    """The name of each group of requests, and its values under :data:`GROUP_HEADS`."""
    rows = []
    for one in prediction.groups:
        times = (one.ttft_s.p50, one.ttft_s.p99, one.tpot_s.p50, one.tpot_s.p99, one.e2e_s.p50)
        kept = f"{one.attainment:.1%}" if prediction.objectives else "-"
        rows.append((one.name, f"{one.requests:,}", *map(latency, times), kept))
    return rows


def fairness(prediction: ServingPrediction) -> str:
    """How fairly tenants that waited together were served, in words; "" where there are not several."""
    fair = prediction.fairness
    if fair is None:
        return ""
    return (
        f"tenants waited beside one another {fair.contended:.0%} of the time; two that both waited were up to "
        f"{fair.service_gap_tokens:,.0f} tokens of service apart (a generated one counts twice), Jain's index of "
        f"service {fair.jain_index:.3f}"
    )


def causes(prediction: ServingPrediction) -> list[tuple[str, str, float, float]]:
    """(name, what, seconds, share) of every cause that takes any of the replicas' time."""
    total = sum(prediction.attribution.values())
    words = WORDS | {"host": "host of the engine (CPU)", "idle": "idle: no requests"}
    words |= {"kv links": "links with caches, beside the replicas"}
    return [(name, words.get(name, name), s, s / total) for name, s in prediction.attribution.items() if s]


def _attribution(prediction: ServingPrediction, page: Page) -> None:
    found = causes(prediction)
    if not found:
        return
    page.title("Where the replicas' time goes")
    width = max(page.width - 70, 8)
    page.rows(
        [
            (
                Text(what),
                Text(f"{share:.1%}", justify="right"),
                Text(bar(0.0, share, width, unicode=page.unicode), "blue"),
            )
            for _, what, _, share in found
        ]
    )


def _usage(prediction: ServingPrediction, page: Page) -> None:
    rows = used(prediction)
    if not rows:
        return
    page.title("Use of the devices")
    page.rows([(Text(what), Text(value, justify="right"), Text(about, "dim")) for what, value, about in rows])


def used(prediction: ServingPrediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of the use of the devices; empty where nothing was served."""
    found = prediction.usage
    if found is None:
        return []
    rows = [
        ("devices compute", f"{found.busy:.1%}", "of the time, the rest waits for the host or for requests"),
        ("operations (MFU)", f"{found.mfu:.1%}", "of the peak, those that answers need"),
        ("memory traffic (MBU)", f"{found.mbu:.1%}", "of the memory's rate, weights and cache read"),
    ]
    cost, energy = "not included", "not included"
    if found.usd_per_million_tokens is not None:
        cost = usd(found.usd_per_million_tokens)
    if found.joules_per_token is not None:
        energy = f"{found.joules_per_token / 3.6:,.3g} kWh"  # a joule a million times, in kWh
        if found.joules_interval is not None:
            low, high = (joules / 3.6 for joules in found.joules_interval)
            energy += f" ({low:,.3g} to {high:,.3g})"
    said = found.source.split("; ")
    rows.append(("cost", cost, f"for a million tokens of answers; {said[0]}"))
    rows.append(("energy", energy, f"for as many; {said[-1]}"))
    return rows


def _memory(prediction: ServingPrediction, page: Page) -> None:
    tight = prediction.tightest
    page.title(f"Memory of the fullest rank: {tight.rank} (x{tight.multiplicity})")
    held = [(name, size) for name, size in tight.alive.items() if size]
    page.rows([(Text(name), Text(gibibytes(size), justify="right")) for name, size in held])
    page.print(Text(f"{gibibytes(tight.peak_bytes)} of {gibibytes(tight.capacity_bytes)}"), indent=2)


def _assumptions(prediction: ServingPrediction, page: Page) -> None:
    page.title("Assumptions (! = not confirmed)")
    page.rows(
        [
            (Text("!" if a.flagged else " ", "bold yellow"), Text(a.name), Text(a.value), Text(a.source, "dim"))
            for a in prediction.assumptions
        ]
    )


#: The parts of the page, in order.
PARTS = (_verdict, _latencies, _beside, _power, _pools, _groups, _attribution, _usage, _memory, _assumptions)
