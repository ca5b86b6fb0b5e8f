"""Experts split over ranks compute what all of them on one process do, whatever the router sends where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.plan import parse
from meshwright.run.choice import route
from meshwright.run.mesh import build
from meshwright.run.moe import Mixture, refused
from meshwright.run.parameters import Maker, initialise
from meshwright.run.parts import Shared
from meshwright.spec import naming
from meshwright.spec.layers import Moe
from meshwright.spec.model import from_config, transformer
from meshwright.spec.numerics import Numerics
from tests.run.processes import launch_kept as launch

COMMON = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "hidden_act": "silu",
}
MIXTRAL = COMMON | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12}
QWEN = COMMON | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
QWEN3 = QWEN | {"model_type": "qwen3_moe", "head_dim": 8, "norm_topk_prob": True}
QWEN2 = QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 20, "norm_topk_prob": False}
CONFIGS = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2, "qwen3_moe": QWEN3}
SEQ, BATCH = 8, 2


def mixture(config, plan, *, dtype=torch.float64, skew=0.0):
    """This rank's part of the first block's mixture, its weights drawn by name; `skew` favours the first experts."""
    model = from_config(config)
    mesh = build(plan)
    names = naming.names(model)
    shared = Shared(
        model=model, plan=plan, mesh=mesh, make=Maker(mesh.device, dtype), names=names, dropout=0.0, seed=0, causal=True
    )
    made = Mixture(shared, names.layer.format(0), model.blocks[0].mlp)
    for parameter in made.parameters():
        initialise([parameter], 7)
        with torch.no_grad():
            parameter.mul_(10.0)  # routers and experts far from linear
    with torch.no_grad():
        # inputs are positive: experts at the end of the list get no token when the skew is large
        made.router -= skew * torch.arange(len(made.router), dtype=dtype)[:, None]
    return made, mesh


def tokens(dtype=torch.float64):
    """Inputs and output gradients of the whole batch, [s, b, h]."""
    made = torch.Generator().manual_seed(3)
    shape = (SEQ, BATCH, COMMON["hidden_size"])
    x, grad = (torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for _ in range(2))
    return x.abs(), grad


def pieces(module):
    """The gradient of every published tensor's block: (name, whole shape, region, values)."""
    found = []
    for parameter in module.parameters():
        for part in parameter.info.parts:
            block = part.view(parameter.grad)
            found.append((part.name, part.shape, part.region(tuple(block.shape)), block.clone()))
    return found


def _rank(rank, config, text, skew):
    """The part of the tokens this rank has of tp x cp x dp, through its part of the mixture."""
    plan = parse(text)
    made, _ = mixture(config, plan, skew=skew)
    x, grad = tokens()
    size = plan.layout.num_ranks
    x, grad = (t.reshape(size, -1, 1, t.shape[-1])[rank] for t in (x, grad))
    x = x.clone().requires_grad_()
    out = made(x)
    out.backward(grad)
    return out.detach(), x.grad, pieces(made)


def summed(ranks):
    """Whole gradients, every rank's contribution added where it lies."""
    whole = {}
    for _, _, found in ranks:
        for name, shape, region, values in found:
            whole.setdefault(name, torch.zeros(shape, dtype=torch.float64))[region] += values
    return whole


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item()


def alone(config, skew):
    out, back, found = _rank(0, config, "dp1", skew)
    return out, back, summed([(out, back, found)])


@pytest.mark.parametrize("skew", [0.0, 1.0], ids=["even", "skewed"])
@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize(
    "text",
    ["dp2 ep2", "dp2 ep1 etp2", "dp4 ep2 etp2", "dp4 ep2 etp1", "cp2 dp2 ep4", "tp2 dp2 ep2 etp1", "tp2 dp2 ep2"],
)
def test_split_experts_give_one_process_outputs_and_gradients(text, family, skew):
    """float64, 1e-9: outputs, input gradients, and the gradients of every published tensor summed over ranks."""
    config = CONFIGS[family]
    size = parse(text).layout.num_ranks
    out, back, wanted = alone(config, skew)
    ranks = launch(size, _rank, config, text, skew)
    assert relative(torch.cat([r[0].flatten() for r in ranks]), out.flatten()) < 1e-9
    assert relative(torch.cat([r[1].flatten() for r in ranks]), back.flatten()) < 1e-9
    found = summed(ranks)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert relative(found[name], wanted[name]) < 1e-9, name


def test_the_skewed_router_leaves_experts_without_tokens():
    """What the equality above is worth: at the skew it uses, some experts see every token and some see none."""
    for config in CONFIGS.values():
        made, _ = mixture(config, parse("dp1"), skew=1.0)
        _, _, chosen = route(tokens()[0].reshape(-1, 16), made.router, made.spec.top_k, Numerics(norm_topk=False))
        counts = torch.bincount(chosen.flatten(), minlength=made.spec.experts)
        assert counts.min() == 0
        assert counts.max() == SEQ * BATCH


