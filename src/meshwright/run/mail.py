"""Mail between a server of clients and each of them: headers and flat bytes over gloo, or through memory where both are
one process.

Each direction has a process group of its own, so that what the server asks never waits behind what a client sends. One
thread a channel receives, and puts what arrives into an inbox: neither side has to look for it.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist

#: What a letter is: a task with the model, a question for what there is, the end; what changed, or that a client left;
#: that so many answers are to be added up, that one of them is in the sum that follows, and that sum; the direction
#: that the steps of the task behind it begin along, and a task without steps, of so many passes; that a client keeps
#: what it now is in a checkpoint, that it is on the disk (as its writer says, and as it does), and that it goes on.
TRAIN, ASK, STOP, CHANGED, LEFT, EXPECT, NEAR, SUMMED, DIRECTION, ANCHOR, SAVE, WRITTEN, SAVED, GO_ON = range(14)
#: Letters that bring bytes.
WITH_BYTES = (TRAIN, CHANGED, SUMMED, DIRECTION, ANCHOR, SAVED)
#: A client may wait long for its turn.
PATIENCE = timedelta(days=7)


class Letter(NamedTuple):
    """A letter: its ``kind``, from or to which ``client``, the number of its task, its ``steps``, a ``note`` (whether
    what changes is held; the mean loss), which of several ``heads`` it is about (bits; 0 for all), and flat bytes; None
    for letters that bring none."""

    kind: int
    client: int
    task: int = 0
    steps: int = 0
    note: float = 0.0
    heads: int = 0
    body: torch.Tensor | None = None


class Gone(NamedTuple):
    """The other side is gone."""

    cause: BaseException


class Post:
    """One direction between a client and who merges what it sends, the server (rank 0) or one between: ``down`` to it
    or up from it, of letters with `num_bytes`. Made by all ranks in one order."""

    def __init__(self, client: int, *, down: bool, merger: int = 0):
        self.source, self.target = (merger, client) if down else (client, merger)
        self.inbox: SimpleQueue[Letter | Gone] = SimpleQueue()
        apart = client != merger
        self.group = dist.new_group([merger, client], backend="gloo", timeout=PATIENCE) if apart else None
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.thread = None
        if self.group is not None and rank == self.target:
            self.thread = threading.Thread(target=self._receive, name=f"mail {client}", daemon=True)

    def open(self, inbox: SimpleQueue[Letter | Gone]) -> None:
        """Put what arrives on this side into an inbox from now on."""
        self.inbox = inbox
        if self.thread is not None:
            self.thread.start()

    def send(self, letter: Letter) -> None:
        """Send a letter; it may be changed again when this returns."""
        if self.group is None:
            body = None if letter.body is None else letter.body.clone()
            self.inbox.put(letter._replace(body=body))
            return
        size = 0 if letter.body is None else len(letter.body)
        head = torch.tensor([*letter[:-1], size], dtype=torch.float64)
        dist.send(head, self.target, group=self.group)
        if letter.kind in WITH_BYTES:
            dist.send(letter.body, self.target, group=self.group)

    def _receive(self) -> None:
        try:
            while True:
                head = torch.empty(7, dtype=torch.float64)
                dist.recv(head, self.source, group=self.group)
                kind, client, task, steps, note, heads, size = head.tolist()
                body = None
                if kind in WITH_BYTES:
                    body = torch.empty(int(size), dtype=torch.uint8)
                    dist.recv(body, self.source, group=self.group)
                self.inbox.put(Letter(int(kind), int(client), int(task), int(steps), note, int(heads), body))
                if kind == STOP:
                    return
        except BaseException as error:
            self.inbox.put(Gone(error))

    def close(self) -> None:
        """Wait until the last letter is here."""
        if self.thread is not None:
            self.thread.join()
