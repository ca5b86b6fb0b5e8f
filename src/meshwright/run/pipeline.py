"""Walks a rank's list of actions: the schedule that was simulated, for real.

The order is :class:`~meshwright.schedules.actions.Actions`, as ``lower`` reads it: nothing about a schedule is written
here. Messages between ranks go in the order their sender makes them, one channel per direction and way of the pipeline,
so both ends know it and no tags are needed; a receive is posted ahead of its need. A stage of a bidirectional schedule
lives on two ranks, and each microbatch knows its own. Where the output's error enters every stage's backward
(:mod:`meshwright.run.feedback`), it is what ranks get in place of gradients, once a microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from meshwright.run.connect import Edge
from meshwright.run.feedback import DirectFeedback, answered
from meshwright.run.linear import deferring, run_deferred
from meshwright.run.mesh import ProcessMesh
from meshwright.run.model import Stage
from meshwright.run.parts import Pass
from meshwright.run.record import recorder
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.schedules.errors_out import error_messages

KINDS = ("F", "B", "W", "BW")
#: Receives posted ahead of the one that is needed, per channel. A GPU loads a kernel when it is first used, and may
#: wait before for all that runs there: a receive that was posted ahead then waits for what only that kernel leads to.
#: So none is posted ahead there in a first step, nor where lengths of documents choose kernels anew in every step.
AHEAD = 2

Key = tuple[int, int]
"""(stage, microbatch), or of a message between pools (the receiver's microbatch, the sender's)."""


class Linked(Protocol):
    """This rank's side of a link to another pool."""

    back: bool

    def edges(self) -> list[Edge]: ...
    def begin(self, ahead: int) -> None: ...
    def finish(self) -> None: ...
    def send(self, number: int, made: torch.Tensor) -> None: ...
    def receive(self, number: int) -> torch.Tensor: ...


class Between(Protocol):
    """Work of a rank between the actions of its schedule."""

    def at(self, actions: int) -> None: ...
    def end(self) -> None: ...


class Channel:
    """Messages of one kind from one rank, in the order it sends them."""

    def __init__(
        self, order: Sequence[Key], source: int, group: dist.ProcessGroup, make: Callable[[Key], torch.Tensor]
    ):
        """`make` gives an empty buffer for a message."""
        self.order, self.source, self.group, self.make = order, source, group, make
        self.place = {key: i for i, key in enumerate(order)}
        self.posted: dict[Key, tuple[torch.Tensor, dist.Work, int]] = {}
        self.next = self.ahead = 0

    def begin(self, ahead: int = AHEAD) -> None:
        """A step begins, in which receives are posted so far `ahead`."""
        self.next, self.ahead = 0, ahead
        self._post(ahead)

    def _post(self, until: int) -> None:
        while self.next < min(until, len(self.order)):
            key = self.order[self.next]
            buffer = self.make(key)
            work = dist.irecv(buffer, src=self.source, group=self.group)
            self.posted[key] = (buffer, work, self.next)
            self.next += 1

    def receive(self, key: Key) -> torch.Tensor:
        self._post(self.place[key] + 1 + self.ahead)
        buffer, work, _ = self.posted.pop(key)
        work.wait()
        return buffer


