"""Processes of a job: started, ended together, and one message that names the rank, the host and the cause."""

import contextlib
import os
import platform
import resource
import signal
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import Diagnostic, Infeasible, MeshwrightError
from meshwright.run import environment as around
from meshwright.run import launch
from meshwright.run.environment import num_threads
from meshwright.run.launch import verdict
from meshwright.run.world import RankDied, Report
from tests.run import processes
from tests.run.forked import Program
from tests.run.spawned import summed

HOST = socket.gethostname()
HARD_S = 30.0


def test_every_rank_runs_and_rank_0_answers():
    answer = launch.start(summed, 10, num_ranks=3, device="cpu")
    assert answer == {"total": 33, "threads": num_threads(), "size": 3, "device": "cpu"}


def test_a_rank_on_a_processor_has_a_thread_unless_told_otherwise(monkeypatch):
    for told, threads in (("", 1), ("3", 3), ("many", 1), ("0", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert launch.start(summed, 0, num_ranks=2, device="cpu")["threads"] == threads


def test_one_rank_needs_no_group():
    assert launch.start(lambda world: dist.is_initialized(), num_ranks=1, device="cpu") is False


@pytest.mark.slow
def test_where_forks_are_unsafe_processes_are_spawned(monkeypatch):
    monkeypatch.setattr(launch, "start_method", lambda kind: "spawn")
    assert launch.start(summed, 10, num_ranks=2, device="cpu")["total"] == 21


def waits(world, act):
    """Rank 1 acts; all others wait for it."""
    if world.rank == 1:
        time.sleep(0.2)
        act()
    dist.barrier()


def dies(act, num_ranks=3):
    begun = time.monotonic()
    with pytest.raises(MeshwrightError) as error:
        launch.start(waits, act, num_ranks=num_ranks, device="cpu")
    assert time.monotonic() - begun < 10
    return error.value


def test_a_killed_rank_ends_the_others_with_its_name_host_and_cause():
    error = dies(lambda: os.kill(os.getpid(), signal.SIGKILL))
    (found,) = error.diagnostics
    assert (error.exit_code, found.code) == (1, "L001")
    assert found.message == f"rank 1 on {HOST} died: killed by SIGKILL"
    assert "out of memory" in found.help


def divide():
    return 1 / 0


def test_a_rank_that_a_signal_stops_is_named_and_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr(launch, "STOPPED_S", 1.0)
    (found,) = dies(lambda: os.kill(os.getpid(), signal.SIGSTOP)).diagnostics
    assert found.message.startswith(f"rank 1 on {HOST} died: stopped by a signal")


def test_time_in_which_the_parent_stood_still_counts_for_nothing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(launch, "_is_stopped", lambda pid: True)
    heard = launch.Pulse([5])
    now[0] = 3600.0  # all were stopped at a terminal, and go on
    heard.check({0: 1})
    for _ in range(100):
        now[0] += 2 * launch.BEAT_S
        try:
            heard.check({0: 1})
        except RankDied:
            break
    assert now[0] - 3600.0 == pytest.approx(launch.STOPPED_S, abs=3.0)


def test_an_exception_names_its_rank_and_not_those_who_lost_their_peer():
    error = dies(divide)
    assert isinstance(error, RankDied)
    assert error.diagnostics[0].message.startswith(
        f"rank 1 on {HOST} died: ZeroDivisionError: division by zero (test_l"
    )


def test_a_rank_that_leaves_without_a_word_is_named():
    assert "rank 1 on" in (found := str(dies(lambda: os._exit(7)))) and "ended with code 7" in found


def refuse(kind):
    def act():
        raise kind(Diagnostic(code="D001", message="no such text", help="x"))

    return act


@pytest.mark.parametrize(("kind", "code"), [(MeshwrightError, 2), (Infeasible, 1)])
def test_what_the_user_did_is_told_as_it_is(kind, code):
    error = dies(refuse(kind))
    assert error.exit_code == code
    assert [(d.code, d.message) for d in error.diagnostics] == [("D001", "no such text")]


def test_what_all_ranks_find_is_told_once():
    def main(world):
        refuse(MeshwrightError)()

    with pytest.raises(MeshwrightError) as error:
        launch.start(main, num_ranks=3, device="cpu")
    assert len(error.value.diagnostics) == 1


def test_a_hanging_rank_does_not_outlive_another_s_death():
    def main(world):
        if world.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        raise ValueError("gone")

    begun = time.monotonic()
    with pytest.raises(RankDied, match=r"rank 1 on .* died: ValueError: gone"):
        launch.start(main, num_ranks=2, device="cpu")
    assert launch.GRACE_S <= time.monotonic() - begun < launch.GRACE_S + 5


def test_the_cause_is_blamed_before_its_consequences():
    lost = Report(exit_code=1, cause="RuntimeError: Connection closed by peer", consequence=True)
    raised = Report(exit_code=1, cause="ValueError: x")
    said = verdict({0: 1, 1: 1, 2: 1}, {0: lost, 1: None, 2: raised})
    assert "rank 2 on" in str(said)
    assert "rank 1 on" in str(verdict({0: 1, 1: -9, 2: 1}, {0: lost, 1: None, 2: raised}))
    assert "rank 1 on" in str(verdict({0: 1, 1: 1}, {0: lost, 1: None}))
    assert "rank 0 on" in str(verdict({0: 1}, {0: lost}))


def test_a_lost_peer_is_known_for_a_consequence():
    assert launch.report_of(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]")).consequence
    assert not launch.report_of(RuntimeError("shape mismatch")).consequence
    assert not launch.report_of(ValueError("timed out")).consequence


def until(condition):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < HARD_S
        time.sleep(0.02)


def obeys(world, folder):
    (folder / f"runs-{world.rank}").touch()
    until(lambda: launch.stop.requested)
    return "in order"


def deaf(world, folder):
    (folder / f"runs-{world.rank}").touch()
    until(lambda: launch.stop.requested)
    (folder / f"told-{world.rank}").touch()
    time.sleep(HARD_S)


def asks(folder, number, *files):
    """Send a signal to this process once there are so many of each of these files: when a machine that is busy has come
    so far that it is told something, and not before."""

    def send():
        for file in files:
            until(lambda file=file: len(list(folder.glob(file))) == 2)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_rank_once_and_the_run_ends_in_order(number, tmp_path):
    asks(tmp_path, number, "runs-*")
    before = signal.getsignal(number)
    assert launch.start(obeys, tmp_path, num_ranks=2, device="cpu", stops=True) == "in order"
    assert signal.getsignal(number) is before


def test_the_second_signal_ends_at_once(tmp_path):
    asks(tmp_path, signal.SIGINT, "runs-*")
    asks(tmp_path, signal.SIGINT, "told-*")
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch.start(deaf, tmp_path, num_ranks=2, device="cpu", stops=True)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("main", [deaf, obeys])
def test_the_first_signal_ends_a_job_that_does_not_say_it_stops(number, main, tmp_path):
    """Whatever its function does: half a result is none."""
    asks(tmp_path, number, "runs-*")
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch.start(main, tmp_path, num_ranks=2, device="cpu")
    assert time.monotonic() - begun < 10


def test_a_rank_of_such_a_job_that_is_asked_to_end_has_died():
    def asked(world):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HARD_S)

    with pytest.raises(RankDied, match="killed by SIGTERM"):
        launch.start(asked, num_ranks=1, device="cpu")


def lasts(world, folder):
    Path(f"{folder}/{os.getpid()}").touch()
    time.sleep(60)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_children_do_not_outlive_a_killed_parent(tmp_path):
    parent = Program(lambda: launch.start(lasts, str(tmp_path), num_ranks=2, device="cpu"), {})
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=HARD_S)
    until(lambda: not any(alive(child.name) for child in tmp_path.iterdir()))


