"""Attention over a cut sequence equals attention over the whole one, in every algorithm, mask and number type."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.run import visible
from meshwright.run.attention import attend, local_positions
from meshwright.run.mesh import AxisGroup
from meshwright.run.record import ResidentBytes
from meshwright.run.visible import MaskRule, blocks, document_blocks, runs_of
from tests.run.processes import launch as forked
from tests.run.processes import launch_kept as launch

ALONE = AxisGroup(name="cp", ranks=(0,), index=0)


def oracle(q, k, v, *, causal, window, scale, documents=None, sinks=None):
    """Softmax attention written out, scores and all; [b, n, heads, d]."""
    heads, n = q.shape[2], q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    i = torch.arange(n)
    seen = torch.ones(len(q), n, n, dtype=torch.bool)
    if causal:
        seen &= i[:, None] >= i
    if window:
        seen &= (i[:, None] - i).abs() < window
    if documents is not None:
        seen &= documents[:, :, None] == documents[:, None]
    scores = (torch.einsum("bnhd,bmhd->bhnm", q, k) * scale).masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, heads, 1, 1).expand(len(q), heads, n, 1)], -1)
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1)[..., :n], v)


def inputs(seq_len, heads=4, kv_heads=2, head_dim=8, value_dim=8, batch=2, seed=0, dtype=torch.float64):
    """Queries, keys, values and output gradient of the whole sequence."""
    made = torch.Generator().manual_seed(seed)
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)]
    return [torch.randn(batch, seq_len, *s, generator=made, dtype=torch.float64).to(dtype) for s in shapes]


def documents_of(seq_len, *cuts):
    """One row per sequence, its documents beginning at `cuts`."""
    rows = torch.zeros(len(cuts), seq_len, dtype=torch.int32)
    for row, begins in zip(rows, cuts, strict=True):
        for begin in begins:
            row[begin:] += 1
    return rows


def worst(found, wanted):
    """Largest error of any tensor, relative to its largest element, or to 1e-3 where that is smaller (a softmax over
    one key has no gradient at all)."""
    sizes = [b.abs().max().clamp_min(1e-3) for b in wanted]
    return max(((a - b).abs().max() / size).item() for a, b, size in zip(found, wanted, sizes, strict=True))


def with_gradients(function, tensors, grad):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


# --- which pairs ---------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 4),
    length=st.integers(1, 9),
    causal=st.booleans(),
    balanced=st.booleans(),
    window=st.integers(0, 20),
    tile=st.integers(1, 8),
    cuts=st.lists(st.lists(st.integers(1, 71), max_size=4), min_size=1, max_size=2),
)
def test_blocks_hold_every_visible_pair_once(size, length, causal, balanced, window, tile, cuts):
    """Against the mask, pair by pair, for all pairs of ranks together."""
    seq_len = 2 * size * length
    documents = documents_of(seq_len, *cuts)
    before, visible.LEAST_TILE = visible.LEAST_TILE, tile
    blocks.cache_clear()
    visible._in_documents.cache_clear()
    try:
        rule = MaskRule(causal, window)
        held = [runs_of(seq_len, size, i, balanced=balanced and causal) for i in range(size)]
        places = [torch.cat([torch.arange(*r) for r in runs]) for runs in held]
        count = torch.zeros(len(cuts), seq_len, seq_len, dtype=torch.int64)
        for a, b in itertools.product(range(size), repeat=2):
            for found in document_blocks(held[a], held[b], rule, documents):
                rows = slice(None) if found.row is None else slice(found.row, found.row + 1)
                queries, keys = places[a][found.q0 : found.q1], places[b][found.k0 : found.k1]
                seen = torch.ones(len(queries), len(keys), dtype=torch.int64)
                if found.causal:
                    assert len(queries) == len(keys)
                    seen = seen.tril()
                if found.offset is not None:
                    shape = (len(queries), len(keys))
                    bias = visible.hidden(*shape, found.offset, rule, torch.float32, torch.device("cpu"))
                    seen = (bias == 0).long()
                count[rows, queries[0] if len(queries) == 0 else queries[:, None], keys] += seen
    finally:
        visible.LEAST_TILE = before
        blocks.cache_clear()
        visible._in_documents.cache_clear()
    i = torch.arange(seq_len)
    wanted = documents[:, :, None] == documents[:, None]
    if causal:
        wanted &= i[:, None] >= i
    if window:
        wanted &= (i[:, None] - i).abs() < window
    assert torch.equal(count, wanted.long())


def test_a_balanced_ring_does_one_kernel_a_hop_and_half_the_pairs():
    """Every hop of a zigzag is one rectangle or the own triangle; all ranks have the same pairs (2407.21783, 3.3.2)."""
    size, seq_len = 4, 64
    held = [runs_of(seq_len, size, i, balanced=True) for i in range(size)]
    pairs = []
    for a in range(size):
        mine = 0
        for b in range(size):
            (found,) = blocks(held[a], held[b], MaskRule(causal=True))
            n = found.q1 - found.q0
            mine += n * (n + 1) // 2 if found.causal else n * (found.k1 - found.k0)
        pairs.append(mine)
    assert pairs == [seq_len * (seq_len + 1) // 2 // size] * size


def test_documents_that_end_before_a_rank_begins_leave_it_nothing():
    held = [runs_of(64, 4, i, balanced=False) for i in range(4)]
    documents = documents_of(64, [16, 32, 48])
    assert document_blocks(held[3], held[1], MaskRule(causal=True), documents) == ()
    assert len(document_blocks(held[3], held[3], MaskRule(causal=True), documents)) == 1


def test_documents_changed_in_place_are_read_again():
    documents = documents_of(8, [4])
    held = runs_of(8, 1, 0, balanced=False)
    assert len(document_blocks(held, held, MaskRule(causal=True), documents)) == 2
    documents.zero_()
    assert len(document_blocks(held, held, MaskRule(causal=True), documents)) == 1


@pytest.mark.parametrize("algorithm", ["ring", "ulysses", "allgather"])
@pytest.mark.parametrize(("size", "ulysses"), [(1, 1), (4, 1), (4, 2), (8, 4)])
def test_positions_of_all_ranks_are_the_sequence(algorithm, size, ulysses):
    found = [local_positions(48, size, i, algorithm, True, ulysses=ulysses) for i in range(size)]
    assert torch.equal(torch.cat(found).sort().values, torch.arange(48))


def test_positions_by_hand():
    """Four ranks of 16 tokens: zigzag pieces 1 and 6 of 8; the union cuts the outer rank's 0-3 and 12-15 in two."""
    assert local_positions(16, 4, 1, "ring", True).tolist() == [2, 3, 12, 13]
    assert local_positions(16, 4, 1, "ring", False).tolist() == [4, 5, 6, 7]
    assert local_positions(16, 4, 1, "ulysses", True).tolist() == [4, 5, 6, 7]
    assert local_positions(16, 4, 1, "ring", True, ulysses=2).tolist() == [12, 13, 14, 15]
    with pytest.raises(ValueError, match="12 tokens does not divide into 8"):
        local_positions(12, 4, 0, "ring", True)


