"""Plans for the devices that are left: the batch stays, replicas or stages are fewer."""

import pytest

from meshwright.answer.replan import replanned, shrunk, with_devices
from meshwright.plan import check, parse
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=4, hidden=32, heads=4, kv_heads=2, vocab=260, ffn=48, gated=True, max_seq_len=64)
TRAIN = Train(global_batch=16, seq_len=32, dtype="bf16")


def test_every_plan_for_fewer_devices_trains_the_whole_batch():
    for text in ("dp4", "pp2 dp2", "pp4", "tp2 dp2", "dp4 zero2"):
        plan = parse(text).on(4)
        for devices in (1, 2, 3):
            for one, counts in shrunk(plan, TRAIN, devices):
                assert one.layout.num_ranks <= devices
                assert len(counts) == one.layout.dp
                assert sum(counts) * one.pipeline.microbatch == TRAIN.global_batch
                assert max(counts) - min(counts) <= 1


def test_replicas_that_exchange_after_every_microbatch_have_as_many_each():
    assert all(len(set(counts)) == 1 for _, counts in shrunk(parse("dp4 zero2").on(4), TRAIN, 3))
    assert any(len(set(counts)) == 2 for _, counts in shrunk(parse("dp4 zero1").on(4), TRAIN, 3))


def test_three_of_four_replicas_take_six_five_and_five_of_sixteen_microbatches():
    found = replanned(MODEL, load("4xh100"), TRAIN, parse("dp4").on(4), 3)
    assert (found.plan.layout.dp, found.counts) == (3, (6, 5, 5))


def test_the_layers_of_a_lost_stage_move_to_the_stages_that_are_left():
    found = [one for one, _ in shrunk(parse("pp4").on(4), TRAIN, 3) if one.layout.pp == 3]
    assert [one.layout.dp for one in found] == [1]
    assert not check(found[0], MODEL, with_devices(load("4xh100"), 3), TRAIN)  # four layers on three stages


def test_no_plan_is_found_where_a_tensor_parallel_group_is_not_whole():
    assert replanned(MODEL, load("4xh100"), TRAIN, parse("tp4").on(4), 3) is None


@pytest.mark.parametrize(("devices", "arities"), [(64, (8, 8)), (56, (8, 7)), (4, (4, 1)), (13, (1, 13))])
def test_a_smaller_cluster_has_whole_nodes_where_the_devices_fill_them(devices, arities):
    smaller = with_devices(load("64xh100"), devices)
    assert smaller.num_devices == devices
    assert tuple(level.arity for level in smaller.islands[0].levels) == arities


def test_fewer_devices_fail_less_often():
    whole, half = load("64xh100"), with_devices(load("64xh100"), 32)
    assert half.interruption_hours() == pytest.approx(2 * whole.interruption_hours())
