"""One rank of an emulated cluster: a thread per stream that walks its ops, kernels as sleeps, communication for real.

A device's stream runs on without its host, so a sleep that follows another starts where that one was meant to end: the
host's late waking does not add up. A message or collective starts when its thread really issues it.
"""

from __future__ import annotations

import gc
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

from meshwright.run.emulate.script import Op, Script

#: How often a rank looks whether the step may start.
POLL_S = 0.0005


class Board:
    """Shared memory of all ranks of a run: who is ready for which step, when it starts, and when every op ran.

    ``times`` [steps, ops, 2] are starts and ends on the host's monotonic clock, ``late`` [steps, ops] how much later
    than meant a sleep's thread woke. ``save`` says after how many steps the ranks save (0 for never) and how long that
    takes, ``saved`` [ranks, 2] how many steps each has saved and when the last of these was. ``slower`` [1] is by how
    much sleeps are longer than the script says.
    """

    def __init__(self, memory, num_ranks: int, num_steps: int, num_ops: int):
        sizes = self._sizes(num_ranks, num_steps, num_ops)
        whole = np.frombuffer(memory, np.float64, sum(sizes))
        self.ready, self.go, times, self.late, self.save, saved, self.slower = np.split(whole, np.cumsum(sizes)[:-1])
        self.times = times.reshape(num_steps, num_ops, 2)
        self.late = self.late.reshape(num_steps, num_ops)
        self.saved = saved.reshape(num_ranks, 2)
        self.slower[:] = 1.0

    @staticmethod
    def _sizes(num_ranks: int, num_steps: int, num_ops: int) -> tuple[int, ...]:
        return (num_ranks, num_steps, num_steps * num_ops * 2, num_steps * num_ops, 2, num_ranks * 2, 1)

    @staticmethod
    def num_bytes(num_ranks: int, num_steps: int, num_ops: int) -> int:
        return 8 * sum(Board._sizes(num_ranks, num_steps, num_ops))