def job(code, planned):
    """A program that starts a job as the command line does, and what each rank of it does."""
    return textwrap.dedent("""
        import os, signal, sys, time
        import torch.distributed as dist
        from meshwright.errors import MeshwrightError
        from meshwright.run import launch, watchdog
        watchdog.SILENCE_S, watchdog.PATIENCE_S = 2.0, 3.5

        def main(world):
            rank = world.rank
        {code}

        try:
            print(launch.start(main, num_ranks={planned}, device="cpu"))
            code = 0
        except MeshwrightError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        launch.end_process(code)
        """).format(code=textwrap.indent(textwrap.dedent(code), "    "), planned=planned)


def ranks(code, world=2, planned=None):
    """A job of processes as a launcher starts them: what each wrote, and its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    program = compile(job(code, planned or world), "job.py", "exec")
    jobs = [
        Program(lambda: exec(program, {"__name__": "__main__"}), {"RANK": r, "LOCAL_RANK": r, **said})
        for r in range(world)
    ]
    ended = [job.communicate(timeout=4 * HARD_S) for job in jobs]
    return [(job.returncode, out, err) for job, (out, err) in zip(jobs, ended)]


@pytest.mark.slow
def test_a_launched_job_is_joined_and_rank_0_answers():
    ended = ranks("dist.barrier()\nreturn world.size")
    assert [(code, out) for code, out, _ in ended] == [(0, "2\n"), (0, "None\n")]


@pytest.mark.slow
def test_a_launched_job_of_another_size_is_one_error():
    ended = ranks("return 1", planned=8)
    assert [code for code, _, _ in ended] == [2, 2]
    assert "error[L002]: the launcher has started 2 processes, and the plan has 8 ranks" in ended[0][2]
    assert ended[1][2] == ""


@pytest.mark.slow
def test_a_launched_rank_that_fails_is_named_once():
    ended = ranks("if rank == 1:\n    raise ValueError('gone')\ndist.barrier()")
    assert [code for code, _, _ in ended] == [1, 1]
    said = [err for _, _, err in ended if "L001" in err]
    assert len(said) == 1
    assert f"rank 1 on {HOST} died: ValueError: gone" in said[0]


@pytest.mark.slow
def test_what_launched_ranks_all_find_is_told_once():
    ended = ranks("raise MeshwrightError.one('D001', 'no such text')", world=3)
    assert [code for code, _, _ in ended] == [2, 2, 2]
    assert sorted(err for _, _, err in ended) == ["", "", "error[D001]: no such text\n"]


@pytest.mark.slow
def test_a_launched_rank_0_that_is_killed_with_the_store_is_named():
    ended = ranks("time.sleep(0.3)\nif rank == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    assert [code for code, _, _ in ended] == [-9, 1]
    assert "rank 0 on its host died: its key-value store is gone" in ended[1][2]


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["dist.barrier()", "time.sleep(60)"])
def test_a_launched_rank_that_is_killed_is_mourned_by_its_neighbour(wait):
    ended = ranks(f"if rank == 1:\n    time.sleep(0.3)\n    os.kill(os.getpid(), signal.SIGKILL)\n{wait}")
    assert [code for code, _, _ in ended] == [1, -9]
    assert f"rank 1 on {HOST} died: nothing heard of it for 2 s" in ended[0][2]


def pages_handed_again(world):
    """Pages that a process is handed while it allocates and frees the same 200 MB five times more."""
    counts = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(5 << 20) for _ in range(10)]
        held.clear()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sum(counts[1:])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_rank_keeps_the_memory_that_it_frees():
    # by itself the C library gives all of it back two times or more
    assert launch.start(pages_handed_again, num_ranks=1, device="cpu") < 200e6 / resource.getpagesize()


def joins_alone(rank):
    """How often a process that a launcher started is told to keep its memory, as a job's only rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        said = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    os.environ.update({name: str(value) for name, value in said.items()})
    told = []
    launch.keep_memory = lambda: told.append(True)
    assert launch.start(lambda world: world.size, num_ranks=1, device="cpu") == 1
    return len(told)


