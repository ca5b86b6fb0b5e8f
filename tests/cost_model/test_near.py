"""A processor near memory: operators go where they take less time."""

import pytest

from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.spec import cluster
from meshwright.work import AttentionCore, Elementwise, Gemm, GroupedGemm, VarlenAttention

PLAIN, BOTH = (cluster.load(on).islands[0].device for on in ("8xh100", "8xh100,near=13000:100"))
HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}


def decoding(length):
    return AttentionCore(batch=64, q_len=1, kv_len=length, pairs=length, **HEADS)


def prompt(length):
    return AttentionCore(batch=1, q_len=length, kv_len=length, pairs=length * (length + 1) / 2, **HEADS)


def seconds(work, device):
    return Costs().price(work, device).seconds


@pytest.mark.parametrize(
    "work", [decoding(8192), Gemm(m=4, n=4096, k=14336), GroupedGemm(groups=8, rows=16, n=14336, k=4096)], ids=str
)
def test_what_waits_for_memory_runs_near_it(work):
    """By hand: its bytes at 70% of 13,000 GB/s, which nobody has measured, and 2 us to start."""
    assert seconds(work, BOTH) == pytest.approx(work.num_bytes / (0.7 * 13000e9) + 2e-6)
    assert seconds(work, BOTH) < seconds(work, PLAIN)


@pytest.mark.parametrize(
    "work",
    [prompt(8192), Gemm(m=8192, n=4096, k=4096), Gemm(m=8, n=4096, k=4096, dtype="fp32"), Elementwise(num_bytes=1e9)],
    ids=str,
)
def test_what_is_computed_or_in_another_precision_or_pointwise_runs_on_the_device(work):
    assert Costs().price(work, BOTH) == Costs().price(work, PLAIN)


def test_prompts_and_decoded_tokens_of_one_batch_are_placed_apart():
    batch = VarlenAttention(groups=(prompt(4096), decoding(4096)))
    assert seconds(batch, BOTH) < seconds(batch, PLAIN)
    for one, same in ((prompt(4096), True), (decoding(4096), False)):
        alone = VarlenAttention(groups=(one,))
        assert (seconds(alone, BOTH) == seconds(alone, PLAIN)) == same


def test_a_file_keeps_the_processor_and_a_word_without_numbers_is_refused(tmp_path):
    found = cluster.load("4xh100,near=13000:100")
    path = tmp_path / "mine.toml"
    path.write_text(cluster.to_toml(found))
    assert cluster.load(str(path)) == found
    for word in ("near=fast", "near=13000", "near=0:1", "near=0:0", "near=13000:100:3"):
        with pytest.raises(MeshwrightError, match="no bandwidth in GB/s and peak in TFLOP/s"):
            cluster.load(f"4xh100,{word}")


def test_processors_of_several_rates_are_devices_of_several_kinds():
    fast, slow = (i.device for i in cluster.load("4xh100,near=13000:100 + 4xh100,near=5000:50").islands)
    assert fast.name != slow.name and fast.alone == slow.alone and fast.alone.name == PLAIN.name
    costs, work = Costs(), Gemm(m=4, n=4096, k=14336)
    assert costs.price(work, fast).seconds < costs.price(work, slow).seconds < costs.price(work, PLAIN).seconds
