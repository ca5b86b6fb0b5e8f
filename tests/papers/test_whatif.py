"""Recipes put over plans of one's own."""

import json

import pytest

from meshwright.answer.predict import predict
from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.papers import whatif
from meshwright.papers.recipes import RECIPES
from meshwright.papers.record import papers
from meshwright.papers.whatif import what_if
from meshwright.plan import check, parse
from meshwright.plan.text import over
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train

DENSE = load_model("llama3-8b"), load_cluster("32xh100"), parse_train("batch=64,seq=4096")
PLAN = parse("tp2 pp4 mb1 zero1 full")
MIXTURE = load_model("mixtral-8x7b"), load_cluster("32xh100"), parse_train("batch=64,seq=4096")
STATES = load_model("mamba2-2.7b"), *DENSE[1:]
DOCUMENTS = *DENSE[:2], parse_train("batch=64,seq=4096,lengths=512;1024;4096")
ENCODED = load_model("sd-2-1-with-encoders"), load_cluster("4xa100-80"), parse_train("batch=32,image=256")
WITH_RECIPE = [p for p in papers().values() if p.recipe]


def codes(names, asked=DENSE, plan=PLAN):
    with pytest.raises(MeshwrightError) as error:
        what_if(names, *asked, plan)
    return [d.code for d in error.value.diagnostics], error.value.diagnostics


@pytest.mark.parametrize("row", WITH_RECIPE, ids=lambda p: p.id)
def test_a_recipe_gives_a_legal_plan_of_as_many_devices(row):
    asked = STATES if "scans=" in row.recipe.plan else DENSE
    asked = MIXTURE if row.id == "deepspeed-ted" else DOCUMENTS if "groups=" in row.recipe.plan else asked
    plan = parse("tp2 pp4 cp2 mb1 zero1 full") if "cp" in row.recipe.needs else PLAN
    asked, plan = (ENCODED, parse("pp2 mb4")) if "filling=" in row.recipe.plan else (asked, plan)
    plan = parse("cp4 dp8 mb1 fsdp full") if asked is DOCUMENTS else plan
    plan = parse("tp2 pp4 mb2 zero1 full nosp") if "domino" in row.recipe.plan else plan  # cuts microbatches of two
    found = what_if((row.id,), *asked, plan)
    assert check(found.after.plan, *asked) == []
    assert found.after.plan.layout.num_ranks == found.before.plan.layout.num_ranks
    assert found.exact is row.recipe_exact


def test_gain_and_memory_are_those_of_two_predictions():
    found = what_if(("zero-bubble",), *DENSE, PLAN)
    before, after = (predict(*DENSE, parse(f"tp2 pp4 mb1 zero1 full {w}"), detail=False) for w in ("1f1b", "zb-h1"))
    assert found.gain == before.step_time_s / after.step_time_s
    assert found.memory_bytes == after.peak_memory_bytes - before.peak_memory_bytes


def test_recipes_are_put_over_one_another():
    found = what_if(("zero-bubble", "pytorch-fsdp"), *DENSE, PLAN)
    assert found.after.plan.pipeline.schedule == "zb-h1" and found.after.plan.layout.zero == 3


def test_a_recipe_that_a_plan_follows_already_changes_nothing():
    found = what_if(("zero-bubble",), *DENSE, parse("tp2 pp4 mb1 zero1 full zb-h1"))
    assert not found.changed and found.gain == 1.0


def test_unknown_papers_and_papers_without_a_recipe_are_named_together():
    found, said = codes(("zero-buble", "h2o"))
    assert found == ["J001", "J003"] and "zero-bubble" in said[0].help


def test_a_recipe_with_nothing_to_work_on_names_the_axis():
    found, said = codes(("gpipe", "pytorch-ddp"), plan=parse("tp8 cp4 mb1"))
    assert found == ["J004", "J004"]
    assert "pp=1" in said[0].message and "dp=1" in said[1].message


def test_recipes_that_contradict_each_other_are_refused():
    found, said = codes(("gpipe", "zero-bubble"))
    assert found == ["J005"] and "pipeline.schedule" in said[0].message


def test_an_illegal_recipe_names_the_constraint_and_itself():
    # bitpipe runs both ways and needs an even number of microbatches: 33 sequences on one replica are odd
    asked = DENSE[0], load_cluster("8xh100"), parse_train("batch=33,seq=4096")
    found, said = codes(("bitpipe",), asked, parse("tp2 pp4 mb1 full"))
    assert "S013" in found and "33 is odd" in said[0].message and "--try bitpipe" in said[0].place


