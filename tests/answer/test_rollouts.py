"""Reinforcement-learning jobs: a step is put together from what its parts take by themselves, and wrong words are
refused."""

import json

import pytest

import meshwright as mw
from meshwright.answer.predict import predict
from meshwright.answer.rollouts import folded, predict_rollouts
from meshwright.answer.serving import predict_serving
from meshwright.cli import main
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan
from meshwright.spec.dimensions import transformer
from meshwright.spec.rollout import parse
from meshwright.spec.serve import parse as parse_serve
from meshwright.spec.workload import parse as parse_train
from meshwright.work import Collective

MODEL = transformer(layers=4, hidden=1024, heads=8, ffn=4096, vocab=32000, max_seq_len=8192, name="small")
COSTS = standard(load_framework("fused"))
ALIKE = "prompts=32,samples=4,prompt=512,output=1536"
LONG_TAIL = "prompts=8,samples=4,prompt=256,output=lognormal:median=400;sigma=1,cut=1792"


def asked(words, *, on="16xh100", plan="fsdp", train="batch=1,seq=4096"):
    cluster = mw.load_cluster(on)
    return predict_rollouts(MODEL, cluster, parse_train(train), mw.parse_plan(plan), parse(words), costs=COSTS)


def trained(plan, on, batch):
    """A step on packed trajectories of 2,048 tokens, two a sequence."""
    train = parse_train(f"batch={batch},seq=4096,lengths=2048,pack=balanced")
    return predict(MODEL, mw.load_cluster(on), train, mw.parse_plan(plan), costs=COSTS, detail=False)


def generated(on, plan="tp1"):
    """The seconds until the last of 128 answers of 1,536 tokens is there."""
    serve = parse_serve("batch=128,prompt=512,output=1536")
    found = predict_serving(MODEL, mw.load_cluster(on), serve, mw.parse_plan(plan), detail=False)
    return 128 * 1536 / found.metrics.throughput_tokens_per_s


def test_a_synchronous_step_is_generation_training_and_the_gathering_of_parameters():
    found = asked(f"{ALIKE},forwards=0")
    # 128 trajectories of 2,048 tokens fill 64 sequences of 4,096
    train = trained("fsdp", "16xh100", 64)
    sent = found.sending
    mesh = Mesh(Plan(layout=Layout(dp=16)), mw.load_cluster("16xh100"))
    whole = Collective(op="all_gather", num_bytes=2.0 * MODEL.num_params, group=mesh.along(1, 16))
    assert sent.gathered_s == pytest.approx(COSTS.price(whole, found.cluster.islands[0].device).seconds, rel=0.3)
    assert sent.sent_s == 0
    expected = generated("16xh100") + train.step_time_s + sent.seconds
    assert found.step_s.value == pytest.approx(expected, rel=1e-6)
    assert found.trained_tokens == pytest.approx(128 * 2048) and found.answered_tokens == pytest.approx(128 * 1536)
    assert found.trajectories_per_s == pytest.approx(128 / expected, rel=1e-6)
    assert found.staleness == (0.0, 0)


def test_with_a_step_apart_it_is_the_longer_of_the_two_on_the_devices_of_each():
    found = asked(f"{ALIKE},forwards=0,devices=8,control=one-step")
    train, takes = trained("fsdp", "8xh100", 64), generated("8xh100")
    expected = max(takes, train.step_time_s) + found.sending.seconds
    assert found.step_s.value == pytest.approx(expected, rel=1e-6)
    assert found.staleness == (1.0, 1)
    idle = {one.side: one.seconds["idle"] for one in found.spent}
    assert idle["training"] == pytest.approx(expected - train.step_time_s - found.sending.seconds, rel=1e-6)


def test_forward_passes_and_updates_are_counted():
    one, more = asked(f"{ALIKE},forwards=0"), asked(f"{ALIKE},forwards=2")
    train = trained("fsdp", "16xh100", 64)
    forwards = more.spent[0].seconds["forward passes"]
    assert more.step_s.value - one.step_s.value == pytest.approx(forwards, rel=1e-6)
    # a forward pass is a third of a step where products take all of its time, and more where the host's launches do
    assert 2 / 3 * 0.9 * train.step_time_s < forwards < train.step_time_s
    # four updates on 16 sequences each
    four = asked(f"{ALIKE},forwards=0,updates=4")
    assert four.spent[0].seconds["training"] == pytest.approx(4 * trained("fsdp", "16xh100", 16).step_time_s, rel=1e-6)


def test_generation_that_never_waits_is_faster_the_older_parameters_may_be_and_never_older():
    found = [asked(f"{LONG_TAIL},devices=8,staleness={bound}") for bound in (1, 3)]
    assert [one.staleness[1] <= bound for one, bound in zip(found, (1, 3))] == [True] * 2
    times = [one.step_s.value for one in found]
    assert times[1] <= times[0] < asked(f"{LONG_TAIL},devices=8,control=sync").step_s.value


