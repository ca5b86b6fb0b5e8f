"""Replicas that exchange updates in place of gradients: as by hand in float64, in as many bytes as predicted."""

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import codes, local, updates
from tests.run.processes import launch_kept as launch
from tests.run.small import batch, differences, llama

TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32", optimizer="lion")
PLAIN = msgspec.structs.replace(TRAIN, optimizer="sgd")
DEMO = "sync=demo:chunk=8,k=3,momentum=0.9"


def work(plan):
    return PLAIN if "demo" in plan else TRAIN


@pytest.mark.parametrize(
    ["plan", "rule", "how"],
    [
        ("dp4 mb1 sync=dist-lion", "lion", "vote"),
        ("dp2 mb1 sync=dist-lion:combine=mean", "lion", "mean"),
        (f"dp2 mb1 {DEMO}", "demo", "dct:chunk=8,k=3"),
    ],
)
def test_replicas_that_bring_updates_of_their_own_are_the_papers_algorithm(plan, rule, how):
    count, model = parse(plan).layout.dp, llama(layers=1)
    (expected,) = launch(1, updates.by_hand, model, TRAIN, count, 3, rule, how)
    for _, held, _ in launch(count, codes.trained, model, plan, work(plan), 3, local.SETTINGS):
        apart = differences(local.whole([held], "param"), local.whole([expected], "param"))
        assert max(apart.values()) < 1e-9, max(apart, key=apart.get)


@pytest.mark.parametrize("plan", ["dp2 tp2 mb1 sync=dist-lion:combine=mean"])
def test_votes_of_values_that_are_cut_are_those_of_whole_ones(plan):
    """Two copies in tensor-parallel or pipeline parts, against two that hold everything."""
    words = plan.split()[-1]
    whole = launch(2, codes.trained, llama(layers=1), f"dp2 mb1 {words}", TRAIN, 3, local.SETTINGS)
    got = launch(4, codes.trained, llama(layers=1), plan, TRAIN, 3, local.SETTINGS)
    apart = differences(local.whole([held for _, held, _ in got], "param"), local.whole([whole[0][1]], "param"))
    assert max(apart.values()) < 1e-9, max(apart, key=apart.get)


@pytest.mark.parametrize(
    "plan",
    [
        "dp2 pp2 mb1 sync=dist-lion",
        "dp4 zero1 shard2 mb1 sync=dist-lion:combine=mean",
        f"dp2 tp2 mb1 {DEMO}",
        "dp2 mb1 sync=dct:chunk=16,k=5",
    ],
)
def test_bytes_on_the_wire_of_a_step_are_those_that_the_simulated_one_moves(plan):
    read, model = parse(plan), llama(vocab=64, layers=2)
    got = launch(read.layout.num_ranks, codes.trained, model, plan, work(plan), 1, local.FP32)
    run = simulate(read, model, load(f"{read.layout.num_ranks}xh100"), work(plan), standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    rank_of = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    for number, (_, _, sent) in enumerate(got):
        stage = number // read.layout.stride("pp") % read.layout.pp
        tasks = [t for t in range(graph.num_tasks) if rank_of[t] == stage]
        moves = [
            m
            for t in tasks
            if programs[graph.cost_key[t]].kind == "exchange"
            for m in programs[graph.cost_key[t]].moves
        ]
        moved = [(m.op, m.num_bytes) for m in moves if m.op != "all_reduce" or m.num_bytes != 4]  # the norm
        if read.layout.zero:  # the groups' own sums, and parameters, which are gathered on a queue of their own
            width = model.num_params
            sent, moved = ([one for one in some if one[1] < width / 2] for some in (sent, moved))
        assert sorted(sent) == sorted(moved) and sent


def test_training_goes_on_from_a_checkpoint_with_every_replicas_momentum(tmp_path):
    got = launch(2, codes.resumed, llama(layers=1), "dp2 mb1 sync=dist-lion", TRAIN, tmp_path, 1)
    for on, again, kept, found in got:
        assert on == again
        assert kept and all(torch.equal(a[-1], b[-1]) for a, b in zip(kept, found, strict=True))
    assert any(not torch.equal(a[-1], b[-1]) for a, b in zip(got[0][2], got[1][2]))  # each has its own


def test_a_loss_that_is_no_number_on_one_replica_moves_none(tmp_path):
    for before, after, updated in launch(2, broken, llama(layers=1), "dp2 mb1 sync=dist-lion"):
        assert not updated and torch.equal(before, after)


def broken(rank, model, text):
    trainer = local.begun(model, text, TRAIN)
    local.steps(trainer, 0, 1)
    before = trainer.optimizer.held[0].master.clone()
    if rank == 1:
        momentum = trainer.exchanges[0].code.momentum
        momentum[0] = float("nan")
    dp = trainer.mesh["dp"]
    result = trainer.step(batch(TRAIN, model.vocab, 1, dp.size, dp.index))
    return before, trainer.optimizer.held[0].master.clone(), result.updated


@pytest.mark.parametrize(
    ["plan", "train", "said"],
    [
        ("dp4 sync=dist-lion", PLAIN, "Y003.*exchanges updates of lion.*say optimizer=lion"),
        ("dp4 sync=demo", TRAIN, "Y003.*exchanges updates of sgd.*say optimizer=sgd"),
        ("dp4 fsdp sync=dist-lion", TRAIN, "Y003.*scatters sums.*take zero1 with shard2"),
        ("pp4 dp1 sync=demo", PLAIN, "Y003.*the plan has one"),
    ],
)
def test_a_plan_whose_replicas_have_no_updates_of_their_own_is_refused_with_what_has(plan, train, said):
    with pytest.raises(MeshwrightError, match=f"(?s){said}"):
        mw.predict(llama(), load("4xh100"), train, parse(plan + " mb1"))


def test_a_prediction_of_signs_takes_a_fraction_of_the_links_and_says_that_it_is_approximate():
    """llama3.2-1b over 10 Gbit/s: of 32 bits that go round twice, one does."""
    model, cluster = mw.load_model("llama3.2-1b"), load("8x1xh100,10gbe")
    words = {"plain": "dp8 mb1", "votes": "dp8 mb1 sync=dist-lion", "demo": "dp8 mb1 sync=demo"}
    found = {
        name: mw.predict(
            model,
            cluster,
            mw.parse_train(f"batch=8,seq=2048,optimizer={'sgd' if name == 'demo' else 'lion'}"),
            parse(plan),
        )
        for name, plan in words.items()
    }
    assert found["votes"].attribution["dp"] < found["plain"].attribution["dp"] / 8
    # of 4096 values 32 coefficients of 6 bytes: 0.33 bytes a value from seven others, for the ring's seven
    assert found["demo"].attribution["dp"] < found["plain"].attribution["dp"] / 8
    assert any("own gradients" in line for line in found["votes"].cautions)
    state = found["plain"].memory[0].alive["optimizer"]
    assert found["votes"].memory[0].alive["optimizer"] == state  # a momentum each, of its own gradients
