"""Products through single bits: rates and bytes by hand, and whole numbers multiplied bit by bit."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cost.roofline import gemm_seconds, peak_flops
from meshwright.errors import MeshwrightError
from meshwright.spec.serve import parse
from meshwright.spec.workload import BIT_PRODUCTS
from meshwright.work import Gemm

A100 = mw.load_cluster("1xa100").islands[0].device


def test_a_product_of_w_bits_and_a_is_w_times_a_products_of_bits():
    assert peak_flops(A100, "w1a1") == 4992e12
    assert peak_flops(A100, "w3a4") == pytest.approx(4992e12 / 12)
    large = {name: gemm_seconds(Gemm(m=8192, n=8192, k=8192, dtype=name), A100) for name in ("w1a1", "w2a4")}
    assert large["w2a4"] / large["w1a1"] == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize(("weight", "value"), BIT_PRODUCTS.values())
def test_bit_planes_of_plus_and_minus_one_multiply_exactly(weight, value):
    """The sum over planes of products of +-1, shifted, is the product of the numbers (the form that is priced)."""
    rng = np.random.default_rng(weight * 10 + value)
    planes = [rng.choice([-1, 1], size=(bits, 5, 7)) for bits in (weight, value)]
    numbers = [sum(plane << bit for bit, plane in enumerate(some)) for some in planes]
    products = [(a @ b.T) << (i + j) for i, a in enumerate(planes[0]) for j, b in enumerate(planes[1])]
    assert len(products) == weight * value and (sum(products) == numbers[0] @ numbers[1].T).all()


def test_few_rows_wait_for_the_bits_of_the_weights():
    one = Gemm(m=1, n=11008, k=4096, dtype="w2a4", out_bytes=2.0)
    assert one.num_bytes == pytest.approx(11008 * 4096 / 4 + 4096 / 2 + 11008 * 2)
    # 2 bits a weight at the 0.9 x 0.80 of 2,039 GB/s, and a kernel's start
    assert gemm_seconds(one, A100) == pytest.approx(one.num_bytes / (0.9 * 0.8 * 2039e9) + 2e-6, rel=0.01)


def test_a_model_holds_its_weights_in_their_bits():
    def asked(plan, on="1xa100"):
        question = mw.load_model("llama2-7b"), mw.load_cluster(on), parse("batch=1,prompt=64,output=8")
        return predict_serving(*question, mw.parse_plan(plan), detail=False)

    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    few, many = (asked(plan).memory[0].alive["weights"] for plan in ("w2a4", "w4a4"))
    assert many - few == pytest.approx(layers * 2 / 8, rel=1e-6)
    with pytest.raises(MeshwrightError, match="h100_sxm does not multiply w2a4"):
        asked("w2a4", "1xh100")
