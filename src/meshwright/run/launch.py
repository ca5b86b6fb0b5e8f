"""The processes of a job: started here, or joined when ``torchrun`` (or a scheduler) has started them.

Without a launcher this process becomes the parent of one process a rank on this machine and watches them: when one
dies, by an exception, a signal or the system's memory limit, the others are ended within seconds, and one error says
which rank on which host, and why. It is forked on the CPU, where that is safe and twenty times quicker, and spawned
when GPUs are used.

Under a launcher every rank is a process like this one and there is no parent; :mod:`meshwright.run.watchdog` does the
watching.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.run import watchdog
from meshwright.run.ahead import load_ahead
from meshwright.run.environment import keep_memory, launched, num_threads, own_cores, run_in_batch
from meshwright.run.world import RankDied, Report, World, died, meet

#: How long the others may take to say why they ended once a rank has died; then they are killed.
GRACE_S = 1.5
#: After so long without an answer a collective gives up.
TIMEOUT_S = 600.0
#: A rank says so often that it is alive.
BEAT_S = 0.5
#: A rank that a signal stopped is given up after so long, and one that is merely silent after so much longer: a call
#: into a library may keep its threads waiting.
STOPPED_S, SILENT_S = 8.0, 120.0
#: Signals that ask a run to end in order.
ASKING = (signal.SIGINT, signal.SIGTERM)
#: torch's variable that has all ranks wait for one another behind every group they make.
_BARRIER = "TORCH_DIST_INIT_BARRIER"
#: What a rank says whose peer has gone: a consequence, never the cause.
PEER = re.compile(r"closed by peer|reset by peer|broken pipe|timed out|connection refused|NCCL|socket|gloo", re.I)


class StopSignal:
    """Whether this process was asked to end: SIGTERM, and SIGINT under a launcher."""

    requested = False

    def __call__(self, number: int = 0, frame: FrameType | None = None) -> None:
        self.requested = True


#: The request of this process; a run looks at it once a step.
stop = StopSignal()


def start(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    device: str = "auto",
    timeout_s: float = TIMEOUT_S,
    stops: bool = False,
    begun: Callable[[list[Any]], None] | None = None,
    enter: Callable[[int], None] | None = None,
) -> Any:
    """``function(world, *args)`` on every rank; what it returned on rank 0, as plain values (None on other ranks of a
    launched job). `device` is ``cpu``, ``cuda`` or ``auto``. `stops`: `function` looks at :data:`stop` and ends in
    order, with a result that says so; a job that does not is ended at once by SIGINT or SIGTERM. `begun` is called with
    the processes that are started here, once they are; `enter` by each of them, first of all, with its rank. Must be
    called before this process has opened a process group or used autograd; when GPUs are used `function` must be
    importable and `args` picklable.

    Raises:
        MeshwrightError: L002 when processes or GPUs do not suffice; what `function` raised, once.
        RankDied: L001 naming the rank, its host and the cause.
        KeyboardInterrupt: when a job that does not stop is asked to, or one that does for the second time.
    """
    if launched():
        return _join(function, args, num_ranks, device, timeout_s, stops)
    kind = _device_type(device, num_ranks)
    context = multiprocessing.get_context(start_method(kind))
    if context.get_start_method() == "fork":
        load_ahead()
    reading, writing = context.Pipe(duplex=False)
    beats = context.RawArray("L", num_ranks)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        children = []
        for rank in range(num_ranks):
            world = World(rank, num_ranks, rank, num_ranks, socket.gethostname(), torch.device(kind, rank))
            inherited = writing if context.get_start_method() == "fork" else None
            words = (function, args, world, folder, reading, inherited, timeout_s, stops, enter, beats)
            children.append(context.Process(target=_child, args=words, name=f"rank {rank}"))
        try:
            with _forwarding(children, stops):
                _begin(children)
                if begun is not None:
                    begun(children)
                _watch(children, Path(folder), beats)
            return _read(Path(folder), 0).result
        finally:
            _end(children)
            reading.close()
            writing.close()


def _begin(children: list[Any]) -> None:
    """Start the children. Signals wait meanwhile, so that none meets a child before its own handlers are there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        with warnings.catch_warnings():
            # Python warns of forks beside threads; ours begin anew with torch and make no use of the old ones
            warnings.simplefilter("ignore", DeprecationWarning)
            for child in children:
                child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_method(kind: str) -> str:
    """Return the start method of processes that use a ``cpu`` or ``cuda`` device: CUDA does not survive a fork, nor do
    the system libraries of macOS."""
    return "fork" if kind == "cpu" and sys.platform == "linux" else "spawn"


def leave() -> None:
    """Leave the job in order. gloo's threads can deadlock or abort when a group is torn down while they still hold
    Python objects (pytorch#56297): after a barrier and a breath they hold none."""
    if dist.is_initialized():
        meet()
        time.sleep(0.05)
        dist.destroy_process_group()


