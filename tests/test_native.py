"""Native functions: plain and compiled are one function, machine code is kept small questions load none."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meshwright as mw
from meshwright import native as natives
from meshwright import toposort
from meshwright.assign import Problem, solve
from meshwright.assign.groups import GroupCosts, GroupProblem, form_groups
from meshwright.assign.partition import partition
from meshwright.graph import GraphBuilder
from meshwright.native import Float64s, Native, OutFloat64s, native
from meshwright.schedules import build
from meshwright.search.find import find
from meshwright.simulate import engine

README = ["llama3-70b", "--on", "64xh100", "--train", "batch=512,seq=8192", "--plan", "tp8 pp4 vpp5 zero1"]


@native("n")
def running(values: Float64s, factor: float, n: int, out: OutFloat64s) -> int:
    """Running sums [n] of values times a factor; returns how many."""
    total = 0.0
    for i in range(n):
        total += values[i] * factor
        out[i] = total
    return n


def loaded(argv):
    """Modules that a prediction leaves in a fresh process."""
    code = "import sys; from meshwright.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, "predict", *argv], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stderr.split()}


@pytest.fixture
def both(monkeypatch):
    """Every call of a native function runs plain and compiled and compares, to the last bit; the names that ran."""
    ran = set()

    def call(self, *arguments):
        again = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        answer, plain = self.compiled(*arguments), self.plain(*again)
        assert answer == plain
        for mine, other in zip(arguments, again):
            if isinstance(mine, np.ndarray):
                assert mine.tobytes() == other.tobytes(), self.symbol
        ran.add(self.symbol.removeprefix("meshwright."))
        return answer

    monkeypatch.setattr(Native, "__call__", call)
    return ran


def test_plain_and_compiled_are_equal_to_the_last_bit_in_all_that_predicts_and_searches(both):
    model, cluster = mw.load_model("llama3-8b"), mw.load_cluster("16xh100")
    train = mw.parse_train("batch=32,seq=8192")
    for words in ("tp2 pp4 vpp2 zero1 full", "pp2 zero1 zb-h1 full", "pp4 hanayo full", "pp4 2bp:gpipe", "fsdp"):
        mw.predict(model, cluster, train, mw.parse_plan(words))
    find(model, mw.load_cluster("8xh100"), mw.parse_train("batch=16,seq=4096"), top=1)
    builder = GraphBuilder(("r",))
    one = builder.add("op", "one", builder.stream(0, "compute"))
    builder.depend([one], [builder.add("op", "two", builder.stream(0, "dp"), [one])], 2)
    engine.steady_state(builder.build(), np.array([0.1, 0.7]), 9)
    partition(np.array([[0.3, 0.1, 0.7, 0.2], [0.2, 0.4, 0.1, 0.6]]), first=(0.1, 0.0), last=(0.0, 0.2))
    sizes = np.array([7, 3, 6, 4, 9, 2])
    for method in ("first-fit", "heaviest-first", "in-order", "enumerate", "local-search"):
        solve(method, Problem(sizes=sizes, capacity=12, costs=0.1 * sizes, num_bins=3))
    costs = GroupCosts(degrees=(1, 2), start_s=(0.1,) * 2, token_s=(0.3, 0.4), pair_s=(0.01,) * 2)
    problem = GroupProblem(lengths=np.array([9, 4, 3, 2, 1]), ranks=2, capacity=8, costs=costs)
    assert form_groups("flexsp", problem).rounds and form_groups("zeppelin", problem).rounds
    for family, ranks, count in (("2bp:gpipe", 3, 7), ("hanayo", 4, 8), ("chimera", 4, 8)):
        build(family, ranks, count)
    assert both == {
        "toposort._ordered",
        "toposort._bound",
        "toposort._ran_as_stored",
        "simulate.engine._times",
        "simulate.engine._makespans",
        "simulate.engine._unroll",
        "simulate.memory._peaks",
        "schedules.timing_loop._run",
        "schedules.fill_loop._run",
        "schedules.slots_loop._run",
        "search.clock._makespan",
        "assign.first_fit._first_fit",
        "assign.heaviest_first._heaviest_first",
        "assign.in_order._fill",
        "assign.groups_apart._fit",
        "assign.groups_nested._nest",
        "assign.enumeration._enumerate",
        "assign.local_search._improve",
        "assign.partition._fill",
        "search.paths._follow",
    }


def test_a_plain_run_writes_and_returns_what_the_compiled_one_does():
    values = np.array([0.1, 0.2, 0.3])
    plain, compiled = np.zeros(3), np.zeros(3)
    assert running.plain(values, 3.0, 3, plain) == running.compiled(values, 3.0, 3, compiled) == 3
    assert plain.tolist() == compiled.tolist() == [0.1 * 3.0, 0.1 * 3.0 + 0.2 * 3.0, 0.1 * 3.0 + 0.2 * 3.0 + 0.3 * 3.0]


def test_an_array_of_another_type_or_with_gaps_is_refused_not_misread():
    for wrong in (np.zeros(3, np.float32), np.zeros(6)[::2]):
        with pytest.raises(TypeError, match="takes contiguous Float64s"):
            running.compiled(wrong, 1.0, 3, np.zeros(3))


def test_machine_code_that_was_damaged_or_is_of_other_source_is_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(Native, "_files", lambda self: [tmp_path / "kept"])
    code = running._made()
    assert running._kept() == code
    held = (tmp_path / "kept").read_bytes()
    (tmp_path / "kept").write_bytes(held[:-1])
    assert running._kept() is None
    (tmp_path / "kept").write_bytes(bytes(32) + held[32:])
    assert running._kept() is None


def test_what_one_copy_of_the_code_compiled_another_loads_and_one_process_compiles_at_a_time(monkeypatch, tmp_path):
    """The user's cache keeps it for other copies, by what it is of, and no more versions than there may be copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(natives, "cache_from_source", lambda source: str(tmp_path / "first" / "x.pyc"))
    code, begun = running._made(), []
    monkeypatch.setattr(natives, "cache_from_source", lambda source: str(tmp_path / "second" / "x.pyc"))
    monkeypatch.setattr(natives, "_compiled", begun.append)
    assert running._kept() == running._made() == code and not begun
    beside, user = running._files()
    assert not beside.exists() and user.is_file()
    for number in range(natives.KEPT_VERSIONS + 2):
        old = user.with_name(f"{user.stem[:-12]}{number:012}.native")
        old.write_bytes(b"")
        os.utime(old, (number, number))
    natives._forget_old(user)
    assert len(list(user.parent.iterdir())) == natives.KEPT_VERSIONS and user.is_file()


