"""Products in 8 bits: what they compute against float64, under every kind of plan, and where they are refused."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run import fp8
from meshwright.run.linear import grouped_matmul, matmul
from meshwright.spec.workload import Lora, Train
from tests.run.processes import launch_kept as launch
from tests.run.small import llama, train_steps

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp8")
MOE = {"experts": 4, "top_k": 2}


def by_hand(x, kind, by_row):
    """A matrix rounded to 8 bits and back, float64: its largest magnitude is the format's largest number."""
    most = torch.finfo(kind).max
    largest = x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()
    scale = largest.double() / most
    scale = 2.0 ** torch.ceil(torch.log2(scale)) if by_row else scale
    return (x.double() / scale).float().clamp(-most, most).to(kind).double() * scale


def in_float64(x, w, gradient, how):
    """The product of rounded operands, and its gradients of x and of w."""
    q = [by_hand(t.detach(), how.forward, how.by_row) for t in (x, w, x.T, w.T)]
    dy, dyt = (by_hand(t, how.backward, how.by_row) for t in (gradient, gradient.T))
    return q[0] @ q[1].T, dy @ q[3].T, dyt @ q[2].T


def operands(m, k, n):
    generator = torch.Generator().manual_seed(m)
    x, w, g = (torch.randn(*size, generator=generator).bfloat16() for size in ((m, k), (n, k), (m, n)))
    return x.requires_grad_(), w.requires_grad_(), g


@pytest.mark.parametrize("size", [(32, 64, 48), (7, 24, 40)])  # whole sides, and sides that are padded
@pytest.mark.parametrize("word", fp8.FORMATS)
def test_products_and_both_gradients_are_those_of_rounded_operands_in_float64(word, size):
    x, w, g = operands(*size)
    matmul(x, w, word).backward(g)
    wanted = in_float64(x, w, g, fp8.FORMATS[word])
    for found, expected in zip((matmul(x, w, word), x.grad, w.grad), wanted, strict=True):
        # sums are of 24 bits and results of 8, so that each is within half a unit of its last place
        assert (found.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


@pytest.mark.parametrize("word", fp8.FORMATS)
def test_experts_rows_are_multiplied_as_each_by_itself(word):
    x, _, _ = operands(14, 32, 16)
    weight = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    grouped_matmul(x, weight, [9, 0, 5], word).sum().backward()
    seen, x.grad = (x.grad, weight.grad), None
    alone = weight.detach().clone().requires_grad_()
    (matmul(x[:9], alone[0], word).sum() + matmul(x[9:], alone[2], word).sum()).backward()
    assert torch.equal(seen[0], x.grad) and torch.equal(seen[1], alone.grad)


def test_what_is_not_a_number_stays_none():
    x, w, _ = operands(16, 16, 16)
    with torch.no_grad():
        x[3, 5] = float("inf")
        assert not matmul(x, w, "fp8").isfinite().all() and not matmul(x, w, "fp8_row")[3].isfinite().any()


def trained(rank, cases):
    return [train_steps(rank, model, words, TRAIN, 2, precision="")[0] for model, words in cases]


def test_plans_train_as_one_process_does(one_thread):
    # replicas, shards and stages round what one process rounds: their sums differ in the last bits of fp32 alone.
    # Ranks of tensor parallelism and of experts scale their own parts, which moves what is rounded
    dense, moe = llama(layers=2), llama(layers=1, **MOE)
    close, near = (5e-5, 5e-5), (2e-4, 2e-3)
    cases = [(dense, "dp2 fsdp mb1", close), (dense, "pp2 zb-h1 mb1", close), (dense, "tp2 mb1", near)]
    cases += [(dense, "tp2 mb1 gathered=kept", near), (moe, "dp2 ep2 mb1", near)]
    wanted = {id(model): trained(0, [(model, "tp1 mb1")])[0] for model in (dense, moe)}
    found, _ = launch(2, trained, [case[:2] for case in cases])
    for (model, words, (loss, norm)), steps in zip(cases, found, strict=True):
        for ours, theirs in zip(steps, wanted[id(model)], strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=loss), words
            assert ours[1] == pytest.approx(theirs[1], rel=norm), words
    tuned = Train(
        global_batch=4, seq_len=16, dtype="fp8", phase="lora", lora=Lora(rank=4, targets=("q", "k", "v", "o"))
    )
    seen = train_steps(0, dense, "tp1 mb1", tuned, 2, precision="")[0]  # a frozen base in 8 bits, to which others add
    assert seen[0][0] == wanted[id(dense)][0][0] and seen[1][0] != seen[0][0]
    plain = train_steps(0, dense, "tp1 mb1 bf16", TRAIN, 2, precision="")[0]
    assert plain != wanted[id(dense)] and plain[1][0] == pytest.approx(wanted[id(dense)][1][0], rel=5e-3)


def test_a_device_without_products_of_8_bits_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(MeshwrightError) as caught:
        fp8.needed("fp8", torch.device("cuda"))
    (found,) = caught.value.diagnostics
    assert found.code == "L011" and "NVIDIA A100 does not" in found.message and "say bf16" in found.help
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8.needed("fp8", torch.device("cuda"))
    fp8.needed("", torch.device("cuda"))


def test_formats_and_overlaps_that_are_not_run_name_the_nearest():
    said = {words: unexecutable(parse(words), llama(), TRAIN)[0] for words in ("dp2 mxfp8", "tp2 overlap=tp fp8")}
    assert "'dp2 mb1 fp8'" in said["dp2 mxfp8"].help and "bf16" in said["tp2 overlap=tp fp8"].help
    assert not unexecutable(parse("tp2 nosp overlap=tp:domino fp8"), llama(), TRAIN)
