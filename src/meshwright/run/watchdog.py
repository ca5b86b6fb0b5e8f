"""Ranks that a launcher has started look after each other: a thread in each, over the launcher's key-value store.

Every rank says now and then that it is alive, and listens for its neighbour's word: so each is heard by one other, and
a thousand ranks cost each as little as two. A rank that fails says why before it ends. Whoever is first to know
claims the message; all others end in silence, so that one stands on the screen.

A rank may be deep in a collective when its peer dies (NCCL waits for minutes), so this thread ends the process itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from meshwright.run.world import Report, World, died

BEAT_S = 0.5
#: A rank not heard of for so long has died.
SILENCE_S = 10.0
#: A rank that lost its peer leaves the message to the peer itself, or to whoever saw it die, for so long.
PATIENCE_S = SILENCE_S + 3 * BEAT_S


#: Rank 0, where it holds the store itself, stays for so long after the others should have read why it ends.
LINGER_S = 3.0


def connect(timeout_s: float) -> dist.TCPStore:
    """The store of the job: the launcher's own, or one that rank 0 opens."""
    return _store(_held_by_rank_0() and os.environ["RANK"] == "0", timeout_s)


def _held_by_rank_0() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _store(ours: bool, timeout_s: float) -> dist.TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=ours, timeout=limit, wait_for_workers=False)


class Watchdog:
    """The thread of one rank that watches its neighbour; begins at once, ends with :meth:`close`."""

    def __init__(self, world: World):
        self.world = world
        prefix = f"watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
        self._store = dist.PrefixStore(prefix, _store(False, 60.0))  # of its own: the main thread may block its
        self._store.set(f"host/{world.rank}", world.host)
        self._closed = threading.Event()
        if world.size > 1:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """The run is over; a neighbour that is silent from now on is no failure."""
        self._closed.set()
        self._store.set(f"left/{self.world.rank}", "1")

    def blame(self, report: Report) -> bool:
        """Whether this rank is to say what `report` says: it is the first, and not the mere consequence of another.
        When it returns, who is not to speak may end."""
        try:
            until = time.monotonic() + (PATIENCE_S if report.consequence else 0.0)
            while time.monotonic() < until and not self._store.check(["failed"]):
                time.sleep(0.05)
            self._closed.set()
            speaks = self._store.add("failed", 1) == 1
            if self.world.first and _held_by_rank_0():
                self._linger()
            self._store.add("told", 1)
            return speaks
        except RuntimeError:  # rank 0 has gone, and its store with it
            self._closed.set()
            if self.world.rank == 1 and report.consequence:
                print(died(0, "its host", "its key-value store is gone"), file=sys.stderr)
            return False

    def _linger(self) -> None:
        """Let the others learn that this rank speaks, before its store ends with it."""
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until and self._store.add("told", 0) < self.world.size - 1:
            time.sleep(0.02)

    def _run(self) -> None:
        neighbour = (self.world.rank + 1) % self.world.size
        beat, heard, heard_at = 0, b"", time.monotonic()
        while not self._closed.wait(BEAT_S):
            try:
                beat += 1
                self._store.set(f"beat/{self.world.rank}", str(beat))
                if self._store.check(["failed"]):
                    time.sleep(BEAT_S)  # time for this rank's own exception to end it first
                    self._end("")
                if self._store.check([f"left/{neighbour}"]):
                    continue
                said = self._store.get(f"beat/{neighbour}") if self._store.check([f"beat/{neighbour}"]) else b""
                if said != heard:
                    heard, heard_at = said, time.monotonic()
                elif time.monotonic() - heard_at > SILENCE_S:
                    self._mourn(neighbour)
            except RuntimeError:
                gone = self.world.rank == 1 and _held_by_rank_0() and not self._closed.is_set()
                self._end(str(died(0, "its host", "its key-value store is gone")) if gone else "")

    def _mourn(self, neighbour: int) -> None:
        host = self._store.get(f"host/{neighbour}").decode() if self._store.check([f"host/{neighbour}"]) else "?"
        error = died(neighbour, host, f"nothing heard of it for {SILENCE_S:.0f} s")
        self._end(str(error) if self._store.add("failed", 1) == 1 else "")

    def _end(self, message: str) -> None:
        """End the process with exit code 1, after printing `message` to stderr if there is one.

        Without a message it does nothing once the watchdog is closed: the main thread then ends the process itself."""
        if self._closed.is_set() and not message:
            return
        if message:
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