def end_process(code: int) -> None:
    """End this process without the interpreter's own shutdown, which a process group's threads make unsafe."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _device_type(device: str, local_size: int) -> str:
    """``cpu`` or ``cuda`` for so many processes on this machine.

    Raises:
        MeshwrightError: L002 when there are GPUs, but too few.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    held = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if held < local_size:
        raise MeshwrightError.one(
            "L002",
            f"{local_size} ranks and {held} GPU{'s' * (held != 1)} on this machine",
            place=f"--device {device}",
            help="start it on more machines with torchrun, plan for fewer ranks, or use --device cpu",
        )
    return "cuda"


def open_group(world: World, timeout_s: float, **where: Any) -> None:
    """Threads, device and the default process group of a rank."""
    torch.set_num_threads(num_threads())
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size > 1:
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout_s)
        if world.device.type == "cpu":
            run_in_batch()  # before the group's threads are there
        # without a device_id: groups that know theirs put the messages of all pairs of ranks in one queue, where one
        # that is sent waits behind another that is still to come
        with _joined(backend == "gloo"):
            dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=limit, **where)


@contextmanager
def _joined(wanted: bool) -> Iterator[None]:
    """Have all ranks joined before any goes on, where that is `wanted`: one that fails at once would leave while others
    still connect to it. The groups of a mesh are made without: each is there once its own ranks are, and waiting for
    all others through a file took several times as long as making it."""
    before = os.environ.get(_BARRIER)
    if wanted:
        os.environ[_BARRIER] = "1"
    try:
        yield
    finally:
        if wanted and before is None:
            del os.environ[_BARRIER]


def _child(
    function: Callable[..., Any],
    args: tuple,
    world: World,
    folder: str,
    parent: Any,
    inherited: Any,
    timeout_s: float,
    stops: bool,
    enter: Callable[[int], None] | None,
    beats: Any,
) -> None:
    """A rank's whole life; never returns."""
    gc.freeze()  # what the parent holds stays: a collection would look at all of it, and copy its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and passes it on once
    signal.signal(signal.SIGTERM, stop if stops else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    if inherited is not None:
        inherited.close()  # else the parent's end of the pipe stays open in its children
    try:
        if enter is not None:
            enter(world.rank)
    except OSError as error:
        _write(Path(folder), world.rank, report_of(error))
        end_process(1)
    threading.Thread(target=_die_with_parent, args=(parent,), daemon=True).start()
    threading.Thread(target=_beat, args=(beats, world.rank), daemon=True).start()
    if world.device.type == "cpu":
        keep_memory()
        own_cores(world.local_rank, world.local_size)
    try:
        open_group(world, timeout_s, init_method=f"file://{folder}/store")
        report = Report(result=function(world, *args))
        _write(Path(folder), world.rank, report)
        leave()
    except BaseException as error:
        report = report_of(error)
        _write(Path(folder), world.rank, report)
    end_process(report.exit_code)


def _die_with_parent(parent: Any) -> None:
    try:
        parent.recv_bytes()  # nothing is ever sent: it returns when the other end is closed
    except (EOFError, OSError):
        os._exit(1)


def _beat(beats: Any, rank: int) -> None:
    """Count on for as long as this process runs."""
    while True:
        beats[rank] += 1
        time.sleep(BEAT_S)


def report_of(error: BaseException) -> Report:
    """Why a rank ended, for others to read."""
    if isinstance(error, MeshwrightError):
        return Report(diagnostics=list(error.diagnostics), exit_code=error.exit_code)
    if os.environ.get("MESHWRIGHT_DEBUG") == "1":
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = str(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}{': ' if said else ''}{said}{where}"
    lost = isinstance(error, RuntimeError) and PEER.search(str(error)) is not None
    return Report(exit_code=1, cause=text, consequence=lost or isinstance(error, ConnectionError))


def _write(folder: Path, rank: int, report: Report) -> None:
    part = folder / f"{rank}.part"
    part.write_bytes(msgspec.json.encode(report))
    part.rename(folder / f"{rank}.json")


def _read(folder: Path, rank: int) -> Report | None:
    try:
        return msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=Report)
    except FileNotFoundError:
        return None


def _watch(children: list[Any], folder: Path, beats: Any) -> None:
    """Return when all have ended well; else end the others, and raise what the cause was."""
    running, failed_at = dict(enumerate(children)), 0.0
    heard = Pulse(beats)
    while running and not (failed_at and time.monotonic() - failed_at > GRACE_S):
        wait([c.sentinel for c in running.values()], timeout=0.2 if failed_at else 2 * BEAT_S)
        for rank, child in list(running.items()):
            if child.exitcode is not None:
                del running[rank]
                failed_at = failed_at or (time.monotonic() if child.exitcode else 0.0)
        if not failed_at:
            heard.check({rank: child.pid for rank, child in running.items()})
    _end(list(running.values()))
    if failed_at:
        ended = {rank: child.exitcode for rank, child in enumerate(children) if rank not in running}
        raise verdict(ended, {rank: _read(folder, rank) for rank in ended})


