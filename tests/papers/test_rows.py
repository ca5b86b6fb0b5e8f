"""Every row says what it must, and nothing that the package does not have."""

import re
from importlib.resources import files

import pytest

from meshwright.errors import MeshwrightError
from meshwright.papers import figures
from meshwright.papers.checks import checks
from meshwright.papers.recipes import RECIPES
from meshwright.papers.record import IDEAS, papers
from meshwright.papers.record import paper as find
from meshwright.plan import Plan
from meshwright.plan.text import over

ROWS = list(papers().values())


@pytest.mark.parametrize("row", ROWS, ids=lambda p: p.id)
def test_a_row_is_whole(row):
    assert files("meshwright.papers").joinpath("rows", f"{row.id}.toml").is_file()
    assert row.title and row.area and 1 <= row.mechanism.count(".") <= 4 and len(row.mechanism) < 320
    assert row.ideas and set(row.ideas) <= IDEAS.keys()
    assert row.checked or row.missing, "neither figures nor a check nor what it would need"
    if row.arxiv:
        assert re.fullmatch(r"\d{4}\.\d{4,5}", row.arxiv) and row.source == f"arXiv:{row.arxiv}"
        first = 2000 + int(row.arxiv[:2])
        assert row.year is not None and abs(row.year - first) <= 1


@pytest.mark.parametrize("row", ROWS, ids=lambda p: p.id)
def test_an_unverified_row_claims_no_author_year_or_id(row):
    if not row.verified:
        assert not (row.authors or row.year or row.arxiv)
        assert row.cited == "unverified"


@pytest.mark.parametrize("row", [p for p in ROWS if p.recipe], ids=lambda p: p.id)
def test_a_recipe_is_words_of_a_plan_or_a_known_function(row):
    assert bool(row.recipe.plan) != bool(row.recipe.python)
    if row.recipe.plan:
        assert over(Plan(), row.recipe.plan) != Plan()
    else:
        assert row.recipe.python in RECIPES
    assert set(row.recipe.needs) <= {"tp", "pp", "dp", "cp"}


def test_the_field_has_166_systems_and_every_idea_some():
    assert len(ROWS) == 166
    assert {idea for row in ROWS for idea in row.ideas} == IDEAS.keys()


def test_every_check_belongs_to_a_row_and_every_row_names_one_that_exists():
    assert {row.check for row in ROWS if row.check} == checks().keys()


@pytest.mark.parametrize("row", [p for p in ROWS if p.figures], ids=lambda p: p.id)
def test_a_figure_of_a_paper_says_where_in_it_it_stands_when_it_heads_its_claim(row):
    heads = [f for f in row.figures if f.headline]
    assert not [f.what for f in heads if not f.place]
    assert len({f.what for f in row.figures}) == len(row.figures)


def test_every_recipe_has_a_switch():
    assert not [row.id for row in ROWS if row.recipe and not row.switch]


def test_figures_say_where_they_are_from():
    names = [file.name for file in files("meshwright.papers").joinpath("data").iterdir()]
    assert {n for n in names if not n.endswith(".json")} == set(figures.load("dpro")["traces"])
    for name in (n for n in names if n.endswith(".json")):
        said = figures.load(name.removesuffix(".json"))
        assert said.get("source") or all(paper["source"] for paper in said["papers"].values()), name


def test_an_unknown_id_is_told_the_nearest():
    with pytest.raises(MeshwrightError, match=r"J001.*zero-buble") as error:
        find("zero-buble")
    assert "did you mean zero-bubble" in error.value.diagnostics[0].help