class RankPipeline:
    """One rank's part of a step."""

    def __init__(
        self,
        actions: Actions,
        mesh: ProcessMesh,
        stages: dict[int, Stage],
        *,
        message: Callable[[int, Pass], torch.Tensor],
        blocking_sends: bool,
        due: np.ndarray,
        final: Callable[[int], None],
        before: Linked | None = None,
        after: Linked | None = None,
        frozen: bool = False,
        feedback: DirectFeedback | None = None,
        between: Between | None = None,
    ):
        """`stages` are those this rank holds, by number; `message` makes an empty buffer of what flows behind a
        stage in a pass; `due` bool [actions] are the passes after which gradients are reduced, and `final` is told the
        stage before each. Where this is one of several pools, its first stage takes what the link `before` it brings
        and its last stage gives to the one `after` it; of a `frozen` one there are forwards alone. `feedback`: the
        output's error enters backwards. ``between``: what else runs between actions."""
        self.before, self.after, self.frozen, self.between = before, after, frozen, between
        self.feedback = None if frozen else feedback
        self.actions, self.mesh, self.stages = actions, mesh, stages
        self.message, self.blocking_sends, self.final = message, blocking_sends, final
        self.group = mesh["pp"]
        me = self.group.index
        self.last = actions.num_stages - 1
        part = slice(actions.rank_ptr[me], actions.rank_ptr[me + 1])
        self.program = list(zip(*(c[part].tolist() for c in (actions.kind, actions.stage, actions.microbatch))))
        self.due = due[part].tolist()
        self.home = self._homes()
        #: Errors that this rank sends, (rank, stage) by microbatch, and gets: the stage that each says it is for.
        self.told: dict[int, list[tuple[int, int]]] = {}
        self.brought: dict[int, tuple[int, int]] = {}
        self.incoming = self._channels(me)
        self.works: deque[tuple[dist.Work, torch.Tensor]] = deque()
        #: Whether a step was done: its kernels are loaded.
        self.warm = False

    def _homes(self) -> np.ndarray:
        """The rank that does each (stage, microbatch)."""
        actions = self.actions
        home = np.zeros((actions.num_stages, actions.num_microbatches), int)
        forward = actions.kind == F
        home[actions.stage[forward], actions.microbatch[forward]] = actions.rank_of()[forward]
        return home

    def _channels(self, me: int) -> dict[tuple[bool, int], Channel]:
        actions, rank = self.actions, self.actions.rank_of()
        out = {}
        for forward, kinds, ahead in ((True, (F,), 1), (False, (B, BW), -1)):
            if not forward and self.feedback is not None:
                out |= self._error_channels(me)
                continue
            chosen = np.flatnonzero(np.isin(actions.kind, kinds))
            orders: dict[int, list[Key]] = {}
            for stage, microbatch, source in zip(
                actions.stage[chosen].tolist(), actions.microbatch[chosen].tolist(), rank[chosen].tolist()
            ):
                target = stage + ahead
                if 0 <= target <= self.last and source != me and self.home[target, microbatch] == me:
                    orders.setdefault(source, []).append((target, microbatch))
            for source, order in orders.items():
                handle = self._handle(forward, source, me)
                out[forward, source] = Channel(order, self.group.ranks[source], handle, partial(self._empty, forward))
        return out

    def _empty(self, forward: bool, key: Key) -> torch.Tensor:
        """A buffer for the message that a stage gets: what the one before it made, or the gradient of what it made."""
        return self.message(key[0] - forward, self.passes[key[1]])

    def _error_channels(self, me: int) -> dict[tuple[bool, int], Channel]:
        orders: dict[int, list[Key]] = {}
        for microbatch, source, target, stage in zip(*(c.tolist() for c in error_messages(self.actions, self.home))):
            if source == me:
                self.told.setdefault(microbatch, []).append((target, stage))
            elif target == me:
                self.brought[microbatch] = source, stage
                orders.setdefault(source, []).append((stage, microbatch))
        out = {}
        for source, order in orders.items():
            handle = self._handle(False, source, me)
            out[False, source] = Channel(order, self.group.ranks[source], handle, partial(self._empty, False))
        return out

    def _handle(self, forward: bool, source: int, target: int) -> dist.ProcessGroup:
        return self.mesh[self._way(forward, source, target)].handle

    @staticmethod
    def _way(forward: bool, source: int, target: int) -> str:
        return f"pp_{'forward' if forward else 'backward'}_{'up' if source < target else 'down'}"

    def edges(self) -> list[Edge]:
        """List the connections that this rank's messages go over."""
        me, ranks = self.group.index, self.group.ranks
        arriving = {(forward, source, me) for forward, source in self.incoming}
        leaving = set()
        for kind, stage, microbatch in self.program:
            target = stage + (1 if kind == F else -1)
            if self.feedback is not None and kind != F:
                continue
            if kind != W and 0 <= target <= self.last and (home := int(self.home[target, microbatch])) != me:
                leaving.add((kind == F, me, home))
        leaving |= {(False, me, target) for some in self.told.values() for target, _ in some}
        return [
            Edge(self._way(*edge), ranks[edge[1]], ranks[edge[2]], self._handle(*edge)) for edge in arriving | leaving
        ]

    def run(self, passes: Sequence[Pass]) -> torch.Tensor:
        """Every action in order: gradients are with their sinks, and the loss of this rank's last stage (0 without
        one) comes back, float64."""
        losses: list[torch.Tensor] = []  # one that is computed in portions is known behind its backward
        self.saved: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.queues: dict[Key, deque] = {}
        self.local: dict[tuple[bool, int, int], torch.Tensor] = {}
        self.errors: dict[int, torch.Tensor] = {}
        self.passes = passes
        links = [link for link in (self.before, self.after) if link is not None]
        loads = self.mesh.device.type == "cuda" and (
            not self.warm or passes[0].documents is not None or bool(passes[0].segments)
        )
        self.warm = True
        for channel in (*self.incoming.values(), *links):
            channel.begin(0 if loads else AHEAD)
        record = recorder()
        for at, (kind, stage, microbatch) in enumerate(self.program):
            if self.between is not None:
                self.between.at(at)
            if self.due[at]:
                self.final(stage)
            arrived = self._arrived(kind, stage, microbatch)
            token = record.start(KINDS[kind], stage=stage, chunk=stage // self.group.size, microbatch=microbatch)
            made = self._act(kind, stage, microbatch, arrived, passes[microbatch])
            record.stop(token)
            if kind == F and stage == self.last and self.after is None:
                losses.append(made.detach())
            elif made is not None:
                self._pass_on(kind == F, stage, microbatch, made)
        if self.between is not None:
            self.between.end()
        for work, _ in self.works:
            work.wait()
        self.works.clear()
        for link in links:
            link.finish()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for loss in losses:
            total += loss.to(torch.float64)
        return total

    def _arrived(self, kind: int, stage: int, microbatch: int) -> torch.Tensor | None:
        """Wait for the tensor that an action needs from another stage or pool and return it; None where it needs
        none."""
        if kind == W:
            return None
        forward = kind == F
        if not forward and self.feedback is not None:
            return self._error(microbatch)
        if stage == (0 if forward else self.last):
            link = self.before if forward else self.after
            return None if link is None else link.receive(microbatch)
        source = int(self.home[stage - 1 if forward else stage + 1, microbatch])
        if source == self.group.index:
            return self.local.pop((forward, stage, microbatch))
        ends = self.group.ranks[source], self.group.ranks[self.group.index]
        queue, sender = ("pp_forward", stage - 1) if forward else ("pp_backward", stage + 1)
        with recorder().span("send", queue, stage=sender, microbatch=microbatch, group=ends):
            return self.incoming[forward, source].receive((stage, microbatch))

    def _error(self, microbatch: int) -> torch.Tensor:
        """The output's error of a microbatch, waited for by the first of this rank's stages that it enters."""
        if microbatch not in self.errors:
            source, stage = self.brought[microbatch]
            ends = self.group.ranks[source], self.group.ranks[self.group.index]
            with recorder().span("send", "pp_backward", stage=stage + 1, microbatch=microbatch, group=ends):
                self.errors[microbatch] = self.incoming[False, source].receive((stage, microbatch))
        return self.errors[microbatch]

    def _ended(self, feedback: DirectFeedback, stage: int, p: Pass, out: torch.Tensor, microbatch: int) -> torch.Tensor:
        """The loss of the last stage's hidden states, whose error is sent to who needs it."""
        loss, gradient = answered(self.stages[stage].head, out, p)
        error = self.errors[microbatch] = feedback.sent(gradient)
        for target, entered in self.told.get(microbatch, ()):
            self._send(False, entered + 1, microbatch, target, error)
        return loss

    def _act(self, kind: int, stage: int, microbatch: int, arrived: torch.Tensor | None, p: Pass):
        key = (stage, microbatch)
        if kind == F:
            if self.frozen:
                with torch.no_grad():
                    return self.stages[stage](arrived, p)
            if self.feedback is not None:
                self.saved[key] = (None, self.stages[stage].hidden(arrived, p))
                out = self.saved[key][1]
                return self._ended(self.feedback, stage, p, out, microbatch) if stage == self.last else out
            if arrived is not None:
                arrived = arrived.detach().requires_grad_()
            out = self.stages[stage](arrived, p)
            self.saved[key] = (arrived, out)
            return out
        if kind == W:
            run_deferred(self.queues.pop(key))
            return None
        entered, out = self.saved.pop(key)
        if self.feedback is not None:
            self.feedback.error = arrived
            if not any((other, microbatch) in self.saved for other in self.stages):
                del self.errors[microbatch]
            if not out.requires_grad:  # a stage of no layer
                self.queues[key] = deque()
                return None
        if kind == B:
            self.queues[key] = deque()
            with deferring(self.queues[key]):
                torch.autograd.backward(out, arrived)
        else:
            torch.autograd.backward(out, arrived)
        return None if entered is None else entered.grad

    def _pass_on(self, forward: bool, stage: int, microbatch: int, made: torch.Tensor) -> None:
        target = stage + (1 if forward else -1)
        if not 0 <= target <= self.last:
            link = self.after if forward else self.before
            if link is not None and (forward or link.back):
                link.send(microbatch, made)
            return
        rank = int(self.home[target, microbatch])
        made = made.detach()
        if rank == self.group.index:
            self.local[forward, target, microbatch] = made
            return
        self._send(forward, stage, microbatch, rank, made)

    def _send(self, forward: bool, stage: int, microbatch: int, rank: int, made: torch.Tensor) -> None:
        """Send what a stage has made to another rank."""
        token = recorder().start("send", "pp_forward" if forward else "pp_backward", stage=stage, microbatch=microbatch)
        made = made.contiguous()
        handle = self._handle(forward, self.group.index, rank)
        work = dist.isend(made, dst=self.group.ranks[rank], group=handle)
        recorder().watch(work, token)
        if self.blocking_sends:
            work.wait()
            return
        self.works.append((work, made))  # gloo cancels a message whose work or buffer is dropped
        while self.works and self.works[0][0].is_completed():
            self.works.popleft()[0].wait()
