"""Exported configurations: files by name, and notes on what a file cannot say."""

from __future__ import annotations

import shlex

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.export import launch


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration: ``files`` by name, the main one first, the launch script (:data:`launch.FILE`) last where it is
    a file of its own; ``notes`` say how to start it, what is still to be filled in (``<...>`` in the files) and what is
    left at the target's own default."""

    target: str
    version: str
    files: dict[str, str]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The main file."""
        return next(iter(self.files.values()))

    @property
    def companions(self) -> tuple[str, ...]:
        """Names of the files that the main one cannot do without; the launch script is none."""
        return tuple(name for name in list(self.files)[1:] if name != launch.FILE)

    def renamed(self, name: str) -> Exported:
        """The same with another name of the main file, in its notes and its launch script as well.

        Raises:
            MeshwrightError: E003 for a name that a comment cannot hold, or under which Python cannot import what is
                imported.
        """
        (old, text), *others = self.files.items()
        if not name.isprintable():
            raise MeshwrightError.one("E003", f"{name!r} has characters that no line can hold", place="--out")
        if old.endswith(".py") and not (name.endswith(".py") and name[:-3].isidentifier()):
            message = f"{name} cannot be imported, and {self.target} imports its configuration"
            raise MeshwrightError.one(
                "E003", message, place=f"--out {name}", help=f"name a Python module, such as {old}"
            )
        modules = [f"--module {file.removesuffix('.py')} " for file in (old, name)]
        notes = tuple(note.replace(old, name).replace(*modules) for note in self.notes)
        files = {name: text, **dict(others)}
        if launch.FILE in files:
            files[launch.FILE] = files[launch.FILE].replace(*map(launch.named, (old, name)))
        else:
            files[name] = text.replace(f" {old}", f" {shlex.quote(name)}")
        return msgspec.structs.replace(self, files=files, notes=notes)
