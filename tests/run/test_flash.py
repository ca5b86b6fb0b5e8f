"""One block of attention by torch's kernels and by products: equal, whichever of the kernels this torch has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from meshwright.run import flash

CASES = {
    "causal": {"causal": True},
    "masked": {"causal": False, "bias": True},
    "values narrower than keys": {"causal": True, "value_width": 3},
    "values wider than keys": {"causal": True, "value_width": 9},
    "capped": {"causal": True, "cap": 0.8},
    "capped and masked": {"causal": False, "bias": True, "cap": 0.8},
}


def tensors(value_width: int):
    """Queries of four heads, keys and values of two, in float64."""
    torch.manual_seed(0)
    shapes = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, value_width))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_definition(q, k, v, *, causal, bias, scale, cap):
    """softmax(scores) v with every head's keys and values written out, and the logarithm of the sums."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.fixture(params=["as it is", "without its kernels", "without one of them", "few rows at a time"])
def torch_as(request, monkeypatch):
    """This torch, others that have fewer kernels, and products that hold two rows of scores at a time."""
    if request.param == "few rows at a time":
        monkeypatch.setattr(flash, "_SCORES", 2 * 2 * 4 * 6)
    if request.param != "as it is":
        gone = list(flash._OPS) if request.param != "without one of them" else [f"{flash._PAIRS['cpu']}_backward"]
        monkeypatch.setattr(flash, "_OPS", {k: v for k, v in flash._OPS.items() if k not in gone})


@pytest.mark.parametrize("case", CASES)
def test_a_block_and_its_gradients_are_those_of_the_definition(case, torch_as):
    said = {"bias": False, "cap": 0.0, "value_width": 8} | CASES[case]
    q, k, v = tensors(said.pop("value_width"))
    if said["bias"]:
        said["bias"] = torch.zeros(6, 6, dtype=torch.float64).masked_fill_(torch.ones(6, 6).tril(-2).bool(), -torch.inf)
    else:
        said["bias"] = None
    out, sums = by_definition(q, k, v, scale=0.3, **said)
    grad = torch.randn(out.shape, dtype=torch.float64)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    q, k, v = (x.detach() for x in (q, k, v))
    found, found_sums = flash.forward(q, k, v, scale=0.3, **said)
    assert torch.allclose(found, out, rtol=1e-12, atol=1e-13) and torch.allclose(found_sums, sums, rtol=1e-12)
    for ours, theirs in zip(flash.backward(grad, q, k, v, found, found_sums, scale=0.3, **said), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_a_query_that_sees_no_key_has_no_output_and_no_gradient(torch_as):
    q, k, v = (x.detach() for x in tensors(8))
    bias = torch.zeros(6, 6, dtype=torch.float64)
    bias[1] = -torch.inf
    said = {"causal": False, "bias": bias, "scale": 0.3}
    out, sums = flash.forward(q, k, v, **said)
    assert not out[:, :, 1].any() and (sums[:, :, 1] == -torch.inf).all()
    # as a merge with another block leaves it: the query has sums of its own, and nothing of this block
    sums[:, :, 1] = 0.5
    grads = flash.backward(torch.ones_like(out), q, k, v, out, sums, **said)
    assert not grads.q[:, :, 1].any() and all(g.isfinite().all() for g in grads)


def test_a_kernel_that_is_missing_or_takes_other_arguments_is_not_taken():
    assert len(flash._found(torch.ops.aten)) == 6
    assert flash._found(SimpleNamespace()) == {}
    name = flash._PAIRS["cpu"]
    other = SimpleNamespace(_schema=SimpleNamespace(arguments=[SimpleNamespace(name="query")]))
    assert flash._found(SimpleNamespace(**{name: SimpleNamespace(default=other)})) == {}
