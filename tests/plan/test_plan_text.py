"""A plan's words and its file: both are read back exactly, and what is wrong in them is said all at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.plan import Layout, Pipeline, Plan, parse
from meshwright.plan.text import over
from meshwright.plan.toml import dump, load, loads, save
from tests.random_plans import plans_in_words


@settings(max_examples=400)
@given(plans_in_words())
def test_a_plans_words_are_read_back_exactly(plan):
    assert parse(plan.text()) == plan


@settings(max_examples=200)
@given(plans_in_words())
def test_a_plans_file_is_read_back_exactly(plan):
    assert loads(dump(plan)) == plan


@given(plans_in_words(), st.randoms(use_true_random=False))
def test_the_order_of_the_words_does_not_matter(plan, shuffle):
    words = plan.text().split()
    shuffle.shuffle(words)
    assert parse(" ".join(words)) == plan


def test_a_file_saved_is_the_file_loaded(tmp_path):
    plan = parse("tp8 pp4 vpp2 dp2 zero1 interleaved mb2 selective order=tp-pp-cp-dp stages=1,2,3,4,5,6,7,8")
    save(plan, tmp_path / "plan.toml")
    assert load(tmp_path / "plan.toml") == parse(str(tmp_path / "plan.toml")) == plan
    assert [f.name for f in tmp_path.iterdir()] == ["plan.toml"]


def test_the_designs_example_reads_as_it_says():
    plan = parse("tp8 pp4 vpp2 dp2 zero1 1f1b mb1")
    assert plan.layout == Layout(tp=8, pp=4, dp=2, zero=1)
    assert plan.pipeline == Pipeline(schedule="interleaved", vpp=2, microbatch=1)  # 1f1b with chunks is interleaved
    assert str(plan) == "tp8 pp4 vpp2 dp2 mb1 zero1 interleaved"


def test_words_stand_for_what_frameworks_call_them():
    assert parse("fsdp").layout.zero == 3
    assert (parse("hsdp8").layout.zero, parse("hsdp8").layout.shard) == (3, 8)
    assert parse("pp4 zbv").pipeline == Pipeline(schedule="zb-v", vpp=2)
    assert parse("TP8 FP8").precision.compute == "fp8"
    assert parse("overlap=none").text() == "mb1 overlap=none"


def test_an_open_dp_takes_the_devices_that_are_left():
    assert parse("tp8 pp4").on(128).layout.dp == 4
    assert parse("tp8 pp4 dp2").on(128).layout.dp == 2
    assert parse("tp8").on(4).layout.dp == 1  # too few for the plan: check() says so


def test_unknown_words_bad_values_and_contradictions_come_at_once_with_their_place():
    with pytest.raises(MeshwrightError) as caught:
        parse("tp8 pipeline4 zero5 tp4 stages=1,x overlap=dp,gpu colour=red fsdp zero1")
    found = caught.value.diagnostics
    assert [d.code for d in found] == ["P001", "P002", "P003", "P002", "P002", "P001", "P003"]
    text = str(caught.value)
    for said in (
        "unknown word 'pipeline4' in a plan",
        "zero5: zero is at least 0 and at most 3",
        "'tp8' and 'tp4' contradict each other",
        "stages=1,x is not layers per stage such as 9,10,10,9",
        "overlap=gpu is unknown",
        "choose among dp, tp, pp, ep, or none",
        "unknown key 'colour' in a plan",
        "'fsdp' and 'zero1' contradict each other",
        "--plan 'tp8 pipeline4",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=8 pp4", "write tp8: "),
        ("tp=8,pp=4", "write tp8 pp4: "),
        ("tp8,pp4,fsdp", "write tp8 pp4 fsdp: "),
        ("overlap=dp,gpu", "choose among"),
        ("colour=3", "did you mean"),
    ],
)
def test_words_that_are_written_as_elsewhere_are_written_anew(text, said):
    with pytest.raises(MeshwrightError) as caught:
        parse(text)
    assert said in caught.value.diagnostics[0].help


def test_a_misspelt_word_is_met_with_the_nearest():
    with pytest.raises(MeshwrightError, match="did you mean interleaved") as caught:
        parse("interleavd")
    assert caught.value.diagnostics[0].code == "P001"


def test_2bp_without_its_schedule_is_told_how_it_is_written():
    with pytest.raises(MeshwrightError, match="2bp:1f1b") as caught:
        parse("pp4 1f1b 2bp")
    assert [d.code for d in caught.value.diagnostics] == ["P001"]


def test_a_hybrid_scope_of_no_ranks_is_no_word():
    with pytest.raises(MeshwrightError, match="unknown word 'hsdp0'"):
        parse("hsdp0")


def test_saying_a_word_twice_is_no_contradiction():
    assert parse("tp8 tp8") == parse("tp8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[layout", "not TOML"),
        ("[layout]\ntp = 8", "format_version is None"),
        ("format_version = 7", "format_version is 7, this version reads 1"),
        ("format_version = 1\n[lay]\ntp = 8", "no such table; did you mean layout?"),
        ("format_version = 1\n[layout]\ntpp = 8", "layout.tpp: no such key"),
        ("format_version = 1\n[layout]\ntp = 'eight'", "wants a whole number, not a text"),
        ("format_version = 1\n[train]\nbatch = 64", 'is words in quotes, as on the command line: train = "..."'),
        ("format_version = 1\n[layout]\ntp = true", "wants a whole number, not true or false"),
        ("format_version = 1\nlayout = 3", "layout: is a table"),
        ("format_version = 1\n[layout]\ntp = 0", "tp is at least 1"),
        ("format_version = 1\n[layout]\npp = -4", "is out of range"),
        ("format_version = 1\n[pipeline]\nmicrobatch = 0", "mb is at least 1"),
        ("format_version = 1\n[experts]\nep = 0", "ep is at least 1"),
        ("format_version = 1\n[layout]\nzero = 5", "zero is at least 0 and at most 3"),
        ("format_version = 1\n[pipeline]\nschedule = '1f2b'", "no schedule is called '1f2b'"),
        ("format_version = 1\n[precision]\ncompute = 'fp7'", "unknown value 'fp7'"),
        ("format_version = 1\n[experts]\nimbalance = 0.5", "is not a ratio of at least 1"),
    ],
)
def test_a_file_that_is_no_plan_says_why(text, said):
    with pytest.raises(MeshwrightError) as caught:
        loads(text, place="mine.toml")
    assert {d.code for d in caught.value.diagnostics} == {"P004"}
    assert said in str(caught.value) and "mine.toml" in str(caught.value)


def test_every_fault_of_a_file_is_listed():
    with pytest.raises(MeshwrightError) as caught:
        loads("format_version = 1\n[layout]\ntp = 1.5\nzero = 9\n[memory]\nrecompute = 'some'\n[nothing]\n")
    assert len(caught.value.diagnostics) == 4


def test_a_missing_file_is_one_error(tmp_path):
    with pytest.raises(MeshwrightError, match="cannot read the plan: No such file") as caught:
        parse(str(tmp_path / "none.toml"))
    assert caught.value.diagnostics[0].code == "P004"


def test_the_default_plan_is_short():
    assert Plan().text() == "mb1"


def test_a_schedule_made_to_hide_the_experts_exchange_hides_it_unless_the_plan_says_otherwise():
    # DeepSeek-V3, 2412.19437, section 3.2.1
    assert parse("pp4 ep8 dualpipe").overlap.ep
    assert parse("pp4 vpp2 ep8 dualpipev").overlap.ep
    for text in ("pp4 dualpipe", "pp4 ep8", "pp4 ep8 dualpipe overlap=dp,pp", "pp4 ep8 dualpipe overlap=none"):
        assert not parse(text).overlap.ep, text
    for text in ("pp4 ep8 mb1 dualpipe", "pp4 ep8 mb1 dualpipe overlap=dp,pp", "pp4 ep8 mb1 1f1b overlap=dp,pp,ep"):
        assert parse(text).text() == text


def test_another_schedule_over_a_plan_brings_its_overlap_and_keeps_what_was_said():
    plan = parse("pp4 ep8")
    assert over(plan, "dualpipe").overlap.ep
    assert not over(over(plan, "dualpipe"), "1f1b").overlap.ep
    assert not over(parse("pp4 ep8 overlap=none"), "dualpipe").overlap.ep


def test_a_plan_file_may_say_every_field_of_a_question():
    """The fields of a question are not taken for tables of the plan beside them."""
    from meshwright.cli.question import Question

    fields = set(Question.__struct_fields__) - {"base", "plan"}
    said = "".join(f'{field} = "x"\n' for field in sorted(fields))
    assert loads(f"format_version = 1\n{said}[layout]\ntp = 2\n").layout.tp == 2
