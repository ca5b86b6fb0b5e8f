"""Predicting measured kernels and collectives: one price per row from the cost chain, nothing simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.calibrate import network_rows
from meshwright.calibrate import rows as kernel_rows
from meshwright.calibrate import tables as kernel_tables
from meshwright.cost import Costs, Framework, load_framework
from meshwright.spec.cluster import load_device
from meshwright.validate.score import Scored, summary
from meshwright.work import Collective

if TYPE_CHECKING:
    from meshwright.validate.run import Table

KERNEL_TABLES = ("ops_gemm", "ops_attention", "ops_moe")


def validate(
    folder: Path, costs_of: Callable[[Framework], Costs], *, progress: Callable[[str], None]
) -> Iterator[Table]:
    """Every op table found in `folder`, scored per source and hardware."""
    costs = costs_of(load_framework("default"))
    for name in KERNEL_TABLES:
        path = kernel_tables.find(folder, name)
        if path is not None:
            progress(name)
            yield _table(name, list(_kernels(path, name, costs)))
    path = kernel_tables.find(folder, "collectives")
    if path is not None:
        progress("collectives")
        yield _table("collectives", list(_collectives(folder, costs)))


def _table(name: str, rows: list[Scored]) -> Table:
    from meshwright.validate.run import Table

    return Table(name=name, metrics=summary(rows), scored=tuple(rows), unsupported={}, rows=())


def _kernels(path: Path, name: str, costs: Costs) -> Iterator[Scored]:
    for row in kernel_tables.read(path, name):
        measured = kernel_rows.measured(name, row)
        if measured is None:
            continue
        device = load_device(row.text["hardware"])
        seconds = sum(costs.price(work, device).seconds for work in (*measured.kernels, *measured.around))
        yield Scored(
            key=f"{row.text['source']}/{row.text['hardware']}",
            group=(),
            faulty=False,
            time=(measured.seconds, seconds),
        )


def _collectives(folder: Path, costs: Costs) -> Iterator[Scored]:
    for series in network_rows.read_series(folder):
        for size, measured in zip(series.num_bytes, series.seconds):
            work = Collective(op=series.op, num_bytes=size, group=series.group)
            yield Scored(
                key=f"{series.source}/{series.hardware}",
                group=(),
                faulty=bool(series.flag),
                time=(measured, costs.price(work, series.device).seconds),
            )
