"""One validation: the tables of a folder, predicted and scored."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from meshwright.atomic import write_bytes
from meshwright.cost import Costs, Framework
from meshwright.errors import MeshwrightError
from meshwright.validate import ops, tables
from meshwright.validate.score import FAULTS, Scored, faulty, score_step, summary
from meshwright.validate.steps import answers
from meshwright.validate.tables import number

FORMAT_VERSION = 1


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table's metrics by ``source/hardware`` and ``all``, the rows behind them, and what was not supported."""

    name: str
    metrics: dict[str, dict[str, float]]
    scored: tuple[Scored, ...]
    unsupported: dict[str, int]
    rows: tuple[dict[str, object], ...]


def validate(
    folder: Path, costs_of: Callable[[Framework], Costs], *, progress: Callable[[str], None] = lambda _: None
) -> list[Table]:
    """Every table found in `folder`.

    Raises:
        MeshwrightError: V003 when there is none; V001, V002 for one that cannot be read.
    """
    out = []
    path = tables.find(folder, "training_steps")
    if path is not None:
        progress("training_steps")
        out.append(_steps(path, costs_of))
    out += list(ops.validate(folder, costs_of, progress=progress))
    if not out:
        raise MeshwrightError.one(
            "V003",
            f"no measurement table in {folder}",
            place=f"--data {folder}",
            help="tables are called " + ", ".join(f"{name}.csv(.gz)" for name in tables.REQUIRED),
        )
    return out


def _steps(path: Path, costs_of: Callable[[Framework], Costs]) -> Table:
    scored, unsupported, written = [], {}, []
    for row, answer in answers(tables.rows(path, "training_steps"), costs_of):
        line = {"id": row["id"], "source": row["source"], "hardware": row["hardware"], "flags": row["flags"]}
        if answer.unsupported:
            unsupported[answer.unsupported] = unsupported.get(answer.unsupported, 0) + 1
            written.append(line | {"unsupported": answer.unsupported})
            continue
        scored.append(score_step(row, answer))
        fields = msgspec.structs.asdict(answer) | {"assumed": ";".join(answer.assumed)}
        written.append(line | fields | {"measured_s": number(row, "step_time_s"), "scored_time": not faulty(row)})
    return Table(
        name="training_steps",
        metrics=summary(scored),
        scored=tuple(scored),
        unsupported=unsupported,
        rows=tuple(written),
    )


def to_json(found: list[Table]) -> dict[str, object]:
    """{table: {"source/hardware": metrics}}, with versions and the rows that were not supported."""
    from meshwright import __version__

    body: dict[str, object] = {"format_version": FORMAT_VERSION, "code": __version__, "excluded_from_time": FAULTS}
    for table in found:
        body[table.name] = table.metrics
    body["unsupported"] = {t.name: t.unsupported for t in found}
    return body


def write_rows(found: list[Table], path: Path) -> None:
    """Every prediction as one CSV, written whole or not at all."""
    columns = ["table", *dict.fromkeys(column for t in found for row in t.rows for column in row)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    for table in found:
        writer.writerows({"table": table.name, **row} for row in table.rows)
    write_bytes(path, text.getvalue().encode())


def table_lines(table: Table) -> Iterator[tuple[str, list[str]]]:
    """A table's metrics as text: key, then one cell per column of :data:`COLUMNS`."""
    for key, metrics in table.metrics.items():
        yield key, [_cell(metrics.get(name), kind) for _, name, kind in COLUMNS]


#: Column heading, metric, how it is written.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("rows", "rows", "count"),
    ("mean", "mean_ape", "percent"),
    ("median", "median_ape", "percent"),
    ("p90", "p90_ape", "percent"),
    ("bias", "bias", "signed"),
    ("trivial", "trivial_mean_ape", "percent"),
    ("rank", "spearman", "ratio"),
    ("groups", "groups", "count"),
    ("regret", "regret_mean", "percent"),
    ("memory", "memory_mean_ape", "percent"),
    ("oom", "oom_rows", "count"),
    ("acc", "oom_accuracy", "percent"),
    ("recall", "oom_recall", "percent"),
    ("in 80%", "coverage80", "percent"),
)


def _cell(value: float | None, kind: str) -> str:
    if value is None:
        return ""
    if kind == "count":
        return str(int(value))
    if kind == "ratio":
        return f"{value:.2f}"
    return f"{value:+.1%}" if kind == "signed" else f"{value:.1%}"
