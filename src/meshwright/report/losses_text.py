"""Losses of sync policies at equal tokens, or losses and accuracies at equal samples: as a table of text, as Markdown
and as rows of CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import isfinite

from rich.console import Console
from rich.text import Text

from meshwright.report.page import Page
from meshwright.sync.losses import PolicyLoss, TrainedLoss
from meshwright.sync.record import USUAL

HEADS = ("sync=", "loss", "spread", "to step", "bytes a token", "")
#: Of labelled samples, whose accuracies are in percent and stand before the losses.
SAMPLE_HEADS = ("sync=", "accuracy", "spread", "to step", "loss", "spread", "bytes a sample", "")


def render(found: Sequence[PolicyLoss], console: Console) -> None:
    """Print the policies, those of equal steps together."""
    sampled = any(one.right is not None for one in found)
    with Page(console) as page:
        for steps, some in _by_steps(found):
            page.title(_title(steps, some))
            columns = heads_of(some)
            last = len(columns) - 1
            heads = tuple(
                Text(head, "dim", justify="right" if 0 < i < last else "left") for i, head in enumerate(columns)
            )
            page.rows([heads, *(tuple(_text(i, cell, last) for i, cell in enumerate(cells(one))) for one in some)])
        if sampled:
            page.quiet("accuracy: percent of the held-out samples that are classified rightly, loss: nats a sample;")
            page.quiet("both are means over seeds; spread: standard deviation over seeds, in points of accuracy;")
        else:
            page.quiet("loss: nats a token on held-out text, mean over seeds; spread: standard deviation over seeds;")
        page.quiet(f"to step: mean difference to sync={USUAL} with the same seed, and its own spread")


def heads_of(some: Sequence[PolicyLoss]) -> tuple[str, ...]:
    """Return the heads of a table: of text, or of labelled samples."""
    return SAMPLE_HEADS if some[0].right is not None else HEADS


def _title(steps: int, some: Sequence[PolicyLoss]) -> str:
    unit = "samples" if some[0].right is not None else "tokens"
    return f"{steps:,} steps, {some[0].tokens:,.0f} {unit}"


def markdown(found: Sequence[PolicyLoss]) -> str:
    """Tables of Markdown, one for each number of steps."""
    out = []
    for steps, some in _by_steps(found):
        heads = [f"`{head}`" if head == "sync=" else head for head in heads_of(some)]
        heads = [head.replace("to step", "to `step`") for head in heads]
        out += [f"After {_title(steps, some)}:", ""]
        out += [f"| {' | '.join(heads[:-1])} | |", f"| --- |{' ---: |' * (len(heads) - 2)} --- |"]
        for one in some:
            name, *rest = cells(one)
            out.append(f"| `{name}` | {' | '.join(rest)} |")
        out.append("")
    return "\n".join(out)


def to_csv(rows: Iterable[TrainedLoss]) -> str:
    """Every run as a row; a loss that was not a number, and an accuracy of what has none, are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(TrainedLoss.__struct_fields__)
    for row in rows:
        values = [getattr(row, name) for name in TrainedLoss.__struct_fields__]
        writer.writerow("" if v is None or (isinstance(v, float) and not isfinite(v)) else v for v in values)
    return out.getvalue()


def cells(one: PolicyLoss) -> tuple[str, ...]:
    """One row: policy, loss, spread, difference, bytes a token, verdict; of labelled samples policy, accuracy, spread,
    difference, loss, spread, bytes a sample, verdict on the accuracy."""
    lost = f"{one.diverged} of {one.seeds + one.diverged} diverged" if one.diverged else ""
    loss, spread = (f"{one.mean:.4f}", f"{one.spread:.4f}") if isfinite(one.mean) else ("-", "-")
    if one.right is not None:
        right = f"{100 * one.right:.2f}%", f"{100 * one.right_spread:.2f}"
        away = one.right_apart is None or one.policy == USUAL
        apart = "" if away else f"{100 * one.right_apart:+.2f} ± {100 * one.right_apart_spread:.2f}"
        said = ", ".join(filter(None, (one.right_said, lost)))
        return one.policy, *right, apart, loss, spread, _size(one.sent_per_token), said
    apart = "" if one.apart is None or one.policy == USUAL else f"{one.apart:+.4f} ± {one.apart_spread:.4f}"
    return one.policy, loss, spread, apart, _size(one.sent_per_token), ", ".join(filter(None, (one.said, lost)))


def _size(num_bytes: float) -> str:
    return f"{num_bytes:,.0f}" if num_bytes >= 10 else f"{num_bytes:.3g}"


def _text(column: int, cell: str, last: int) -> Text:
    return Text(cell, justify="right" if 0 < column < last else "left")


def _by_steps(found: Sequence[PolicyLoss]) -> list[tuple[int, list[PolicyLoss]]]:
    return [(steps, list(some)) for steps, some in groupby(found, key=lambda one: one.steps)]
