"""A technique of serving chosen by records of earlier questions, without trying any on the one at hand.

MetaInf (Du et al., 2508.09194) learns from runs of acceleration techniques how well each does for a model, a device and
a workload, and picks for a new task the one that is said to do best. Its descriptions are embedded by a language model;
here a question is a vector of what decides which technique pays: how long a token's products and a pass over the
weights take, how many requests the cache has room for, lengths, loads and shared prefixes. The log of a technique's
gain is the mean over extremely randomised trees of its own (:mod:`meshwright.search.serving.gain_trees`). Records are
lines of JSON in the words of the command line: those of predictions, and of measured runs that somebody writes in the
same words.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import exp
from os import SEEK_END
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright import catalog, serving
from meshwright.answer.replica import alone
from meshwright.cost.roofline import peak_flops
from meshwright.errors import MeshwrightError
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import Plan
from meshwright.plan import parse as parse_plan
from meshwright.search.serving.evaluate import rate_of
from meshwright.search.serving.gain_trees import GainTrees
from meshwright.search.serving.techniques import HELPS, ServedRanking
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.engine_words import KV_BYTES
from meshwright.spec.model import Model
from meshwright.spec.model import load as load_model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.spec.serve import parse as parse_serve

#: Records of predictions that are there before anybody keeps some (``tools/try_techniques.py`` makes them).
SHIPPED = catalog.folder("tried") / "techniques.jsonl.gz"
#: Requests a second of those that all come at once, as a number.
AT_ONCE = 1e4


class AskedWords(NamedTuple):
    """A question in the words of the command line."""

    model: str
    on: str
    plan: str
    serve: str


class TechniqueRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One technique on one question: the question's words, those of the ``technique`` ("" for none), and the ``value``
    of its ``measure``, more being better."""

    model: str
    on: str
    plan: str
    serve: str
    technique: str
    measure: str
    value: float

    @property
    def asked(self) -> AskedWords:
        """The question."""
        return AskedWords(self.model, self.on, self.plan, self.serve)


class Gains(msgspec.Struct, frozen=True):
    """Gains that records give reason to expect of a question's techniques: words and gain, the greatest first, from so
    many ``records`` of so many ``questions``."""

    expected: tuple[tuple[str, float], ...]
    records: int
    questions: int


def records_of(asked: AskedWords, ranking: ServedRanking) -> list[TechniqueRecord]:
    """Return the records of what was tried, with the question as it is first; none of what cannot be on the plan."""
    tried = [one for one in (ranking.before, *ranking.attempts) if one.metrics is not None]
    return [
        TechniqueRecord(
            **asked._asdict(), technique=one.technique.words, measure=ranking.measure, value=ranking.value(one)
        )
        for one in tried
    ]


def write(path: str | Path, records: Iterable[TechniqueRecord]) -> None:
    """Add records to a file, which is made where it is not there, and compressed where its name ends in ``.gz``.

    Raises:
        MeshwrightError: X006 when it cannot be written.
    """
    lines = b"".join(msgspec.json.encode(one) + b"\n" for one in records)
    packed = Path(path).suffix == ".gz"
    try:
        with Path(path).open("ab") as file:
            if not packed and not _ends_a_line(path):
                lines = b"\n" + lines
            file.write(gzip.compress(lines, mtime=0) if packed else lines)
    except OSError as error:
        raise _unread(path, "write", error.strerror or str(error)) from None


def _ends_a_line(path: str | Path) -> bool:
    """Whether a new line may follow what is in a file; one written by hand may lack the last line feed."""
    if not Path(path).is_file() or not Path(path).stat().st_size:
        return True
    with Path(path).open("rb") as file:
        file.seek(-1, SEEK_END)
        return file.read() == b"\n"


def read(path: str | Path) -> list[TechniqueRecord]:
    """Return the records of a file, which may be compressed.

    Raises:
        MeshwrightError: X006 for a file that cannot be read, or a line that is no record.
    """
    try:
        stored = Path(path).read_bytes()
        packed = gzip.decompress(stored) if Path(path).suffix == ".gz" else stored
        lines = packed.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise _unread(path, "read", "not UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:  # a compressed file may be cut short, or none
        raise _unread(path, "read", getattr(error, "strerror", None) or str(error)) from None
    return parsed(lines, path)


def parsed(lines: Sequence[str], path: str | Path) -> list[TechniqueRecord]:
    """Return the records of lines, which are those of a file.

    Raises:
        MeshwrightError: X006 for a line that is no record.
    """
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=TechniqueRecord))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise _unread(path, "read", f"line {number}: {error}") from None
    return found


def _unread(path: str | Path, what: str, reason: str) -> MeshwrightError:
    keys = json.dumps(dict.fromkeys(TechniqueRecord.__struct_fields__[:-1], "") | {"value": 1.0})
    help = f"whatif --serve --try all --records FILE writes lines such as {keys}"
    return MeshwrightError.one("X006", f"cannot {what} {path}: {reason}", place=f"--records {path}", help=help)


