"""A frozen base of 4 bits (QLoRA), against bytes counted by hand."""

import pytest

from meshwright.answer.predict import predict
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as plan
from meshwright.plan.executable import unexecutable
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse as workload

#: Llama-2-7B: 32 layers of 4 h^2 + 3 h f products; embedding, head and norms stay in 16 bits.
PRODUCTS = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
ASKED = ("llama2-7b", "1xa100", "batch=8,seq=512,phase=lora,targets=q+v")


def asked(model_name: str, on: str, train: str, words: str):
    return predict(model(model_name), cluster(on), workload(train), plan(words))


def parameters(words: str, question=ASKED) -> float:
    rank = asked(*question, words).memory[0]
    return rank.alive["parameters"]


@pytest.mark.parametrize(
    ("stored", "bits"),
    # 4 bits and 32 for 64 weights; with those scales in 8 bits and 32 bits for 256 of them; 16 for 128; 8
    [("nf4", 4 + 32 / 64), ("nf4-dq", 4 + 8 / 64 + 32 / (64 * 256)), ("int4", 4 + 16 / 128), ("int8", 8)],
)
def test_a_quantised_base_keeps_its_products_in_so_many_bits(stored, bits):
    saved = parameters("mb1") - parameters(f"mb1 params={stored}")
    assert saved == pytest.approx(PRODUCTS * (16 - bits) / 8, rel=1e-9)


def test_a_sharded_base_saves_its_share():
    eight = (ASKED[0], "8xa100", ASKED[2])
    whole, quantised = (parameters(f"fsdp mb1{words}", eight) for words in ("", " params=nf4"))
    assert whole - quantised == pytest.approx(PRODUCTS * 11.5 / 8 / 8, rel=1e-9)


def test_a_quantised_base_takes_longer_by_the_bytes_of_making_it_16_bits():
    """A forward and a backward of each of 8 microbatches read 4.5 bits and write 16 for each weight, at 80% of the
    memory's 2039 GB/s; the products are the same."""
    plain, quantised = (asked(*ASKED, f"mb1{words}") for words in ("", " params=nf4"))
    least = 8 * 2 * PRODUCTS * (4.5 + 16) / 8 / (0.8 * 2039e9)
    more = quantised.attribution["elementwise"] - plain.attribution["elementwise"]
    assert more == pytest.approx(least, rel=0.15)  # and what starting so many kernels takes
    assert quantised.attribution["gemm"] == pytest.approx(plain.attribution["gemm"], rel=1e-3)


@pytest.mark.parametrize(
    ("train", "why"), [("batch=8,seq=512", "frozen"), ("batch=8,seq=512,phase=lora,dtype=fp8", "16")]
)
def test_a_base_of_4_bits_is_refused_where_it_is_trained_or_multiplied_in_8(train, why):
    with pytest.raises(MeshwrightError, match=why) as caught:
        asked("llama2-7b", "1xa100", train, "mb1 params=nf4")
    assert caught.value.diagnostics[0].code == "P022"


def test_products_over_a_base_of_bitsandbytes_keep_their_inputs():
    """Inputs of the projections into attention and the MLP, of the one out of attention (4096 each) and of the one out
    of the MLP (11008), 2 bytes of each of 512 tokens in 32 layers."""
    kept = [asked(*ASKED, f"mb1 params={stored}").memory[0].alive["activations"] for stored in ("nf4", "int4")]
    assert kept[0] - kept[1] == pytest.approx(32 * 512 * 2 * (3 * 4096 + 11008), rel=1e-6)


def test_moments_of_8_bits_have_a_scale_for_256_values():
    """Two moments of 6.738e9 parameters in 1 + 4 / 256 bytes each."""
    ask = ("llama2-7b", "1xb200", "batch=1,seq=512")
    assert asked(*ask, "mb1 master=none moments=int8").memory[0].alive["optimizer"] == pytest.approx(
        2 * 6.738e9 * (1 + 4 / 256), rel=1e-3
    )
    found = unexecutable(plan("mb1 moments=int8"), model("llama2-7b"), workload("batch=1,seq=512"))
    assert [d.code for d in found] == ["P032"]
