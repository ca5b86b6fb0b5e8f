"""Writes what the program says today into the console blocks of README.md and docs/*.md, and the papers' states into
docs/papers.md and the pages of the ideas.

A block keeps its shape: of a command's output only the stretches between ``...`` lines are replaced, each starting at
the line that shows the same words as before. Run it after a change of costs: ``python docs/refresh.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(```console\n)(.*?)(```)", re.DOTALL)
#: What blocks are as wide as, whatever the terminal of whoever runs this: the book has room; the README shows what a
#: usual terminal and a pipe do.
COLUMNS = {"README.md": "80"}
BOOK = "100"
NUMBERS = re.compile(r"[\d.,]+|[█▏▎▍▌▋▊▉#.]+|\s+")


def words(line: str) -> str:
    """A line without its numbers, bars and spacing."""
    return NUMBERS.sub("", line)


def refreshed(block: str, columns: str = BOOK, folder: Path = ROOT) -> str:
    """A console block whose shown lines are those of a run now, in a terminal of so many `columns`, in a
    `folder` where it may write; lines that no longer appear are named and left for a person."""
    out: list[str] = []
    said: list[str] = []
    at = 0
    lines = iter(block.splitlines())
    for line in lines:
        if line.startswith("$ "):
            out.append(line)
            command = line[2:]
            while command.endswith("\\"):  # goes on in the next line
                out.append(next(lines))
                command = command[:-1] + out[-1]
            said, at = _said(shlex.split(re.split(r"\s#", command)[0]), columns, folder), 0
            continue
        match = next((i for i in range(at, len(said)) if words(said[i]) == words(line) and words(line)), None)
        if match is None:
            out.append(line)
            if words(line):
                print(f"not said any more: {line}", file=sys.stderr)
        else:
            out.append(said[match].rstrip())
            at = match + 1
    return "\n".join(out) + "\n"


def _said(command: list[str], columns: str, folder: Path) -> list[str]:
    """The lines that a command prints."""
    env = {**os.environ, "COLUMNS": columns}
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, env=env)
    return (run.stdout + run.stderr).splitlines()


def papers() -> None:
    """The table of papers, and their lists in the pages of the ideas, by the shipped states (`make states`)."""
    from meshwright.papers.record import papers as known
    from meshwright.papers.shipped import shipped
    from meshwright.report import papers_markdown

    rows = [(paper, shipped().states[name]) for name, paper in known().items()]
    papers_markdown.write(rows, ROOT / "docs" / "papers.md")
    for path in sorted((ROOT / "docs").glob("idea-*.md")):
        path.write_text(papers_markdown.refreshed(path.read_text(encoding="utf-8"), rows), encoding="utf-8")


def main() -> None:
    papers()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        columns = COLUMNS.get(path.name, BOOK)
        with tempfile.TemporaryDirectory() as name:  # what one block of a page writes, the next may read
            folder = Path(name)
            (folder / "examples").symlink_to(ROOT / "examples")
            new = BLOCK.sub(lambda m, c=columns, at=folder: m[1] + refreshed(m[2], c, at) + m[3], text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"refreshed {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
