"""Tasks of clients that are merged at first and split into groups later (MAS, Zhuang et al. 2307.11285).

All tasks read one text and share one trunk: task k, from 0 on, predicts of every token the one k + 1 places ahead, by a
head of its own. Merged, a pass of the trunk serves all of them. Meanwhile clients measure *affinities*: after a plain
step of the trunk along task i's gradient the loss of task j is another, and the affinity of i towards j is the part of
it that is gone. After some rounds the server splits the tasks into groups by them; each goes on as a job of its own,
from the trunk as it is, and jobs take turns on the same clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

#: Bytes of a measured affinity on the wire.
AFFINITY_BYTES = 8
#: The job of all tasks, before they are split.
ALL_TASKS = -1


class MergedTasks(msgspec.Struct, frozen=True, kw_only=True):
    """``tasks`` with a head each, merged for so many ``rounds``, in every ``every``-th of which clients measure; then
    split into ``groups``, which take turns of ``turn`` rounds."""

    tasks: int
    rounds: int
    groups: int
    every: int
    turn: int

    def measures(self, number: int) -> bool:
        """Whether affinities are measured in a round."""
        return number < self.rounds and number % self.every == 0

    def job(self, number: int) -> int:
        """Return the job of a round: :data:`ALL_TASKS`, or a group's number."""
        return ALL_TASKS if number < self.rounds else (number - self.rounds) // self.turn % self.groups

    @property
    def cycle(self) -> int:
        """Rounds until every group has had its turn once."""
        return self.rounds + self.groups * self.turn

    @property
    def affinity_bytes(self) -> int:
        """Bytes of the affinities that a client has measured."""
        return AFFINITY_BYTES * self.tasks**2

    def heads(self, bits: int) -> tuple[int, ...]:
        """Return the tasks whose heads are set in `bits`; 0 stands for all."""
        return tuple(task for task in range(self.tasks) if not bits or bits >> task & 1)


def bits_of(tasks: tuple[int, ...]) -> int:
    """Tasks as the bits of a number."""
    return sum(1 << task for task in tasks)


def unmerged(model: Model, train: Train, merged: MergedTasks) -> Iterator[tuple[str, str]]:
    """Yield all that tasks cannot be merged for: (reason, help)."""
    if model.mixtures:
        yield f"routers of {model.name} would count the choices of what is measured", "a dense model"
    if model.tied_embeddings:
        yield (
            f"the head of {model.name} is its embedding's table, of the trunk",
            "a model whose head is a table of its own",
        )
    if len(model.flows) > 1 or model.streams or not train.causal:
        yield f"{model.name} predicts no next tokens of one text", "a language model"
    if train.packing not in ("", "concat"):
        yield f"pack={train.packing} has targets beyond a document's end", "drop pack= from the workload"
    if train.lora is not None:
        yield "heads are trained whole, and the workload trains adapters", "drop lora= from the workload"
    for word in ("grow", "align", "adversarial", "clusters"):
        if getattr(train, word):
            yield f"{word}= goes by the gradient of one loss", f"drop {word}= from the workload"
    if train.seq_len <= merged.tasks:
        yield f"tasks={merged.tasks} look beyond sequences of {train.seq_len} tokens", "longer sequences"
