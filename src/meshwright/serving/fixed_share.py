"""A fixed share of the multiprocessors for a job beside serving: ``sharing=fixed-share:0.3``."""

from __future__ import annotations

import msgspec

from meshwright.serving.sharing import JobShare, Observed


class FixedShare(msgspec.Struct, frozen=True):
    """The policy, with the job's share as its ``number``."""

    name: str = "fixed-share"
    title: str = "a fixed share of the multiprocessors for a job beside serving"
    number: float = 0.5

    def wrong(self) -> str:
        """Return what is wrong with its number, or ""."""
        return "" if 0 < self.number < 1 else f"a job beside requests has a share between 0 and 1, not {self.number:g}"

    def begin(self) -> float:
        """The job's share before anything was observed."""
        return self.number

    def decide(self, state: float, event: Observed) -> tuple[float, tuple[JobShare, ...]]:
        """Leave the share as it is."""
        return state, ()

    def share(self, state: float) -> float:
        """Return the job's share in a state."""
        return state


POLICY = FixedShare()
