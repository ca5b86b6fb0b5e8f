"""Direct feedback in real processes: the algorithm by hand, the same under every plan, matrices of the seed alone, and
a run that goes on as it would have."""

import json
from functools import cache

import pytest
import torch

import meshwright as mw
from meshwright.cli import main
from meshwright.plan.facets.feedback import read
from meshwright.run.feedback import DirectFeedback
from meshwright.run.mesh import alone
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, batch, differences, gpt, llama, train_steps

TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32")
MODELS = {
    "llama": llama,
    "tied": lambda: gpt(tied_embeddings=True),
    "experts": lambda: llama(experts=4, top_k=2, moe_ffn=24),
}


@cache
def reference(model, way):
    return launch(1, train_steps, MODELS[model](), f"tp1 mb8 feedback={way}", TRAIN, 3)


@pytest.mark.parametrize("way", ["dfa", "dfa:micro", "dfa:micro,shared"])
def test_gradients_are_those_of_cut_graphs_by_hand(way):
    """Each block, or part of one, is differentiated by itself: its output's gradient is the error of the last block's
    output, which plain autograd finds through the head, times the matrix of the place."""
    model, direct = llama(layers=2), read(way)
    settings = Settings(precision="float64", lr=1e-3)
    trainer = Trainer(model, mw.parse_plan(f"tp1 mb8 feedback={way}").on(1), TRAIN, alone(), settings=settings)
    got = {}

    def keep():
        got.update((h.parameter.name, h.gradient.clone()) for h in trainer.optimizer.held)

    trainer.before_update.append(keep)
    (stage,), weights = trainer.stages.values(), {}
    for weight in stage.parameters():
        weights[weight.info.name] = weight
    asked = batch(TRAIN, model.vocab, 0)
    sinks = {name: weight.__dict__.pop("sink") for name, weight in weights.items()}
    (found,) = trainer.passes(asked)
    outs, x = [], stage.embedding(found)
    for place, layer in enumerate(stage.layers):
        attention, mlp = layer.parts
        middle = x + attention.after(attention.body(attention.enter(x), found))
        if direct.micro:
            outs.append((f"feedback.{place}.0", middle))
            middle = middle.detach().requires_grad_()
        out = middle + mlp.after(mlp.body(mlp.enter(middle), found))
        outs.append((f"feedback.{place}.1", out))
        x = out.detach().requires_grad_()
    loss = stage.head(x, found)
    head = [name for name in weights if name not in {n for n, w in weights.items() if w in set(layer_weights(stage))}]
    wanted = dict(zip(head, torch.autograd.grad(loss, [weights[n] for n in head], retain_graph=True)))
    (error,) = torch.autograd.grad(loss, x)
    matrices = DirectFeedback(direct, model.hidden, settings.seed, error)
    for name, out in outs:
        matrix = matrices.matrix("feedback" if direct.shared else name)
        names = list(weights)
        given = torch.autograd.grad(out, [weights[n] for n in names], error @ matrix, allow_unused=True)
        for n, gradient in zip(names, given):
            if gradient is not None:
                wanted[n] = wanted.get(n, 0) + gradient
    for name, sink in sinks.items():
        weights[name].sink = sink
    trainer.step(asked)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name].view(-1), gradient.reshape(-1), rtol=1e-10, atol=1e-14)


def layer_weights(stage):
    return [weight for module in (stage.embedding, stage.layers) for weight in module.parameters()]


@pytest.mark.parametrize(
    "model, plan, way",
    [
        ("llama", "dp2 zero1 mb2", "dfa"),
        ("llama", "dp1 pp2 mb2", "dfa:micro"),
        ("llama", "dp2 pp2 mb1 gpipe zero1", "dfa:micro,shared"),
        ("llama", "dp1 pp2 mb1 interleaved vpp2 full", "dfa:micro"),
        ("llama", "dp1 pp2 mb1 zb-h1 overlap=dp", "dfa"),
        ("llama", "dp1 pp2 mb1 dualpipev vpp2", "dfa"),
        ("llama", "dp1 pp4 mb1", "dfa:shared"),
        ("llama", "dp1 tp2 pp2 mb2", "dfa:micro"),
        ("tied", "dp1 pp2 mb2 loss=fused", "dfa"),
        ("experts", "dp2 ep2 pp2 mb1", "dfa:micro"),
    ],
)
def test_every_plan_trains_as_one_process(model, plan, way):
    expected, ranks = reference(model, way), mw.parse_plan(plan).layout.num_ranks
    got = launch(ranks, train_steps, MODELS[model](), f"{plan} feedback={way}", TRAIN, 3)
    assert got[0][0] == [pytest.approx(one, rel=1e-9) for one in expected[0][0]]
    for which in (1, 2):
        assert max(differences(assemble(got, which), assemble(expected, which)).values()) <= 1e-9


def test_matrices_are_of_the_seed_and_the_place_and_as_wide_as_published():
    one, other = (DirectFeedback(read("dfa"), 256, seed, torch.empty(0)) for seed in (0, 1))
    assert torch.equal(one.matrix("feedback.3.1"), one.matrix("feedback.3.1"))
    assert not torch.equal(one.matrix("feedback.3.1"), other.matrix("feedback.3.1"))
    assert not torch.equal(one.matrix("feedback.3.1"), one.matrix("feedback.2.1"))
    drawn = one.matrix("feedback.3.1")
    assert drawn.abs().max() <= 1 / 16 and float(drawn.std()) == pytest.approx(1 / 16 / 3**0.5, rel=0.02)


def test_a_run_goes_on_with_the_same_matrices_which_no_checkpoint_has(tmp_path, capsys):
    config = tmp_path / "config.json"
    shape = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 257, "max_position_embeddings": 32}
    config.write_text(json.dumps(shape))

    def losses(out, steps, *more, way="dfa:micro"):
        argv = ["run", str(config), "--on", "1x1xh100", "--train", "batch=2,seq=16,dtype=fp32", "--dtype", "float64"]
        argv += ["--plan", f"mb1 feedback={way}", "--data", "sample", "--device", "cpu", "--steps", str(steps)]
        assert main([*argv, "--out", str(tmp_path / out), *more, "--json", "--lr", "0.01"]) == 0
        return json.loads(capsys.readouterr().out)["losses"]

    def written(out):
        return sorted(f.stat().st_size for f in (tmp_path / out).rglob("*.bin") if f.is_file())

    whole = losses("one", 4)
    assert losses("two", 2) + losses("two", 4, "--resume") == whole
    plain = losses("three", 4, way="chain")
    assert plain[0] == whole[0] and plain[1:] != whole[1:] and written("three") == written("one")