def test_the_best_split_of_the_devices_is_the_fastest_of_those_that_were_tried():
    found = asked(f"{LONG_TAIL},devices=best,staleness=2,against=sync", on="4x4xh100,ib400")
    assert [(one.generating, one.training) for one in found.splits] == [(4, 12), (8, 8), (12, 4)]
    assert found.step_s.value == min(one.step_s for one in found.splits)
    alone = asked(LONG_TAIL, on="4x4xh100,ib400")
    assert found.speedup == pytest.approx(alone.step_s.value / found.step_s.value)
    for one in found.spent:
        assert sum(one.seconds.values()) == pytest.approx(found.step_s.value)


def test_state_of_training_takes_room_from_the_cache_of_the_same_devices():
    together, apart = asked(ALIKE, plan="zero1"), asked(f"{ALIKE},devices=8", plan="zero1")
    kept = together.memory[1].alive["state of training"]
    rank = trained("zero1", "16xh100", 64).memory[0].alive
    assert kept == rank["parameters"] + rank["optimizer"]
    caches = [one.memory[1].alive["keys and values"] for one in (together, apart)]
    assert caches[1] - caches[0] == pytest.approx(kept, rel=1e-3)


def test_replicas_beyond_sixteen_are_simulated_by_some_of_them_with_their_share_of_the_prompts():
    assert folded(16, 100) == (16, 100)
    assert folded(96, 512) == (15, 80)  # 16 would have 85.3
    assert folded(64, 512) == (16, 128)


WRONG = [
    ("prompts=0,prompt=8,output=8", "W002"),
    ("prompt=8,output=8", "W003"),
    ("prompts=8", "W003"),
    ("prompts=8,prompt=8,output=8,rate=3", "W001"),
    ("prompts=8,prompt=8,output=8,prompts=9", "W005"),
    ("prompts=8,prompt=8,output=8,updates=3", "W005"),
    ("prompts=8,prompt=8,output=8,staleness=2", "W005"),
    ("prompts=8,prompt=8,output=8,against=sync", "W005"),
    ("prompts=8,prompt=8,output=8,devices=8,control=async", "W003"),
    ("prompts=8,prompt=8,output=8,devices=8,control=sync,staleness=2", "W005"),
    ("prompts=8,prompt=8,output=8,devices=8,control=one-step,staleness=2", "W005"),
    ("prompts=8,prompt=8,output=8,devices=8,interrupt=no", "W005"),
    ("prompts=8,prompt=8,output=8,devices=16", "W020"),
    ("prompts=8,prompt=8,output=8,devices=5", "W020"),
    ("prompts=8,prompt=8,output=8,devices=8,plan=a=[on=0:4]", "P040"),
    ("prompts=8,prompt=8,output=6000", "W020"),
    ("prompts=8,prompt=8,output=8,policy=nobody", "W013"),
    ("prompts=8,prompt=8,output=8,plan=tp3", "P011"),
]


@pytest.mark.parametrize(("words", "code"), WRONG)
def test_what_is_wrong_with_rollouts_is_refused_with_its_code(words, code):
    with pytest.raises(MeshwrightError) as caught:
        asked(words)
    assert {d.code for d in caught.value.diagnostics} == {code}


def test_words_of_rollouts_are_read_back():
    for words in (ALIKE, f"{LONG_TAIL},devices=8,staleness=2,interrupt=no,against=sync", f"{ALIKE},devices=best"):
        assert parse(parse(words).text()) == parse(words)
    assert parse(f"{ALIKE},devices=8,staleness=2").synchronous() == parse(ALIKE)


def test_the_command_answers_and_refuses_what_rollouts_say_themselves(capsys):
    command = [
        "predict",
        "qwen3-0.6b",
        "--on",
        "8xh100",
        "--plan",
        "fsdp",
        "--rollout",
        "prompts=16,prompt=128,output=64",
    ]
    assert main([*command, "--train", "seq=2048", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trajectories_per_s"] == pytest.approx(16 / found["step_s"]) and found["staleness_max"] == 0
    assert main([*command, "--train", "seq=2048"]) == 0
    assert "generate, then train" in capsys.readouterr().out
    assert main([*command, "--train", "batch=3,seq=2048", "--days", "3"]) == 2
    said = capsys.readouterr().err
    assert "error[W005]" in said and "error[X004]" in said
    assert main([*command, "--train", "seq=2048", "--trace", "t.json"]) == 2
    assert "no timeline of rollouts is written" in (said := capsys.readouterr().err) and "--report FILE writes" in said
