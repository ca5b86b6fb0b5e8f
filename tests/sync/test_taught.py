"""Heads that neighbours teach: the words, what a message has, what a step takes, and what is refused."""

import pytest

import meshwright as mw
from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import check, parse
from meshwright.sync.policy import read
from meshwright.sync.taught import Taught

GPT2, WHERE = mw.load_model("gpt2"), mw.load_cluster("8x1xh100,10gbe")
TRAIN = mw.parse_train("batch=64,seq=1024")


def test_words_read_back_and_heads_and_a_public_part_are_needed():
    policy = read("mhd:heads=3,public=0.1,graph=torus,top=32")
    assert read(policy.text).values == policy.values
    assert policy.taught == Taught(heads=3, public=0.1, aux=1.0, embed=1.0, top=32)
    assert policy.differing_models and policy.own_data and not policy.fragments and policy.alike_every == 0
    for words, why in (("mhd", "public"), ("mhd:public=0.1,heads=0", "heads=0"), ("mhd:public=0", "public=0")):
        with pytest.raises(MeshwrightError, match=why):
            read(words)


def test_a_message_has_all_heads_but_the_last_and_hidden_states():
    """Ten tokens of a vocabulary of 100, 16 wide, in two bytes: main head and first of two."""
    two = Taught(heads=2, public=0.1, aux=1.0, embed=1.0, top=0)
    assert two.message_bytes(10, 100, 16, 2) == 10 * 2 * (2 * 100 + 16)
    few = Taught(heads=2, public=0.1, aux=1.0, embed=0.0, top=5)
    assert few.message_bytes(10, 100, 16, 2) == 10 * 2 * 5 * (2 + 4)


def test_a_step_passes_public_text_and_sends_it_beside_the_replicas_own():
    found = simulate(parse("dp8 mb1 sync=mhd:public=0.1,top=8"), GPT2, WHERE, TRAIN, standard())
    own = simulate(parse("dp8 mb1 sync=ddm"), GPT2, WHERE, TRAIN, standard())
    graph = found.lowered.graph
    public = graph.attribute("microbatch") == 8  # behind the replica's own eight
    names = [found.lowered.programs[key].name for key in graph.cost_key[public]]
    assert [name.partition(" ")[0] for name in names] == ["F", "neighbours", "BW"]
    passes_s = (found.end_s - found.start_s)[public][[0, 2]].sum()
    assert found.step_time_s == pytest.approx(own.step_time_s + passes_s, rel=0.05)  # and two heads are updated
    wide = simulate(parse("dp8 mb1 sync=mhd:public=0.1"), GPT2, WHERE, TRAIN, standard())
    sent_s = (wide.end_s - wide.start_s)[wide.lowered.graph.kind == graph.kind[public][1]].max()
    assert wide.step_time_s < own.step_time_s + passes_s + sent_s


def test_heads_are_held_with_their_gradients_and_moments_and_logits_are_there_while_public_text_is():
    def held(heads: int) -> float:
        words = f"dp8 mb1 sync=mhd:public=0.1,heads={heads},top=8"
        return mw.predict(GPT2, WHERE, TRAIN, parse(words), detail=False).peak_memory_bytes

    more = held(3) - held(2)
    state = 18 * GPT2.vocab * GPT2.hidden  # 2 of weights, 4 of masters, 8 of moments, 4 of gradients
    logits = 4 * 1024 * GPT2.vocab  # of the loss
    assert state + logits < more < 1.2 * (state + logits)


@pytest.mark.parametrize(
    ["words", "where", "reason"],
    [
        ("dp4 tp2", "layout.tp", "one rank"),
        ("dp4 pp2", "layout.pp", "one rank"),
        ("dp4 cp2", "layout.cp", "one rank"),
        ("dp8 zero1 shard2", "layout.zero", "holds its model"),
        ("dp8 loss_portions=2", "memory", "made whole"),
    ],
)
def test_layouts_under_which_a_replica_is_not_one_rank_are_refused(words, where, reason):
    found = check(parse(f"{words} mb1 sync=mhd:public=0.1"), GPT2, WHERE, TRAIN)
    assert any(d.code == "Y003" and where in d.place and reason in d.message for d in found)


def test_a_graph_in_parts_that_never_meet_is_refused():
    (found,) = check(parse("dp8 mb1 sync=mhd:public=0.1,graph=random,degree=1"), GPT2, WHERE, TRAIN)
    assert found.code == "Y003" and "not connected" in found.message and found.help


def test_a_step_with_other_neighbours_each_time_is_the_mean_over_them():
    where = mw.load_cluster("2x4xh100,10gbe")  # the next and the one after are inside of a node, the fourth is not
    whole = {
        words: simulate(parse(f"dp8 mb1 sync=mhd:public=0.1,graph={words}"), GPT2, where, TRAIN, standard())
        for words in ("exponential", "ring")
    }
    one = whole["exponential"].round
    assert one.every == 3 and whole["ring"].round is None
    sends = [part.sends_s for part in one.parts]
    assert sends[2] > 1.01 * sends[0] and one.mean_s == pytest.approx(sum(sends) / 3, rel=1e-6)


def test_mixtures_and_a_single_replica_are_refused():
    mixtral = mw.load_model("mixtral-8x7b")
    assert any("routers" in d.message for d in check(parse("dp8 mb1 sync=mhd:public=0.1"), mixtral, WHERE, TRAIN))
    one = check(parse("dp1 mb1 sync=mhd:public=0.1"), GPT2, mw.load_cluster("1xh100"), TRAIN)
    assert any("the plan has one" in d.message for d in one)
