"""Real processes for tests: forked, joined by gloo over a file, one torch thread each."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining

from meshwright.errors import MeshwrightError
from meshwright.run.ahead import load_ahead
from meshwright.run.environment import keep_memory, run_in_batch
from meshwright.run.launch import report_of, verdict
from meshwright.run.world import Report, World
from tests.run import plain

load_ahead()


def launch(num_ranks: int, function, *args, timeout_s: float = 120.0) -> list[Any]:
    """`function(rank, *args)` in `num_ranks` joined processes; what each returned, by rank.

    The children are forked, so nothing has to be importable; results are what :mod:`tests.run.plain` writes.

    Raises:
        AssertionError: with the traceback of the first process that failed, or when one hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(num_ranks):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _child(rank, num_ranks, function, args, folder)
            children.append(child)
        _wait(children, folder, timeout_s)
        return [plain.read(Path(folder) / f"{r}.out") for r in range(num_ranks)]


#: Calls that ranks are kept for: what each leaves behind, in memory above all, adds up. And ranks that are kept.
MOST_CALLS, MOST_RANKS = 100, 16
#: Linux's ``prctl`` that has a signal sent to a process whose parent ends.
_PDEATHSIG = 1


def launch_kept(num_ranks: int, function, *args, timeout_s: float = 120.0) -> list[Any]:
    """As :func:`launch`, in processes that are kept for the next call of as many, of whichever test: a fork, a group
    and the pages that a process touches first cost several times what a step of a small model does. `function` is one
    of a module, `args` can be pickled, and neither depends on what a test has patched, or leaves anything patched.

    Raises:
        AssertionError: as :func:`launch`; the processes are ended and not used again.
    """
    found = _kept.pop(num_ranks, None)
    if found is not None and found.calls == MOST_CALLS:
        found.close()
        found = None
    if found is None:
        while sum(_kept) + num_ranks > MOST_RANKS and _kept:
            _kept.pop(next(iter(_kept))).close()  # those that were not called for longest
        found = KeptRanks(num_ranks)
    try:
        answer = found.call(function, args, timeout_s)
    except BaseException:
        found.close()
        raise
    _kept[num_ranks] = found
    return answer


def start_kept(function, *args, num_ranks: int, timeout_s: float = 120.0) -> Any:
    """As the product's :func:`launch.start` on the processor, in processes that are kept: ``function(world, *args)`` on
    every rank, and what the first returns, of whatever is true of a job however its ranks were started. What it prints
    and what the environment says meanwhile, and whoever ends a rank or asks it to end, is for :func:`launch.start`.

    Raises:
        MeshwrightError: as :func:`launch.start`, of errors that every rank raises.
        AssertionError: as :func:`launch_kept`.
    """
    said = launch_kept(num_ranks, _reported, num_ranks, function, args, timeout_s=timeout_s)
    reports = {rank: msgspec.json.decode(one, type=Report) for rank, one in enumerate(said)}
    if any(report.exit_code for report in reports.values()):
        _kept.pop(num_ranks).close()  # nobody knows what it left behind
        raise verdict({rank: report.exit_code for rank, report in reports.items()}, reports)
    return reports[0].result


def _reported(rank: int, num_ranks: int, function, args: tuple) -> str:
    """The report of a rank of a job at its end."""
    world = World(rank, num_ranks, rank, num_ranks, socket.gethostname(), torch.device("cpu"))
    try:
        report = Report(result=function(world, *args))
    except MeshwrightError as error:
        report = report_of(error)
    return msgspec.json.encode(report).decode()


def end_kept() -> None:
    """End the processes that are kept."""
    while _kept:
        _kept.popitem()[1].close()


