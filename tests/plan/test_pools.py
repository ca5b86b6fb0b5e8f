"""Plans of several pools: words, TOML, and everything that keeps pools from fitting together, all at once."""

import msgspec
import pytest

import meshwright as mw
from meshwright.cli import main
from meshwright.cost.framework import load as load_framework
from meshwright.cost.framework import overlapped_as_usual, usual_overlap
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan, check, parse
from meshwright.plan.pool import held
from meshwright.plan.serving_roles import role, serving_pools
from meshwright.plan.toml import dump, loads
from meshwright.spec.cluster_part import cut
from meshwright.spec.parts import named_parts, part_of
from meshwright.ui.asked import AskedTexts
from meshwright.ui.asked import read as read_asked

LLAMA = mw.load_model("llama3-8b")  # 32 layers
NODE = mw.load_cluster("8xh100")
TRAIN = mw.parse_train("batch=64,seq=8192")
TWO = "encoder=[dp2 mb4 on=0:2 part=0:8] + lm=[tp2 pp3 mb1 1f1b on=2:8 part=8:32]"


@pytest.mark.parametrize(
    "text",
    [
        TWO,
        "encoder=[dp2 mb4 part=:8 frozen] + lm=[tp2 pp3 mb1 1f1b]",
        "a=[dp1 mb1 bf16 part=8:] + b=[tp2 mb1 part=0:8] b->a",
        "a=[dp1 mb1 part=vision] + b=[tp2 mb1] + c=[fsdp mb1 zb-h1 pp4]",
        "prefill=[tp2 dp2 mb1 on=0:4] + decode=[dp4 mb1 on=4:8] prefill->decode:kv",
    ],
)
def test_words_and_toml_of_several_pools_round_trip(text):
    plan = parse(text)
    assert parse(plan.text()) == plan == loads(dump(plan))
    assert plan.on(64).text() == parse(plan.on(64).text()).text()


def test_words_outside_of_brackets_are_said_to_every_pool():
    assert parse("bf16 a=[tp2 part=0:8] + b=[tp4] mb2") == parse("a=[tp2 part=0:8 bf16 mb2] + b=[tp4 bf16 mb2]")
    toml = 'format_version = 1\n[precision]\ncompute = "bf16"\n[pools.a]\npart = "0:8"\n[pools.b]\n'
    assert loads(toml) == parse("a=[part=0:8 bf16] + b=[bf16]")


def test_a_plan_without_brackets_is_its_only_pool():
    plan = parse("tp8 pp4 dp2")
    assert [pool.plan for pool in plan.pools] == [plan] and plan.links == ()
    assert plan.pools[0].layout.tp == 8 and plan.num_ranks == 64


def test_pools_without_devices_follow_one_another_and_the_last_takes_what_is_left():
    plan = parse("a=[tp2 dp1 part=0:4] + b=[tp2 pp2]").on(16)
    assert [pool.devices for pool in plan.pools] == [(0, 2), (2, 16)]
    assert [pool.layout.dp for pool in plan.pools] == [1, 3]  # 14 / (2 x 2)


def test_a_facet_of_several_pools_is_asked_of_each_pool():
    with pytest.raises(MeshwrightError, match=r"P046.*encoder, lm"):
        _ = parse(TWO).layout.tp


def codes(text: str, cluster=NODE) -> list[str]:
    return [d.code for d in check(parse(text), LLAMA, cluster, TRAIN)]


@pytest.mark.parametrize(
    "text",
    [TWO, "encoder=[dp2 mb4 part=0:8] + lm=[tp2 pp3]", "b=[tp2 on=0:2 part=8:] + a=[tp2 pp3 on=2:8 part=0:8] a->b"],
)
def test_pools_that_fit_together_are_legal(text):
    assert codes(text) == []


