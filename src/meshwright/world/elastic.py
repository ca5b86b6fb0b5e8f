"""Elastic membership: a training job that loses nodes goes on at once with those that are left, and grows again.

The state of every step is in the memory of two nodes, so that a failure takes back one step at most and no checkpoint
is read. A spare takes the place of a lost node; with none left the job goes on with fewer nodes, under a plan for that
many, and takes up a node as soon as it is repaired. Where there is no plan for so few, it waits (ElasWave, 2510.00606;
in-memory copies at neighbours: Gemini, Wang et al., SOSP 2023).
"""

from __future__ import annotations

import msgspec

from meshwright.world.recovery import Began, Ended, Event, Failed, Finish, Repaired, Restarted, TrainFrom, Wait

#: In place of a first step: the newest one that is whole, wherever that is.
NEWEST = -1


class Regroup(msgspec.Struct, frozen=True, tag=True):
    """Go on with so many nodes, under the plan for them, from the newest step that is whole in their memories."""

    nodes: int


class Membership(msgspec.Struct, frozen=True):
    """How an elastic job stands: nodes in repair, and nodes that train now (0: none)."""

    in_repair: int = 0
    nodes: int = 0


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """The decider. There are plans for each of ``sizes`` nodes, of which the largest is the job's; ``spares`` nodes
    stand ready, None for as many as ever fail. ``save_every`` steps lie between those that a failure takes the job back
    to, one where every step is kept in memory."""

    sizes: tuple[int, ...]
    spares: int | None = None
    save_every: int = 1

    def begin(self) -> Membership:
        """The state before anything happened."""
        return Membership(nodes=max(self.sizes))

    def decide(
        self, state: Membership, event: Event
    ) -> tuple[Membership, tuple[Regroup | TrainFrom | Wait | Finish, ...]]:
        """Return the state after an event, and what is to be done."""
        match event:
            case Began() | Restarted():
                return state, (TrainFrom(NEWEST, self.save_every),)
            case Failed():
                state = Membership(state.in_repair + 1, self.usable(state.in_repair + 1))
                return state, (Regroup(state.nodes) if state.nodes else Wait(),)
            case Repaired():
                nodes = self.usable(state.in_repair - 1)
                grows, state = nodes > state.nodes, Membership(state.in_repair - 1, nodes)
                return state, (Regroup(nodes),) if grows else ()
            case Ended():
                return state, (Finish(),)

    def usable(self, in_repair: int) -> int:
        """Return the nodes of the largest plan that can be used while so many nodes are in repair; 0 for none."""
        left = max(self.sizes) - (0 if self.spares is None else max(0, in_repair - self.spares))
        return max((size for size in self.sizes if size <= left), default=0)
