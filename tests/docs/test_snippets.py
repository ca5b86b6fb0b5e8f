"""The book and the README run: every fenced ``python`` and ``console`` block.

Python blocks of a page run one after the other in one namespace. A console block is commands (``$ meshwright
...``) and what they show: the exit code is 0 unless the command ends in ``# exit N``; every line shown must
appear in the output, in that order. Numbers, units of time and drawn bars may differ, since costs are still
being calibrated; ``...`` and empty lines stand for any lines.
"""

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

from meshwright.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?%?(?: (?:us|ms|s|h|days)\b)?")


def blocks(page, language):
    return [text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


def pages_with(language):
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, language)]


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    together = tmp_path / f"{page.stem}_blocks.py"
    together.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    runpy.run_path(str(together))


def commands(text):
    """(command, expected exit code, lines shown) of a console block."""
    text = text.replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if line.startswith("$ "):
            stated = re.search(r"# exit (\d+)$", line)
            found.append((line[2:], int(stated[1]) if stated else 0, []))
        elif line.strip() not in ("", "..."):
            found[-1][2].append(line)
    return found


def plain(line):
    """A line without what may differ: numbers, bars, spacing."""
    without_bars = re.sub(r"[\u2500-\u259f]+|\.{4,}", " ", line)
    return " ".join(NUMBER.sub("#", without_bars).split())


def run(command, capsys):
    program, *argv = shlex.split(command, comments=True)
    assert program == "meshwright", f"only meshwright is run here, not {program}"
    try:
        code = main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize("page", pages_with("console"))
def test_console_blocks_show_what_the_program_says(page, capsys, monkeypatch, tmp_path):
    for file in (ROOT / "examples").glob("*.toml"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80" if page.name == "README.md" else "100")
    for text in blocks(page, "console"):
        for command, code, shown in commands(text):
            really, output = run(command, capsys)
            assert really == code, f"{command}\n{output}"
            rest = iter([plain(line) for line in output.splitlines()])
            for line in shown:
                assert plain(line) in rest, (
                    f"{page.name}: not in the output of {command}, in this order: {line}\n{output}"
                )


def test_toml_blocks_are_toml():
    for page in PAGES:
        for text in blocks(page, "toml"):
            tomllib.loads(text)


def test_the_file_that_a_page_says_to_write_is_the_example_of_that_name():
    page, name = ROOT / "docs" / "the-plan.md", "llama3-70b-on-64-h100.toml"
    assert f"`{name}`" in page.read_text(encoding="utf-8")
    (said,) = [text for text in blocks(page, "toml") if 'model = "llama3-70b"' in text]
    assert tomllib.loads(said) == tomllib.loads((ROOT / "examples" / name).read_text(encoding="utf-8"))


def test_pages_link_only_to_pages_that_exist():
    made = {"reference/terms.md", "reference/codes.md", "reference/devices.md", "reference/catalog.md"}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert target in made or (page.parent / target).exists(), f"{page.name} -> {target}"
