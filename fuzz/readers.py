"""One text through its reader and `check`: refused with reasons, or accepted and the same when written again."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fuzz import corpus
from meshwright import catalog
from meshwright import plan as plans
from meshwright.errors import MeshwrightError
from meshwright.plan import toml
from meshwright.spec import cluster as clusters
from meshwright.spec import model as models
from meshwright.spec import workload
from meshwright.trace import chrome_read


class Defect(Exception):
    """Something that must not be, though no exception said so."""


class Partner(NamedTuple):
    """The question that `check` is asked, one part of it replaced by what was read."""

    plan: plans.Plan
    model: models.Model
    cluster: clusters.Cluster
    train: workload.Train


@cache
def partners() -> tuple[Partner, ...]:
    """:data:`fuzz.corpus.PARTNERS`, read."""
    return tuple(
        Partner(
            plans.parse(words),
            models.load(model) if isinstance(model, str) else model,
            clusters.load(where),
            workload.parse(train),
        )
        for model, where, train, words in corpus.PARTNERS
    )


@cache
def known_codes() -> frozenset[str]:
    """Codes that `meshwright explain` knows."""
    return frozenset(catalog.tables("codes"))


class Readers:
    """Every kind of text and what reads it; files are written to `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def look(self, kind: str, data: bytes) -> str:
        """``accepted``, ``illegal`` (read, and refused by `check`) or ``refused``.

        Raises:
            Exception: the defect.
        """
        try:
            return "accepted" if getattr(self, "_" + kind.replace(".", "_"))(data) else "illegal"
        except MeshwrightError as error:
            judge(error)
            return "refused"

    def _file(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def _plan(self, data: bytes) -> bool:
        words = _text(data)
        plan = plans.parse(words + " " if words.endswith(".toml") else words)
        again = plans.parse(plan.text())
        if again != plan:
            raise Defect(f"{plan.text()!r} reads as {again.text()!r}")
        return _legal(plan=plan)

    def _plan_toml(self, data: bytes) -> bool:
        plan = plans.parse(str(self._file("plan.toml", data)))
        if toml.loads(toml.dump(plan)) != plan:
            raise Defect("a plan's TOML reads as another plan")
        return _legal(plan=plan)

    def _workload(self, data: bytes) -> bool:
        train = workload.parse(_text(data))
        train.text()
        return _legal(train=train)

    def _lengths_csv(self, data: bytes) -> bool:
        path = self._file("lengths.csv", data)
        return _legal(train=workload.parse(f"batch=16,seq=128,lengths={path}"))

    def _cluster(self, data: bytes) -> bool:
        name = _text(data)
        return _legal(cluster=clusters.load(name + " x" if name.strip().lower().endswith(".toml") else name))

    def _cluster_toml(self, data: bytes) -> bool:
        cluster = clusters.load(str(self._file("cluster.toml", data)))
        if clusters.from_toml(clusters.to_toml(cluster)) != cluster:
            raise Defect("a cluster's TOML reads as another cluster")
        return _legal(cluster=cluster)

    def _config_json(self, data: bytes) -> bool:
        return _legal(model=models.load(self._file("config.json", data)))

    def _model(self, data: bytes) -> bool:
        return _legal(model=models.load(_text(data).replace("/", "")))

    def _question_toml(self, data: bytes) -> bool:
        from meshwright.cli import question

        asked = question.load(str(self._file("question.toml", data)))
        parts, wrong = question.read_parts(asked)
        _, more = question.read_goal(asked, parts)
        if wrong or more:
            raise MeshwrightError([*wrong, *more])
        if len(parts) < 4:
            return False
        model, cluster, train, plan = parts
        return _legal(plan=plan, model=model, cluster=cluster, train=train)

    def _trace_json(self, data: bytes) -> bool:
        timeline = chrome_read.read(self._file("trace.json", data))
        return len(timeline.start_s) > 0


def judge(error: MeshwrightError) -> None:
    """Whether an error is one that a user can act on.

    Raises:
        Defect: it has no violation, an unknown code, or nothing to say.
    """
    if not error.diagnostics:
        raise Defect("an error without a violation")
    for found in error.diagnostics:
        if found.code not in known_codes():
            raise Defect(f"code {found.code} is not explained")
        if not found.message.strip():
            raise Defect(f"{found.code} says nothing")


def temporary() -> Path:
    """A folder for files that are written a thousand times a second: in memory, where the system has such a place."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _text(data: bytes) -> str:
    """As a command line hands bytes over."""
    return data.decode("utf-8", "surrogateescape")


def _legal(**read: object) -> bool:
    """Whether what was read is legal with any partner; every violation is one that a user can act on."""
    legal = False
    for partner in partners():
        asked = partner._replace(**read)
        found = plans.check(asked.plan.on(asked.cluster.num_devices), asked.model, asked.cluster, asked.train)
        if found:
            judge(MeshwrightError(found))
        legal = legal or not found
    return legal
