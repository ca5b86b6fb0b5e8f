"""Rounds with outer steps between real processes, in float64: as by hand, and from checkpoints as if never stopped."""

import pytest

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.run.settings import Settings
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import local, rounds
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
SGD = Train(global_batch=4, seq_len=16, dtype="fp32", optimizer="sgd")
#: A replica clips the norm of its own gradient, all together that of the sum: neither.
UNCLIPPED = Settings(precision="float64", lr=1e-2, clip=0.0)
NESTEROV = {"rate": 0.7, "momentum": 0.9}


@pytest.mark.parametrize(
    ["plan", "words", "hand"],
    [
        ("dp2 mb1", "diloco:h=2", {"h": 2, **NESTEROV}),
        ("dp4 hsdp2 mb1", "diloco:h=2,rate=0.5,momentum=0", {"h": 2, "rate": 0.5, "momentum": 0.0}),
        ("dp2 pp2 mb1", "diloco:h=4,parts=2", {"h": 4, "parts": 2, **NESTEROV}),
        ("dp2 mb1", "diloco:h=4,parts=3,pattern=sequential", {"h": 4, "parts": 3, "strided": False, **NESTEROV}),
        ("dp2 mb1", "diloco:h=3,delay=2", {"h": 3, "delay": 2, **NESTEROV}),
        # layers are updated and sent within the backward, before the norm to clip is known
        ("dp2 mb1", "diloco:h=4,parts=2,start=backward", {"h": 4, "parts": 2, "clip": 0.0, **NESTEROV}),
        ("dp2 pp2 mb1", "diloco:h=3,delay=1,start=backward", {"h": 3, "delay": 1, "clip": 0.0, **NESTEROV}),
        (
            "dp2 tp2 mb2",
            "streaming-diloco:h=4,parts=4,delay=3,codec=none",
            {"h": 4, "parts": 4, "delay": 3, "mix": 0.5, **NESTEROV},
        ),
    ],
)
def test_rounds_with_an_outer_step_train_as_by_hand(plan, words, hand):
    last, text = 7, f"{plan} sync={words}"
    got = launch(parse(text).layout.num_ranks, local.trained, llama(), text, TRAIN, last)
    ((*expected,),) = launch(1, _by_hand, llama(), TRAIN, last, {"replicas": 2, **hand})
    for replica, (seen, state) in enumerate(expected):
        mine = [rank for rank in got if rank[0] == replica]
        for _, losses, *_ in mine:
            assert losses == [pytest.approx(pair, rel=1e-9) for pair in seen]
        apart = differences(local.whole([held for _, _, held, *_ in mine], "param"), local.whole([state], "param"))
        assert max(apart.values()) <= 1e-9


def _by_hand(rank, model, train, last, hand):
    return rounds.by_hand(rank, model, train, last, **hand)


@pytest.mark.parametrize(
    ["words", "hand"],
    [
        ("eager-diloco:h=2", {"h": 2, "eager": True, **NESTEROV}),
        ("eager-diloco:h=3,parts=2", {"h": 3, "parts": 2, "eager": True, **NESTEROV}),
        (
            "co2:h=2,rate=0.8,momentum=0.5,clip=0.02,penalty=1.5",
            {"h": 2, "eager": False, "rate": 0.8, "momentum": 0.5, "clip": 0.02, "penalty": 1.5},
        ),
    ],
)
def test_rounds_that_come_late_train_as_by_hand(words, hand):
    got = launch(2, local.trained, llama(), f"dp2 mb1 sync={words}", TRAIN, 7)
    (expected,) = launch(1, _late, llama(), TRAIN, 7, {"replicas": 2, **hand})
    for (_, _, held, *_), state in zip(got, expected, strict=True):
        apart = differences(local.whole([held], "param"), local.whole([state], "param"))
        assert max(apart.values()) <= 1e-9


def _late(rank, model, train, last, hand):
    return rounds.late_by_hand(rank, model, train, last, **hand)


def test_rounds_of_a_plain_step_taken_as_they_are_are_data_parallelism_to_the_last_digits():
    """The mean of the parameters after plain SGD steps is the step along the mean gradient, in float64 up to the
    rounding of a sum; with two replicas that see the same sequences there is none, and it is the same to the last bit.
    """
    got, usual = (
        launch(2, local.trained, llama(), f"dp2 mb1 sync={words}", SGD, 4, UNCLIPPED)
        for words in ("diloco:h=1,rate=1,momentum=0", "step")
    )
    apart = differences(*(local.whole([some[0][2]], "param") for some in (got, usual)))
    assert max(apart.values()) <= 1e-15  # four steps of a few units in the last place of numbers about one
    alike, both = (launch(2, _alike, f"dp2 mb1 sync={w}") for w in ("diloco:h=1,rate=1,momentum=0", "step"))
    assert alike == both


