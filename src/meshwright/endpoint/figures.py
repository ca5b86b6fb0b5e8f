"""Figures: how the server is doing, in Prometheus' text form, under the names that vLLM's dashboards read.

What vLLM has no name for is called ``meshwright:``. Sums go on where an engine died and another took its place.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from meshwright.endpoint.seam import EngineFigures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Edges of the histograms: of times to the first token and of whole answers, of gaps between tokens, of tokens.
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
TOKENS = tuple(float(2**i) for i in range(18))
#: Sums of an engine: field -> name and what it is.
SUMS = {
    "prompt_tokens": (
        "meshwright:prompt_tokens_computed",
        "Prompt tokens computed, those of the prefix cache left out.",
    ),
    "cache_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "cache_hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preempted": ("vllm:num_preemptions", "Requests preempted by the engine."),
    "drafted": ("vllm:spec_decode_num_draft_tokens", "Tokens guessed by speculation."),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that came true."),
    "iterations": ("meshwright:iterations", "Iterations of the engine."),
    "busy_s": ("meshwright:busy_seconds", "Seconds the engine spent in iterations."),
}


class FrontFigures:
    """The figures of one front; the engine's own are added as it reports them."""

    def __init__(self, model: str):
        self.registry, self.model = CollectorRegistry(), model
        self.engine, self._before = EngineFigures(), EngineFigures()
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of answered requests.")
        self.generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.restarts = self._counter("meshwright:engine_restarts", "Engine processes that died and were replaced.")
        self.retried = self._counter("meshwright:requests_retried", "Requests that went on at another engine process.")
        self.finished = self._counter("vllm:request_success", "Requests that ended.", "finished_reason")
        self.refused = self._counter("meshwright:requests_refused", "Requests refused, by status.", "status")
        self.ttft_s = self._histogram("vllm:time_to_first_token_seconds", "Seconds to the first token.", LONG_S)
        self.itl_s = self._histogram("vllm:inter_token_latency_seconds", "Seconds between tokens.", SHORT_S)
        self.tpot_s = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Seconds a token of a request, without its first.", SHORT_S
        )
        self.e2e_s = self._histogram("vllm:e2e_request_latency_seconds", "Seconds from arrival to end.", LONG_S)
        self.prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.answer_lengths = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.registry.register(self)

    def reported(self, figures: EngineFigures) -> None:
        """Take the engine's figures."""
        self.engine = figures

    def lost(self) -> None:
        """Add the sums of an engine that died to what the next one counts from 0."""
        sums = {name: getattr(self._before, name) + getattr(self.engine, name) for name in SUMS}
        self._before = EngineFigures(**sums)
        self.engine = EngineFigures(blocks=self.engine.blocks)
        self.restarts.inc()

    def text(self) -> bytes:
        """Return all figures in Prometheus' text form."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's own figures, for the registry."""
        now = self.engine
        share = now.blocks_used / now.blocks if now.blocks else 0.0
        gauges = (
            ("vllm:num_requests_running", "Requests that run.", now.running),
            ("vllm:num_requests_waiting", "Requests that wait.", now.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks in use, 1 for all.", share),
        )
        if now.compared:
            title = "Relative distance of scores under the KV budget from those of whole caches."
            gauges += (("meshwright:kv_budget_score_distance", title, now.score_distance),)
        for name, title, value in gauges:
            gauge = GaugeMetricFamily(name, title, labels=["model_name"])
            gauge.add_metric([self.model], value)
            yield gauge
        for field, (name, title) in SUMS.items():
            counter = CounterMetricFamily(name, title, labels=["model_name"])
            counter.add_metric([self.model], getattr(self._before, field) + getattr(now, field))
            yield counter

    def _counter(self, name: str, title: str, *labels: str) -> Counter:
        counter = Counter(name, title, ["model_name", *labels], registry=self.registry)
        return counter if labels else counter.labels(self.model)

    def _histogram(self, name: str, title: str, edges: tuple[float, ...]) -> Histogram:
        return Histogram(name, title, ["model_name"], registry=self.registry, buckets=edges).labels(self.model)
