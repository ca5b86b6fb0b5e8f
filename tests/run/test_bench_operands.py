"""What micro-benchmarks work on: other memory each time, as a step does."""

from itertools import pairwise

import torch

from meshwright.run.bench.operands import ALIGNED, MOST_SETS, Operands, kept

CPU = torch.device("cpu")


def spans(tensors):
    """First byte and the one after the last, in order."""
    return sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors)


def apart(tensors):
    found = spans(tensors)
    return all(end <= start for (_, end), (start, _) in pairwise(found))


def test_sets_share_no_memory_and_fill_the_pool_no_further():
    pool = Operands(CPU, torch.float32, 4 << 20)
    sets = pool.sets([(60, 40), (40, 100)], [(60, 100)])
    each = 4 * (60 * 40 + 40 * 100 + 60 * 100)
    assert len(sets) == pool.num_bytes // (each + -each % ALIGNED) > 50
    assert [x.shape for x in sets[0]] == [(60, 40), (40, 100), (60, 100)]
    assert apart([x for tensors in sets for x in tensors])
    assert all(x.data_ptr() % ALIGNED == 0 for tensors in sets for x in tensors)


def test_what_is_written_is_never_read():
    pool = Operands(CPU, torch.float32, 4 << 20)
    pool.sets([(2000,)], [(2000,)])  # what is asked for first is the largest: it is not laid out anew
    before = [x.clone() for x, _ in pool.sets([(1000,)], [(1000,)])]
    for _, out in pool.sets([(7, 9)], [(1234,)]):
        out.fill_(torch.nan)
    after = pool.sets([(1000,)], [(1000,)])
    assert all(torch.equal(x, y) for x, (y, _) in zip(before, after, strict=True))
    assert abs(float(torch.cat(before).mean())) < 0.02 and abs(float(torch.cat(before).std()) - 1) < 0.02


def test_small_operands_are_near_and_those_larger_than_a_pool_are_there():
    pool = Operands(CPU, torch.bfloat16, 4 << 20)
    assert len(pool.sets([(16, 16)])) == MOST_SETS
    (only,) = pool.sets([(pool.num_bytes // 2 + 1,)], [(3,)])
    assert only[0].dtype == torch.bfloat16 and len(only[0]) == pool.num_bytes // 2 + 1


def test_results_are_kept_until_so_many_came_after_them():
    given = []

    def run():
        given.append(torch.empty(1000))
        return (given[-1],)

    keeping = kept(run, 5 * 4000)
    seen = []
    for _ in range(20):
        keeping()
        seen.append(given.pop().data_ptr())
        # the last five are alive, so none of them can be where the next goes
        assert len(set(seen[-5:])) == len(seen[-5:])
