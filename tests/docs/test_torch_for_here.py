"""Which torch ``make demo`` and ``make test`` install, and that it is said before it is downloaded."""

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = [("torch", "2.13.0+cpu"), ("sympy", "1.14.0")]
CUDA = [("torch", "2.13.0"), ("sympy", "1.14.0"), ("nvidia-cublas", "13.1"), ("triton", "3.7"), ("cuda-toolkit", "13")]


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("torch_for_here", ROOT / "tools" / "torch_for_here.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_any_torch_is_what_the_package_asks_for(tool):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tool.ANY in project["optional-dependencies"]["run"]


def test_without_a_gpu_a_build_for_processors_is_asked_for_unless_another_is_named(tool, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert tool.wanted("", "") == "torch==2.13.0"
    assert tool.wanted("", "nvidia-smi lists a GPU") == "torch>=2.11"
    assert tool.wanted("torch==2.12.1", "") == "torch==2.12.1"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tool.wanted("", "") == "torch>=2.11"


@pytest.mark.parametrize(
    ("coming", "found", "told"),
    [
        (CPU, "", "coming: torch 2.13.0+cpu and 1 packages, none of CUDA"),
        (CUDA, "", "3 of them a GPU's libraries: gigabytes, of no use here: this index has no build of it without"),
        (CUDA, "a GPU", "3 of them a GPU's libraries: gigabytes"),
        ([], "", "torch is here already"),
    ],
)
def test_what_comes_is_said_in_words(tool, coming, found, told):
    said = tool.said(coming, found)
    assert said.startswith(told) or said.endswith(told)


@pytest.mark.parametrize(("lists", "left", "found"), [("GPU 0: H100\n", 0, True), ("No devices\n", 0, False)])
def test_a_driver_s_program_without_a_gpu_is_none(tool, monkeypatch, lists, left, found):
    monkeypatch.setattr(tool.shutil, "which", lambda name: name)
    monkeypatch.setattr(
        tool.subprocess, "run", lambda command, **more: subprocess.CompletedProcess(command, left, lists)
    )
    monkeypatch.setattr(tool.Path, "exists", lambda path: False)
    assert bool(tool.gpu()) is found
    monkeypatch.setattr(tool.Path, "exists", lambda path: str(path) == "/dev/kfd")
    assert tool.gpu()


def test_nothing_is_installed_before_it_is_said_what_comes(tool, monkeypatch, capsys):
    """pip is asked first, without installing; what it answers stands before the installation."""
    order = []

    def pip(command, **more):
        order.append(("asked" if "--dry-run" in command else "installs", capsys.readouterr().err))
        if "--dry-run" in command:
            listed = [{"metadata": {"name": name, "version": version}} for name, version in CUDA]
            Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": listed}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(tool, "gpu", lambda: "")
    monkeypatch.setattr(tool.subprocess, "run", pip)
    assert tool.main(["torch==2.13.0"]) == 0
    (asked, before), (installs, then) = order
    assert (asked, installs) == ("asked", "installs")
    assert "no GPU found here" in before and "make demo TORCH=" in before and "gigabytes, of no use here" in then


def test_make_has_one_way_to_torch():
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert rules.count('tools/torch_for_here.py "$(TORCH)"') == 1
    assert ".venv/run: .venv/torch\n" in rules and ".venv/dev: .venv/torch\n" in rules
