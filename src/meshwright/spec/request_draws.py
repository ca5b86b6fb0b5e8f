"""Requests drawn as the words of a workload say, the same for the same seed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.spec.request_files import read
from meshwright.spec.request_limits import MOST_REQUESTS, USUAL_REQUESTS
from meshwright.spec.requests import Requests

if TYPE_CHECKING:
    from meshwright.spec.serve import Serve


def draw(serve: Serve) -> Requests:
    """Return the requests of a workload: numpy's generator of its seed draws gaps first, then rows of lengths.

    Raises:
        MeshwrightError: W011 for a file that cannot be read, and for every row of it that is wrong.
    """
    if serve.trace:
        return _of_trace(serve)
    rng = np.random.default_rng(serve.seed)
    at = _arrivals(serve, rng)
    if serve.lengths:
        known = read(serve.base / serve.lengths, timed=False)
        rows = rng.integers(0, len(known), len(at))
        prompt, output = known.prompt[rows], known.output[rows]
    else:
        prompt, output = (np.full(len(at), length, np.int64) for length in (serve.prompt, serve.output))
    return Requests(arrival_s=at, prompt=prompt, output=output, concurrency=serve.concurrency)


def _arrivals(serve: Serve, rng: np.random.Generator) -> np.ndarray:
    """Draw when requests arrive, the first one at 0."""
    count = serve.requests or (serve.batch if serve.batch else USUAL_REQUESTS)
    if serve.ramp_s:
        return np.minimum(np.arange(count) * (serve.ramp_s / serve.concurrency), serve.ramp_s)
    if not serve.rate:
        return np.zeros(count)
    if not serve.window_s:
        gaps = _gaps(serve, rng, count)
        return np.cumsum(gaps) - gaps[0]
    mean = serve.rate * serve.window_s
    most = min(serve.requests or MOST_REQUESTS, MOST_REQUESTS)
    at = np.zeros(1)
    while at[-1] < serve.window_s and len(at) <= most:
        more = _gaps(serve, rng, max(16, int(min(mean + 4 * math.sqrt(mean) + 1, most))))
        at = np.concatenate([at, at[-1] + np.cumsum(more)])
    return at[at < serve.window_s][:most]


def _gaps(serve: Serve, rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw gaps between arrivals whose mean is 1 / rate and whose standard deviation is cv / rate."""
    mean, cv = 1.0 / serve.rate, serve.cv
    if cv == 1.0:
        return rng.exponential(mean, count)
    if serve.burst == "gamma":
        return rng.gamma(1.0 / cv**2, mean * cv**2, count)
    shape = weibull_shape(cv)
    return rng.weibull(shape, count) * (mean / math.gamma(1.0 + 1.0 / shape))


def weibull_shape(cv: float) -> float:
    """Return the shape k of a Weibull distribution of that coefficient of variation: 1 + cv^2 is
    Gamma(1 + 2/k) / Gamma(1 + 1/k)^2, which falls as k rises."""
    low, high, wanted = 0.05, 1000.0, math.log1p(cv**2)
    for _ in range(200):
        middle = math.sqrt(low * high)
        over = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle) > wanted
        low, high = (middle, high) if over else (low, middle)
    return math.sqrt(low * high)


def _of_trace(serve: Serve) -> Requests:
    """Read a trace, as fast as the workload says, as much of it as the workload says."""
    found = read(serve.base / serve.trace)
    scale = serve.scale
    if serve.rate:
        span = float(found.arrival_s[-1])
        scale = serve.rate * span / (len(found) - 1) if span > 0 else 1.0
    at = found.arrival_s / scale
    kept = len(found) if not serve.window_s else int(np.searchsorted(at, serve.window_s, side="left"))
    found = msgspec.structs.replace(found, arrival_s=at)
    return found.first(min(kept, serve.requests or kept))
