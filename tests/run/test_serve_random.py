"""The serving engine under random events, as ``python -m fuzz engine`` does it: no block is lost or given out twice,
what lies on the host is wanted there, and no answer changes."""

from random import Random

from fuzz.campaign import rng_of
from fuzz.engine import Interleavings

from meshwright.endpoint.seam import Prompted, Sampling
from meshwright.run.serve.engine import KEPT
from tests.run.stub_engine import VOCAB, empty, engine_of


def test_no_block_is_lost_and_no_answer_changes_in_random_interleavings():
    campaign = Interleavings()
    examples = [campaign.example(rng_of(7, number)) for number in range(150)]
    outcomes = [(campaign.look(one), "beyond" in one["words"]) for one in examples]
    for divided in (False, True):  # evicted requests were among them, and so they were in divided engines
        assert outcomes.count(("preempted", divided)) > 8


def test_an_engine_keeps_nothing_of_thousands_that_it_answered():
    words = {"policy": "vllm-v1", "order": "fcfs", "block": 4, "blocks": 60, "max_batch": 8, "budget": 32}
    words |= {"prefix": True, "unit": 4, "swap": True, "host": 20, "guesses": 2, "adapters": 1}
    one, draw = engine_of(words), Random(0)
    for number in range(3_000):
        prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 20)))
        adapter = draw.choice(("", *one.facts.adapters))
        said = Sampling(temperature=0.0)
        one.submit(Prompted(number=number, prompt=prompt, limit=draw.randint(1, 6), sampling=said, adapter=adapter))
        if number % 13 == 0:
            one.cancel(number - 3)
        while number % 32 == 31 and not one.idle:
            one.step()
    while not one.idle:
        one.step()
    empty(one)
    kept = (one.sequences, one.arrived, one.pieces, one.tables.held, one.state.running, one.state.waiting)
    assert [len(held) for held in kept] == [0] * 6
    assert len(one.tables.away) <= 20 and len(one.tables.names) <= 60  # what the caches have room for
    assert len(one.records) <= KEPT and len(one.answered) <= KEPT
