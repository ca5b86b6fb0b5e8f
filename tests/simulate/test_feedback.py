"""Direct feedback priced: pipelines without a backward chain by hand, who is sent what, memory, products by light, and
what is refused."""

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright.cost import Costs
from meshwright.cost.chain import Estimate
from meshwright.cost.standard import BARE
from meshwright.errors import MeshwrightError
from meshwright.graph import KIND, QUEUE
from meshwright.lower import lower
from meshwright.plan import check
from meshwright.search.find import find
from meshwright.search.restrict import fed
from meshwright.search.space import default
from meshwright.spec import cluster as clusters
from meshwright.work import AttentionCore, Gemm
from tests.random_plans import LLAMA
from tests.search.small import CLUSTERS, compared

MODEL = mw.transformer(layers=8, hidden=64, heads=4, ffn=128, vocab=512, name="small")
TRAIN = mw.parse_train("batch=8,seq=64")


def by_attention(work, device):
    """A forward of a block takes a second and a backward two, and nothing else takes any time."""
    seconds = (2.0 if work.backward else 1.0) if isinstance(work, AttentionCore) else 0.0
    return Estimate(seconds, "attention", "by hand", 0.0)


def even(words):
    found = mw.load_cluster(words)
    (island,) = found.islands
    device = msgspec.structs.replace(island.device, speed_spread=0.0, comm_slowdown=0.0)
    return msgspec.structs.replace(found, islands=(msgspec.structs.replace(island, device=device),))


def seconds(plan, on="4xh100"):
    return mw.predict(MODEL, even(on), TRAIN, mw.parse_plan(plan), costs=Costs(BARE, (by_attention,))).step_time_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_the_fill_of_the_forward(schedule):
    """Stages of two blocks and eight microbatches on four ranks: (8 + 3)(2 + 4) with a chain, 8 (2 + 4) + 3 x 2
    without."""
    assert seconds(f"pp4 mb1 {schedule}") == pytest.approx(66.0)
    assert seconds(f"pp4 mb1 {schedule} feedback=dfa") == pytest.approx(54.0)
    assert seconds(f"pp4 mb1 {schedule} feedback=dfa:micro,shared") == pytest.approx(54.0)


def test_the_last_rank_sends_each_error_once_to_all_others_and_no_gradient_goes_back():
    model, on, plan = mw.load_model("llama3-8b"), mw.load_cluster("4xh100"), mw.parse_plan("pp4 vpp2 interleaved mb1")
    direct = mw.parse_plan(plan.text() + " feedback=dfa")
    train = mw.parse_train("batch=8,seq=4096")
    spans = mw.predict(model, on, train, direct).timeline
    sent = (spans.kind == KIND["send"]) & (spans.queue == QUEUE["pp_backward"])
    assert sent.sum() == 8 * 3 and set(spans.rank[sent].tolist()) == {3}
    head = (spans.kind == KIND["F"]) & (spans.attribute("stage") == 7)
    known = dict(zip(spans.attribute("microbatch")[head].tolist(), spans.end_s[head].tolist()))
    back = np.isin(spans.kind, (KIND["B"], KIND["BW"]))
    for start, microbatch in zip(spans.start_s[back].tolist(), spans.attribute("microbatch")[back].tolist()):
        assert start >= known[microbatch] - 1e-9
    assert mw.predict(model, on, train, direct).step_time_s < mw.predict(model, on, train, plan).step_time_s


def test_products_are_counted_by_place_or_once_a_microbatch():
    """4,096 tokens through 4,096 x 4,096: of every block, of its two parts, or of the last stage alone."""
    model, on, train = mw.load_model("llama3-8b"), mw.load_cluster("4xh100"), mw.parse_train("batch=8,seq=4096")

    def products(words):
        found = lower(mw.parse_plan(words).on(4), model, on, train)
        entries = [(p.which, e) for p in found.programs if p.kind == "pass" for one in p.layers for e in one.entries]
        return [(which, e.work) for which, e in entries if getattr(e.work, "fixed", False)]

    wanted = Gemm(m=4096, n=4096, k=4096, fixed=True)
    assert {*products("pp4 mb1 feedback=dfa")} == {("BW", wanted)}
    assert len(products("pp4 mb1 feedback=dfa:micro")) == 2 * len(products("pp4 mb1 feedback=dfa"))
    assert products("pp4 mb1 feedback=dfa:shared") == [("F", wanted)]


def test_memory_has_matrices_and_errors_that_wait_and_no_logits():
    model, on, train = mw.load_model("llama3-8b"), mw.load_cluster("4xh100"), mw.parse_train("batch=8,seq=4096")
    for words, each in (("dfa", (8, 8, 8, 8)), ("dfa:micro", (16, 16, 16, 16)), ("dfa:shared", (0, 0, 0, 1))):
        found = lower(mw.parse_plan(f"pp4 mb1 feedback={words}").on(4), model, on, train)
        held = [bytes_of.get("feedback matrices", 0.0) for bytes_of in found.static_bytes]
        assert held == [count * 4096**2 * 2.0 for count in each]
    found = lower(mw.parse_plan("pp4 mb1 gpipe feedback=dfa").on(4), model, on, train)
    memory = found.graph.memory
    names = [memory.categories[c] for c in memory.category.tolist()]
    errors = np.array([name == "errors of the output" for name in names])
    assert "logits" not in names and set(np.abs(memory.num_bytes[errors]).tolist()) == {4096 * 4096 * 2.0}
    for rank in range(4):
        mine = errors & (memory.rank == rank)
        assert (memory.num_bytes[mine] > 0).sum() == 8 and memory.num_bytes[mine].sum() == 0.0
    plain, direct = (mw.predict(model, on, train, mw.parse_plan(f"pp4 mb1 gpipe{w}")) for w in ("", " feedback=dfa"))
    assert direct.memory[-1].peak_bytes < plain.memory[-1].peak_bytes  # eight microbatches' scores over the vocabulary


