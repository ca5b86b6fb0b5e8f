"""PipeInfer: speculation along a pipeline (Butler et al., SC 2024, 2407.11798).

A draft model on a node of its own keeps the pipeline of the model full of runs: the stages work on several guesses of
one request at the same time, and a wrong guess cancels the runs behind it. The stages are then what copies of the model
are in distributed speculative inference: as many runs are under way as there are stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.serving.dsi import POLICY as DSI
from meshwright.serving.speculative import GuessTimes


class PipeInfer(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "pipeinfer"
    title: str = "guesses of one request fill the stages of a pipeline (PipeInfer)"
    alone: bool = True
    endless: bool = True
    even: bool = False

    def round_s(self, drafted: int, accepted: Sequence[int], times: GuessTimes) -> float:
        """Return the seconds until the first wrong guess is known."""
        return DSI.round_s(drafted, accepted, times)


POLICY = PipeInfer()
