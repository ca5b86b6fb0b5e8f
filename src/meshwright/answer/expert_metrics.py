"""The numbers of an answer about how experts are loaded."""

from __future__ import annotations

import msgspec


class ExpertAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of expert parallelism are loaded, a mean over layers: copies of tokens that the ``busiest`` rank
    computes over the mean, the share of copies that is ``dropped``, and the share of experts that are ``hot``, on every
    rank. Between the experts of two layers tokens ``leave_rank`` and ``leave_node`` in these shares. No placement
    without copies gets below the bounds. ``solved`` says how MoETuner's placement was found and its gap, "" of others.
    """

    busiest: float
    dropped: float
    hot: float = 0.0
    busiest_bound: float = 1.0
    leave_rank: float = 0.0
    leave_node: float = 0.0
    leave_rank_bound: float = 0.0
    leave_node_bound: float = 0.0
    solved: str = ""
