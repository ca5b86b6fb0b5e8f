"""Iterations of serving that are timed on a GPU compute what they should, on a processor with the same code."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from meshwright.run.bench import forward
from meshwright.run.bench.forward import IterationBuffers, IterationShape, LayerWidths, Stack
from meshwright.spec import model

CPU = torch.device("cpu")
WIDTHS = {
    "dense": LayerWidths(64, 4, 2, 16, 32),
    "experts": LayerWidths(64, 4, 2, 16, 32, experts=8, top_k=2),
}


@pytest.fixture(autouse=True)
def plainly(monkeypatch):
    """Without compiled chains, and by attention that a processor has."""
    monkeypatch.setattr(forward, "_fused", lambda function: function)
    monkeypatch.setattr(forward, "BACKENDS", {"plain": SDPBackend.MATH})


def test_widths_are_those_of_the_catalog_s_models():
    """Of their published configurations."""
    assert LayerWidths.of(model.load("llama3-8b")) == (4096, 32, 8, 128, 14336, 0, 0)
    assert LayerWidths.of(model.load("qwen3-30b-a3b")) == (2048, 32, 4, 128, 768, 128, 8)
    with pytest.raises(ValueError, match="not timed"):
        LayerWidths.of(model.load("gpt2-xl"))


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_prompt_in_two_iterations_gives_the_states_of_one(kind):
    """The second half behind the cache of the first; 16-bit products of other shapes round a little differently."""
    torch.manual_seed(0)
    stack = Stack(WIDTHS[kind], 2, CPU)
    whole, half = (IterationBuffers(stack.widths, IterationShape(1, n, past), 2, CPU) for n, past in ((8, 0), (4, 4)))
    expected = stack.forward(whole, "plain")
    half.hidden, half.cos, half.sin = whole.hidden[4:], whole.cos[4:], whole.sin[4:]
    for mine, known in zip(half.caches, whole.caches, strict=True):
        mine[:, :, :4] = known[:, :, :4]
    found = stack.forward(half, "plain")
    assert (found - expected[4:]).norm() < 0.02 * expected[4:].norm()
    assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(half.caches, whole.caches, strict=True))


@pytest.mark.parametrize("kind", WIDTHS)
def test_parts_of_an_iteration_run_by_themselves(kind):
    """Attention leaves its buffers as they are, and a routing at random gives every token its experts."""
    stack, shape = Stack(WIDTHS[kind], 2, CPU), IterationShape(3, 1, 6)
    buffers = IterationBuffers(stack.widths, shape, 2, CPU)
    before = [kv.clone() for kv in buffers.caches]
    stack.attentions(buffers, "plain")
    stack.products(buffers)
    assert all(torch.equal(a, b) for a, b in zip(before, buffers.caches, strict=True))
    if stack.widths.experts:
        rows, ends = stack._even(3)
        assert len(rows) == int(ends[-1]) == 3 * stack.widths.top_k
