"""Image classifiers that are trained: against transformers and torch's own modules in float64, under all plans that
divide their work, and from one plan's checkpoint under another."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run.checkpoint import Meta, identity, load, save
from meshwright.run.weights import load_weights, save_weights
from meshwright.spec.matrices import num_matrices
from meshwright.spec.model import from_config
from tests.run.classifiers import (
    FEATURES,
    PERCEPTRON,
    RESNET,
    SIDE,
    SOFTMAX,
    TRAIN,
    VALUES,
    VGG,
    begun,
    images,
    model,
    state,
    steps,
    trained,
)
from tests.run.processes import launch, launch_kept
from tests.run.small import assemble

#: Largest difference, relative to a tensor's largest element. In float64 orders of addition leave 1e-13.
TOLERANCE = 1e-9


def close(one, other):
    assert torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * float(other.abs().max()))


def alike(found, expected):
    """The same tensors; a bias before a batch norm has no gradient but rounding, and no digits to compare."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert float((tensor - expected[name]).abs().max()) < TOLERANCE * max(1e-3, float(expected[name].abs().max()))


def against_transformers(rank, config, folder):
    """Logits, loss and gradients of both, with running statistics moved by the same batch, and its files in and out."""
    import transformers

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    made = transformers.ResNetConfig(**{k: v for k, v in config.items() if k != "architectures"})
    net = transformers.ResNetForImageClassification(made)
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
        for name, tensor in net.named_buffers():
            if "running" in name:
                tensor.add_(torch.rand_like(tensor))
    net.save_pretrained(folder / "theirs")
    ours = from_config(made.to_dict() | {"architectures": config["architectures"]}, name="small")
    trainer = begun(ours, "dp1 mb8", lr=0.0, weight_decay=0.0)
    load_weights(folder / "theirs", trainer.pieces(), ours, trainer.mesh["world"])
    trainer.set_step(0)
    batch = images(0)
    (one,) = trainer.passes(batch)
    (stage,) = trainer.stages.values()
    with torch.no_grad():
        judged = stage.head.logits(stage.hidden(None, one._replace(step=-1)))
    expected = net.eval()(batch.tokens).logits.detach()
    close(judged, expected)
    net.train()
    loss = net(batch.tokens, labels=batch.targets).loss
    loss.backward()
    gradients = {}
    trainer.before_update.append(
        lambda: gradients.update({h.parameter.name: h.gradient.clone() for h in trainer.optimizer.held})
    )
    assert trainer.step(batch).loss == pytest.approx(loss.item(), rel=TOLERANCE)
    theirs = dict(net.named_parameters())
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        close(gradient, theirs[name].grad.flatten())
    running = {name: values for (name, *_), _, _, values in state(trainer) if "running" in name}
    buffers = {name: b for name, b in net.named_buffers() if "running" in name}
    assert running.keys() == buffers.keys()
    for name, values in running.items():
        close(values, buffers[name])
    assert sum(p.numel() for p in net.parameters()) == ours.num_params
    assert sum(p.dim() > 1 for p in net.parameters()) == num_matrices(ours)
    save_weights(folder / "ours", trainer.pieces(), ours, trainer.mesh["world"], config=made.to_dict())
    again = transformers.ResNetForImageClassification.from_pretrained(folder / "ours").eval()
    close(again(batch.tokens).logits.detach(), net.eval()(batch.tokens).logits.detach())


@pytest.mark.parametrize("over", [{}, {"layer_type": "basic"}, {"downsample_in_bottleneck": True}], ids=str)
def test_a_resnet_is_that_of_transformers_to_the_last_gradient(over, tmp_path):
    pytest.importorskip("transformers")
    launch(1, against_transformers, RESNET | over, tmp_path)


def vgg_of_torch() -> nn.Module:
    """The VGG of these tests as torchvision's modules are named."""
    net = nn.Module()
    conv = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, 2)]
    conv += [nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()]
    conv += [nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2, 2)]
    net.features = nn.Sequential(*conv)
    sizes = [(6 * 4, 8), (8, 7), (7, 5)]
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU(), nn.Dropout(0.0))]
    net.classifier = nn.Sequential(*layers[:-2])
    return net.double()


