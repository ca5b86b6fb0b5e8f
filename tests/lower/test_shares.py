"""Batch shares: slices on faster devices run more microbatches of one step."""

import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.graph import KIND
from meshwright.lower import lower
from meshwright.plan import check, parse
from meshwright.plan.slices import kinds
from meshwright.plan.toml import dump, loads
from meshwright.simulate.step import simulate
from meshwright.spec import cluster
from meshwright.spec.model import load
from meshwright.spec.workload import Train
from tests.random_plans import LLAMA, MIXTURE

WHERE = cluster.load("8xa100-80 + 8xh100")
TRAIN = Train(global_batch=64, seq_len=128)
INSIDE = "tp2 pp2 dp4 mb1 order=tp-cp-pp-dp"  # slices 0, 1 on the first island, 2, 3 on the second


def codes(words, model=LLAMA, where=WHERE, train=TRAIN):
    return [d.code for d in check(parse(words), model, where, train)]


def test_shares_are_words_and_toml_that_read_back():
    plan = parse(f"{INSIDE} shares=10,22")
    assert plan.layout.shares == (10, 22)
    assert parse(plan.text()) == plan
    assert loads(dump(plan)) == plan


def test_kinds_of_slices_are_told_apart_by_the_devices_of_their_pipeline():
    inside, across = parse(INSIDE).layout, parse("tp2 pp2 dp4 mb1").layout
    assert [(k.members, {d.name for d in k.devices}) for k in kinds(inside, WHERE)] == [
        ((0, 1), {"a100_80gb_sxm"}),
        ((2, 3), {"h100_sxm"}),
    ]
    (only,) = kinds(across, WHERE)  # every pipeline begins on one island and ends on the other
    assert only.members == (0, 1, 2, 3)
    assert [d.name for d in only.devices] == ["a100_80gb_sxm", "h100_sxm"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{INSIDE} shares=10,22", []),
        (f"{INSIDE} shares=10,20", ["P025"]),  # 2 x 10 + 2 x 20 = 60 of 64 sequences
        (f"{INSIDE} shares=10,11,11", ["P025"]),
        ("tp2 pp2 dp4 mb1 shares=10,22", ["P025"]),  # one kind
        (f"{INSIDE} shares=10,22 zero1", []),
        (f"{INSIDE} shares=10,22 zero2", ["P026"]),
        ("tp4 dp4 mb1 shares=10,22 fsdp", ["P026"]),
        (f"{INSIDE} shares=10,22 fsdp", []),  # gathered once a step
        (f"{INSIDE} shares=9,23 interleaved vpp2", ["S013", "S013"]),  # interleaved takes whole groups of pp
    ],
)
def test_shares_that_mean_nothing_are_refused(words, expected):
    assert codes(words) == expected


def test_a_share_of_no_microbatch_is_no_word():
    with pytest.raises(MeshwrightError, match="P002"):
        codes(f"{INSIDE} shares=0,32")


def test_experts_exchange_tokens_between_slices_that_run_as_many_microbatches():
    assert codes("tp2 dp8 ep4 etp1 mb1 shares=6,10", MIXTURE) == []
    assert "P026" in codes("tp2 dp8 ep8 etp1 mb1 shares=6,10 order=dp-tp-cp-pp", MIXTURE) or (
        "P026" in codes("dp16 ep16 mb1 shares=2,6", MIXTURE)
    )


def test_every_slice_runs_its_share_and_gradients_are_exchanged_once():
    plan = parse(f"{INSIDE} shares=10,22 zero1")
    lowered = lower(plan, LLAMA, WHERE, TRAIN)
    graph = lowered.graph
    rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    passes = graph.kind == KIND["BW"]
    microbatches = [len(np.unique(graph.attribute("microbatch")[passes & (rank == r)])) for r in range(4)]
    assert microbatches == [10, 10, 22, 22]
    even = lower(parse(f"{INSIDE} zero1"), LLAMA, WHERE, TRAIN).graph
    for kind in ("reduce_scatter", "all_gather", "optimizer"):
        assert (graph.kind == KIND[kind]).sum() == (even.kind == KIND[kind]).sum()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved vpp2", "zb-h1", "zb-v"])
@pytest.mark.parametrize("zero", ["", "zero1", "fsdp"])
def test_equal_shares_are_no_shares(schedule, zero):
    words = f"{INSIDE} {schedule} {zero}"
    said, plain = (simulate(parse(w), LLAMA, WHERE, TRAIN, Costs()) for w in (f"{words} shares=16,16", words))
    assert said.step_time_s == plain.step_time_s
    np.testing.assert_array_equal(np.sort(said.end_s), np.sort(plain.end_s))


def test_the_faster_slices_take_more_and_the_step_is_shorter():
    """Peaks are as 989 to 312 (the data sheets): a quarter of the batch for the first island."""
    model, train = load("llama3-8b"), Train(global_batch=64, seq_len=4096)
    seconds = {
        a: predict(model, WHERE, train, parse(f"{INSIDE} zero1 shares={a},{32 - a}"), detail=False).step_time_s
        for a in (4, 8, 10, 12, 16, 20)
    }
    assert min(seconds, key=seconds.get) == 8
    assert seconds[4] > seconds[8] < seconds[10] < seconds[12] < seconds[16] < seconds[20]


def ranks(words, where=WHERE, train=TRAIN, model=LLAMA):
    return predict(model, where, train, parse(words), detail=False).memory


