"""The records of served requests as a file: CSV, or Parquet where pyarrow is installed (the extra ``import``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.errors import Diagnostic

if TYPE_CHECKING:
    from meshwright.answer.server import ServerPrediction
    from meshwright.answer.serving_answer import ServingPrediction


def is_parquet(path: str) -> bool:
    """Whether a file of that name is written as Parquet."""
    return path.lower().endswith(".parquet")


def lacking(path: str) -> list[Diagnostic]:
    """K006 where the file is to be Parquet and pyarrow is not installed; asked before the work starts."""
    from importlib.util import find_spec

    if not is_parquet(path) or find_spec("pyarrow") is not None:
        return []
    help = "pip install 'meshwright[import]', or name a .csv"
    return [Diagnostic(code="K006", message="writing Parquet needs pyarrow", place=f"--records {path}", help=help)]


def write_records(prediction: ServingPrediction | ServerPrediction, path: str) -> None:
    """Write a row for every request, in order of arrival: a table with a header, times in seconds."""
    from meshwright.atomic import write_bytes

    columns = prediction.timeline.records.get("requests", {})
    if is_parquet(path):
        import pyarrow
        import pyarrow.parquet

        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table(columns), sink)
        write_bytes(path, sink.getvalue().to_pybytes())
        return
    lines = [",".join(columns)]
    lines += [",".join(f"{value:.9g}" for value in row) for row in zip(*(c.tolist() for c in columns.values()))]
    write_bytes(path, ("\n".join(lines) + "\n").encode())
