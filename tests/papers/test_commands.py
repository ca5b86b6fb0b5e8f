"""The three commands."""

import json

import msgspec
import pytest

from meshwright.cli import main
from meshwright.papers import checking, trained
from meshwright.papers.outcome import Outcome
from meshwright.papers.record import papers
from meshwright.papers.shipped import shipped
from meshwright.papers.state import STATES, USABLE

ASKED = ["--on", "32xh100", "--train", "batch=64,seq=4096", "--plan", "tp2 pp4 mb1 zero1 full"]


def run(capsys, *argv):
    code = main(list(argv))
    return code, *capsys.readouterr()


@pytest.fixture
def no_check(monkeypatch):
    """No check runs: what is shown was found before."""
    monkeypatch.setattr(checking, "run", lambda paper: pytest.fail(f"{paper.id} is checked"))
    monkeypatch.setattr(trained, "train", lambda plans, **more: pytest.fail("plans are trained"))


def test_papers_lists_what_is_usable_first_with_its_switch_and_counts_what_is_not_yet(no_check, capsys):
    code, out, err = run(capsys, "papers")
    assert code == 0 and err == ""
    states = shipped().states
    counts = [f"{sum(s.state == word for s in states.values())} {word}" for word in STATES]
    assert out.startswith(f"166 papers: {', '.join(counts)}; ")
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.split()[0] in states]
    order = [STATES.index(states[name].state) for name in listed]
    assert order == sorted(order) and states[listed[0]].state == USABLE
    assert f"meshwright {papers()[listed[0]].switch.command}" in out
    rest = [name for name, s in states.items() if s.state == "not yet"]
    assert not set(rest) & set(listed) and f"Not yet: {len(rest)} papers; meshwright papers --all" in out
    _, whole, _ = run(capsys, "papers", "--all")
    assert all(f"  {name} " in whole for name in states)


@pytest.mark.parametrize("name", ["zero-bubble", "2bp", "moetuner"])
def test_one_paper_is_shown_with_its_figures_and_all_that_is_missing(name, no_check, capsys):
    code, out, _ = run(capsys, "papers", name)
    state, paper = shipped().states[name], papers()[name]
    told = " ".join(out.split())
    assert code == 0 and out.startswith(f"{name}: {state.state}\n") and " ".join(paper.mechanism.split()) in told
    assert all(" ".join(part.split()) in told for part in state.why.split("; "))
    assert out.count("\n  ok") + told.count(" ok ") >= bool(state.figures)
    assert (f"meshwright reproduce {name}" in told) == bool(state.judged)


def test_papers_says_what_its_states_were_computed_for(no_check, capsys):
    _, out, _ = run(capsys, "papers")
    said = " ".join(out.split())
    assert f"states computed for meshwright {shipped().version} by `meshwright papers --check`" in said
    told = json.loads(run(capsys, "papers", "--json")[1])
    assert told["shipped"]["version"] == shipped().version and told["checked"] is False


def test_a_check_that_finds_what_is_shipped_is_exit_0_and_another_state_exit_1(kept, outcomes, capsys, monkeypatch):
    # what may be of the moment is not kept and found anew, once a command: here it is what was found before
    monkeypatch.setattr(checking, "run", lambda paper: outcomes[paper.id])
    monkeypatch.setattr(trained, "train", lambda plans, **more: None)
    assert run(capsys, "papers", "--check")[0] == 0
    usable = shipped().states["zero-bubble"]
    off = msgspec.structs.replace(usable, state="partly", why="it is off")
    monkeypatch.setitem(shipped().states, "zero-bubble", off)
    code, out, _ = run(capsys, "papers", "--check", "--area", "pipeline")
    assert code == 1 and "Other than shipped: 1 of 9 states" in out and "zero-bubble: usable, shipped as partly" in out
    told = json.loads(run(capsys, "papers", "--check", "--json")[1])
    assert [d["paper"] for d in told["differences"]] == ["zero-bubble"]


def test_states_to_ship_are_whole(no_check, capsys, tmp_path):
    code, _, err = run(capsys, "papers", "--write", str(tmp_path / "s.json"), "--area", "pipeline")
    assert code == 2 and err.count("error[J007]") == 2


def test_who_interrupts_a_check_is_told_what_is_kept(kept, capsys, monkeypatch):
    done = (kept / "papers.json").read_bytes()
    states = msgspec.json.decode(done, type=checking.KeptStates).states
    some = {name: states[name] for name in ("gpipe", "hanayo")}
    (kept / "papers.json").write_bytes(
        msgspec.json.encode(checking.KeptStates(version=checking.code_version(), states=some))
    )

    def interrupted(plans, **more):
        if any(plans):
            raise KeyboardInterrupt

    monkeypatch.setattr(trained, "train", interrupted)
    monkeypatch.setattr(checking, "not_here", lambda: "")
    monkeypatch.setattr(checking, "run", lambda paper: Outcome())
    code, _, err = run(capsys, "papers", "--check", "--area", "data-parallel")
    mine = [p for p in papers().values() if p.area == "data-parallel" and p.check and not p.runs]
    assert code == 130 and mine and f"{2 + len(mine)} checks are kept" in err  # and those that train nothing
    assert checking.num_kept() == 2 + len(mine)


def test_papers_of_an_area_and_a_state(no_check, capsys, states):
    _, out, _ = run(capsys, "papers", "--area", "pipeline", "--state", "partly", "--json")
    rows = json.loads(out)["papers"]
    assert rows and {row["area"] for row in rows} == {"pipeline"} and {row["state"] for row in rows} == {"partly"}
    _, out, _ = run(capsys, "papers", "--state", "not-yet", "--json")
    assert len(json.loads(out)["papers"]) == sum(s.state == "not yet" for s in states.values())


def test_one_paper_is_shown_alone_and_an_unknown_one_told_the_nearest(no_check, capsys):
    assert main(["papers", "Zero-Bubble", "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["papers"]] == ["zero-bubble"]
    assert main(["papers", "zero-buble"]) == 2
    assert "did you mean zero-bubble" in capsys.readouterr().err


def test_an_unknown_area_and_state_are_told_the_nearest_together(kept, capsys):
    code, _, err = run(capsys, "papers", "--area", "pipelin", "--state", "usabel")
    assert code == 2 and err.count("error[J002]") == 2
    assert "did you mean pipeline" in err and "did you mean usable" in err


def test_reproduce_puts_figures_side_by_side(capsys):
    code, out, _ = run(capsys, "reproduce", "zero-bubble")
    assert code == 0 and out.startswith("zero-bubble: usable") and "switched on by: meshwright predict" in out
    assert "The paper's figures and ours" in out and "Assumed" in out and "Against" in out


def test_reproduce_as_json_has_errors_and_judgements(capsys):
    code, out, _ = run(capsys, "reproduce", "jacobi-feedforward", "--json")
    said = json.loads(out)
    assert code == 0 and said["state"] == "model only"
    assert all(figure["ok"] for figure in said["outcome"]["figures"])
    assert said["paper"]["arxiv"] == "2002.03629"


def test_reproduce_without_a_check_says_what_is_missing(capsys):
    code, out, _ = run(capsys, "reproduce", "ray")
    assert code == 1 and "ray: not yet" in out and "jobs of several programs" in " ".join(out.split())


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
    assert file.read_text().count("| usable |") == sum(s.state == USABLE for s in states.values())
