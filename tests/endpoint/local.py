"""A server over a fake engine in this process, and what a client sends it."""

from __future__ import annotations

import json

from fuzz.fake_engine import FakeEngine, Inside
from starlette.testclient import TestClient

from meshwright.endpoint.app import App, Served
from meshwright.endpoint.front import Limits
from meshwright.endpoint.template import ChatTemplate
from meshwright.endpoint.text import ModelText


def app(folder, *, engine=None, limits=None, keys=(), host="127.0.0.1") -> App:
    """The application over a fake engine."""
    served = Served(
        text=ModelText(folder),
        template=ChatTemplate(folder),
        names=("tiny", str(folder)),
        host=host,
        keys=keys,
        limits=limits or Limits(),
    )
    return App(Inside(engine or FakeEngine()), served)


def client(made: App) -> TestClient:
    return TestClient(made.asgi, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def events(response) -> list:
    """The events of a stream, without its end, which has to be there."""
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
