"""The option of a search that says where evaluated plans are kept."""

import pytest

from meshwright.cli import main

SMALL = ["search", "gpt2", "--on", "2xh100", "--train", "batch=8,seq=1024", "--fix", "pp=1", "--store"]


@pytest.mark.parametrize("word", ["no", "Off", "false"])
def test_a_word_that_means_none_is_no_name_of_a_file(word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, word]) == 2
    said = capsys.readouterr().err
    assert f"error[R010]: '{word}' names a file" in said and f"--store none, or name the file ./{word}" in said
    assert not list(tmp_path.iterdir())


def test_none_keeps_nothing_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "None"]) == 0
    assert not list(tmp_path.iterdir())
