"""Chains of peers: who holds which layers, which chain a client finds, and what comes in the place of a lost peer."""

from itertools import permutations, product

import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.errors import MeshwrightError
from meshwright.serving.petals import ChainLink, Peer, found, mended, spans
from meshwright.spec.peer_chains import PeerChains, peer_chains
from meshwright.spec.serve import parse


def test_words_of_peers_are_read_back():
    said = peer_chains("throughput:layers=12:lost=2@30s+0@1m")
    assert said == PeerChains("throughput", (12,), ((2, 30.0), (0, 60.0))) and peer_chains(said.text()) == said
    assert peer_chains("latency:layers=16+8").text() == "latency:layers=16+8"
    wrong = ("fast", "latency:layers=0", "latency:lost=2", "latency:lost=1@2s+1@3s", "latency:x=1")
    assert [peer_chains(text) for text in wrong] == [None] * 5


def test_who_joins_takes_the_layers_that_are_served_worst():
    # 0-3 and 4-7 are nobody's; then all are served by 1: the first run; then 4-7 are the slower half
    assert spans([4, 4, 4, 4], [1.0, 1.0, 5.0, 1.0], 8) == ((0, 4), (4, 8), (0, 4), (4, 8))
    assert spans([6, 6], [1.0, 1.0], 8) == ((0, 6), (2, 8)) and spans([20, 0], [1.0, 1.0], 8) == ((0, 8), (0, 0))


def _all_chains(peers, first, end, gone=()):
    here = [n for n in range(len(peers)) if n not in gone]
    for count in range(1, len(here) + 1):
        for some in permutations(here, count):
            for cuts in product(range(first + 1, end), repeat=count - 1):
                edges = [first, *cuts, end]
                if all(a < b and peers[n].first <= a and b <= peers[n].end for n, a, b in zip(some, edges, edges[1:])):
                    yield [ChainLink(n, a, b) for n, a, b in zip(some, edges, edges[1:])]


@pytest.mark.parametrize("seed", range(6))
def test_the_chain_of_least_latency_is_that_of_all_chains(seed):
    rng = np.random.default_rng(seed)
    peers = [Peer(a, min(6, a + int(rng.integers(2, 5))), float(rng.uniform(0.1, 2))) for a in rng.integers(0, 4, 4)]
    peers[0] = Peer(0, 4, 1.5)
    peers[1] = Peer(3, 6, 1.5)
    waits, hops = rng.uniform(0, 1, 4), rng.uniform(0, 1, (5, 5))

    def seconds(chain):
        spent = sum(waits[one.peer] + (one.end - one.first) * peers[one.peer].layer_s for one in chain)
        return spent + sum(hops[a, b] for a, b in zip([-1, *(o.peer for o in chain)], [*(o.peer for o in chain), -1]))

    chain = found(peers, lambda n: waits[n], lambda a, b: hops[a, b], first=0, end=6)
    assert seconds(chain) == pytest.approx(min(map(seconds, _all_chains(peers, 0, 6))))


def test_by_throughput_the_slowest_peer_of_a_chain_is_the_fastest_there_is():
    peers = [Peer(0, 4, 1.0), Peer(0, 4, 2.0), Peer(4, 8, 1.0)]
    busy = {0: 8.0, 1: 0.0, 2: 0.0}
    asked = {"first": 0, "end": 8, "find": "throughput"}
    assert [one.peer for one in found(peers, busy.get, lambda a, b: 0.0, **asked)] == [1, 2]
    assert [one.peer for one in found(peers, lambda n: 0.0, lambda a, b: 0.0, **asked)] == [0, 2]


def test_others_take_the_layers_of_a_lost_peer_and_the_rest_of_the_chain_stays():
    peers = [Peer(0, 4, 1.0), Peer(4, 8, 1.0), Peer(2, 6, 1.0), Peer(5, 8, 1.0)]
    chain = (ChainLink(0, 0, 4), ChainLink(1, 4, 8))

    def free(*_):
        return 0.0

    made = mended(chain, peers, free, free, gone={1})
    assert made[0] == chain[0] and [one.peer for one in made[1:]] == [2, 3] and made[-1].end == 8
    with pytest.raises(MeshwrightError, match="no peer holds all of the layers 0 to 3"):
        mended(chain, peers, free, free, gone={0})


def ask(words, plan, on="4xa100-80", **more):
    model, cluster = mw.load_model("llama2-7b"), mw.load_cluster(on)
    return predict_serving(model, cluster, parse(words), mw.parse_plan(plan), detail=False, **more)


def test_one_peer_with_all_layers_is_the_plain_engine_where_one_request_runs_at_a_time():
    words = "concurrency=1,prompt=700,output=20,requests=5,budget=2048"
    plain, peer = ask(words, "dp1"), ask(words + ",peers=latency", "dp1")
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert getattr(peer.metrics, name).mean == pytest.approx(getattr(plain.metrics, name).mean, rel=1e-9)


def test_unequal_peers_serve_together_and_a_lost_one_is_replaced():
    words = "concurrency=2,prompt=256,output=32,requests=8,peers=latency:layers=10"
    whole = ask(words, "dp6", "2xa100-80+4xl4")
    assert whole.fits and whole.preemptions == 0
    assert [rank.rank for rank in whole.memory][:3] == [
        "peer 0, layers 0 to 9",
        "peer 1, layers 10 to 19",
        "peer 2, layers 20 to 29",
    ]
    lost = ask(words + ":lost=3@0.5s", "dp6", "2xa100-80+4xl4")
    assert lost.preemptions == 2  # both that were being answered; each had its inputs sent again
    assert lost.metrics.e2e_s.mean > whole.metrics.e2e_s.mean and lost.num_requests == 8
    with pytest.raises(MeshwrightError, match="no peer holds all of the layers 0 to 9"):
        ask(words + ":lost=0@0.5s", "dp6", "2xa100-80+4xl4")


def test_what_chains_cannot_do_is_said_at_once():
    with pytest.raises(MeshwrightError) as raised:
        ask("rate=1,prompt=100,output=10,requests=5,peers=latency:lost=9@1s,prefix_cache=yes,policy=orca", "dp4")
    assert [d.code for d in raised.value.diagnostics] == ["W014"] * 3