class ScriptedRank:
    """Runs one rank's part of a script, step after step."""

    def __init__(self, script: Script, rank: int, board: Board, store: dist.Store):
        self.script, self.rank, self.board, self.ops = script, rank, board, script.ranks[rank]
        self.offset = script.first_op[rank]
        torch.set_num_threads(1)
        world = len(script.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        # every process makes every group, in one order, whether or not it is in it
        made = [dist.new_group(list(c.ranks)) for c in script.channels]
        self.groups = [g if rank in c.ranks else None for g, c in zip(made, script.channels)]
        most = max((op.num_bytes for op in self.ops), default=0) + 4 * world
        self.out, self.into = torch.zeros(most, dtype=torch.uint8), torch.zeros(most, dtype=torch.uint8)
        self.streams = [[i for i, op in enumerate(self.ops) if op.stream == s] for s in range(len(script.streams))]
        needed = {a for op in self.ops for a in op.after if self.ops[a].stream != op.stream}
        self.needed = np.isin(np.arange(len(self.ops)), list(needed)).tolist()
        self.failed: BaseException | None = None

    def connect(self) -> None:
        """A first message on every channel, so that no connection is made during a step."""
        for group, channel in zip(self.groups, self.script.channels):
            if group is not None:
                ring(group, channel.ranks, self.rank, "all_gather", self.out, self.into, len(channel.ranks), tag=1)
                dist.all_reduce(self.out[:4].view(torch.float32), group=group)

    def step(self, number: int) -> None:
        """One step: messages expected are posted first, then all ranks start at once."""
        self.gates = [threading.Lock() if needed else None for needed in self.needed]
        for gate in filter(None, self.gates):
            gate.acquire()
        self.posted = {i: self._post(op) for i, op in enumerate(self.ops) if op.what == "recv"}
        self.times, self.late = self.board.times[number], self.board.late[number]
        gc.collect()
        gc.disable()
        self.board.ready[self.rank] = number + 1
        while not self.board.go[number]:
            time.sleep(POLL_S)
        begin = float(self.board.go[number])
        threads = [threading.Thread(target=self._walk, args=(s, begin)) for s in self.streams if s]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.enable()
        if self.failed is not None:
            raise self.failed

    def save(self, number: int, *, last: bool) -> None:
        """Save after a step if it is due, the `last` one always: sleep for what that takes."""
        every, seconds = (float(x) for x in self.board.save)
        if not every or ((number + 1) % every and not last):
            return
        mine = self.times[self.offset : self.offset + len(self.ops), 1]
        time.sleep(max(0.0, float(mine.max(initial=0.0)) + seconds - time.monotonic()))
        self.board.saved[self.rank, 1] = time.monotonic()
        self.board.saved[self.rank, 0] = number + 1

    def _post(self, op: Op) -> dist.Work:
        group = self.groups[op.channel]
        return dist.irecv(self.into[: op.num_bytes], src=op.peer, group=group, tag=op.tag)

    def _walk(self, mine: list[int], begin: float) -> None:
        try:
            clock, ops, ends = begin, self.ops, self.times[self.offset :, 1]
            time.sleep(max(0.0, begin - time.monotonic()))
            for i in mine:
                op, ready = ops[i], clock
                for dep in op.after:
                    gate = self.gates[dep]
                    if gate is not None and ops[dep].stream != op.stream:
                        gate.acquire()
                        gate.release()
                        ready = max(ready, float(ends[dep]))
                if op.what == "sleep":
                    start, clock = ready, ready + op.seconds * float(self.board.slower[0])
                    time.sleep(max(0.0, clock - time.monotonic()))
                    self.late[self.offset + i] = time.monotonic() - clock
                else:
                    start = time.monotonic()
                    self._communicate(i, op)
                    clock = time.monotonic()
                self.times[self.offset + i] = start, clock
                if self.gates[i] is not None:
                    self.gates[i].release()
        except BaseException as error:
            self.failed = error
            for gate in filter(None, self.gates):
                if gate.locked():
                    gate.release()

    def _communicate(self, i: int, op: Op) -> None:
        group = self.groups[op.channel]
        if op.what == "recv":
            self.posted[i].wait()
        elif op.what == "send":
            dist.isend(self.out[: op.num_bytes], dst=op.peer, group=group, tag=op.tag).wait()
        elif op.what == "all_reduce":
            part = self.out[: max(4, op.num_bytes // 4 * 4)].view(torch.float32)
            dist.all_reduce(part, group=group, async_op=True).wait()
        else:
            ranks = self.script.channels[op.channel].ranks
            move = exchange if op.what == "all_to_all" else ring
            move(group, ranks, self.rank, op.what, self.out, self.into, op.num_bytes, tag=2 * i)


def ring(group, ranks, rank: int, what: str, out, into, num_bytes: int, *, tag: int) -> None:
    """``all_gather`` or ``reduce_scatter`` of `num_bytes` in all, block by block around the ring of `ranks`, or one
    ``shift`` of `num_bytes` to the next. gloo's own reduce-scatter moves the bytes of an all-reduce; a ring does not.
    """
    n, here = len(ranks), ranks.index(rank)
    following, before = ranks[(here + 1) % n], ranks[here - 1]
    if what == "shift":
        steps, block = 1, num_bytes
    else:
        steps, block = n - 1, -(-num_bytes // (4 * n)) * 4
    got = [dist.irecv(into[:block], src=before, group=group, tag=tag) for _ in range(steps)]
    for arrived in got:
        sent = dist.isend(out[:block], dst=following, group=group, tag=tag)
        arrived.wait()
        if what == "reduce_scatter":
            into[:block].view(torch.float32).add_(out[:block].view(torch.float32))
        sent.wait()


def exchange(group, ranks, rank: int, what: str, out, into, num_bytes: int, *, tag: int) -> None:
    """All-to-all of `num_bytes` a rank: its block to every other rank at once."""
    block = -(-num_bytes // len(ranks))
    others = [r for r in ranks if r != rank]
    works = [dist.irecv(into[:block], src=r, group=group, tag=tag) for r in others]
    works += [dist.isend(out[:block], dst=r, group=group, tag=tag) for r in others]
    for work in works:
        work.wait()


def run(script: Script, rank: int, board: Board, store: str, num_steps: int) -> None:
    """The whole life of a rank's process after its network is there."""
    sys.setswitchinterval(0.0005)
    mine = ScriptedRank(script, rank, board, dist.FileStore(store, len(script.ranks)))
    mine.connect()
    gc.collect()
    gc.freeze()  # what is there now stays, and is not looked at before every step
    for number in range(num_steps):
        mine.step(number)
        mine.save(number, last=number + 1 == num_steps)
