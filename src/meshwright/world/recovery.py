"""Recovery: a training job whose node fails goes on from its last checkpoint, on a spare node if there is one.

The job trains, and saves every so many steps. A failure takes back what was done since the last checkpoint. The node is
replaced by a spare while there are any; with none left the job waits until a failed node is repaired. Restarts can fail
too. That is the usual scheme of checkpoint and restart (Young, 1974; Daly, 2006), with spares as large jobs keep them
(Llama 3, 2407.21783, section 3.3; MegaScale, 2402.15627, section 4).
"""

from __future__ import annotations

import msgspec


class Began(msgspec.Struct, frozen=True, tag=True):
    """The job starts on all its nodes."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A node of the job failed; ``saved_steps`` of the run are in checkpoints."""

    saved_steps: int


class Repaired(msgspec.Struct, frozen=True, tag=True):
    """A failed node is back."""


class Restarted(msgspec.Struct, frozen=True, tag=True):
    """The job is up again, from its last checkpoint."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All steps are done."""


Event = Began | Failed | Repaired | Restarted | Ended


class TrainFrom(msgspec.Struct, frozen=True, tag=True):
    """Train from ``first_step`` to the end of the run, saving after every ``save_every`` steps."""

    first_step: int
    save_every: int


class Restart(msgspec.Struct, frozen=True, tag=True):
    """Start again from the last checkpoint, on nodes that are there."""


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Too few nodes are there: wait for one to be repaired."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The job is over."""


Decision = TrainFrom | Restart | Wait | Finish


class Standing(msgspec.Struct, frozen=True):
    """How a job stands: steps in checkpoints, nodes in repair, and whether it ``waits`` for one of them."""

    saved_steps: int = 0
    in_repair: int = 0
    waits: bool = False


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The decider. ``save_every`` steps lie between checkpoints; ``spares`` nodes stand ready, None for as many as
    ever fail."""

    save_every: int
    spares: int | None = None

    def begin(self) -> Standing:
        return Standing()

    def decide(self, state: Standing, event: Event) -> tuple[Standing, tuple[Decision, ...]]:
        match event:
            case Began() | Restarted():
                return state, (TrainFrom(state.saved_steps, self.save_every),)
            case Failed(saved_steps=saved):
                return self._replaced(Standing(saved, state.in_repair + 1))
            case Repaired():
                state = Standing(state.saved_steps, state.in_repair - 1, state.waits)
                return self._replaced(state) if state.waits else (state, ())
            case Ended():
                return state, (Finish(),)

    def _replaced(self, state: Standing) -> tuple[Standing, tuple[Decision, ...]]:
        """Restart where a spare stands in for every node in repair, else wait."""
        waits = self.spares is not None and state.in_repair > self.spares
        state = Standing(state.saved_steps, state.in_repair, waits)
        return state, (Wait() if waits else Restart(),)
