"""KV budgets: shares worked out by hand, and what they change in the simulator."""

import msgspec
import pytest

from meshwright import serving
from meshwright.answer.replica import fetched_s
from meshwright.errors import MeshwrightError
from meshwright.serving.decided import budget_shares
from meshwright.serving.kv_budget import KvShares
from meshwright.simulate.serve import simulate
from meshwright.simulate.serve_pool import served_alone
from meshwright.spec.cluster import load
from meshwright.spec.serve import parse
from tests.serving.costs import linear_costs, replica, requests


def test_shares_of_the_published_budgets():
    # a token has 2 x 1024 numbers: ShadowKV keeps 160 of the key and 1024 / 8 of a landmark, reads the landmarks and
    # the budget, and fetches the values (half of a token) of the two fifths that are new in each step; 0.3% of the
    # tokens stay whole
    shadow = serving.get("kv_budget", "shadowkv").shares(0.0156, 1024)
    assert shadow.device == pytest.approx((160 + 128) / 2048 + 0.003)
    assert shadow.read == pytest.approx(128 / 2048 + 0.0156 + 0.003)
    assert shadow.fetched == pytest.approx(0.0156 / 2 * 0.4)
    assert (serving.get("kv_budget", "h2o").shares(0.2, 64).device, serving.get("kv_budget", "scalekv").usual) == (
        0.2,
        0.1,
    )
    assert serving.get("kv_budget", "instinfer").shares(0.125, 64).in_drive
    flexgen = serving.get("kv_budget", "flexgen").shares(0.75, 64)
    assert (flexgen.device, flexgen.read, flexgen.fetched, flexgen.exact) == (0.25, 1.0, 0.75, True)
    assert not any(serving.get("kv_budget", name).shares(0.5, 64).exact for name in ("h2o", "scalekv", "shadowkv"))


def test_a_share_is_never_taken_for_so_many_tokens():
    assert [serving.get("kv_budget", "shadowkv").shares(share, 1024).read for share in (0.94, 1.0)] == [1.0, 1.0]


def test_what_lies_on_drives_comes_as_fast_as_they_or_the_host_s_link():
    # 1 MB of a token: a rank's eighth of 52 GB/s of drives is 6.5 GB/s, of 800 GB/s 100, where copies over PCIe, at 82%
    # of 31.5, are slower
    node, kept = load("8xa100").islands[0].node, KvShares(0.0, 1.0, 0.5, on_drives=True)
    assert node.nvme_gb_s == 52 and fetched_s(kept, node, 1e6) == pytest.approx(0.5 * 1e6 / 6.5e9)
    fast = msgspec.structs.replace(node, nvme_gb_s=800.0)
    assert fetched_s(kept, fast, 1e6) == pytest.approx(0.5 * 1e6 / (0.82 * node.pcie_gb_s * 1e9))


def kept(share, **more):
    one = replica("orca", linear_costs(base=1.0, decode=0.01), blocks=more.pop("blocks", 10_000))
    return msgspec.structs.replace(
        one, limits=msgspec.structs.replace(one.limits, device_share=share), kv_read=share, **more
    )


def test_a_fifth_of_the_cache_holds_five_times_the_requests():
    # 80 tokens are 5 blocks of 16, and a fifth of them is one: of 10 blocks 2 requests against 10
    asked = requests(*((0.0, 70, 10) for _ in range(12)))
    assert served_alone(kept(1.0, blocks=10), asked).peak_batch == 2
    assert served_alone(kept(0.2, blocks=10), asked).peak_batch == 10


def test_a_static_batch_reserves_what_is_kept_of_the_longest_answer():
    # three tenths of 80 tokens are 24, in 2 blocks of 16; two requests are 4 blocks
    for count in (1, 2):
        one = msgspec.structs.replace(kept(0.3), policy=serving.get("batching", "static"))
        assert served_alone(one, requests(*((0.0, 70, 10) for _ in range(count)))).peak_blocks == 2 * count


def test_attention_reads_the_kept_share_of_the_context():
    # a second an iteration and 10 ms for each token that is read: the last of 3 tokens is behind 101 of context
    whole, fifth = (simulate(kept(share), requests((0.0, 99, 3))) for share in (1.0, 0.2))
    assert whole.end_s[0] == pytest.approx(3 + 0.01 * (100 + 101))
    assert fifth.end_s[0] == pytest.approx(3 + 0.01 * 0.2 * (100 + 101))


def test_what_is_fetched_runs_beside_attention_and_the_longer_of_the_two_counts():
    served = simulate(kept(0.2, fetch_s=0.005), requests((0.0, 99, 3)))
    assert served.end_s[0] == pytest.approx(3 + 0.005 * (100 + 101))
    hidden = simulate(kept(0.2, fetch_s=0.001), requests((0.0, 99, 3)))
    assert hidden.end_s[0] == pytest.approx(3 + 0.002 * (100 + 101))


def test_what_a_layer_s_queries_choose_is_waited_for():
    assert serving.get("kv_budget", "shadowkv").shares(0.0156, 1024).chosen
    served = simulate(kept(0.2, fetch_s=0.001, fetch_chosen=True), requests((0.0, 99, 3)))
    assert served.end_s[0] == pytest.approx(3 + (0.002 + 0.001) * (100 + 101))


def test_a_budget_of_tokens_stays_as_it_is_while_a_context_grows():
    """Of contexts of 96 to 106 tokens 100 are read at most, a hundredth of a second each, and 7 blocks of 16 are held:
    of 14 blocks two requests; a share is for other budgets than those of tokens."""
    asked = requests((0.0, 95, 12))
    for skips in (True, False):
        served = served_alone(kept(100.0), asked, skips=skips)
        assert served.end_s[0] == pytest.approx(12 + 0.01 * (96 + 97 + 98 + 99 + 7 * 100))
        assert served.peak_blocks == 7
    assert served_alone(kept(100.0, blocks=14), requests(*((0.0, 95, 40) for _ in range(4)))).peak_batch == 2
    assert budget_shares("h2o:100t", 64) == KvShares(100.0, 100.0) and not budget_shares("h2o:100t", 64).exact
    with pytest.raises(MeshwrightError, match="the number of scalekv is"):
        budget_shares("scalekv:100t", 64)


@pytest.mark.parametrize("fetch_s", [0.0, 1e-3, 2e-3, 3e-3])
@pytest.mark.parametrize("how", ["", "in_drive", "fetch_chosen"])
def test_runs_under_a_budget_are_what_their_iterations_are(fetch_s, how):
    asked = requests(*((0.4 * i, 40 + 7 * i, 30 + i) for i in range(20)))
    one = kept(0.2, fetch_s=fetch_s, blocks=40, **({how: fetch_s > 0} if how else {}))
    skipped, plain = (served_alone(one, asked, skips=skips) for skips in (True, False))
    assert skipped.runs < plain.runs and skipped.end_s == pytest.approx(plain.end_s, rel=1e-9)
    assert skipped.spent_s == pytest.approx(plain.spent_s, rel=1e-9)


@pytest.mark.parametrize("word", ["h2o:2", "h2o:", ":0.2", "h2o:x", "h2o:1t", "h2o:0.2t"])
def test_a_budget_that_is_no_share_is_refused(word):
    with pytest.raises(MeshwrightError) as caught:
        parse(f"rate=1,prompt=8,output=8,kv_budget={word}")
    assert caught.value.diagnostics[0].code == "W002"
