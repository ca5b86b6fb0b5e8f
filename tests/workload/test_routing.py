"""Routing as data: a skew by hand, files that round-trip, and everything wrong with one named at once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import load as load_model
from meshwright.spec.routing import follows, given_ranks, read, shares, write
from meshwright.spec.workload import parse as parse_train

MODEL = transformer(layers=3, hidden=64, heads=4, vocab=128, ffn=64, gated=True, experts=4, top_k=2, moe_ffn=32)


def wrong(error):
    return [d.message for d in error.value.diagnostics]


def test_a_skew_is_the_power_law_that_it_says():
    """1, 1/2, 1/3, 1/4 of 25/12: by hand."""
    for row in shares(read("zipf:s=1"), 3, 4):
        assert sorted(row, reverse=True) == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25])


def test_affinity_keeps_the_popularity_of_every_expert():
    routing = read("zipf:s=1;affinity=0.7")
    found, each = follows(routing, 3, 4), shares(routing, 3, 4)
    assert found.sum(axis=2) == pytest.approx(each[:-1])
    assert found.sum(axis=1) == pytest.approx(each[1:])
    together = read("zipf:s=1;affinity=1")
    assert ((follows(together, 3, 4) > 0).sum(axis=2) == 1).all()  # all of an expert's tokens go to one


def test_counts_that_were_written_are_read_as_they_were(tmp_path):
    counts, after = np.arange(1.0, 13).reshape(3, 4), np.arange(1.0, 33).reshape(2, 4, 4)
    write(tmp_path / "r.json", counts, after, near=0.25)
    train = parse_train("batch=4,seq=8,routing=r.json", base=tmp_path)
    assert train.routing.near == 0.25
    assert shares(train.routing, 3, 4) == pytest.approx(counts / counts.sum(1, keepdims=True))
    assert follows(train.routing, 3, 4) == pytest.approx(after / after.sum((1, 2), keepdims=True))
    assert "routing=r.json" in train.text()
    assert parse_train(train.text(), base=tmp_path) == train


def test_a_file_may_say_where_experts_lie(tmp_path):
    (tmp_path / "r.json").write_text(
        json.dumps({"format": "meshwright routing 1", "counts": [[1, 1, 1, 1]], "placement": [[[3, 0], [1, 2]]]})
    )
    assert given_ranks(read("r.json", tmp_path)).tolist() == [[0, 1, 1, 0]]


def test_everything_wrong_with_a_file_is_named_at_once(tmp_path):
    (tmp_path / "r.json").write_text(
        json.dumps(
            {
                "format": "meshwright routing 1",
                "counts": [[1, 2, 0, 1], [0, 0, 0, 0], [1, -1, 1, 1]],
                "follows": [[[1] * 4] * 4],
                "near": 2,
                "placement": [[[0, 1], [2, 2]], [[0, 1], [2, 3]], [[0, 1, 2], [3]]],
            }
        )
    )
    with pytest.raises(MeshwrightError) as error:
        read("r.json", tmp_path)
    found = "\n".join(wrong(error))
    for part in (
        "counts of layer 1",
        "counts of layer 2",
        "follows has 1 layers",
        "near=2",
        "placement of layer 0 leaves out experts 3",
        "placement of layer 0 names experts 2 more than once",
        "placement of layer 2 has 2 ranks of 1, 3 experts",
    ):
        assert part in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zipf:affinity=2", ["affinity=2 is not a number from 0 to 1", "s= is missing"]),
        ("zipf:s=x;q=1", ["unknown word 'q'", "s=x is not a number from 0 to 8"]),
        ("none.json", ["cannot read"]),
    ],
)
def test_words_of_a_skew_are_refused_together(text, said, tmp_path):
    with pytest.raises(MeshwrightError) as error:
        read(text, tmp_path)
    assert all(any(part in message for message in wrong(error)) for part in said)


@pytest.mark.parametrize(
    ("workload", "plan", "said"),
    [
        ("", "ep4 placement=balanced hot=2", ["placement=balanced needs", "hot=2 needs"]),
        (",routing=zipf:s=1", "ep4 imbalance=1.5", ["said twice"]),
        (",routing=zipf:s=1", "hot=2", ["hot=2 experts on all of 1 ranks"]),
        (",routing=zipf:s=1", "ep4 placement=given", ["has no placement"]),
        (",routing=r.json", "ep4", ["has 2 layers of 4 experts, and there are 3 mixtures of 4 experts"]),
        ("", "ep4 capacity=0.001", ["capacity=0.001 of 64 tokens a rank to 2 of 4 experts is 0.032 of a token"]),
        ("", "ep4 portions=2 overlap=dp,pp,ep", ["both hide the exchange"]),
        ("", "ep4 duplicates=sent", ["duplicates=sent with tp=1"]),
    ],
)
def test_plans_that_routing_contradicts_are_refused_with_the_numbers(workload, plan, said, tmp_path):
    write(tmp_path / "r.json", np.ones((2, 4)))
    train = parse_train("batch=8,seq=64" + workload, base=tmp_path)
    found = [d.message for d in check(parse(plan).on(8), MODEL, load("8xh100"), train)]
    assert all(any(part in message for message in found) for part in said), found


def test_a_model_without_experts_has_no_routing():
    dense = transformer(layers=2, hidden=64, heads=4, vocab=128, ffn=64, gated=True)
    train = parse_train("batch=8,seq=64,routing=zipf:s=1,balance=global,locality=0.1")
    found = [d.message for d in check(parse("dp8").on(8), dense, load("8xh100"), train)]
    assert len([m for m in found if "has none" in m]) == 3


def test_weights_of_losses_are_read_and_written():
    train = parse_train("batch=8,seq=64,balance=global:0.1,locality=0.02")
    assert (train.balance, train.balance_weight, train.locality) == ("global", 0.1, 0.02)
    assert parse_train(train.text()) == train
    assert parse_train("batch=8,seq=64,balance=micro").text() == "batch=8,seq=64,balance=micro"
    both = parse_train("batch=8,seq=64,balance=bias+global:0.1")
    assert (both.balance, both.balance_weight, both.bias_rate) == ("global", 0.1, 0.001)  # DeepSeek-V3's bias step
    assert both.text() == "batch=8,seq=64,balance=global:0.1+bias"
    with pytest.raises(MeshwrightError, match="is not micro or global"):
        parse_train("batch=8,seq=64,balance=global+micro")


@pytest.mark.parametrize(
    ("model", "more", "plan", "said"),
    [
        ("mixtral-8x7b", "", "ep8", "those of mixtral-8x7b have none"),
        ("deepseek-v3", ",phase=lora", "ep8", "phase=lora leaves all of them"),
        ("deepseek-v3", "", "dp8 sync=local:h=8", "those of sync=local:h=8 are not"),
    ],
)
def test_biases_that_no_step_moves_for_all_are_refused(model, more, plan, said):
    train = parse_train(f"batch=64,seq=4096,balance=bias{more}")
    asked = parse(plan).on(8), load_model(model)
    found = [*check(*asked, load("8xh100"), train), *unexecutable(*asked, train)]
    assert [d.message for d in found if "balance=bias" in d.message and said in d.message]
