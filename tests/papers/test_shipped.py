"""The states that ship are what the checks find."""

import msgspec
import pytest

from meshwright import __version__
from meshwright.papers import shipped as module
from meshwright.papers.outcome import WITHIN, Figure, can_run
from meshwright.papers.record import papers
from meshwright.papers.shipped import Unsettled, code_digest, differences, shipped, write
from meshwright.papers.state import NOT_YET, PARTLY, USABLE, PaperState

REFRESH = "run: make states"


def test_every_row_has_a_state_and_no_state_is_of_another_row():
    assert shipped().states.keys() == papers().keys(), REFRESH


def test_states_are_shipped_for_this_version_and_none_is_left_open():
    assert shipped().version == __version__, REFRESH
    assert not [name for name, s in shipped().states.items() if s.unchecked or s.passing]


def test_what_is_shipped_is_what_the_checks_find(states):
    """Every check is run for the tests of this folder, so all rows can be compared; where torch is not installed, as
    far as they can be checked."""
    found = {name: s for name, s in states.items() if not s.passing}  # a busy machine, or a process that died
    assert differences(shipped().states, found) == [], REFRESH
    assert len(found) > 150 and (not can_run() or sum(bool(s.figures) for s in found.values()) >= 20)


FIGURE = Figure("speed", 2.0, 2.1, "x", WITHIN, 0.1)
STATE = PaperState(state=USABLE, judged=2, executed="executed", figures=(FIGURE,))


def replaced(**changed):
    return msgspec.structs.replace(STATE, **changed)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (replaced(state=PARTLY, why="not so"), "partly, shipped as usable: not so"),
        (replaced(state=NOT_YET, passing=True), "may be of this moment"),
        (replaced(executed=""), "nothing to execute, shipped as executed"),
        (replaced(figures=(msgspec.structs.replace(FIGURE, ours=2.11),)), "speed: 2.11 for 2, shipped 2.1 for 2"),
        (replaced(figures=(msgspec.structs.replace(FIGURE, bound=0.2),)), "speed: 2.1 for 2"),
        (replaced(figures=()), "speed: no figure any more"),
        (replaced(figures=(FIGURE, Figure("bubble", 1.0, 1.0))), "bubble: 1, not among the shipped"),
        (replaced(state=PARTLY, why="w", unchecked="no torch", figures=(Figure("speed", 2.0, 9.0),)), "speed: 9"),
    ],
)
def test_what_differs_from_the_shipped_is_said(now, said):
    ((name, what),) = differences({"a": STATE}, {"a": now})
    assert name == "a" and said in what


def test_rounding_and_what_cannot_be_checked_here_are_no_difference():
    near = replaced(figures=(msgspec.structs.replace(FIGURE, ours=2.1001),))
    blind = replaced(
        state=PARTLY, why="not checked here", executed="not executed here", unchecked="no torch", figures=()
    )
    off = replaced(state=PARTLY, why="speed: 2.3 for 2")
    also = replaced(state=PARTLY, why="speed: 2.3001 for 2")
    assert differences({"a": STATE, "b": STATE, "c": off}, {"a": near, "b": blind, "c": also}) == []
    assert differences({}, {"a": STATE}) == [("a", "not among the shipped")]


def test_a_figure_that_equals_the_papers_still_does_when_it_is_read_back(tmp_path):
    equal = Figure("bubble", 7 / 31, 7 / 31 * (1 + 1e-12), "", WITHIN, 1e-9)
    off = msgspec.structs.replace(equal, ours=7 / 31 * (1 + 1e-8))
    write({"a": replaced(figures=(equal, off))}, tmp_path / "s.json", version="1", torch="")
    back = msgspec.json.decode((tmp_path / "s.json").read_bytes(), type=module.Shipped)
    assert [figure.ok for figure in back.states["a"].figures] == [True, False]


def test_no_shipped_figure_is_only_off_by_its_rounding():
    close = [f for s in shipped().states.values() for f in s.figures if f.judge == WITHIN and f.error is not None]
    assert not [f.what for f in close if not f.ok and abs(f.error) < 1e-5], REFRESH


def test_a_file_of_states_is_read_back_and_says_what_it_is_of(tmp_path):
    write({"b": STATE, "a": replaced(figures=())}, tmp_path / "s.json", version="1.2", torch="torch 3")
    found = msgspec.json.decode((tmp_path / "s.json").read_bytes(), type=module.Shipped)
    assert found.states == {"a": replaced(figures=()), "b": STATE} and (found.version, found.torch) == (
        "1.2",
        "torch 3",
    )
    assert found.digest == code_digest() and not found.changed


def test_a_change_of_the_code_is_seen(monkeypatch, tmp_path):
    assert shipped().states  # read before its folder is another, and kept
    (tmp_path / "check.py").write_text("1")
    (tmp_path / module.NAME).write_text("{}")
    monkeypatch.setattr(module, "files", lambda name: tmp_path)
    one = code_digest.__wrapped__()
    (tmp_path / module.NAME).write_text("other states")
    assert code_digest.__wrapped__() == one
    (tmp_path / "check.py").write_text("2")
    assert code_digest.__wrapped__() != one
    monkeypatch.setattr(module, "code_digest", lambda: "another")
    assert shipped().changed and "the code has changed since" in shipped().said


@pytest.mark.parametrize("left", [{"unchecked": "no torch"}, {"passing": True, "why": "rank 1 died"}])
def test_what_is_not_settled_is_not_shipped(left, tmp_path):
    with pytest.raises(Unsettled, match="J006") as error:
        write({"a": STATE, "b": replaced(**left), "c": replaced(**left)}, tmp_path / "s.json", version="1", torch="")
    assert len(error.value.diagnostics) == 2 and error.value.exit_code == 1
    assert not (tmp_path / "s.json").exists()
