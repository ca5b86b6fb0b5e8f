"""The two halves of an engine that is divided: one computes prompts, the other generates the rest of answers.

Both are engines with deciders as the simulator divides them (:mod:`meshwright.simulate.serve_apart`): the one parks
whoever it computed a first token for, and keeps its blocks until they are sent; the other is offered these requests,
and pulls them when there is room.
"""

from __future__ import annotations

import msgspec

from meshwright.endpoint.prefixes import chain, decidable
from meshwright.endpoint.seam import EngineFigures, Prompted
from meshwright.run.serve.engine import TorchEngine
from meshwright.run.serve.sequence import ServedSequence
from meshwright.serving.batching import Arrived, Computed, Withdrawn
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.pulling import Offered


class HandedOver(msgspec.Struct, frozen=True):
    """A request whose prompt is computed: the first ``token`` of its answer, and when that was ``due_s``, on the clock
    that all processes of a machine share (0: no time was said)."""

    asked: Prompted
    token: int
    due_s: float = 0.0


class PrefillEngine(TorchEngine):
    """An engine that computes prompts and first tokens; ``ready`` are the requests that are to be handed over."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.ready: list[int] = []

    def handed(self) -> list[HandedOver]:
        """Return the requests whose prompts were computed since the last call."""
        found = [(number, self.parked[number]) for number in self.ready if number in self.parked]
        self.ready = []
        due = {number: one.arrival_s + one.asked.deadline_s + self.began for number, one in found}
        return [HandedOver(one.asked, one.tokens[-1], due[n] if one.asked.deadline_s else 0.0) for n, one in found]

    def send(self, number: int) -> int:
        """Send the blocks of a request's prompt; returns how many, 0 where it was cancelled meanwhile."""
        if number not in self.parked:
            return 0
        blocks = self.tables.held[number].table[: self.decider.limits.blocks_for(self.parked[number].prompt)]
        self.executor.send(blocks)
        return len(blocks)

    def release(self, number: int) -> None:
        """Give the blocks of a request to others, as they are where it goes on."""
        if self.parked.pop(number, None) is not None:
            self._tell(Withdrawn((number,)))

    def _tell(self, event: Arrived | Computed | Withdrawn | Offered) -> None:
        super()._tell(event)
        if isinstance(event, Computed):
            self.ready += [number for number in event.finished if number in self.parked]
        over = tuple(number for number in self.state.parked if number not in self.parked)
        if over:  # an end token came first, and nobody goes on
            super()._tell(Withdrawn(over))


class DecodeEngine(TorchEngine):
    """An engine that goes on with prompts computed elsewhere; ``offers`` are those whose blocks are not here yet."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.offers: dict[int, HandedOver] = {}

    def offer(self, one: HandedOver) -> None:
        """Let a request be pulled when there is room."""
        self.offers[one.asked.number] = one
        self._tell(Offered((self._going_on(one),)))

    def pulled(self) -> list[int]:
        """Return the requests whose blocks are asked for since the last call."""
        found, self.pulls = [number for number in self.pulls if number in self.offers], []
        return found

    def room(self, number: int) -> list[int]:
        """Return the blocks for the prompt of a request that was pulled; none where it was cancelled meanwhile."""
        one = self.offers.get(number)
        if one is None:
            return []
        return self.tables.held[number].table[: self.decider.limits.blocks_for(len(one.asked.prompt))]

    def join(self, number: int) -> None:
        """Go on with a request, as its blocks are here."""
        one = self.offers.pop(number)
        asked = one.asked
        if asked.sampling.prompt_logprobs is not None:  # they are told already
            asked = msgspec.structs.replace(
                asked, sampling=msgspec.structs.replace(asked.sampling, prompt_logprobs=None)
            )
        sequence = ServedSequence(asked, self.facts.end_ids, self._adapter(asked), self._now())
        sequence.take(one.token)
        sequence.first = False
        self.sequences[number] = sequence
        self.tables.computed(number, len(asked.prompt))
        self.arrived[number] = self._going_on(one)

    def cancel(self, number: int) -> None:
        """Let a request leave, wherever it is."""
        self.arrived.pop(number, None)  # there are blocks for it since it was pulled
        if self.offers.pop(number, None) is not None:
            self._tell(Withdrawn((number,)))
        else:
            super().cancel(number)

    def figures(self) -> EngineFigures:
        """Return what the engine does; those wait as well whose blocks are to come."""
        found = super().figures()
        return msgspec.structs.replace(found, waiting=found.waiting + len(self.offers))

    def _going_on(self, one: HandedOver) -> NewRequest:
        """The request as it is said to the decider: with its prompt and a token of the answer."""
        asked = one.asked
        return decidable(
            asked,
            self._adapter(asked),
            chain(asked.prompt, self.unit, asked.adapter) if self.unit else (),
            computed=len(asked.prompt),
            generated=1,
            deadline_s=max(one.due_s - self.began, 1e-9) if one.due_s else 0.0,
        )
