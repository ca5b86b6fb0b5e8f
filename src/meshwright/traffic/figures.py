"""Figures that a server says of itself while it is measured: ``/metrics``, read now and then in Prometheus' text form.

Servers say in names of their own how many requests run and wait and how full their cache is. Those of vLLM (which
``meshwright serve`` has too), SGLang and llama.cpp are known; a server that says none of them is not asked again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress

import msgspec

from meshwright.traffic.http import HttpClient, HttpFault

#: Seconds between two looks.
EVERY_S = 1.0
#: What is looked for -> the names under which servers say it.
NAMES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "cache": (
        *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        *("sglang:token_usage", "llamacpp:kv_cache_usage_ratio"),
    ),
}
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_MEANT = {name: what for what, names in NAMES.items() for name in names}


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's own figures at a time of the workload's clock: requests that run and wait, and the share of its
    cache in use; None for what it does not say."""

    at_s: float
    running: float | None = None
    waiting: float | None = None
    cache: float | None = None


def read(text: str, at_s: float) -> ServerFigures | None:
    """Return the figures of a page of metrics, those of several engines or models together; None where it says none
    that is known."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        what = _MEANT.get(name)
        if what is None:
            continue
        with suppress(ValueError):
            number = float(value)
            together = max(found.get(what, 0.0), number) if what == "cache" else found.get(what, 0.0) + number
            found[what] = together
    return ServerFigures(at_s=at_s, **found) if found else None


async def watched(client: HttpClient, clock: Callable[[], float], keep: Callable[[ServerFigures], None]) -> None:
    """Read a server's metrics until cancelled, or until it is seen that there are none."""
    while True:
        try:
            reply = await client.ask("/metrics")
        except HttpFault:
            return
        found = read(reply.body.decode("utf-8", "replace"), clock()) if reply.status == 200 else None
        if found is None:
            return
        keep(found)
        await asyncio.sleep(EVERY_S)
