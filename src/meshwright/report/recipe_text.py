"""A recipe of data operators as text: its time in three orders, and the passes of the fastest."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.answer.recipe import RecipeAnswer
from meshwright.quantity import big, gibibytes, seconds
from meshwright.report.page import Page


def render(answer: RecipeAnswer, console: Console) -> None:
    """Print the whole answer to `console`."""
    written, best = answer.written, answer.fastest
    with Page(console) as page:
        gain = written.seconds / best.seconds if best.seconds else 1.0
        page.print(Text(f"{seconds(best.seconds)} | {gain:.2f} times as fast as written", "bold green"))
        recipe = answer.recipe
        where = f"{recipe.nodes} node{'s' * (recipe.nodes > 1)} of {recipe.processes} processes"
        page.print(Text(f"{big(recipe.samples)} samples, {len(recipe.operators)} operators, {where}", "dim"), indent=2)
        page.title("Orders")
        rows = [tuple(Text(cell, "dim") for cell in ("", "time", "of cores", "memory of a node", "passes"))]
        for name, one in (("as written", written), ("fused as Data-Juicer does", answer.fused), ("fastest", best)):
            cells = (name, seconds(one.seconds), seconds(one.core_s), gibibytes(one.memory_bytes), str(len(one.passes)))
            rows.append(tuple(Text(cell) for cell in cells))
        page.rows(rows)
        proved = "no legal order is faster" if answer.proved else "too many orders to look at all: by a greedy rule"
        page.quiet(proved)
        page.title("The fastest order")
        rows = []
        for one in best.passes:
            about = f"{big(one.samples)} -> {big(one.left)} samples, {one.processes} processes, {one.bound}"
            took = Text(seconds(one.seconds), justify="right")
            rows.append((Text(" + ".join(one.operators)), took, Text(about, "dim")))
        page.rows(rows)
        if len(answer.nodes) > 1:
            page.title("Nodes")
            first = answer.nodes[0][1]
            page.rows(
                [
                    (Text(f"{count}"), Text(seconds(took)), Text(f"{first / took:.2f} times as fast as one", "dim"))
                    for count, took in answer.nodes
                ]
            )
