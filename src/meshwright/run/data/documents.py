"""Documents out of files: what there is to train on, in one order, before it is tokenised.

A text file is one document; a folder is all ``.txt``, ``.md``, ``.jsonl``, ``.parquet`` and ``.arrow`` files in it and
below, by name, or a data set that Hugging Face's ``datasets`` has saved; every line of a ``.jsonl`` file is an object
whose "text" is one document, and so is every row of a table (:mod:`.tables`) with its column "text". ``NAME#body``
takes the key or column "body" instead. All text is UTF-8. ``package:NAME`` is the folder of an installed Python
package, which is looked up and not imported.

The sample that comes with the program is verse and prose of Shakespeare, Blake, Shelley, Coleridge, Keats, Carroll and
Lincoln, and of the founding papers of the United States: printed between 1600 and 1871, in the public domain, each
document with its "source".
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.data import tables
from meshwright.run.data.tables import unreadable

#: The word for the text that comes with the program.
SAMPLE = "sample"
#: What the name of an installed package follows, whose text files are meant.
PACKAGE = "package:"
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet", ".arrow")
#: Files of many documents, each in a field by a name, and the name where nobody says.
FIELDS = (".jsonl", ".parquet", ".arrow")
FIELD = "text"
#: Beginnings of files that are no text, and their names.
BINARY = {
    b"PAR1": "Parquet",
    b"\x1f\x8b": "gzip",
    b"PK": "ZIP",
    b"\x28\xb5\x2f\xfd": "Zstandard",
}
#: Bytes read at a time.
BLOCK = 1 << 22


class TextFile(NamedTuple):
    """A file of text, and the field of its rows that holds a document."""

    path: Path
    field: str = FIELD

    @property
    def fields(self) -> bool:
        """Whether its documents are in a field of rows."""
        return self.path.suffix in FIELDS


def files(name: str) -> list[TextFile]:
    """The files that `name` means, in the order they are read.

    Raises:
        MeshwrightError: D001 when there are none.
    """
    before, mark, field = name.rpartition("#")
    if mark and before and field and not Path(name).exists():
        found = _files(before)
        if not any(path.suffix in FIELDS for path in found):
            raise unreadable(Path(name), f"#{field} names a field, which only {' and '.join(FIELDS)} files have")
        return [TextFile(path, field) for path in found]
    return [TextFile(path) for path in _files(name)]


def _files(name: str) -> list[Path]:
    if name == SAMPLE:
        return [Path(str(resources.files("meshwright.run.data") / "sample.jsonl"))]
    path = _installed(name) if name.startswith(PACKAGE) else Path(name)
    if tables.is_saved(path):
        return tables.files(path)
    if path.is_dir():
        found = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        if not found:
            raise unreadable(path, f"no {', '.join(SUFFIXES)} file in it")
        return found
    if not path.is_file():
        raise unreadable(path, "no such file or folder")
    return [path]


def _installed(name: str) -> Path:
    """The folder of an installed package.

    Raises:
        MeshwrightError: D001 when none of that name is installed.
    """
    package = name.removeprefix(PACKAGE)
    spec = find_spec(package) if package.isidentifier() else None  # a plain name: nothing is imported to find it
    if spec is None or not spec.submodule_search_locations:
        raise unreadable(Path(name), "no such package is installed", f"pip install {package}")
    return Path(next(iter(spec.submodule_search_locations)))


def digest(found: list[TextFile]) -> str:
    """SHA-256 over the contents of the files in their order, and how each is read; names do not matter.

    Raises:
        MeshwrightError: D001 for the first file that cannot be read.
    """
    whole = hashlib.sha256()
    for source in found:
        path = source.path
        try:
            with path.open("rb") as file:
                part = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from None
        how = path.suffix.removeprefix(".") if source.fields else "text"
        how += f"#{source.field}" if source.fields and source.field != FIELD else ""
        whole.update(f"{how} {part}\n".encode())
    return whole.hexdigest()


def documents(found: list[TextFile]) -> Iterator[Iterator[bytes]]:
    """Each document as consecutive blocks of UTF-8; read one through before asking for the next.

    Raises:
        MeshwrightError: D001 unreadable, D002 not UTF-8, with the byte; D003 a line or row that has no text.
    """
    for source in found:
        if source.fields:
            yield from (iter([text]) for text in _texts(source))
        else:
            yield _blocks(source.path)


def _blocks(path: Path) -> Iterator[bytes]:
    """A file's blocks without its byte order mark, checked to be UTF-8."""
    decoder, seen = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                held = len(decoder.getstate()[0])
                try:
                    decoder.decode(block, final=len(block) < BLOCK)
                except UnicodeDecodeError as error:
                    raise _not_text(path, seen - held + error.start) from None
                yield block.removeprefix(codecs.BOM_UTF8) if not seen else block
                seen += len(block)
            if decoder.getstate()[0]:  # a file of whole blocks that ends within a character
                raise _not_text(path, seen - len(decoder.getstate()[0]))
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None


def values(source: TextFile, *, texts: bool = False) -> Iterator[tuple[str, Any]]:
    """Place and value of the field of every line or row of a file that has fields; `texts`: strings are wanted.

    Raises:
        MeshwrightError: D001 unreadable; D003 a line that is no object, or without the field.
    """
    read = _lines(source) if source.path.suffix == ".jsonl" else tables.rows(source.path, source.field, texts)
    try:
        yield from read
    except OSError as error:
        raise unreadable(source.path, error.strerror or str(error)) from None


def _lines(source: TextFile) -> Iterator[tuple[str, Any]]:
    """The values of a field of the lines of a .jsonl file."""
    with source.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place, problem, read = f"{source.path}:{number}", "", None
            try:
                read = json.loads(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            except (ValueError, RecursionError) as error:
                problem = f"not JSON: {error}"
            if not problem and (not isinstance(read, dict) or source.field not in read):
                problem = f"it has no text in {json.dumps(source.field)}"
            if problem:
                raise not_a_document(problem, place)
            yield place, read[source.field]


def _texts(source: TextFile) -> Iterator[bytes]:
    """The texts of a file that has fields."""
    for place, value in values(source, texts=True):
        if not isinstance(value, str):
            problem = "it is null" if value is None else f"it has no text in {json.dumps(source.field)}"
            raise not_a_document(problem, place)
        try:
            yield value.encode()
        except UnicodeEncodeError:
            raise not_a_document("its text has half a surrogate pair in it", place) from None


def not_a_document(problem: str, place: str) -> MeshwrightError:
    """D003: nothing is skipped silently, because what is trained on would then not be what was given."""
    return MeshwrightError.one(
        "D003",
        f"not a document: {problem}",
        place=place,
        help='every line is an object such as {"text": "..."}; --data FILE#body takes another key or column',
    )


def _not_text(path: Path, at: int) -> MeshwrightError:
    with path.open("rb") as file:
        begins = file.read(16)
    kind = next((name for head, name in BINARY.items() if begins.startswith(head)), "" if at else "no text")
    help = "convert it first: iconv -f LATIN1 -t UTF-8 OLD > NEW"
    if kind:
        help = f"it looks like {kind}: name text, .jsonl, .parquet or Megatron-LM's .bin and .idx by those endings"
    return MeshwrightError(
        Diagnostic(
            code="D002",
            message=f"not UTF-8 text from byte {at:,} on",
            place=f"--data {path}",
            help=help,
        )
    )
