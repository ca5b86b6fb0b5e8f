"""The process inside the namespaces: makes hosts and links, and runs scripts on them, one a line of standard input.

Started by :mod:`meshwright.run.emulate.hosts` under ``unshare``; it is root of a user namespace of its own and can
touch nothing outside it. Its hosts are network namespaces joined by one switch (a bridge); a host's link is shaped at
both ends by a token bucket. Nothing connects them to the machine's network.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from meshwright.run.emulate.lifetime import Life, live
from meshwright.run.emulate.orders import Steps
from meshwright.run.emulate.processes import PR_SET_PDEATHSIG, Processes
from meshwright.run.emulate.script import Script

#: Size of a packet in seconds of the link's rate, and its bounds in bytes: large, so that headers and acknowledgements
#: take little of a link that is used both ways.
PACKET_S, PACKET_BYTES = 0.0001, (1500, 9000)
#: What a link saves up while idle, in seconds of its rate: at the host short, so that short messages are shaped too; at
#: the switch, behind it, longer, or two buckets in a row would each lose what the other delays.
BURST_S = (0.0003, 0.005)
#: Bytes a link queues before it drops.
LIMIT_BYTES = 4 * 2**20
#: Least time after which a lost packet is sent again: the usual 200 ms are made for longer ways.
RTO_MS = 50
#: Time for connections to fall silent before a step starts, and for all ranks to see its start.
QUIET_S, NOTICE_S = 0.03, 0.03


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


def execute(order: Steps, ranks_per_host: int, rate_bits_s: float) -> None:
    """Run one script and write ``times`` [steps, ops, 2] and ``late`` [steps, ops], times counted from each step's
    start."""
    script = msgspec.json.decode(Path(order.script).read_bytes(), type=Script)
    with Processes(script, order.steps, ranks_per_host, rate_bits_s) as ranks:
        _conduct(ranks, order)
        board = ranks.board
        measured = board.times - board.go[:, None, None]
        np.savez(order.out, times=measured, late=board.late)


def _conduct(ranks: Processes, order: Steps) -> None:
    """Start step after step when all ranks are ready; give up when one ends early or nothing happens for too long."""
    deadline = time.monotonic() + order.timeout_s
    for step in range(order.steps + 1):
        while not ranks.ready(step):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end after {order.timeout_s:.0f} s, at step {step} of {order.steps}")
            time.sleep(0.001)
        if step < order.steps:
            time.sleep(QUIET_S)
            ranks.board.go[step] = time.monotonic() + NOTICE_S


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
            order = msgspec.json.decode(line, type=Steps | Life)
            do = execute if isinstance(order, Steps) else live
            do(order, ranks_per_host, rate)
            _answer(answers, "")
        except Exception as error:
            _answer(answers, str(error) or type(error).__name__)
    os._exit(0)


def _answer(answers, error: str) -> None:
    answers.write(msgspec.json.encode({"error": error} if error else {}).decode() + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
