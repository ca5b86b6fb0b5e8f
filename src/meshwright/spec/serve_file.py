"""A serving workload in a .toml file: the words of the command line as keys, and a table for each of several clients::

    format_version = 1
    window = "600s"
    ttft = "500ms@p90"
    policy = "sarathi"

    [[client]]
    name = "chat"
    trace = "azure-conv"
    rate = 4

    [[client]]
    name = "batch jobs"
    concurrency = 8
    prompt = 4096
    output = 512
    requests = 500

What is said above the clients is of all of them together: how many requests, objectives, the engine. Names of files are
relative to the file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from meshwright.errors import Diagnostic, MeshwrightError

FORMAT_VERSION = 1
#: Words whose values may be names of files.
FILES = ("trace", "windows", "lengths", "data")


def load(path: Path, name: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the words of a file above its clients, and those of each client; `name` is how the file was named.

    Raises:
        MeshwrightError: X006 unreadable, X007 another format version, X008 for every key that is no word.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else f"not TOML: {error}"
        raise MeshwrightError.one("X006", f"cannot read {name}: {reason}", place=name) from None
    version = table.pop("format_version", None)
    if version != FORMAT_VERSION or isinstance(version, bool):
        help = f"write format_version = {FORMAT_VERSION} at the top of the file"
        message = f"format_version is {version!r}, this version reads {FORMAT_VERSION}"
        raise MeshwrightError.one("X007", message, place=name, help=help)
    clients = table.pop("client", [])
    wrong: list[Diagnostic] = []
    if not isinstance(clients, list) or not all(isinstance(one, dict) for one in clients):
        wrong.append(_wrong("client", "a table for each client, [[client]]", name))
        clients = []
    folder = Path(name).parent
    above = _words(table, name, folder, wrong)
    found = [_words(one, f"{name} client {i}", folder, wrong) for i, one in enumerate(clients, 1)]
    if wrong:
        raise MeshwrightError(wrong)
    return above, found


def _words(table: dict[str, Any], place: str, folder: Path, wrong: list[Diagnostic]) -> dict[str, str]:
    """Return the words of a table as they are written on the command line, its classes of objectives too."""
    found: dict[str, str] = {}
    for key, value in table.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for part, one in inner:
            word = f"{key}.{part}".rstrip(".").lower()
            text = _text(one)
            if text is None or "," in text:
                wrong.append(_wrong(word, "one word, number, or true or false", place))
                continue
            text = text.strip() if word != "name" else text
            is_path = word in FILES and (Path(text).suffix or word == "data")
            found[word] = str(folder / text) if is_path else text
    return found


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:.15g}"
    return value if isinstance(value, str) and value else None


def _wrong(key: str, wanted: str, place: str) -> Diagnostic:
    return Diagnostic(code="X008", message=f"{key} is not {wanted}", place=place, help="meshwright explain serve")