def test_a_process_that_is_the_user_s_own_is_left_as_it_was():
    assert processes.launch(1, joins_alone) == [0]


def preferred(rank):
    """Priorities of a process with three threads before and after, of all and of one that begins later."""
    own = os.getpriority(os.PRIO_PROCESS, 0)  # the whole suite may run behind other work
    around.PREFERRED = min(own + 5, 19)  # anyone may wait for others
    done, later = threading.Event(), []
    running = [threading.Thread(target=done.wait) for _ in range(2)]
    for thread in running:
        thread.start()

    def found():
        return [os.getpriority(os.PRIO_PROCESS, int(t.name)) for t in Path("/proc/self/task").iterdir()]

    before = found()
    around.prefer()
    after = found()
    last = threading.Thread(target=lambda: later.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    last.start()
    last.join()
    done.set()
    return own, around.PREFERRED, before, after, later


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_all_threads_of_a_process_are_preferred():
    ((own, other, before, after, later),) = processes.launch(1, preferred)
    assert len(before) >= 3 and before == [own] * len(before)
    assert after == [other] * len(before) and later == [other]


def of_its_threads(world):
    """What the threads of a rank may run on and how, those of its group's and one that begins later."""
    if world.size > 1:
        dist.all_reduce(torch.ones(1))
    later = []
    last = threading.Thread(target=lambda: later.append(os.sched_getscheduler(threading.get_native_id())))
    last.start()
    last.join()
    cores, policies = [], list(later)
    for task in (int(t.name) for t in Path("/proc/self/task").iterdir()):
        with contextlib.suppress(ProcessLookupError):  # one that has just ended
            held = sorted(os.sched_getaffinity(task))
            policies.append(os.sched_getscheduler(task))
            cores.append(held)
    found = [[cores, policies]] * world.size
    if world.size > 1:
        dist.all_gather_object(found, found[0])
    return found


def cores_of_ranks(rank, num_ranks, cores):
    """Every core and policy of the threads of each rank of a job that may use `cores`."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # an engine that was started here has another
    os.sched_setaffinity(0, cores)
    found = launch.start(of_its_threads, num_ranks=num_ranks, device="cpu")
    return [[sorted({tuple(c) for c in held}), sorted(set(policies))] for held, policies in found]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have policies and cores of their own on Linux")
def test_ranks_have_cores_of_their_own_where_there_are_enough_and_leave_them_when_they_wait():
    cores = sorted(os.sched_getaffinity(0))[:2]
    (alone,) = processes.launch(1, cores_of_ranks, 1, cores)
    assert alone == [[[tuple(cores)], [os.SCHED_OTHER]]]
    (pair,) = processes.launch(1, cores_of_ranks, 2, cores)
    # the thread that ends a rank with its parent is older than what it is told, and sleeps until then
    assert [[c for c in held if c != tuple(cores)] or held for held, _ in pair] == [[(cores[0],)], [(cores[-1],)]]
    assert all(os.SCHED_BATCH in policies and set(policies) <= {os.SCHED_BATCH, os.SCHED_OTHER} for _, policies in pair)
    (crowd,) = processes.launch(1, cores_of_ranks, 3, cores)
    assert all(held == [tuple(cores)] for held, _ in crowd)
