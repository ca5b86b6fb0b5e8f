"""The list of exchanges of a plan, against bytes and groups worked out by hand."""

import pytest

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.sync.fragments import (
    DENSE,
    EXPERT,
    GATHERED,
    GRADIENTS,
    NORM,
    SELF,
    TIED,
    Among,
    buckets,
    fragments,
    on_wire,
    stored,
)
from meshwright.sync.policy import read

MODEL = transformer(layers=4, hidden=32, heads=4, vocab=64, ffn=48, max_seq_len=64)
TIED_MODEL = transformer(layers=4, hidden=32, heads=4, vocab=64, ffn=48, max_seq_len=64, tied_embeddings=True)
TRAIN = Train(global_batch=8, seq_len=16)


def listed(text, kinds=None, model=MODEL, policy="step"):
    """Fragments of a plan whose every segment holds 1000 dense parameters, or `kinds`."""
    plan = parse(text)
    actions = schedules.build(plan.pipeline.schedule, plan.layout.pp, 8, plan.pipeline.vpp)
    sizes = {(stage, 0): kinds or {DENSE: (1000, 1000)} for stage in range(plan.num_stages)}
    return fragments(plan, model, actions, sizes, stored(plan, TRAIN), read(policy))


def of(found, what):
    return [f for f in found if f.what == what]


def test_ddp_sums_whole_gradients_over_all_replicas_once_a_step_in_the_frameworks_buckets():
    (gradients,) = of(listed("dp4 cp2"), GRADIENTS)
    assert (gradients.shard, gradients.replica, gradients.due) == (SELF, Among("data", 8), "step")
    assert on_wire([gradients]) == [("all_reduce", 4000, ("data", 8))]
    assert buckets("all_reduce", 4000, 1500) == 3 and buckets("all_reduce", 4000, 0) == 1
    assert not of(listed("dp4 cp2"), GATHERED)


@pytest.mark.parametrize(
    ["zero", "gradients_due", "gathered_due"],
    [("zero1", "step", "step"), ("zero2", "pass", "step"), ("fsdp", "pass", "pass"), ("zero2 pp2", "round", "step"),
     ("fsdp pp2", "step", "step")],
)  # fmt: skip
def test_zero_scatters_gradients_and_gathers_parameters_as_often_as_they_are_sharded(zero, gradients_due, gathered_due):
    found = listed(f"dp4 {zero}")
    gradients, gathered = of(found, GRADIENTS)[0], of(found, GATHERED)[0]
    assert (gradients.due, gathered.due) == (gradients_due, gathered_due)
    # fp32 gradients of what a rank computes, bf16 parameters
    assert on_wire([gradients]) == [("reduce_scatter", 4000, ("shard", 4))]
    assert on_wire([gathered]) == [("all_gather", 2000, ("shard", 4))]


def test_hybrid_sharding_sums_the_shards_over_their_copies():
    (gradients,) = of(listed("dp8 hsdp4"), GRADIENTS)
    assert on_wire([gradients]) == [
        ("reduce_scatter", 4000, ("shard", 4)),
        ("all_reduce", 1000, ("replica", 2)),
    ]


def test_experts_are_summed_over_those_that_have_them_and_sharded_inside_the_scope():
    kinds = {DENSE: (1000, 1000), EXPERT: (400, 400)}
    whole = of(listed("dp8 ep2", kinds), GRADIENTS)
    assert [f.replica for f in whole] == [("data", 8), ("edp", 4)]
    scoped = of(listed("dp8 ep2 zero1 shard2", kinds), GRADIENTS)
    assert on_wire(scoped) == [  # inside first, both kinds, then between the copies
        ("reduce_scatter", 4000, ("shard", 2)),
        ("reduce_scatter", 1600, ("expert_shard", 2)),
        ("all_reduce", 2000, ("replica", 4)),
        ("all_reduce", 800, ("expert_replica", 2)),
    ]


def test_a_tied_table_has_a_twin_where_embedding_and_head_are_on_different_ranks():
    kinds = {TIED: (640, 640)}
    apart = of(listed("pp2 dp2", kinds, TIED_MODEL), GRADIENTS)
    assert {f.twin for f in apart} == {Among("ends", 2)} and not any(f.beside for f in apart)
    here = of(listed("pp2 dp2 zb-v vpp2", kinds, TIED_MODEL), GRADIENTS)  # a V ends where it began
    assert {f.twin for f in here} == {SELF}


def test_stages_that_are_run_both_ways_have_a_twin():
    assert {f.twin for f in of(listed("pp4 dp1 chimera"), GRADIENTS)} == {Among("mirror", 2)}


def test_the_norm_is_one_number_among_all_ranks_of_a_step():
    (norm,) = of(listed("tp2 pp2 dp4"), NORM)
    assert on_wire([norm]) == [("all_reduce", 4, ("worker", 16))]


def test_frozen_parameters_are_gathered_whole_and_exchange_no_gradients():
    kinds = {DENSE: (1000, 0)}
    found = listed("dp4 fsdp", kinds)
    assert not of(found, GRADIENTS) and of(found, GATHERED)[0].num_bytes == 2000
    assert of(listed("dp4 zero1", kinds), GATHERED)[0].num_bytes == 0


def test_an_unknown_rule_or_option_is_refused():
    with pytest.raises(MeshwrightError, match=r"Y001.*steps"):
        read("steps")
    with pytest.raises(MeshwrightError, match=r"Y002.*no option 'h'"):
        read("step:h=8")
