"""An aggregator between clients and their server: it adds up what the clients of its node changed, and sends one sum.

Aggregators stand beside the first client of every group, whose answers come through memory, as LIFL has them on every
node (Qi et al. 2405.10968): the server's port carries one message for each group instead of one for each client.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from queue import SimpleQueue

from meshwright.run.flat import Flat
from meshwright.run.mail import CHANGED, EXPECT, LEFT, NEAR, SAVED, STOP, SUMMED, Gone, Letter, Post


class Aggregator:
    """The aggregator of ``members`` clients: told by the server how many answers of a task to wait for."""

    def __init__(self, flat: Flat, members: int, up: Post, inbox: SimpleQueue[Letter | Gone]):
        self.flat, self.members, self.up, self.inbox = flat, members, up, inbox
        self.expected: dict[int, int] = {}
        self.answers: dict[int, list[Letter]] = defaultdict(list)
        self.wrong: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="aggregator", daemon=True)

    def _run(self) -> None:
        """Add up until all members have stopped, and say so to the server."""
        stopped = 0
        try:
            while stopped < self.members:
                letter = self.inbox.get()
                if isinstance(letter, Gone):
                    raise letter.cause
                if letter.kind == EXPECT:
                    self.expected[letter.task] = letter.steps
                elif letter.kind == SAVED:
                    self.up.send(letter)
                    continue
                elif letter.kind == CHANGED:
                    self.answers[letter.task].append(letter)
                elif letter.kind == LEFT:
                    self.up.send(letter)
                    self.expected[letter.task] -= 1
                stopped += letter.kind == STOP
                self._forward(letter.task)
        except BaseException as error:
            self.wrong = error
        finally:
            self.up.send(Letter(STOP, 0))

    def _forward(self, task: int) -> None:
        """Send the sum of a task's answers, when all are here."""
        answers = self.answers[task]
        if not answers or len(answers) < self.expected.get(task, self.members + 1):
            return
        del self.answers[task], self.expected[task]
        total = sum(self.flat.decoded(one.body, one.client, task) for one in answers)
        for one in answers:
            self.up.send(one._replace(kind=NEAR, body=None))
        self.up.send(Letter(SUMMED, answers[0].client, task, len(answers), body=self.flat.as_bytes(total)))
