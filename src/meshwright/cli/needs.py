"""Optional dependencies of commands, those that planning and predicting do without."""

from __future__ import annotations

from importlib.util import find_spec

from meshwright.errors import Diagnostic


def lacking(command: str, *modules: str, extra: str = "run") -> list[Diagnostic]:
    """L003 when a module that `command` needs, of the package's `extra`, is not installed; nothing is imported."""
    missing = [name for name in modules if find_spec(name) is None]
    if not missing:
        return []
    return [
        Diagnostic(
            code="L003",
            message=f"{command} needs {' and '.join(missing)}, not installed here",
            place=f"meshwright {command}",
            help=f'pip install "meshwright[{extra}]"; predicting and searching need none of it',
        )
    ]
