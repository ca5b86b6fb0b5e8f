"""Experts that peers have, in processes of their own: what they train is what one process trains while all answer, and
training goes on without those that do not."""

import time

import pytest
import torch

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.plan import check, parse
from meshwright.run import data, loop
from meshwright.run.data import tokenizer
from meshwright.run.dmoe.train import train
from meshwright.run.exchanges import in_step
from meshwright.run.job import Job
from meshwright.run.moe import weights_of
from meshwright.run.settings import Settings
from meshwright.simulate.swarm import SwarmWorld
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.world.trace import WorldEvent
from tests.run.processes import start_kept

MODEL = transformer(layers=2, hidden=16, heads=2, kv_heads=1, vocab=260, ffn=24, gated=True, max_seq_len=32,
                    experts=4, top_k=2, tied_embeddings=False)  # fmt: skip
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
ASKED = "dp1 mb4 passes=dmoe:peers=2,wait=20s"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def job(corpus, plan, steps=4, **said):
    settings = Settings(precision="float64", lr=1e-2, clip=0.0)
    common = {"model": MODEL, "train": TRAIN, "settings": settings, "corpus": corpus, "quiet": True}
    return Job(plan=parse(plan), steps=steps, **(common | said))


def world(*failures, computing=(1.0,) * 3, **said):
    return SwarmWorld(computing=computing, sending=(1.0,) * 3, failures=failures, **said)


@pytest.fixture(scope="module")
def alone(corpus):
    """The losses of one process that has all experts."""
    return start_kept(loop.train, job(corpus, "dp1 mb4", 6), num_ranks=1)["losses"]


def test_experts_that_peers_have_train_as_in_one_process_and_the_bytes_are_those_simulated(corpus, alone, tmp_path):
    found = train(job(corpus, ASKED, out=str(tmp_path)), world(computing=(1.0, 1.0, 3.0)))
    assert found["losses"] == pytest.approx(alone[:4], rel=1e-12)
    told = found["swarm"]
    assert told["left_out"] == 0 and told["passes"] == [4 * 2 * 2] * 2  # of each step two layers, forward and backward
    # rows there and back in a forward, rows and gradients there and gradients back in a backward
    assert told["sent_bytes"] == told["simulated_bytes"] == 2 * 5 * (4 * 16 * 2) * 16 * 8
    # another plan goes on from what the peers held, parameters and moments
    resumed = job(corpus, "dp1 mb4", 6, out=str(tmp_path), resume=True)
    after = start_kept(loop.train, resumed, num_ranks=1)["losses"]
    assert after == pytest.approx(alone[4:], rel=1e-12)


def test_experts_of_peers_that_die_are_left_out_and_come_back_as_they_were_kept(corpus):
    gone = train(job(corpus, ASKED), world(WorldEvent(0.0, node=2), spares=0))
    assert gone["swarm"]["lost"] == 1 and gone["swarm"]["stages"] == [0, -1]
    assert gone["swarm"]["left_out"] >= 3 / 8  # of one of two peers, from the first step's first answers on
    assert gone["losses"][-1] < gone["losses"][0]
    back = train(job(corpus, ASKED, 80), world(WorldEvent(0.0, node=2, back_s=0.01)))
    assert back["swarm"]["joined"] == 1 and back["swarm"]["stages"] == [0, 0]
    assert 0 < back["swarm"]["left_out"] < 1 / 2


def test_answers_that_are_late_are_left_out_and_their_peer_is_asked_again_when_it_has_answered(corpus, monkeypatch):
    def takes(begun, slowness):  # the second peer 100 ms for everything
        time.sleep(0.1 * (slowness > 1))
        return 0.0

    monkeypatch.setattr("meshwright.run.dmoe.peer.slowed", takes)
    found = train(job(corpus, "dp1 mb4 passes=dmoe:peers=2,wait=50ms", 60), world(computing=(1.0, 1.0, 2.0)))
    told = found["swarm"]
    assert told["lost"] == 0 and 0 < told["passes"][1] < told["passes"][0]
    assert 0 < told["left_out"] < 1 and found["losses"][-1] < found["losses"][0]


def test_weights_of_those_that_answered_sum_to_what_those_of_all_do():
    weights = torch.tensor([[0.5, 0.25], [0.3, 0.6], [0.2, 0.2]], dtype=torch.float64, requires_grad=True)
    answered = torch.tensor([[True, False], [True, True], [False, False]])
    found = weights_of(weights, answered)
    torch.testing.assert_close(found, torch.tensor([[0.75, 0], [0.3, 0.6], [0, 0]], dtype=torch.float64))
    found.sum().backward()
    assert weights.grad.isfinite().all()


def test_what_experts_of_peers_do_not_go_with_is_refused():
    asked = mw.load_model("mixtral-8x7b"), mw.load_cluster("5x1xa100,1gbe"), mw.parse_train("batch=32,seq=2048")
    for words, why in {
        "dp1 passes=dmoe:peers=4 full": "would ask its peers again",
        "dp1 passes=dmoe:peers=3": "3 peers do not share 8 experts alike",
        "dp1 passes=dmoe:peers=16": "16 peers do not share 8 experts alike",
        "tp2 dp1 passes=dmoe:peers=4": "one rank trains, and tp2 has several",
        "dp2 passes=dmoe:peers=2 zero1": "nobody to share its state with",
        "dp2 ep2 passes=dmoe:peers=2": "experts are on peers, not on ranks",
    }.items():
        assert any(why in one.message for one in check(parse(words), *asked)), words
    dense = mw.load_model("llama3-8b")
    assert any("has no mixture" in one.message for one in check(parse("dp1 passes=dmoe:peers=4"), dense, *asked[1:]))
    for words in ("dmoe", "dmoe:wait=1s", "dmoe:peers=0", "dmoe:peers=2,wait=0s", "dmoe:peers=2,code=dynamic8"):
        with pytest.raises(MeshwrightError, match="P078"):
            parse(f"dp1 passes={words}")
    assert parse("dp1 passes=dmoe:wait=1s,peers=4").text() == "dp1 mb1 passes=dmoe:peers=4"
    with pytest.raises(MeshwrightError, match="L005"):
        in_step(parse("dp1 passes=dmoe:peers=4"))
