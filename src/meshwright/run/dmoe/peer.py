"""The process of a peer that has experts: it passes rows through them in the order in which it is asked, and lets them
learn as soon as it has the gradient of what they made. Of a pass it keeps nothing: a backward computes its forward
again (Ryabinin and Gusev 2020, arXiv 2002.04013, section 3)."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from meshwright.run.dmoe.experts import ALONE, HeldExperts
from meshwright.run.dmoe.parcels import (
    ExpertsHeld,
    ExpertState,
    GiveExperts,
    HoldExperts,
    Order,
    PassExperts,
    RowsMade,
)
from meshwright.run.exchanges import Types
from meshwright.run.fp8 import word_of
from meshwright.run.held import peak_bytes
from meshwright.run.job import Job
from meshwright.run.moe import expert_parameters, through_experts
from meshwright.run.parameters import Maker
from meshwright.run.parts import Shared
from meshwright.run.swarm.living import Inbox, slowed
from meshwright.run.swarm.parcels import LeaveSwarm, as_bytes, of_bytes, send
from meshwright.run.swarm.stage import alone_at
from meshwright.spec import naming
from meshwright.spec.layers import Moe

CPU = torch.device("cpu")


class _Layer(NamedTuple):
    """The experts that a peer has of a layer."""

    spec: Moe
    held: HeldExperts


class ExpertPeer:
    """The work of a peer's process; `slowness`: times that everything takes over what this device takes."""

    def __init__(self, way: Connection, slowness: float, job: Job):
        self.way, self.slowness, self.job = way, slowness, job
        self.inbox = Inbox(way, Order)
        self.types = Types.of(job.plan, job.train, job.settings.precision)
        self.shared = Shared(
            model=job.model,
            plan=job.plan,
            mesh=alone_at(job.plan, 0),
            make=Maker(CPU, self.types.held(job.plan)),
            names=naming.names(job.model),
            dropout=0.0,
            seed=job.settings.seed,
            causal=job.train.causal,
            train=job.train,
            low="" if job.settings.precision else word_of(job.plan, job.train),
        )
        self.layers: dict[int, _Layer] = {}
        self.update_s = 0.0

    def run(self) -> None:
        """Do what is told until the end."""
        while True:
            order, body = self.inbox.next()
            match order:
                case HoldExperts():
                    self._hold(order, body)
                    send(self.way, ExpertsHeld())
                case PassExperts():
                    self._pass(order, body)
                case GiveExperts():
                    send(self.way, ExpertState(), b"".join(one.held.state(0, one.held.count) for one in self._all()))
                case LeaveSwarm():
                    return

    def _all(self) -> list[_Layer]:
        return [self.layers[number] for number in sorted(self.layers)]

    def _hold(self, order: HoldExperts, state: bytes) -> None:
        model, names, at = self.job.model, self.shared.names, 0
        for layer in model.routed_layers:
            spec = model.block(layer).mlp
            count = spec.experts // self.job.plan.passes.peers
            numbers = list(range(order.index * count, (order.index + 1) * count))
            prefix = f"{names.layer.format(layer)}{names.mlp}"
            held = HeldExperts(expert_parameters(self.shared, prefix, spec, numbers, ALONE), self.types, self.job)
            at += held.fill(0, count, state[at:])
            held.set_step(order.updates)
            self.layers[layer] = _Layer(spec, held)

    def _pass(self, order: PassExperts, body: bytes) -> None:
        begun = time.perf_counter()
        one = self.layers[order.layer]
        values = of_bytes(body).view(self.types.compute).view(-1, self.job.model.hidden)
        rows, gradients = values[: sum(order.counts)], []
        up, down = one.held.parameters
        if order.backward:
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                out = through_experts(self.shared, one.spec, rows, order.counts, up, down)
                wanted = torch.autograd.grad(out, (rows, up, down), values[len(rows) :])
            made, gradients = wanted[0], wanted[1:]
        else:
            with torch.no_grad():
                made = through_experts(self.shared, one.spec, rows, order.counts, up, down)
        took = slowed(begun, self.slowness)
        word = RowsMade(order.number, took, self.update_s, peak_bytes(CPU))
        send(self.way, word, as_bytes(made))
        if order.backward:
            begun = time.perf_counter()
            one.held.update(gradients, order.step)
            self.update_s = slowed(begun, self.slowness)