def test_light_multiplies_where_it_takes_less_time():
    """By hand: its operations over the rate that was said, or the error over PCI Express, and 2 us to start. Of a
    narrow one the copies take longer than the product."""
    plain, lit = (clusters.load(on).islands[0].device for on in ("8xv100", "8xv100,optics=1500:30"))
    work, narrow = (Gemm(m=4096, n=n, k=n, fixed=True) for n in (16384, 2048))
    copied = 4096 * 16384 * 2 / (plain.node.copies_gb_s * 1e9)
    assert copied > work.flops / 1500e12
    assert Costs().price(narrow, lit) == Costs().price(narrow, plain)
    assert Costs().price(work, lit).seconds == pytest.approx(max(work.flops / 1500e12, copied) + 2e-6)
    assert Costs().price(work, plain) == Costs().price(msgspec.structs.replace(work, fixed=False), plain)
    other = msgspec.structs.replace(work, fixed=False)
    assert Costs().price(other, lit) == Costs().price(other, plain)
    assert Costs().price(work, clusters.load("8xv100,optics=100:30").islands[0].device).seconds == pytest.approx(
        work.flops / 100e12 + 2e-6
    )
    slow = clusters.load("8xv100,optics=1:30").islands[0].device
    assert Costs().price(work, slow) == Costs().price(work, plain)
    both = clusters.load("8xh100,near=13000:100,optics=1500:30").islands[0].device
    assert both.alone.name == clusters.load("8xh100").islands[0].device.name


def test_a_file_keeps_light_and_a_word_without_numbers_is_refused(tmp_path):
    found = clusters.load("4xh100,optics=1500:30")
    path = tmp_path / "mine.toml"
    path.write_text(clusters.to_toml(found))
    assert clusters.load(str(path)) == found
    with pytest.raises(MeshwrightError, match="processor of light"):
        clusters.load("4xh100,optics=fast")


def test_a_plan_says_that_it_is_approximate_and_a_search_takes_none_by_itself():
    on, train = mw.load_cluster("2x4xh100"), mw.parse_train("batch=16,seq=512")
    model = mw.load_model("gpt2-medium")
    direct = mw.predict(model, on, train, mw.parse_plan("pp4 dp2 mb1 feedback=dfa"))
    assert any("feedback=dfa is approximate" in w for w in direct.cautions)
    assert default(model, on, train)["feedback"] == ("chain",)
    space = default(model, on, train).with_domain("feedback", ("dfa", "chain"))
    with pytest.raises(MeshwrightError, match="learn alike"):
        find(model, on, train, space=space)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_no_bound_of_a_search_is_above_what_it_bounds(schedule):
    where, train = CLUSTERS["8xh100"], mw.parse_train("batch=16,seq=1024")
    chosen = {"tp": (1, 2), "pp": (2, 4), "mb": (1,), "vpp": (1, 2), "schedule": (schedule,), "zero": (0, 1, 2)}
    chosen |= {"feedback": ("dfa:micro",), "order": (("tp", "cp", "dp", "pp"),), "recompute": ("none",)}
    space = fed(
        msgspec.structs.replace(default(LLAMA, where, train), domains=default(LLAMA, where, train).domains | chosen)
    )
    assert space["zero"] == (0, 1)
    found = list(compared((LLAMA, where, train, space), plans=6))
    assert found and all(one.plan.feedback.way == "dfa:micro" and not one.over() for one in found)


@pytest.mark.parametrize(
    "model, words, train, why",
    [
        ("gpt2", "dp8 zero2 feedback=dfa", "batch=8,seq=128", "say zero1"),
        ("gpt2", "dp8 offload=optimizer feedback=dfa", "batch=8,seq=128", "drop offload="),
        ("gpt2", "dp8 mb1 feedback=dfa", "batch=8,seq=128,adversarial=0.1", "drop adversarial="),
        ("gpt-j-6b", "dp8 mb1 feedback=dfa:micro", "batch=8,seq=128", "say feedback=dfa, which enters whole"),
        ("t5-base", "dp8 mb1 feedback=dfa", "batch=8,seq=128", "one stream of tokens"),
        ("gpt2", "tp2 dp4 mb2 overlap=tp:domino feedback=dfa", "batch=8,seq=128", "drop overlap=tp:domino"),
    ],
)
def test_what_hands_gradients_on_is_refused_with_what_to_say(model, words, train, why):
    asked = mw.load_model(model), mw.load_cluster("8xh100"), mw.parse_train(train)
    found = check(mw.parse_plan(words).on(8), *asked)
    assert [d.code for d in found] == ["P087"] and why in found[0].help


def test_words_that_are_none_are_refused():
    for words in ("dfa:", "dfa:nano", "dfa:micro,micro", "sideways"):
        with pytest.raises(MeshwrightError, match="feedback="):
            mw.parse_plan(f"dp8 feedback={words}")
    assert mw.parse_plan("dp8 mb1 feedback=dfa:shared,micro").text() == "dp8 mb1 feedback=dfa:micro,shared"
