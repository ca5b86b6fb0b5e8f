"""Gradients that travel in a code between real processes: bytes, sums, what codes keep, and checkpoints of it."""

from collections import Counter

import numpy as np
import pytest
import torch

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.sync.codecs import codec
from meshwright.sync.policy import read as policy
from tests.run import codes, local
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
LARGER = Train(global_batch=8, seq_len=16, dtype="fp32")


def test_the_code_that_changes_nothing_is_ddp_bit_for_bit():
    plain, coded = (launch(4, codes.trained, llama(), "dp4 mb1", TRAIN, 3, local.SETTINGS, way) for way in (0, 1))
    assert [one[0] for one in plain] == [one[0] for one in coded]  # losses and norms in float64
    for one, other in zip(plain, coded):
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(one[1], other[1], strict=True))
        assert one[2] == other[2]


WORDS = ["fp16", "fp8", "int4", "dynamic8", "terngrad", "sign", "topk:share=0.1", "randomk", "dgc", "powersgd:rank=2"]


@pytest.mark.parametrize(
    ["plan", "words", "model"],
    [
        *(("dp2 mb1", words, {}) for words in WORDS),
        ("dp2 mb1", "espresso:codec=dgc,coded=0", {}),
        ("dp2 pp2 mb1", "espresso:codec=int4,coded=1", {"tied_embeddings": True}),
        ("dp4 zero1 shard2 mb1", "espresso:codec=int4,coded=0", {}),
        ("dp2 mb1", "int8", {"tied_embeddings": True}),
        ("dp2 mb1", "powersgd", {"experts": 4, "top_k": 2, "moe_ffn": 24}),
        ("dp2 pp2 mb1", "powersgd", {"tied_embeddings": True}),
        ("dp2 tp2 mb2", "int8", {"kv_heads": 1}),  # a key-value head that both tensor-parallel ranks hold
        ("dp2 tp2 mb2", "powersgd:rank=2", {}),
        ("dp4 zero1 shard2 mb1", "int4", {}),
    ],
)
def test_bytes_on_the_wire_of_a_step_are_those_that_the_simulated_one_moves(plan, words, model):
    """Every rank's exchanges of one step; replicas hold the same parameters after it."""
    text, made = f"{plan} sync={words}", llama(vocab=64, **model)
    read = parse(text)
    got = launch(read.layout.num_ranks, codes.trained, made, text, TRAIN, 1, local.FP32)
    run = simulate(read, made, load(f"{read.layout.num_ranks}xh100"), TRAIN, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    rank_of = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    for number, (_, _, sent) in enumerate(got):
        stage = number // read.layout.stride("pp") % read.layout.pp
        moved = [
            (move.op, move.num_bytes)
            for task in range(graph.num_tasks)
            if rank_of[task] == stage and programs[graph.cost_key[task]].kind == "exchange"
            for move in programs[graph.cost_key[task]].moves
            if move.op != "all_gather"
            or not codec(policy(words).codec).summed  # but not the norm, a number of four bytes
            if (move.op, move.num_bytes) != ("all_reduce", 4)
        ]
        # a table on both ends of the pipeline is summed over them first, as it is: 64 rows of 32 numbers
        sent, moved = ([one for one in some if one != ("all_reduce", 64 * 32 * 4)] for some in (sent, moved))
        if read.layout.zero:  # parameters of two bytes less are gathered on a queue of their own
            moved = [one for one in moved if one[0] != "all_gather" or one in sent]
        assert sorted(sent) == sorted(moved)
    if read.layout.num_ranks == read.layout.dp and not read.layout.zero:
        assert max(differences(*(local.whole([held], "param") for _, held, _ in got)).values()) == 0


@pytest.mark.parametrize(
    ["plan", "words"],
    [("dp2 zero1 mb4", "qsdp"), ("dp2 zero2 mb1", "qsdp:weights=4,grads=3"), ("dp4 hsdp2 mb2", "qsdp:weights=5")],
)
def test_quantised_gathers_and_scatters_are_as_many_bytes_as_the_simulated_ones(plan, words):
    """Bytes of a step by operation, and no rank holds other parameters than the rest. Torch gathers embedding and head
    once for forward and backward where they are fully sharded; a prediction counts both."""
    text, made = f"{plan} sync={words}", llama(vocab=64)
    read = parse(text)
    got = launch(read.layout.num_ranks, codes.trained, made, text, LARGER, 1, local.FP32)
    run = simulate(read, made, load(f"{read.layout.num_ranks}xh100"), LARGER, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    moved = [m for key in graph.cost_key if programs[key].kind == "exchange" for m in programs[key].moves]
    told = totals((m.op, m.num_bytes) for m in moved if (m.op, m.num_bytes) != ("all_reduce", 4))
    if read.layout.zero == 3:
        # half of 64 x 32 numbers is a bucket, in 5 bits; of the table and the head, and the final norm's 32 numbers
        again = 2 * 2 * (1024 * 5 // 8 + 8) + 32 * 4
        told["all_gather"] -= again * read.num_microbatches(8)
    for seen, _, sent in got:
        assert totals(sent) == told and seen == got[0][0]


def totals(some):
    """Bytes of all exchanges by operation."""
    found = Counter()
    for op, size in some:
        found[op] += size
    return found


@pytest.mark.parametrize("words", ["int4", "local:h=2,codec=terngrad"])
def test_what_tensor_parallel_ranks_hold_alike_stays_alike(words):
    """Codes that depend on the values beside one: vectors of norms and the one key-value head, bit for bit."""
    got = launch(4, codes.trained, llama(kv_heads=1), f"dp2 tp2 mb2 sync={words}", TRAIN, 2, local.SETTINGS)
    for one, other in ((got[0], got[1]), (got[2], got[3])):
        mine, others = ({(k, p[0], a): v for k, p, a, _, v in held} for held in (one[1], other[1]))
        alike = [key for key in mine if "norm" in key[1] or ".kv." in key[1]]
        assert len(alike) > 15 and all(torch.equal(mine[key], others[key]) for key in alike)
        assert any(not torch.equal(mine[key], others[key]) for key in mine if key not in alike)


@pytest.mark.parametrize("words", ["int4", "sign", "topk:share=0.1", "randomk:share=0.1", "powersgd:rank=2"])
def test_what_a_code_loses_arrives_later_or_is_still_kept(words):
    """Over rounds, what all ranks put in is what came out and what they keep: nothing is lost, in float64."""
    got = launch(2, codes.sums, words, 5)
    put = sum(one[0] for one in got)
    kept = sum(one[2]["code_lost"] for one in got)
    for _, out, _ in got:
        assert torch.equal(out, got[0][1])
        assert torch.allclose(out + kept, put, atol=1e-12, rtol=0)
    assert kept.abs().max() > 0.1  # numbers that are about one


def test_ranks_are_chosen_by_what_gradients_lose_alike_on_all_copies_and_send_no_more():
    """The first step has one rank for all, later ones those that were measured: fewer bytes, the same on both."""
    got = launch(2, codes.trained, llama(), "dp2 mb1 sync=l-greco:rank=4,every=1", TRAIN, 3, local.SETTINGS)
    sent = [[size for op, size in one[2] if op == "all_reduce"] for one in got]
    steps = np.array(sent[0]).reshape(3, -1).sum(1)
    assert sent[0] == sent[1] and max(steps[1:]) <= steps[0] and len(set(steps)) > 1
    assert max(differences(*(local.whole([held], "param") for _, held, _ in got)).values()) == 0


@pytest.mark.parametrize("words", ["l-greco:of=topk,share=0.1,every=1", "l-greco:of=qsgd,every=1"])
def test_shares_and_bits_are_chosen_by_layer_alike_on_all_copies_for_no_more_bytes(words):
    """The first step is in the usual code for all layers, as predicted; later ones in what was measured to lose no more
    in all."""
    plan, model = f"dp2 mb1 sync={words}", llama(vocab=64)
    got = launch(2, codes.trained, model, plan, TRAIN, 2, local.FP32)
    sent = [[size for op, size in one[2] if op == "all_gather"] for one in got]
    first, later = np.array(sent[0]).reshape(2, -1).tolist()
    assert sent[0] == sent[1] and sum(later) < sum(first) and len({b / a for a, b in zip(first, later)}) > 1
    run = simulate(parse(plan), model, load("2xh100"), TRAIN, standard())
    moves = [m for k in run.lowered.graph.cost_key for m in run.lowered.programs[k].moves if m.op == "all_gather"]
    assert sorted(m.num_bytes for m in moves) == sorted(first)
    assert max(differences(*(local.whole([held], "param") for _, held, _ in got)).values()) == 0


def test_messages_of_any_length_are_sent_as_long_as_the_longest():
    """A code whose bytes are known once they are there: copies hold the same parameters, near what is predicted."""
    got = launch(2, codes.trained, llama(), "dp2 mb1 sync=mgard", TRAIN, 2, local.FP32)
    assert got[0][2] == got[1][2] and ("all_reduce", 8) in got[0][2]
    assert max(differences(*(local.whole([held], "param") for _, held, _ in got)).values()) == 0


def test_momentum_gathers_what_waits_and_is_forgotten_where_a_value_was_sent():
    """A round by hand, of one value in two: the larger is sent, the smaller waits with its momentum."""
    (put, _, kept), *_ = launch(2, codes.sums, "dgc:share=0.5,momentum=0.5", 1)
    sent = kept["code_lost"] == 0
    assert sent.sum() == 250 and put[sent].abs().min() >= put[~sent].abs().max()
    assert torch.equal(kept["code_momentum"], torch.where(sent, 0.0, put))
    assert torch.equal(kept["code_lost"], torch.where(sent, 0.0, put))


@pytest.mark.parametrize(
    "plan",
    [
        "dp2 mb1 sync=powersgd:rank=2",
        "dp2 mb1 sync=dgc:share=0.1",
        "dp2 mb1 sync=espresso:codec=dgc,share=0.1,coded=1",
        "dp2 mb1 sync=l-greco:rank=2,every=1",
        "dp2 mb1 sync=l-greco:of=topk,share=0.1,every=1",
        "dp2 mb1 sync=terngrad",
        "dp4 zero1 shard2 mb1 sync=local:h=2,codec=powersgd",
    ],
)
def test_training_goes_on_from_a_checkpoint_with_what_the_code_kept(plan, tmp_path):
    for on, again, kept, found in launch(
        parse(plan).layout.num_ranks, codes.resumed, llama(), plan, TRAIN, tmp_path, 2
    ):
        assert on == again
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(kept, found, strict=True))


def test_what_codes_kept_is_laid_anew_for_another_number_of_copies(tmp_path):
    """Four copies become two that shard their optimizer over two ranks: what all keep together stays."""
    words = "sync=topk:share=0.1"
    got = launch(4, codes.resumed, llama(), f"dp4 mb1 {words}", TRAIN, tmp_path, 2, f"dp4 zero1 shard2 mb1 {words}")
    before, after = ({}, {})
    for _, _, kept, found in got:
        for totals, pieces in ((before, kept), (after, found)):
            for _, name, values in pieces:
                totals[name] = totals.get(name, 0.0) + values.sum().item()
    assert before.keys() == after.keys() and any(abs(value) > 1e-6 for value in before.values())
    assert all(after[name] == pytest.approx(before[name], rel=1e-9, abs=1e-12) for name in before)
