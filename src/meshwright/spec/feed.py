"""The feed of a training step: where its samples come from, what is done with each, and by how many workers.

``--feed workers=8,read=2GB/s,tokenise=1.5us/token``: eight workers beside every rank that reads take samples (a sample
is a sequence of the batch) from a source that gives a node 2 GB/s, and spend 1.5 us of a core on every token. A batch
is made by one worker, batches by workers in turn, and at most ``prefetch`` of them are made ahead of the step, as
torch's DataLoader does it. ``workers=0`` is a step that makes its own batch first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.quantity import parse_bytes
from meshwright.spec.serve_values import duration_s
from meshwright.spec.words import SaidWords

#: What a worker spends on a sample, in order. Those before and at the filter are spent on dropped samples too.
STAGES = ("decode", "filter", "tokenise", "augment", "collate")
BEFORE_FILTER = ("decode", "filter")
#: Who reads a replica's samples: one rank for all of its tensor- and context-parallel ranks and stages, or each rank
#: for itself, as ``meshwright run`` does.
REPLICA, RANK = "replica", "rank"
#: When a batch goes to the device: as its step begins, or while the step before runs.
IN_STEP, AHEAD = "in-step", "ahead"
#: Batches ahead for each worker where nobody says, as torch's DataLoader has them (prefetch_factor).
USUAL_PREFETCH = 2
#: Most workers, batches ahead, producers and samples of a reservoir: above, a slip of the keyboard.
MOST_WORKERS, MOST_AHEAD, MOST_PRODUCERS, MOST_SAMPLES = 1024, 65_536, 1 << 20, 1_000_000
LOGNORMAL = "lognormal"


class StageWork(msgspec.Struct, frozen=True):
    """Seconds of a core for a sample, or for each of its tokens (``a_token``); ``sigma`` of the logarithm where samples
    vary about that mean, 0 where they are alike."""

    seconds: float
    a_token: bool = False
    sigma: float = 0.0

    def of(self, tokens: int) -> float:
        """Return the seconds of a sample of so many tokens, in the mean."""
        return self.seconds * (tokens if self.a_token else 1)


class Feed(msgspec.Struct, frozen=True, kw_only=True):
    """The feed of a step. ``workers`` are beside each rank that reads (``readers``: a :data:`REPLICA`'s or every
    :data:`RANK`), ``prefetch`` the batches made ahead for it, 0: :data:`USUAL_PREFETCH` a worker.

    ``read_bytes_s`` is what the source gives a node, ``store_bytes_s`` all nodes together, ``stream_bytes_s`` one
    worker; 0: not bounded by that (and of a node: as its drives are, where it has any). A worker waits ``latency_s``
    for every sample, with so many ``inflight`` at once. ``sample`` is what a sample, or a token of it, is as stored,
    ``copied`` as it goes to the device, (bytes, whether of a token); None: what tokens take. ``keep`` is the share of
    samples that the filter leaves, ``work`` the stages by name. ``cores`` of a node are for workers (0: those that no
    rank has). With ``producers`` samples are made elsewhere, by so many processes that make one in ``make_s`` each,
    in place of files, and every one is trained on once; or batches are drawn from a ``reservoir`` of so many samples of
    each rank, as soon as there are more than ``threshold``, and a sample is trained on as often as it is drawn.
    """

    workers: int = 0
    prefetch: int = 0
    readers: str = REPLICA
    read_bytes_s: float = 0.0
    store_bytes_s: float = 0.0
    stream_bytes_s: float = 0.0
    latency_s: float = 0.0
    inflight: int = 1
    sample: tuple[float, bool] | None = None
    copied: tuple[float, bool] | None = None
    to_device: str = IN_STEP
    keep: float = 1.0
    work: dict[str, StageWork] = {}
    cores: float = 0.0
    producers: int = 0
    make_s: float = 0.0
    reservoir: int = 0
    threshold: int = 0
    seed: int = 0
    words: str = ""

    @property
    def ahead(self) -> int:
        """Batches made ahead for a rank that reads."""
        return self.prefetch or USUAL_PREFETCH * max(self.workers, 1 if self.producers else 0)

    @property
    def varies(self) -> bool:
        """Whether samples differ in what they take."""
        return any(work.sigma for work in self.work.values())

    def text(self) -> str:
        """Return the form that :func:`parse` reads back."""
        return self.words

    def with_workers(self, workers: int) -> Feed:
        """Return the same with so many workers, and at least their usual batches ahead."""
        ahead = max(self.prefetch, USUAL_PREFETCH * workers) if self.prefetch else 0
        return msgspec.structs.replace(self, workers=workers, prefetch=ahead)

    def over(self, text: str, *, place: str = "--try") -> Feed:
        """Return the feed with some words in place of its own.

        Raises:
            MeshwrightError: as :func:`parse`.
        """
        said = [part.strip() for part in text.split(",") if part.strip()]
        keys = {part.partition("=")[0].strip().lower() for part in said}
        kept = [w for w in self.words.split(",") if w and w.partition("=")[0].strip().lower() not in keys]
        return parse(",".join([*kept, *said]), place=place)


def _count(least: int, most: int) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        return int(text) if text.isascii() and text.isdecimal() and least <= int(text[:12]) <= most else None

    return read


def _rate(text: str) -> float | None:
    return parse_bytes(text.removesuffix("/s").strip()) if text.endswith("/s") else None


def _size(text: str) -> tuple[float, bool] | None:
    read = parse_bytes(text.removesuffix("/token").strip())
    return None if read is None else (read, text.endswith("/token"))


def _part(text: str) -> float | None:
    try:
        read = float(text)
    except ValueError:
        return None
    return read if 0 < read <= 1 else None


def _work(text: str) -> StageWork | None:
    if text.partition(":")[0].strip() == LOGNORMAL:
        return _drawn(text.partition(":")[2])
    seconds = duration(text.removesuffix("/token").strip())
    return None if seconds is None else StageWork(seconds, text.endswith("/token"))


def _drawn(text: str) -> StageWork | None:
    said = dict(part.partition("=")[::2] for part in text.split(";"))
    seconds = duration(said.pop("mean", "").strip())
    try:
        sigma = float(said.pop("sigma", ""))
    except ValueError:
        return None
    return StageWork(seconds, False, sigma) if seconds and 0 < sigma <= 5 and not said else None


def duration(text: str) -> float | None:
    """Return a duration in seconds, in nanoseconds too: what a token takes; None for anything else, and without a unit:
    ``latency=800`` is hardly 800 s."""
    if text[-1:].isdigit():
        return None
    if text.endswith("ns"):
        read = duration_s(text.removesuffix("ns") + "us")
        return None if read is None else read / 1e3
    return duration_s(text)


_TIME = "a time of a core with its unit, such as 3ms (a sample), 1.2us/token or lognormal:mean=3ms;sigma=0.5"
_SIZE = "bytes, such as 110kB (a sample) or 4B/token"
_RATE = "a rate such as 2GB/s"
#: Word -> what reads its value, and what that is.
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "workers": (_count(0, MOST_WORKERS), f"a whole number from 0 to {MOST_WORKERS:,}"),
    "prefetch": (_count(1, MOST_AHEAD), f"a whole number from 1 to {MOST_AHEAD:,}"),
    "readers": (lambda text: text if text in (REPLICA, RANK) else None, f"{REPLICA} or {RANK}"),
    "read": (_rate, _RATE),
    "store": (_rate, _RATE),
    "stream": (_rate, _RATE),
    "latency": (duration, "a time with its unit, such as 2ms"),
    "inflight": (_count(1, MOST_AHEAD), f"a whole number from 1 to {MOST_AHEAD:,}"),
    "sample": (_size, _SIZE),
    "copied": (_size, _SIZE),
    "to_device": (lambda text: text if text in (IN_STEP, AHEAD) else None, f"{IN_STEP} or {AHEAD}"),
    "keep": (_part, "a share above 0 and up to 1"),
    **dict.fromkeys(STAGES, (_work, _TIME)),
    "cores": (_count(1, 1 << 16), "a number of cores of a node, up to 65,536"),
    "producers": (_count(1, MOST_PRODUCERS), f"a whole number from 1 to {MOST_PRODUCERS:,}"),
    "make": (duration, "a time with its unit, such as 2s"),
    "reservoir": (_count(1, MOST_SAMPLES), f"a number of samples, up to {MOST_SAMPLES:,}"),
    "threshold": (_count(0, MOST_SAMPLES), f"a number of samples, up to {MOST_SAMPLES:,}"),
    "seed": (_count(0, 999_999_999), "a whole number from 0 up to 999999999"),
}
#: Keys that a feed may say.
KEYS = tuple(READERS)
#: Key -> its field, where that is called otherwise.
_FIELDS = {"read": "read_bytes_s", "store": "store_bytes_s", "stream": "stream_bytes_s"}
_FIELDS |= {"latency": "latency_s", "make": "make_s"}


def parse(text: str, *, place: str = "--feed") -> Feed:
    """Return the feed that a text such as ``workers=8,read=2GB/s,tokenise=1.5us/token`` says.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 and W005 for words that need or contradict each other;
            all at once.
    """
    said = SaidWords(text, READERS, place=place, of="the feed of a step")
    values = said.values
    _contradictions(values, said)
    if said.wrong:
        raise MeshwrightError(said.wrong)
    work = {stage: values.pop(stage) for stage in STAGES if stage in values}
    named = {_FIELDS.get(key, key): value for key, value in values.items()}
    words = ",".join(part.strip() for part in text.split(",") if part.strip())
    return Feed(**named, work=work, words=words)


def _contradictions(values: dict[str, Any], said: SaidWords) -> None:
    if "prefetch" in values and not values.get("workers") and "producers" not in values:
        said.refuse("W005", "prefetch= without workers: a step makes its own batch", "say workers=, or drop prefetch=")
    if ("producers" in values) != ("make" in values):
        said.refuse("W003", "producers= and make= belong together", "for example producers=250,make=2s")
    if "producers" in values and values.get("workers"):
        said.refuse("W005", "producers= make samples, and workers= read them from files", "say one of them")
    if "keep" in values and "producers" in values:
        said.refuse("W005", "keep= is of samples that are read, and producers make them", "drop keep=")
    for word in ("reservoir", "threshold"):
        if word in values and "producers" not in values:
            help = "say producers= and make=, or drop it"
            said.refuse("W005", f"{word}= is of samples that producers make as training goes on", help)
    if "producers" in values and values.get("threshold", -1) >= values.get("reservoir", 0):
        said.refuse("W005", "threshold= is as many as the reservoir holds", "say reservoir= of more samples")
