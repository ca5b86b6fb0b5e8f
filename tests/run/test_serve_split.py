"""A divided engine: prompts computed in one half, answers generated in the other, keys and values sent between them.
Greedy answers in float64 are those of transformers' ``generate``, and no block is lost wherever a request is when it is
cancelled."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue

import pytest
import torch

from meshwright.endpoint.seam import Prompted, Sampling
from meshwright.plan import parse as plan_of
from meshwright.run import mesh
from meshwright.run.serve.built import engine, led, placed, served_plan
from meshwright.run.serve.executor import LocalExecutor
from meshwright.run.serve.forward import ServedLayers
from meshwright.run.serve.halves import DecodeEngine, PrefillEngine
from meshwright.run.serve.kv_sent import KvCut, KvPort, ways
from meshwright.serving.batching import Iterate
from meshwright.simulate.serve_plain import Clock
from meshwright.simulate.serve_pool import ReplicaPool
from meshwright.spec.model import load
from meshwright.spec.serve import engine_words as parse
from tests.run.served_models import LIMITS, answers, generated, greedy, prompts, published
from tests.run.stub_engine import counted, expected
from tests.run.stub_halves import both_counted, both_empty, halves_of, joined
from tests.serving.costs import replica, requests

pytestmark = pytest.mark.usefixtures("one_thread")
POOLS = "prefill=[tp1] + decode=[tp1] prefill->decode:kv"
#: An engine without a model, of halves of 12 and 9 blocks of 4 tokens.
WORDS = {"policy": "vllm-v1", "order": "fcfs", "block": 4, "blocks": 12, "max_batch": 8, "budget": 64, "unit": 4}
WORDS |= {"prefix": True, "swap": False, "host": 0, "guesses": 0, "adapters": 0, "beyond": 9, "late": 3}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder of a model, and its greedy answers."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, generated(published("llama", folder))


def asked():
    return [greedy(i, prompt, limit) for i, (prompt, limit) in enumerate(zip(prompts(), LIMITS))]


def in_one_process(folder, first: str, second: str):
    """The two halves of an engine with these words each, joined by a queue."""
    post, found = SimpleQueue(), []
    plan, model = served_plan(placed(plan_of("tp1"))), load(folder)
    (way,) = ways(plan, plan, model)
    for words, half in ((first, PrefillEngine), (second, DecodeEngine)):
        layers = ServedLayers(model, plan, mesh.alone(), dtype=torch.float64)
        layers.load(folder)
        here = half is DecodeEngine
        layers.port = KvPort(
            [] if here else [(way, 1)],
            [(way, 0)] if here else [],
            give=lambda tensor, rank: post.put(tensor),
            take=lambda tensor, rank: tensor.copy_(post.get()),
        )
        executor = LocalExecutor(layers)
        found.append(led(executor, folder, parse(words), torch.float64, {}, half))
    return joined(*found)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("block=4,budget=7,kv_blocks=12,prefix_cache=yes,max_batch=4", "block=4,kv_blocks=12,max_batch=4"),
        ("block=4,kv_blocks=14,policy=vllm-v0", "block=4,kv_blocks=13,prefix_cache=yes,preempt=swap,host=64KiB"),
        ("block=4,kv_blocks=9,policy=sarathi,budget=6", "block=4,kv_blocks=40,draft=ngram"),
    ],
)
def test_a_divided_engine_answers_as_one_process(llama, first, second):
    folder, wanted = llama
    one, beyond = in_one_process(folder, first, second)
    assert answers(one, asked()) == wanted
    both = one.prefill.figures(), beyond.decode.figures()
    assert both[0].tokens == len(wanted) and both[0].tokens + both[1].tokens == sum(map(len, wanted))
    assert both[1].preempted or "draft" in second
    assert "prefix" not in first or both[0].cache_hits
    for half in (one.prefill, beyond.decode):
        assert half.state.free == half.decider.limits.blocks and len(half.tables.free) == half.state.cache.bare
    assert one.prefill.state.parked == {} and beyond.decode.state.coming == {}


def test_processes_of_unlike_layouts_answer_as_one_and_the_end_of_one_ends_the_engine(llama):
    folder, wanted = llama
    words = parse("block=4,budget=7,kv_blocks=12,prefix_cache=yes,max_batch=4,preempt=swap,host=64KiB")
    one = engine(folder, plan_of("decode=[pp2] + prompts=[tp2] prompts->decode:kv"), words, dtype="float64")
    try:
        assert answers(one, asked(), every=2) == wanted
        assert one.prefill.state.free == 12 and one.beyond.preempted and one.beyond.blocks_used == 0
        os.kill(one.processes.children[1].pid, signal.SIGKILL)  # the first rank of those that generate answers
        one.submit(asked()[0])
        with pytest.raises(RuntimeError, match="generates answers ended"):
            while not one.idle:
                one.step()
    finally:
        one.close()


def test_every_rank_that_goes_on_gets_each_of_its_heads_once(llama):
    model = load(llama[0])  # 2 layers of 2 key-value heads

    def sent(source, target):
        return ways(served_plan(placed(plan_of(source))), served_plan(placed(plan_of(target))), model)

    whole = KvCut((0, 0), (0, 2), (0, 2)), KvCut((1, 1), (0, 2), (0, 2))
    assert sent("tp1", "tp1") == [(0, 0, whole)]
    # each of two ranks that share heads gets one head of both layers, from each stage that has one of them
    assert sent("pp2", "tp2") == [
        (0, 0, (KvCut((0, 0), (0, 1), (0, 1)),)),
        (0, 1, (KvCut((0, 0), (1, 2), (0, 1)),)),
        (1, 0, (KvCut((0, 1), (0, 1), (0, 1)),)),
        (1, 1, (KvCut((0, 1), (1, 2), (0, 1)),)),
    ]
    # of four ranks two and two have the same head: the first of each sends it
    assert [(way.source, [cut.received for cut in way.cuts]) for way in sent("tp4", "tp1")] == [
        (0, [(0, 1), (0, 1)]),
        (2, [(1, 2), (1, 2)]),
    ]


def stub_asked(number: int, length: int, limit: int) -> Prompted:
    prompt = tuple(6 + (7 * number + i) % 17 for i in range(length))
    return Prompted(number=number, prompt=prompt, limit=limit, sampling=Sampling(temperature=0.0, ignore_eos=True))


def test_prompts_wait_in_the_first_half_until_the_second_has_room():
    one, second = halves_of(WORDS)
    for number in range(3):
        one.submit(stub_asked(number, 12, 20))
    first = [piece for _ in range(3) for piece in one.step()]
    assert [piece.number for piece in first] == [0, 1, 2]  # the first tokens
    assert len(one.prefill.state.parked) == 3
    second.turn(0.0)
    # each prompt of 12 tokens and its next one need 4 of 9 blocks: there is room for two
    assert list(second.decode.state.coming) == [0, 1]
    assert [new.number for new in second.decode.state.offered] == [2]
    assert one.prefill.state.free == 12 - 3 * 3


@pytest.mark.parametrize("where", ["parked", "asked for", "on its way", "here", "running"])
def test_who_is_cancelled_anywhere_frees_the_blocks_of_both_halves(where):
    one, second = halves_of(WORDS)
    one.submit(stub_asked(0, 12, 9))
    one.step()  # the prompt is computed, and its blocks are offered
    if where != "parked":
        second.turn(0.0)  # they are asked for
        assert 0 in second.decode.state.coming
    if where not in ("parked", "asked for"):
        one._heard(0.0)  # and sent
        assert one.prefill.executor.post
    if where == "here":  # and no decider knows
        second.turn(0.0)
        while not second._joined():
            pass
        assert 0 in second.decode.arrived
    if where == "running":
        for _ in range(5):
            second.turn(0.0)
        assert 0 in second.decode.sequences
    assert not one.idle
    one.cancel(0)
    assert one.prefill.state.free == 12
    while not one.idle:
        assert one.step() == []  # nothing more is told of it
    assert one.figures().running == one.figures().waiting == one.figures().blocks_used == 0
    both_counted(one, second)
    both_empty(one, second)
    one.submit(stub_asked(1, 12, 9))  # and another is answered in their place
    made = []
    while not one.idle:
        made += [token for piece in one.step() for token in piece.tokens]
    assert made == expected_without_end(stub_asked(1, 12, 9))
    both_empty(one, second)


def expected_without_end(one: Prompted) -> list[int]:
    """The stub's answer where no token ends it."""
    tokens = list(one.prompt)
    while len(tokens) < len(one.prompt) + one.limit:
        tokens += expected(tokens, 1)
    return tokens[len(one.prompt) :]


