"""Protocols of published serving measurements: what a row's columns leave open, as its publication says it.

A column says 1,024 tokens where the client draws lengths up to 1,024. Nothing here is chosen by looking at a result.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from meshwright.spec.requests import Requests
from meshwright.validate.launches import INFERENCEMAX, LaunchScript


class Protocol(NamedTuple):
    """How a publication measured: in which month (``date``); the ``shortest`` lengths as a share of those stated, which
    are drawn evenly in between; how many ``rounds`` of a closed loop's open requests are served; the precision of
    the cache where weights are quantised (``kv``, "" as the row says); and the ``scripts`` that launch its servers."""

    date: str = ""
    shortest: float = 1.0
    rounds: int = 4
    kv: str = ""
    scripts: tuple[LaunchScript, ...] = ()


#: Protocols by what a row's ``source_ref`` says, in the order they are tried.
PROTOCOLS: tuple[tuple[str, Protocol], ...] = (
    # AIConfigurator's dated dumps hold the nightly benchmark InferenceMAX (now InferenceX), whose README and launch
    # scripts say: RANDOM_RANGE_RATIO 0.8, num-prompts ten times the concurrency, request-rate inf, kv-cache-dtype fp8.
    (
        r"source_file=\d{4}-\d\d-\d\d\.csv|db-dump/\d{4}",
        Protocol(date="2026-03", shortest=0.8, rounds=10, kv="fp8", scripts=INFERENCEMAX),
    ),
    # Its own measurements: lengths as said, ten times the open requests behind a warm-up of two
    # (src/aiconfigurator/eval/benchmarks/genai_perf_runner.py: synthetic-input-tokens-stddev 0, request-count).
    (r"ai-dynamo/aiconfigurator", Protocol(date="2025-12", rounds=10)),
    (r"argonne-lcf/LLM-Inference-Bench", Protocol(date="2024-10")),  # 2411.00136
    (r"microsoft/apex_plus", Protocol(date="2024-11")),  # 2411.17651
    (r"Mutinifni/splitwise-sim", Protocol(date="2023-10")),  # 2311.18677
)


def protocol_of(row: dict[str, str]) -> Protocol:
    """Return the protocol of a row; the usual one where its publication is not known."""
    return next((found for pattern, found in PROTOCOLS if re.search(pattern, row.get("source_ref", ""))), Protocol())


def closed_loop(protocol: Protocol, concurrency: int, prompt: int, output: int) -> Requests:
    """Return the requests of a closed loop, drawn with a fixed seed."""
    count, rng = concurrency * protocol.rounds, np.random.default_rng(0)
    lengths = [rng.integers(max(1, int(most * protocol.shortest)), most + 1, count) for most in (prompt, output)]
    return Requests(arrival_s=np.zeros(count), prompt=lengths[0], output=lengths[1], concurrency=concurrency)
