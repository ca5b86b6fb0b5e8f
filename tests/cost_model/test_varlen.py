"""Attention over documents of several lengths: one kernel, of which each length takes its share."""

import msgspec
import pytest

from meshwright.cost import standard_on
from meshwright.cost.roofline import attention_seconds
from meshwright.layers.attention import pieces as pieces_of
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.plan import parse as parse_plan
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.items import Item, document
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse
from meshwright.work import AttentionCore, VarlenAttention

CLUSTER = load_cluster("1xh100")
DEVICE = CLUSTER.islands[0].device
COSTS = standard_on(CLUSTER)


def group(count: int, length: int) -> AttentionCore:
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    return AttentionCore(batch=count, q_len=length, kv_len=length, pairs=length * (length + 1) / 2, **shape)


def test_one_length_costs_what_its_uniform_kernel_does():
    one = group(8, 1024)
    assert COSTS.price(VarlenAttention(groups=(one,)), DEVICE)[:2] == COSTS.price(one, DEVICE)[:2]


def test_two_lengths_take_their_shares_of_two_uniform_kernels():
    # 6 documents of 512 and 5 of 1024 are 8192 queries: alone they would be 16 of 512, or 8 of 1024
    measured = standard_on(CLUSTER, "fused")  # by kernels measured on this device, at these lengths
    for costs in (COSTS, measured):
        both = costs.price(VarlenAttention(groups=(group(6, 512), group(5, 1024))), DEVICE).seconds
        short, long = (costs.price(one, DEVICE).seconds for one in (group(16, 512), group(8, 1024)))
        assert both == pytest.approx(6 / 16 * short + 5 / 8 * long)
        assert min(short, long) < both < max(short, long)
    assert short < long


def test_the_work_of_several_lengths_is_the_sum_of_theirs():
    groups = (group(6, 512), group(5, 1024))
    both = VarlenAttention(groups=groups)
    assert both.flops == sum(g.flops for g in groups) and both.num_bytes == sum(g.num_bytes for g in groups)
    assert attention_seconds(groups[0], DEVICE) > 0


def core(batch, words: str = "mb1", ranks: int = 1) -> AttentionCore | VarlenAttention:
    """The forward of llama3-8b's attention core over these items."""
    plan = parse_plan(words).on(ranks)
    model = load_model("llama3-8b")
    stages = Stages(plan, model, parse("batch=1,seq=8192"), Mesh(plan, load_cluster(f"{ranks}xh100")))
    context = msgspec.structs.replace(stages.context(), batch=batch)
    return next(p.forward for p in pieces_of(context, model.blocks[0].attention) if p.name == "attention core")


def test_items_become_groups_of_queries_and_keys():
    found = core(((document(512), 6), (document(1024), 5)))
    assert [(g.batch, g.q_len, g.kv_len, g.pairs) for g in found.groups] == [
        (6, 512, 512, 512 * 513 / 2),
        (5, 1024, 1024, 1024 * 1025 / 2),
    ]


def test_an_item_with_a_cache_attends_to_all_of_it():
    # 4 new tokens behind 12: 4 * 12 earlier ones and 1 + 2 + 3 + 4 among themselves
    found = core(((Item(4, 16.0), 3),))
    assert (found.batch, found.q_len, found.kv_len, found.pairs) == (3, 4, 16, 58)


def test_an_item_that_stands_for_several_documents_attends_to_their_mean():
    # 8192 tokens in documents of 1024: as 8 of them, 8 * 1024 * 1025 / 2
    found = core(((Item(8192, 1024.0), 1),))
    assert found.pairs == 8 * 1024 * 1025 / 2


@pytest.mark.parametrize("words", ["cp4 mb1 allgather", "cp4 mb1 ring", "cp4 mb1 ulysses"])
def test_a_short_document_is_whole_on_one_context_parallel_rank(words):
    # 16 documents of 512 are 4 on each of four ranks, in one kernel or in a ring's four; heads are swapped, or are not
    found, whole = core(((document(512), 16),), words, 4), core(((document(512), 16),))
    steps = 4 if "ring" in words else 1
    assert (found.q_len, found.kv_len, found.pairs) == (512, 512, 512 * 513 / 2)
    assert found.flops * steps == pytest.approx(whole.flops / 4)
    assert found.batch * found.heads == pytest.approx(whole.batch * whole.heads / 4 / steps)
