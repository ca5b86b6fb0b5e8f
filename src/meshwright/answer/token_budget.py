"""The token budget of an iteration that follows from an objective: ``budget=auto``.

As Sarathi-Serve sets it (Agrawal et al., OSDI 2024, 2403.02310, section 4.3): the largest budget whose iteration is not
longer than the time that a token may take, in whole tiles of the matrix products.
"""

from __future__ import annotations

from meshwright.serving.batching import Iterate, Share
from meshwright.simulate.iteration_time import iteration_seconds
from meshwright.simulate.served import Replica
from meshwright.spec.requests import Requests

#: Rows of a tile of a matrix product, in which budgets count, and the largest budget that is looked at.
TILE, MOST_BUDGET = 128, 8192


def budget_within(replica: Replica, requests: Requests, seconds: float) -> int:
    """Return the largest token budget whose iterations take at most so many seconds; a tile where none does."""
    return next((b for b in range(MOST_BUDGET, TILE, -TILE) if _fullest(replica, requests, b) <= seconds), TILE)


def _fullest(replica: Replica, requests: Requests, budget: int) -> float:
    """Seconds of an iteration in which as many decode as there is room for, behind contexts of a usual length, and the
    rest of the budget is the last chunk of a usual prompt."""
    limits = replica.limits
    prompt, length = float(requests.prompt.mean()), float((requests.prompt + requests.output / 2).mean())
    held = min(limits.tokens, limits.max_batch * length)
    decoding = min(limits.max_batch, len(requests), int(held // length), budget - 1)
    chunk = min(budget - decoding, max(int(prompt), 1))
    shares = []
    left = budget - decoding
    while left > 0 and len(shares) < limits.max_batch:
        new = min(chunk, left)
        shares.append(Share(0, new, max(int(prompt) - new, 0), True))
        left -= new
    run = Iterate(tuple(shares), decoding=tuple(range(decoding)), context=round(decoding * length))
    return iteration_seconds(replica, run).seconds
