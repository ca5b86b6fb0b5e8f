"""Iteration costs that are easy to add up by hand, and replicas that have them."""

import numpy as np

from meshwright import serving
from meshwright.causes import PRICED
from meshwright.serving.cache import EngineLimits
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.served import HostTimes, Replica
from meshwright.spec.requests import Requests


def linear_costs(*, base=0.0, token=0.0, sampled=0.0, decode=0.0, prefill=0.0, tokens=4096, batch=64):
    """`base` seconds an iteration, and so much for each token, sampled token, token of context that is decoded behind,
    and token of a prompt."""
    none = np.zeros((tokens + 1, len(PRICED)))
    context = np.array([1.0, 100.0, 1e6])
    return IterationCosts(
        linear_s=base + token * np.arange(tokens + 1),
        linear_parts=none,
        linear_spread=none,
        sampled_s=sampled * np.arange(batch + 1.0),
        sampled_parts=none[: batch + 1],
        sampled_spread=none[: batch + 1],
        decode_s=decode * np.arange(batch + 1.0)[:, None] * context[None, :],
        context_node=context,
        prefill_s=prefill * np.ones((2, 2, 2)) * np.array([1.0, 2.0])[:, None, None],
        batch_node=np.array([1.0, 2.0]),
        query_node=np.array([1.0, 2.0]),
        past_node=np.array([0.0, 1e6]),
        sigma=0.1,
    )


def replica(policy="vllm-v1", costs=None, *, max_batch=64, budget=0, block=16, blocks=10_000, host=None, stages=1):
    """A replica with that policy and those limits."""
    found = serving.get("batching", policy) if isinstance(policy, str) else policy
    limits = EngineLimits(max_batch=max_batch, budget=budget or found.budget, block=block, blocks=blocks)
    return Replica(
        policy=found,
        limits=limits,
        costs=costs or linear_costs(base=1.0),
        host=host or HostTimes(),
        stages=stages,
    )


def requests(*rows, concurrency=0):
    """Requests of (arrival in seconds, prompt, answer)."""
    at, prompt, output = zip(*rows)
    return Requests(
        arrival_s=np.array(at, float), prompt=np.array(prompt), output=np.array(output), concurrency=concurrency
    )
