"""The script that writes what the program says today into the book's console blocks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "docs" / "refresh.py"


@pytest.fixture
def refresh():
    spec = importlib.util.spec_from_file_location("refresh", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_block_is_refreshed_at_the_books_width_and_lines_that_are_gone_are_named(refresh, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    widths = []

    def run(command, *, env, **more):
        widths.append(env["COLUMNS"])
        return subprocess.CompletedProcess(command, 0, "step 2 s\nmemory 3 GiB\n", "")

    monkeypatch.setattr(refresh.subprocess, "run", run)
    block = "$ meshwright predict x\nstep 1 s\n...\nbubble 4 s\n"
    assert refresh.refreshed(block) == "$ meshwright predict x\nstep 2 s\n...\nbubble 4 s\n"
    assert widths == ["100"] and capsys.readouterr().err == "not said any more: bubble 4 s\n"


def test_help_says_what_it_does_and_writes_nothing():
    done = subprocess.run([sys.executable, str(FILE), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "console blocks of README.md" in done.stdout and not done.stderr
