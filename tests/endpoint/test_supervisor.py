"""The engine's process: killed under load it is replaced, hanging it is killed, and what cannot be built says why."""

import asyncio
import os
import signal

import pytest
from fuzz.fake_engine import DEADLY, HANGING, MUMBLED, token

from meshwright.endpoint import supervisor
from meshwright.endpoint.figures import FrontFigures
from meshwright.endpoint.front import Front, Limits
from meshwright.endpoint.inquiry import Inquiry
from meshwright.endpoint.refusal import Refused
from meshwright.endpoint.seam import EngineSpec, Sampling
from meshwright.endpoint.supervisor import EngineProcess
from meshwright.errors import MeshwrightError

MODULE = "fuzz.fake_engine"


async def opened(serve="0.002", **options):
    process = EngineProcess(EngineSpec(folder="", serve=serve), module=MODULE, **options)
    front = Front(process, Limits(), FrontFigures("tiny"))
    await process.open(front)
    return process, front


def inquiry(prompt, limit=40):
    sampling = Sampling(seed=3, ignore_eos=True)
    return Inquiry(style="completion", model="tiny", prompts=(prompt,), limits=(limit,), sampling=sampling)


async def answered(ticket, limit=40):
    out = []
    while len(out) < limit:
        out += [id for _, piece in await ticket.next() for id in piece.tokens]
    return out


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.01)
    monkeypatch.chdir(request.config.rootpath)  # the process imports the fake engine from there


def test_a_process_killed_under_load_is_replaced_and_no_answer_is_lost_or_changed():
    async def check():
        said = []
        process, front = await opened(say=said.append)
        prompts = [(0, i, i + 1) for i in range(2, 34)]
        tickets = [asyncio.create_task(answered(front.ask(inquiry(prompt)))) for prompt in prompts]
        await asyncio.sleep(0.05)  # half of them run
        first = process.pid
        os.kill(first, signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*tickets), 20)
        assert found == [[token(prompt, place, 3) for place in range(40)] for prompt in prompts]
        assert process.pid not in (0, first) and front.under_way == 0
        assert said == [f"the engine's process {first} ended (killed by SIGKILL)"]
        last = process.pid
        await process.close()
        with pytest.raises(ProcessLookupError):
            os.kill(last, 0)

    asyncio.run(check())


def test_a_request_that_kills_its_engine_fails_alone():
    async def check():
        process, front = await opened()
        fine = asyncio.create_task(answered(front.ask(inquiry((0, 5), limit=4)), 4))
        await fine
        with pytest.raises(Refused) as failed:
            await asyncio.wait_for(front.ask(inquiry(DEADLY)).next(), 20)
        assert failed.value.code == "engine_died"
        assert len(await asyncio.wait_for(answered(front.ask(inquiry((0, 5), limit=4)), 4), 20)) == 4
        await process.close()

    asyncio.run(check())


def test_a_process_that_says_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr("meshwright.endpoint.front.RETRIES", 0)

    async def check():
        process, front = await opened(stall_s=0.2)
        with pytest.raises(Refused) as failed:
            await asyncio.wait_for(front.ask(inquiry(HANGING)).next(), 20)
        assert failed.value.code == "engine_died"
        await process.close()

    asyncio.run(check())


def test_no_engine_is_started_any_more_once_five_hang_at_once(monkeypatch):
    monkeypatch.setattr(supervisor, "GIVEN_UP", 2)

    async def check():
        process, front = await opened(stall_s=0.1)
        with pytest.raises(Refused, match="2 processes died or hung"):
            await asyncio.wait_for(front.ask(inquiry(HANGING)).next(), 20)
        assert front.dead and process.pid == 0
        await process.close()

    asyncio.run(check())


def test_a_process_that_is_stopped_is_gone_at_once_where_it_gets_no_time():
    async def check():
        process, _ = await opened()
        pid = process.pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.wait_for(process.close(0.0), 2)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(check())


def test_a_process_whose_messages_are_none_is_replaced_and_says_so(monkeypatch):
    monkeypatch.setattr("meshwright.endpoint.front.RETRIES", 0)
    said = []

    async def check():
        process, front = await opened(say=said.append)
        with pytest.raises(Refused) as failed:
            await asyncio.wait_for(front.ask(inquiry(MUMBLED)).next(), 20)
        assert failed.value.code == "engine_died"
        assert len(await asyncio.wait_for(answered(front.ask(inquiry((0, 5)))), 20)) == 40
        await process.close()

    asyncio.run(check())
    assert "what is no message: Expected `int`, got `str`" in said[0]


def test_an_engine_that_cannot_be_built_is_the_user_s_error():
    async def check():
        with pytest.raises(MeshwrightError) as wrong:
            await opened(serve="policy=orca")
        assert [d.code for d in wrong.value.diagnostics] == ["L005"] and wrong.value.diagnostics[0].help
        with pytest.raises(MeshwrightError) as died:
            await opened(serve="no number")
        assert [d.code for d in died.value.diagnostics] == ["L007"]

    asyncio.run(check())


def test_no_engine_is_started_any_more_once_five_died_at_once(monkeypatch):
    monkeypatch.setattr(supervisor, "GIVEN_UP", 2)

    async def check():
        process, front = await opened()
        process.spec = EngineSpec(folder="", serve="no number")  # the next one dies before it is built
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(Refused, match="2 processes died or hung"):
            await asyncio.wait_for(front.ask(inquiry((0, 5))).next(), 20)
        await process.close()

    asyncio.run(check())


def test_an_engine_is_given_as_long_as_its_iterations_say_once_enough_were_seen():
    process = EngineProcess(EngineSpec(folder="a"), stall_s=300.0, learns=True)
    assert process.patience_s == 300.0
    process._heard, process._longest_s = supervisor.ENOUGH, 0.2
    assert process.patience_s == supervisor.LEAST_S
    process._longest_s = 4.0
    assert process.patience_s == 80.0
    process._longest_s = 100.0
    assert process.patience_s == 300.0
    process.learns = False
    assert process.patience_s == 300.0
