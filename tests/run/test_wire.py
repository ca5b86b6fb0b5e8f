"""Rings send the bytes that they are predicted to: a rank's exchanges are counted beside the pieces' messages."""

import pytest
import torch

import meshwright as mw
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.plan import parse
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.record import Recorder, install
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run.processes import launch_kept as launch
from tests.run.small import llama

MODEL = llama(layers=2)
TRAIN = Train(global_batch=2, seq_len=32, dtype="fp32")


def sent(rank: int, words: str) -> dict:
    """The bytes of a rank's messages to single ranks in one step."""
    plan = parse(words)
    trainer = Trainer(MODEL, plan, TRAIN, build(plan), settings=Settings(precision="fp32"))
    recorder = Recorder(rank=rank)
    install(recorder)
    tokens = torch.randint(0, 60, (2, 33), generator=torch.Generator().manual_seed(1))
    trainer.step(Batch(tokens, None))
    return {kind: size for (kind, _), size in recorder.exchanged.items()}


def predicted(words: str) -> float:
    """The bytes of the same messages in the pieces of all layers, both ways, for two microbatches."""
    plan, model = parse(words), MODEL
    stages = Stages(plan, model, TRAIN, Mesh(plan, mw.load_cluster("4xh100")))
    total = 0.0
    for layer in model.pattern:
        for piece in stages.pieces(layer):
            for moves in (piece.exchange, piece.exchange_back):
                if moves is not None:
                    hops = [moves.first, *[moves.each] * (piece.ring - 2), *([moves.last] if moves.last else [])]
                    total += sum(one.num_bytes + one.back_bytes for one in hops)
    return 2 * total


@pytest.mark.parametrize("algorithm", ["ring", "burstattention", "tokenring", "ring-self-attention"])
def test_a_ring_sends_the_bytes_that_its_pieces_say(algorithm):
    words = f"cp4 dp1 mb1 {algorithm}"
    found = launch(4, sent, words)
    assert {one["send"] for one in found} == {predicted(words)}
