"""Products divided between host and device, by hand: shares, a layer's steady time, and that no column is lost."""

import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.lower.rewrites.divide import HostRates, divided
from meshwright.lower.rewrites.legality import proof
from meshwright.simulate.layer import cost
from meshwright.spec.serve import parse
from meshwright.work import Gemm, HostProduct
from tests.lower.test_forward import forward

#: 125 GB/s of memory, of which copies to the device take 25; copies begin at once.
HOST = HostRates(copy_gb_s=25.0, read_gb_s=125.0, flops=1e12, latency_us=0.0)
#: Of one Llama-3-8B layer, bytes of the weights that are multiplied.
LAYER = 218_103_808 * 2.0


def plain(tokens=1):
    return forward("tp1", on="1xh100").tokenwise(0, tokens)


def seconds(entries):
    return cost(entries, "F", mw.load_cluster("1xh100").islands[0].device, serving_costs()).seconds


def test_a_balanced_share_has_processors_and_link_take_equally_long():
    few, many = Gemm(m=1, n=4096, k=4096), Gemm(m=1000, n=4096, k=4096)
    assert HOST.balanced(few) == pytest.approx(100 / 125)  # 100 GB/s are left of the memory beside 25 of the link
    rate = 1e12 / (2 * 1000 / 2)  # bytes of weights a second at 2 operations a token and weight: 1 GB/s
    assert HOST.balanced(many) == pytest.approx(rate / (rate + 25e9))


@pytest.mark.parametrize("said", ["auto", "0.3"])
def test_every_column_is_computed_once_and_read_when_both_parts_are_there(said):
    before = plain(16)
    after = divided(before, (len(before) - 1,), said, HOST)
    assert proof(before, (len(before) - 1,), after).exact
    ours = {e.name.removesuffix(" 2/2"): e.work.product.n for e in after if isinstance(e.work, HostProduct)}
    theirs = {e.name.removesuffix(" 1/2"): e.work.n for e in after if isinstance(e.work, Gemm)}
    assert ours.keys() == theirs.keys()
    assert all(ours[e.name] + theirs[e.name] == e.work.n for e in before if isinstance(e.work, Gemm))


def test_a_layer_takes_as_long_as_the_slower_of_both_paths():
    before = plain()
    ends = (len(before) - 1,)
    balanced, half, most = (seconds(divided(before, ends, said, HOST)) for said in ("auto", "0.5", "0.95"))
    # the memory is read once by processors and link together: 125 GB/s; kernels between products wait for both
    assert LAYER / 125e9 <= balanced < 1.1 * LAYER / 125e9
    assert half == pytest.approx(0.5 * LAYER / 25e9, rel=0.05)  # the link is busy without a gap
    assert most == pytest.approx(0.95 * LAYER / 100e9, rel=0.1)


def test_resident_layers_and_the_host_s_share_shorten_an_answer():
    cluster = mw.load_cluster("1xrtx4090,host=256gb@200/2,copy=25")
    node = cluster.islands[0].node
    assert (node.host_memory_gb_s, node.host_tflops, node.read_gb_s) == (200.0, 2.0, 160.0)

    def next_token_s(plan):
        asked = parse("batch=1,prompt=32,output=8")
        return predict_serving(mw.load_model("llama3-8b"), cluster, asked, mw.parse_plan(plan), detail=False)

    every, some = (next_token_s(f"weights_from=host host_share=auto{more}") for more in ("", " resident=16"))
    whole = 32 * LAYER / 160e9
    assert whole < every.metrics.tpot_s.mean < 1.15 * whole
    here = 16 * LAYER / (cluster.islands[0].device.memory_gb_s * 1e9)  # layers that stay are read on the device
    assert 0.5 * whole + here < some.metrics.tpot_s.mean < 0.5 * every.metrics.tpot_s.mean + 1.3 * here
    assert every.metrics.tpot_s.mean < 0.22 * next_token_s("weights_from=host").metrics.tpot_s.mean


@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        ("llama3-8b", "host_share=auto", "no layer's lie in the host's memory"),
        ("llama3-8b", "weights_from=disk host_share=0.5", "say weights_from=host"),
        ("mixtral-8x7b", "weights_from=host host_share=auto", "experts are not divided so"),
        ("llama3-8b", "weights_from=host host_share=auto nano2", "both overlap products"),
    ],
)
def test_what_is_not_divided_is_refused(model, plan, said):
    with pytest.raises(MeshwrightError) as caught:
        asked = parse("batch=1,prompt=32,output=8")
        predict_serving(mw.load_model(model), mw.load_cluster("1xh100"), asked, mw.parse_plan(plan), detail=False)
    assert "P050" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("text", ["host_share=1", "host_share=0", "host_share=half", "host_share=1.5"])
def test_a_share_is_a_number_between_0_and_1(text):
    with pytest.raises(MeshwrightError, match="a number between 0 and 1, or auto"):
        mw.parse_plan(text)
    assert mw.parse_plan("tp1 weights_from=host host_share=.50").text().endswith("host_share=0.5")