def test_a_vgg_is_torchs_modules_under_torchvisions_names():
    trainer, net = begun(model(VGG), "dp1 mb8", weight_decay=0.0), vgg_of_torch()
    known = {name: values for (name, *_), _, _, values in state(trainer)}
    there = {name for name in net.state_dict() if "num_batches" not in name}
    assert known.keys() == there
    net.load_state_dict({n: v.view(net.state_dict()[n].shape) for n, v in known.items()}, strict=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(2):
        batch = images(step)
        maps = nn.functional.adaptive_avg_pool2d(net.features(batch.tokens), 2).flatten(1)
        loss = nn.functional.cross_entropy(net.classifier(maps), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        assert trainer.step(batch).loss == pytest.approx(loss.item(), rel=TOLERANCE)
        optimizer.step()
    for (name, *_), _, _, values in state(trainer):
        close(values, net.state_dict()[name].flatten())


@cache
def alone(family, steps=2):
    losses, held = launch_kept(1, trained, *CONFIGS[family], "dp1 mb2", steps)[0]
    return losses, assemble([(held,)], 0)


CONFIGS = {"resnet": (RESNET, TRAIN), "vgg": (VGG, TRAIN), "perceptron": (PERCEPTRON, FEATURES)}
PLANS = [
    *("dp2 mb2", "dp2 mb2 zero1", "dp2 mb2 zero2", "dp2 mb2 fsdp", "dp1 mb2 full", "dp1 pp2 mb2 1f1b"),
    *("dp1 pp2 mb2 gpipe full", "dp2 mb2 fsdp full"),
]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("text", PLANS)
def test_every_plan_is_one_process_with_the_same_microbatches(family, text):
    losses, expected = alone(family)
    ranks = launch_kept(parse(text).layout.num_ranks, trained, *CONFIGS[family], text, 2)
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=TOLERANCE)
    found = assemble([(held,) for _, held in ranks], 0)
    alike(found, expected)
    assert any("running_var" in name for name in found) == (family != "perceptron")


def by_hand(config, count):
    """Losses of the steps of torch's modules, and their weights."""
    trainer = begun(model(config), "dp1 mb8", FEATURES, weight_decay=0.0)
    known = {name: values for (name, *_), _, _, values in state(trainer)}
    sizes = (12, *config["hidden_sizes"], config["num_labels"])
    layers = [nn.Linear(a, b).double() for a, b in pairwise(sizes)]
    names = [*(f"layers.{number}" for number in range(len(layers) - 1)), "classifier"]
    for name, layer in zip(names, layers):
        layer.weight.data.copy_(known.pop(f"{name}.weight").view_as(layer.weight))
        layer.bias.data.copy_(known.pop(f"{name}.bias"))
    assert not known
    weights = [p for layer in layers for p in layer.parameters()]
    optimizer, losses = torch.optim.SGD(weights, lr=0.05, momentum=0.9), []
    for step in range(count):
        batch = images(step, train=FEATURES)
        x = batch.tokens
        for number, layer in enumerate(layers):
            x = layer(torch.relu(x) if number else x)
        if config.get("loss") == "square":
            loss = (x - batch.targets.double()[:, None]).square().sum() / 2 / len(x)
        else:
            loss = nn.functional.cross_entropy(x, batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert steps(trainer, 0, count) == pytest.approx(losses, rel=TOLERANCE)
    return {name: values for (name, *_), _, _, values in state(trainer)}, weights


@pytest.mark.parametrize("config", [SOFTMAX, PERCEPTRON, VALUES], ids=["softmax", "perceptron", "square"])
def test_classifiers_and_regressions_of_features_are_torchs_linear_layers(config):
    held, weights = by_hand(config, 3)
    assert model(config).num_params == sum(p.numel() for p in weights)
    for mine, theirs in zip(held.values(), weights, strict=True):
        close(mine, theirs.detach().flatten())


def saved_under(rank, text, root):
    trainer = begun(model(), text)
    steps(trainer, 0, 1)
    about = {"seed": 0, "model": "small", "model_hash": identity(trainer.model), "plan": text, "world": 1}
    made = save(root, trainer.pieces(), Meta(step=1, **about), trainer.mesh["world"])
    return str(made)


def gone_on(rank, text, root):
    trainer = begun(model(), text)
    load(root, trainer.pieces(), trainer.mesh["world"], model_hash=identity(trainer.model))
    trainer.set_step(1)
    return steps(trainer, 1, 2), state(trainer)


@pytest.mark.parametrize(
    ("before", "behind"), [("dp2 mb2", "dp1 mb2"), ("dp1 mb2", "dp2 mb2 fsdp"), ("dp2 mb2 zero1", "dp1 pp2 mb2")]
)
def test_a_checkpoint_goes_on_under_another_plan(before, behind, tmp_path):
    losses, expected = alone("resnet")
    launch_kept(parse(before).layout.num_ranks, saved_under, before, tmp_path)
    ranks = launch_kept(parse(behind).layout.num_ranks, gone_on, behind, tmp_path)
    assert ranks[0][0] == pytest.approx(losses[1:], rel=TOLERANCE)
    found = assemble([(held,) for _, held in ranks], 0)
    alike(found, expected)


def test_running_statistics_move_towards_the_mean_of_a_steps_microbatches():
    _, net = begun(model(VGG), "dp1 mb4"), nn.BatchNorm2d(4, affine=False).double()
    trainer = begun(model(VGG), "dp1 mb4")
    first = trainer.stages[0].embedding.path.convolutions[0]
    batch, shown = images(0), []
    for some in (batch.tokens[:4], batch.tokens[4:]):
        net.reset_running_stats()
        net.momentum = 1.0
        net(nn.functional.conv2d(some, first.weight.detach(), first.bias.detach(), padding=1))
        shown.append(torch.stack((net.running_mean, net.running_var)))
    trainer.step(batch)
    start = torch.stack((torch.zeros(4), torch.ones(4))).double()
    close(first.norm.running, 0.9 * start + 0.1 * (shown[0] + shown[1]) / 2)


REFUSED = {
    "pp2 mb2 zb-h1": "gradients of a convolution's weights are not put off",
    "mb2 selective": "no attention is recomputed",
    "mb2 compile=yes": "compile=yes in the resnet family",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_done_with_convolutions_is_refused(text):
    plan = parse(text)
    found = unexecutable(plan.on(2), model(), TRAIN)
    assert any(REFUSED[text] in one.message for one in found)


def test_a_single_image_in_maps_of_one_place_has_no_variance():
    plan = parse("dp1 mb1").on(1)
    (found,) = unexecutable(plan, model(), mw.parse_train("batch=8,image=8"))
    assert "no variance" in found.message and found.place == "plan.pipeline.microbatch = 1"
    assert not unexecutable(plan, model(), mw.parse_train(f"batch=8,image={SIDE}"))
