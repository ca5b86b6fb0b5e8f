"""The prediction of a measured server as text: latencies, what its time goes to, and what that rests on."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.server import ServerPrediction
from meshwright.quantity import seconds
from meshwright.report.page import Page
from meshwright.report.serving_text import LATENCIES


def render(prediction: ServerPrediction, console: Console) -> None:
    """Print the whole prediction to `console`."""
    with Page(console) as page:
        page.print(Text(verdict(prediction), "bold green" if prediction.good else "bold red"))
        for warning in prediction.warnings:
            page.print(Text(f"! {warning}", "yellow"), indent=2)
        page.print()
        server = prediction.profile.server
        assert server is not None
        rows = [("server", server.url), ("model", server.model), ("requests", prediction.serve.text())]
        page.rows([(Text(a, "dim"), Text(b)) for a, b in rows if b])
        page.title("Latency of a request")
        head = ("", "mean", "80% interval", "p50", "p90", "p99")
        table = [tuple(Text(cell, "dim", justify="right" if cell else "left") for cell in head)]
        for name, words in LATENCIES.items():
            one = getattr(prediction.metrics, name)
            between = " to ".join(map(seconds, one.mean_interval)) if one.mean_interval else ""
            values = (seconds(one.mean), between, *map(seconds, (one.p50, one.p90, one.p99)))
            table.append((Text(words), *(Text(value, justify="right") for value in values)))
        page.rows(table)
        hits = f", {prediction.hit_rate:.1%} of the prompts' tokens found in the cache" if prediction.hit_rate else ""
        page.quiet(
            f"batches of up to {prediction.peak_batch}, {prediction.iterations:,} iterations, "
            f"{prediction.preemptions:,} preemptions{hits}"
        )
        page.title("Assumptions (! = not confirmed)")
        page.rows(
            [
                (Text("!" if a.flagged else " ", "bold yellow"), Text(a.name), Text(a.value), Text(a.source, "dim"))
                for a in prediction.assumptions
            ]
        )


def verdict(prediction: ServerPrediction) -> str:
    """``2,050 tokens/s``, behind whether each objective is kept."""
    said = []
    for one in prediction.objectives:
        at = f"{one.said} {seconds(one.value_s)}"
        said.append(f"{at} within {seconds(one.bound_s)}" if one.met else f"{at} misses {seconds(one.bound_s)}")
    metrics = prediction.metrics
    said.append(f"{metrics.throughput_req_per_s:.3g} requests/s")
    said.append(f"{metrics.throughput_tokens_per_s:,.0f} tokens/s")
    return " | ".join(said)
