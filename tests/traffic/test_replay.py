"""A replay measures the times of a server whose times are known, on a virtual clock where every time is exact."""

import asyncio
import resource
import socket

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from meshwright.errors import MeshwrightError
from meshwright.spec.serve import parse
from meshwright.traffic import record
from meshwright.traffic.events import StreamedAnswer
from meshwright.traffic.http import HttpFault
from meshwright.traffic.session import earlier, opened, replayed
from meshwright.traffic.timeline import timeline
from tests.traffic import virtual
from tests.traffic.servers import Engine, app, serving

#: Times are written to the millionth of a second.
LOOK = 2e-6


def measured(words, engine=None, *, path="", chat=False, before=None, **served):
    """The traffic of a workload against a server of its own."""
    engine = engine or Engine()

    async def work():
        async with serving(app(engine, **served), engine) as url:
            session = await opened(url, salt=1, chat=chat)
            engine.prompts.clear()
            engine.most_running = 0
            serve = parse(words)
            return await replayed(session, serve, serve.drawn(), path=path, before=before)

    return virtual.run(work())


def test_times_of_requests_alone_are_those_of_the_formula():
    traffic, end = measured("concurrency=1,prompt=41,output=5,requests=3")
    for one in traffic.answered:
        # 20 ms and 1 ms for each of 41 tokens, then 10 ms and 2 ms for the one sequence
        assert one.first_s - one.sent_s == pytest.approx(0.061, abs=LOOK)
        assert one.gaps_us == (12000,) * 4
        assert (one.prompt, one.output, one.counted, one.status, one.finish) == (41, 5, False, 200, "length")
    assert not end.gone and end.seconds == pytest.approx(3 * (0.061 + 0.048), abs=0.01)


def test_an_open_loop_is_sent_when_it_is_due_whatever_the_server_does():
    serve = parse("rate=20,prompt=41,output=4,requests=12")
    traffic, _ = measured(serve.text(), Engine(slots=1))
    sent = [traffic.records[number].sent_s for number in range(12)]
    assert sent == pytest.approx(serve.drawn().arrival_s.tolist(), abs=2e-6)
    assert max(one.late_s for one in traffic.records.values()) < 2e-6
    # one after the other: the last one waits for the eleven before it
    assert traffic.records[11].end_s >= 12 * (0.061 + 3 * 0.012) - 1e-6


def test_a_closed_loop_keeps_as_many_open_as_it_says():
    engine = Engine()
    traffic, _ = measured("concurrency=3,prompt=41,output=30,requests=9", engine)
    assert engine.most_running == 3
    counters = {one.name: one for one in timeline(traffic).counters}
    assert (counters["running"].value + counters["waiting"].value).max() == 3
    by_begin = traffic.answered
    freed = sorted(one.end_s for one in by_begin)
    assert [one.sent_s for one in by_begin[3:]] == pytest.approx(freed[:6], abs=1e-3)


def test_turns_of_a_conversation_wait_for_the_answer_and_think():
    traffic, _ = measured("rate=5,turns=3,think=2s,prompt=20,output=3,requests=6,hash_block=16")
    requests = parse(traffic.head.serve).drawn()
    later = np.flatnonzero(requests.after >= 0)
    assert len(later) == 4
    for number in later:
        before = traffic.records[int(requests.after[number])]
        pause = requests.arrival_s[number]
        assert traffic.records[int(number)].sent_s == pytest.approx(before.end_s + pause, abs=2e-6)


def test_prompts_share_what_the_workload_shares_and_nothing_else():
    engine = Engine(prefixes=True)
    traffic, _ = measured("concurrency=1,prompt=100,output=2,prefix=48:groups=2,requests=12,block=16", engine)
    requests = parse(traffic.head.serve).drawn()
    group = requests.hashes[requests.hash_ptr[:-1]]
    assert len(set(group.tolist())) == 2
    for a in range(12):
        for b in range(a):
            same = next((i for i, (x, y) in enumerate(zip(*(engine.prompts[n] for n in (a, b)))) if x != y), 99)
            # 48 tokens, of which the server adds the first itself
            assert same >= 47 if group[a] == group[b] else same < 16
            assert same < 60
    assert {one.prompt for one in traffic.answered} == {100}
    # the server says what it had: three whole blocks of its own, which its first token is in
    first = {int(name): n for n, name in reversed(list(enumerate(group.tolist())))}
    cached = {n: one.cached for n, one in traffic.records.items()}
    assert [cached.pop(n) for n in first.values()] == [0, 0] and set(cached.values()) == {48}


