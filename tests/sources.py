"""The source of the package as facts: every file is parsed once, for all tests that look at it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import meshwright

SOURCE = Path(meshwright.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


class Facts(NamedTuple):
    """``imports``: the full names of all that a file imports at run time, at its top or inside its functions: all but
    what stands under ``if TYPE_CHECKING``. ``taken``: the names of every ``from MODULE import``. ``documented``: there
    is a docstring. ``words``: the constants of every tuple, list and set, and of the keys of every dict."""

    imports: frozenset[str]
    taken: tuple[tuple[str, tuple[str, ...]], ...]
    classes: tuple[str, ...]
    documented: bool
    words: tuple[frozenset, ...]


@cache
def facts(path: Path) -> Facts:
    """Return the facts of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    for_types = {
        inner
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    imports: set[str] = set()
    taken, classes, words = [], [], []
    for node in nodes:
        if isinstance(node, ast.Import) and node not in for_types:
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            taken.append((node.module, tuple(alias.name for alias in node.names)))
            if node not in for_types:
                imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            parts = node.keys if isinstance(node, ast.Dict) else node.elts
            found = frozenset(part.value for part in parts if isinstance(part, ast.Constant))
            if found:
                words.append(found)
    documented = bool(ast.get_docstring(tree))
    return Facts(frozenset(imports), tuple(taken), tuple(classes), documented, tuple(words))
