"""Attention over one dim of a video: its work, and what is exchanged where ranks share the one dim or switch (dsp)."""

import msgspec
import pytest

import meshwright as mw
from meshwright import layers
from meshwright.errors import MeshwrightError
from meshwright.layers.kind import Tokens
from meshwright.lower import lower
from meshwright.spec.items import along
from meshwright.spec.model import config, from_config
from meshwright.work import Collective

FRAMES, PLACES = 16, 64
TRAIN = mw.parse_train(f"batch=2,seq={FRAMES * PLACES},frames={FRAMES}")


@pytest.fixture(scope="module")
def film():
    said = {"num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 16, "sample_size": 16}
    return from_config(config("latte-xl-2") | said)


def exchanges(film, words, train=TRAIN):
    """The bytes of the forward's exchanges of context parallelism, in order, of one stage."""
    plan = mw.parse_plan(words).on(4)
    lowered = lower(plan, film, mw.load_cluster("4xh100"), train)
    found = []
    for program in lowered.programs:
        for one in program.layers if program.kind == "pass" else ():
            works = [entry.work for entry in one.entries] if one.which == "F" else []
            found += [work.num_bytes for work in works if isinstance(work, Collective)]
    return sorted(found)


def test_runs_along_a_dim_hold_every_token_once():
    ((item, count),) = TRAIN.microbatch(2)
    space, time = along(((item, count),), "space"), along(((item, count),), "time")
    assert [(run.new_tokens, n) for run, n in space] == [(PLACES, 2 * FRAMES)]
    assert [(run.new_tokens, n) for run, n in time] == [(FRAMES, 2 * PLACES)]


def test_a_published_checkpoint_of_latte_has_as_many_trained_numbers():
    # 2401.03048, table 1 (from memory): Latte-XL/2 has 673.68M, which its two fixed tables of positions are not among
    whole = mw.load_model("latte-xl/2")
    assert whole.num_params - (256 + 16) * whole.hidden == 673_681_568 and whole.num_layers == 28


def test_pairs_are_those_of_each_dim_alone(film):
    tokens = Tokens(model=film, batch=TRAIN.microbatch(2), rows=2, masked=False)
    mixing = [layers.of(block).flops(block, tokens).mixing for block in film.blocks]
    per_pair = 4 * 4 * 16  # two products of as many multiplications and additions a head and number
    space, time = (2 * FRAMES * PLACES**2 * per_pair, 2 * PLACES * FRAMES**2 * per_pair)
    assert mixing == [space, time, space]


def by_hand(film, ways, blocks):
    """Bytes that a rank of four hands to all-to-alls of its tokens in 16 bits, `ways` tensors for each of `blocks`."""
    return ways * blocks * 2 * FRAMES * PLACES // 4 * film.hidden * 2


def test_a_switch_sends_hidden_states_once_between_blocks_where_ulysses_sends_four_tensors_around_attention(film):
    dsp, ulysses = exchanges(film, "cp4 dsp mb2"), exchanges(film, "cp4 ulysses mb2")
    assert len(dsp) == 5 and sum(dsp) == by_hand(film, 1, 5)  # six blocks in turn have five between them
    assert len(ulysses) == 6 and sum(ulysses) == by_hand(film, 4, 3)  # of three blocks over time, there and back


def test_ranks_do_the_same_work_however_dims_are_shared(film):
    cluster = mw.load_cluster("4xh100")
    found = [
        mw.predict(film, cluster, TRAIN, mw.parse_plan(f"cp4 mb2 {word}"), detail=False).attribution["attention"]
        for word in ("dsp", "ulysses")
    ]
    assert found[0] == pytest.approx(found[1], rel=0.5)  # heads are shared or places are: as many pairs


def test_a_search_tries_the_switch_for_videos_alone(film):
    from meshwright.plan.facets.sequence import FIELDS

    domain = next(field.domain for field in FIELDS if field.name == "algorithm")
    cluster = mw.load_cluster("4xh100")
    assert "dsp" in domain(film, cluster, TRAIN) and "dsp" not in domain(mw.load_model("gpt2"), cluster, TRAIN)


@pytest.mark.parametrize(
    ("model", "train", "plan", "said"),
    [
        ("gpt2", "batch=4,seq=1024", "cp4 dsp", "gpt2 attends over all"),
        ("gpt2", "batch=4,seq=1024,frames=4", "cp4", "which has no frames"),
        ("latte-xl-2", "batch=4,seq=4096", "cp4 dsp", "frames are not said"),
        ("latte-xl-2", "batch=4,seq=4096,frames=2", "cp4 ulysses", "cp=4 does not divide a video's 2 frames"),
        ("latte-xl-2", "batch=4,seq=96,frames=16", "cp4 dsp", "cp=4 does not divide a video's 6 places of a frame"),
        ("latte-xl-2", "batch=4,seq=4096,frames=16", "cp4 dsp ulysses2", "and dsp is neither"),
    ],
)
def test_what_has_no_two_dims_or_does_not_divide_is_refused(model, train, plan, said):
    with pytest.raises(MeshwrightError, match=said):
        mw.predict(mw.load_model(model), mw.load_cluster("4xh100"), mw.parse_train(train), mw.parse_plan(plan))


@pytest.mark.parametrize("said", ["seq=100,frames=7", "seq=128,frames=4,lengths=32:1", "seq=128,frames=4,pack=padded"])
def test_frames_divide_sequences_that_nothing_else_cuts(said):
    with pytest.raises(MeshwrightError, match="W002"):
        mw.parse_train(f"batch=4,{said}")


def test_frames_are_read_back():
    assert mw.parse_train(TRAIN.text()) == TRAIN and msgspec.structs.replace(TRAIN, frames=0) != TRAIN
