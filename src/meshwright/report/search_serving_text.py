"""The answer of a search for a serving plan as text: the best plans, how sure they are, why the others lost."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.quantity import latency, seconds
from meshwright.report.page import Page
from meshwright.search.serving.found import FRONT, MORE, OBJECTIVES, RankedServing, ServingFound, ServingTie
from meshwright.search.serving.rates import RateSweep
from meshwright.search.serving.space import ServingCandidate, engine_words, words

#: Plans of the front, and losing layouts, that are listed.
SHOWN = 8
HEADS = ("devices", "TTFT p90", "TPOT p90", "E2E p90", "goodput", "cost", "sure")


def render(found: ServingFound, console: Console) -> None:
    """Print the whole answer to `console`."""
    with Page(console) as page:
        page.print(Text(verdict(found), "bold green" if found.good else "bold red"))
        page.print(Text(coverage(found), "dim"))
        for remark in found.remarks:
            page.print(Text(remark, "dim"))
        if found.best:
            page.title(f"Best of each layout: {OBJECTIVES[found.objective]}")
            _table(found, found.best, page)
            _latencies(found.best[0], page)
            _front(found, page)
        elif found.nearest is not None:
            page.title("Nearest")
            _table(found, (found.nearest,), page)
            for one in found.nearest.prediction.objectives:
                page.print(Text(kept_text(one)), indent=5)
        _losers(found, page)


def verdict(found: ServingFound) -> str:
    """Return the answer in one line."""
    if not found.best:
        if found.stopped:
            return "stopped before a plan was found that keeps the objectives: whether there is one is not known"
        return "no plan keeps the objectives" if found.nearest is not None else "nothing fits"
    best = found.best[0]
    devices = best.candidate.num_devices
    sure = "proven best under the cost model" if found.proven else "best of what was looked at, not proven"
    parts = [f"{devices} device{'s' if devices > 1 else ''}", said(found, best.candidate)]
    if best.most_rate is not None:
        parts.append(f"up to {best.most_rate:.3g} requests/s ({best.most_rate / devices:.3g} a device)")
    return f"{': '.join(parts[:2])}{''.join(', ' + part for part in parts[2:])}, {sure}"


def coverage(found: ServingFound) -> str:
    """Return how much of the space was looked at, in words."""
    return (
        f"{found.covered:,} plans in the space: {found.simulated:,} simulations, {len(found.losers):,} rejected, "
        f"in {seconds(found.seconds)}"
    )


def said(found: ServingFound, candidate: ServingCandidate) -> str:
    """Return a candidate in words: its plan, its engine, and its cluster where there are several."""
    where = f" on {found.clusters[candidate.where].name}" if len(found.clusters) > 1 else ""
    return f"{words(candidate.plan)} {engine_words(candidate.engine, found.serve)}{where}"


def cells(one: RankedServing) -> tuple[str, ...]:
    """Return the values of a plan under :data:`HEADS`."""
    metrics = one.prediction.metrics
    usd = one.usd_per_million_tokens
    goodput = metrics.goodput_req_per_s if one.most_rate is None else one.most_rate
    return (
        str(one.candidate.num_devices),
        *(latency(getattr(metrics, name).p90) for name in ("ttft_s", "tpot_s", "e2e_s")),
        f"{goodput:.3g}/s",
        "-" if usd is None else f"${usd:.3g}/Mtok",
        "-" if one.sure is None else f"{one.sure:.0%}",
    )


def untold(tie: ServingTie) -> str:
    """Return that a plan cannot be told from the first, and by how much of its bound the worst figure may differ."""
    low, high = f"{-tie.low:.0%} lower", f"{tie.high:.0%} higher"
    return f"a tie with 1: its worst latency, as a share of the bound, is {low} to {high} (80%)"


def others(one: RankedServing) -> str:
    """Return how many engines keep the objectives with a plan's layout besides the one shown."""
    count = one.variants
    return f"{count} other engine setting keeps them" if count == 1 else f"{count} other engine settings keep them"


def _table(found: ServingFound, best: tuple[RankedServing, ...], page: Page) -> None:
    """Numbers on one line and the plan under them, so that its words stay together on narrow terminals."""
    lines = [("", *HEADS), *(("=" if r.tie else str(i + 1), *cells(r)) for i, r in enumerate(best))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS) + 1)]
    for line, ranked in zip(lines, [None, *best]):
        shown = "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        page.print(Text(shown, "dim" if ranked is None else ""), indent=2, one_line=True)
        if ranked is None:
            continue
        page.print(Text(said(found, ranked.candidate), "bold" if ranked is best[0] else ""), indent=5)
        if ranked.variants:
            page.print(Text(f"{others(ranked)} on as many devices", "dim"), indent=5)
        if ranked.tie is not None:
            page.print(Text(untold(ranked.tie), "dim"), indent=5)
    if any(one.sure is not None for one in best):
        page.quiet("sure: share of the draws of uncertain costs in which every objective is kept")


