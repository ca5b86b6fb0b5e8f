"""The glossary names places that exist, in which the word is used."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)


def test_there_are_words():
    assert len(ROWS) > 20


@pytest.mark.parametrize(("words", "place"), ROWS)
def test_a_word_is_used_where_the_glossary_says(words, place):
    path = ROOT / "src/meshwright" / place
    files = [path] if path.is_file() else [f for f in path.iterdir() if f.suffix in (".py", "")]
    text = " ".join(f.read_text().lower() for f in files if f.is_file()) + " ".join(f.stem for f in files)
    for word in re.sub(r"\(.*?\)", "", words).split(","):
        stem = word.strip().removesuffix("ing").split()[-1 if "class" not in word else 0]
        assert stem in text, (word, place)
