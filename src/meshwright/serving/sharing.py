"""Sharing: what a decider is told of requests that are served beside a best-effort job, and what it decides.

The devices of a replica compute its iterations and steps of a job at the same time. A sharing policy gives the job a
share of the multiprocessors; the rest, and all of them where the job has none, are the requests'.
"""

from __future__ import annotations

import msgspec


class Observed(msgspec.Struct, frozen=True, tag=True):
    """An observation of requests since the last one: the share ``needed`` of the multiprocessors (and of the time) that
    they would have kept busy alone, and how many times as long their iterations took as alone (``slowdown``)."""

    needed: float
    slowdown: float = 1.0


class JobShare(msgspec.Struct, frozen=True, tag=True):
    """The share of the multiprocessors that the job has from now on; 0: it is stopped."""

    job: float
