"""Ctrl-C at any instant of a search: it answers with what it knows, and claims nothing it does not."""

import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from meshwright.cli import main
from meshwright.cli.guard import guarded
from meshwright.cli.output import console
from meshwright.export.gap import Gap
from meshwright.report.denoising_sheet import render_best
from meshwright.report.search_text import verdict
from meshwright.search.denoising import find_denoising
from meshwright.search.engines import Demands, Engine
from meshwright.search.evaluate import Evaluator
from meshwright.search.find import find
from meshwright.search.interrupt import stopping
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.search.walk import StopFlag, Walk
from meshwright.spec.cluster import load as cluster
from meshwright.spec.denoise import parse as parse_denoise
from meshwright.spec.model import load
from meshwright.spec.workload import parse
from tests.random_plans import LLAMA

SMALL = LLAMA, cluster("8xh100"), parse("batch=16,seq=1024")
FEW = ["order=tp-cp-dp-pp", "schedule=1f1b,interleaved,zb-h1", "recompute=none,full", "mb=1,2"]
SPACE = restricted(default(*SMALL), fix=FEW)


@pytest.fixture
def looks(monkeypatch):
    """Every look of a walk is reported: how many there are is what the code does, not how fast."""
    monkeypatch.setattr("meshwright.search.shown.LOOK_S", -1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(*instants: int):
    """A report that sends this process SIGINT at these looks, and how often it was called."""
    seen = []

    def report(walk):
        seen.append(len(walk.tried))
        if len(seen) in instants:
            os.kill(os.getpid(), signal.SIGINT)

    return report, seen


def test_a_signal_at_any_look_ends_the_walk_with_what_was_found_until_then(looks):
    report, seen = interrupting()
    whole = find(*SMALL, space=SPACE, report=report)
    assert len(seen) > 40
    for instant in {1, 2, 3, *range(5, len(seen) - 1, 9)}:
        report, again = interrupting(instant)
        found = find(*SMALL, space=SPACE, report=report)
        assert found.stopped and not found.proven_optimal
        assert len(again) <= instant + 2, "it went on"
        assert found.evaluated <= again[instant - 1] + 1
        assert all(r.plan.layout.num_ranks == 8 and r.prediction.fits for r in found.best)
        if found.best:
            assert found.best[0].prediction.step_time_s >= whole.best[0].prediction.step_time_s
            assert verdict(found).endswith("best of what was looked at, not proven")
        else:
            assert verdict(found).startswith("stopped ") and "nothing fits" not in verdict(found)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_while_a_plan_to_recommend_is_looked_for_leaves_what_was_proven(looks):
    refused = Gap(facet="layout.dp", value="dp", reason="it runs nothing")
    demands = Demands(others=(Engine(name="none", label="None", refuses=lambda plan: [refused]),))

    def report(walk):
        if walk.what and not walk.ended:
            os.kill(os.getpid(), signal.SIGINT)

    found = find(*SMALL, space=SPACE, recommend=True, demands=demands, report=report)
    assert found.proven_optimal and not found.stopped
    assert found.recommended.plan in {r.plan for r in found.best}
    assert "nobody runs it" in found.recommended.why.split("; ")


def test_a_search_stopped_before_any_plan_was_evaluated_does_not_say_that_nothing_fits(looks, monkeypatch, capsys):
    report, _ = interrupting(1)
    monkeypatch.setattr("meshwright.cli.search._progress", report)
    asked = ["search", "llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=8192", "--store", "none"]
    assert main([*asked, "--fix", "pp=1"]) == 130
    out = capsys.readouterr().out
    assert out.startswith("stopped before any plan was evaluated") and "nothing fits" not in out


def test_a_second_signal_ends_the_command_at_once(looks):
    walk = Walk(SPACE, Evaluator(*SMALL))
    with stopping(walk.stop):
        os.kill(os.getpid(), signal.SIGINT)
        assert walk.stopped
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_after_the_walk_has_ended_is_an_interrupt_as_ever(looks):
    stop = StopFlag()
    stop.over = True
    with stopping(stop), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_compiled_function_that_an_interrupt_fell_into_counts_as_interrupted(capsys):
    """Numba's dispatcher raises a SystemError from the KeyboardInterrupt: that is no fault of ours."""

    def command():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise SystemError("CPUDispatcher returned a result with an exception set") from interrupt

    assert guarded(command, as_json=False) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_nothing_fits_with_a_store_names_what_comes_closest_and_keeps_it(tmp_path, capsys):
    """The plans that come closest are evaluated while the store is still open."""
    file = str(tmp_path / "store.sqlite")
    asked = ["search", "llama3-8b", "--on", "2x4090", "--train", "batch=16,seq=2048", "--store", file]
    assert main(asked) == 1
    out = capsys.readouterr().out
    assert out.startswith("nothing fits") and "Closest" in out and "lacks" in out
    assert sqlite3.connect(file).execute("SELECT count(*) FROM plans").fetchone()[0] > 0


#: A search that says each look on stderr, so that the signal comes while it walks.
CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are begun with it ignored
from meshwright.search import shown
shown.LOOK_S = shown.LINES_S = -1.0
from meshwright.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_process_that_is_sent_sigint_while_it_walks_answers_and_ends_in_order():
    asked = ["search", "llama3-70b", "--on", "64xh100", "--train", "batch=512,seq=8192", "--store", "none"]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        while "1 evaluated" not in (line := child.stderr.readline()):
            assert line, "it ended by itself"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode in (0, 130), err
    said = " ".join(out.split())  # lines end where they are full
    assert ("not proven" in said) if child.returncode == 0 else said.startswith("stopped too early to say")
    assert "Traceback" not in err and "failed" not in err


def test_a_signal_ends_a_search_of_listed_plans_with_the_best_of_those_that_were_predicted(looks, capsys):
    told = []

    def report(what, done, total):
        told.append(done)
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    found = find_denoising(load("dit-xl-2-256"), cluster("8xh100"), parse_denoise("size=256"), report=report)
    assert told == [1, 2, 3] and found.stopped and found.evaluated == 3 < found.legal
    assert found.to_json()["stopped"]
    render_best(found, console())
    assert f"3 of {found.legal} plans were looked at, the best:" in capsys.readouterr().out
