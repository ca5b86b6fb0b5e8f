"""The YAML that is written is read back equal by a YAML parser, whatever the texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.export.yaml_text import dumps

yaml = pytest.importorskip("yaml", reason="PyYAML reads the text back")

SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(st.characters(codec="utf-8"))
#: Words that YAML 1.1 takes for booleans, nulls, numbers, dates and sexagesimals when they are not in quotes.
TRAPS = [
    "no",
    "NO",
    "on",
    "y",
    "null",
    "~",
    "1e3",
    "0x1f",
    "1_000",
    "2026-11-20",
    "12:30:45",
    "",
    " a",
    "#",
    "a: b",
    "- a",
]


def tables(values):
    return st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True) | st.sampled_from(TRAPS), values)


@given(tables(SCALARS | st.sampled_from(TRAPS) | st.lists(SCALARS, max_size=3) | tables(SCALARS)))
def test_a_mapping_reads_back_equal(table):
    assert (yaml.safe_load(dumps(table)) or {}) == table


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, 12.25, -3.0])
def test_a_number_with_a_fraction_stays_one(value):
    read = yaml.safe_load(dumps({"a": value}))["a"]
    assert (read, type(read)) == (value, float)


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126)), max_size=4).map("\n".join))
def test_a_text_of_several_lines_reads_back_equal(text):
    for value in (text, f"{text}\n"):
        assert yaml.safe_load(dumps({"a": {"b": value}})) == {"a": {"b": value}}


def test_plain_lines_stand_below_their_key_and_mappings_in_lists_begin_behind_the_dash():
    assert dumps({"a-b/c": "x: 1\n  y\n", "l": [{"p": 1, "q": [2]}, {}]}) == (
        "a-b/c: |\n  x: 1\n    y\nl:\n  - p: 1\n    q:\n      - 2\n  - {}\n"
    )


def test_the_subset_looks_like_this():
    assert dumps({"a": 1, "b": True, "c": "no", "d": {"e": None}, "f": ["x", 2], "no": 1.5}) == (
        'a: 1\nb: true\nc: "no"\nd:\n  e: null\nf:\n  - "x"\n  - 2\n"no": 1.5\n'
    )
