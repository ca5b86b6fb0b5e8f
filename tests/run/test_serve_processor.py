"""Operations of a processor's own: products with matrices in tiles, and attention where blocks lie."""

import pytest
import torch
import torch.nn.functional as F

from meshwright.run.serve import direct
from meshwright.run.serve.direct import NextTokens
from meshwright.run.serve.stored import TiledMatrix

#: Float32: 512 products are summed, each of numbers about 1.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("rows", [1, 3, 4, 37])
def test_a_matrix_in_tiles_multiplies_any_number_of_rows(rows):
    draw = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(70, 512, generator=draw), torch.randn(rows, 1, 512, generator=draw)
    with torch.inference_mode():
        for given in (weight, weight.mT.contiguous().mT):  # by rows, and by columns
            found = TiledMatrix(given).product(x)
            assert found.shape == (rows, 1, 70)
            torch.testing.assert_close(found.double(), F.linear(x.double(), weight.double()), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_next_tokens_attend_to_their_blocks_as_the_formula_says(dtype, threads, monkeypatch):
    monkeypatch.setattr(direct, "THREAD", 1)  # whatever the work, it is divided
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    draw = torch.Generator().manual_seed(0)
    size, shared, heads, width, value_width = 4, 2, 6, 8, 5
    keys = torch.randn(20, size, shared, width, generator=draw, dtype=dtype)
    values = torch.randn(20, size, shared, value_width, generator=draw, dtype=dtype)
    # tables in no order, a first token that is not attended to, a last one in the middle of a block, a token alone
    tables, begin, end = [[7, 3, 12], [5], [19, 0], [2, 4, 6, 8, 10]], [0, 0, 3, 6], [10, 1, 8, 17]
    q = torch.randn(4, heads, width, generator=draw, dtype=dtype)
    found = NextTokens(range(4), tables, begin, end).attend(q, keys, values, 0.3)
    for i, table in enumerate(tables):
        some = slice(begin[i], end[i])
        near, far = (kept[table].flatten(0, 1)[some].double().repeat_interleave(3, 1) for kept in (keys, values))
        shares = (0.3 * torch.einsum("hd,khd->hk", q[i].double(), near)).softmax(-1)
        torch.testing.assert_close(found[i].double(), torch.einsum("hk,khe->he", shares, far), rtol=1e-5, atol=1e-6)