def _published(family):
    """The block that `transformers` has for the family, its weights at random."""
    import transformers
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    kinds = {
        "mixtral": (transformers.MixtralConfig, mixtral.MixtralSparseMoeBlock),
        "qwen2_moe": (transformers.Qwen2MoeConfig, qwen2.Qwen2MoeSparseMoeBlock),
        "qwen3_moe": (transformers.Qwen3MoeConfig, qwen3.Qwen3MoeSparseMoeBlock),
    }
    config, kind = kinds[family]
    torch.manual_seed(1)
    values = {key: value for key, value in CONFIGS[family].items() if key != "model_type"}
    block = kind(config(**values, attn_implementation="eager", experts_implementation="eager"))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
    return block


def _hub_names(block, family):
    """The block's weights under the names that the hub's files have, its stacks of experts taken apart."""
    at, words = "model.layers.0.mlp.", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        at, words = "model.layers.0.block_sparse_moe.", ("w1", "w3", "w2")
    named = {}
    for name, value in block.named_parameters():
        if name == "experts.gate_up_proj":
            for i, both in enumerate(value):
                for word, matrix in zip(words, both.chunk(2), strict=False):
                    named[f"{at}experts.{i}.{word}.weight"] = matrix
        elif name == "experts.down_proj":
            named |= {f"{at}experts.{i}.{words[2]}.weight": matrix for i, matrix in enumerate(value)}
        else:
            named[at + name] = value
    return named


@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_mixture_equals_the_one_transformers_has(family):
    """fp32 on random weights: outputs and input gradients to 1e-5."""
    block = _published(family)
    made, _ = mixture(CONFIGS[family], parse("dp1"), dtype=torch.float32)
    named = _hub_names(block, family)
    held = set()
    with torch.no_grad():
        for parameter in made.parameters():
            for part in parameter.info.parts:
                assert named[part.name].shape == part.shape
                part.view(parameter).copy_(named[part.name])
                held.add(part.name)
    assert held == named.keys()
    x, grad = tokens(torch.float32)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = made(mine)
    wanted = block(theirs.transpose(0, 1).contiguous())
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).transpose(0, 1)
    assert relative(out, wanted) < 1e-5
    out.backward(grad)
    wanted.backward(grad)
    assert relative(mine.grad, theirs.grad) < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    experts=st.integers(1, 9),
    count=st.integers(0, 12),
    normed=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_routing_takes_the_largest_shares(experts, count, normed, seed, data):
    """Against the softmax written out: distinct experts, none left out has more, weights sum to one if normed."""
    top_k = data.draw(st.integers(1, experts))
    made = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 6, generator=made, dtype=torch.float64)
    router = torch.randn(experts, 6, generator=made, dtype=torch.float64)
    _, weights, chosen = route(rows, router, top_k, Numerics(norm_topk=normed))
    scores = (rows @ router.T).exp()
    shares = scores / scores.sum(-1, keepdim=True)
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    taken = shares.gather(1, chosen)
    left = shares.scatter(1, chosen, 0.0)
    assert (taken.min(-1).values >= left.max(-1).values - 1e-12).all()
    wanted = taken / taken.sum(-1, keepdim=True) if normed else taken
    assert torch.allclose(weights, wanted, rtol=1e-12, atol=0)


class _Queue:
    """A sink that counts what it was given."""

    def __init__(self, shape):
        self.total, self.times = torch.zeros(shape, dtype=torch.float64), 0

    def add(self, gradient):
        self.total += gradient
        self.times += 1

    def add_product(self, left, right):
        self.add((left.T @ right).view(self.total.shape))


def test_weight_gradients_wait_for_their_turn():
    """Every matrix has one contribution a backward, when the queue runs and not before, and it is the whole one."""
    from collections import deque

    from meshwright.run.linear import deferring, run_deferred

    x, grad = tokens()
    plain, _ = mixture(QWEN2, parse("dp1"), skew=1.0)
    plain(x).backward(grad)
    made, _ = mixture(QWEN2, parse("dp1"), skew=1.0)
    for parameter in made.parameters():
        parameter.sink = _Queue(parameter.shape)
    queue = deque()
    out = made(x.clone().requires_grad_())
    with deferring(queue):
        out.backward(grad)
    assert {p.sink.times for p in made.parameters()} == {0}
    run_deferred(queue)
    assert {p.sink.times for p in made.parameters()} == {1}
    for mine, reference in zip(made.parameters(), plain.parameters(), strict=True):
        assert relative(mine.sink.total, reference.grad) < 1e-12


def test_mixtures_that_are_not_run_say_why():
    base = {"experts": 4, "top_k": 2, "ffn": 8, "gated": True, "activation": "silu"}
    assert refused(Moe(**base), "llama") == ""
    assert "router has a bias" in refused(Moe(**base, router_bias=True), "llama")
    assert "experts have biases" in refused(Moe(**base, bias=True), "mixtral")
    assert "gpt2 naming scheme" in refused(Moe(**base), "gpt2")
    model = transformer(
        layers=2, hidden=16, heads=2, vocab=32, experts=4, top_k=2, moe_ffn=8, gated=True, bias=True, ffn=8
    )
    plan = parse("dp1")
    names = naming.names(model)
    shared = Shared(model, plan, build(plan), Maker(torch.device("cpu"), torch.float32), names, 0.0, 0, True)
    with pytest.raises(ValueError, match="experts have biases"):
        Mixture(shared, names.layer.format(0), model.blocks[0].mlp)