def _alike(rank, words):
    """Every parameter after steps in which both replicas train on the same rows."""
    trainer, out = local.begun(llama(), words, SGD, UNCLIPPED), []
    for step in range(4):
        result = trainer.step(local.small.batch(SGD, 67, step, 2, 0))
        out.append(result.loss)
    trainer.settle()
    return [p.values.tolist() for p in trainer.pieces() if p.key.partition("@")[0] == "param"]


@pytest.mark.parametrize(
    ["plan", "then", "half"],
    [
        ("dp2 mb1 sync=diloco:h=2", "", 3),
        ("dp2 mb1 sync=streaming-diloco:h=4,parts=2,delay=3", "", 3),  # a part is on its way, in four bits
        ("dp2 pp2 mb1 sync=streaming-diloco:h=4,parts=2,delay=1,codec=none", "", 4),
        ("dp2 mb1 sync=eager-diloco:h=2,codec=int8", "", 3),
        ("dp2 mb1 sync=eager-diloco:h=3,parts=3,codec=fp4", "", 4),
        ("dp4 zero1 shard2 mb1 sync=diloco:h=3,delay=1", "dp4 hsdp2 mb1 sync=diloco:h=3,delay=1", 3),
    ],
)
def test_training_goes_on_from_within_a_round_with_what_is_on_its_way(plan, then, half, tmp_path):
    for (on, kept), (again, found) in launch(
        parse(plan).layout.num_ranks, rounds.resumed, llama(), plan, TRAIN, tmp_path, half, then
    ):
        if then:
            assert [v for pair in again for v in pair] == pytest.approx([v for pair in on for v in pair], rel=1e-9)
        else:
            assert on == again
            assert [(a[0], a[-1].tolist()) for a in kept] == [(b[0], b[-1].tolist()) for b in found]


@pytest.mark.parametrize(
    ["plan", "then", "taken", "momentum"],
    [
        ("dp4 mb1 sync=diloco:h=3", "dp2 tp2 mb1 sync=diloco:h=2", "param", True),
        ("dp4 mb1 sync=diloco:h=3", "dp2 pp2 zero1 mb1", "param", False),
        # parts are never all the same: what replicas had in common at the last exchange
        ("dp4 mb1 sync=streaming-diloco:h=3,parts=2,delay=1", "dp2 tp2 mb1 sync=diloco:h=2", "round_start", True),
    ],
)
def test_another_plan_takes_what_replicas_have_in_common_and_the_outer_momentum(plan, then, taken, momentum, tmp_path):
    ranks = launch(4, rounds.laid_anew, llama(), plan, TRAIN, tmp_path, 3, then)
    first, after = [ranks[0][0]], [ranks[0][1], ranks[1][1]] if "tp2" in then else [one[1] for one in ranks]
    wanted = [("param", taken), *([("outer_momentum", "outer_momentum")] if momentum else [])]
    for key, before in wanted:
        found = local.whole(after, key)
        assert max(differences(local.whole(first, before), found).values()) == 0
        assert max(float(one.abs().max()) for one in found.values()) > 1e-3


def test_parts_send_what_their_simulated_tasks_do_at_their_steps():
    """Bytes of every exchange of a round, by the step that it begins in; fp32 is stored and trained."""
    text = "dp2 mb1 sync=streaming-diloco:h=4,parts=2,delay=1"
    read, made = parse(text), llama(vocab=64)
    (sent,) = {tuple(one[3]) for one in launch(2, local.trained, made, text, TRAIN, 4, local.FP32)}
    run = simulate(read, made, load("2xh100"), TRAIN, standard())
    tasks = [run.lowered.programs[key] for key in run.lowered.graph.cost_key.tolist()]
    moved = [(m.op, m.num_bytes) for part in (0, 1) for p in tasks if p.every == 4 and p.part == part for m in p.moves]
    assert sorted(sent) == sorted(moved)
    assert sum(size for _, size in sent) == pytest.approx(2 * made.num_params / 2, rel=0.01)  # both ranks' four bits
