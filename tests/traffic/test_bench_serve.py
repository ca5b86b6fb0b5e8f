"""The command: what it prints, keeps and refuses."""

import asyncio
import json
import threading

import pytest

from meshwright.cli import main
from meshwright.traffic import record
from tests.traffic.servers import Engine, app, serving

WORDS = "rate=40,prompt=30,output=4,requests=10,ttft=10s"


@pytest.fixture(scope="module")
def url():
    """A server in a thread, with an engine of milliseconds."""
    ready, over = threading.Event(), threading.Event()
    place = []

    async def work():
        engine = Engine(prompt_s=0.001, prompt_token_s=0.00001, step_s=0.001, sequence_s=0.0)
        async with serving(app(engine, models=("tiny", "other"), context=100), engine) as at:
            place.append(at)
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    ready.wait(20)
    yield place[0]
    over.set()
    thread.join(20)


def test_a_workload_is_measured_kept_and_gone_on_with(url, tmp_path, capsys):
    out, trace = tmp_path / "measured.jsonl", tmp_path / "measured.json"
    asked = ["bench-serve", url, "--serve", WORDS, "--out", str(out), "--json"]
    assert main([*asked, "--trace", str(trace), "--model", "other"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["answered"], said["model"], said["prompt_off"], said["shorter"]) == (10, "other", 0, 0)
    assert said["metrics"]["ttft_s"]["mean"] > 0.001 and said["objectives"][0][0] == "ttft_s"
    assert len(record.read(out).answered) == 10
    from meshwright.trace import read

    assert len(read(str(trace)).records["requests"]["first_s"]) == 10
    assert main(asked) == 2  # it exists
    assert "--resume goes on with it" in capsys.readouterr().out
    assert main([*asked, "--resume"]) == 2  # of the other model
    assert "T004" in capsys.readouterr().out
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:5]))
    assert main([*asked[:-1], "--model", "other", "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "10 of 10 answered" in shown and "2 runs" in shown


def test_an_objective_that_is_missed_is_exit_code_1(url, capsys):
    assert main(["bench-serve", url, "--serve", WORDS.replace(",ttft=10s", ""), "--slo", "ttft=1us"]) == 1
    assert "misses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["http://127.0.0.1:9", "--serve", WORDS], "T001", "cannot connect"),
        (["ftp://there", "--serve", WORDS], "T001", "'ftp://there' is no server's URL"),
        (["URL", "--serve", WORDS, "--model", "tinny"], "T003", "did you mean tiny"),
        (["URL", "--serve", "rate=4,promt=30,output=4"], "W001", "prompt"),
        (["URL", "--serve", WORDS, "--slo", "tfft=1s"], "W001", "'tfft' is no objective"),
        (["URL", "--serve", WORDS.replace("30", "300")], "W012", "longest=100"),
        (["URL", "--serve", WORDS, "--tokenizer", "/nowhere.json"], "T007", "cannot read"),
        (["URL", "--serve", WORDS, "--api-key", "env:NOT_THERE_1"], "T002", "NOT_THERE_1 is not set"),
        (["URL", "--serve", WORDS, "--timeout", "soon"], "L005", "--timeout"),
        (["URL", "--serve", WORDS, "--resume"], "T004", "--out FILE"),
        (["--serve", WORDS], "X004", "URL"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_error(url, words, code, said, capsys):
    assert main(["bench-serve", *(url if word == "URL" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert f"error[{code}]" in error and said in error and "help:" in error


def test_a_server_of_something_else_is_said_to_be_none(capsys):
    async def work():
        async def other(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            writer.close()

        server = await asyncio.start_server(other, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        code = await asyncio.to_thread(main, ["bench-serve", f"http://127.0.0.1:{port}", "--serve", WORDS])
        server.close()
        await asyncio.sleep(0.1)
        return code

    assert asyncio.run(work()) == 2
    assert "error[T002]" in capsys.readouterr().err