def test_a_process_that_another_was_faster_than_loads_what_that_compiled(monkeypatch, tmp_path):
    """By hand: this one waits for the lock, and what it waits for is there when it has it."""
    kept = tmp_path / "kept"
    monkeypatch.setattr(Native, "_files", lambda self: [kept])
    running._made()
    whole = kept.read_bytes()
    kept.unlink()
    lock = os.open(tmp_path / "kept.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def faster(seconds):
        kept.write_bytes(whole)
        os.close(lock)

    monkeypatch.setattr(natives.time, "sleep", faster)
    monkeypatch.setattr(natives, "_compiled", lambda asked: pytest.fail("compiled twice"))
    assert running._made() == whole[64:]


def test_machine_code_that_anybody_could_have_written_is_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(Native, "_files", lambda self: [tmp_path / "kept"])
    running._made()
    assert running._kept()
    for mode in (0o666, 0o664):
        (tmp_path / "kept").chmod(mode)
        assert running._kept() is None
    mask = os.umask(0)  # what is kept is of this user alone whatever the mask lets others do
    try:
        running._made()
    finally:
        os.umask(mask)
    assert running._kept()


def test_a_cache_in_a_folder_that_nobody_may_look_into_keeps_nothing(monkeypatch, tmp_path):
    def refused(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Native, "_files", lambda self: [tmp_path / "kept"])
    assert running._keepable()
    monkeypatch.setattr(Path, "is_dir", refused)
    assert not running._keepable()


def test_without_a_home_machine_code_is_kept_beside_the_source_alone(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert len(running._files()) == 1


def test_what_cannot_be_kept_is_compiled_only_for_long_work(monkeypatch):
    asked = []
    monkeypatch.setattr(Native, "_linked", lambda self, make: asked.append(make))
    monkeypatch.setattr(natives._Process, "steps", 0)
    for keepable in (True, False):
        monkeypatch.setattr(Native, "_keepable", lambda self, keepable=keepable: keepable)
        fresh = Native(running.function, ("n",))
        for n in (natives.COMPILE_STEPS, natives.UNKEPT_STEPS):
            monkeypatch.setattr(natives._Process, "steps", 0)
            fresh._load((None, 1.0, n, None))
    assert asked == [True, True, False, True]


def test_a_function_that_needs_something_outside_of_itself_is_refused():
    @native("n")
    def allocates(n: int, out: OutFloat64s) -> None:
        out[0] = np.zeros(n)[0]

    with pytest.raises(TypeError, match="not a native function: it needs"):
        allocates._made()


def test_a_small_question_loads_no_compiled_code_and_a_large_one_no_compiler():
    small = loaded(["llama3-8b", "--on", "8xh100", "--train", "batch=16,seq=8192", "--plan", "fsdp full"])
    assert not small & {"numba", "llvmlite", "jinja2", "tyro", "torch"}
    for function in (toposort._ordered, toposort._bound, toposort._ran_as_stored, engine._times, engine._makespans):
        assert function._kept() or function._made()
    assert not loaded(README) & {"numba", "jinja2", "tyro", "torch"}
