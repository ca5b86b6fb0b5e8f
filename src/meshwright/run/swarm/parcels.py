"""Parcels between whoever trains and a peer: a word and flat bytes, over a pipe of the machine."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec
import torch

from meshwright.run.world import Report

T = TypeVar("T")


class HoldStage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a peer: hold ``stage`` after ``step`` steps from now on; its state comes along."""

    stage: int
    step: int


class BeginStep(msgspec.Struct, frozen=True, tag=True):
    """To a peer: a step begins, whose gradients are summed from nothing."""

    step: int


class DoPass(msgspec.Struct, frozen=True, tag=True):
    """To a peer: do a pass of a microbatch; what goes into the stage comes along, before the gradient of its output."""

    number: int
    microbatch: int
    backward: bool


class SumOver(msgspec.Struct, frozen=True, tag=True):
    """To a peer: sum the gradients of your stage as the ``index``-th of ``size`` peers, that meet at ``store``."""

    number: int
    index: int
    size: int
    store: str


class Update(msgspec.Struct, frozen=True, tag=True):
    """To a peer: apply the sum; the whole gradient is so long."""

    norm: float


class GiveState(msgspec.Struct, frozen=True, tag=True):
    """To a peer: send the state of your stage, for the peer ``taker`` (-1: for whoever trains)."""

    taker: int


class LeaveSwarm(msgspec.Struct, frozen=True, tag=True):
    """To a peer: end."""


class StageHeld(msgspec.Struct, frozen=True, tag=True):
    """From a peer: it holds its stage."""


class PassMade(msgspec.Struct, frozen=True, tag=True):
    """From a peer: a pass is done, in so many seconds of its own; ``loss``: what the last stage's forward gives. What
    it made comes along."""

    number: int
    seconds: float
    loss: float = 0.0


class Summed(msgspec.Struct, frozen=True, tag=True):
    """From a peer: it has the sum, whose squares add up to ``square``; ``cause``: why it has not."""

    number: int
    square: float
    seconds: float = 0.0
    cause: str = ""


class Updated(msgspec.Struct, frozen=True, tag=True):
    """From a peer: it has applied the sum, and never held more than so many bytes."""

    seconds: float
    peak_bytes: int


class State(msgspec.Struct, frozen=True, tag=True):
    """From a peer: the state of its stage, which comes along."""

    taker: int


class PeerFailed(msgspec.Struct, frozen=True, tag=True):
    """From a peer: why it ends."""

    report: Report


Order = HoldStage | BeginStep | DoPass | SumOver | Update | GiveState | LeaveSwarm
Word = StageHeld | PassMade | Summed | Updated | State | PeerFailed


def send(way: Connection, word: msgspec.Struct, body: bytes = b"") -> None:
    """Send a word and what comes along."""
    head = msgspec.json.encode(word)
    way.send_bytes(len(head).to_bytes(4, "little") + head + body)


def receive(way: Connection, kind: type[T]) -> tuple[T, bytes]:
    """The next word, and what comes along."""
    whole = way.recv_bytes()
    end = 4 + int.from_bytes(whole[:4], "little")
    return msgspec.json.decode(whole[4:end], type=kind), whole[end:]


def as_bytes(values: torch.Tensor) -> bytes:
    """The bytes of a tensor's values in order."""
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def of_bytes(body: bytes) -> torch.Tensor:
    """Bytes as a tensor of its own."""
    return torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
