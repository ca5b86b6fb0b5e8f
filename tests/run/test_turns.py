"""Pieces of sums have turns in the order in which gradients became whole, and begin while no tokens travel."""

import pytest
import torch

from meshwright.run.turns import InPieces, PieceTurns, in_pieces
from tests.run.test_expert_words import TOLERANCE, far_from_one_process


class Done:
    """An exchange that is over at once."""

    def wait(self) -> None: ...


def sums(turns: PieceTurns, name: str, count: int, begun: list[str]) -> InPieces:
    starts = (lambda i=i: begun.append(f"{name}{i}") or Done() for i in range(count))
    return turns.add(InPieces(turns, starts, count, kind="all_reduce"))


def test_a_piece_begins_where_tokens_arrive_or_a_gradient_comes_and_never_while_tokens_travel():
    turns, begun = PieceTurns(8), []
    first = sums(turns, "a", 3, begun)
    assert begun == ["a0"]
    turns.tokens_leave()
    turns.go()
    second = sums(turns, "b", 2, begun)
    turns.tokens_leave()
    turns.tokens_arrive()  # others still travel
    assert begun == ["a0"]
    turns.tokens_arrive()
    turns.go()
    assert begun == ["a0", "a1", "a2"] and first.begun
    second.wait()  # what has had no turn begins
    assert begun == ["a0", "a1", "a2", "b0", "b1"]
    first.wait()
    assert begun == ["a0", "a1", "a2", "b0", "b1"]


@pytest.mark.parametrize(
    ("shape", "most", "sizes"), [((10,), 16, [3, 3, 4]), ((2, 5), 24, [2, 3]), ((2, 5), 15, [1, 2, 2]), ((3,), 99, [3])]
)
def test_pieces_are_as_equal_as_they_can_be_and_of_so_many_bytes_at_most(shape, most, sizes):
    values = torch.arange(10.0)[: torch.Size(shape).numel()].view(shape)  # four bytes each
    some = in_pieces(values, most)
    assert torch.equal(torch.cat([values[..., one] for one in some], dim=-1), values)
    assert [one.stop - one.start for one in some] == sizes


@pytest.mark.parametrize("plan", ["dp2 ep2", "dp4 ep2 zero2 portions=2 mb2"])
def test_sums_in_pieces_are_those_of_one_process(plan, monkeypatch):
    monkeypatch.setattr("meshwright.run.turns.MB", 700)  # several pieces a layer
    assert far_from_one_process(f"{plan} yield_mb=1") < TOLERANCE
