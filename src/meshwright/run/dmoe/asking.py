"""Whoever trains, and asks peers for their experts: an answer that is not there in time is left out.

A layer's rows go to all peers that are there and owe no answer; the layer goes on when all have answered, or have died,
or the time is up. Its backward goes to those that answered. A late answer is thrown away when it comes, and its peer is
asked again from then on. Experts of peers that died are left out until somebody takes their place, with the experts as
they were when they were last gathered (at a save, or at the beginning).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from meshwright.errors import MeshwrightError
from meshwright.run.data import Batch
from meshwright.run.dmoe.experts import HeldExperts
from meshwright.run.dmoe.parcels import (
    ExpertsHeld,
    ExpertState,
    GiveExperts,
    HoldExperts,
    PassExperts,
    RowsMade,
    Word,
)
from meshwright.run.dmoe.peer import ExpertPeer
from meshwright.run.job import Job
from meshwright.run.result import StepResult
from meshwright.run.swarm.crowd import PeerProcesses
from meshwright.run.swarm.living import live
from meshwright.run.swarm.parcels import LeaveSwarm, PeerFailed, as_bytes, of_bytes
from meshwright.run.trainer import Trainer
from meshwright.run.world import died
from meshwright.simulate.swarm import SwarmWorld


class _Ask(torch.autograd.Function):
    """Rows [t, h] through experts that peers have, and which experts answered."""

    @staticmethod
    def forward(ctx, rows, peers, layer, counts):
        made, there = peers.exchange(layer, counts, (rows,), peers.every)
        ctx.save_for_backward(rows)
        ctx.peers, ctx.layer, ctx.counts, ctx.there = peers, layer, counts, there
        answered = torch.zeros(len(counts), dtype=torch.bool)
        share = len(counts) // len(peers.every)
        for number in there:
            answered[peers.slice_of(number, share)] = True
        ctx.mark_non_differentiable(answered)
        return made, answered

    @staticmethod
    def backward(ctx, grad, _):
        (rows,) = ctx.saved_tensors
        back, _ = ctx.peers.exchange(ctx.layer, ctx.counts, (rows, grad.contiguous()), ctx.there)
        return back, None, None, None


class AskedPeers:
    """The peers of a job and their experts, each of which is kept in `kept` as it was last gathered. Peers are ranks 1
    and up; rank 0 trains. To be closed."""

    def __init__(self, job: Job, world: SwarmWorld, kept: dict[int, HeldExperts], updates: int):
        words = job.plan.passes.dmoe
        self.job, self.kept, self.wait_s, self.updates = job, kept, words.wait_s, updates
        self.every = tuple(range(1, words.peers + 1))
        self.crowd = PeerProcesses(world, live, (partial(ExpertPeer, job=job),), Word, self)
        self.step, self.training = 0, False  # what is judged between steps is not counted
        self.there: set[int] = set()
        self.waiting: dict[int, tuple[int, bool]] = {}  # what each peer is asked now: its number, whether a backward
        self.owed: dict[int, set[int]] = defaultdict(set)  # of each peer what is too late
        self.answers: dict[int, bytes] = {}
        self.slowest_s = 0.0
        self.wanted: set[int] = set()
        self.numbers = 0
        # of the run: seconds of passes by way, of their experts' steps, answers, those left out, bytes
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.update_s: list[float] = []
        self.messages_s: list[float] = []  # of forwards that all answered, besides the slowest peer's own seconds
        self.passes: dict[int, int] = defaultdict(int)
        self.peak_bytes: dict[int, int] = defaultdict(int)
        self.asked = self.left_out = self.sent_bytes = 0
        self.waited_s = 0.0
        for number in self.every:
            self.crowd.start(number)
            self._hold(number)
        while len(self.there) < len(self.every):
            self.crowd.hear()
            if self.crowd.lost:
                raise died(0, "this host", "a peer ended before it held its experts")

    def slice_of(self, number: int, share: int) -> slice:
        """The place of a peer's experts among all, of which it has so many."""
        return slice((number - 1) * share, number * share)

    def _hold(self, number: int) -> None:
        share = {layer: one.count // len(self.every) for layer, one in self.kept.items()}
        state = b"".join(self.kept[at].state((number - 1) * share[at], share[at]) for at in sorted(self.kept))
        self.crowd.order(number, HoldExperts(number - 1, self.updates), state)

    # -- passes

    def begins(self, step: int) -> None:
        """A step begins."""
        self.step, self.training = step, True
        self.crowd.begins()

    def ends(self) -> None:
        """The step is over."""
        self.training = False

    def ask(self, layer: int, rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """As :class:`meshwright.run.moe.Asks` says."""
        return _Ask.apply(rows, self, layer, counts)

    def exchange(
        self, layer: int, counts: list[int], values: tuple[torch.Tensor, ...], among: Iterable[int]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Ask peers for a pass of rows, with gradients of what they made for a backward; rows of what they answer, and
        who did in time."""
        begun = self.crowd.now()
        until = begun + self.wait_s
        share, rows = len(counts) // len(self.every), {}
        ends = [0]
        for number in self.every:
            ends.append(ends[-1] + sum(counts[self.slice_of(number, share)]))
            rows[number] = slice(ends[-2], ends[-1])
        self.answers, self.slowest_s = {}, 0.0
        self.asked += len(self.every) * self.training
        for number in among:
            if number not in self.there or self.owed[number]:
                continue
            self.numbers += 1
            self.waiting[number] = self.numbers, len(values) > 1
            body = b"".join(as_bytes(one[rows[number]]) for one in values)
            self.sent_bytes += len(body) * self.training
            mine = counts[self.slice_of(number, share)]
            self.crowd.order(number, PassExperts(self.numbers, layer, mine, len(values) > 1, self.step), body)
        while self.waiting and (left := until - self.crowd.now()) > 0:
            self.crowd.hear(left)
        for number, (late, _) in self.waiting.items():
            self.owed[number].add(late)
        self.waiting = {}
        waited = self.crowd.now() - begun
        self.waited_s += waited * self.training
        if len(self.answers) == len(self.every) and len(values) == 1:
            self.messages_s.append(waited - self.slowest_s)
        self.left_out += (len(self.every) - len(self.answers)) * self.training
        out = torch.zeros_like(values[0])
        for number, body in self.answers.items():
            out[rows[number]] = of_bytes(body).view(out.dtype).view(-1, out.shape[1])
        return out, tuple(sorted(self.answers))

    # -- what peers say

    def told(self, number: int, word: Word, body: bytes) -> None:
        """A peer says something."""
        match word:
            case RowsMade():
                self.sent_bytes += len(body) * self.training
                self.passes[number] += self.training
                self.peak_bytes[number] = word.peak_bytes
                if word.update_s:
                    self.update_s.append(word.update_s)
                self.owed[number].discard(word.number)
                if self.waiting.get(number, (0, False))[0] == word.number:
                    self.seconds[self.waiting.pop(number)[1]].append(word.seconds)
                    self.answers[number] = body
                    self.slowest_s = max(self.slowest_s, word.seconds * self.crowd.world.computing[number])
            case ExpertsHeld():
                self.there.add(number)
            case ExpertState():
                self._gathered(number, body)
            case PeerFailed(report=report):
                if report.diagnostics:
                    raise MeshwrightError(report.diagnostics)
                raise died(number, "this host", report.cause)

    def gone(self, number: int) -> None:
        """A peer has died: nobody waits for it any more."""
        self.there.discard(number)
        self.wanted.discard(number)
        self.waiting.pop(number, None)
        self.owed.pop(number, None)
        if not self.job.quiet:
            print(f"lost peer {number} in step {self.step + 1:,}: its experts are left out", file=sys.stderr)

    def may_join(self) -> bool:
        """Always."""
        return True

    def joined(self, number: int) -> None:
        """A peer is there, and takes the experts of the one in whose place it is."""
        self._hold(number)

    # -- the whole model

    def gather(self, updates: int) -> None:
        """Keep the experts as their peers have them after so many updates; of those that died as they were kept."""
        self.updates = updates
        self.wanted = set(self.there)
        for number in self.every:
            if number in self.wanted:
                self.crowd.order(number, GiveExperts())
        while self.wanted:
            self.crowd.hear()
        for one in self.kept.values():
            one.set_step(updates)

    def _gathered(self, number: int, state: bytes) -> None:
        at = 0
        for layer in sorted(self.kept):
            one = self.kept[layer]
            share = one.count // len(self.every)
            at += one.fill((number - 1) * share, share, state[at:])
        self.wanted.discard(number)

    def close(self) -> None:
        """End all peers."""
        self.crowd.close(LeaveSwarm())


class AskingTrainer:
    """A trainer whose mixtures ask peers for their experts, as the trainer of one rank but for them. What it holds of
    them is as it was until it is asked for."""

    def __init__(self, whole: Trainer, kept: dict[int, HeldExperts]):
        self._whole, self._kept = whole, kept
        self._peers: AskedPeers | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @property
    def updates(self) -> int:
        """Steps that every expert has taken: one for each microbatch."""
        return self._whole.step_count * self._whole.plan.num_microbatches(self._whole.train.global_batch)

    def ask(self, peers: AskedPeers) -> None:
        """Have mixtures ask these peers from now on."""
        self._peers = peers
        for mixture in self._whole.routers:
            mixture.asks = peers

    def set_step(self, step: int) -> None:
        """Go on as after so many steps."""
        self._whole.set_step(step)
        for one in self._kept.values():
            one.set_step(self.updates)

    def step(self, batch: Batch, following: Batch | None = None) -> StepResult:
        """One optimizer step, within which experts take theirs."""
        self._peers.begins(self._whole.step_count)
        result = self._whole.step(batch, following)
        self._peers.ends()
        return result

    def pieces(self, *, shared: bool = False) -> list[Any]:
        """Parameters and moments, those of experts as the peers have them."""
        if self._peers is not None:
            self._peers.gather(self.updates)
        return [*self._whole.pieces(shared=shared), *(p for one in self._kept.values() for p in one.pieces())]

    def settle(self) -> None:
        """Hold what the peers hold."""
        self._whole.settle()
        self._peers.gather(self.updates)
