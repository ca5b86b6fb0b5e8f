"""Sums of codes that go around a ring, against a loop in numpy, and the bytes that they are predicted to be."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import check, parse
from meshwright.run.codecs import on_tensors
from meshwright.run.mesh import build
from meshwright.run.ringed import ring_sum
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.sync.codecs import codec
from meshwright.sync.fragments import HOPS
from meshwright.sync.policy import read
from tests.run import codes, local
from tests.run.processes import launch_kept as launch
from tests.run.small import llama

TRAIN = Train(global_batch=3, seq_len=16, dtype="fp32")
#: A length that three ranks do not divide.
LENGTH, NAMES = 1000, ("int8", "sigma8", "fp4")


def put(rank: int) -> np.ndarray:
    """The values that a rank brings."""
    return np.random.default_rng(rank).standard_normal(LENGTH).astype(np.float32) * (rank + 1)


def ringed(rank: int, model, text: str):
    """Sums in several codes, and the bytes that a process sends to others in two steps of training."""
    group = build(parse("dp3"))["data"]
    sums = [ring_sum(torch.from_numpy(put(rank)), on_tensors(name), group).numpy() for name in NAMES]
    bytes_sent, real = [], dist.batch_isend_irecv

    def watched(ops):
        bytes_sent.extend(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real(ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", watched)
        codes.trained(rank, model, text, TRAIN, 2, local.FP32)
    return sums, sum(bytes_sent)


def by_parts(name: str, every: list[np.ndarray]) -> np.ndarray:
    """The sum of each part as it goes from rank to rank."""
    found, n = codec(name), len(every)
    width = -(-LENGTH // n)
    padded = [np.pad(x, (0, width * n - LENGTH)).reshape(n, width) for x in every]
    out = []
    for part in range(n):
        wire = found.encoded(padded[(part + 1) % n][part])
        for hop in range(2, n + 1):
            came = found.decoded(wire, width, np.dtype(np.float32))
            wire = found.encoded(padded[(part + hop) % n][part] + came)
        out.append(found.decoded(wire, width, np.dtype(np.float32)))
    return np.concatenate(out)[:LENGTH]


def test_a_ring_of_codes_is_the_loop_over_parts_and_sends_what_is_predicted():
    text, made = "dp3 mb1 sync=intellect:h=2", llama(vocab=64)
    got = launch(3, ringed, made, text)
    for place, name in enumerate(NAMES):
        expected = by_parts(name, [put(rank) for rank in range(3)])
        assert all(np.array_equal(sums[place], got[0][0][place]) for sums, _ in got)
        # to the bit, but for the order in which a mean and a deviation are added up
        assert np.abs(got[0][0][place] - expected).max() <= (1e-5 if name == "sigma8" else 0)
        whole = sum(put(rank) for rank in range(3))
        assert np.linalg.norm(expected - whole) < {"fp4": 0.5}.get(name, 0.1) * np.linalg.norm(whole)
    run = simulate(parse(text), made, load("3x1xh100"), TRAIN, standard())
    moves = [move for key in run.lowered.graph.cost_key for move in run.lowered.programs[key].moves if move.op == HOPS]
    assert {sent for _, sent in got} == {sum(2 * move.num_bytes for move in moves)}  # n - 1 messages each


def test_a_ring_sends_two_codes_at_most_and_a_gather_as_many_as_there_are_others():
    """Of sixteen replicas: 2 * 15 / 16 codes around the ring, and 15 where all gather all."""
    model, where, train = llama(vocab=64), load("16x1xh100,nics=1,10gbe"), Train(global_batch=16, seq_len=16)
    ring, gather = (
        simulate(parse(f"dp16 mb1 sync=intellect:h=4,ring={ring}"), model, where, train, standard()).round
        for ring in ("yes", "no")
    )
    assert gather.parts[0].num_bytes / ring.parts[0].num_bytes == pytest.approx(8, rel=0.02)
    assert read("intellect").codec == "sigma8:ring=yes" and read("intellect").text == "intellect"
    assert read("intellect:codec=topk").codec == "topk" and read("diloco:h=4,codec=int8").codec == "int8"


@pytest.mark.parametrize(
    "words", ["step:codec=int8,ring=yes,combine=median", "gossip:codec=int8,ring=yes", "fedavg:h=2,codec=int8,ring=yes"]
)
def test_sums_that_are_no_sums_of_all_go_around_no_ring(words):
    plan = parse(f"dp4 mb1 sync={words}").on(4)
    assert "Y003" in {d.code for d in check(plan, llama(vocab=64), load("4xh100"), Train(global_batch=4, seq_len=16))}


@pytest.mark.parametrize("name", ["topk", "int4", "bf16", "powersgd", "bit"])
def test_codes_that_keep_what_they_lose_or_add_up_have_no_ring(name):
    with pytest.raises(MeshwrightError, match="ring"):
        read(f"step:codec={name},ring=yes")