def features(model: Model, cluster: Cluster, plan: Plan, serve: Serve, requests: Requests) -> np.ndarray:
    """Return what decides which technique pays, as numbers [features]; times and counts as logarithms."""
    plan, device = plan.on(cluster.num_devices), cluster.islands[0].device
    one, layout = alone(plan), plan.layout
    forward = Forward(model, one, Mesh(one, cluster), serve.engine.kv)
    weights, cached = forward.weight_bytes(0), max(forward.kv_bytes(0), 1.0)
    room = max(device.memory_bytes * serve.engine.memory - weights, cached) / cached
    read_s = weights / (device.memory_gb_s * 1e9)
    token_s = 2.0 * model.active_params / (layout.tp * layout.pp) / peak_flops(device, plan.precision.compute or "bf16")
    prompt, output = (np.asarray(x, float) for x in (requests.prompt, requests.output))
    come = min(rate_of(requests), AT_ONCE)
    asked = min(requests.concurrency or len(requests), serve.engine.max_batch * layout.dp) / layout.dp
    sent_s = 0.0
    if layout.tp > 1:
        link = Mesh(one, cluster).group("tp").hops[0].gb_s
        sent_s = 4.0 * model.hidden * model.num_layers * 2.0 / (link * 1e9)
    blocks = len(requests.hashes)
    repeated = 1.0 - len(np.unique(requests.hashes)) / blocks if blocks else 0.0
    bounds = [getattr(serve, name) for name in ("ttft", "tpot")]
    numbers = [
        read_s, token_s, read_s / token_s, room, asked, asked * (prompt + output).mean() / room, prompt.mean(),
        output.mean(), prompt.mean() / output.mean(), 1.0 + prompt.std() / prompt.mean(),
        1.0 + output.std() / output.mean(), come * prompt.mean() * token_s / layout.dp, come * output.mean() * read_s,
        token_s / (token_s + sent_s), layout.tp, layout.pp, layout.dp,
        *(100.0 if bound is None else bound.seconds for bound in bounds),
    ]  # fmt: skip
    said = [repeated, repeated * prompt.mean() / (prompt.mean() + output.mean()), float(serve.engine.prefix_cache)]
    said += [KV_BYTES[serve.engine.kv], *(float(serve.engine.policy == name) for name in serving.names("batching"))]
    return np.array([*np.log(np.maximum(numbers, 1e-12)), *said])


@lru_cache(maxsize=4096)
def _features_of(asked: AskedWords) -> tuple[float, ...]:
    serve, plan = parse_serve(asked.serve), parse_plan(asked.plan)
    if plan.several:
        raise MeshwrightError.one("X004", "techniques are put over a plan of one pool, and its plan has several")
    return tuple(features(load_model(asked.model), load_cluster(asked.on), plan, serve, serve.drawn()).tolist())


def _recorded(asked: AskedWords) -> tuple[float, ...]:
    """The features of a record's question.

    Raises:
        MeshwrightError: X006 for one that cannot be asked here.
    """
    try:
        return _features_of(asked)
    except MeshwrightError as error:
        place = f"--records: {asked.model} --on {asked.on} --plan {asked.plan!r} --serve {asked.serve}"
        message = f"a record's question cannot be asked: {error.diagnostics[0].message}"
        help = "drop its lines, or bring back the files that it names"
        raise MeshwrightError.one("X006", message, place=place, help=help) from None


class RecordedGains:
    """Records of one ``measure``, and the gains of techniques that trees learn from them.

    Raises:
        MeshwrightError: X006 for a record whose question cannot be asked.
    """

    def __init__(self, records: Sequence[TechniqueRecord], measure: str):
        usual = {one.asked: one.value for one in records if one.measure == measure and not one.technique}
        gained = [
            one
            for one in records
            if one.measure == measure and one.technique and usual.get(one.asked, 0.0) > 0 and one.value > 0
        ]
        self.questions = list(dict.fromkeys(one.asked for one in gained))
        self.words = sorted({one.technique for one in gained})
        self.records = len(gained)
        rows, columns = ({v: i for i, v in enumerate(values)} for values in (self.questions, self.words))
        self.gains = np.full((len(rows), len(columns)), np.nan)
        for one in gained:
            self.gains[rows[one.asked], columns[one.technique]] = np.log(one.value / usual[one.asked])
        self.x = np.array([_recorded(asked) for asked in self.questions])
        self._grown: dict[tuple[str, tuple[int, ...]], GainTrees] = {}

    def expects(
        self, x: np.ndarray, allowed: Callable[[str], bool] = lambda words: True, *, but: Sequence[int] = ()
    ) -> Gains:
        """Return what the records, `but` those of some questions, say of a question with features `x`, of techniques
        whose words are `allowed` and that have ever gained."""
        rows = np.setdiff1d(np.arange(len(self.questions)), but)
        expected: list[tuple[str, float]] = []
        for words, gains in zip(self.words, self.gains[rows].T, strict=True):
            known = rows[~np.isnan(gains)]
            if len(known) and exp(gains[~np.isnan(gains)].max()) > HELPS and allowed(words):
                expected.append((words, exp(self._trees(words, tuple(known.tolist()))(x))))
        expected.sort(key=lambda one: (-one[1], one[0]))
        return Gains(tuple(expected), int((~np.isnan(self.gains[rows])).sum()), len(rows))

    def _trees(self, words: str, rows: tuple[int, ...]) -> GainTrees:
        if (words, rows) not in self._grown:
            some = np.array(rows)
            self._grown[words, rows] = GainTrees(self.x[some], self.gains[some, self.words.index(words)])
        return self._grown[words, rows]


__all__ = [
    "SHIPPED",
    "AskedWords",
    "GainTrees",
    "Gains",
    "RecordedGains",
    "TechniqueRecord",
    "features",
    "parsed",
    "read",
    "records_of",
    "write",
]
