"""The server: bounded, strict, only for its own page, and not taken down by anything that is sent to it."""

import json
import random
import re
from pathlib import Path

import pytest

from meshwright.ui import page as pages
from meshwright.ui.guard import HEADERS
from meshwright.ui.pool import LIMITS_S
from meshwright.ui.server import MAX_BODY
from tests.ui.local import answer, asked, client

SENT = {"page": "test", "body": {"asked": asked(), "moves": {"tp": 1}}}


@pytest.fixture(scope="module")
def page():
    with client() as found:
        yield found


def code(response):
    return response.json()["errors"][0]["code"]


def test_the_page_loads_nothing_inline_and_nothing_from_elsewhere(page):
    html = page.get("/").text
    assert re.findall(r"<script(?! src=| type=\"application/json\")", html) == [] and "<style" not in html
    assert re.findall(r"\s(?:style|on\w+)=", html) == [] and "http" not in html
    files = re.findall(r'(?:src|href)="/static/([^"]+)"', html)
    assert set(files) == {pages.THEME, *pages.REPORT_STYLES, *pages.STYLES, *pages.REPORT_SCRIPTS, *pages.SCRIPTS}
    assert all(page.get(f"/static/{name}").status_code == 200 for name in files)


def test_every_control_of_the_page_has_a_label(page):
    html = page.get("/").text
    named = set(re.findall(r'<label[^>]* for="([^"]+)"', html))
    inputs = re.findall(r"<(?:input|select|textarea)\b([^>]*)>", html)
    alone = [i for i in inputs if not (set(re.findall(r'\bid="([^"]+)"', i)) & named) and 'role="switch"' not in i]
    assert len(inputs) > 20 and alone == []


def test_every_response_forbids_inline_code_frames_and_sniffing(page):
    for path in ("/", "/static/ui.css", "/nowhere", "/api/catalog"):
        headers = page.get(path).headers
        assert {name: headers[name] for name in HEADERS} == HEADERS
        assert "access-control-allow-origin" not in headers
    assert "unsafe" not in HEADERS["content-security-policy"]


@pytest.mark.parametrize("path", ["/x", "/static/../server.py", "/static/server.py", "/api", "/api/x", "//etc/passwd"])
def test_an_unknown_path_is_404_as_json(page, path):
    response = page.get(path)
    assert response.status_code == 404 and code(response) == "I003"


def test_another_method_is_405_as_json(page):
    response = page.get("/api/answer")
    assert response.status_code == 405 and code(response) == "I003"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil", "[", "a@b"])
def test_a_name_that_was_rebound_to_this_machine_is_refused(page, host):
    response = page.get("/", headers={"Host": host})
    assert response.status_code == 421 and code(response) == "I004"


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:1", "[::1]:80", "192.168.1.5:7860"])
def test_addresses_and_localhost_are_served(page, host):
    assert page.get("/", headers={"Host": host}).status_code == 200


def test_a_post_of_another_site_is_refused(page):
    response = page.post("/api/answer", json=SENT, headers={"Origin": "http://evil.example"})
    assert response.status_code == 403 and code(response) == "I004"
    assert page.post("/api/answer", json=SENT, headers={"Origin": "http://127.0.0.1"}).status_code == 200


def test_a_form_of_another_site_cannot_ask(page):
    response = page.post("/api/answer", content=json.dumps(SENT), headers={"Content-Type": "text/plain"})
    assert response.status_code == 415 and code(response) == "I001"


def test_a_body_that_is_too_long_is_413(page):
    headers = {"Content-Type": "application/json"}
    response = page.post("/api/answer", content=b" " * (MAX_BODY + 1), headers=headers)
    assert response.status_code == 413 and code(response) == "I002"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"page": 1}', b'{"page": "x", "y": 1}']
)
def test_a_body_that_is_no_request_is_400_with_the_product_s_error(page, body):
    response = page.post("/api/answer", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and code(response) == "I001"


def test_a_question_of_another_form_says_where(page):
    found = answer(page, asked=asked(plan=3))
    assert found["errors"][0]["code"] == "I001" and "$.asked.plan" in found["errors"][0]["message"]
    assert answer(page, "panel", asked=asked(), panel="x")["errors"][0]["code"] == "I001"


def test_a_search_streams_its_progress_and_then_its_plans(page):
    few = "tp=2 pp=1 mb=1,2 dtype=bf16 recompute=none zero=1 cp=1 order=tp-cp-dp-pp"
    body = {"asked": asked(plan="", on="2xh100"), "fix": few, "top": 3}
    text = page.post("/api/search", json={"page": "test", "body": body}).text
    events = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
    assert events[0][0] == "begun" and events[-1][0] == "answer"
    assert {name for name, _ in events[1:-1]} == {"progress"}
    found = json.loads(events[-1][1])["answer"]
    assert found["fits"] and 1 <= len(found["rows"]) <= 3 and found["points"]
    for row in found["rows"]:  # what it found is legal as it is loaded
        assert answer(page, asked=asked(plan=row["plan"], on="2xh100"))["answer"]["errors"] == []


@pytest.mark.parametrize("changes", [{"objective": "speed"}, {"fix": "tq=1"}, {"pareto": ["step", "x"]}])
def test_a_search_that_cannot_be_says_why(page, changes):
    body = {"asked": asked(plan=""), **changes}
    text = page.post("/api/search", json={"page": "test", "body": body}).text
    assert json.loads(text.split("event: answer\ndata: ")[1])["errors"][0]["code"].startswith("R")


WORDS = [
    "llama3-8b",
    "8xh100",
    "batch=8,seq=64",
    "tp2 pp2",
    "2bp:" * 400,
    "9" * 300,
    "../" * 9,
    "\x00",
    "é√",
    "-1",
    "",
    "zero1 " * 300,
]


def mutated(rng):
    """A request with something else in some places: a value of another type, an odd text, cut or spliced bytes."""
    table = json.loads(json.dumps(SENT))
    for _ in range(rng.randint(1, 3)):
        where = rng.choice([table, table["body"], table["body"].get("asked"), table["body"].get("moves")])
        if not isinstance(where, dict) or not where:
            continue
        key = rng.choice([*where, "zzz"])
        where[key] = rng.choice([*WORDS, None, 1e308, -7, True, [], {}, [[]], {"a": {}}, 10**30])
        if not isinstance(table.get("body"), dict):
            table["body"] = {"asked": asked()}
    data = bytearray(json.dumps(table).encode())
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 3)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
    return bytes(data)


def test_300_fuzzed_requests_get_an_answer_each_and_the_server_goes_on(page):
    rng = random.Random(15)
    statuses = set()
    for _ in range(300):
        task = rng.choice(["answer", "answer", "panel", "search/stop", "nothing"])
        response = page.post(f"/api/{task}", content=mutated(rng), headers={"Content-Type": "application/json"})
        statuses.add(response.status_code)
        said = response.json()
        assert response.status_code in (200, 400, 404, 413) and said["format_version"] == 1
        assert all(error["message"] and error["code"] != "I008" for error in said.get("errors", []))
    assert {200, 400, 404} <= statuses
    assert answer(page, asked=asked())["answer"]["errors"] == []


def test_the_bounds_are_those_that_the_book_names():
    book = (Path(__file__).parents[2] / "docs" / "page.md").read_text(encoding="utf-8")
    said = "takes half a mebibyte a request, gives an\nanswer ten seconds and a search ten minutes"
    assert said in book
    assert (MAX_BODY, LIMITS_S["answer"], LIMITS_S["search"]) == (2**19, 10, 600)