def test_tokens_are_counted_by_pieces_where_the_server_does_not_say():
    async def work():
        engine = Engine()
        async with serving(app(engine, usage=False), engine) as url:
            with pytest.raises(MeshwrightError) as error:
                await opened(url)
            assert [d.code for d in error.value.diagnostics] == ["T007"]

    virtual.run(work())
    traffic, _ = measured("concurrency=1,prompt=20,output=6,requests=2", fault=_silent)
    assert {(one.output, one.counted) for one in traffic.answered} == {(6, True)}


def _silent(number, body):
    """No usage in streams."""
    body.pop("stream_options", None)
    if not body.get("stream"):
        return None

    async def pieces():
        for _ in range(body["max_tokens"]):
            yield 'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n'
        yield 'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'

    return StreamingResponse(pieces(), media_type="text/event-stream")


def test_a_chat_counts_from_its_first_words():
    traffic, _ = measured("concurrency=1,prompt=41,output=5,requests=2", chat=True)
    assert traffic.head.chat
    for one in traffic.answered:
        assert one.first_s - one.sent_s == pytest.approx(0.061, abs=LOOK)
        assert len(one.gaps_us) == 4


def _broken(number, body):
    """The first requests that ask for nine tokens go wrong, each in a way of its own."""
    if body["max_tokens"] != 9 or body["prompt"] in _broken.seen:
        return None
    _broken.seen.add(body["prompt"])
    bodies = [
        'data: {"choices": [{"text": "x"}]}\n\ndata: {nonsense}\n\n',
        'data: {"choices": [{"text": "x"}]}\n\n',
        'data: {"error": {"message": "out of memory"}}\n\n',
        "",
    ]
    if (kind := len(_broken.seen) - 1) < len(bodies):
        return Response(bodies[kind], media_type="text/event-stream")
    return JSONResponse({"error": {"message": "too many"}}, status_code=429) if kind == len(bodies) else None


def test_what_goes_wrong_with_one_request_is_its_error_and_no_other():
    _broken.seen = set()
    traffic, end = measured("concurrency=1,prompt=20,output=9,requests=7", fault=_broken)
    errors = [traffic.records[number].error for number in range(7)]
    said = ["malformed event", "ended before", "out of memory", "ended before", "status 429", "", ""]
    assert all((part in error) if part else not error for part, error in zip(said, errors, strict=True)), errors
    assert len(traffic.answered) == 2 and not end.gone
    assert timeline(traffic).records["errors"]["status"].tolist() == [200, 200, 200, 200, 429]


def test_answers_that_nobody_needs_any_more_are_hung_up_on():
    engine = Engine()
    traffic, _ = measured(
        "concurrency=8,prompt=20,output=200:0.5;4:0.5,samples=4,certain=0.25,requests=8".replace(
            "concurrency=8,", "rate=4,"
        ),
        engine,
    )
    withdrawn = [one for one in traffic.records.values() if one.finish == record.WITHDRAWN]
    assert len(withdrawn) == 6 and len(traffic.answered) == 2
    cut = [one for one in withdrawn if one.output < one.asked]
    assert cut and engine.cancelled == len(cut)


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path):
    words, path = "rate=5,prompt=20,output=8,requests=20", str(tmp_path / "measured.jsonl")

    async def cut(before):
        engine = Engine()
        async with serving(app(engine), engine) as url:
            session = await opened(url, salt=1)
            serve = parse(words)
            work = asyncio.create_task(replayed(session, serve, serve.drawn(), path=path, before=before))
            if before is not None:
                return await work
            await asyncio.sleep(1.5)
            work.cancel()
            return (await asyncio.gather(work, return_exceptions=True))[0]

    virtual.run(cut(None))
    with open(path, "ab") as file:  # noqa: PTH123
        file.write(b'{"number":19,"due_s":1')  # the machine went down while it wrote
    first = record.read(path)
    assert 0 < len(first.records) < 20 and first.parts == 1
    traffic, _ = virtual.run(cut(first))
    again = record.read(path)
    assert again.records == traffic.records and len(again.answered) == 20 and again.parts == 2
    assert {n: one for n, one in again.records.items() if one.part == 0} == first.records
    due = parse(words).drawn().arrival_s
    # on the workload's clock the rest come when they were to
    assert [again.records[n].sent_s for n in range(20)] == pytest.approx(due.tolist(), abs=2e-6)


