"""Several replicas behind one front: requests go where the router says, and on at the others where one dies."""

import asyncio
import os
import signal

import pytest
from fuzz.fake_engine import FakeEngine, Inside, token

from meshwright import serving
from meshwright.endpoint import supervisor
from meshwright.endpoint.figures import FrontFigures
from meshwright.endpoint.front import Front, Limits
from meshwright.endpoint.refusal import Refused
from meshwright.endpoint.replicas import ReplicatedEngine
from meshwright.endpoint.seam import EngineSpec
from meshwright.endpoint.supervisor import EngineProcess
from meshwright.errors import MeshwrightError
from tests.endpoint.test_supervisor import answered, inquiry


async def opened(holders, routing="round-robin", unit=0):
    said = []
    group = ReplicatedEngine(holders, serving.get("routing", routing), unit=unit, say=said.append)
    front = Front(group, Limits(), FrontFigures("tiny"))
    await group.open(front)
    return group, front, said


def routed(routing, prompts, *, unit=0, limit=4, together=True):
    """The replica of each prompt."""

    async def check():
        engines = [FakeEngine(), FakeEngine(blocks=128)]
        group, front, _ = await opened([Inside(one) for one in engines], routing, unit)
        assert front.facts.room == 128 * 4  # of the smaller cache
        tickets = []
        for prompt in prompts:
            tickets.append(asyncio.create_task(answered(front.ask(inquiry(prompt, limit)), limit)))
            if not together:
                await tickets[-1]
        await asyncio.gather(*tickets)
        assert front.under_way == sum(one.open for one in group.replicas) == 0
        assert group._together().tokens == limit * len(prompts)
        return [
            next(i for i, one in enumerate(engines) if prompt in [s.prompt for s in one.seen]) for prompt in prompts
        ]

    return asyncio.run(check())


def test_requests_go_where_the_router_sends_them():
    prompts = [(0, i, i + 1) for i in range(2, 8)]
    assert routed("round-robin", prompts) == [1, 0, 1, 0, 1, 0]  # numbers begin at 1
    assert routed("least-loaded", prompts) == [0, 1, 0, 1, 0, 1]
    assert routed("least-loaded", prompts, together=False) == [0] * 6  # none is busier than another
    assert sorted(set(routed("power-of-two", prompts))) == [0, 1]


def test_prompts_that_begin_alike_go_to_one_replica():
    first, second = tuple(range(10, 26)), tuple(range(40, 56))
    prompts = [(*first, 2), (*second, 2), (*first, 3), (*second, 3), (*first, 4), (*second, 4)]
    found = routed("prefix-aware", prompts, unit=4)
    assert found == [0, 1, 0, 1, 0, 1]
    assert routed("prefix-aware", prompts) == [0, 1, 0, 1, 0, 1]  # nothing is known: the one with the fewest
    alike = [(*first, 2), (*first, 3), (*first, 4)]
    assert routed("prefix-aware", alike, unit=4) == [0, 0, 0] and routed("prefix-aware", alike) == [0, 1, 0]
    assert set(routed("d2lpm:1", alike, unit=4)) == {0, 1}  # its tenant has no more credit there


def test_a_replica_killed_under_load_is_replaced_while_the_others_go_on(monkeypatch, request):
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.01)
    monkeypatch.chdir(request.config.rootpath)

    async def check():
        spec = EngineSpec(folder="", serve="0.002")
        holders = [EngineProcess(spec, module="fuzz.fake_engine") for _ in range(2)]
        group, front, _ = await opened(holders)
        prompts = [(0, i, i + 1) for i in range(2, 26)]
        tickets = [asyncio.create_task(answered(front.ask(inquiry(prompt)))) for prompt in prompts]
        await asyncio.sleep(0.05)
        first, other = (holder.pid for holder in holders)
        assert [one.open for one in group.replicas] == [12, 12]
        os.kill(first, signal.SIGKILL)
        while group.replicas[0].ready:
            await asyncio.sleep(0.001)
        assert front.ready and [one.open for one in group.replicas] == [0, 24]  # they are at the other at once
        found = await asyncio.wait_for(asyncio.gather(*tickets), 20)
        assert found == [[token(prompt, place, 3) for place in range(40)] for prompt in prompts]
        while not group.replicas[0].ready:
            await asyncio.sleep(0.01)
        assert holders[0].pid not in (0, first) and holders[1].pid == other
        text = front.figures.text().decode()
        assert 'meshwright:requests_retried_total{model_name="tiny"} 12.0' in text
        assert 'meshwright:engine_restarts_total{model_name="tiny"} 1.0' in text
        await group.close(0.0)

    asyncio.run(check())


class Failing(Inside):
    """A holder whose engine cannot be built."""

    async def open(self, front):
        raise MeshwrightError.one("W012", "no room", place="there")


def test_a_server_without_one_of_its_replicas_does_not_start_and_goes_on_until_the_last_is_gone():
    async def check():
        fine = Inside(FakeEngine())
        with pytest.raises(MeshwrightError, match="no room"):
            await opened([fine, Failing(FakeEngine())])
        assert fine.closed
        group, front, said = await opened([Inside(FakeEngine()), Inside(FakeEngine())])
        for place, left in ((1, 1), (0, 0)):
            group.replicas[place].lost()
            group.replicas[place].die("it cannot be built")
            assert said[-1] == f"{left} of 2 replicas are left"
            if left:
                assert await answered(front.ask(inquiry((0, 3))), 4)
        with pytest.raises(Refused, match="it cannot be built"):
            front.ask(inquiry((0, 3)))

    asyncio.run(check())
