"""Reading options: what is read at once and what tyro reads are the same, and what is not plain goes to tyro."""

from importlib import import_module

import pytest

from meshwright.cli import COMMANDS, main
from meshwright.cli.help_text import help_text
from meshwright.cli.options import _parsed, _plain, read

READ_AT_ONCE = [
    ("predict", []),
    ("predict", ["llama3-70b", "--on", "64xh100", "--train", "batch=512,seq=8192", "--plan", "tp8 pp4 zero1"]),
    ("predict", ["--on=64xh100", "--plan=tp8 pp4", "--json", "llama3-70b"]),
    ("predict", ["q.toml", "--report", "a=b.html"]),
    ("search", ["m", "--fix", "tp=8", "--fix=pp=4", "--bound", "pp<=16", "--allow", "dtype=fp8", "--show"]),
    ("diff", ["a.json", "b.json", "--on", "8xh100", "--on", "8xa100", "--json"]),
    ("diff", ["--plan", "tp8", "--plan", "tp4", "llama3-8b"]),
    ("run", ["plan.toml", "--save-every", "5", "--resume", "--lr", "3e-4"]),
]
NOT_PLAIN = [
    ["--help"],
    ["-h"],
    ["m", "--frob", "x"],
    ["m", "another"],
    ["m", "--on"],
    ["m", "--on", "--json"],
    ["m", "--on", ""],
    ["m", "--on="],
    ["m", "--on", "a", "--on", "b"],
    ["m", "--json", "--json"],
    ["m", "--json=yes"],
    ["m", "--on", "-1"],
    [""],
]


def kind_of(command):
    return getattr(import_module(f"meshwright.cli.{command}"), f"{command.capitalize()}Options")


@pytest.mark.parametrize(("command", "argv"), READ_AT_ONCE)
def test_plain_words_mean_what_tyro_reads_in_them(command, argv):
    assert _plain(kind_of(command), argv) is not None
    assert (_plain(kind_of(command), argv), []) == _parsed(kind_of(command), argv, command)


@pytest.mark.parametrize("argv", NOT_PLAIN)
def test_words_with_anything_odd_are_left_to_tyro(argv):
    assert _plain(kind_of("predict"), argv) is None


def test_positions_apart_are_left_to_tyro():
    assert _plain(kind_of("diff"), ["a", "--on", "8xh100", "b"]) is None


@pytest.mark.parametrize(
    ("argv", "help"),
    [
        (["llama3-8b", "--cluster", "8xh100"], "did you mean --on?"),
        (["llama3-8b", "--gpus=8xh100"], "did you mean --on?"),
        (["llama3-8b", "--workload", "batch=8"], "did you mean --train?"),
        (["--model", "llama3-8b"], "write MODEL without --model, first"),
    ],
)
def test_an_option_of_other_programs_is_told_ours(argv, help):
    _, (unknown,) = read(kind_of("predict"), argv, command="predict", description="")
    assert (unknown.code, unknown.help) == ("X003", help)


def test_an_argument_that_is_not_there_is_empty_beside_an_unknown_option():
    options, _ = read(kind_of("predict"), ["--model", "llama3-8b"], command="predict", description="")
    assert options.model == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_lines_between_words_and_leaves_one_line_between_paragraphs(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    # a word that is longer than the line stays whole
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in shown.splitlines())
    assert "\n\n\n" not in shown and "  -h, --help" in shown


def test_help_says_every_option_with_its_value():
    shown = help_text("try", "Try it.", [("WHAT", "The thing.")], [("--a-rather-long-option FILE.csv", "Write it.")])
    head, said, argument, option = shown.split("\n\n")
    assert (head, said, argument.split()[:2]) == (
        "usage: meshwright try WHAT [OPTIONS]",
        "Try it.",
        ["arguments:", "WHAT"],
    )
    assert option.splitlines()[-2:] == ["  --a-rather-long-option FILE.csv", " " * 26 + "Write it."]