def test_an_illegal_plan_is_refused_before_any_recipe():
    found, said = codes(("gpipe",), plan=parse("tp3 pp4 mb1"))
    assert "P" in found[0][0] and "--try" not in said[0].place


def test_words_over_a_plan_keep_what_they_do_not_say():
    plan = parse("tp8 pp4 vpp5 dp2 zero1 selective nosp")
    assert over(plan, "fsdp") == parse("tp8 pp4 vpp5 dp2 fsdp selective nosp")
    assert over(plan, "zb-h1").pipeline.vpp == 1
    assert over(plan, "hanayo") == parse("tp8 pp4 dp2 zero1 selective nosp hanayo")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_function_belongs_to_a_row(name):
    assert name in {p.recipe.python for p in WITH_RECIPE}


@pytest.mark.parametrize(
    ("plan", "devices", "made"),
    [
        ("tp2 cp4 dp4", 32, "ulysses"),  # a node of 8 holds tp2 cp4
        ("tp4 cp8", 32, "ulysses2"),  # two neighbours of tp4 share one
        ("tp8 cp4", 32, "ring"),  # none does: nothing to swap
    ],
)
def test_heads_are_swapped_inside_a_node_and_blocks_circulate_outside(plan, devices, made):
    asked = DENSE[0], load_cluster(f"{devices}xh100"), parse_train("batch=64,seq=4096")
    found = what_if(("usp",), *asked, parse(f"{plan} mb1 full")).after.plan
    assert found.sequence == parse(f"{plan} {made}").sequence


def test_the_exact_part_of_an_approximate_technique_is_exact():
    assert what_if(("megascale",), *DENSE, PLAN).exact and not papers()["megascale"].exact


def test_a_paper_without_a_recipe_names_those_with_one():
    _, said = codes(("inf-cl",))
    assert "zero-bubble" in said[0].help and "usp" in said[0].help


FEW = ("zero-bubble", "gpipe", "usp", "2bp", "frontier-llm")


def ranked(monkeypatch, plan=PLAN):
    """The ranking of a few papers, so that it takes a second."""
    monkeypatch.setattr(whatif, "papers", lambda: {name: papers()[name] for name in FEW})
    return whatif.rank(*DENSE, plan)


def test_a_ranking_says_of_each_technique_what_trying_it_alone_says(monkeypatch):
    ranking = ranked(monkeypatch)
    assert {a.paper.id for a in ranking.attempts} == set(FEW)
    for attempt in ranking.attempts:
        if attempt.after is None:
            _, diagnostics = codes((attempt.paper.id,))
            assert attempt.why == diagnostics[0].message
            continue
        alone = what_if((attempt.paper.id,), *DENSE, PLAN)
        assert attempt.after.step_time_s == alone.after.step_time_s
        assert ranking.gain(attempt) == alone.gain
        assert ranking.changes(attempt) is alone.changed


def test_a_ranking_has_what_fits_first_and_what_gains_most_first_among_those(monkeypatch):
    ranking = ranked(monkeypatch)
    usable = [a for a in ranking.attempts if a.after is not None]
    fits = [a.after.fits for a in usable]
    assert fits == sorted(fits, reverse=True)
    for group in (True, False):
        gains = [ranking.gain(a) for a in usable if a.after.fits is group]
        assert gains == sorted(gains, reverse=True)
    assert [a.paper.id for a in ranking.attempts[len(usable) :]] == ["usp"]  # it needs context parallelism


def test_all_techniques_are_ranked_on_the_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(whatif, "papers", lambda: {name: papers()[name] for name in FEW})
    asked = ["whatif", "llama3-8b", "--on", "32xh100", "--train", "batch=64,seq=4096", "--plan", PLAN.text()]
    page = tmp_path / "ranking.html"
    assert main([*asked, "--try", "all", "--report", str(page)]) == 0
    out = capsys.readouterr().out
    assert "zero-bubble" in out and "usp needs context parallelism" in out
    assert "What each technique would bring" in page.read_text()
    assert main([*asked, "--try", "all", "--json"]) == 0
    attempts = json.loads(capsys.readouterr().out)["attempts"]
    assert [a["paper"] for a in attempts if a["why_not"]] == ["usp"]
    assert all(a["gain"] > 0 for a in attempts if not a["why_not"])
