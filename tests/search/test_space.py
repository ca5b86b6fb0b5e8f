"""The space as data, and what people may say about it."""

import pytest

from meshwright.errors import MeshwrightError
from meshwright.plan import check
from meshwright.search.restrict import restricted
from meshwright.search.space import FACETS, cores, default, inners, pipelines, plan_of, states
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse
from tests.search.small import everything

ASKED = model("llama3-8b"), cluster("8xh100"), parse("batch=64,seq=8192")


@pytest.mark.parametrize(
    ("devices", "fix"),
    [("4xh100", []), ("8xh100", ["schedule=1f1b"]), ("8xh100", ["tp=2", "pp=2", "schedule=1f1b,interleaved"])],
)
def test_every_plan_of_the_default_space_is_legal_and_written_once(devices, fix):
    """All of four devices, and parts of the much larger space of eight in which three axes are cut at once."""
    asked = (ASKED[0], cluster(devices), ASKED[2])
    space = restricted(default(*asked), fix=fix)
    texts = set()
    for number, point in enumerate(everything(space, *asked)):
        if number % 97 == 0:
            assert not check(plan_of(*point), *asked), plan_of(*point).text()
        texts.add(plan_of(*point))
    assert len(texts) == number + 1 > 5000


def test_every_facet_of_the_space_is_described():
    assert set(default(*ASKED).domains) == set(FACETS)


def test_default_plans_are_exact_and_use_every_device():
    space = default(*ASKED)
    assert space["devices"] == (8,)
    assert space["dtype"] == ("",)
    assert all(core.devices == core.tp * core.cp * core.pp * core.dp for core in cores(space, *ASKED))


def test_restrictions_keep_bound_and_drop_values():
    space = restricted(
        default(*ASKED),
        fix=["tp=2", "schedule=zbv,1F1B"],
        bound=["pp<=4", "pp>=2"],
        exclude=["recompute=full"],
        allow=["dtype=fp8"],
    )
    assert space["tp"] == (2,)
    assert space["schedule"] == ("zb-v", "1f1b")
    assert space["pp"] == (2, 4)
    assert space["recompute"] == ("none", "selective")
    assert space["dtype"] == ("", "fp8")
    for core in cores(space, *ASKED):
        assert core.tp == 2 and core.pp in (2, 4)
        assert {i.recompute for i in inners(space, core, *ASKED)} == {"none", "selective"}
        assert {p.schedule for p in pipelines(space, core, ASKED[0], ASKED[2])} <= {"zb-v", "1f1b"}
        assert {s.zero for s in states(space, core, *ASKED[1:])} <= {0, 1, 2, 3}


def test_everything_that_is_wrong_with_restrictions_is_said_at_once_with_the_nearest_names():
    with pytest.raises(MeshwrightError) as caught:
        restricted(default(*ASKED), fix=["tpp=2", "schedule=1f1bb", "tp=two"], bound=["tp=8"])
    assert [d.code for d in caught.value.diagnostics] == ["R001", "R002", "R002", "R003"]
    assert "tp" in caught.value.diagnostics[0].help
    assert "1f1b" in caught.value.diagnostics[1].help


@pytest.mark.parametrize("word", ["tp=2,pp=8", "tp=2 pp=8"])
def test_two_facets_in_one_word_are_told_apart(word):
    with pytest.raises(MeshwrightError) as caught:
        restricted(default(*ASKED), fix=[word])
    assert caught.value.diagnostics[0].help == "one facet each: --fix tp=... --fix pp=8"


@pytest.mark.parametrize(
    ("option", "word", "code"),
    [
        ("fix", "zero=9", "R002"),
        ("fix", "tp=0", "R002"),
        ("fix", "mb=0", "R002"),
        ("allow", "vpp=0", "R002"),
        ("fix", "dp=0", "R002"),
        ("fix", "stages=a,32", "R002"),
        ("fix", "tp=\N{SUPERSCRIPT TWO}", "R002"),
        ("fix", f"tp={'9' * 5000}", "R002"),
        ("fix", "imbalance=inf", "R002"),
        ("fix", "imbalance=nan", "R002"),
        ("fix", "imbalance=-3", "R002"),
        ("bound", "stages<=3", "R003"),
        ("bound", "recompute>=none", "R003"),
        ("bound", "schedule<=1f1b", "R003"),
        ("bound", "sp<=1", "R003"),
        ("bound", "pp<=4,8", "R003"),
        ("bound", "tp>=64", "R005"),
        ("exclude", "sp=yes,no", "R005"),
    ],
)
def test_values_that_no_plan_can_say_are_misuse(option, word, code):
    with pytest.raises(MeshwrightError) as caught:
        restricted(default(*ASKED), **{option: [word]})
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_counts_that_may_be_nothing_and_ratios_are_read():
    words = ["etp=0", "shard=0,8", "zero=0", "recompute_layers=0", "imbalance=1.5"]
    space = restricted(default(*ASKED), fix=words, bound=["imbalance<=2"])
    assert space["etp"] == space["zero"] == space["recompute_layers"] == (0,)
    assert (space["shard"], space["imbalance"]) == ((0, 8), (1.5,))


def test_explicit_stages_are_a_value_of_a_facet():
    space = restricted(default(*ASKED), fix=["stages=16,16", "pp=2", "schedule=1f1b"])
    found = [p for core in cores(space, *ASKED) for p in pipelines(space, core, ASKED[0], ASKED[2])]
    assert found and all(p.stages == (16, 16) for p in found)