# --- one process ---------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    seq_len=st.integers(1, 40),
    kv_heads=st.sampled_from([1, 2, 4]),
    value_dim=st.sampled_from([8, 4]),
    causal=st.booleans(),
    window=st.integers(0, 12),
    cuts=st.lists(st.lists(st.integers(1, 39), max_size=3), min_size=2, max_size=2),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_one_rank_equals_the_softmax_written_out(seq_len, kv_heads, value_dim, causal, window, cuts, sinks, seed):
    *tensors, grad = inputs(seq_len, kv_heads=kv_heads, value_dim=value_dim, seed=seed)
    documents = documents_of(seq_len, *cuts)
    if sinks:
        tensors.append(torch.linspace(-1, 1, 4, dtype=torch.float64))
    said = {"causal": causal, "window": window, "scale": 0.4, "documents": documents}

    def run(q, k, v, s=None):
        return attend(q, k, v, cp=ALONE, algorithm="ring", sinks=s, **said)

    def plain(q, k, v, s=None):
        return oracle(q, k, v, sinks=s, **said)

    assert worst(with_gradients(run, tensors, grad), with_gradients(plain, tensors, grad)) < 1e-9


def test_long_windows_are_walked_in_tiles():
    """Three tiles of 128 queries: full, masked and triangular blocks all occur, and the result is the same."""
    *tensors, grad = inputs(384, batch=1)
    said = {"causal": True, "window": 100, "scale": 0.4}
    found = with_gradients(lambda *x: attend(*x, cp=ALONE, algorithm="ring", **said), tensors, grad)
    assert worst(found, with_gradients(lambda *x: oracle(*x, **said), tensors, grad)) < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 5])