class Pulse:
    """The beats of ranks as their parent hears them. Time in which the parent itself stood still counts for nothing: a
    whole job may be stopped at a terminal and go on."""

    def __init__(self, beats: Any):
        self.beats, self.last, self.looked = beats, list(beats), time.monotonic()
        self.silent_s = [0.0] * len(self.last)

    def check(self, pids: dict[int, int]) -> None:
        """Take note of the ranks' beats.

        Raises:
            RankDied: L001 naming a rank that a signal has stopped, or that has not been heard of.
        """
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, 4 * BEAT_S), now
        for rank, pid in pids.items():
            beat = self.beats[rank]
            self.silent_s[rank] = 0.0 if beat != self.last[rank] or not beat else self.silent_s[rank] + passed
            self.last[rank] = beat
            if self.silent_s[rank] > STOPPED_S and _is_stopped(pid):
                help = "kill -CONT goes on with a stopped process; --resume with the run, from its last checkpoint"
                raise died(rank, socket.gethostname(), f"stopped by a signal, for {self.silent_s[rank]:.0f} s", help)
            if self.silent_s[rank] > SILENT_S:
                raise died(rank, socket.gethostname(), f"nothing heard of it for {self.silent_s[rank]:.0f} s")


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _end(children: list[Any]) -> None:
    for child in children:
        if child.pid is not None and child.exitcode is None:
            child.kill()
            child.join()


def verdict(ended: dict[int, int], reports: dict[int, Report | None]) -> MeshwrightError:
    """The one error of a job, out of how its ranks ended by themselves (exit code or -signal) and what they left.

    What the user did comes first, then a rank that was killed, then one that failed by itself; a rank that lost its
    peer is blamed last.
    """
    wrong = {rank: r for rank, r in reports.items() if r is not None and r.diagnostics}
    if wrong:
        found = dict.fromkeys(d for rank in sorted(wrong) for d in wrong[rank].diagnostics)
        code = max(r.exit_code for r in wrong.values())
        return MeshwrightError(found) if code == MeshwrightError.exit_code else RankDied(found)
    killed = [rank for rank, code in ended.items() if code < 0]
    silent = [rank for rank, code in ended.items() if code > 0 and reports[rank] is None]
    raised = [rank for rank, r in reports.items() if r is not None and r.cause and not r.consequence]
    rank = min(killed or raised or silent or [rank for rank, code in ended.items() if code])
    report = reports[rank]
    if ended[rank] < 0:
        name = signal.Signals(-ended[rank]).name
        help = "nobody killed it? the system ran out of memory: dmesg | tail" if name == "SIGKILL" else ""
        return died(rank, socket.gethostname(), f"killed by {name}", help)
    return died(rank, socket.gethostname(), report.cause if report else f"it ended with code {ended[rank]}", "")


@contextmanager
def _forwarding(children: list[Any], stops: bool):
    """SIGINT and SIGTERM ask children that can stop to end in order; others, and the second time all, are killed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = []

    def forward(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1 or not stops:
            _end(children)
            raise KeyboardInterrupt
        for child in children:
            if child.pid is not None and child.exitcode is None:
                os.kill(child.pid, signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _join(function: Callable[..., Any], args: tuple, num_ranks: int, device: str, timeout_s: float, stops: bool) -> Any:
    """One rank of a launched job: `function`'s result on rank 0, None elsewhere."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size != num_ranks:
        if rank:
            end_process(MeshwrightError.exit_code)  # rank 0 says it
        raise MeshwrightError.one(
            "L002",
            f"the launcher has started {size} processes, and the plan has {num_ranks} ranks",
            place=f"WORLD_SIZE={size}",
            help=f"start {num_ranks} processes, as with torchrun --nproc-per-node, or plan for {size}",
        )
    kind = _device_type(device, local_size)
    world = World(rank, size, local_rank, local_size, socket.gethostname(), torch.device(kind, local_rank))
    if stops:
        for number in ASKING:
            signal.signal(number, stop)
    store = watchdog.connect(timeout_s)
    watching = watchdog.Watchdog(world)
    try:
        open_group(world, timeout_s, store=dist.PrefixStore("job", store))
        result = function(world, *args)
        watching.close()
        leave()
    except BaseException as error:
        report = report_of(error)
        if not watching.blame(report):
            end_process(report.exit_code)  # another rank says why
        told = error if report.diagnostics else died(rank, world.host, report.cause)
        told.speaks = True  # for all ranks
        raise told from None
    return result if world.first else None