def test_a_rank_holds_its_part_of_the_state_and_no_other_byte_moves():
    """By hand: hold=1,3 over 2 and 2 replicas is 1/8 and 3/8 of the moments and masters instead of 1/4 each."""
    even, uneven = (ranks(f"{INSIDE} zero1 {own}") for own in ("", "hold=1,3"))
    for before, after, part in zip(even, uneven, (0.5, 0.5, 1.5, 1.5)):
        assert after.alive["optimizer"] == pytest.approx(part * before.alive["optimizer"])
        assert {k: v for k, v in after.alive.items() if k not in ("optimizer", "allocator slack")} == {
            k: v for k, v in before.alive.items() if k not in ("optimizer", "allocator slack")
        }


@pytest.mark.parametrize("zero", ["zero1", "zero2", "fsdp"])
def test_equal_parts_and_sizes_are_no_parts_and_sizes(zero):
    words = f"tp2 dp8 mb2 {zero} order=tp-cp-pp-dp"
    said, plain = (
        simulate(parse(w), LLAMA, WHERE, TRAIN, Costs()) for w in (f"{words} shares=4,4 mbs=2,2 hold=5,5", words)
    )
    assert said.step_time_s == plain.step_time_s
    for mine, theirs in zip(said.lowered.static_bytes, plain.lowered.static_bytes, strict=True):
        assert mine == pytest.approx(theirs)


def test_exchanges_carry_the_largest_shard_for_every_rank():
    """hold=1,3 over 2 and 2 replicas: the largest shard is 3/8 of the whole, 1.5 times an even one."""
    even, uneven = (lower(parse(f"{INSIDE} zero1 {own}"), LLAMA, WHERE, TRAIN) for own in ("", "hold=1,3"))
    sizes = [
        sorted(m.num_bytes for p in one.programs if p.kind == "exchange" for m in p.moves if m.op != "all_reduce")
        for one in (even, uneven)
    ]
    assert sizes[1] == pytest.approx([1.5 * size for size in sizes[0]])


def test_sharded_parameters_go_with_microbatches_of_unequal_size():
    """By hand: 4 ranks of 2 sequences and 4 of 6 in each of 2 microbatches are 64; the faster take three quarters."""
    even, own = "tp2 dp8 mb4 fsdp order=tp-cp-pp-dp", "tp2 dp8 mb6 fsdp order=tp-cp-pp-dp shares=2,2 mbs=2,6"
    model, train = load("llama3-8b"), Train(global_batch=64, seq_len=4096)
    seconds = [predict(model, WHERE, train, parse(words), detail=False).step_time_s for words in (even, own)]
    assert seconds[1] < 0.7 * seconds[0]
    saved = [r.alive["activations"] for r in ranks(own, train=train, model=model)]
    assert saved[1] == pytest.approx(3 * saved[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{INSIDE} hold=1,2", "nothing is sharded"),
        (f"{INSIDE} zero1 shard2 hold=1,2", "makes several"),
        (f"{INSIDE} zero1 hold=1,2,3", "names 3 kinds"),
        (f"{INSIDE} zero1 hold=0,0", "holds any"),
        (f"{INSIDE} zero1 mbs=1,1", "their number for each kind"),
        (f"{INSIDE} zero1 shares=16,16 mbs=1,2", "mb says 1"),
        (f"{INSIDE} zero1 hold=1,2 offload=optimizer", "slices that are alike"),
    ],
)
def test_parts_and_sizes_that_mean_nothing_are_refused(words, said):
    found = check(parse(words), LLAMA, WHERE, TRAIN)
    assert any(said in one.message for one in found), found


def test_a_kind_of_devices_computes_and_stores_in_its_own_precision():
    """By hand: beside fp32 gradients a rank in fp32 stores 4 + 8 bytes a parameter, one in fp16 2 + 4 + 8."""
    train = Train(global_batch=64, seq_len=128, dtype="fp32")
    plain, mixed, low = (ranks(f"{INSIDE} {words}", train=train) for words in ("", "dtypes=fp32,fp16", "fp16"))
    assert [m.alive for m in mixed] == [m.alive for m in (*plain[:2], *low[2:])]
    for one, bytes_each in ((mixed[0], 4 + 8), (mixed[2], 2 + 4 + 8)):
        state = one.alive["parameters"] + one.alive["optimizer"]
        assert state == pytest.approx(bytes_each / 4 * one.alive["gradients"])
    model, long = load("llama3-8b"), Train(global_batch=64, seq_len=2048, dtype="fp32")
    seconds = [
        predict(model, WHERE, long, parse(f"{INSIDE} {w}"), detail=False).step_time_s for w in ("", "dtypes=fp16,fp32")
    ]
    assert seconds[1] < 0.5 * seconds[0]  # the slower devices were waited for


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dtypes=fp32,fp16 zero1", "gathered in one precision"),
        ("dtypes=fp32,fp16 bf16", "computes in bf16"),
        ("dtypes=fp32,fp16 grads=bf16", "fp32 gradients and masters"),
        ("dtypes=fp32", "names 1 kinds"),
    ],
)
def test_precisions_that_replicas_cannot_step_together_in_are_refused(words, said):
    assert any(said in one.message for one in check(parse(f"{INSIDE} {words}"), LLAMA, WHERE, TRAIN))


def test_a_kind_without_matrix_units_for_its_precision_is_said():
    cautions = [
        predict(LLAMA, WHERE, TRAIN, parse(f"tp2 dp8 mb1 order=tp-cp-pp-dp dtypes={own}"), detail=False).cautions
        for own in ("fp8,bf16", "bf16,fp8")
    ]
    assert [sum("a100_80gb_sxm has no fp8" in one for one in said) for said in cautions] == [1, 0]
