"""The processes of peers, and their world: who is started, told, listened to, killed and started again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

import msgspec

from meshwright.run import launch
from meshwright.run.ahead import load_ahead
from meshwright.run.swarm.parcels import receive, send
from meshwright.simulate.swarm import SwarmWorld


class Started(NamedTuple):
    """A peer as its starter knows it: the process, the way to it, and how many had its number before."""

    process: Any
    way: Connection
    life: int


class HearsPeers(Protocol):
    """Whoever hears what peers say."""

    def told(self, number: int, word: Any, body: bytes) -> None:
        """A peer says something."""

    def gone(self, number: int) -> None:
        """A peer has died."""

    def joined(self, number: int) -> None:
        """A peer was started in the place of one that died."""

    def may_join(self) -> bool:
        """Whether a peer may be started now."""


class PeerProcesses:
    """Peers that are forked from here and live ``live(way, parent, inherited, *words, slowness)``; what they say is of
    type `said`. To be closed."""

    def __init__(
        self, world: SwarmWorld, live: Callable[..., None], words: tuple[Any, ...], said: Any, listener: HearsPeers
    ):
        load_ahead()  # every peer is forked from here
        self.world, self.live, self.words, self.said, self.listener = world, live, words, said, listener
        self.context = multiprocessing.get_context("fork")
        self.peers: dict[int, Started] = {}
        self.lives: dict[int, int] = defaultdict(int)
        self.begun = time.monotonic()
        self.first_step_at: float | None = None
        self.failures, self.left = deque(world.failures), world.spares
        self.back: list[tuple[float, int]] = []
        self.lost = self.joined = 0

    def now(self) -> float:
        """Seconds since the peers were started."""
        return time.monotonic() - self.begun

    def begins(self) -> None:
        """The first step begins: the world's times count from now on."""
        self.first_step_at = self.now() if self.first_step_at is None else self.first_step_at

    def start(self, number: int) -> None:
        """Start the process of a peer."""
        ours, theirs = self.context.Pipe()
        inherited = [ours, *(one.way for one in self.peers.values())]
        words = (theirs, os.getpid(), inherited, *self.words, self.world.computing[number])
        process = self.context.Process(target=self.live, args=words, name=f"peer {number}")
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, launch.ASKING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        self.peers[number] = Started(process, ours, self.lives[number])

    def order(self, number: int, word: msgspec.Struct, body: bytes = b"") -> None:
        """Tell a peer something; one that has died is seen when the next word is waited for."""
        with contextlib.suppress(OSError, KeyError):
            send(self.peers[number].way, word, body)

    def hear(self, most_s: float = 0.5) -> None:
        """Take up what peers say, that one has died, and what the world says."""
        due = [at_s for at_s, _ in self.back[:1]]
        if self.failures and self.first_step_at is not None:
            due.append(self.first_step_at + self.failures[0].at_s)
        timeout = max(0.0, min([most_s, *(at_s - self.now() for at_s in due)]))
        ways = {one.way: number for number, one in self.peers.items()}
        ends = {one.process.sentinel: number for number, one in self.peers.items()}
        ready = wait([*ways, *ends], timeout)
        for number in dict.fromkeys((ways | ends)[one] for one in ready):
            self._listen(number)
        self._world()

    def _listen(self, number: int) -> None:
        one = self.peers[number]
        try:
            while one.way.poll():
                self.listener.told(number, *receive(one.way, self.said))
        except (EOFError, OSError):
            one.process.join()
        if one.process.exitcode is not None:
            self.peers.pop(number).way.close()
            self.lives[number] += 1
            self.lost += 1
            self.listener.gone(number)

    def _world(self) -> None:
        """Kill a peer when its time has come, and start one that is back."""
        while self.failures and self.first_step_at is not None:
            one = self.failures[0]
            if self.now() < self.first_step_at + one.at_s:
                break
            self.failures.popleft()
            there = sorted(self.peers)
            number = one.node if one.node >= 0 or not there else there[self.lost % len(there)]
            if number not in self.peers:
                continue
            if one.back_s is not None:
                back_s = self.first_step_at + one.back_s
            elif self.left is None or self.left > 0:
                self.left = None if self.left is None else self.left - 1
                back_s = self.now() + self.world.restart_s
            else:
                back_s = self.now() + self.world.repair_s
            self.back = sorted([*self.back, (back_s, number)])
            os.kill(self.peers[number].process.pid, signal.SIGKILL)
        while self.back and self.back[0][0] <= self.now() and self.back[0][1] not in self.peers:
            if not self.listener.may_join():
                return
            number = self.back.pop(0)[1]
            self.start(number)
            self.joined += 1
            self.listener.joined(number)

    def close(self, word: msgspec.Struct) -> None:
        """End all peers, by a word that asks them to."""
        for number in self.peers:
            self.order(number, word)
        for one in self.peers.values():
            one.process.join(2.0)
            if one.process.exitcode is None:
                one.process.kill()
                one.process.join()
            one.way.close()
