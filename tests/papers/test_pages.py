"""The book's pages of papers say what is shipped."""

import re
from pathlib import Path

import pytest

from meshwright.papers.record import IDEAS, papers
from meshwright.papers.shipped import shipped
from meshwright.report.papers_markdown import refreshed

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def states():
    """The state of each paper as shipped, which other tests hold to what the checks find."""
    return {name: shipped().states[name] for name in papers()}


def test_the_page_of_papers_has_every_row_with_its_state(states):
    said = dict(
        re.findall(
            r"^\| \*\*([\w-]+)\*\* .*? \| (usable|model only|partly|not yet) \|", (DOCS / "papers.md").read_text(), re.M
        )
    )
    assert said == {name: s.state for name, s in states.items()}, "run: python docs/refresh.py"


@pytest.mark.parametrize("idea", IDEAS)
def test_the_page_of_an_idea_lists_its_papers_and_has_an_example(idea, states):
    text = (DOCS / f"idea-{idea}.md").read_text()
    assert refreshed(text, [(papers()[name], s) for name, s in states.items()]) == text, "run: python docs/refresh.py"
    assert "```python" in text
