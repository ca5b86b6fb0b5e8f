"""The three commands."""

import json

import pytest

from meshwright.cli import main
from meshwright.papers.record import papers

ASKED = ["--on", "32xh100", "--train", "batch=64,seq=4096", "--plan", "tp2 pp4 mb1 zero1 full"]


def run(capsys, *argv):
    code = main(list(argv))
    return code, *capsys.readouterr()


def test_papers_lists_every_row_and_where_it_stands(kept, capsys, states):
    code, out, err = run(capsys, "papers")
    assert code == 0 and err == ""
    assert all(f"  {name} " in out for name in states)
    works = {name for name, s in states.items() if s.state == "works"}
    recipes = sum(papers()[name].recipe is not None for name in works)
    assert 0 < recipes < len(works)
    assert out.startswith(f"166 papers: {len(works)} works ({recipes} of them as recipes for a plan), ")


def test_papers_of_an_area_and_a_state(kept, capsys, states):
    _, out, _ = run(capsys, "papers", "--area", "pipeline", "--state", "works", "--json")
    rows = json.loads(out)["papers"]
    assert rows and {row["area"] for row in rows} == {"pipeline"} and {row["state"] for row in rows} == {"works"}
    _, out, _ = run(capsys, "papers", "--state", "not-yet", "--json")
    assert len(json.loads(out)["papers"]) == sum(s.state == "not yet" for s in states.values())


def test_an_unknown_area_and_state_are_told_the_nearest_together(kept, capsys):
    code, _, err = run(capsys, "papers", "--area", "pipelin", "--state", "work")
    assert code == 2 and err.count("error[J002]") == 2
    assert "did you mean pipeline" in err and "did you mean works" in err


def test_reproduce_puts_figures_side_by_side(capsys):
    code, out, _ = run(capsys, "reproduce", "gpipe")
    assert code == 0 and out.startswith("gpipe: works")
    assert "The paper's figures and ours" in out and "Assumed" in out and "Against" in out


def test_reproduce_as_json_has_errors_and_judgements(capsys):
    code, out, _ = run(capsys, "reproduce", "lasp", "--json")
    said = json.loads(out)
    assert code == 0 and said["state"] == "works"
    assert all(figure["ok"] for figure in said["outcome"]["figures"])
    assert said["paper"]["arxiv"] == "2404.02882"


def test_reproduce_without_a_check_says_what_is_missing(capsys):
    code, out, _ = run(capsys, "reproduce", "h2o")
    assert code == 1 and "h2o: not yet" in out and "serving simulator" in out


def test_reproduce_of_an_unknown_paper_suggests(capsys):
    code, _, err = run(capsys, "reproduce", "megatron")
    assert code == 2 and "error[J001]" in err and "megatron-ptdp" in err


def test_whatif_says_gain_memory_and_whether_it_is_exact(capsys):
    code, out, _ = run(capsys, "whatif", "llama3-8b", *ASKED, "--try", "zero-bubble")
    assert code == 0 and "x the throughput" in out and "peak memory" in out and "exact" in out


def test_whatif_as_json(capsys):
    _, out, _ = run(capsys, "whatif", "llama3-8b", *ASKED, "--try", "zero-bubble,pytorch-fsdp", "--json")
    said = json.loads(out)
    assert said["papers"] == ["zero-bubble", "pytorch-fsdp"] and said["exact"] is True
    assert said["gain"] == said["before"]["step_time_s"] / said["after"]["step_time_s"]


def test_whatif_lists_everything_wrong_at_once(capsys):
    code, _, err = run(capsys, "whatif", "lama3-8b", "--on", "32xh100", "--train", "batch=64", "--try", "nothing")
    assert code == 2 and {"M", "X", "J"} <= {line[6] for line in err.splitlines() if line.startswith("error[")}
    assert "--plan" in err


def test_whatif_names_its_option_in_mistakes(capsys):
    code, _, err = run(capsys, "whatif", "llama3-8b", *ASKED, "--tyr", "gpipe", "--try", "a", "--try", "b")
    assert code == 2 and "did you mean --try" in err and "--try is given 2 times" in err


@pytest.mark.parametrize(
    "argv",
    [
        ["papers", "--area", "pipeline"],
        ["reproduce", "gpipe"],
        ["reproduce", "h2o"],
        ["whatif", "llama3-8b", *ASKED, "--try", "hanayo"],
    ],
)
def test_a_report_is_one_offline_file(argv, kept, capsys, tmp_path):
    file = tmp_path / "report.html"
    main([*argv, "--report", str(file)])
    text = file.read_text()
    assert text.startswith("<!doctype html>") and "<h1>" in text
    assert "http://" not in text and "https://" not in text and "<script" not in text


def test_the_command_writes_the_page_of_the_book(kept, capsys, tmp_path, states):
    file = tmp_path / "papers.md"
    assert main(["papers", "--markdown", str(file)]) == 0
    assert file.read_text().count("| works |") == sum(s.state == "works" for s in states.values())
