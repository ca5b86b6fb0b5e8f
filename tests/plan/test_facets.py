"""A facet is one file: what is said there reaches words, TOML, memo keys, the space of a search, rules and help."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.plan import Plan, parse
from meshwright.plan.facet import EXCHANGE, LAYER, PLACEMENT, STRUCTURE
from meshwright.plan.facets import decided, facets, fields
from meshwright.search.restrict import restricted
from meshwright.search.space import FACETS, default, inners, plan_of, point
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse as workload
from tests.search.small import everything

BOOK = Path(__file__).parents[2] / "docs" / "extending.md"
ASKED = model("llama3-8b"), cluster("8xh100"), workload("batch=64,seq=8192")

#: Run where the book's facet is one of the table from the start.
FOUND = """
from meshwright.plan import Plan, check, parse
from meshwright.plan.executable import unexecutable
from meshwright.plan.toml import dump, loads
from meshwright.search.layers import Layers
from meshwright.search.restrict import restricted
from meshwright.search.space import FACETS, cores, default, inners, plan_of, PLAIN, WHOLE
from meshwright.cli.explain import look_up
from meshwright.cli.completion import _plan_words
from meshwright.cli.search import DESCRIPTION
from meshwright.cost import standard_on
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse as workload

asked = model("llama3-8b"), cluster("8xh100"), workload("batch=64,seq=8192")
usual, exact = parse("cp2 dp4 ulysses"), parse("cp2 dp4 ulysses exact=yes")
assert (usual.repeat.exact, exact.repeat.exact) == (False, True)  # the record
assert exact.text().split() == [*usual.text().split(), "exact=yes"]  # words
assert "exact=" in _plan_words()
assert "[repeat]" in dump(exact) and loads(dump(exact)) == exact  # TOML
try:
    loads("format_version = 1\\n[repeat]\\nexact = 3")
    raise AssertionError("3 is neither yes nor no")
except MeshwrightError as error:
    assert error.diagnostics[0].code == "P004"
layers = Layers(*asked, standard_on(asked[1]))  # memo keys
books = [layers.book(plan, layers.mesh(plan)) for plan in (usual, exact, parse(usual.text()))]
assert books[0] is books[2] is not books[1]
space = default(*asked)  # the space of a search
assert space["exact"] == (False,)
allowed = restricted(space, allow=["exact=yes"], fix=["cp=2"])
found = [plan_of(c, i, PLAIN, WHOLE) for c in cores(allowed, *asked) for i in inners(allowed, c, *asked)]
assert {plan.repeat.exact for plan in found} == {False, True}
ring = parse("cp2 dp4 exact=yes")  # rules, which a search keeps
assert [d.code for d in check(ring, *asked)] == ["P016"] and not check(exact, *asked)
assert not any(plan.repeat.exact and plan.sequence.algorithm == "ring" for plan in found)
refused = unexecutable(exact, asked[0], asked[2])  # executability
assert [d.code for d in refused] == ["P033"] and repr(usual.on(8).text()) in refused[0].help
assert FACETS["exact"] == look_up("exact")["title"] == "the same bits in every run"  # help
assert " exact " in DESCRIPTION.replace("\\n", " ")
"""


def _beside(package, there, *inner):
    """The innermost folder of a package of links to another's files, with folders of its own down to that one."""
    there.mkdir()
    for entry in package.iterdir():
        if not inner or entry.name != inner[0]:
            (there / entry.name).symlink_to(entry)
    return _beside(package / inner[0], there / inner[0], *inner[1:]) if inner else there


def test_the_books_facet_is_found_in_all_places_and_is_no_longer_than_forty_lines(tmp_path):
    text = re.search(r"## A facet\n.*?```python\n(.*?)```", BOOK.read_text(encoding="utf-8"), re.S)[1]
    assert len(text.splitlines()) <= 40
    table = _beside(Path(meshwright.__file__).parent, tmp_path / "meshwright", "plan", "facets") / "__init__.py"
    known, name = table.read_text(encoding="utf-8"), '    "meshwright.plan.facets.overlap",\n'
    assert name in known
    table.unlink()
    table.write_text(known.replace(name, name + '    "meshwright.plan.facets.repeat",\n'), encoding="utf-8")
    (table.parent / "repeat.py").write_text(text, encoding="utf-8")
    paths = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-c", FOUND], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_attribute_of_a_plan_is_said_by_one_field_that_decides_something():
    for name, facet in facets().items():
        said = [attribute for field in facet.fields for attribute in field.attributes]
        assert sorted(said) == sorted(getattr(Plan(), name).__struct_fields__), name
        assert all({*f.decides} & {STRUCTURE, LAYER, EXCHANGE, PLACEMENT} for f in facet.fields)
    assert len({field.place for field in fields().values()}) == len(fields())


def test_every_field_can_be_fixed_in_a_search():
    assert {*FACETS} == {*fields(), "devices"}
    for name, field in fields().items():
        if name != "schedule":
            value = [*field.search, *field.form.names, field.form.write(field.usual or 1)][0]
            assert len(restricted(default(*ASKED), fix=[f"{name}={value.replace(',', '+')}"])[name]) == 1, name


@pytest.mark.parametrize(
    ("words", "where"), [("ulysses=2", "sequence"), ("gathered=kept", "memory"), ("params=fp8", "precision")]
)
def test_words_of_a_plan_that_a_search_left_alone_are_varied_when_it_is_told_to(words, where):
    """Heads swapped inside a ring (Fang & Zhao, 2405.07719), kept gathers, 8-bit parameters: each where it is legal."""
    name, _, value = words.partition("=")
    few = ["tp=2", "cp=4", "pp=1", "mb=1", "schedule=1f1b", "zero=1", "recompute=none", "attention=flash"]
    space = restricted(default(*ASKED), fix=[*few, "order=tp-cp-dp-pp"], allow=[words, "dtype=fp8"])
    found = {plan_of(*one) for one in everything(space, *ASKED)}
    said = {fields()[name].form.write(fields()[name].value(plan)) for plan in found}
    assert said == {value, fields()[name].form.write(fields()[name].usual)}
    assert all(parse(plan.text()) == plan for plan in found)
    if name == "params":
        assert {plan.precision.compute for plan in found if plan.precision.params == "fp8"} == {"fp8"}
    if name == "ulysses":
        assert {p.sequence.algorithm for p in found if p.sequence.ulysses == 2} == {"ring", "allgather"}


def test_a_plan_is_found_at_its_point_and_a_layer_is_told_apart_by_all_that_decides_it():
    plan = parse("tp2 cp2 dp2 mb2 zero1 ulysses full gathered=kept grads=bf16 recompute_layers=2 overlap=dp")
    assert plan_of(*point(plan)) == plan
    key = decided(LAYER)
    for words in ("gathered=kept", "params=fp8", "tp4", "mb2", "fp8", "unfused", "loss=fused", "ep2", "overlap=tp"):
        assert key(parse(words)) != key(Plan()), words
    assert key(parse("ulysses")) == key(Plan())  # one context-parallel rank exchanges nothing
    assert key(parse("nosp")) == key(Plan())  # one tensor-parallel rank shards no sequence
    core, *_ = point(plan)
    assert len(inners(default(*ASKED), core, *ASKED).orders) > 1
