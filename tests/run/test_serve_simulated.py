"""One policy, two executors: the simulator and the engine compute the same iterations for the same requests."""

import itertools

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.endpoint.seam import EngineFacts, Prompted, Sampling
from meshwright.run.serve.engine import TorchEngine
from meshwright.run.serve.measured import timeline
from meshwright.serving.batching import Evict, Iterate
from meshwright.serving.decided import decider_of, limits_of, rules_of
from meshwright.simulate.serve_plain import Clock
from meshwright.simulate.serve_pool import ReplicaPool
from meshwright.spec.serve import engine_words
from meshwright.timeline import Identity
from tests.run.stub_engine import StubExecutor
from tests.serving.costs import replica, requests

#: Prompts and answers, all of which come at once, and more than there are blocks for.
ROWS = [(0.0, 5 + 3 * i % 17, 4 + 5 * i % 11) for i in range(14)]


def ticking():
    """A clock that goes on by a second at every look."""
    now = -1.0

    def look():
        nonlocal now
        now += 1.0
        return now

    return look


def engine_of(words):
    limits = limits_of(words, words.kv_blocks)
    decider = decider_of(words, limits, rules_of(words, unit=words.block, block_bytes=1.0), together=False)
    facts = EngineFacts(context=0, vocabulary=23, room=words.kv_blocks * words.block)
    return TorchEngine(decider, StubExecutor(words.kv_blocks, words.block), facts, clock=ticking())


def serve_all(one):
    for number, (_, prompt, output) in enumerate(ROWS):
        said = Sampling(temperature=0.0, ignore_eos=True)
        one.submit(Prompted(number=number, prompt=tuple(range(prompt)), limit=output, sampling=said))
    while not one.idle:
        one.step()
    return one


@pytest.mark.parametrize("policy", ["orca", "vllm-v0", "vllm-v1", "sarathi", "past-future", "flover"])
@pytest.mark.parametrize("more", ["", ",preempt=swap,host=40B", ",order=sjf"])
def test_the_engine_computes_the_iterations_that_the_simulator_predicts(policy, more):
    words = engine_words(f"policy={policy},block=4,kv_blocks=16,max_batch=6,budget=24{more}")
    one = serve_all(engine_of(words))
    side = msgspec.structs.replace(
        replica(policy, max_batch=6, budget=24, block=4, blocks=16),
        rules=one.decider.rules,
        order=serving.get("order", words.order),
    )
    clock = Clock(side, requests(*ROWS), skips=False, logs=True)
    ReplicaPool([clock], clock.requests).run()
    decided = [decision for entry in clock.log for decision in entry.decisions]
    runs = [decision for decision in decided if isinstance(decision, Iterate)]
    assert len(runs) > 10
    assert [{share[:3] for share in record.requests} for record in one.records] == [
        {(share.number, share.new, share.past) for share in run.shares} for run in runs
    ]
    assert one.figures().preempted == sum(isinstance(decision, Evict) for decision in decided)


def test_what_an_engine_did_is_a_timeline_as_the_simulator_returns_it():
    one = serve_all(engine_of(engine_words("block=4,kv_blocks=200,max_batch=4,budget=24")))
    found = timeline(one, Identity(source="measured"))
    rows = found.records["requests"]
    assert rows["prompt_tokens"].tolist() == [row[1] for row in ROWS]
    assert rows["output_tokens"].tolist() == [row[2] for row in ROWS]
    order = [rows[name] for name in ("arrival_s", "scheduled_s", "first_s", "end_s")]
    assert all((early <= late).all() for early, late in itertools.pairwise(order))
    # each token but an answer's first follows another one after a gap
    assert found.records["gaps"]["count"].sum() == sum(row[2] - 1 for row in ROWS)
    running, waiting, blocks = found.counters
    # prompts of 5, 8 and 11 tokens fill the first iteration, and 11 requests wait
    assert (running.value[0], waiting.value[0], running.value.max()) == (3, 11, 4)
    assert running.time_s.tolist() == sorted(running.time_s)
    assert blocks.value.max() <= 200 and np.all(blocks.value > 0)
