"""The text form of a schedule: what it says, that it round-trips, and what its mistakes teach."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.schedules import build
from meshwright.schedules.actions import BW, B, W
from meshwright.schedules.text import parse_actions
from meshwright.schedules.verify import verify


def test_1f1b_on_four_ranks_reads_as_in_the_pipedream_flush_figure():
    assert build("1f1b", 4, 4).text() == (
        "# 1f1b\nF0 F1 F2 F3 B0 B1 B2 B3\nF0 F1 F2 B0 F3 B1 B2 B3\nF0 F1 B0 F2 B1 F3 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3\n"
    )


def test_a_backward_without_its_w_is_the_full_backward_and_with_it_is_not():
    whole, split = parse_actions("F0 B0"), parse_actions("F0 B0 W0")
    assert whole.kind.tolist() == [0, BW]
    assert split.kind.tolist() == [0, B, W]


def test_stages_are_written_where_a_rank_holds_others_than_its_own_number():
    text = build("interleaved", 2, 2, 2).text()
    assert text.splitlines()[1].startswith("F0@0 F1@0 F0@2")
    assert parse_actions(text) == build("interleaved", 2, 2, 2)


def test_every_mistake_is_reported_with_line_and_column():
    with pytest.raises(MeshwrightError) as caught:
        parse_actions("F0 b0 X\nF0@0 B0@1 W2")
    assert [(d.code, d.place) for d in caught.value.diagnostics] == [
        ("S002", "line 1, column 4"),
        ("S002", "line 1, column 7"),
        ("S003", "line 2, column 1"),
        ("S007", "line 2, column 11"),
    ]
    assert "did you mean B0?" in str(caught.value)


def test_a_text_without_actions_is_refused():
    with pytest.raises(MeshwrightError, match="S004"):
        parse_actions("# nothing\n\n")


def test_verify_names_the_work_that_is_missing():
    found = verify(parse_actions("F0 B0 F1\nF0 B0 F1 B1"))
    assert [d.message for d in found] == ["microbatch 1 never goes backward through stage 0"]


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("F0 B0 F999999999 B999999999", "microbatch 1, though microbatch 999999999", "line 1, column 7"),
        ("F0@7 B0@7", "stage 0, though stage 7", "line 1, column 1"),
    ],
)
def test_a_number_that_is_skipped_is_named(text, message, place):
    with pytest.raises(MeshwrightError) as caught:
        parse_actions(text)
    assert [(d.code, d.place) for d in caught.value.diagnostics] == [("S005", place)]
    assert message in str(caught.value)


def test_verify_refuses_a_backward_on_another_rank_than_its_forward():
    found = verify(parse_actions("F0@0 B0@1\nF0@1 B0@0"))
    assert len(found) == 2 and "put both on one rank" in found[0].help


def test_verify_names_every_rank_of_a_deadlock():
    found = verify(parse_actions("F0 B0 F1 B1\nF0 F1 B0 B1"))
    assert [(d.code, d.message) for d in found] == [
        ("S006", "rank 0 waits for ever before B0@0"),
        ("S006", "rank 1 waits for ever before F1@1"),
    ]


@given(st.text(alphabet="FBWx0123456789@# \n", max_size=60))
def test_any_text_is_read_or_refused_with_a_diagnostic(text):
    try:
        actions = parse_actions(text)
    except MeshwrightError as error:
        assert all(d.code.startswith("S") and d.help for d in error.diagnostics)
    else:
        assert parse_actions(actions.text()) == actions