def test_a_server_that_dies_ends_the_run_and_the_next_one_asks_the_rest(tmp_path):
    words, path = "rate=50,prompt=20,output=8,requests=60", str(tmp_path / "measured.jsonl")
    serve = parse(words)

    async def dying():
        engine = Engine(slots=2)
        async with serving(app(engine), engine) as url:
            session = await opened(url, salt=1)
            work = asyncio.create_task(replayed(session, serve, serve.drawn(), path=path))
            await asyncio.sleep(0.5)
        return await work

    traffic, end = virtual.run(dying())
    assert end.gone and 0 < len(traffic.answered) < 60
    errors = {one.error for one in traffic.records.values() if one.error}
    assert errors and all("closed the connection" in e or "cannot connect" in e for e in errors), errors

    async def again():
        engine = Engine()
        async with serving(app(engine), engine) as url:
            return await replayed(await opened(url, salt=1), serve, serve.drawn(), path=path, before=record.read(path))

    traffic, end = virtual.run(again())
    assert not end.gone and len(traffic.answered) == 60
    assert len(record.read(path).answered) == 60


def test_a_file_that_takes_no_more_ends_the_run_and_is_valid_up_to_there(tmp_path):
    path, before = tmp_path / "measured.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    words = "concurrency=2,prompt=20,output=4,requests=30"
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))  # 30 records take more
    try:
        with pytest.raises(MeshwrightError) as full:
            measured(words, path=str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [d.code for d in full.value.diagnostics] == ["X104"] and "too large" in str(full.value)
    kept = record.read(path)
    assert 0 < len(kept.answered) < 30
    measured(words, path=str(path), before=kept)
    assert len(record.read(path).answered) == 30


def test_a_server_that_takes_connections_and_says_nothing_is_one_error():
    async def work():
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(MeshwrightError, match="T001") as said:
            await opened(f"http://127.0.0.1:{silent.getsockname()[1]}", within_s=0.1)
        assert "does not answer" in str(said.value)

    asyncio.run(work())


def test_a_file_of_another_workload_or_none_is_refused(tmp_path):
    path = tmp_path / "measured.jsonl"
    traffic, _ = measured("concurrency=1,prompt=20,output=2,requests=2", path=str(path))
    ours, other = (
        parse("concurrency=1,prompt=20,output=2,requests=2"),
        parse("concurrency=1,prompt=21,output=2,requests=2"),
    )
    url = traffic.head.url
    assert earlier(str(path), ours.drawn(), url, resume=True)[1] == []
    assert "exists" in earlier(str(path), ours.drawn(), url, resume=False)[1][0].message
    assert "another workload" in earlier(str(path), other.drawn(), url, resume=True)[1][0].message
    assert "another server" in earlier(str(path), ours.drawn(), "http://localhost:1", resume=True)[1][0].message
    path.write_text("number,time\n1,2\n")
    with pytest.raises(MeshwrightError, match="T005"):
        record.read(path)


@pytest.mark.parametrize("piece", [b"data: " + b"a" * 99, b"data: a\n" * 9], ids=["a line", "lines"])
def test_an_event_without_an_end_is_not_read_for_ever(piece, monkeypatch):
    monkeypatch.setattr("meshwright.traffic.events.LONGEST_EVENT", 50)
    answer = StreamedAnswer()
    answer.feed(b"data: {}\n\n" * 9, 0.0)
    with pytest.raises(HttpFault, match="longer than 50"):
        answer.feed(piece, 0.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SMTP ready\r\n\r\n", "begins with"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n", "longer than it says"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -9\r\n\r\nabc", "negative"),
        (b"", "before it answered"),
        (b"x" * 70_000, "head is longer"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2_000, "body is longer than 1,000"),
    ],
)
def test_answers_that_are_no_http_are_faults(answer, said, monkeypatch):
    from meshwright.traffic.http import HttpClient, origin

    monkeypatch.setattr("meshwright.traffic.http.LONGEST_BODY", 1_000)

    async def work():
        async def speak(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await asyncio.sleep(0.01)
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        client = HttpClient(origin(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        with pytest.raises(HttpFault, match=said):
            await client.ask("/v1/models")
        client.close()
        server.close()

    virtual.run(work())


def test_bodies_of_any_framing_are_read_whole_and_free_connections_used_again():
    from meshwright.traffic.http import HttpClient, origin

    made = []
    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3;x=1\r\ncde\r\n0\r\nTrailer: 1\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabcde",
    ]

    async def work():
        async def speak(reader, writer):
            made.append(writer)
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                for place in range(len(answer)):  # a byte at a time, wherever the cuts fall
                    writer.write(answer[place : place + 1])
                    await asyncio.sleep(0.001)
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        client = HttpClient(origin(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        bodies = [(await client.ask("/v1/models")).body for _ in answers]
        assert bodies == [b"abcde"] * 3
        client.close()
        server.close()

    virtual.run(work())
    assert len(made) == 1
