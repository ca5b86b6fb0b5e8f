"""A session with a server: its dialect, a maker of prompts for it, and the file in which a workload's answers go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from secrets import randbits

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.traffic import record
from meshwright.traffic.figures import ServerFigures, watched
from meshwright.traffic.handshake import ServerDialect, greet
from meshwright.traffic.http import HttpClient, origin
from meshwright.traffic.prompts import PromptMaker, prompt_maker
from meshwright.traffic.record import RequestRecord, Traffic, TrafficHead, TrafficJournal
from meshwright.traffic.replay import ReplayEnd, ReplayState, WorkloadReplay

#: Seconds in which a server has to have answered the first requests, where nobody says.
GREETING_S = 120.0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A server that was greeted: its ``client``, how it is asked, and who makes its prompts."""

    client: HttpClient
    dialect: ServerDialect
    prompts: PromptMaker


async def opened(
    url: str,
    *,
    model: str = "",
    api_key: str = "",
    chat: bool = False,
    tokenizer: str = "",
    salt: int = 0,
    within_s: float = GREETING_S,
) -> Session:
    """Greet the server of a URL, which has so many seconds to answer all that it is asked.

    Raises:
        MeshwrightError: T001 to T003 and T007, as :func:`greet` and :func:`prompt_maker` say.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    client = HttpClient(origin(url), headers)
    try:
        async with asyncio.timeout(within_s):
            dialect = await greet(client, model=model, chat=chat)
            prompts = await prompt_maker(client, dialect, tokenizer=tokenizer, salt=salt)
    except TimeoutError:
        client.close()
        message = f"the server takes connections, and does not answer the first requests within {within_s:g} s"
        help = "is it still loading, or stopped? curl URL/v1/models lists its models"
        raise MeshwrightError.one("T001", message, place=client.where.text, help=help) from None
    except BaseException:
        client.close()
        raise
    return Session(client=client, dialect=dialect, prompts=prompts)


def earlier(path: str, requests: Requests, url: str, *, resume: bool) -> tuple[Traffic | None, list[Diagnostic]]:
    """Return the traffic that a file holds where a run is to go on with it, and what is in the way: T004 for a file
    that exists where none is to, or that is of another workload or server."""
    if not path:
        help = "say which: --resume --out FILE"
        lacks = Diagnostic(
            code="T004", message="--resume goes on with a file, and none is said", place="--resume", help=help
        )
        return None, [lacks] if resume else []
    there = Path(path).exists() and Path(path).is_file() and Path(path).stat().st_size > 0
    if not there:
        return None, []
    place = f"--out {path}"
    if not resume:
        what = "measured traffic" if record.is_traffic(path) else "another file"
        help = "--resume goes on with it, if it is of this workload; or name another file"
        return None, [Diagnostic(code="T004", message=f"{path} exists and is {what}", place=place, help=help)]
    try:
        found = record.read(path)
    except MeshwrightError as error:
        return None, list(error.diagnostics)
    wrong = []
    if found.head.digest != record.digest(requests):
        message = f"{path} is of another workload: {found.head.serve} ({found.head.requests:,} requests)"
        wrong.append(Diagnostic(code="T004", message=message, place=place, help="say the same words, or another file"))
    if found.head.url != origin(url).text:
        message = f"{path} is of another server: {found.head.url}"
        wrong.append(Diagnostic(code="T004", message=message, place=place, help="say the same URL, or another file"))
    return found, wrong


def new_salt() -> int:
    """Return a number that no other run begins its prompts from."""
    return randbits(48)


def head_of(session: Session, serve: Serve, requests: Requests) -> TrafficHead:
    """Return the first line of a file of measured traffic."""
    return TrafficHead(
        url=session.client.where.text,
        model=session.dialect.model,
        serve=serve.text(),
        digest=record.digest(requests),
        requests=len(requests),
        concurrency=requests.concurrency,
        chat=session.dialect.chat,
        prompts=session.prompts.how,
        salt=session.prompts.salt,
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def too_long(dialect: ServerDialect, requests: Requests) -> list[Diagnostic]:
    """Return W012 for requests that are longer than the context that a server says."""
    longest = int((requests.prompt + requests.output).max())
    if not dialect.context or longest <= dialect.context:
        return []
    over = int((requests.prompt + requests.output > dialect.context).sum())
    message = (
        f"{over:,} of {len(requests):,} requests are longer than the server's context of {dialect.context:,} tokens"
    )
    help = f"longest={dialect.context} leaves them out"
    return [Diagnostic(code="W012", message=message, place="--serve", help=help)]


async def replayed(
    session: Session,
    serve: Serve,
    requests: Requests,
    *,
    path: str = "",
    before: Traffic | None = None,
    timeout_s: float = 600.0,
    watch: Callable[[ReplayState], None] = lambda state: None,
    keep: Callable[[RequestRecord], None] = lambda one: None,
    looks: bool = False,
) -> tuple[Traffic, ReplayEnd]:
    """Send a workload's requests and return what was measured. Every record is in the file of `path` as soon as its
    request is over, and `keep` is told of it. With `looks` the server's own figures are read now and then."""
    head = before.head if before is not None else head_of(session, serve, requests)
    records = dict(before.records) if before is not None else {}
    figures = list(before.figures) if before is not None else []
    journal = TrafficJournal(path, head, goes_on=before is not None)

    def add(one: RequestRecord) -> None:
        records[one.number] = one
        journal.add(one)
        keep(one)

    replay = WorkloadReplay(
        requests,
        session.prompts,
        session.dialect,
        session.client,
        add=add,
        watch=watch,
        before=before,
        timeout_s=timeout_s,
    )

    def seen(one: ServerFigures) -> None:
        figures.append(one)
        journal.add(one)

    run = asyncio.ensure_future(replay.run())
    await asyncio.sleep(0)  # its clock begins
    tasks = [run]
    if looks:
        tasks.append(asyncio.ensure_future(watched(session.client, lambda: replay.clock_s, seen)))
    try:
        end = await run
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        journal.close()
    return Traffic(head=head, records=records, path=path, figures=tuple(figures)), end
