"""Public text that heads of a replica learn by what those of its neighbours predict (``sync/taught.py``, Zhmoginov et
al. 2211.15774).

A step passes public text forward before its own, and sends what all heads but the last predict: log-probabilities, and
the normalised hidden states that heads read. Messages travel beside the replica's own passes. Behind them head k learns
what head k - 1 of the surest neighbour of each token predicts (0 is the main head, which learns nothing here), and
hidden states are drawn towards those of every neighbour; the gradients are of the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.run.data import Batch
from meshwright.run.microbatches import pass_of
from meshwright.run.mixing import Meeting
from meshwright.run.pieces import TensorPiece
from meshwright.run.record import recorder
from meshwright.sync.groups import graph
from meshwright.sync.policy import read
from meshwright.sync.taught import TAUGHT

if TYPE_CHECKING:
    from meshwright.run.trainer import Trainer

#: What messages of predictions are called in a recording.
KEY = "predictions"


class Teaching(NamedTuple):
    """Predictions of T tokens: log-probabilities [heads, T, tokens], of the ``numbers`` int [heads, T, tokens]
    of the vocabulary where they are not all, and normalised ``hidden`` states [T, hidden], None where nobody is drawn
    to them."""

    logs: torch.Tensor
    numbers: torch.Tensor | None
    hidden: torch.Tensor | None

    def wire(self) -> torch.Tensor:
        """The bytes of a message."""
        parts = (self.logs, self.hidden, self.numbers)
        return torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in parts if one is not None])

    def bare(self) -> Teaching:
        """The same without values."""
        return Teaching(*(None if one is None else torch.empty_like(one, device="meta") for one in self))

    def read(self, wire: torch.Tensor) -> Teaching:
        """Read a neighbour's predictions off the bytes of its message; they have the sizes of these."""
        found, at = [], 0
        for like in (self.logs, self.hidden, self.numbers):
            size = 0 if like is None else like.nbytes
            some = wire[at : at + size]
            if like is self.numbers:  # wider than what is before them, so that they may begin anywhere
                some = some.clone()
            found.append(None if like is None else some.view(like.dtype).view(like.shape))
            at += size
        return Teaching(found[0], found[2], found[1])


