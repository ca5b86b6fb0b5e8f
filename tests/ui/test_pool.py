"""Worker processes: warm, the newest request first, none over its time, none left behind."""

import asyncio

import pytest

from meshwright.errors import MeshwrightError
from meshwright.ui.pool import Superseded, Workers
from tests.ui.local import asked

ASKED = {"asked": asked()}
SEARCH = {"asked": asked(model="llama3-70b", on="64xh100", train="batch=512,seq=8192", plan="")}


async def everything():
    """One pool's life: an answer, a replaced one, one over its time, a search that is stopped, the end."""
    pool, told = Workers(size=1), {}
    await pool.open()
    told["answer"] = (await pool.ask("a", "answer", ASKED))["answer"]["errors"]

    older = asyncio.create_task(pool.ask("a", "recipes", ASKED))
    await asyncio.sleep(0)
    newer = asyncio.create_task(pool.ask("a", "recipes", ASKED))
    with pytest.raises(Superseded):
        await older
    told["newer"] = "recipes" in (await newer)["answer"]

    events = []
    searching = asyncio.create_task(pool.search("a", SEARCH, events.append))
    while not events:
        await asyncio.sleep(0.02)
    told["stopping"] = await pool.stop_search("a")
    told["found"] = "answer" in await searching
    told["no search"] = await pool.stop_search("a")

    pool.limits_s = {**pool.limits_s, "recipes": 0.001}
    with pytest.raises(MeshwrightError) as late:
        await pool.ask("a", "recipes", ASKED)
    told["late"] = [d.code for d in late.value.diagnostics]
    processes = [worker.process for worker in pool.workers]
    await pool.close()
    told["left"] = [p.pid for p in processes if p is not None and p.returncode is None]
    told["kept"] = (len(pool.newest), len(pool.searches))
    return told


def test_a_pool_answers_drops_what_is_old_stops_searches_and_ends_what_takes_too_long():
    told = asyncio.run(everything())
    assert told == {
        "answer": [],
        "newer": True,
        "stopping": True,
        "found": True,
        "no search": False,
        "late": ["I005"],
        "left": [],
        "kept": (0, 0),
    }


def test_too_many_waiting_requests_are_refused():
    async def ask():
        pool = Workers(size=0)
        waiting = [asyncio.create_task(pool.ask(str(i), "answer", ASKED)) for i in range(32)]
        await asyncio.sleep(0)
        with pytest.raises(MeshwrightError) as refused:
            await pool.ask("one more", "answer", ASKED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return [d.code for d in refused.value.diagnostics], pool.waiting

    assert asyncio.run(ask()) == (["I006"], 0)


def test_a_page_whose_processes_do_not_start_says_so_instead_of_waiting():
    async def ask():
        pool = Workers(size=0)
        pool.starts_s = 0.01
        with pytest.raises(MeshwrightError) as refused:
            await pool.ask("a", "answer", ASKED)
        return [d.code for d in refused.value.diagnostics], pool.waiting, len(pool.newest)

    assert asyncio.run(ask()) == (["I008"], 0, 0)
