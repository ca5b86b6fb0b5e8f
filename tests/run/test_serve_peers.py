"""Chains of peers in the engine: answers are those of one process, whoever dies."""

import os
import signal
import threading

import pytest

from meshwright.errors import MeshwrightError
from meshwright.plan import parse as plan_of
from meshwright.run.serve.built import engine
from meshwright.serving.petals import ChainLink
from meshwright.spec.serve import engine_words as parse
from tests.run.served_models import LIMITS, answers, generated, greedy, prompts, published

WORDS = "block=4,budget=9,kv_blocks=10,max_batch=4,"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, generated(published("llama", folder, num_hidden_layers=4))


def asked():
    return [greedy(i, prompt, limit) for i, (prompt, limit) in enumerate(zip(prompts(), LIMITS))]


def test_a_lost_peer_is_replaced_by_others_and_then_by_a_new_process_and_no_answer_changes(llama):
    folder, wanted = llama
    words = WORDS + "draft=ngram,peers=latency:layers=2+2+3+1"
    one = engine(folder, plan_of("dp4"), parse(words), dtype="float64")
    peers = one.executor
    try:
        assert [(peer.first, peer.end) for peer in peers.peers] == [(0, 2), (2, 4), (0, 3), (3, 4)]
        peers.chain = (ChainLink(0, 0, 2), ChainLink(1, 2, 4))  # whatever their speeds were found to be
        steps, whole, compute = [], [], peers.compute
        started = threading.Event()
        peers._start = lambda number: started.set()

        def counted(packed):
            steps.append(packed)
            if len(steps) == 5:
                whole.append(peers.replayed)
                os.kill(peers.peers[1].process.pid, signal.SIGKILL)
            return compute(packed)

        peers.compute = counted
        assert answers(one, asked()) == wanted
        assert whole == [0] and peers.gone == {1} and started.is_set()
        # of layers 2 and 3 others have computed the tokens again of those who were being answered, and of nobody else
        assert {(link.first, link.end) for link in peers.chain} == {(0, 2), (2, 3), (3, 4)}
        running = steps[4].rows
        assert 2 * sum(row.past for row in running) <= peers.replayed <= 2 * sum(len(t) for t in prompts()) + 100
        assert one.figures().preempted  # evicted ones begin again, and are not replayed
        # with nobody else for the first layers a new process has to come
        del peers._start
        os.kill(peers.peers[0].process.pid, signal.SIGKILL)
        os.kill(peers.peers[2].process.pid, signal.SIGKILL)
        assert answers(one, asked()) == wanted
        assert peers.replaced >= 1
    finally:
        one.close()
    assert not any(peer.process.is_alive() for peer in peers.peers if peer.process._popen)


def test_what_peers_are_not_served_with_is_said_at_once(llama):
    words = "peers=latency:layers=2+2:lost=1@2s,prefix_cache=yes,draft=/models/small"
    with pytest.raises(MeshwrightError) as raised:
        engine(llama[0], plan_of("tp2 dp3"), parse(words), dtype="float64")
    assert len(raised.value.diagnostics) == 5 and {d.code for d in raised.value.diagnostics} == {"W014"}
    with pytest.raises(MeshwrightError, match="no peer holds all of the layers 2 to 3"):
        engine(llama[0], plan_of("dp1"), parse("peers=latency:layers=2"), dtype="float64")
