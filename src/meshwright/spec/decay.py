"""The learning rate of a step: up over a warm-up, then down along a curve."""

from __future__ import annotations

import math

#: Ways in which a learning rate falls, and the share of the steps in which ``wsd`` does.
SCHEDULES = ("cosine", "linear", "wsd")
WSD_DECAY = 0.1


def rate_at(
    step: int,
    peak: float,
    *,
    warmup: int = 0,
    begin: float = 0.0,
    decay_steps: int = 0,
    schedule: str = "cosine",
    floor: float = 0.0,
) -> float:
    """Return the learning rate of a step, counted from 0.

    The rate rises over ``warmup`` steps from ``begin`` of its ``peak``, and, where ``decay_steps`` is given, falls to
    ``floor`` of the peak by then: along a ``cosine`` (SGDR's single cycle, Loshchilov and Hutter 1608.03983), along a
    ``linear`` line, or, as ``wsd``, along a line over the last tenth of the steps alone (warm up, stay, decay: Hu et
    al. 2404.06395).
    """
    if step < warmup:
        return peak * begin + (peak - peak * begin) * (step + 1) / warmup
    if not decay_steps:
        return peak
    start = warmup
    if schedule == "wsd":
        start = max(start, decay_steps - max(1, round(WSD_DECAY * decay_steps)))
    share = min(1.0, max(0.0, (step - start) / max(1, decay_steps - start)))
    left = 0.5 * (1 + math.cos(math.pi * share)) if schedule == "cosine" else 1 - share
    return peak * (floor + (1 - floor) * left)
