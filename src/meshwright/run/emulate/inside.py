"""The process inside the namespaces: makes hosts and links, and runs scripts on them, one a line of standard input.

Started by :mod:`meshwright.run.emulate.hosts` under ``unshare``; it is root of a user namespace of its own and can
touch nothing outside it. Its hosts are network namespaces joined by one switch (a bridge); a host's link is shaped at
both ends by a token bucket. Nothing connects them to the machine's network.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import msgspec
import numpy as np

from meshwright.run.emulate.script import Script

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
#: Size of a packet in seconds of the link's rate, and its bounds in bytes: large, so that headers and acknowledgements
#: take little of a link that is used both ways.
PACKET_S, PACKET_BYTES = 0.0001, (1500, 9000)
#: What a link saves up while idle, in seconds of its rate: at the host short, so that short messages are shaped too; at
#: the switch, behind it, longer, or two buckets in a row would each lose what the other delays.
BURST_S = (0.0003, 0.005)
#: What a socket holds back, in seconds of the link's rate: little, so that a message counts as sent when it has left.
SOCKET_S, SOCKET_BYTES = 0.004, 65536
#: Bytes a link queues before it drops.
LIMIT_BYTES = 4 * 2**20
#: Least time after which a lost packet is sent again: the usual 200 ms are made for longer ways.
RTO_MS = 50
#: Time for connections to fall silent before a step starts, and for all ranks to see its start.
QUIET_S, NOTICE_S = 0.03, 0.03
#: Of every host's TCP: a plain congestion control, no slow start after a pause, nothing remembered between runs.
SYSCTLS = {"tcp_congestion_control": "cubic", "tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}


class Job(msgspec.Struct):
    """A script to run for some steps; ``out`` is where the times go."""

    script: str
    steps: int
    out: str
    timeout_s: float


def build(num_hosts: int, rate_bits_s: float) -> None:
    """The hosts, each with its link ``eth0`` to the switch."""
    packet = round(min(max(rate_bits_s / 8 * PACKET_S, PACKET_BYTES[0]), PACKET_BYTES[1]))
    bursts = [max(2 * packet + 100, round(rate_bits_s / 8 * s)) for s in BURST_S]
    at_host, at_port = (f"root tbf rate {rate_bits_s:.0f}bit burst {b} limit {LIMIT_BYTES}" for b in bursts)
    _batch("ip", ["link set lo up", "netns add switch"])
    _batch("ip", ["link add br0 type bridge", "link set br0 up"], netns="switch")
    adds = []
    for host in range(num_hosts):
        adds += [
            f"netns add host{host}",
            f"link add eth0 mtu {packet} netns host{host} type veth peer name port{host} mtu {packet} netns switch",
        ]
    _batch("ip", adds)
    _batch("ip", [f"link set port{h} master br0 up" for h in range(num_hosts)], netns="switch")
    _batch("tc", [f"qdisc add dev port{h} {at_port}" for h in range(num_hosts)], netns="switch")
    for number in range(num_hosts):
        name = f"host{number}"
        _batch("ip", [f"addr add 10.77.0.{number + 1}/24 dev eth0", "link set eth0 up", "link set lo up"], netns=name)
        _batch("ip", [f"route replace 10.77.0.0/24 dev eth0 src 10.77.0.{number + 1} rto_min {RTO_MS}ms"], netns=name)
        _batch("tc", [f"qdisc add dev eth0 {at_host}"], netns=name)


def _batch(tool: str, lines: list[str], netns: str = "") -> None:
    command = [tool, *(["-netns", netns] if netns else []), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def enter(host: int, rate_bits_s: float) -> None:
    """Move this process onto a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/host{host}").open() as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    most = round(SOCKET_BYTES + rate_bits_s / 8 * SOCKET_S)
    for name, value in (SYSCTLS | {"tcp_wmem": f"4096 {SOCKET_BYTES} {most}"}).items():
        # what a kernel lacks it does without; the calibration sees it
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv4/{name}").write_text(value)


def execute(job: Job, ranks_per_host: int, rate_bits_s: float) -> None:
    """Run one script and write ``times`` [steps, ops, 2] and ``late`` [steps, ops], times counted from each step's
    start."""
    from meshwright.run.emulate import rank as ranks

    script = msgspec.json.decode(Path(job.script).read_bytes(), type=Script)
    num_ranks, num_ops = len(script.ranks), script.num_ops
    memory = mmap.mmap(-1, ranks.Board.num_bytes(num_ranks, job.steps, num_ops))
    board = ranks.Board(memory, num_ranks, job.steps, num_ops)
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                _child(script, rank, (rank // ranks_per_host, rate_bits_s), board, folder, job.steps)
            children[child] = rank
        try:
            _conduct(board, children, job, folder)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    measured = board.times - board.go[:, None, None]
    np.savez(job.out, times=measured, late=board.late)


def _child(script: Script, rank: int, host: tuple[int, float], board, folder: str, steps: int) -> None:
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_TIMERSLACK, 1)
        enter(*host)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
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


def _conduct(board, children: dict[int, int], job: Job, folder: str) -> None:
    """Start step after step when all ranks are ready; give up when one ends early or nothing happens for too long."""
    deadline = time.monotonic() + job.timeout_s
    for step in range(job.steps + 1):
        while board.ready.min() <= step:
            if board.ready.min() < 0:
                time.sleep(0.2)
                raise RuntimeError(_first_error(folder))
            for child in list(children):
                if os.waitpid(child, os.WNOHANG)[0]:
                    raise RuntimeError(f"rank {children.pop(child)} ended: {_first_error(folder)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end after {job.timeout_s:.0f} s, at step {step} of {job.steps}")
            time.sleep(0.001)
        if step < job.steps:
            time.sleep(QUIET_S)
            board.go[step] = time.monotonic() + NOTICE_S


def _first_error(folder: str) -> str:
    errors = sorted(Path(folder).glob("error*"), key=lambda file: file.stat().st_mtime)
    return f"{errors[0].name}: {errors[0].read_text().strip()}" if errors else "without a word"


def main(argv: list[str]) -> None:
    """``inside NUM_HOSTS RANKS_PER_HOST BITS_A_SECOND``: one JSON line for every job, ``{}`` or ``{"error": ...}``."""
    num_hosts, ranks_per_host, rate = int(argv[0]), int(argv[1]), float(argv[2])
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write between the answers
    try:
        build(num_hosts, rate)
        # loaded once, before ranks are forked
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        _answer(answers, "")
    except Exception as error:
        _answer(answers, f"{type(error).__name__}: {error}")
        return
    for line in sys.stdin:
        try:
            execute(msgspec.json.decode(line, type=Job), ranks_per_host, rate)
            _answer(answers, "")
        except Exception as error:
            _answer(answers, str(error) or type(error).__name__)
    os._exit(0)


def _answer(answers, error: str) -> None:
    answers.write(msgspec.json.encode({"error": error} if error else {}).decode() + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
