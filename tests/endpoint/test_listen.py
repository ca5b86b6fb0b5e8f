"""A live socket: heads and bodies without end, hang-ups and slow readers leave nothing behind, and signals drain."""

import contextlib
import json
import random
import re
import signal
import socket
import threading
import time

import pytest
from fuzz import mutate
from fuzz.fake_engine import FakeEngine, Inside

from meshwright.endpoint import hosts, listen
from meshwright.endpoint.front import Limits
from tests.endpoint.local import app


class Paced(Inside):
    """An engine that computes an iteration every `seconds`, while the event loop goes on."""

    seconds = 0.0

    def _step(self):
        self._front.arrived(self.engine.step(), self.engine.figures())
        self._due = not self.engine.idle
        if self._due:
            self._loop.call_later(self.seconds, self._step)


class Live:
    """A server in a thread of this process."""

    def __init__(self, folder, seconds=0.0, context=512, **limits):
        self.engine = FakeEngine(context=context, blocks=100_000)
        self.app = app(folder, limits=Limits(**limits))
        self.app.engine = self.app.front.engine = Paced(self.engine)
        self.app.engine.seconds = seconds
        self.said, started = [], threading.Event()
        self.socket = hosts.bind("127.0.0.1", 0, 0)
        self.listener = listen.listener(self.app, started.set, self.said.append)
        self.thread = threading.Thread(target=self.listener.run, kwargs={"sockets": [self.socket]})
        self.address, self.made = self.socket.getsockname(), []
        self.thread.start()
        assert started.wait(10)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for made in self.made:
            made.close()
        self.listener.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def connect(self):
        made = socket.create_connection(self.address, timeout=10)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.made.append(made)
        return made

    def send(self, body, head=()):
        """Send a completion; the connection, whose answer is not read."""
        made, data = self.connect(), json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *head]
        made.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)
        return made


def answer(made):
    """Read a connection until the server closes it, or says no more; status and body."""
    data = b""
    while b"\r\n\r\n" not in data and (new := made.recv(65536)):
        data += new
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(found[1]) if (found := re.search(rb"content-length: (\d+)", head)) else None
    while (length is None or len(body) < length) and (new := made.recv(65536)):
        body += new
    return int(head.split()[1]), body


def until(true, seconds=10.0):
    """Wait until something holds."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.fixture(scope="module")
def live(folder):
    with Live(folder, body_bytes=100_000, body_s=0.3) as found:
        yield found


HELLO = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 90 + b"\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    ],
)
def test_a_head_that_is_none_or_too_long_is_an_error_as_json_and_the_end(live, sent, status):
    made = live.connect()
    made.sendall(sent)
    got, body = answer(made)
    assert got == status and json.loads(body)["error"]["code"] == "invalid_http"
    assert answer(live.send(HELLO))[0] == 200


def test_bytes_that_are_nearly_http_are_no_fault_of_the_server(live, capfd):
    body = json.dumps(HELLO).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    plain = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    waits = head + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    seeds = [plain, waits + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), plain + plain, b"GET / HTTP/1.0\r\n\r\n"]
    broken = live.connect()
    broken.sendall(waits + b"no size\r\n")
    assert answer(broken)[0] == 400
    rng = random.Random(0)
    for _ in range(150):
        made = live.connect()
        with contextlib.suppress(OSError):  # the server may close before all is sent
            made.sendall(mutate.text(rng, rng.choice(seeds), seeds)[:100_000])
            made.shutdown(socket.SHUT_WR)
        made.close()
    until(lambda: not live.app.front.under_way and live.engine.idle)
    assert answer(live.send(HELLO))[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_without_end_is_cut_off(live):
    made = live.connect()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    made.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
    for _ in range(50):
        made.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
    assert answer(made)[0] == 413  # before its end, which never comes
    ends = time.monotonic() + 10
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while time.monotonic() < ends:
            made.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
            time.sleep(0.001)
    assert answer(live.send(HELLO))[0] == 200


def test_a_body_that_never_comes_is_given_up(live):
    made = live.connect()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    made.sendall((head + 'Content-Length: 50\r\n\r\n{"prompt"').encode())
    status, body = answer(made)
    assert status == 408 and json.loads(body)["error"]["code"] == "timeout"
    assert made.recv(10) == b""  # closed


def test_a_head_that_never_ends_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(listen, "HEAD_S", 0.2)
    with Live(folder) as live:
        silent, slow = live.connect(), live.connect()
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        for made in (silent, slow):
            with contextlib.suppress(ConnectionResetError):
                assert made.recv(10) == b""
        made = live.send(HELLO)  # a connection that has asked may think for longer
        assert answer(made)[0] == 200
        time.sleep(0.3)
        made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(made)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_blocks(folder, stream):
    with Live(folder, seconds=0.005, context=100_000) as live:
        made = live.send({**HELLO, "max_tokens": 50_000, "stream": stream})
        until(lambda: live.engine.figures().blocks_used)
        made.close()
        until(lambda: live.engine.idle)
        assert live.engine.figures().blocks_used == 0 and live.app.front.under_way == 0


def test_a_reader_that_takes_nothing_is_dropped_and_frees_its_blocks(folder):
    with Live(folder, seconds=0.001, context=100_000, slow_s=0.2) as live:
        wanted = {"max_tokens": 20_000, "n": 16, "stream": True, "logprobs": 8}  # 150 MB: no buffer takes them
        live.send({**HELLO, **wanted})
        until(lambda: live.engine.figures().blocks_used)
        until(lambda: live.engine.idle and not live.app.front.under_way, 20)
        assert live.engine.figures().tokens < 16 * 20_000 and live.engine.figures().blocks_used == 0
        until(lambda: not live.listener.server_state.connections)
        assert answer(live.send(HELLO))[0] == 200


def test_the_first_signal_drains_and_the_server_ends_once_all_is_answered(folder):
    with Live(folder, seconds=0.005) as live:
        made, other = live.send({**HELLO, "max_tokens": 60}), live.connect()
        until(lambda: live.app.front.under_way)
        live.listener.handle_exit(signal.SIGTERM, None)
        until(lambda: live.app.front.draining)
        other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(other)[0] == 503
        refused = answer(live.send(HELLO))
        assert refused[0] == 503 and json.loads(refused[1])["error"]["code"] == "draining"
        status, body = answer(made)
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 60
        live.thread.join(10)
        assert not live.thread.is_alive() and live.said == ["finishing 1 requests; once more ends at once"]


def test_the_second_signal_ends_at_once(folder):
    with Live(folder, seconds=0.05, context=100_000) as live:
        with live.send({**HELLO, "max_tokens": 50_000}):
            until(lambda: live.app.front.under_way)
            for _ in range(2):
                live.listener.handle_exit(signal.SIGINT, None)
            live.thread.join(10)
        assert not live.thread.is_alive() and live.app.engine.closed
