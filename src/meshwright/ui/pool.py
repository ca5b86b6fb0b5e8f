"""Workers: worker processes, the newest request first, none longer than its time.

Of the requests of one page and lane only the newest matters: an older one that waits is dropped, one that runs is
answered to nobody and ended when it goes on for long. A worker that exceeds its time is killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.ui.frames import COLD, FRAME, pack

#: Seconds that a task may take, and a worker may take to start (it compiles once on a new machine).
LIMITS_S = {"answer": 10.0, "panel": 30.0, "recipes": 60.0, "search": 600.0}
STARTS_S = 180.0
#: Seconds that a request nobody waits for any more may go on before its worker is replaced.
FORGOTTEN_S = 1.0
#: Seconds between asking a search to stop and killing it.
STOPS_S = 10.0
MOST_WAITING = 32
MOST_SEARCHES = 2

Event = Callable[[dict[str, Any]], Any]


class Superseded(Exception):
    """A newer request of the same page took this one's place."""


class Worker:
    """One process that answers one request at a time."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *words: str) -> None:
        """Start the process and wait until it is warm."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "meshwright.ui.worker",
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        await self._receive()

    async def ask(self, task: str, body: dict[str, Any], event: Event | None = None) -> dict[str, Any]:
        """Return the process's answer to a request; `event` is given what it sends before that."""
        await self._send({"task": task, "body": body})
        while True:
            found = await self._receive()
            if "event" not in found:
                return found
            if event is not None:
                event(found["event"])

    async def stop(self) -> None:
        """Ask the request that runs to end with what it has."""
        with contextlib.suppress(ConnectionError):
            await self._send({"stop": True})

    async def kill(self) -> None:
        if self.process is None:
            return
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        self.process._transport.close()  # type: ignore[attr-defined] # else it complains once the loop is closed

    async def _send(self, value: dict[str, Any]) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(pack(value))
        await self.process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        head = await self.process.stdout.readexactly(FRAME.size)
        return msgspec.json.decode(await self.process.stdout.readexactly(FRAME.unpack(head)[0]))


