"""The processes of an emulated cluster's ranks: forked onto their hosts, watched, and killed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import tempfile
import time
import traceback
from pathlib import Path

from meshwright.run.emulate.script import Script
from meshwright.run.emulate.wire import EmulatedWire

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
#: What a socket holds back, in seconds of the link's rate: little, so that a message counts as sent when it has left.
SOCKET_S, SOCKET_BYTES = 0.004, 65536
#: Of every host's TCP: a plain congestion control, no slow start after a pause, nothing remembered between runs.
SYSCTLS = {"tcp_congestion_control": "cubic", "tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}


class Processes:
    """One process a rank for some steps of a script, ``ranks_per_host`` on each host, from their fork to their end; a
    context manager. ``board`` is the memory that they share."""

    def __init__(self, script: Script, steps: int, ranks_per_host: int, wire: EmulatedWire):
        from meshwright.run.emulate.rank import Board

        self.steps = steps
        num_ranks, num_ops = len(script.ranks), script.num_ops
        self.board = Board(mmap.mmap(-1, Board.num_bytes(num_ranks, steps, num_ops)), num_ranks, steps, num_ops)
        self._folder = tempfile.TemporaryDirectory()
        self._children: dict[int, int] = {}  # rank -> process
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                host = (f"/run/netns/host{rank // ranks_per_host}", wire)
                _child(script, rank, host, self.board, self._folder.name, steps)
            self._children[rank] = child

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_) -> None:
        for rank in list(self._children):
            self.kill(rank)
        self._folder.cleanup()

    def kill(self, rank: int) -> None:
        """End a rank as a node ends whose power fails, and wait for its death."""
        child = self._children.pop(rank)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def ready(self, step: int) -> bool:
        """Whether all ranks have done the steps before `step` and wait for it; after the last one, whether they end.

        Raises:
            RuntimeError: when a rank has ended that nobody killed.
        """
        least = self.board.ready.min()
        if least < 0:
            time.sleep(0.2)  # the error is written
            raise RuntimeError(self._first_error())
        for rank, child in list(self._children.items()):
            gone, status = os.waitpid(child, os.WNOHANG)
            if gone:
                del self._children[rank]
                raise RuntimeError(f"rank {rank} ended: {self._first_error(ending(status))}")
        return bool(least > step)

    def _first_error(self, unsaid: str = "without a word") -> str:
        errors = sorted(Path(self._folder.name).glob("error*"), key=lambda file: file.stat().st_mtime)
        return f"{errors[0].name}: {errors[0].read_text().strip()}" if errors else unsaid


def ending(status: int) -> str:
    """How a process ended that wrote no error, by the status that ``os.waitpid`` has of it."""
    if not os.WIFSIGNALED(status):
        return f"with exit code {os.WEXITSTATUS(status)} and without a word"
    name = signal.Signals(os.WTERMSIG(status)).name
    full = ", as the kernel does where memory is full: fewer ranks, or a smaller model or batch, need less"
    return f"killed by {name}{full if name == 'SIGKILL' else ''}"


def _child(script: Script, rank: int, host: tuple[str, EmulatedWire], board, folder: str, steps: int) -> None:
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_TIMERSLACK, 1)
        enter_host(*host)
        from meshwright.run.emulate import rank as ranks

        ranks.run(script, rank, board, f"{folder}/store", steps)
        code = 0
    except BaseException:
        Path(f"{folder}/error{rank}").write_text(traceback.format_exc())
    finally:
        board.ready[rank] = steps + 1 if code == 0 else -1
        while code == 0:  # the connections stay open until all have ended
            time.sleep(1)
        os._exit(code)


def enter_network(place: str) -> None:
    """Move this thread into the network namespace of a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(place).open() as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {place}")


def enter_owner(place: str) -> None:
    """Move this process into the user namespace of a file, to which the networks of hosts belong."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(place).open() as handle:
        if libc.setns(handle.fileno(), CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), f"setns {place}")


def enter_host(place: str, wire: EmulatedWire) -> None:
    """Move this process onto the host whose network is `place`, with buffers for what its link has under way."""
    enter_network(place)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    under_way = wire.rate_bits_s / 8 * 2 * wire.delay_s  # until the answer is back
    sent, got = round(SOCKET_BYTES + wire.rate_bits_s / 8 * SOCKET_S + 2 * under_way), round(4 * under_way)
    buffers = {"tcp_wmem": f"4096 {SOCKET_BYTES} {sent}"}
    if wire.delay_s:
        buffers["tcp_rmem"] = f"4096 {max(131072, got)} {max(6 * 2**20, 2 * got)}"
    for name, value in (SYSCTLS | buffers).items():
        # what a kernel lacks it does without; the calibration sees it
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv4/{name}").write_text(value)
