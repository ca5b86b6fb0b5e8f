"""Adversarial steps (ConAdv): the algorithm by hand in float64 under several plans, what the pass that finds
perturbations costs and what hides it, and what is refused."""

import json

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.cli import main
from meshwright.graph import ATTRIBUTES, KIND
from meshwright.run.mesh import alone, build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run import small
from tests.run.processes import launch_kept as forked

PART, STEPS, LR = 0.1, 4, 0.3
MODEL = small.llama(layers=2, tied_embeddings=True)
SETTINGS = Settings(precision="float64", lr=LR, weight_decay=0.0, clip=0.0)
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32", optimizer="sgd", adversarial=PART)


@pytest.fixture(scope="module")
def by_hand():
    """2106.00221 in one process with plain autograd and plain SGD: each sequence's embeddings are moved by a part of
    their length along the gradient of the step before's weights, and both losses count a half."""
    plain = msgspec.structs.replace(TRAIN, adversarial=0.0)
    trainer = Trainer(MODEL, mw.parse_plan("tp1 mb4").on(1), plain, alone(), settings=SETTINGS)
    stage = trainer.stages[0]
    weights = list(stage.parameters())
    for weight in weights:
        if hasattr(weight, "sink"):
            del weight.sink

    def embedded(step):
        (found,) = trainer.passes(small.batch(TRAIN, MODEL.vocab, step))
        return stage.embedding(found), found

    def loss(x, found):
        for layer in stage.layers:
            x = layer(x, found)
        return stage.head(x, found)

    def perturbed(step):
        x, found = embedded(step)
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(x, found), x)
        out = torch.zeros_like(slope)
        for b in range(x.shape[1]):
            out[:, b] = PART * x[:, b].norm() * slope[:, b] / slope[:, b].norm()
        return out.detach()

    losses, moved = [], perturbed(0)
    for step in range(STEPS):
        x, found = embedded(step)
        both = (loss(x, found) + loss(x + moved, found)) / 2
        gradients = torch.autograd.grad(both, weights)
        moved = perturbed(step + 1)  # by weights that are not updated yet
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight -= LR * gradient
        losses.append(float(both.detach()))
    return losses


def trained(rank, words):
    plan = mw.parse_plan(words)
    trainer = Trainer(MODEL, plan, TRAIN, build(plan), settings=SETTINGS)
    dp, losses = trainer.mesh["dp"], []
    for step in range(STEPS):
        now, then = (small.batch(TRAIN, MODEL.vocab, s, dp.size, dp.index) for s in (step, step + 1))
        losses.append(trainer.step(now, then).loss)
    return losses


@pytest.mark.parametrize("words", ["dp2 mb1 zero1", "dp1 pp2 mb1", "dp1 tp2 mb2 full"])
def test_steps_are_those_by_hand(by_hand, words):
    assert forked(2, trained, words)[0] == pytest.approx(by_hand, rel=1e-12)
    assert by_hand[-1] < by_hand[0]


def test_the_pass_is_hidden_by_sums_of_gradients_and_else_costs_a_forward_and_a_backward_to_inputs():
    """Over slow links a step takes as long as one of twice the batch, since the pass runs beside the sum. On one device
    it takes longer by that pass, and nothing else."""
    model, asked = mw.load_model("gpt2"), mw.parse_train("batch=64,seq=1024,adversarial=0.05")
    twice = mw.parse_train("batch=128,seq=1024")
    slow, plan = mw.load_cluster("4x1xa100,10gbe"), mw.parse_plan("dp4 mb4")
    one, other = (mw.predict(model, slow, train, plan) for train in (asked, twice))
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-9)
    alone = mw.load_cluster("1x1xa100")
    one, other = (mw.predict(model, alone, train, mw.parse_plan("mb4")) for train in (asked, twice))
    spans = one.timeline
    there = spans.attributes[ATTRIBUTES.index("microbatch")] >= 2 * 16
    kinds = [int((spans.kind[there] == KIND[name]).sum()) for name in ("F", "B", "W", "BW")]
    assert kinds == [16, 16, 0, 0]
    found = (spans.end_s - spans.start_s)[there].sum()
    assert one.step_time_s - other.step_time_s == pytest.approx(found, rel=1e-3)
    assert other.step_time_s / 4 < found < other.step_time_s / 2  # all but gradients of weights, of half of the passes


def test_a_run_goes_on_with_what_it_had_found(tmp_path, capsys):
    """Four steps in two runs are those of one, to the last bit: the perturbation of the next text, by weights that are
    gone, is in the checkpoint. With another workload it is found anew."""
    config = tmp_path / "config.json"
    shape = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 257, "max_position_embeddings": 32}
    config.write_text(json.dumps(shape | {"tie_word_embeddings": True}))

    def losses(out, steps, *more, train="batch=2,seq=16,dtype=fp32,adversarial=0.1", plan="mb1"):
        argv = ["run", str(config), "--on", "1x1xh100", "--train", train, "--plan", plan, "--dtype", "float64"]
        argv += ["--data", "sample", "--device", "cpu", "--steps", str(steps), "--out", str(tmp_path / out), *more]
        assert main([*argv, "--json", "--lr", "0.01"]) == 0
        return json.loads(capsys.readouterr().out)["losses"]

    whole = losses("one", 4)
    assert losses("two", 2) + losses("two", 4, "--resume") == whole
    assert len(losses("two", 5, "--resume", train="batch=2,seq=16,dtype=fp32")) == 1
    assert len(losses("two", 6, "--resume")) == 1


@pytest.mark.parametrize(
    ["words", "train", "code", "said"],
    [
        ("dp2 mb1 fsdp", "", "P080", "zero"),
        ("dp2 mb1 sync=local:h=4", "", "P080", "drop sync="),
        ("dp2 mb1", ",optimizer=momentum,clusters=2", "W002", "drop clusters="),
        ("dp2 mb1", ",phase=lora", "W002", "phase="),
    ],
)
def test_what_does_not_go_with_it_is_said(words, train, code, said, capsys):
    argv = ["predict", "gpt2", "--on", "2x1xa100,10gbe", "--train", f"batch=8,seq=256,adversarial=0.1{train}"]
    assert main([*argv, "--plan", words]) == 2
    err = capsys.readouterr().err
    assert code in err and said in err and "adversarial" in err
