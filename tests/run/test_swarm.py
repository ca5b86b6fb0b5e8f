"""Swarms of peers as real processes: what they train is what one process trains, whoever is killed or joins."""

import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.export import export
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run import data, loop
from meshwright.run.data import tokenizer
from meshwright.run.exchanges import in_step
from meshwright.run.job import Job
from meshwright.run.settings import Settings
from meshwright.run.swarm.train import train
from meshwright.run.world import RankDied
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.simulate.swarm import SwarmWorld
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.world.trace import WorldEvent
from tests.run.processes import start_kept

MODEL = transformer(layers=4, hidden=16, heads=2, kv_heads=1, vocab=260, ffn=24, gated=True, max_seq_len=32,
                    tied_embeddings=False)  # fmt: skip
TRAIN = Train(global_batch=6, seq_len=16, dtype="fp32")
SWARM = "pp2 dp2 mb1 passes=swarm"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def job(corpus, plan, steps=4, precision="float64", **said):
    own = parse(plan)
    settings = Settings(precision=precision, lr=1e-2, clip=0.5)
    return Job(model=MODEL, plan=own, train=TRAIN, settings=settings, corpus=corpus, steps=steps, quiet=True, **said)


def world(*failures, computing=(1.0,) * 4, **said):
    return SwarmWorld(computing=computing, sending=(1.0,) * 4, failures=failures, **said)


@pytest.fixture(scope="module")
def alone(corpus):
    """The losses of one process."""
    return start_kept(loop.train, job(corpus, "dp1 mb1", 6), num_ranks=1)["losses"]


def test_a_swarm_trains_what_one_process_trains_and_sends_the_bytes_that_are_simulated(corpus, alone):
    found = train(job(corpus, SWARM), world(computing=(1.0, 3.0, 1.0, 1.0)))
    assert found["losses"] == pytest.approx(alone[:4], rel=1e-12)
    swarm = found["swarm"]
    assert sum(swarm["passes"]) == 4 * 6 * 2 * 2 and swarm["again"] == 0
    assert swarm["sent_bytes"] == swarm["simulated_bytes"] == 6 * 5 * 16 * 16 * 8  # out, in; in, out; in


def test_a_swarm_whose_peers_are_killed_and_come_back_trains_the_same(corpus, alone, tmp_path):
    failures = (WorldEvent(0.0, node=3, back_s=0.02), WorldEvent(0.05, node=0, back_s=0.1))
    found = train(job(corpus, SWARM, 4, out=str(tmp_path), save_every=2), world(*failures))
    swarm = found["swarm"]
    assert found["losses"] == pytest.approx(alone[:4], rel=1e-12)
    assert swarm["lost"] == swarm["joined"] == 2 and min(swarm["stages"]) == 0
    # a run of another plan goes on from what the peers held
    resumed = job(corpus, "dp1 mb1", 6, out=str(tmp_path), resume=True)
    after = start_kept(loop.train, resumed, num_ranks=1)["losses"]
    assert after == pytest.approx(alone[4:], rel=1e-12)


def test_a_swarm_that_loses_all_peers_of_a_stage_says_which(corpus):
    gone = world(WorldEvent(0.0, node=2), WorldEvent(0.0, node=3), spares=0)
    with pytest.raises(RankDied, match="the last peer of stage 1 is gone"):
        train(job(corpus, SWARM), gone)


def test_messages_in_eight_bits_lose_digits_and_train(corpus, alone):
    found = train(job(corpus, SWARM + ":code=dynamic8", 3), world())
    assert found["losses"] == pytest.approx(alone[:3], rel=2e-2) and found["losses"] != pytest.approx(alone[:3])
    assert found["swarm"]["sent_bytes"] == found["swarm"]["simulated_bytes"] < 6 * 5 * 16 * 16 * 8 / 7


def test_ranks_that_are_asked_are_no_ranks_that_exchange_by_themselves_nor_of_other_trainers():
    asked = mw.load_model("llama3-8b"), mw.load_cluster("8x1xa100,100gbe"), mw.parse_train("batch=32,seq=2048")
    plan = mw.parse_plan("pp2 dp4 mb1 passes=swarm")
    with pytest.raises(MeshwrightError, match="L005"):
        in_step(plan)
    with pytest.raises(MeshwrightError, match=r"cannot express passes=swarm: its stages are fixed ranks"):
        export("megatron", *asked, plan)
    with pytest.raises(MeshwrightError, match=r"R002.*peers are chosen as a step goes"):
        find(*asked, space=restricted(default(*asked), fix=["passes=swarm"]))


def test_mixtures_of_experts_are_refused(corpus):
    moe = transformer(layers=2, hidden=16, heads=2, vocab=260, ffn=24, gated=True, experts=4, top_k=2)
    assert [one.code for one in unexecutable(parse(SWARM), moe, TRAIN)] == ["P033"]
    with pytest.raises(MeshwrightError, match=r"passes=swarm:code=powersgd: 'code=powersgd' is not a code"):
        parse("pp2 passes=swarm:code=powersgd")
