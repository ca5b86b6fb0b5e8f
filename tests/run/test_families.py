"""Families whose layers differ from Llama's, against transformers in float64: logits, loss, every gradient, the files
of weights, and the same under plans of several processes."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.plan import parse
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.published import published_tensors
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.weights import load_weights, save_weights
from meshwright.spec.matrices import num_matrices
from meshwright.spec.model import from_config
from meshwright.spec.workload import Train
from tests.run import small_families
from tests.run.processes import launch
from tests.run.small import assemble, plain

pytestmark = pytest.mark.slow

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
#: Largest difference, relative to a tensor's largest element. In float64 orders of addition leave 1e-13.
TOLERANCE = 1e-9


def published(rank: int, folder: Path) -> dict[str, tuple]:
    """Random models of transformers, by name: configuration, parameters, tokens, loss, logits and gradients."""
    import transformers

    # its norms, softmax, rotations and routers ask for float32 by name, whatever the model's type
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    out = {}
    for name, config in small_families.CONFIGS.items():
        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(name.partition(",")[0], **config)
        made._attn_implementation = made._experts_implementation = "eager"
        net = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float64).eval()
        with torch.no_grad():  # norms, biases and what chooses experts too
            for tensor in [*net.parameters(), *(b for n, b in net.named_buffers() if n.endswith("correction_bias"))]:
                tensor.add_(torch.randn_like(tensor) * 0.1)
        tokens = torch.randint(0, made.vocab_size, (TRAIN.global_batch, TRAIN.seq_len + 1))
        logits = net(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        net.save_pretrained(folder / name)
        gradients = folder / name / "gradients"
        # written as weights are, so that what it names and cuts apart is named and cut alike
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for name_there, buffer in net.named_buffers():
                if name_there.endswith("correction_bias"):  # it chooses, and no gradient passes through a choice
                    buffer.zero_()
        net.save_pretrained(gradients)
        count = sum(p.numel() for p in net.parameters())
        out[name] = (made.to_json_string(use_diff=False), count, tokens, loss.item(), logits.detach())
    return out


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("published")
    return folder, launch(1, published, folder)[0]


def model_of(found: tuple):
    import json

    return from_config(json.loads(found[0]), name="small")


def ours(rank: int, reference, plans: dict[str, str], folder: Path | None = None) -> dict[str, tuple]:
    """A step of our own under plans, by name: loss, logits where one process has all, and gradients."""
    where, all_found = reference
    out = {}
    for name, text in plans.items():
        found = all_found[name]
        model, plan = model_of(found), parse(text)
        layout = plan.layout
        plan = plan.on(layout.tp * layout.pp * layout.cp * max(1, layout.dp or 1))
        settings = Settings(precision="float64", lr=0.0, weight_decay=0.0)
        trainer = Trainer(model, plan, TRAIN, build(plan), settings=settings)
        load_weights(where / name, trainer.pieces(), model, trainer.mesh["world"])
        trainer.publish()
        trainer.settle()
        dp, index = trainer.mesh["dp"].size, trainer.mesh["dp"].index
        rows = found[2].chunk(dp)[index]
        logits, gradients = None, []
        if folder is not None:
            (one,) = trainer.passes(Batch(rows, None))
            (stage,) = trainer.stages.values()
            with torch.no_grad():
                x = stage.embedding(one)
                for layer in stage.layers:
                    x = layer(x, one)
                logits = stage.head.logits(x).transpose(0, 1)
            save_weights(folder / name, trainer.pieces(), model, trainer.mesh["world"])
        held = trainer.optimizer.held
        trainer.before_update.append(
            lambda held=held, into=gradients: into.extend(
                (plain(h.parameter), h.start, h.stop, h.gradient.clone()) for h in held
            )
        )
        loss = trainer.step(Batch(rows, None)).loss
        out[name] = (loss, logits, gradients)
    return out


@pytest.fixture(scope="module")
def alone(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    plans = dict.fromkeys(small_families.CONFIGS, "tp1 mb4")
    return folder, launch(1, ours, reference, plans, folder)[0]


@pytest.fixture(scope="module")
def together(reference):
    """Both processes' steps under the first plans, and under the second ones."""
    return [(plans, launch(2, ours, reference, plans)) for plans in (small_families.PLANS, small_families.MORE)]


def check(name: str, reference, loss: float, gradients: dict[str, torch.Tensor]) -> None:
    folder, found = reference
    assert loss == pytest.approx(found[name][3], rel=TOLERANCE)
    expected = {}
    for file in (folder / name / "gradients").glob("*.safetensors"):
        expected |= load_file(file)
    assert gradients.keys() == expected.keys()
    # a gradient that is nothing but rounding has no digits to compare
    least = 1e-6 * max(float(t.abs().max()) for t in expected.values())
    for key, tensor in expected.items():
        apart = float((gradients[key] - tensor).abs().max()) / max(float(tensor.abs().max()), least)
        assert apart <= TOLERANCE, (name, key, apart)


@pytest.mark.parametrize("name", small_families.CONFIGS)
def test_parameters_are_as_many_as_transformers_has(name, reference):
    model = model_of(reference[1][name])
    buffers = sum(
        mlp.experts
        for block in map(model.block, range(model.num_layers))
        if (mlp := block.mlp) and getattr(mlp, "router_bias", False)
    )
    assert model.num_params == reference[1][name][1] + buffers  # the checkpoint holds what chooses experts too
    shapes = published_tensors(model)
    assert sum(len(shape) > 1 for shape in shapes.values()) == num_matrices(model)
    assert sum(prod(shape) for shape in shapes.values()) == model.num_params


@pytest.mark.parametrize("name", small_families.CONFIGS)
def test_logits_loss_and_gradients_are_those_of_transformers(name, reference, alone):
    loss, logits, gradients = alone[1][name]
    theirs = reference[1][name][4]
    assert (logits - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    check(name, reference, loss, assemble([(None, gradients)], 1))


@pytest.mark.parametrize("name", small_families.CONFIGS)
def test_weights_go_out_as_they_came_in(name, reference, alone):
    came, went = ({}, {})
    for folder, into in ((reference[0] / name, came), (alone[0] / name, went)):
        for file in folder.glob("*.safetensors"):
            into |= load_file(file)
    assert came.keys() == went.keys()
    for key, tensor in came.items():
        assert tensor.dtype == went[key].dtype and torch.equal(tensor, went[key]), key


@pytest.mark.parametrize(
    ("plans", "name"), [(i, n) for i, plans in enumerate((small_families.PLANS, small_families.MORE)) for n in plans]
)
def test_two_processes_have_the_gradients_of_transformers(plans, name, reference, together):
    ranks = [got[name] for got in together[plans][1]]
    for loss, _, _ in ranks:
        check(name, reference, loss, assemble([(None, g) for _, _, g in ranks], 1))
