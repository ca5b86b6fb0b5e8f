"""The output of commands: one JSON object or text on stdout, notes on stderr, files where they can be written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from meshwright.errors import Diagnostic

if TYPE_CHECKING:
    from rich.console import Console


class JsonOutput:
    """Whether the command that runs has printed its one JSON object: a second would leave no JSON of the two."""

    printed = False


def print_json(value: Any) -> None:
    """Print the one JSON object on stdout, indented; infinities and NaN become null, as JSON knows neither."""
    import msgspec

    JsonOutput.printed = True
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:  # a word of the command line or a name in a file that is no UTF-8
        encoded = msgspec.json.encode(_printable(msgspec.to_builtins(value)))
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    sys.stdout.flush()


def _printable(value: Any) -> Any:
    """Plain values with every character that no encoding has written as an escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list | tuple) else value


def console() -> Console:
    """stdout for text. Colour only on a terminal, and not with NO_COLOR."""
    from rich.console import Console

    class Stdout(Console):
        """rich would end the program with exit code 1, which here means "does not fit"."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Stdout(file=sys.stdout, highlight=False)


def note(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr)


def unwritable(path: str, option: str) -> list[Diagnostic]:
    """X104 when a file cannot be written there; asked before the work starts. Empty when `path` is "" or fine."""
    if not path:
        return []
    from meshwright.atomic import obstacle

    name = {"--report": "report.html", "--trace": "step.json.gz"}.get(option, "out")
    found = obstacle(path, such_as=name)
    if found is None:
        return []
    message = f"cannot write {path}: {found.reason}"
    return [Diagnostic(code="X104", message=message, place=f"{option} {path}", help=found.help)]
