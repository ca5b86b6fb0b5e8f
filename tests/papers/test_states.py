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
from meshwright.papers.record import UNVERIFIED, Paper, Switch, papers

ROW = Paper(id="a", title="A", area="x", mechanism="M.", ideas=("layout",), exact=True, source="arXiv:1")


def test_a_usable_row_has_a_switch_and_headline_figures_that_are_met_and_could_have_failed(states, outcomes):
    usable = [name for name, s in states.items() if s.state == state.USABLE]
    assert usable
    for name in usable:
        heads = [f for f in outcomes[name].figures if f.headline]
        assert papers()[name].switch and papers()[name].verified, name
        assert heads and all(f.supports for f in heads), name


def test_what_is_met_is_verified_and_says_what_it_is_against(states, outcomes):
    for name, s in states.items():
        if s.state in state.REPRODUCED:
            assert papers()[name].verified and outcomes[name].supported and outcomes[name].baseline, name


def test_what_is_not_met_says_why(states):
    assert not [name for name, s in states.items() if s.state not in state.REPRODUCED and not s.why]


def test_a_headline_is_judged_and_not_by_its_side_alone(outcomes):
    heads = [(name, f) for name, o in outcomes.items() if o for f in o.figures if f.headline]
    assert len(heads) >= 10 and not [(n, f.what) for n, f in heads if f.loose or f.restated]


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


GOOD = Figure("f", 1.0, 1.0, "", WITHIN, 0.1)
HEAD = Figure("f", 1.0, 1.0, "", WITHIN, 0.1, headline=True)
BAD = Figure("g", 1.0, 2.0, "s", WITHIN, 0.1)
SWITCHED = msgspec.structs.replace(ROW, switch=Switch(words="w", command="predict w"))


@pytest.mark.parametrize(
    ("row", "outcome", "wanted", "why"),
    [
        (ROW, None, state.NOT_YET, "no check yet"),
        (ROW, Outcome(), state.NOT_YET, "nothing that is judged"),
        (ROW, Outcome(figures=(GOOD,)), state.MODEL, ""),
        (ROW, Outcome(figures=(HEAD,)), state.MODEL, ""),
        (SWITCHED, Outcome(figures=(HEAD,)), state.USABLE, ""),
        (SWITCHED, Outcome(figures=(GOOD,)), state.PARTLY, "no figure that heads its claim"),
        (SWITCHED, Outcome(facts=(Fact("so", True),)), state.PARTLY, "no figure that heads its claim"),
        (SWITCHED, Outcome(figures=(HEAD, BAD)), state.PARTLY, "g: 2 for 1 s"),
        (SWITCHED, Outcome(figures=(HEAD,), missing=("tiers",)), state.PARTLY, "tiers"),
        (ROW, Outcome(figures=(GOOD, BAD)), state.PARTLY, "g: 2 for 1 s"),
        (ROW, Outcome(figures=(BAD,)), state.NOT_YET, "g: 2 for 1 s"),
        (ROW, Outcome(facts=(Fact("it is so", False), Fact("and so", True))), state.PARTLY, "not so: it is so"),
    ],
)
def test_a_state_follows_from_what_holds_and_from_the_switch(row, outcome, wanted, why):
    found = state.of(row, outcome)
    assert found.state == wanted and found.why.startswith(why) and bool(found.why) == bool(why)


@pytest.mark.parametrize(
    "loose",
    [
        Figure("side", 1.3, 1.2, "x", SIDE, headline=True),
        Figure("shown", 1.3, 1.3, "x", SHOWN, headline=True),
        Figure("above", None, 1.2, "x", ABOVE, headline=True),
        Figure("below", None, 0.9, "x", BELOW, headline=True),
        Figure("identity", 4.0, 4.0, "x", WITHIN, 0.0, headline=True, restated=True),
    ],
    ids=lambda f: f.what,
)
def test_a_side_of_one_and_what_is_restated_support_no_state(loose):
    assert loose.ok and not loose.supports
    assert state.of(SWITCHED, Outcome(figures=(loose,))).state == state.NOT_YET
    assert state.of(SWITCHED, Outcome(figures=(loose, GOOD))).state == state.PARTLY
    assert state.of(SWITCHED, Outcome(facts=(Fact("by definition", True, restated=True),))).state == state.NOT_YET


def test_an_unverified_row_is_partly_at_most():
    row = msgspec.structs.replace(SWITCHED, source=UNVERIFIED)
    found = state.of(row, Outcome(figures=(HEAD,)))
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
    assert msgspec.json.decode((kept / "papers.json").read_bytes(), type=checking.KeptStates).states == found


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
    cache.write_bytes(msgspec.json.encode(checking.KeptStates(version=checking.code_version(), states=rest)))
    for _ in range(2):
        found = checking.checked()
        assert {found["gpipe"].state, found["dpro"].state} == {state.NOT_YET} and found.keys() == papers().keys()
    assert sorted(asked) == ["dpro", "dpro", "gpipe", "gpipe"]
    assert msgspec.json.decode(cache.read_bytes(), type=checking.KeptStates).states == rest


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
