"""Meshwright's description of itself is the same everywhere, and true of its commands."""

import tomllib
from pathlib import Path

import pytest

from meshwright import NOT_YET, SUMMARY, cli

ROOT = Path(__file__).parents[2]


def words(text):
    return " ".join(text.split())


def test_the_package_and_the_book_are_described_as_the_help_says():
    said = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["description"]
    assert said == SUMMARY
    assert f"\nsite_description: {SUMMARY}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text", [cli.usage(), *((ROOT / p).read_text("utf-8") for p in ("README.md", "docs/index.md"))]
)
def test_what_it_does_and_does_not_do_yet_is_said_first(text):
    first = words(text[:1200])
    assert SUMMARY in first and NOT_YET in first


def test_no_page_promises_more_of_serving_than_is_run():
    """An engine of a plan is served (tests/run/test_served_for_real.py), of two pools as well
    (tests/run/test_serve_split.py), and several replicas (tests/endpoint/test_replicas.py), all on one machine."""
    assert "serve" in cli.COMMANDS and "serve the plan" in SUMMARY and "several machines" in NOT_YET
    files = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    promises = ("run the plan with", "runs large-model training and serving")
    assert not [f.name for f in files for text in promises if text in f.read_text(encoding="utf-8")]
