"""Ranks by matrix: the fewest bytes under a bound on the error, against every choice there is."""

from itertools import product

import numpy as np
import pytest

import meshwright as mw
from meshwright.sync.codecs import Tensor, codec
from meshwright.sync.codecs.lgreco import PARTS, candidates, chosen, declared, predicted, sent


def test_the_choice_is_the_best_of_all_within_the_bound():
    """Four matrices of three candidates each, by trying all 81; an error is one of a thousand parts at most too large
    for each matrix, which the bound less so many parts shows."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        sizes = np.sort(rng.integers(1, 50, (4, 3)), axis=1).tolist()
        errors = np.sort(rng.uniform(0.1, 1, (4, 3)), axis=1)[:, ::-1].tolist()
        picks = chosen(sizes, errors, [1] * 4)
        bound = sum(row[1] for row in errors)
        size, lost = (sum(row[i] for row, i in zip(some, picks)) for some in (sizes, errors))
        ways = [(cost(sizes, way), cost(errors, way)) for way in product(range(3), repeat=4)]
        assert lost <= bound * (1 + 1e-9)
        assert min(s for s, e in ways if e <= bound) <= size <= min(s for s, e in ways if e <= bound * (1 - 4 / PARTS))


def cost(table, way):
    return sum(row[i] for row, i in zip(table, way))


def test_a_matrix_that_loses_little_is_cut_further():
    """By hand: the first matrix loses nothing at any rank, so that what it may lose goes to none and its rank is 1."""
    assert chosen([[10, 20, 40], [10, 20, 40]], [[0, 0, 0], [5.0, 3.0, 1.0]], [1, 1]) == [0, 1]


def test_candidates_are_smaller_than_the_matrix_and_declared_errors_fall():
    assert candidates(Tensor(48, 32), 4) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert candidates(Tensor(8, 8), 2) == (1, 2, 3) and candidates(Tensor(8, 8), 4) == ()  # 4 (8 + 8) is 64
    errors = declared(Tensor(48, 32), range(1, 33), 1.0)
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0 and errors[0] < 48 * 32


def test_a_prediction_sends_no_more_than_one_rank_for_all_would():
    shapes = (Tensor(768, 768, 48), Tensor(3072, 768, 24), Tensor(50257, 768))
    found = predicted(shapes, 32, 0.5)
    total = sum(one.times * sent(one, found[one.rows, one.columns]) for one in shapes)
    assert total < sum(one.times * sent(one, 32) for one in shapes)
    asked = mw.load_model("gpt2"), mw.load_cluster("4x1xh100,1gbe"), mw.parse_train("batch=8,seq=1024")
    own, alike = (
        mw.predict(*asked, mw.parse_plan(f"mb2 sync={word}")).step_time_s
        for word in ("l-greco:rank=32,decay=0.5", "powersgd:rank=32")
    )
    assert own < alike


def test_its_words_are_read_back():
    from meshwright.sync.policy import read

    assert read("l-greco:rank=8,every=50").text == "l-greco:rank=8,every=50"
    assert codec("l-greco:rank=8").adapts == 100
    with pytest.raises(mw.MeshwrightError, match=r"(?s)Y003.*take codec=powersgd"):
        mw.predict(
            mw.load_model("gpt2"),
            mw.load_cluster("4xh100"),
            mw.parse_train("batch=8,seq=128"),
            mw.parse_plan("mb1 sync=local:h=4,codec=l-greco"),
        )


def test_shares_and_bits_are_words_too_and_the_strength_of_another_code_is_refused():
    from meshwright.errors import MeshwrightError
    from meshwright.sync.policy import read

    assert read("l-greco:of=topk,share=0.02").text == "l-greco:of=topk,share=0.02"
    topk, levels = codec("l-greco:of=topk,share=0.4"), codec("l-greco:of=qsgd").levels
    assert topk.levels[topk.usual] == "topk:share=0.4" and topk.levels[-1] == "topk:share=0.8"
    finer = codec("l-greco:of=topk,share=0.003")  # an eighth of which is no short number in binary
    assert [codec(one).name for one in finer.levels] == ["topk"] * 15 and finer.levels[1] == "topk:share=0.001125"
    assert codec("l-greco:of=qsgd").wire_bytes(4096, 4) == 2048 + 4 * 8 and levels[2] == "qsgd:bits=4"
    with pytest.raises(MeshwrightError, match="has no rank"):
        codec("l-greco:of=topk,rank=8")
