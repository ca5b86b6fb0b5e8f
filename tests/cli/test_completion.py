"""Completion in a shell: commands, their options, names of the catalog, words of a plan."""

import shutil
import subprocess
import sys

import pytest

from meshwright.cli import COMMANDS, main
from meshwright.cli.completion import candidates


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("meshwright ", ["predict", "search", "--help"]),
        ("meshwright pre", ["predict"]),
        ("meshwright predict llama3-8", ["llama3-8b"]),
        ("meshwright predict llama3-8b --fram", ["--framework"]),
        ("meshwright predict llama3-8b --framework torcht", ["torchtitan", "torchtitan-compile"]),
        ("meshwright predict llama3-8b --on jean", ["jean-zay"]),
        ('meshwright predict llama3-8b --plan "tp8 zb', ["zb-h1", "zb-v"]),
        ('meshwright predict llama3-8b --plan "', ["fsdp", "tp8", "overlap="]),
        ("meshwright predict llama3-8b --train b", ["batch="]),
        ("meshwright export q.toml --to mega", ["megatron"]),
        ("meshwright whatif q.toml --try ", ["all", "zero-bubble"]),
        ("meshwright explain headr", ["headroom"]),
        ("meshwright catalog dev", ["devices"]),
        ("meshwright completion z", ["zsh"]),
    ],
)
def test_a_line_is_completed(line, some):
    found = candidates(line)
    assert set(some) <= set(found)
    typed = "" if line[-1] in ' "' else line.replace('"', " ").split()[-1]
    assert all(word.startswith(typed) for word in found)
    assert found == sorted(found)


@pytest.mark.parametrize("line", ["meshwright nosuch ", "meshwright predict llama3-8b --report ", 'x " " "'])
def test_what_cannot_be_completed_is_left_to_the_shell(line):
    assert candidates(line) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_completes_its_options(command):
    assert "--help" in candidates(f"meshwright {command} --")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_with_the_script(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    program = tmp_path / "meshwright"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    program.chmod(0o755)
    script = capsys.readouterr().out + (
        'COMP_LINE="meshwright explain headr"; COMP_POINT=${#COMP_LINE}; _meshwright; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", f'PATH="{tmp_path}:$PATH"\n{script}'], capture_output=True, text=True, timeout=60, check=True
    )
    assert "headroom" in done.stdout.split()


def test_another_shell_is_told_which_there_are(capsys):
    assert main(["completion", "bsh"]) == 2
    err = capsys.readouterr().err
    assert "X012" in err and "did you mean bash" in err