class Workers:
    """Some workers for answers, and one process for each search."""

    def __init__(self, size: int = 2, limits_s: dict[str, float] = LIMITS_S):
        self.size, self.limits_s, self.starts_s = size, limits_s, STARTS_S
        self.free: asyncio.Queue[Worker] = asyncio.Queue()
        self.newest: dict[tuple[str, str], asyncio.Event] = {}
        self.searches: dict[str, Worker] = {}
        self.background: set[asyncio.Task] = set()
        self.workers: set[Worker] = set()
        self.waiting = 0

    async def open(self) -> None:
        """Start the workers, one after the other, without waiting for them."""
        self._spawn(self._start_all())

    async def close(self) -> None:
        for task in self.background:
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self.workers))

    async def ask(self, page: str, task: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to the newest request of a page for a task: what :func:`meshwright.ui.worker.perform` returns.

        Raises:
            Superseded: a newer one came.
            MeshwrightError: I005 it took too long, I006 too many wait.
        """
        if self.waiting >= MOST_WAITING:
            raise MeshwrightError.one("I006", "too many requests are waiting", place="the page", help="try again")
        dropped = asyncio.Event()
        if older := self.newest.get((page, task)):
            older.set()
        self.newest[page, task] = dropped
        try:
            worker = await self._worker(dropped)
            asked = self._spawn(self._timed(worker, task, body))
            try:
                return await self._unless(dropped, asked)
            finally:
                if not asked.done():
                    self._spawn(self._forget(asked))
        finally:
            if self.newest.get((page, task)) is dropped:
                del self.newest[page, task]

    async def _worker(self, dropped: asyncio.Event) -> Worker:
        """The next worker that is free."""
        self.waiting += 1
        got = asyncio.create_task(self.free.get())
        try:
            async with asyncio.timeout(self.starts_s):
                return await self._unless(dropped, got)
        except TimeoutError:
            self._drop(got)
            message, help = "no process of the page is free or starts", "the terminal that it runs in says why"
            raise MeshwrightError.one("I008", message, place="the page", help=help) from None
        except BaseException:
            self._drop(got)
            raise
        finally:
            self.waiting -= 1

    def _drop(self, got: asyncio.Task) -> None:
        """Wait for a worker no longer; one that came all the same is free again."""
        if got.done() and not got.cancelled():
            self._give_back(got.result())
        got.cancel()

    async def search(self, page: str, body: dict[str, Any], event: Event) -> dict[str, Any]:
        """The answer of a search, which has a process of its own; a page's older search ends.

        Raises:
            MeshwrightError: I005 it took too long, I006 too many are running.
        """
        if older := self.searches.pop(page, None):
            await self._end(older)
        if len(self.searches) >= MOST_SEARCHES:
            message = f"{len(self.searches)} searches are running, in other windows of this page"
            raise MeshwrightError.one("I006", message, place="the page", help="stop one of them, or wait")
        worker = self.searches[page] = Worker()
        self.workers.add(worker)
        try:
            await worker.start(COLD)
            return await self._within(worker.ask("search", body, event), "search")
        except (asyncio.IncompleteReadError, ConnectionError):
            return _ended("the search was ended, or needed more memory than there is")
        finally:
            if self.searches.get(page) is worker:
                del self.searches[page]
            await self._end(worker)

    async def stop_search(self, page: str) -> bool:
        """Ask a page's search to end with what it found; whether there was one."""
        worker = self.searches.get(page)
        if worker is None or worker.process is None:
            return False
        await worker.stop()
        self._spawn(self._kill_later(worker, STOPS_S))
        return True

    async def _start_all(self) -> None:
        for _ in range(self.size):
            await self._start_one()

    async def _start_one(self) -> None:
        worker = Worker()
        self.workers.add(worker)
        try:
            await asyncio.wait_for(worker.start(), self.starts_s)
        except (TimeoutError, asyncio.IncompleteReadError):
            await self._end(worker)
            return
        self._give_back(worker)

    def _give_back(self, worker: Worker) -> None:
        self.free.put_nowait(worker)

    async def _timed(self, worker: Worker, task: str, body: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer; the worker is free again after it, or replaced when it did not come."""
        try:
            found = await self._within(worker.ask(task, body), task)
        except (MeshwrightError, asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError) as error:
            await self._end(worker)
            self._spawn(self._start_one())
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                return _ended("the question needed more memory than there is, or its process was ended")
            raise
        self._give_back(worker)
        return found

    async def _within(self, answer: Any, task: str) -> dict[str, Any]:
        limit = self.limits_s[task]
        try:
            return await asyncio.wait_for(answer, limit)
        except TimeoutError:
            message = f"the answer takes longer than {limit:g} s, which is all the page gives it"
            help = "ask about a smaller question here, or ask the command line, which waits"
            raise MeshwrightError.one("I005", message, place="the page", help=help) from None

    async def _unless(self, dropped: asyncio.Event, wanted: asyncio.Task) -> Any:
        """Return the result of `wanted`, or raise Superseded when the request is dropped before."""
        gone = asyncio.create_task(dropped.wait())
        try:
            await asyncio.wait({gone, wanted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if wanted.done():
            return wanted.result()
        raise Superseded

    async def _forget(self, asked: asyncio.Task) -> None:
        """A request that nobody waits for may end soon by itself; else its worker is replaced."""
        await asyncio.wait({asked}, timeout=FORGOTTEN_S)
        asked.cancel()

    async def _kill_later(self, worker: Worker, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if worker in self.workers:
            await self._end(worker)

    async def _end(self, worker: Worker) -> None:
        self.workers.discard(worker)
        await worker.kill()

    def _spawn(self, work: Any) -> asyncio.Task:
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task) -> None:
        self.background.discard(task)
        if not task.cancelled():
            task.exception()  # it was somebody's answer, or nobody waits for it


def _ended(message: str) -> dict[str, Any]:
    help = "ask about a smaller one, or ask the command line"
    return {"errors": [{"code": "I005", "message": message, "place": "the page", "help": help}]}
