"""The spread of replicas' gradients: measured as by hand whatever the plan, and what batches and rates make of it."""

import json

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run import launch as started
from meshwright.run.job import Job
from meshwright.run.loop import train
from meshwright.run.settings import Settings
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as parse_train
from tests.run import local, small
from tests.run.processes import launch_kept as launch

TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32", optimizer="sgd", grow=0.5, most=64, align=0.9)


def seen(rank, model, text, work):
    """The squares that a step saw, its parts' variances and rates, and the parameters after it."""
    trainer = local.begun(model, text, work, Settings(precision="float64", lr=1e-2, clip=0.0, weight_decay=0.0))
    local.steps(trainer, 0, 1)
    one = trainer.seen
    return one.squares, one.square, trainer.spread.smoothed, trainer.optimizer.rates, local.state(trainer)


def own(rank, model, replicas):
    """The squared length of each replica's share of the gradient, of their sum, and the gradient by tensor, in one
    process."""
    shares = []
    for index in range(replicas):
        work = msgspec.structs.replace(TRAIN, global_batch=8 // replicas, grow=0.0, most=0, align=0.0)
        trainer = local.begun(model, "dp1 tp1 mb1", work, Settings(precision="float64", lr=0.0, clip=0.0))
        found = []
        trainer.before_update.append(lambda found=found, trainer=trainer: found.extend(_gradients(trainer)))
        trainer.step(small.batch(TRAIN, model.vocab, 0, replicas, index))
        shares.append({name: values / replicas for name, values in small.assemble([(found,)], 0).items()})
    return shares


def _gradients(trainer):
    return [(small.plain(h.parameter), h.start, h.stop, h.gradient.clone()) for h in trainer.optimizer.held]


def part(name):
    return 1 if ".layers." in name else 0 if "embed" in name else 2


@pytest.mark.parametrize("plan", ["dp4 mb1", "dp2 tp2 mb2 zero1"])
def test_squares_of_replicas_gradients_are_those_of_each_alone(plan):
    model, replicas = small.llama(layers=1), parse(plan).layout.dp
    (shares,) = launch(1, own, model, replicas)
    whole = {name: sum(share[name] for share in shares) for name in shares[0]}
    apart = []
    for number in range(3):
        names = [name for name in whole if part(name) == number]
        each = sum(share[name].square().sum() for share in shares for name in names).item()
        both = sum(whole[name].square().sum() for name in names).item()
        apart.append(1 - (both - each) / ((replicas - 1) * each))
    for squares, square, smoothed, rates, _ in launch(4, seen, model, plan, TRAIN):
        assert squares == pytest.approx(sum(v.square().sum().item() for s in shares for v in s.values()), rel=1e-9)
        assert square == pytest.approx(sum(v.square().sum().item() for v in whole.values()), rel=1e-9)
        assert smoothed == pytest.approx(apart, rel=1e-9)  # the first step is not smoothed
        assert rates == pytest.approx([(apart[1] / one) ** 0.5 for one in apart], rel=1e-9)


def test_rates_of_parts_multiply_the_steps_of_their_tensors():
    """Plain gradient steps: with the rates of AGVM each tensor's is that of its part times the one without."""
    model = small.llama(layers=1)
    plain, found = msgspec.structs.replace(TRAIN, align=0.0), launch(2, seen, model, "dp2 mb1", TRAIN)[0]
    before, without, aligned = (
        small.assemble([([one[1:] for one in state if one[0] == "param"],)], 0)
        for state in (
            launch(2, seen_still, model)[0],
            launch(2, seen, model, "dp2 mb1", plain)[0][4],
            found[4],
        )
    )
    rates = found[3]
    assert rates[1] == 1 and abs(rates[0] - 1) > 0.01
    for name, first in before.items():
        assert torch.allclose(aligned[name] - first, rates[part(name)] * (without[name] - first), atol=1e-12)


def seen_still(rank, model):
    return local.state(local.begun(model, "dp2 mb1", TRAIN))


def job(corpus, out, steps, **more):
    work = parse_train("batch=4,seq=16,dtype=fp32,grow=0.2,most=32,align=0.9")
    model = small.llama(vocab=257, layers=1)
    said = {"model": model, "plan": parse("dp2 mb1"), "train": work, "text": str(corpus), "quiet": True}
    return Job(**said, steps=steps, out=str(out), settings=Settings(lr=3e-3), **more)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_the_batch_it_had_grown_to(tmp_path, monkeypatch):
    """Sequences are taken one after the other whatever the batch, and after a checkpoint as without one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = tmp_path / "text.txt"
    corpus.write_text("".join(f"{n} squared is {n * n}; " for n in range(2000)))

    def run(asked):
        return started.start(train, asked, num_ranks=2, device="cpu")

    whole = run(job(corpus, tmp_path / "a", 4))
    run(job(corpus, tmp_path / "b", 2))
    rest = run(job(corpus, tmp_path / "b", 4, resume=True))
    batches = [line["batch"] for line in lines(tmp_path / "a")]
    assert batches == whole["batches"] and batches[0] == 4 and batches == sorted(batches) and batches[-1] > 4
    assert [line["tokens"] for line in lines(tmp_path / "a")] == [16 * sum(batches[: i + 1]) for i in range(4)]
    assert rest["losses"] == whole["losses"][2:] and rest["batches"] == batches[2:]


@pytest.mark.parametrize(
    ["plan", "said"],
    [
        ("dp4 fsdp", "layout.zero = 3.*take zero1"),
        ("dp2 cp2", "ranks of cp share a sequence"),
        ("dp1 tp4", "one replica has no spread"),
        ("dp4 sync=int8", "gradients are not summed as they are"),
    ],
)
def test_a_plan_whose_replicas_have_no_whole_gradients_of_their_own_cannot_be_run_so(plan, said):
    with pytest.raises(MeshwrightError, match=f"(?s)P033.*{said}"):
        raise MeshwrightError(unexecutable(parse(plan + " mb1"), small.llama(), TRAIN))


@pytest.mark.parametrize(
    "words", ["batch=8,seq=16,grow=0.5", "batch=8,seq=16,most=64", "batch=8,seq=16,grow=0.5,most=4"]
)
def test_a_batch_that_grows_says_how_far(words):
    with pytest.raises(MeshwrightError, match="W002"):
        parse_train(words)


def test_words_of_a_growing_batch_are_read_back_and_a_prediction_says_what_its_largest_takes():
    work = parse_train("batch=8,seq=512,grow=0.5,most=64,align=0.97,tokens=1m")
    assert parse_train(work.text()) == work
    model, cluster = mw.load_model("llama3.2-1b"), mw.load_cluster("8xh100")
    found = mw.predict(model, cluster, work, parse("dp8 mb1"))
    largest = mw.predict(model, cluster, parse_train("batch=64,seq=512"), parse("dp8 mb1")).step_time_s
    (said,) = [line for line in found.cautions if "may grow from 8 to 64" in line]
    assert found.step_time_s < largest and "all tokens take from" in said
