"""The page's server in this process: answers come from the tasks themselves instead of worker processes."""

from __future__ import annotations

from starlette.testclient import TestClient

from meshwright.ui.server import build
from meshwright.ui.worker import perform

QUESTION = {"model": "llama3-8b", "on": "8xh100", "train": "batch=64,seq=2048", "plan": "tp2 pp2 vpp2 zero1"}


class Local:
    """Answers at once, in the order they are asked."""

    async def open(self):
        pass

    async def close(self):
        pass

    async def ask(self, page, task, body):
        return perform(task, body, lambda event: None, lambda: False)

    async def search(self, page, body, event):
        return perform("search", body, event, lambda: False)

    async def stop_search(self, page):
        return False


def client() -> TestClient:
    """A browser's side of the page. Faults of the server are answers, as they are to a browser."""
    return TestClient(build(Local(), {}, "127.0.0.1"), base_url="http://127.0.0.1", raise_server_exceptions=False)


def asked(**changes):
    """A small question, with other texts."""
    return {**QUESTION, **changes}


def answer(page: TestClient, task="answer", **body):
    """The server's answer to a request of the page, as it is in the JSON."""
    return page.post(f"/api/{task}", json={"page": "test", "body": body}).json()
