"""The catalog as a command: complete, with sources, and readable by a program."""

import json

import pytest

from meshwright import catalog, schedules
from meshwright.cli import main
from meshwright.cli.entries import KINDS
from meshwright.spec.cluster import from_toml, load, load_device


def shown(capsys, *argv):
    assert main(["catalog", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["models", "devices", "clusters"])
def test_a_kind_lists_every_entry_with_a_source(kind, capsys):
    rows = json.loads(shown(capsys, kind, "--json"))[kind]
    assert [row["name"] for row in rows] == list(catalog.names(kind))
    assert all(row["source"] for row in rows)


def test_schedules_are_listed_with_their_papers(capsys):
    rows = json.loads(shown(capsys, "schedules", "--json"))["schedules"]
    assert [row["name"] for row in rows] == list(schedules.families())
    assert all("arXiv" in row["source"] for row in rows)


def test_without_a_kind_all_kinds_are_listed(capsys):
    assert set(json.loads(shown(capsys, "--json"))) == {"format_version", *KINDS}


def test_text_has_one_line_per_entry_that_is_not_cut(capsys):
    out = shown(capsys, "devices").splitlines()
    assert len(out) == 2 + len(catalog.names("devices"))
    (line,) = [line for line in out if line.split()[0] == "h100_sxm"]
    assert line.endswith(load_device("h100").sources["*"])


def test_one_device_is_shown_with_the_source_of_every_number(capsys):
    out = shown(capsys, "devices", "h100")
    device = load_device("h100")
    assert f"memory_bytes: {device.memory_bytes:,}   <- {device.sources['memory_bytes']}" in out
    assert f"memory_gb_s: {device.memory_gb_s:,.6g}   <- {device.sources['*']}" in out
    assert f"gb_s: {device.levels[0].gb_s:,.6g}   <- {device.levels[0].sources['gb_s']}" in out


def test_a_model_shows_exact_parameters_as_its_paper_counts_them(capsys):
    # Jiang et al., 2024, arXiv 2401.04088: 47B parameters, 13B active; exact from the checkpoint's tensors.
    out = shown(capsys, "models", "mixtral-8x7b")
    assert "num_params: 46,702,792,704" in out
    assert "active_params: 12,879,925,248" in out


def test_a_short_name_of_a_cluster_is_shown_too(capsys):
    assert json.loads(shown(capsys, "clusters", "64xh100", "--json"))["num_devices"] == 64


@pytest.mark.parametrize("kind", ["cluster", "clusters"])
def test_a_cluster_is_written_as_a_file_that_is_read_back_equal(kind, capsys):
    text = shown(capsys, kind, "4x4xa100,25gbe", "--toml")
    assert from_toml(text) == load("4x4xa100,25gbe")


def test_what_is_no_cluster_has_no_toml(capsys):
    for words in (["device", "h100", "--toml"], ["--toml"], ["clusters", "64xh100", "--toml", "--json"]):
        assert main(["catalog", *words]) == 2
        said = capsys.readouterr()
        assert "X011" in said.out + said.err and "mine.toml" in said.out + said.err


def test_links_are_listed_with_their_other_names_and_shown_by_them(capsys):
    assert json.loads(shown(capsys, "link", "hdr", "--json"))["gbit_s"] == 200
    assert "25gige" in shown(capsys, "links")
    assert main(["catalog", "links", "hdx"]) == 2
    assert "did you mean hdr" in capsys.readouterr().err


def test_a_schedule_shows_its_order(capsys):
    # Narayanan et al., 2021, arXiv 2104.04473, figure 4: the last of four ranks alternates from the start.
    assert "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7" in shown(capsys, "schedules", "1f1b")


@pytest.mark.parametrize(("kind", "code"), [("models", "M006"), ("devices", "C001"), ("schedules", "S001")])
def test_an_unknown_entry_suggests_near_ones(kind, code, capsys):
    assert main(["catalog", kind, "nothing-like-it"]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


def test_an_entry_without_its_kind_is_told_the_kind(capsys):
    assert main(["catalog", "llama3-70b"]) == 2
    assert "help: meshwright catalog models llama3-70b" in capsys.readouterr().err


def test_errors_as_json_are_the_one_object_on_stdout(capsys):
    assert main(["catalog", "modles", "--json"]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    (error,) = json.loads(out)["errors"]
    assert error["code"] == "X011"
    assert error["help"].startswith("did you mean models")


def test_a_device_without_a_public_price_says_so(capsys):
    assert main(["catalog", "devices", "h800"]) == 0
    assert "  price_usd_hour: no public price: made for China" in capsys.readouterr().out