def test_a_block_of_16_bits_has_the_gradients_of_fp32(dtype, window):
    """As near to those of the same values in float64 as one rounding at the end and 16-bit outputs allow."""
    *tensors, grad = inputs(24, dtype=dtype)
    said = {"causal": True, "window": window, "scale": 0.4, "documents": documents_of(24, [7], [15])}
    found = with_gradients(lambda *x: attend(*x, cp=ALONE, algorithm="ring", **said), tensors, grad)
    wanted = with_gradients(lambda *x: oracle(*x, **said), [t.double() for t in tensors], grad.double())
    assert [t.dtype for t in found] == [dtype] * 4
    assert worst([t.double() for t in found], wanted) < 2 * torch.finfo(dtype).eps


def _grown(rank, lengths):
    """Bytes that a process holds more after attention to a document of each length."""
    resident, before = ResidentBytes(), 0
    for length in [8, *lengths]:
        *tensors, grad = inputs(length + 1, head_dim=32, value_dim=32, dtype=torch.bfloat16, batch=1)
        documents = documents_of(length + 1, [length])
        with_gradients(
            lambda *x, d=documents: attend(*x, cp=ALONE, algorithm="ring", documents=d, causal=True), tensors, grad
        )
        before = before or resident()
    return resident() - before


def test_memory_does_not_grow_with_every_new_length_of_document():
    """torch's own 16-bit backward keeps about 3 MB for each of these lengths."""
    (grown,) = forked(1, _grown, list(range(20, 500, 10)))
    assert grown < 30e6


# --- several processes ---------------------------------------------------------------------------------------------

CASES = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": 5},
    {"causal": True, "documents": [(3, 17), (24,)]},
    {"causal": False, "documents": [(16,), (16,)]},
    {"causal": True, "window": 4, "documents": [(10,), (11, 12, 13)]},
    {"causal": True, "sinks": True},
    {"causal": True, "kv_heads": 1},
    {"causal": True, "kv_heads": 4, "value_dim": 4},
]


def _groups(rank, size, ulysses):
    """(outer, inner) of the calling process; every process makes all of them."""
    import torch.distributed as dist

    found = {}
    inner = [tuple(range(i, i + ulysses)) for i in range(0, size, ulysses)]
    for name, sets in (("inner", inner), ("outer", list(zip(*inner, strict=True)))):
        for ranks in sets:
            handle = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                found[name] = AxisGroup(name=name, ranks=ranks, index=ranks.index(rank), handle=handle)
    return found["outer"], found["inner"]


