"""Supervisor: the engine's process, started, listened to, and replaced when it dies or hangs.

The process has a socket pair with this one and a session of its own, so that whatever it starts (the other ranks of a
plan) is ended with it. An engine that cannot be built is an error of the user's and is raised; one that dies is built
again, later and later where it dies at once, and given up after `GIVEN_UP` such deaths. One that hangs as soon as it
has work, or while it is built, is as good as dead at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from meshwright.endpoint import wire
from meshwright.endpoint.seam import EngineFacts, EngineFigures, EngineSpec, Generated, Prompted
from meshwright.errors import MeshwrightError

#: The module whose process builds the engine.
WORKER = "meshwright.run.serve.worker"
#: Deaths of engines that lived less than `SHORT_S`, one after the other, after which no other is started.
GIVEN_UP, SHORT_S = 5, 10.0
#: Times what the first engine took to build that another one may take, and ``SHORT_S`` more, before it hangs.
BUILD_TIMES = 4.0
#: Seconds to wait before another engine is started: the first is started at once, each later one twice as late.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
#: An engine hangs that is silent for so many times the longest that it was before, and for so many seconds, once it was
#: heard of so often: iterations of the largest batch are among them.
TIMES_SILENT, LEAST_S, ENOUGH = 20.0, 20.0, 50
#: Seconds that a process has to end by itself when the server closes.
CLOSES_S = 5.0


class Watching(Protocol):
    """Who is told of an engine: the front, or one of its replicas."""

    ready: bool

    @property
    def under_way(self) -> int: ...
    def built(self, facts: EngineFacts) -> None: ...
    def arrived(self, pieces: list[Generated], figures: EngineFigures | None) -> None: ...
    def lost(self) -> None: ...
    def die(self, why: str) -> None: ...


class EngineProcess:
    """The engine of a front, in a process of its own: ``python -m MODULE DESCRIPTOR``.

    ``stall_s`` is how long requests may be under way without a word from the engine before it is taken to hang. Where
    it ``learns``, and has heard of enough iterations, that is :data:`TIMES_SILENT` times the longest that it was silent
    before it went on, and :data:`LEAST_S` at least. ``say``
    gets a line for every death, and ``environment`` is put over this process's own."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        module: str = WORKER,
        python: Sequence[str] = (),
        stall_s: float = 300.0,
        learns: bool = False,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.spec, self.stall_s, self.learns, self._say = spec, stall_s, learns, say
        self._longest_s, self._heard = 0.0, 0
        self._environment = dict(environment or {})
        self._command = [*(python or (sys.executable,)), "-m", module]
        self._front: Watching | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task] = []
        self._heard_s = self._build_s = 0.0
        self._hung = False

    @property
    def pid(self) -> int:
        """The engine's process, 0 where there is none at the moment."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def open(self, front: Watching) -> None:
        """Start the engine, and return once it is built.

        Raises:
            MeshwrightError: it cannot be built, or its process died on the way (L007).
        """
        self._front = front
        began_s, reader = time.monotonic(), await self._start()
        try:
            front.built(await self._built(reader))
            self._build_s = BUILD_TIMES * (time.monotonic() - began_s) + SHORT_S
        except EOFError as error:
            await self._end()
            message = str(error) or "the engine's process ended before its engine was there"
            help = "what it said is above; a model that needs more memory than there is ends so"
            raise MeshwrightError.one("L007", message, place="meshwright serve", help=help) from None
        except BaseException:
            await self._end()
            raise
        self._tasks = [asyncio.create_task(self._kept(reader)), asyncio.create_task(self._watched())]

    async def close(self, grace_s: float = CLOSES_S) -> None:
        """End the process and all it started, which have so many seconds to end by themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end(grace_s)

    def order(self, asked: tuple[Prompted, ...] = (), cancelled: tuple[int, ...] = ()) -> None:
        """Send orders to the engine; what is lost with its process is sent again by the front."""
        if self._writer is not None:
            self._writer.write(wire.frame(wire.Orders(asked, cancelled)))

    async def _start(self) -> asyncio.StreamReader:
        """Start a process, and order its engine."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | self._environment,
            )
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
        self._writer.write(wire.frame(wire.Start(self.spec)))
        self._heard_s = time.monotonic()
        return reader

    async def _built(self, reader: asyncio.StreamReader):
        """Wait for the engine's facts.

        Raises:
            EOFError: the process died.
            MeshwrightError: the engine cannot be built.
        """
        message = await _read(reader)
        if isinstance(message, wire.Unbuilt):
            raise MeshwrightError(message.wrong)
        assert isinstance(message, wire.Built)
        return message.facts

    async def _kept(self, reader: asyncio.StreamReader) -> None:
        """Listen to engine after engine, until none can be had."""
        assert self._front is not None
        short, why = 0, ""
        while True:
            began_s = time.monotonic()
            try:
                await self._listen(reader)
            except EOFError as error:
                if str(error):
                    self._say(str(error))
            await self._end()
            assert self._process is not None
            self._say(f"the engine's process {self._process.pid} ended ({_ending(self._process.returncode)})")
            self._front.lost()
            lived_s, hung, self._hung = time.monotonic() - began_s, self._hung, False
            short = short + 1 if lived_s < SHORT_S + (self.stall_s if hung else 0.0) else 0
            while True:
                if short >= GIVEN_UP:
                    self._say("no other engine is started")
                    self._front.die(why or f"{short} processes died or hung within {SHORT_S:g} s of work each")
                    return
                if short > 1:
                    await asyncio.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (short - 2)))
                try:
                    reader = await self._start()
                    async with asyncio.timeout(self._build_s):
                        self._front.built(await self._built(reader))
                    break
                except (EOFError, OSError, TimeoutError):
                    short += 1
                    await self._end()
                except MeshwrightError as error:
                    short, why = GIVEN_UP, str(error.diagnostics[0].message)
                    await self._end()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Hand on what an engine reports, until it is gone.

        Raises:
            EOFError: it is.
        """
        assert self._front is not None
        while True:
            message = await _read(reader)
            now_s = time.monotonic()
            if self._front.ready and self._front.under_way:
                self._longest_s, self._heard = max(self._longest_s, now_s - self._heard_s), self._heard + 1
            self._heard_s = now_s
            if isinstance(message, wire.Iterated):
                self._front.arrived(message.pieces, message.figures)

    @property
    def patience_s(self) -> float:
        """How long the engine may be silent with work before it is taken to hang."""
        if not self.learns or self._heard < ENOUGH:
            return self.stall_s
        return min(self.stall_s, max(LEAST_S, TIMES_SILENT * self._longest_s))

    async def _watched(self) -> None:
        """Kill an engine that has work and says nothing. One that was only slow is given that much longer from then
        on."""
        assert self._front is not None
        while True:
            await asyncio.sleep(min(1.0, self.stall_s / 4))
            if not (self._front.ready and self._front.under_way):
                self._heard_s = time.monotonic()  # it has nothing to say
            elif (silent := time.monotonic() - self._heard_s) > self.patience_s:
                self._say(f"the engine said nothing for {silent:.3g} s, and is replaced")
                self._longest_s = max(self._longest_s, silent)
                self._hung, self._heard_s = True, time.monotonic()
                self._kill()

    async def _end(self, grace_s: float = 0.0) -> None:
        """Close the socket, and see the process and all it started ended."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        process = self._process
        if process is None:
            return
        if grace_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        self._kill()
        await process.wait()

    def _kill(self) -> None:
        """Kill the process's whole session: the ranks that it started too."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _read(reader: asyncio.StreamReader) -> wire.FromEngine:
    """Return the next message.

    Raises:
        EOFError: there is none any more, or what came is none.
    """
    try:
        (length,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
        return wire.read_answer(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise EOFError from None
    except msgspec.DecodeError as error:
        raise EOFError(f"the engine's process said what is no message: {error}") from None


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _has_descriptor(stream) -> bool:
    try:
        return stream is not None and stream.fileno() >= 0
    except (OSError, ValueError):
        return False
