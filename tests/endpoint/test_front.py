"""Requests under way: refused when there are too many, free when nobody waits, and whole though engines die."""

import asyncio

import pytest
from fuzz.fake_engine import FakeEngine, Inside, token

from meshwright.endpoint.figures import FrontFigures
from meshwright.endpoint.front import RETRIES, Front, Limits
from meshwright.endpoint.inquiry import Inquiry
from meshwright.endpoint.refusal import Refused
from meshwright.endpoint.seam import Generated, Sampling
from tests.endpoint.local import app, client


class ByHand:
    """An engine that computes when it is told to."""

    def __init__(self):
        self.engine, self.front = FakeEngine(), None

    def order(self, asked=(), cancelled=()):
        for number in cancelled:
            self.engine.cancel(number)
        for one in asked:
            self.engine.submit(one)

    def step(self, times=1):
        for _ in range(times):
            self.front.arrived(self.engine.step(), self.engine.figures())

    def die(self):
        """The process is gone with all it had, and a new one takes its place."""
        self.front.lost()
        self.engine = FakeEngine()
        self.front.built(self.engine.facts)


def front(**limits):
    by_hand = ByHand()
    by_hand.front = Front(by_hand, Limits(**limits), FrontFigures("tiny"))
    by_hand.front.built(by_hand.engine.facts)
    return by_hand


def inquiry(prompt=(0, 7, 9), limit=12, n=1, **sampling):
    chosen = Sampling(**{"seed": 3, "ignore_eos": True} | sampling)
    return Inquiry(style="completion", model="tiny", prompts=(prompt,), limits=(limit,), sampling=chosen, n=n)


async def tokens(ticket, count):
    """Collect pieces until so many tokens are there."""
    out = []
    while len(out) < count:
        out += [id for _, piece in await ticket.next() for id in piece.tokens]
    return out


def value(found, name, **labels):
    """A figure as Prometheus would read it."""
    return found.figures.registry.get_sample_value(name, {"model_name": "tiny", **labels})


def test_an_answer_that_engines_dying_break_off_is_the_one_it_would_have_been():
    async def check():
        engine = front()
        ticket = engine.front.ask(inquiry(prompt_logprobs=0, logprobs=0))
        for _ in range(RETRIES):
            engine.step(5)
            engine.die()
        (going_on,) = engine.engine.seen
        assert len(going_on.prompt) == 3 + 10 and going_on.answered == 10 and going_on.limit == 2
        assert going_on.sampling.prompt_logprobs is None  # they were told
        engine.step(2)
        assert await tokens(ticket, 12) == [token((0, 7, 9), place, 3) for place in range(12)]
        assert engine.front.under_way == 0 and engine.engine.figures().blocks_used == 0
        assert value(engine.front, "meshwright:engine_restarts_total") == RETRIES
        assert value(engine.front, "vllm:generation_tokens_total") == 12
        assert value(engine.front, "meshwright:iterations_total") == 12  # sums outlive engines

    asyncio.run(check())


def test_a_request_that_every_engine_dies_under_fails_and_others_live():
    async def check():
        engine = front()
        ticket = engine.front.ask(inquiry())
        for _ in range(RETRIES + 1):
            engine.die()
        with pytest.raises(Refused, match="3 engine processes died") as failed:
            await ticket.next()
        assert (failed.value.status, failed.value.code) == (500, "engine_died")
        other = engine.front.ask(inquiry(limit=1))
        engine.step()
        assert len(await tokens(other, 1)) == 1

    asyncio.run(check())


def test_requests_wait_for_an_engine_that_is_not_there_yet_and_fail_once_none_will_be():
    async def check():
        engine = front()
        engine.front.lost()
        ticket = engine.front.ask(inquiry(limit=2))
        assert engine.engine.seen == []
        engine.front.built(engine.engine.facts)
        engine.step(2)
        assert len(await tokens(ticket, 2)) == 2
        waiting = engine.front.ask(inquiry())
        engine.front.die("no memory")
        with pytest.raises(Refused, match="no memory"):
            await waiting.next()
        with pytest.raises(Refused) as refused:
            engine.front.ask(inquiry())
        assert (refused.value.status, refused.value.code) == (503, "engine_dead")

    asyncio.run(check())


def test_too_many_requests_are_refused_with_a_time_to_come_back():
    async def check():
        engine = front(running=2, queue=1)
        tickets = [engine.front.ask(inquiry(n=2)), engine.front.ask(inquiry())]
        with pytest.raises(Refused) as refused:
            engine.front.ask(inquiry())
        assert (refused.value.status, refused.value.code) == (429, "overloaded") and refused.value.retry_s >= 1
        assert refused.value.response().headers["retry-after"] == "1"
        tickets[0].close()
        engine.front.ask(inquiry(n=2))

    asyncio.run(check())


def test_nobody_waiting_frees_the_blocks_of_all_answers():
    async def check():
        engine = front()
        ticket, other = engine.front.ask(inquiry(n=3)), engine.front.ask(inquiry())
        engine.step(2)
        held = engine.engine.figures()
        ticket.close()
        left = engine.engine.figures()
        assert (held.running, left.running) == (4, 1) and left.blocks_used == held.blocks_used // 4
        engine.step(10)
        assert len(await tokens(other, 12)) == 12 and engine.engine.figures().blocks_used == 0
        assert value(engine.front, "vllm:request_success_total", finished_reason="abort") == 3

    asyncio.run(check())


def test_an_answer_that_takes_too_long_is_ended_and_says_so():
    async def check():
        engine = front(timeout_s=0.01)
        ticket = engine.front.ask(inquiry())
        with pytest.raises(Refused, match=r"0\.01 s") as ended:
            await ticket.next()
        assert ended.value.status == 504 and engine.front.under_way == 0 and engine.engine.idle

    asyncio.run(check())


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def check():
        engine = front()
        engine.front.ask(inquiry(limit=3))
        draining = asyncio.create_task(engine.front.drained())
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refused:
            engine.front.ask(inquiry())
        assert (refused.value.status, refused.value.code) == (503, "draining") and not draining.done()
        engine.step(3)
        await asyncio.wait_for(draining, 1)

    asyncio.run(check())


def test_an_engine_s_fault_with_one_request_is_that_request_s_error(folder):
    class Faulty(Inside):
        def _step(self):
            asked, self._due = self.engine._waiting.pop(), False
            self._front.arrived([Generated(number=asked.number, finish="error", error="no such adapter")], None)

    made = app(folder)
    made.engine = made.front.engine = Faulty(FakeEngine())
    with client(made) as served:
        for stream in (False, True):
            answer = served.post("/v1/completions", json={"prompt": "a", "stream": stream})
            assert answer.status_code == 500 and "no such adapter" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "server_error"