def _shares(rank, size, algorithm, ulysses, cases, dtype):
    """This rank's tokens, and its output and gradients, for each case; sinks' gradients last."""
    cp, inner = _groups(rank, size, ulysses)
    results = []
    for case in cases:
        shape = {k: case[k] for k in ("kv_heads", "value_dim") if k in case}
        *tensors, grad = inputs(32, dtype=dtype, **shape)
        mine = local_positions(32, size, rank, algorithm, case["causal"], ulysses=ulysses)
        tensors = [t[:, mine] for t in tensors]
        if case.get("sinks"):
            tensors.append(torch.linspace(-1, 1, 4, dtype=dtype))
        documents = documents_of(32, *case["documents"]) if "documents" in case else None

        def run(q, k, v, s=None, case=case, documents=documents):
            said = {"causal": case["causal"], "window": case.get("window", 0), "scale": 0.4}
            return attend(q, k, v, cp=cp, inner=inner, algorithm=algorithm, documents=documents, sinks=s, **said)

        results.append((mine, with_gradients(run, tensors, grad[:, mine])))
    return results


def _whole(case, dtype=torch.float64):
    shape = {k: case[k] for k in ("kv_heads", "value_dim") if k in case}
    *tensors, grad = inputs(32, dtype=dtype, **shape)
    if case.get("sinks"):
        tensors.append(torch.linspace(-1, 1, 4, dtype=torch.float64))
    documents = documents_of(32, *case["documents"]) if "documents" in case else None
    said = {"causal": case["causal"], "window": case.get("window", 0), "scale": 0.4, "documents": documents}
    tensors, grad = [t.double() for t in tensors], grad.double()
    return with_gradients(lambda q, k, v, s=None: oracle(q, k, v, sinks=s, **said), tensors, grad)


def _assembled(ranks, case):
    """The whole tensors from every rank's tokens; gradients of sinks are summed."""
    tokens = 4
    out = []
    for i in range(len(ranks[0][case][1])):
        if i == tokens:
            out.append(sum(r[case][1][i] for r in ranks))
            continue
        whole = torch.cat([r[case][1][i] for r in ranks], 1)
        order = torch.cat([r[case][0] for r in ranks]).argsort()
        out.append(whole[:, order].double())
    return out


ALGORITHMS = [
    (2, "ring", 1),
    (4, "ring", 1),
    (2, "ulysses", 1),
    (4, "ulysses", 1),
    (2, "allgather", 1),
    (4, "allgather", 1),
    (4, "ring", 2),
    (4, "allgather", 2),
    (4, "burstattention", 1),
    (4, "tokenring", 1),
    (4, "burstattention", 2),
    (4, "ring-self-attention", 1),
]


@pytest.mark.parametrize(("size", "algorithm", "ulysses"), ALGORITHMS)
def test_a_cut_sequence_gives_the_whole_ones_output_and_gradients(size, algorithm, ulysses):
    """In float64, against the softmax written out on one process: 1e-9 of the largest element."""
    ranks = launch(size, _shares, size, algorithm, ulysses, CASES, torch.float64)
    for i, case in enumerate(CASES):
        assert worst(_assembled(ranks, i), _whole(case)) < 1e-9, case


@pytest.mark.parametrize(
    ("size", "algorithm", "ulysses"), [(4, "ring", 1), (2, "ulysses", 1), (4, "burstattention", 1), (4, "tokenring", 1)]
)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_lower_precision_stays_within_its_rounding(size, algorithm, ulysses, dtype, most):
    """Inputs rounded first, then float64 as the reference. bfloat16 has 8 bits: one rounding is 2**-9 = 0.2%, and the
    gradient of a block is rounded at every hop."""
    cases = [CASES[0], CASES[3]]
    ranks = launch(size, _shares, size, algorithm, ulysses, cases, dtype)
    for i, case in enumerate(cases):
        assert worst(_assembled(ranks, i), _whole(case, dtype)) < most


def _too_many(rank):
    cp, _ = _groups(rank, 2, 1)
    q, k, v, _ = inputs(4, heads=3, kv_heads=3)
    attend(q, k, v, cp=cp, algorithm="ulysses")


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(AssertionError, match="ulysses splits 3 heads over 2 ranks"):
        launch(2, _too_many)


def test_an_unknown_algorithm_is_refused():
    q, k, v, _ = inputs(4)
    with pytest.raises(ValueError, match="no context-parallel algorithm 'stripe'"):
        attend(q, k, v, cp=ALONE, algorithm="stripe")
