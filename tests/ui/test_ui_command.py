"""`meshwright ui`: where it listens, what it opens with, and how it says no."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from meshwright.cli import main, needs, ui
from meshwright.ui import serve
from tests.cli.tiny import tiny
from tests.ui.local import asked, client


@pytest.fixture
def served(monkeypatch):
    """List what the command would serve, as (host, start, browse), instead of serving it."""
    calls = []

    def instead(made, host, start, ready, *, browse):
        ready()
        made.close()
        calls.append((host, start, browse))

    monkeypatch.setattr(serve, "serve", instead)
    return calls


def test_the_page_is_on_loopback_unless_said_and_opens_a_browser_unless_not(served, capsys):
    assert main(["ui", "--port", "0"]) == 0
    said = capsys.readouterr()
    assert served == [("127.0.0.1", {}, True)]
    assert said.out.startswith("http://127.0.0.1:") and "warning" not in said.err
    assert main(["ui", "--port", "0", "--no-open", "--host", "0.0.0.0"]) == 0
    assert served[1] == ("0.0.0.0", {}, False) and "warning" in capsys.readouterr().err


def test_json_names_the_url(served, capsys):
    main(["ui", "--port", "0", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["format_version"] == 1 and said["url"].startswith("http://127.0.0.1:")


def test_it_opens_with_the_question_of_the_command_or_of_a_file(served, tmp_path):
    words = asked()
    main(["ui", words["model"], "--on", words["on"], "--train", words["train"], "--plan", words["plan"], "--port", "0"])
    file = tmp_path / "question.toml"
    file.write_text("format_version = 1\n" + "".join(f"{key} = {json.dumps(text)}\n" for key, text in words.items()))
    main(["ui", str(file), "--port", "0"])
    starts = [start for _, start, _ in served]
    assert starts[0]["model"] == "llama3-8b" and starts[0]["plan"].startswith("tp2 pp2 vpp2")
    assert starts[0] == starts[1]


def test_files_of_the_command_line_become_pasted_texts(served, tmp_path):
    tiny(tmp_path)
    main(["ui", str(tmp_path / "tiny"), "--port", "0"])
    start = served[0][1]
    assert start["model"] == "tiny" and json.loads(start["config"])["num_hidden_layers"] == 2
    with client() as page:
        body = {**asked(**start), "plan": "tp2"}
        found = page.post("/api/answer", json={"page": "x", "body": {"asked": body}}).json()
    assert found["answer"]["errors"] == []


def test_everything_that_is_wrong_is_said_at_once(capsys):
    words = ["ui", "lama", "--on", "none.toml", "--plan", "tq2", "--port", "70000", "--json"]
    assert main(words) == 2
    found = {e["code"] for e in json.loads(capsys.readouterr().out)["errors"]}
    assert {"M006", "C004", "P001", "I010"} <= found


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    assert main(["ui"]) == 2
    said = capsys.readouterr().err
    assert "starlette and uvicorn, not installed here" in said and 'pip install "meshwright[ui]"' in said


def test_the_command_s_options_are_those_of_a_question():
    assert {"model", "on", "train", "plan", "framework"} < set(ui.UiOptions.__struct_fields__)


def test_the_command_serves_until_ctrl_c_and_leaves_no_process_behind():
    words = [sys.executable, "-m", "meshwright", "ui", "--no-open", "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        lines = [running.stdout.readline() for _ in range(4)]  # {, format_version, url, }
        url = json.loads("".join(lines))["url"]
        with urllib.request.urlopen(url, timeout=30) as page:
            assert page.status == 200 and b"Meshwright" in page.read()
        workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    assert running.returncode == 0 and said.strip().splitlines()[-1] == "closed"
    assert "Traceback" not in said and workers
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
