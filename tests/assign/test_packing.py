"""Documents in rows: every token once, none over a row's end, the same batches for the same words."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.assign.draws import draw
from meshwright.assign.packing import cheap_ends, costliest_first, cut, lay, shape, taken
from meshwright.errors import MeshwrightError
from meshwright.spec.items import PADDING, document, num_tokens, useful_tokens
from meshwright.spec.workload import PACKS, parse

SQUARE = float(2).__rpow__  # of a length
lengths = st.lists(st.integers(1, 16), min_size=1, max_size=60).map(np.array)


@pytest.mark.parametrize("packing", PACKS)
@settings(max_examples=25, deadline=None)
@given(found=lengths)
def test_every_laid_token_is_one_of_a_document_and_is_laid_once(packing, found):
    laid = lay(found, packing, 16, 3)
    assert (laid.filled <= 16).all() and (laid.length > 0).all()
    seen = [(d, s + i) for d, s, n in zip(laid.document, laid.start, laid.length) for i in range(n)]
    assert len(seen) == len(set(seen)) == laid.filled.sum()
    assert all(at < found[d] for d, at in seen)
    if packing != "concat":
        assert (laid.length == found[laid.document]).all()  # documents are whole
    if packing in ("packed", "padded"):
        assert laid.filled.sum() == found.sum()
    if packing == "concat":
        assert (laid.filled == 16).all() and found.sum() - laid.filled.sum() < 16
    assert laid.num_rows % (3 if packing == "balanced" else 1) == 0


def test_rows_by_hand():
    found = np.array([7, 3, 6, 4])
    packed = lay(found, "packed", 10, 2)
    assert [packed.document[a:b].tolist() for a, b in zip(packed.row_ptr, packed.row_ptr[1:])] == [[0, 1], [2, 3]]
    assert (packed.value, packed.bound) == (2, 2)
    one_behind_the_other = lay(found, "concat", 8, 2)  # 7 1 | 2 6 | (4 are left)
    assert one_behind_the_other.length.tolist() == [7, 1, 2, 6]
    assert one_behind_the_other.start.tolist() == [0, 0, 1, 0]
    assert one_behind_the_other.row_ptr.tolist() == [0, 2, 4]
    assert lay(found, "padded", 10, 2).filled.tolist() == [7, 3, 6, 4]


def test_balanced_microbatches_have_equal_attention_by_hand():
    # two rows of 10: 6 (36) | 5 (25), then 4 (16) onto 25 + 16 = 41, and 3 (9) onto 36 + 9 = 45; the bound is 43
    laid = lay(np.array([3, 4, 5, 6, 9]), "balanced", 10, 2)
    assert [laid.length[a:b].tolist() for a, b in zip(laid.row_ptr, laid.row_ptr[1:])] == [[3, 6], [4, 5]]
    assert (laid.value, laid.bound) == (45, 43)


def test_balanced_rows_are_dealt_there_and_back_and_others_in_a_row():
    assert [taken(6, i, 2, "balanced").tolist() for i in range(2)] == [[0, 3, 4], [1, 2, 5]]
    assert [taken(6, i, 2, "packed").tolist() for i in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_reordered_microbatches_are_dealt_by_cost_and_begin_and_end_with_the_cheapest():
    assert cheap_ends(6).tolist() == [5, 3, 1, 0, 2, 4] and cheap_ends(1).tolist() == [0]
    # microbatches of two rows, the costliest first: ranks have 0, 3, 4 and 1, 2, 5 of six, the costliest in the middle
    assert [taken(12, i, 2, "reordered", 2).tolist() for i in range(2)] == [[8, 9, 0, 1, 6, 7], [10, 11, 2, 3, 4, 5]]
    laid = lay(np.array([9, 4, 4, 6]), "reordered", 10, 2)  # 81 + 1, 36 + 16, 16 + 36: 9, then 6 + 4, then 4
    assert [laid.length[a:b].tolist() for a, b in zip(laid.row_ptr, laid.row_ptr[1:])] == [[9], [4, 6], [4]]
    assert costliest_first(laid, np.array([2, 1, 0])).tolist() == [0, 2, 1]


def test_reordered_batches_have_the_rows_of_packed_ones_costliest_first():
    text = "batch=8,seq=1024,lengths=lognormal:mean=300;sigma=0.8,pack="
    packed, reordered = (draw(parse(text + word), 1) for word in ("packed", "reordered"))
    assert (np.sort(packed.rows[:, :, 0], axis=1) == np.sort(reordered.rows[:, :, 0], axis=1)).all()
    assert (np.diff(reordered.loads(SQUARE), axis=1) <= 0).all()


def test_a_document_longer_than_a_row_is_cut_or_refused():
    with pytest.raises(ValueError, match="a document of 11 tokens does not fit a row of 10"):
        lay(np.array([3, 11]), "packed", 10, 2)
    which, pieces = cut(np.array([3, 11, 20]), 10)
    assert which.tolist() == [0, 1, 1, 2, 2] and pieces.tolist() == [3, 10, 1, 10, 10]


@pytest.mark.parametrize("packing", PACKS)
def test_a_drawn_batch_has_its_tokens_and_says_which_are_useful(packing):
    train = parse(f"batch=8,seq=1024,lengths=lognormal:mean=300;sigma=0.8,pack={packing}")
    drawn = draw(train, 2)
    tokens, rows, together = shape(train, 2)
    assert (tokens, rows, together) == ((2048, 4, 1) if packing == "balanced" else (1024, 8, 2))
    assert drawn.rows.shape == (32, 4, together)
    useful = drawn.useful()
    for d in (0, 31):
        batches = [drawn.batch(d, m) for m in range(4)]
        assert [num_tokens(b) for b in batches] == [2048] * 4
        assert sum(useful_tokens(b) for b in batches) == useful[d]
        assert drawn.loads(SQUARE)[d].tolist() == [sum(i.new_tokens**2 * n for i, n in b) for b in batches]
    waste = {
        "concat": (1, 1),
        "packed": (0.97, 1),
        "reordered": (0.97, 1),
        "balanced": (0.95, 1),
        "padded": (0.2, 0.4),
    }[packing]
    assert waste[0] <= useful.mean() / 8192 <= waste[1]


def test_equal_words_draw_equal_batches_and_another_seed_others():
    texts = [f"batch=8,seq=1024,lengths=100;900,seed={seed}" for seed in (1, 1, 2)]
    a, b, c = (draw(parse(text), 1) for text in texts)
    assert [a.batch(3, m) for m in range(8)] == [b.batch(3, m) for m in range(8)]
    assert a.loads(SQUARE).tolist() == b.loads(SQUARE).tolist() != c.loads(SQUARE).tolist()


def test_equal_lengths_draw_equal_microbatches():
    drawn = draw(parse("batch=4,seq=8192,lengths=1024"), 2)
    assert {drawn.batch(d, m) for d in range(drawn.num_draws) for m in range(2)} == {((document(1024), 16),)}
    tail = draw(parse("batch=4,seq=1000,lengths=300"), 1)
    assert {tail.batch(d, 0) for d in range(tail.num_draws)} == {((document(300), 3), (document(100, PADDING), 1))}


@pytest.mark.parametrize("packing", PACKS)
def test_the_mean_item_attends_as_drawn_documents_do(packing):
    # what search compares plans by: E[l^2] / E[l] and its like, against 25,000 drawn rows
    lengths = "64:0.3;300:0.4;1000:0.3" if packing != "concat" else "300:0.5;700:0.2;3000:0.3"
    train = parse(f"batch=512,seq=1024,lengths={lengths},pack={packing}")
    drawn = draw(train, 1)
    squares = drawn.loads(SQUARE)
    assert train.attended == pytest.approx(squares.mean() / 1024, rel=0.05)  # what packing leaves empty is in none


def test_lengths_are_drawn_by_their_shares():
    # of documents drawn from 100:0.25;300:0.75, padded one a row: 0.25 of 12,800 rows, four standard errors
    drawn = draw(parse("batch=400,seq=512,lengths=100:0.25;300:0.75,pack=padded"), 1)
    share = (drawn.laid.filled == 100).mean()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / drawn.laid.num_rows) ** 0.5


def test_balanced_batches_are_nearer_each_other_than_packed_ones():
    words = "batch=64,seq=4096,lengths=lognormal:mean=800;sigma=1"
    spread = {p: draw(parse(f"{words},pack={p}"), 4).loads(SQUARE) for p in ("packed", "balanced")}
    assert spread["balanced"].std(axis=1).mean() < 0.3 * spread["packed"].std(axis=1).mean()


def test_whole_sequences_are_not_drawn_and_too_many_documents_refused():
    assert draw(parse("batch=4,seq=512"), 1) is None
    with pytest.raises(MeshwrightError, match="W008"):
        draw(parse("batch=1m,seq=1m,lengths=1"), 1)
