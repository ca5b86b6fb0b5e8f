"""Local steps: each replica trains alone and parameters are averaged every h steps, as by hand, in float64."""

from functools import cache

import pytest

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import local
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TOLERANCE = 1e-9
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
MODELS = {
    "llama": llama,
    "tied": lambda: llama(tied_embeddings=True),
    "experts": lambda: llama(experts=4, top_k=2, moe_ffn=24, shared_ffn=16),
}


@cache
def by_hand(model, replicas, every, last, moments=False):
    return launch(1, local.by_hand, MODELS[model](), TRAIN, replicas, every, last, moments)[0]


def compare(model, text, replicas, every, last, moments=False):
    plan = parse(text)
    got = launch(plan.layout.num_ranks, local.trained, MODELS[model](), text, TRAIN, last)
    for replica, (seen, state) in enumerate(by_hand(model, replicas, every, last, moments)):
        mine = [rank for rank in got if rank[0] == replica]
        for _, losses, *_ in mine:
            for ours, theirs in zip(losses, seen, strict=True):
                assert ours == pytest.approx(theirs, rel=TOLERANCE)
        for key in ("param", "exp_avg", "exp_avg_sq"):
            apart = differences(local.whole([held for _, _, held, *_ in mine], key), local.whole([state], key))
            worst = max(apart, key=apart.get)
            assert apart[worst] <= TOLERANCE, (key, worst, apart[worst])
    return got


@pytest.mark.parametrize(
    ["model", "plan", "replicas", "last"],
    [
        ("llama", "dp2 mb1", 2, 5),  # two averages, and a step of the third round
        ("llama", "dp2 tp2 mb2", 2, 4),
        ("llama", "dp2 pp2 mb1", 2, 4),
        ("llama", "dp2 cp2 mb1", 2, 4),
        ("tied", "dp2 pp2 mb1", 2, 4),
        ("experts", "dp2 mb1", 2, 3),
        ("llama", "dp4 zero2 shard2 mb1", 2, 5),  # sharded inside a replica of two ranks
        ("llama", "dp4 hsdp2 mb1", 2, 5),
        ("llama", "dp4 shard2 mb1", 2, 3),
    ],
)
def test_replicas_train_as_by_hand(model, plan, replicas, last):
    compare(model, f"{plan} sync=local:h=2", replicas, 2, last)


def test_rounds_that_grow_as_the_rate_falls_train_as_by_hand():
    """Rates 1, 0.9 ... 0.1 make rounds of floor((1.5 / rate)^2) steps: of 2 from step 0 (2.25) and 3 from step 2
    (3.5), then those that are left."""
    compare("llama", "dp2 mb1 sync=qsr:h=1,growth=1.5,rate=1,steps=10,falls=linear", 2, (2, 5), 6)


def test_averaged_moments_are_those_averaged_by_hand():
    compare("llama", "dp2 mb1 sync=local:h=2,moments=mean", 2, 2, 4, moments=True)


#: Half a step of int8 over the largest change of a block, and bfloat16's of its 8 bits: what a round may add.
LOSSY = {"bf16": 2.0**-8, "int8": 1 / 127}


@pytest.mark.parametrize("code", list(LOSSY))
def test_encoded_changes_are_averaged_within_the_error_of_the_code_and_alike_on_all_replicas(code):
    got = launch(2, local.trained, llama(), f"dp2 mb1 sync=local:h=2,codec={code}", TRAIN, 4)
    (_, plain), _ = by_hand("llama", 2, 2, 4)
    one, other = (local.whole([held], "param") for _, _, held, *_ in got)
    assert max(differences(one, other).values()) == 0
    apart = differences(one, local.whole([plain], "param"))
    assert 0 < max(apart.values()) <= 4 * LOSSY[code]


@pytest.mark.parametrize(
    ["plan", "h", "code", "model"],
    [
        ("dp2 mb1", 2, "none", "llama"),
        ("dp2 mb1", 2, "bf16", "llama"),
        ("dp2 mb1", 2, "int8", "llama"),
        ("dp2 mb1", 2, "fp4", "llama"),  # a code without a version for tensors goes through host memory
        ("dp2 tp2 mb1", 2, "int8", "llama"),
        ("dp2 pp2 mb1", 2, "none", "tied"),
        ("dp4 zero1 shard2 mb1", 2, "int8", "llama"),
    ],
)
def test_bytes_on_the_wire_of_a_round_are_those_that_the_simulated_step_moves(plan, h, code, model):
    """The norm apart, which is a number; fp32 is stored and trained."""
    text = f"{plan} sync=local:h={h},codec={code}"
    read, made = parse(text), llama(vocab=64, tied_embeddings=model == "tied")
    got = launch(read.layout.num_ranks, local.trained, made, text, TRAIN, h, local.FP32)
    run = simulate(read, made, load(f"{read.layout.num_ranks}xh100"), TRAIN, standard())
    graph, programs = run.lowered.graph, run.lowered.programs
    rank_of = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    for number, (_, _, _, sent, exchanged) in enumerate(got):
        stage = number // read.layout.stride("pp") % read.layout.pp
        averaged = [
            (move.op, move.num_bytes)
            for task in range(graph.num_tasks)
            if rank_of[task] == stage and programs[graph.cost_key[task]].every == h
            for move in programs[graph.cost_key[task]].moves
        ]
        if model == "tied":  # a table that two ranks hold is apart from the other parameters of its layers
            sent, averaged = ([("all_reduce", sum(size for _, size in some))] for some in (sent, averaged))
        assert sorted(sent) == sorted(averaged)
        assert exchanged == (model == "tied" or read.layout.zero > 0)