def test_a_request_that_its_first_token_ends_goes_nowhere():
    one, second = halves_of(WORDS)
    one.submit(stub_asked(0, 5, 1))
    stop = expected(stub_asked(1, 6, 9).prompt, 1)
    said = Sampling(temperature=0.0, stop_ids=tuple(stop))
    one.submit(Prompted(number=1, prompt=stub_asked(1, 6, 9).prompt, limit=9, sampling=said))
    pieces = one.step()
    assert {piece.number: piece.finish for piece in pieces} == {0: "length", 1: "stop"}
    assert one.idle and not second.line.inbox
    counted(one.prefill)
    both_empty(one, second)


def test_the_half_that_computes_prompts_does_what_the_simulator_s_does():
    rows = [(0.0, 5 + 3 * i % 17, 2 + i % 5) for i in range(14)]
    one, _ = halves_of(WORDS | {"blocks": 90, "budget": 16, "prefix": False, "beyond": 90})
    for number, (_, prompt, output) in enumerate(rows):
        one.submit(stub_asked(number, prompt, output))
    while one.prefill.computes:
        one.prefill.step()
    clock = Clock(
        replica("vllm-v1", max_batch=8, budget=16, block=4, blocks=90),
        requests(*rows),
        skips=False,
        parks=True,
        logs=True,
    )
    pool = ReplicaPool([clock], clock.requests)
    pool.run()
    runs = [d for entry in clock.log for d in entry.decisions if isinstance(d, Iterate)]
    assert len(runs) > 5
    assert [{part[:3] for part in record.requests} for record in one.prefill.records] == [
        {(share.number, share.new, share.past) for share in run.shares} for run in runs
    ]
    assert one.prefill.state.parked.keys() == clock.state.parked.keys() == set(range(14))
