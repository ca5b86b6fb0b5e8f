"""What the checks find, and how it is kept."""

import msgspec
import pytest

from meshwright.papers import checking, outcome, state
from meshwright.papers.outcome import (
    ABOVE,
    AT_LEAST,
    AT_MOST,
    BELOW,
    SHOWN,
    SIDE,
    WITHIN,
    Fact,
    Figure,
    Outcome,
)
from meshwright.papers.record import UNVERIFIED, Paper, papers

ROW = Paper(id="a", title="A", area="x", mechanism="M.", ideas=("layout",), exact=True, source="arXiv:1")


def test_twenty_five_systems_work(states):
    works = [name for name, s in states.items() if s.state == state.WORKS]
    assert len(works) >= 25, {name: s.why for name, s in states.items() if s.state == state.PARTLY}


def test_what_works_is_verified_and_judged(states, outcomes):
    for name, s in states.items():
        if s.state == state.WORKS:
            assert papers()[name].verified and s.judged >= 2 and outcomes[name].baseline, name


def test_what_does_not_work_says_why(states):
    assert not [name for name, s in states.items() if s.state != state.WORKS and not s.why]


@pytest.mark.parametrize(
    ("figure", "ok", "missed"),
    [
        (Figure("", 10.0, 10.9, "", WITHIN, 0.1), True, False),
        (Figure("", 10.0, 10.9, "", WITHIN, 0.2), True, False),
        (Figure("", 10.0, 11.1, "", WITHIN, 0.1), False, True),
        (Figure("", 10.0, 11.1, "", WITHIN, 0.2), True, True),
        (Figure("", 1.3, 1.2, "", SIDE), True, False),
        (Figure("", 1.3, 1.01, "", SIDE), True, True),
        (Figure("", 2.0, 3.0, "", SIDE), True, True),
        (Figure("", 1.3, 1.0, "", SIDE), False, True),
        (Figure("", 0.7, 1.2, "", SIDE), False, True),
        (Figure("", 2.0, 0.1, "", AT_MOST), True, False),
        (Figure("", 8.0, 8.1, "", AT_MOST), False, True),
        (Figure("", None, 0.04, "", AT_MOST, 0.05), True, False),
        (Figure("", 1.1, 1.09, "", AT_LEAST), False, True),
        (Figure("", None, 1.0, "", ABOVE), False, True),
        (Figure("", None, 1.1, "", ABOVE), True, False),
        (Figure("", None, 0.9, "", BELOW), True, False),
        (Figure("", 1.0, 9.0, "", SHOWN), True, True),
    ],
)
def test_a_figure_is_judged_as_it_says_and_missed_where_it_is_a_tenth_off(figure, ok, missed):
    assert (figure.ok, figure.missed) == (ok, missed)


def test_a_state_follows_from_what_holds():
    good, bad = Figure("f", 1.0, 1.0, "", WITHIN, 0.1), Figure("g", 1.0, 2.0, "s", WITHIN, 0.1)
    assert state.of(ROW, Outcome(figures=(good,))).state == state.WORKS
    off = state.of(ROW, Outcome(figures=(good, bad)))
    assert off.state == state.PARTLY and "g: 2 for 1 s" in off.why
    assert state.of(ROW, Outcome(figures=(bad,))).state == state.NOT_YET
    assert state.of(ROW, Outcome(figures=(good,), missing=("tiers",))).why == "tiers"
    assert state.of(ROW, Outcome(facts=(Fact("it is so", False), Fact("and so", True)))).why == "not so: it is so"
    assert state.of(ROW, Outcome()).state == state.NOT_YET
    assert state.of(ROW, None).state == state.NOT_YET


def test_an_unverified_row_cannot_work():
    row = msgspec.structs.replace(ROW, source=UNVERIFIED)
    found = state.of(row, Outcome(figures=(Figure("f", 1.0, 1.0, "", WITHIN, 0.1),)))
    assert found.state == state.PARTLY and "not confirmed" in found.why


def test_states_are_kept_until_the_code_changes(kept, monkeypatch):
    monkeypatch.setattr(outcome, "can_run", lambda: False)  # nothing is trained

    def never(paper):
        raise AssertionError(paper.id)

    monkeypatch.setattr(checking, "run", never)
    assert checking.checked().keys() == papers().keys()
    monkeypatch.setattr(checking, "code_version", lambda: "another")
    with pytest.raises(AssertionError):
        checking.checked()


@pytest.mark.parametrize("broken", [b"", b"{}", b'{"version": 1}', b"\xff", b'{"version":"\xff\xfe","states":{}}'])
def test_a_broken_cache_is_written_anew(kept, monkeypatch, broken):
    monkeypatch.setattr(outcome, "can_run", lambda: False)  # nothing is trained
    (kept / "papers.json").write_bytes(broken)
    monkeypatch.setattr(checking, "run", lambda paper: None)
    found = checking.checked()
    assert {s.state for s in found.values()} == {state.NOT_YET}
    assert msgspec.json.decode((kept / "papers.json").read_bytes(), type=checking.Kept).states == found


def test_what_may_be_of_the_moment_is_found_anew_and_nothing_else(kept, states, monkeypatch):
    monkeypatch.setattr(outcome, "can_run", lambda: False)  # nothing is trained
    dead = Outcome(facts=(Fact("it trains: rank 1 died: killed by SIGKILL", False),), passing=True)
    slow = Outcome(figures=(Figure("a step on this machine", 1.0, 2.0, "s", WITHIN, 0.05, here=True),))
    asked = []

    def run(paper):
        asked.append(paper.id)
        return {"gpipe": dead, "dpro": slow}[paper.id]

    monkeypatch.setattr(checking, "run", run)
    rest = {name: s for name, s in states.items() if name not in ("gpipe", "dpro")}
    cache = kept / "papers.json"
    cache.write_bytes(msgspec.json.encode(checking.Kept(version=checking.code_version(), states=rest)))
    for _ in range(2):
        found = checking.checked()
        assert {found["gpipe"].state, found["dpro"].state} == {state.NOT_YET} and found.keys() == papers().keys()
    assert sorted(asked) == ["dpro", "dpro", "gpipe", "gpipe"]
    assert msgspec.json.decode(cache.read_bytes(), type=checking.Kept).states == rest


def test_another_torch_is_another_version(monkeypatch):
    monkeypatch.setattr(checking, "can_run", lambda: True)
    monkeypatch.setattr(checking, "version", lambda name: "1.0")
    one = checking.code_version()
    monkeypatch.setattr(checking, "version", lambda name: "1.1")
    assert checking.code_version() != one


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "can_run", lambda: False)  # nothing is trained
    monkeypatch.setattr(checking, "run", lambda paper: None)
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert len(checking.checked(folder=occupied / "below")) == 166


def test_a_figure_that_is_far_off_says_why(outcomes):
    silent = [
        f"{name}: {figure.what}"
        for name, outcome in outcomes.items()
        for figure in (outcome.figures if outcome else ())
        if figure.missed and not figure.why and not figure.here
    ]
    assert not silent
