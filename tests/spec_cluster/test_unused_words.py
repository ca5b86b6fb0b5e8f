"""Words of a network that a cluster does not have are said to change nothing, wherever the cluster is named."""

import json

import pytest

from meshwright.cli import main
from meshwright.errors import remarking
from meshwright.spec.cluster import from_toml, load, to_toml
from meshwright.spec.cluster_range import load_all

STEP = ("--train", "batch=8,seq=512", "--plan", "dp8 zero1")


@pytest.mark.parametrize(
    ("text", "words", "instead"),
    [
        ("8x4090,100mbit", "100mbit", ["2x8x4090,100mbit", "8x1x4090,100mbit"]),
        ("8xh100,ib400,delay=20ms", "ib400,delay=20ms", ["2x8xh100,ib400,delay=20ms", "8x1xh100,ib400,delay=20ms"]),
        ("1x4xa100,25gbe,fat-tree,taper=2", "25gbe,fat-tree,taper=2", ["2x4xa100,25gbe,fat-tree,taper=2"]),
        ("1xp5,nics=4", "nics=4", ["2xp5,nics=4"]),
        ("72xgb200,ib400", "ib400", ["2x72xgb200,ib400"]),
        ("8xh100,400gbe,shared_ports", "400gbe", ["2x8xh100,400gbe,shared_ports"]),
    ],
)
def test_one_node_has_no_network_and_words_of_one_are_said_to_change_nothing(text, words, instead):
    (note,) = load(text).notes
    assert note.startswith(f"{words} changes nothing")
    for other in instead:
        assert other in note
        assert not load(other).notes and load(other).islands[0].levels[-1].scale_out


@pytest.mark.parametrize(
    "text", ["8xh100", "8xh100,pcie5", "2x8xh100,ib400", "8x1x4090,100mbit", "8xh100,shared_ports"]
)
def test_words_that_change_something_are_not_remarked(text):
    assert load(text).notes == ()


def test_of_islands_that_meet_switches_alone_are_unused_and_ports_are_not():
    assert load("8xh100,25gbe + 8xa100,25gbe,delay=1ms").notes == ()
    (note,) = load("8xh100,25gbe,fat-tree,taper=2 + 8xa100,25gbe").notes
    assert note.startswith("fat-tree,taper=2 changes nothing")


def test_a_range_is_remarked_where_no_cluster_of_it_has_a_network():
    told = []
    with remarking(told.append):
        load_all("8..32xh100,ib400")
        assert told == []
        load_all("4..8xh100,ib400")
    assert len(told) == 1


def test_a_cluster_file_keeps_what_changes_nothing():
    cluster = load("8xh100,ib400")
    assert from_toml(to_toml(cluster)) == cluster


def test_commands_say_it_once_on_stderr_and_answers_keep_it(capsys):
    assert main(["predict", "llama3-8b", "--on", "8xh100,100mbit", *STEP, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.count("note: 100mbit changes nothing") == 1
    assert any("100mbit changes nothing" in line for line in json.loads(out)["warnings"])
    served = ["predict", "llama3-8b", "--on", "8xh100,100mbit", "--serve", "rate=1,prompt=64,output=8,requests=20"]
    assert main([*served, "--plan", "tp8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.count("note: 100mbit changes nothing") == 1
    assert any("100mbit changes nothing" in line for line in json.loads(out)["warnings"])


@pytest.mark.parametrize(
    "command",
    [
        ["whatif", "llama3-8b", *STEP, "--try", "zero2"],
        ["diff", "llama3-8b", "--train", "batch=8,seq=512", "--plan", "dp8 zero1", "--plan", "dp8 fsdp"],
        ["lower", "llama3-8b", *STEP],
    ],
)
def test_every_command_that_names_a_cluster_says_it(command, capsys):
    main([*command, "--on", "8xh100,100mbit"])
    assert capsys.readouterr().err.count("note: 100mbit changes nothing") == 1


def test_a_search_keeps_it_among_its_remarks(capsys, tmp_path):
    report = tmp_path / "r.html"
    asked = [
        "search",
        "gpt2",
        "--on",
        "2xh100,100mbit",
        "--train",
        "batch=8,seq=1024",
        "--store",
        "none",
        "--fix",
        "pp=1",
    ]
    assert main([*asked, "--report", str(report)]) == 0
    assert "100mbit changes nothing" in capsys.readouterr().out and "100mbit changes nothing" in report.read_text()
