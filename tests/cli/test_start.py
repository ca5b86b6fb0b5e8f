"""What the program does before it does anything: help, version, wrong words; cheap, and without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import COMMANDS, main

PROGRAM = [sys.executable, "-m", "meshwright"]
LOADED = "import sys; from meshwright.cli import main\ntry:\n main({!r})\nexcept SystemExit:\n pass\n"


def modules_after(argv):
    code = LOADED.format(argv) + "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS), ["explain", "mfu"]])
def test_help_loads_neither_torch_nor_numba_nor_numpy(argv):
    assert not modules_after(argv) & {"torch", "numba", "numpy", "scipy"}


def test_help_names_every_command_and_exits_0(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in COMMANDS)


def test_no_words_at_all_show_the_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: meshwright COMMAND")


def test_version_is_the_package_s(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"meshwright {version('meshwright')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_exits_0_and_lists_json(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert not stop.value.code
    assert "--json" in capsys.readouterr().out


def test_an_unknown_command_suggests_the_nearest_and_exits_2(capsys):
    assert main(["predikt"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error[X002]: no command 'predikt'" in err
    assert "did you mean predict?" in err


def test_an_unknown_option_suggests_the_nearest_and_does_not_blame_its_value(capsys):
    assert main(["explain", "mfu", "--jsn", "yes"]) == 2
    err = capsys.readouterr().err
    assert "error[X003]: unknown option '--jsn'" in err
    assert "did you mean --json?" in err
    assert "yes" not in err


def test_an_option_without_its_value_is_one_error_in_plain_words(capsys):
    assert main(["predict", "gpt2", "--on"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error[X004]: ")
    assert "--on" in err
    assert not set(err) & set("│╭╮╰╯─")


def fails(error):
    def run(argv):
        raise error

    return run


def test_a_fault_of_ours_is_one_line_and_exit_70(capsys, monkeypatch):
    monkeypatch.delenv("MESHWRIGHT_DEBUG", raising=False)
    monkeypatch.setattr("meshwright.cli.explain.run", fails(ZeroDivisionError("a bug")))
    assert main(["explain", "mfu"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("meshwright failed: ZeroDivisionError: a bug\n")
    assert "Traceback" not in err


def test_a_fault_of_ours_shows_where_with_meshwright_debug(monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_DEBUG", "1")
    monkeypatch.setattr("meshwright.cli.explain.run", fails(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        main(["explain", "mfu"])


def test_ctrl_c_is_exit_130_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr("meshwright.cli.explain.run", fails(KeyboardInterrupt()))
    assert main(["explain", "mfu"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_goes_away_is_not_an_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*PROGRAM, "catalog"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


def test_an_option_said_twice_is_refused(capsys):
    words = ["predict", "llama3-8b", "--on", "8xh100", "--train", "batch=8,seq=128", "--plan", "fsdp", "--plan", "tp8"]
    assert main(words) == 2
    assert "error[X005]: --plan is given 2 times" in capsys.readouterr().err


def test_a_closed_stdout_leaves_the_exit_code():
    done = subprocess.run([*PROGRAM, "explain", "mfu"], stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_no_fault_of_the_program():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*PROGRAM, "explain", "mfu"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (74, "cannot write the answer: No space left on device\n")
