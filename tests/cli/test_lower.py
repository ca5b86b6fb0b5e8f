"""``meshwright lower``: each pass can be seen, and each mistake is named."""

import json

import pytest

from meshwright.cli import main
from meshwright.cli.lower import PASSES
from meshwright.lower.show import STEPS

QUESTION = ["gpt3-6.7b", "--on", "8xa100", "--train", "batch=8,seq=1024", "--plan", "pp2 tp2 mb1 zero1"]


def lines(capsys, *argv):
    assert main(["lower", *QUESTION, "--json", *argv]) == 0
    return json.loads(capsys.readouterr().out)["lines"]


def test_the_passes_that_help_names_are_those_of_lowering():
    assert tuple(STEPS) == PASSES


def test_every_pass_adds_tasks_or_decides_where_they_go(capsys):
    """By hand: 4 microbatches a replica, 2 stages; F and BW of each, messages both ways, 16 layers a stage."""
    shown = {name: lines(capsys, "--show", name) for name in PASSES}
    assert shown["place"][0].startswith("tp   2 ranks (2 nvlink")
    assert [line.split()[:4] for line in shown["assign"]] == [["stage", "0", "rank", "0"], ["stage", "1", "rank", "1"]]
    whole, cut = 2 * 2 * 4 - 2 - 2, 2 * 16 + 2 * 16  # the first forward and the last backward go layer by layer
    assert len(shown["compute"]) == whole + cut
    assert len(shown["messages"]) == whole + cut + 2 * 4
    assert len(shown["exchanges"]) == whole + cut + 8 + cut  # each of these layers is gathered or reduced
    assert shown["tiers"] == shown["exchanges"]  # all state stays on the devices
    # the two copies of the tied embedding, the norm, and an optimizer for each rank
    assert len(shown["update"]) == len(shown["exchanges"]) + 1 + 1 + 2
    assert len(shown["memory"]) == len(shown["update"])
    assert shown["bind"][0].endswith("#" + shown["bind"][0].rpartition("#")[2])
    assert any(line.startswith("#0 ") for line in shown["bind"])


def test_long_graphs_are_cut_and_say_so(capsys):
    assert main(["lower", *QUESTION, "--lines", "3"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert "lines more: --lines 0 shows all" in err


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--show", "mesage"], "X022"),
        (["--lines", "-3"], "X023"),
        (["--lines", "many"], "X023"),
    ],
)
def test_a_mistake_is_named_with_its_code(argv, code, capsys):
    assert main(["lower", *QUESTION, *argv]) == 2
    assert f"error[{code}" in capsys.readouterr().err


def test_an_illegal_plan_is_refused(capsys):
    assert main(["lower", *QUESTION[:-1], "pp3"]) == 2
    assert "error[P0" in capsys.readouterr().err
