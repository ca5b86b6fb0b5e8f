"""Techniques of serving over one plan as text: what each would bring, the best first."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.quantity import latency
from meshwright.report.page import Page
from meshwright.search.serving.learned import Gains
from meshwright.search.serving.techniques import HELPS, ServedAttempt, ServedRanking

HEADS = ("technique", "gain", "in time", "tokens/s", "TTFT p90", "TPOT p90", "answers")


def render(ranking: ServedRanking, console: Console, said: Gains | None = None) -> None:
    """Print the ranking to `console`, below the gain that records `said` a technique has where they chose it."""
    with Page(console) as page:
        if said is not None:
            page.print(Text(chosen(ranking, said), "bold"))
        if said is None or ranking.attempts or ranking.before.metrics is None:
            page.print(Text(verdict(ranking), "bold"))
        page.print(Text(f"ranked by {ranking.measure}", "dim"))
        if ranking.stopped:
            page.print(Text(f"stopped after {len(ranking.attempts)} techniques: others were not tried", "yellow"))
        tried = [one for one in ranking.attempts if not one.why and ranking.changes(one)]
        rows = [tuple(Text(head, "dim") for head in HEADS), _row(ranking, ranking.before, "as it is")]
        page.rows([*rows, *(_row(ranking, one, one.technique.words) for one in tried)])
        same = [one.technique.words for one in ranking.attempts if not one.why and not ranking.changes(one)]
        if same:
            page.title("Nothing changes for these requests")
            page.print(Text(", ".join(same)), indent=2)
        refused = [one for one in ranking.attempts if one.why]
        if refused:
            page.title("Not on this plan")
            page.rows([(Text(one.technique.words), Text(one.why, "dim")) for one in refused])


def chosen(ranking: ServedRanking, said: Gains) -> str:
    """Return the technique that records chose, with the gain that they expect of it."""
    source = f"{said.records} records of {said.questions} {'question' if said.questions == 1 else 'questions'}"
    if not ranking.attempts:
        return f"by {source} nothing that this plan takes gains here"
    words = ranking.attempts[0].technique.words
    return f"chosen by {source}: {words}, said to gain {dict(said.expected)[words]:.3f}x"


def verdict(ranking: ServedRanking) -> str:
    """Return the technique that gains most, and how much."""
    if ranking.before.metrics is None:
        return f"the plan itself does not fit: {ranking.before.why}"
    if not ranking.helps:
        tried = ranking.attempts
        if len(tried) != 1:
            return f"none of {len(tried)} techniques gains a percent"
        gain = ranking.gain(tried[0])
        return f"it loses: {gain:.3f}x" if 0 < gain < 2 - HELPS else "it gains less than a percent"
    best = ranking.helps[0]
    if not ranking.value(ranking.before):
        return f"{best.technique.words} keeps the objectives, and the plan as it is does at no rate"
    return f"most is gained by {best.technique.words}: {ranking.gain(best):.3f}x"


def _row(ranking: ServedRanking, one: ServedAttempt, name: str) -> tuple[Text, ...]:
    metrics, gain = one.metrics, ranking.gain(one)
    cells = [name, f"{gain:.3f}x" if gain else "-", "-" if one.rate is None else f"{one.rate:.3g}/s"]
    if metrics is None:
        cells += ["-"] * 3
    else:
        cells += [f"{metrics.throughput_tokens_per_s:,.0f}", latency(metrics.ttft_s.p90), latency(metrics.tpot_s.p90)]
    cells.append("exact" if one.technique.exact else "approx.")
    return tuple(Text(cell) for cell in cells)
