"""The file of a measured traffic: a line of JSON that says what was asked of whom, then a line for each request, and
one for each look at the server's own figures.

A line is written when its request is over, and in one piece: whatever interrupts a run, the file is valid up to there,
and the next run goes on behind it. Times are seconds of the workload's own clock, whose 0 is the first arrival: a run
that goes on begins where the requests that are left begin.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import IO, Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.requests import COLUMNS, Requests
from meshwright.traffic.figures import ServerFigures

FORMAT, FORMAT_VERSION = "meshwright traffic", 1
#: What a request without an answer in full ended with, in the words of ``finish``.
WITHDRAWN = "withdrawn"


class TrafficHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: the server's ``url`` and ``model``, the workload's words (``serve``) and the digest of its
    requests, how prompts were made (``prompts``), whether as chats, and the ``salt`` that their texts begin from."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    url: str
    model: str
    serve: str
    digest: str
    requests: int
    concurrency: int = 0
    chat: bool = False
    prompts: str = ""
    salt: int = 0
    begun: str = ""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its client saw it; times in seconds of the workload's clock, -1 for what never came.

    ``due_s`` is when it was to be sent and ``sent_s`` when it was; ``first_s`` and ``end_s`` are when the first and the
    last piece of its answer came, ``gaps_us`` the microseconds between two pieces. ``prompt`` and ``output`` are tokens
    as the server counts them (``counted``: it does not say, and pieces were counted, or the prompt's as it was drawn),
    ``asked`` the tokens that were asked for, ``cached`` those of the prompt that the server had (-1: it does not say).
    ``part`` counts how often the run had been interrupted."""

    number: int
    due_s: float
    sent_s: float
    first_s: float = -1.0
    end_s: float = -1.0
    prompt: int = 0
    output: int = 0
    asked: int = 0
    cached: int = -1
    counted: bool = False
    status: int = 0
    finish: str = ""
    error: str = ""
    part: int = 0
    gaps_us: tuple[int, ...] = ()

    @property
    def answered(self) -> bool:
        """Whether the answer came, as a whole."""
        return not self.error and self.first_s >= 0 and self.finish != WITHDRAWN

    @property
    def late_s(self) -> float:
        """Seconds that it was sent after it was due."""
        return self.sent_s - self.due_s


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """A measured traffic: what was asked, and the record of every request that was sent, the last one of each, by
    number; ``path`` is its file, and ``figures`` what the server said of itself meanwhile."""

    head: TrafficHead
    records: dict[int, RequestRecord]
    path: str = ""
    figures: tuple[ServerFigures, ...] = ()

    @property
    def parts(self) -> int:
        """How many runs it took."""
        return 1 + max((one.part for one in self.records.values()), default=0)

    @property
    def answered(self) -> list[RequestRecord]:
        """The records of requests that were answered, by when they were sent."""
        found = [one for one in self.records.values() if one.answered]
        return sorted(found, key=lambda one: (one.sent_s, one.number))


def digest(requests: Requests) -> str:
    """Return the digest of what a workload asks: equal for the same requests at the same times."""
    hashed = hashlib.sha256(f"{requests.concurrency} {requests.hash_block} {requests.chunked}".encode())
    for name in (*COLUMNS, "hashes", "hash_ptr"):
        column = getattr(requests, name)
        hashed.update(f"{name} {len(column)}".encode() + column.astype("<f8").tobytes())
    return hashed.hexdigest()[:32]


def read(path: str | Path) -> Traffic:
    """Read a file of measured traffic. A last line that was not written to its end is no part of it.

    Raises:
        MeshwrightError: T005 for a file that cannot be read, or is another.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from None
    first, *lines = data[: data.rfind(b"\n") + 1].split(b"\n")
    try:
        head = msgspec.json.decode(first, type=TrafficHead)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"its first line is not that of measured traffic: {error}") from None
    if (head.format, head.format_version) != (FORMAT, FORMAT_VERSION):
        said = f"{head.format} {head.format_version}"
        raise _unreadable(path, f"its format is {said}, this version reads {FORMAT} {FORMAT_VERSION}")
    decoder, records, figures = msgspec.json.Decoder(RequestRecord), {}, []
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        try:
            if line.startswith(b'{"at_s"'):
                figures.append(msgspec.json.decode(line, type=ServerFigures))
                continue
            one = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _unreadable(path, f"line {number}: {error}") from None
        if not 0 <= one.number < head.requests:
            raise _unreadable(path, f"line {number}: request {one.number} of {head.requests}")
        records[one.number] = one
    return Traffic(head=head, records=records, path=str(path), figures=tuple(figures))


def is_traffic(path: str | Path) -> bool:
    """Whether a file begins as measured traffic does."""
    try:
        with Path(path).open("rb") as file:
            return file.read(64).startswith(f'{{"format":"{FORMAT}"'.encode())
    except (OSError, ValueError):
        return False


def _unreadable(path: str | Path, why: str) -> MeshwrightError:
    help = "a file that meshwright bench-serve wrote with --out"
    return MeshwrightError.one("T005", f"cannot read {path} as measured traffic: {why}", place=str(path), help=help)


class TrafficJournal:
    """The file being written, a line at a time; no file where there is no path."""

    def __init__(self, path: str, head: TrafficHead, *, goes_on: bool):
        self._path = path
        self._file: IO[bytes] | None = None
        if not path:
            return
        if goes_on:
            self._file = Path(path).open("r+b")  # noqa: SIM115 - it stays open as long as the run
            whole = self._file.read().rfind(b"\n") + 1
            self._file.seek(whole)
            self._file.truncate()
        else:
            self._file = Path(path).open("wb")  # noqa: SIM115
            self._write(head)

    def add(self, one: RequestRecord | ServerFigures) -> None:
        """Write the record of a request, or what the server says of itself."""
        if self._file is not None:
            self._write(one)

    def _write(self, line: Any) -> None:
        assert self._file is not None
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what the system still holds, and close the file."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Let go of a file that takes no more: what is in it is valid up to the last whole line.

        Raises:
            MeshwrightError: X104, always.
        """
        assert self._file is not None
        with contextlib.suppress(OSError):
            self._file.close()  # what it holds back has no room either
        self._file = None
        message = f"cannot write {self._path}: {error.strerror}"
        help = "make room for it; the same command with --resume goes on with what is there"
        raise MeshwrightError.one("X104", message, place=f"--out {self._path}", help=help) from None