def test_everything_that_keeps_pools_apart_is_said_at_once():
    found = check(parse("a=[dp1 on=0:2 part=0:8] b=[tp6 on=1:7 part=7:30 frozen] a->c b->a"), LLAMA, NODE, TRAIN)
    said = {(d.code, d.message) for d in found}
    assert {
        ("P041", "a and b are both on devices 1:2"),
        ("P041", "no pool is on devices 7:8"),
        ("P042", "a and b both hold layers 7:8 of llama3-8b"),
        ("P042", "no pool holds layers 30:32 of llama3-8b"),
        ("P043", "the link a->c is of a pool 'c'"),
        ("P044", "b is frozen, and gradients for a come through it"),
        ("P011", "tp=6 does not divide num_heads=32 (llama3-8b)"),
    } <= said
    assert "plan.b.layout.tp = 6" in {d.place for d in found}
    # one rank is two devices short in a
    assert ("P010", "plan.a.tp1 * pp1 * cp1 * dp1 = 1") in {(d.code, d.place) for d in found}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a=[tp2 part=0:8] + b=[tp2]", "P041"),  # the first says neither dp nor on
        ("a=[tp2 on=0:2 part=0:8] + b=[tp2 on=2:10]", "P041"),  # beyond the cluster
        ("a=[tp2 on=0:2] + b=[tp2 pp3 on=2:8]", "P042"),  # who holds what
        ("a=[tp2 on=0:2 part=0:99] + b=[tp2 pp3 on=2:8]", "P042"),
        ("a=[tp2 on=0:2 part=0:8] + b=[tp2 pp3 on=2:8] b->a", "P043"),
        ("a=[tp2 on=0:2 part=0:8] + b=[tp2 pp3 on=2:8] a->b a->b", "P043"),
        ("a=[tp2 on=0:2 part=0:8 frozen] + b=[tp2 pp3 on=2:8 frozen]", "P044"),
        ("a=[tp2 on=0:2 part=0:8] + b=[pp6 dualpipe on=2:8]", "P045"),
    ],
)
def test_what_does_not_fit_has_a_code(text, code):
    assert code in codes(text)


def test_a_tied_embedding_is_not_in_two_pools():
    model = mw.load_model("llama3.2-1b")
    found = check(parse("a=[tp2 on=0:2 part=0:8] + b=[tp2 pp3 on=2:8]"), model, NODE, TRAIN)
    assert [d.code for d in found] == ["P045"] and "head" in found[0].message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a=[tp2", "half of a pool"),
        ("a=[tp2]", "one pool in brackets"),
        ("a=[tp2] + a=[tp4]", "two pools are called 'a'"),
        ("1=[tp2] + b=[tp4]", "no name of a pool"),
        ("a=[on=2 tp2] + b=[tp4]", "on=2 is no range of devices"),
        ("a=[on=4:2] + b=[tp4]", "on=4:2 is no range of devices"),
        ("a=[part=x: tp2] + b=[tp4]", "part=x: is no range of layers"),
        ("a=[tp2] + b=[tp4] a->b:heat", "'heat' does not flow"),
        ("a=[tp2] + b=[tp4] a->", "no link"),
    ],
)
def test_what_is_no_pool_is_said(text, problem):
    with pytest.raises(MeshwrightError, match="P040") as caught:
        parse(text)
    assert problem in str(caught.value)


def test_wrong_words_of_all_pools_are_said_at_once():
    with pytest.raises(MeshwrightError) as caught:
        parse("a=[tpp2] + b=[zero9] + c=[on=1]")
    assert [d.code for d in caught.value.diagnostics] == ["P001", "P002", "P040"]


def test_wrong_tables_of_pools_are_said_at_once():
    toml = 'format_version = 1\nlinks = 3\n[pools.a]\non = 2\n[pools.a.layout]\ntpp = 2\n[pools.b]\nfrozen = "yes"\n'
    with pytest.raises(MeshwrightError) as caught:
        loads(toml, place="mine.toml")
    said = str(caught.value)
    assert all(part in said for part in ("pools.a.on", "pools.a.layout.tpp", "pools.b.frozen", "links", "mine.toml"))


def test_illegal_pools_end_a_command_with_2(capsys):
    words = ["predict", "llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=8192", "--plan"]
    assert main([*words, "a=[dp1 on=0:2 part=0:8] + b=[tp2 pp3 on=1:8 part=9:]"]) == 2
    said = capsys.readouterr().err
    assert "P041" in said and "P042" in said and "Traceback" not in said


def test_parts_of_a_model_hold_all_its_parameters_once():
    parts = [part_of(LLAMA, *layers) for layers in ((0, 8), (8, 20), (20, 32))]
    assert sum(part.num_params for part in parts) == LLAMA.num_params
    assert [part.num_layers for part in parts] == [8, 12, 12]
    assert part_of(LLAMA, 0, 32) is LLAMA
    assert named_parts(LLAMA) == {"text": (0, 32)}


def test_a_part_that_is_not_said_is_what_the_neighbours_leave():
    pools = parse("a=[part=0:8] + b=[tp1] + c=[part=20:]").several
    assert held(pools, LLAMA) == ((0, 8), (8, 20), (20, 32))