class Lessons:
    """The public text of a trainer's replica. ``text`` gives that of a step, the same rows on every replica as many as
    a microbatch has; until one is set, tokens are drawn, for those who time steps."""

    def __init__(self, trainer: Trainer):
        self.trainer, policy = trainer, read(trainer.plan.sync.policy)
        self.taught, group = policy.taught, trainer.mesh["dp"]
        self.group, self.graph = group, graph(policy.group, group.size)
        self.text: Callable[[int], Batch] = self._drawn
        (self.stage,) = trainer.stages.values()
        self.loss: torch.Tensor | None = None
        self._logs: list[torch.Tensor] = []
        self._hidden = self._like = self._wire = None
        self._arrives: list[torch.Tensor] = []
        self._works: list[dist.Work] = []
        self._token = -1

    @classmethod
    def of(cls, trainer: Trainer) -> Lessons | None:
        """Return those of a trainer, None where nobody teaches."""
        return None if read(trainer.plan.sync.policy).taught is None else cls(trainer)

    @property
    def rows(self) -> int:
        """The rows of public text in a step."""
        return self.trainer.shape.together

    def _drawn(self, step: int) -> Batch:
        drawn = torch.Generator().manual_seed(step)
        shape = (self.rows, self.trainer.shape.row_tokens + 1)
        return Batch(torch.randint(0, self.trainer.model.vocab, shape, generator=drawn), None)

    @property
    def _label(self) -> dict[str, int]:
        trainer = self.trainer
        return {"stage": 0, "microbatch": trainer.plan.num_microbatches(trainer.train.global_batch)}

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Have the last further head, which has learnt from most replicas, stand where the main one does."""
        head = self.stage.head
        own, bias = head._tied, head.bias
        head._tied, head.bias = (SimpleNamespace(weight=head.taught[-1]),), None
        try:
            yield
        finally:
            head._tied, head.bias = own, bias

    def begin(self) -> None:
        """Predict the public text of this step, and start telling the neighbours."""
        trainer, head, taught = self.trainer, self.stage.head, self.taught
        first = trainer.train.global_batch
        numbers = torch.arange(first, first + self.rows, device=trainer.mesh.device)
        p = pass_of(trainer, self.text(trainer.step_count), slice(0, self.rows), numbers, 1.0)
        token = recorder().start("F", chunk=0, **self._label)
        hidden = head.normed(self.stage.hidden(None, p)).flatten(0, 1)
        with torch.no_grad():
            main = likely(head.projected(hidden))
        self._logs = [likely(head.projected(hidden, weight)) for weight in head.taught]
        self._hidden = F.normalize(wide(hidden), dim=-1) if taught.embed else None
        with torch.no_grad():
            said = self._told(torch.stack([main, *self._logs[:-1]]), hidden.dtype)
            self._wire, self._like = said.wire(), said.bare()  # the bytes are kept until they are sent
        recorder().stop(token)
        meeting = Meeting.of(self.graph.at(trainer.step_count), self.group)
        self._arrives = [torch.empty_like(self._wire) for _ in meeting.sources]
        num_bytes = self._wire.nbytes * len(meeting.targets)
        self._token = recorder().start("neighbours", "dp", key=KEY, num_bytes=num_bytes, **self._label)
        self._works = meeting.begin(self._wire, self._arrives)

    def _told(self, logs: torch.Tensor, dtype: torch.dtype) -> Teaching:
        """The predictions that are sent, in the type that is computed in."""
        numbers, hidden = None, None if self._hidden is None else self._hidden.to(dtype)
        if self.taught.top:
            logs, numbers = logs.topk(self.taught.top, dim=-1)
            numbers = numbers.to(torch.int32)
        return Teaching(logs.to(dtype), numbers, hidden)

    def learn(self) -> None:
        """Wait for the neighbours, and add the gradients of what they teach to the step's."""
        for work in self._works:
            work.wait()
        recorder().stop(self._token)
        token = recorder().start("BW", chunk=0, **self._label)
        heard = [self._like.read(wire) for wire in self._arrives]
        if heard:  # of pairs of an odd number one rests
            loss = self._of_all(heard)
            loss.backward()
            self.loss = loss.detach()
        self._logs, self._arrives, self._works = [], [], []
        self._hidden = self._like = self._wire = None
        recorder().stop(token)

    def _of_all(self, heard: list[Teaching]) -> torch.Tensor:
        """The loss of heads and hidden states by what neighbours predict."""
        loss = self.taught.aux * self._of_heads(surest(heard))
        if self._hidden is None:
            return loss
        apart = [(self._hidden - wide(one.hidden)).square().sum(-1).mean() for one in heard]
        return loss + self.taught.embed * torch.stack(apart).sum()

    def _of_heads(self, teacher: Teaching) -> torch.Tensor:
        """The cross-entropy of every head with what it is taught, in the mean over tokens, summed over heads."""
        total = torch.zeros((), dtype=self._logs[0].dtype, device=self._logs[0].device)
        for head, logs in enumerate(self._logs):
            shares = wide(teacher.logs[head]).softmax(-1)
            if teacher.numbers is not None:
                logs = logs.gather(-1, teacher.numbers[head].long())
            total = total - (shares * logs).sum(-1).mean()
        return total


def surest(heard: list[Teaching]) -> Teaching:
    """For every head and token the predictions of the neighbour whose likeliest token is likeliest; of equal ones those
    of the first."""
    best = heard[0]
    for one in heard[1:]:
        surer = (one.logs.amax(-1) > best.logs.amax(-1)).unsqueeze(-1)
        numbers = None if best.numbers is None else torch.where(surer, one.numbers, best.numbers)
        best = Teaching(torch.where(surer, one.logs, best.logs), numbers, None)
    return best


def likely(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of logits [..., tokens], at least fp32."""
    return wide(logits).log_softmax(-1)


def wide(values: torch.Tensor) -> torch.Tensor:
    """The values in at least fp32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def published(pieces: list[TensorPiece]) -> list[TensorPiece]:
    """Pieces without those of heads that are taught, which no published model has."""
    return [piece for piece in pieces if not piece.parameter.name.startswith(TAUGHT)]
