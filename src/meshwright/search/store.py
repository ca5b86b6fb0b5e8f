"""The store: every evaluated plan in one sqlite file, so that a search that was stopped goes on where it was.

A question is a model, a cluster, a workload and costs, by what they contain; answers are kept per question and code,
because another version of the code may answer otherwise. Journals are written ahead (WAL), so that several processes
read and write one file; what is committed survives a crash. Times are stored as 8-byte floats: nothing is rounded.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from meshwright import catalog
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.search.evaluate import Evaluated
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

FORMAT_VERSION = 1
#: Seconds between commits while a search runs, and to wait for another process that writes.
COMMIT_S, WAIT_S = 1.0, 30.0

_TABLES = """
CREATE TABLE IF NOT EXISTS questions (
    id TEXT PRIMARY KEY, model TEXT, cluster TEXT, workload TEXT, costs TEXT, code TEXT);
CREATE TABLE IF NOT EXISTS plans (
    question TEXT REFERENCES questions(id), plan TEXT, step_time_s REAL, headroom_bytes REAL,
    PRIMARY KEY (question, plan)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS walks (
    question TEXT REFERENCES questions(id), asked TEXT, walk BLOB, PRIMARY KEY (question, asked)) WITHOUT ROWID;
"""


class Store:
    """Answers to one question in a file; use as a context manager."""

    def __init__(self, path: str | Path, model: Model, cluster: Cluster, train: Train, costs: Costs):
        self._file = _open(path)
        self.question = identity(model, cluster, train, costs)
        row = (self.question, model.name, cluster.name, train.text(), costs.profile, code())
        with self._file:
            self._file.execute("INSERT OR IGNORE INTO questions VALUES (?, ?, ?, ?, ?, ?)", row)
        self._committed = monotonic()
        self._new: list[tuple[str, str, float, float]] = []

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.flush()
        self._file.close()

    def known(self) -> dict[str, Evaluated]:
        """Return the results of earlier evaluations of this question, by the words of the plan."""
        rows = self._file.execute(
            "SELECT plan, step_time_s, headroom_bytes FROM plans WHERE question = ?", (self.question,)
        )
        return {plan: Evaluated(seconds, headroom) for plan, seconds, headroom in rows}

    def record(self, plan: Plan, answer: Evaluated) -> None:
        """Keep an answer; it is on disk a second later at most."""
        self._new.append((self.question, plan.text(), *answer))
        if monotonic() - self._committed > COMMIT_S:
            self.flush()

    def finished(self, asked: str) -> bytes | None:
        """A finished walk (``search/finished.py``), None when there is none."""
        row = self._file.execute("SELECT walk FROM walks WHERE question = ? AND asked = ?", (self.question, asked))
        return next((walk for (walk,) in row), None)

    def finish(self, asked: str, walk: bytes) -> None:
        """Keep a finished walk, and its evaluations."""
        self.flush()
        with self._file:
            self._file.execute("INSERT OR REPLACE INTO walks VALUES (?, ?, ?)", (self.question, asked, walk))

    def flush(self) -> None:
        """Write the evaluations that are not on disk yet."""
        with self._file:
            self._file.executemany("INSERT OR IGNORE INTO plans VALUES (?, ?, ?, ?)", self._new)
        self._new.clear()
        self._committed = monotonic()


def identity(model: Model, cluster: Cluster, train: Train, costs: Costs) -> str:
    """A digest of all that decides the answers: what an hour costs, and how many of them a run takes, do not."""
    cluster = msgspec.structs.replace(cluster, price_usd_hour=None, sources={})
    train = msgspec.structs.replace(train, tokens=0.0)
    asked = msgspec.json.encode([model, cluster, train, costs.profile, costs.framework], order="deterministic")
    return hashlib.sha256(asked + code().encode() + _measured_here()).hexdigest()[:16]


def _measured_here() -> bytes:
    """Return a digest of the tables measured on this machine, which may be measured anew."""
    digest = hashlib.sha256()
    where = catalog.measured_here()
    for file in [f for some in ("*.toml", "*.json", "kernels/*.json") for f in sorted(where.glob(some))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.digest()


@cache
def code() -> str:
    """A digest of the package's own files: another code may answer otherwise."""
    digest = hashlib.sha256()
    for file in _sources(Path(__file__).parent.parent):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _sources(folder: Any) -> Iterable[Any]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir() and entry.name not in ("__pycache__", "report", "cli"):
            yield from _sources(entry)
        elif entry.name.endswith((".py", ".toml", ".json")):
            yield entry


def _open(path: str | Path) -> sqlite3.Connection:
    """The file, made if it is not there.

    Raises:
        MeshwrightError: R010 when it cannot be opened or is of another format.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path, timeout=WAIT_S)
        file.execute("PRAGMA synchronous = NORMAL")  # the system may lose the last commits in a crash, a process none
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT_VERSION):
            file.close()
            raise MeshwrightError.one(
                "R010",
                f"the store is of format {version}, this version reads {FORMAT_VERSION}",
                place=str(path),
                help="name another file with --store, or delete this one: it only saves time",
            )
        file.execute("PRAGMA journal_mode = WAL")
        with file:
            file.executescript(_TABLES)
            if version != FORMAT_VERSION:
                file.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        return file
    except (sqlite3.Error, OSError) as error:
        raise MeshwrightError.one(
            "R010", f"cannot use the store: {error}", place=str(path), help="name another file with --store, or none"
        ) from None


def query(path: str | Path, sql: str) -> tuple[list[str], list[tuple]]:
    """Columns and rows of a question in SQL, which cannot change the file.

    Raises:
        MeshwrightError: R010 when there is no such store, R011 when the SQL is wrong.
    """
    if not Path(path).is_file():
        raise MeshwrightError.one("R010", "there is no store yet", place=str(path), help="run a search first")
    with closing(sqlite3.connect(f"file:{Path(path).resolve()}?mode=ro", uri=True, timeout=WAIT_S)) as file:
        try:
            rows = file.execute(sql)
            return [c[0] for c in rows.description or ()], rows.fetchall()
        except sqlite3.Error as error:
            raise MeshwrightError.one(
                "R011",
                f"the store cannot answer: {error}",
                place=f"--sql {sql!r}",
                help="tables: questions(id, model, cluster, workload, costs, code), "
                "plans(question, plan, step_time_s, headroom_bytes)",
            ) from None


SHOWN = """SELECT model, cluster, workload, costs, count(*) AS evaluated, min(step_time_s) AS best_step_time_s,
    (SELECT plan FROM plans WHERE question = id AND headroom_bytes >= 0 ORDER BY step_time_s, plan LIMIT 1) AS plan
    FROM questions JOIN plans ON question = id WHERE headroom_bytes >= 0 GROUP BY id
    ORDER BY model, cluster, workload"""
