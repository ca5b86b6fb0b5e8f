"""Blocks of parts with streams of their own (Kraken): parameters, what is exchanged, and what waits for it."""

import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.lower import lower
from meshwright.plan.executable import unexecutable
from meshwright.spec.model import config, from_config
from meshwright.work import Collective

SMALL = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 512}
TRAIN = mw.parse_train("batch=4,seq=64")


@pytest.fixture(scope="module")
def parted():
    return from_config(config("gpt2") | SMALL | {"parallel_ways": 2})


def test_parameters_are_those_of_its_parts_and_near_the_models(parted):
    d, ways, layers = parted.hidden, 2, 3
    # weights and biases of queries, keys and values, output, MLP up and down, and two norms, of each part
    part = (d + 1) * 3 * d + (d + 1) * d + (d + 1) * 4 * d + (4 * d + 1) * d + 4 * d
    assert parted.num_params == layers * ways * part + (512 + 64) * d + 2 * d
    whole = mw.load_model("gpt3-175b")
    for ways in (2, 4, 8):
        found = mw.load_model(f"gpt3-175b,kraken{ways}")
        assert found.num_params == pytest.approx(whole.num_params, rel=0.01)
        assert found.hidden == pytest.approx(whole.hidden / ways**0.5, rel=0.01)


def forward(model, words):
    """The entries of the forward of a block that has a block before it, on two ranks."""
    lowered = lower(mw.parse_plan(words).on(2), model, mw.load_cluster("2xh100"), TRAIN)
    passes = [one for one in lowered.layer_passes if one.which == "F"]
    return max((one.entries for one in passes), key=len)


def test_a_block_sums_once_what_no_attention_waits_for_and_its_mlp_does(parted):
    entries = forward(parted, "tp2 mb4")
    sums = [i for i, e in enumerate(entries) if isinstance(e.work, Collective)]
    assert (
        sums == [0] and entries[0].work.op == "all_reduce" and entries[0].work.num_bytes == 4 * 64 * parted.hidden * 2
    )
    behind = {0}
    for i, entry in enumerate(entries):
        behind |= {i} if behind & {*entry.after} else set()
    waiting = [entries[i].name for i in sorted(behind)]
    assert waiting[1] == "sum of streams residual" and "mlp up" in waiting
    assert not any(name.startswith(("attention", "qkv")) for name in waiting)
    plain = forward(from_config(config("gpt2") | SMALL), "tp2 nosp mb4")
    assert sum(isinstance(e.work, Collective) for e in plain) == 2


def test_its_parts_are_on_as_many_ranks_and_other_families_have_none(parted):
    cluster = mw.load_cluster("4xh100")
    for words, said in (
        ("tp4 mb4", "2 streams of a block are on as many ranks"),
        ("tp2 cp2 mb4", "over cp"),
        ("tp2 mb4 overlap=tp:ladder", "beside attention already"),
    ):
        with pytest.raises(MeshwrightError, match=said):
            mw.predict(parted, cluster, TRAIN, mw.parse_plan(words))
    with pytest.raises(MeshwrightError, match="the llama family does not read it"):
        mw.load_model("llama3-8b,kraken2")


def test_it_is_run_where_it_is_predicted(parted):
    assert unexecutable(mw.parse_plan("tp2").on(2), parted, TRAIN) == []