def _latencies(one: RankedServing, page: Page) -> None:
    """The latencies of the best plan with their intervals."""
    metrics = one.prediction.metrics
    page.title("Latency of a request with the first of them")
    rows = [tuple(Text(cell, "dim", justify="right" if cell else "left") for cell in _LATENCY_HEADS)]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        summary = getattr(metrics, name)
        low, high = summary.mean_interval or (summary.mean, summary.mean)
        cells = (latency(summary.mean), f"{latency(low)} to {latency(high)}")
        cells += tuple(latency(v) for v in (summary.p50, summary.p90, summary.p99))
        rows.append((Text(name[:-2].upper()), *(Text(cell, justify="right") for cell in cells)))
    page.rows(rows)
    for kept in one.prediction.objectives:
        page.quiet(kept_text(kept))
    page.quiet(
        f"{metrics.throughput_tokens_per_s:,.0f} tokens/s, goodput {metrics.goodput_req_per_s:.3g} requests/s "
        f"({metrics.attainment:.1%}), batches of up to {one.prediction.peak_batch}"
    )


_LATENCY_HEADS = ("", "mean", "80% interval", "p50", "p90", "p99")


def kept_text(kept) -> str:
    """Return an objective and how it comes out, in words."""
    name = f"{kept.said} {latency(kept.value_s)}"
    over = kept.value_s / kept.bound_s
    return f"{name} within {latency(kept.bound_s)}" if kept.met else f"{name} is {over:.3g} x {latency(kept.bound_s)}"


def _front(found: ServingFound, page: Page) -> None:
    front = found.pareto
    if len(front) < 2:
        return
    page.title(f"Pareto front of {', '.join(FRONT[name] for name in found.front)} (simulated plans)")
    lines = [tuple(valued(name, v) for name, v in zip(found.front, values)) for _, values in front[:SHOWN]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line, (candidate, _) in zip(lines, front):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(line, widths))
        page.print(Text(f"{cells}  {said(found, candidate)}"), indent=2)
    if len(front) > SHOWN:
        page.quiet(f"and {len(front) - SHOWN} more: --json")


def valued(name: str, value: float) -> str:
    """Return a value of the front with its unit."""
    if name == "devices":
        return f"{value:g} device{'s' if value != 1 else ''}"
    if name == "cost":
        return f"${value:.4g}/h"
    return f"{value:,.4g} {FRONT[name]}" if name in MORE else f"{FRONT[name]} {latency(value)}"


def _losers(found: ServingFound, page: Page) -> None:
    """How many lost for each reason, and why the best candidate of every layout that is not shown did."""
    page.title("Why plans were rejected")
    rows = sorted(found.reasons.items(), key=lambda item: -item[1])
    page.rows([(Text(f"{n:,}", justify="right"), Text(why)) for why, n in rows])
    lost = sorted(found.lost_layouts, key=lambda one: one.far, reverse=True)
    if lost:
        page.title("Layouts that lost, by their nearest plan")
        page.rows([(Text(said(found, one.candidate)), Text(one.why, "dim")) for one in lost[: 2 * SHOWN]])
        if len(lost) > 2 * SHOWN:
            page.quiet(f"and {len(lost) - 2 * SHOWN} more: --json has why for every plan")


def render_sweep(sweep: RateSweep, console: Console) -> None:
    """Print the best plan at every rate to `console`."""
    with Page(console) as page:
        good = [one for one in sweep.points if one.found.good]
        told = f"{len(good)} of {len(sweep.points)} rates have a plan" + (
            ", stopped before the others" if sweep.stopped else ""
        )
        page.print(Text(told, "bold green" if sweep.good else "bold red"))
        rows = [tuple(Text(head, "dim") for head in ("requests/s", *HEADS, "plan"))]
        for one in sweep.points:
            best = one.found.best[0] if one.found.best else one.found.nearest
            if best is None:
                rows.append((Text(f"{one.rate:g}"), Text(verdict(one.found), "red")))
                continue
            name = said(one.found, best.candidate) + ("" if one.found.good else " (nearest: misses)")
            line = (f"{one.rate:g}", *cells(best), name)
            rows.append(tuple(Text(cell, "" if one.found.good else "dim") for cell in line))
        page.rows(rows)
