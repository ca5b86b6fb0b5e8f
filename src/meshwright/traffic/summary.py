"""The summary of a measured traffic: latencies, errors, how exact prompts and times of sending were."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np

from meshwright.answer.latency import objectives_kept, serving_metrics
from meshwright.answer.serving_answer import Kept, ServingMetrics
from meshwright.spec.serve import Serve
from meshwright.traffic.record import WITHDRAWN, Traffic
from meshwright.traffic.replay import ReplayEnd
from meshwright.traffic.timeline import served

#: Seconds later than due from which a request was sent late, and the share of a core from which this process was busy.
LATE_S, BUSY = 0.01, 0.8


class TrafficSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A measured traffic in figures. ``metrics`` are those of a prediction (None where nothing was answered), without
    time in a queue, which only the server knows. ``errors`` counts requests by what went wrong. ``late_s`` are the
    50th, 90th and 99th percentile and the most that requests were sent after they were due, ``late`` how many of them
    by more than 10 ms. ``busy`` is the share of a core that the client used. ``prompts`` says how they were made;
    ``prompt_off`` is the most tokens that one was off, None where the server does not count, and ``shorter`` how many
    answers ended before their last token. ``counted``: tokens of answers are pieces of streams, as the server reports
    no usage. ``hit_rate`` is the share of prompts' tokens that the server had cached, None where it does not say."""

    format_version: int = 1
    url: str
    model: str
    serve: str
    requests: int
    answered: int
    withdrawn: int
    errors: dict[str, int]
    metrics: ServingMetrics | None
    objectives: tuple[Kept, ...]
    peak_open: int
    late_s: tuple[float, float, float, float]
    late: int
    busy: float
    prompts: str
    prompt_off: int | None
    shorter: int
    counted: bool
    hit_rate: float | None
    parts: int

    @property
    def good(self) -> bool:
        """Whether everything was answered, and every objective is kept."""
        return self.answered + self.withdrawn == self.requests and all(one.met for one in self.objectives)

    @property
    def remarks(self) -> list[str]:
        """Return what whoever reads the figures should know."""
        said = []
        if self.late:
            worst = f"{self.late_s[-1] * 1e3:.0f} ms at most"
            said.append(f"{self.late:,} requests were sent more than {LATE_S * 1e3:g} ms after they were due, {worst}")
        if self.busy > BUSY:
            said.append(f"the client used {self.busy:.0%} of a core: times between tokens include its own")
        if self.prompt_off:
            said.append(f"prompts are up to {self.prompt_off} tokens off, as the server counts them")
        if self.shorter:
            said.append(f"{self.shorter:,} answers ended before their last token (the server takes no ignore_eos)")
        if self.counted:
            said.append("the server reports no usage: tokens of answers are pieces of their streams")
        if self.parts > 1:
            said.append(f"{self.parts} runs: each went on with an empty server")
        return said


def summed_up(serve: Serve, traffic: Traffic, end: ReplayEnd) -> TrafficSummary:
    """Return the figures of a measured traffic."""
    found, every = traffic.answered, list(traffic.records.values())
    metrics, objectives, peak = None, (), 0
    if found:
        requests, measured = served(found)
        drawn = serve.drawn()
        if len(drawn.slo):
            slo = drawn.slo[[one.number for one in found]]
            requests = msgspec.structs.replace(requests, slo=slo)
        metrics = serving_metrics(serve, [requests], [measured])
        objectives = tuple(objectives_kept(serve, [requests], [measured]))
        peak = int((measured.sample[:, 0] + measured.sample[:, 1]).max())
    late = np.array([one.late_s for one in every if one.sent_s >= 0] or [0.0])
    p50, p90, p99 = np.quantile(late, [0.5, 0.9, 0.99]).tolist()
    counted = any(one.counted for one in found)
    drawn_prompt: Any = serve.drawn().prompt
    off = [abs(one.prompt - int(drawn_prompt[one.number])) for one in found if not one.counted]
    hits = [(one.cached, one.prompt) for one in found if one.cached >= 0]
    return TrafficSummary(
        url=traffic.head.url,
        model=traffic.head.model,
        serve=traffic.head.serve,
        requests=traffic.head.requests,
        answered=len(found),
        withdrawn=sum(one.finish == WITHDRAWN for one in every),
        errors=dict(Counter(one.error for one in every if one.error).most_common(8)),
        metrics=metrics,
        objectives=objectives,
        peak_open=peak,
        late_s=(p50, p90, p99, float(late.max())),
        late=int((late > LATE_S).sum()),
        busy=end.busy,
        prompts=traffic.head.prompts,
        prompt_off=max(off) if off else None,
        shorter=sum(one.output < one.asked for one in found if not one.counted),
        counted=counted,
        hit_rate=sum(a for a, _ in hits) / max(sum(b for _, b in hits), 1) if hits else None,
        parts=traffic.parts,
    )