class KeptRanks:
    """Joined processes that run one call after another. What they are told comes by a pipe each, what they return by
    files, a folder a call. Between calls they are stopped: the threads of a group look about 100 times a second,
    whether or not anything happens."""

    def __init__(self, num_ranks: int):
        self.calls, self.children, self.pipes = 0, [], []
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(num_ranks):
            reading, writing = os.pipe()
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                os.close(writing)
                _serve(rank, num_ranks, reading, self.folder.name)
            os.close(reading)
            self.children.append(child)
            self.pipes.append(writing)

    def call(self, function, args: tuple, timeout_s: float) -> list[Any]:
        self.calls += 1
        place = Path(self.folder.name) / str(self.calls)
        place.mkdir()
        told = pickle.dumps((function, args, str(place)))
        deadline = time.monotonic() + timeout_s
        for child in self.children:
            self._await_stop(child, place, deadline)
        for child, pipe in zip(self.children, self.pipes, strict=True):
            os.kill(child, signal.SIGCONT)
            _send(pipe, told)
        files = [place / f"{rank}.out" for rank in range(len(self.children))]
        while not all(file.exists() for file in files):
            if any(place.glob("*.err")) or time.monotonic() > deadline or self._ended():
                time.sleep(0.2)  # the others' own errors, if they have any
                raise AssertionError(_errors(place) or "a rank that is kept ended or hung without an error")
            time.sleep(0.002)
        return [plain.read(file) for file in files]

    def _await_stop(self, child: int, place: Path, deadline: float) -> None:
        """Wait until a rank is done with the call before, and has stopped."""
        while not os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG):
            if time.monotonic() > deadline or self._ended():
                raise AssertionError(_errors(place.parent) or "a rank that is kept ended or hung between calls")
            time.sleep(0.001)

    def _ended(self) -> bool:
        return any(os.waitid(os.P_PID, c, os.WEXITED | os.WNOHANG | os.WNOWAIT) for c in self.children)

    def close(self) -> None:
        for child, pipe in zip(self.children, self.pipes, strict=True):
            os.close(pipe)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.folder.cleanup()


_kept: dict[int, KeptRanks] = {}


def _send(pipe: int, message: bytes) -> None:
    left = memoryview(struct.pack("q", len(message)) + message)
    while left:
        left = left[os.write(pipe, left) :]


def _receive(pipe: int, length: int) -> bytes:
    """Return so many bytes; the process ends where the pipe does."""
    found = b""
    while len(found) < length:
        more = os.read(pipe, length - len(found))
        if not more:
            os._exit(0)
        found += more
    return found


def _serve(rank: int, num_ranks: int, pipe: int, folder: str) -> None:
    """A kept rank's whole life; never returns."""
    gc.freeze()
    where = Path(folder)
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        _join(rank, num_ranks, folder)
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)
            (length,) = struct.unpack("q", _receive(pipe, 8))
            function, args, place = pickle.loads(_receive(pipe, length))
            where = Path(place)
            torch.manual_seed(0)
            plain.write(where / f"{rank}.part", function(rank, *args))
            (where / f"{rank}.part").rename(where / f"{rank}.out")
            function = args = None
            where = Path(folder)
            _end_groups()
    except BaseException:
        (where / f"{rank}.err").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _join(rank: int, num_ranks: int, folder: str) -> None:
    """Be a rank as the product's are: one thread, memory that is kept, and threads that wait for a core."""
    torch.set_num_threads(1)
    keep_memory()
    if num_ranks > 1:
        run_in_batch()  # before the group's threads are there
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)


def _end_groups() -> None:
    """End the groups that a call has made, once all ranks are done with it: each has threads, and those of a few calls
    took more of the cores than the next."""
    if not dist.is_initialized():
        return
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    del group
    gc.collect()


def _child(rank: int, num_ranks: int, function, args, folder: str) -> None:
    code = 1
    gc.freeze()  # as ranks of the product do
    try:
        _join(rank, num_ranks, folder)
        out = function(rank, *args)
        temporary = Path(folder) / f"{rank}.part"
        plain.write(temporary, out)
        temporary.rename(Path(folder) / f"{rank}.out")
        if num_ranks > 1:
            dist.barrier()
        code = 0
    except BaseException:
        (Path(folder) / f"{rank}.err").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a process group's threads make an orderly exit unsafe


def _wait(children: list[int], folder: str, timeout_s: float) -> None:
    waiting, deadline, failed = dict(enumerate(children)), time.monotonic() + timeout_s, None
    while waiting and failed is None:
        for rank, child in list(waiting.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del waiting[rank]
                if status:
                    failed = rank
        if time.monotonic() > deadline:
            failed = min(waiting)
        time.sleep(0.002)
    if failed is None:
        return
    time.sleep(0.2)  # the others' own errors, if they have any
    for child in waiting.values():
        os.kill(child, 9)
        os.waitpid(child, 0)
    raise AssertionError(_errors(Path(folder)) or f"rank {failed} ended or hung without an error")


def _errors(folder: Path) -> str:
    """Reasons that ranks have left for their end, the first one first."""
    errors = sorted(folder.glob("*.err"), key=lambda file: file.stat().st_mtime)
    return "\n".join(f"rank {file.stem}:\n{file.read_text()}" for file in errors)
