"""Rows of tables on disk, some at a time: ``.parquet`` files, ``.arrow`` files, and the folders of such that Hugging
Face's ``datasets`` saves (``save_to_disk``: ``state.json`` names its files; ``dataset_dict.json`` its splits, each a
folder, of which ``train`` is taken unless another is named). They are read with pyarrow, and nothing of them is code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.errors import Diagnostic, MeshwrightError

STATE, SPLITS, SPLIT = "state.json", "dataset_dict.json", "train"
#: Rows that are read at a time.
ROWS = 1024


def is_saved(folder: Path) -> bool:
    """Whether a folder is a data set that ``datasets`` has saved, or several splits of one."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


def files(folder: Path) -> list[Path]:
    """The files of a saved data set, in its order.

    Raises:
        MeshwrightError: D001 for a folder that is not as ``datasets`` saves it.
    """
    try:
        if (folder / SPLITS).is_file():
            splits = [str(name) for name in json.loads((folder / SPLITS).read_text(encoding="utf-8"))["splits"]]
            if SPLIT not in splits:
                raise unreadable(
                    folder, "its splits are " + ", ".join(splits), f"name one: --data {folder}/{splits[0]}"
                )
            return files(folder / SPLIT)
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        names = [str(one["filename"]) for one in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise unreadable(
                folder, "it is a selection of rows that were not written", "save it with flatten_indices()"
            )
        wrong = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if wrong or not names:
            raise unreadable(folder, f"it names {wrong[0]!r}, which is not in it" if wrong else "it names no file")
        return [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise unreadable(folder, f"not a saved data set: {type(error).__name__}: {error}") from None


def rows(path: Path, field: str, texts: bool) -> Iterator[tuple[str, Any]]:
    """Place and value of a column of every row of a table; `texts`: strings are wanted.

    Raises:
        MeshwrightError: D001 unreadable, or without pyarrow; D003 without such a column.
    """
    try:
        import pyarrow
    except ImportError:
        what = "Parquet" if path.suffix == ".parquet" else "Arrow"
        raise unreadable(path, f"{what} needs pyarrow", "pip install 'meshwright[import]'") from None
    opened = _parquet if path.suffix == ".parquet" else _arrow
    try:
        with opened(path, field) as (schema, batches):
            kinds = {one.name: one.type for one in schema}
            held = [name for name, kind in kinds.items() if str(kind) in ("string", "large_string")]
            if field not in kinds or (texts and field not in held):
                why = f"column {field!r} is of {kinds[field]}" if field in kinds else f"no column {field!r}"
                help = f"say which: --data {path}#{held[0]}" if held else "a column of strings holds the text"
                raise MeshwrightError.one("D003", f"not documents: {why}", place=str(path), help=help)
            number = 0
            for batch in batches:
                for value in batch.column(field).to_pylist():
                    number += 1
                    yield f"{path}: row {number}", value
    except (OSError, pyarrow.ArrowInvalid) as error:
        kind = "a Parquet" if path.suffix == ".parquet" else "an Arrow"
        raise unreadable(path, f"not {kind} file: {str(error).partition(chr(10))[0]}") from None


@contextmanager
def _parquet(path: Path, field: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        columns = [field] if field in schema.names else []
        yield schema, file.iter_batches(batch_size=ROWS, columns=columns)


@contextmanager
def _arrow(path: Path, field: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    """A stream, as ``datasets`` writes it, or a file of Arrow's, mapped."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(source)
            yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
            return
        source.seek(0)
        with pyarrow.ipc.open_stream(source) as stream:
            yield stream.schema, iter(stream)


def unreadable(path: Path, reason: str, help: str = "") -> MeshwrightError:
    return MeshwrightError(
        Diagnostic(
            code="D001",
            message=f"cannot read the text: {reason}",
            place=f"--data {path}",
            help=help or "name a text, .jsonl or .parquet file, a folder of them, Megatron-LM's .bin, or sample",
        )
    )
