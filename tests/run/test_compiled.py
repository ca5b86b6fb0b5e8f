"""compile=yes: the same numbers with norms, rotations and activations as kernels that torch.compile makes."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
import torch._inductor.config

from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run.activation import _activated
from meshwright.run.compiled import compiled, needed
from meshwright.run.mesh import alone
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.model import load
from meshwright.spec.workload import Train
from tests.run.small import batch, gpt, llama

TRAIN = Train(global_batch=2, seq_len=12, dtype="fp32")


@pytest.fixture
def captured(monkeypatch):
    """torch.compile up to the code that it would have a C++ compiler make, which runs operator by operator: functions
    are captured with their gradients, without the seconds that a compiler takes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def trained(model, words: str):
    trainer = Trainer(model, parse(words).on(1), TRAIN, alone(), settings=Settings(precision="float64", lr=1e-2))
    seen = [trainer.step(batch(TRAIN, model.vocab, step)) for step in range(2)]
    state = {(piece.key, piece.parameter.name): piece.values.clone() for piece in trainer.pieces()}
    return [(one.loss, one.grad_norm) for one in seen], state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "functions"), [(llama(layers=1, qk_norm=True), 3), (gpt(layers=1), 2)])
def test_a_compiled_step_is_the_step(model, functions, captured):
    wanted, expected = trained(model, "tp1 mb2 selective")
    assert compiled.cache_info().currsize == 0
    seen, state = trained(model, "tp1 mb2 selective compile=yes")
    assert compiled.cache_info().currsize == functions  # norm and activation, and rotation where there is one
    for ours, theirs in zip(seen, wanted):
        assert ours == pytest.approx(theirs, rel=1e-12)
    for key, values in expected.items():
        assert torch.allclose(state[key], values, rtol=1e-10, atol=1e-12 * float(values.abs().max())), key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_what_the_compiler_makes_has_the_same_values(monkeypatch):
    # neither a header made ahead for many functions nor trials of what the processor can do: here is one function
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    torch.manual_seed(0)
    x = torch.randn(3, 16, dtype=torch.float64)
    compiled.cache_clear()
    with torch.no_grad():
        found = compiled(_activated)(x, "gelu_pytorch_tanh", True)
    compiled.cache_clear()
    assert torch.allclose(found, _activated(x, "gelu_pytorch_tanh", True), rtol=1e-12, atol=1e-14)


def test_where_there_is_no_compiler_the_word_is_refused_before_anything_runs(monkeypatch):
    plan = parse("tp1 mb2 compile=yes").on(1)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MeshwrightError) as caught:
        Trainer(llama(layers=1), plan, TRAIN, alone(), settings=Settings())
    (found,) = caught.value.diagnostics
    assert found.code == "L009" and "a C++ compiler (no-such-compiler)" in found.message and found.place and found.help
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MeshwrightError, match="needs Triton"):
        needed(plan, "cuda")
    needed(parse("tp1 mb2").on(1), "cpu")  # nobody asked


def test_families_with_norms_of_their_own_are_refused():
    said = [d.message for d in unexecutable(parse("dp2 compile=yes"), load("bert-base"), TRAIN)]
    assert any("compile=yes in the bert family is priced and not run" in one for one in said)
