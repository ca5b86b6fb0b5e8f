"""Pack public traces as the catalog ships them: ``python tools/pack_traces.py FOLDER`` of their tables.

For every entry of ``src/meshwright/catalog/traces`` of which a published file lies in FOLDER, a file NAME.xz is written
beside it, as many rows as the entry says; ``meshwright.spec.request_catalog`` reads it.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from meshwright import catalog
from meshwright.atomic import write_bytes
from meshwright.spec.request_catalog import TraceEntry, entry, known_blocks, packed
from meshwright.spec.request_files import read


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def requests_of(one: TraceEntry, path: Path) -> dict[str, np.ndarray]:
    """Return the columns of an entry of requests: its first rows, or where it has no arrivals every so-many-th."""
    timed = "arrival_ms+" in one.columns
    found = read(path, timed=timed)
    step = 1 if timed else -(-len(found) // one.rows)
    found = found.chosen(np.arange(0, len(found), step)[: one.rows])
    columns = {"prompt": found.prompt, "output": found.output}
    if timed:
        columns["arrival_ms+"] = np.round(found.arrival_s * 1e3).astype(np.int64)
    if "known" in one.columns:
        columns["known"], columns["back"] = known_blocks(found.hashes, found.hash_ptr)
    return {head: columns[head] for head in one.columns}


def clients_of(one: TraceEntry, path: Path) -> dict[str, np.ndarray]:
    """Return the columns of an entry of clients' windows and of their lengths."""
    rows = rows_of(path)
    number = {
        key: np.array([float(row[key]) for row in rows]) for key in ("client", "window_start_s", "rate_req_s", "cv")
    }
    window = float(rows[0]["window_length_s"])
    columns = {
        "client": number["client"],
        "window": number["window_start_s"] / window,
        "requests": np.round(number["rate_req_s"] * window),
        "cv_milli": np.round(number["cv"] * 1e3),
        "weibull": np.array([row["family"] == "Weibull" for row in rows]),
    }
    lengths = path.with_name(path.name.replace("windows", "length_quantiles"))
    rows = [row for row in rows_of(lengths) if row["field"] != "reason_ratio"]
    said = {key: np.round([float(row[key]) for row in rows]) for key in one.lengths if key not in ("block", "answer")}
    said["block"] = np.array([float(row["block_start_s"]) / 21600 for row in rows])
    said["answer"] = np.array([row["field"] == "output_tokens" for row in rows])
    return {head: columns[head] for head in one.columns} | {f"lengths.{head}": said[head] for head in one.lengths}


def main(folder: Path) -> None:
    for name in catalog.names("traces"):
        one = entry(name)
        path = next((folder / file for file in one.files if (folder / file).is_file()), None)
        if path is None or not one.rows:
            print(f"{name}: none of {', '.join(one.files)} in {folder}", file=sys.stderr)
            continue
        content = packed(clients_of(one, path) if one.lengths else requests_of(one, path))
        write_bytes(catalog.folder("traces") / f"{name}.xz", content)
        print(f"{name}: {len(content):,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