def test_devices_are_cut_out_of_a_cluster_as_whole_nodes_or_inside_one():
    four = mw.load_cluster("32xh100")
    assert [level.arity for level in cut(four, 8, 24).islands[0].levels][:2] == [8, 2]
    assert [level.arity for level in cut(four, 2, 6).islands[0].levels][:2] == [4, 1]
    assert cut(four, 4, 12) is None and cut(four, 0, 33) is None
    assert cut(four, 0, 32) is four
    mixed = mw.load_cluster("8xa100-80 + 16xh100")
    assert [i.device.name for i in cut(mixed, 0, 8).islands] == ["a100_80gb_sxm"]
    assert [i.num_devices for i in cut(mixed, 8, 24).islands] == [16]


def test_a_plan_of_pools_is_a_value():
    plan = parse(TWO)
    assert hash(plan) == hash(parse(TWO)) and plan != parse(TWO.replace("dp2", "dp1"))
    assert msgspec.structs.replace(plan, links=plan.links) == plan
    assert Plan().several == ()


def test_a_framework_overlaps_in_every_pool_whose_words_leave_that_open():
    text = "mb1 a=[dp2 on=0:2 part=0:8 overlap=none] + b=[tp2 pp3 on=2:8 part=8:32]"
    framework = load_framework("megatron-core")
    plan = overlapped_as_usual(framework, parse(text).on(8), text, LLAMA, NODE)
    assert plan.pools[0].overlap == parse("overlap=none").overlap
    assert plan.pools[1].overlap == usual_overlap(framework, parse("tp2 pp3 dp1"), LLAMA, 8)


def test_experts_of_a_hybrid_model_exchange_with_nothing_beside_them():
    """Megatron runs them beside the attention of the same layer, and its layers of experts have none there."""
    plan, framework = parse("dp8 ep8"), load_framework("megatron-bridge-26.06")
    models = [mw.load_model(name) for name in ("qwen3-30b-a3b", "nemotron-3-nano-30b-a3b")]
    assert [usual_overlap(framework, plan, one, 8).ep for one in models] == [True, False]


def test_the_page_refuses_several_pools_by_their_names():
    found = read_asked(AskedTexts(model="llama3-8b", on="8xh100", train="batch=64,seq=8192", plan=TWO))
    assert [(control, d.code) for control, d in found.wrong] == [("plan", "P046")]
    assert "encoder, lm" in found.wrong[0][1].message


SPLIT = "p=[tp2 dp2 on=0:4] + d=[dp3 on=4:7] + w=[dp1 on=7:8] p->d:kv"


def test_roles_follow_from_the_links_of_caches():
    plan = parse(SPLIT)
    assert [role(plan, name) for name in "pdw"] == ["prefill", "decode", "prefill and decode"]
    assert list(serving_pools(plan.on(8), NODE)) == []


def test_devices_may_be_left_free_by_pools_that_serve():
    assert list(serving_pools(parse("p=[tp2 dp1 on=0:2] + d=[dp1 on=4:5] p->d:kv").on(8), NODE)) == []


def test_everything_that_keeps_pools_from_serving_together_is_said_at_once():
    text = "p=[tp2 on=0:4 part=0:8] + d=[dp4 on=3:9 frozen] + e=[dp1 on=7:8] p->d d->e:kv p->x:kv e->d:kv p->p:kv"
    said = [(d.code, d.message) for d in serving_pools(parse(text).on(8), NODE)]
    assert {
        ("P041", "d is on devices 3:9 and 8xh100 has 8"),
        ("P041", "p and d are both on devices 3:4"),
        ("P042", "p says part=0:8, and each pool that serves holds the whole model"),
        ("P042", "d says frozen, and each pool that serves holds the whole model"),
        ("P043", "nothing that requests need flows over p->d"),
        ("P043", "the link p->x:kv is of a pool 'x'"),
        ("P043", "e goes on with prompts of d, and gives its own to others"),
        ("P043", "the link p->p:kv leads nowhere"),
    } <= set(said)


def test_a_pool_that_serves_has_one_kind_of_device():
    mixed = mw.load_cluster("8xh100+8xa100+8xh100")
    (found,) = serving_pools(parse("p=[tp2 dp8 on=0:16] + d=[dp8 on=16:24] p->d:kv").on(24), mixed)
    assert (found.code, found.message) == ("P041", "p is on devices of 2 kinds")


def test_caches_of_requests_do_not_flow_in_a_training_step():
    found = check(parse("a=[tp2 on=0:2 part=0:8] + b=[tp2 pp3 on=2:8 part=8:32] a->b:kv"), LLAMA, NODE, TRAIN)
    assert ("P043", "keys and values of requests flow over a->b:kv, and a step has none") in {
        (d.code, d.message) for d in found
    }
