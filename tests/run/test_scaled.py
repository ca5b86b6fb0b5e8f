"""Local steps in shared scales: as by hand in float64, with their bytes, memory and checkpoints."""

from collections import Counter

import msgspec
import torch

import meshwright as mw
from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.run.mesh import alone
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from tests.run import local, rounds, small
from tests.run.processes import launch
from tests.run.small import differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32", optimizer="sgd")
SETTINGS = msgspec.structs.replace(local.SETTINGS, weight_decay=0.1)
#: Of so large a least scale some are smaller, and some larger.
WORDS = "savic:h=2,beta=0.9,least=0.01"


def by_hand(rank, model, last):
    """Two replicas in turn (Chezhegov et al. 2406.00846, with squares of gradients): D^2 <- b D^2 + (1 - b) g^2 at the
    end of a round, where b is 0 first, then 0.9 (1 - 0.9) / (1 - 0.81), and steps along g / max(least, D)."""
    share = msgspec.structs.replace(TRAIN, global_batch=2)
    trainers = [Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=SETTINGS) for _ in range(2)]
    squares, below = [torch.zeros_like(h.master) for h in trainers[0].optimizer.held], []
    for step in range(last):
        rate = SETTINGS.lr_at(step)
        for index, trainer in enumerate(trainers):
            trainer.publish()
            trainer._gradients(trainer.passes(small.batch(TRAIN, model.vocab, step, 2, index)))
            for h, square in zip(trainer.optimizer.held, squares):
                scale = square.sqrt().clamp(min=0.01) if step >= 2 else torch.ones_like(square)
                below.append((square.sqrt() < 0.01).double().mean() if step >= 2 else None)
                h.master.sub_(rate * (h.gradient / scale + 0.1 * h.decays * h.master))
        if step % 2 == 1:
            b = {1: 0.0, 3: 0.9 * (1 - 0.9) / (1 - 0.81)}[step]
            for number, square in enumerate(squares):
                same = [trainer.optimizer.held[number] for trainer in trainers]
                square.copy_(b * square + (1 - b) * torch.stack([h.gradient**2 for h in same]).mean(0))
                mean = torch.stack([h.master for h in same]).mean(0)
                for h in same:
                    h.master.copy_(mean)
    assert any(0 < one < 1 for one in below if one is not None)
    return local.state(trainers[0]), squares


def test_steps_in_shared_scales_are_those_by_hand_in_the_bytes_that_are_predicted():
    model, text = llama(layers=1, vocab=64), f"dp2 mb1 sync={WORDS}"
    ((expected, squares),) = launch(1, by_hand, model, 5)
    got = launch(2, local.trained, model, text, TRAIN, 5, SETTINGS)
    for _, _, held, sent, exchanged in got:
        scales = [values for key, *_, values in held if key.partition("@")[0] == "scale"]
        assert all(torch.allclose(a, b, rtol=1e-9, atol=0) for a, b in zip(scales, squares, strict=True))
        run = simulate(parse(text), model, load("2xh100"), TRAIN, standard())
        moves = [m for k in run.lowered.graph.cost_key for m in run.lowered.programs[k].moves if m.num_bytes != 4]
        told = Counter((m.op, 2 * m.num_bytes) for m in moves)  # numbers of 8 bytes in place of 4, in two rounds
        assert Counter(sent) == Counter({one: 2 * times for one, times in told.items()}) and not exchanged
    apart = differences(local.whole([got[0][2]], "param"), local.whole([expected], "param"))
    assert max(apart.values()) < 1e-12


def test_training_goes_on_from_within_a_round_in_the_scales_of_the_one_before(tmp_path):
    for on, again in launch(2, rounds.resumed, llama(layers=1), f"dp2 mb1 sync={WORDS}", TRAIN, tmp_path, 3):
        assert on[0] == again[0]
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(on[1], again[1], strict=True))


def test_scales_are_a_value_for_each_parameter_in_memory_and_travel_with_them():
    asked = (
        mw.load_model("llama3.2-1b"),
        mw.load_cluster("4x1xh100,10gbe"),
        mw.parse_train("batch=4,seq=4096,optimizer=sgd"),
    )
    plain, scaled = (
        mw.predict(*asked, mw.parse_plan(f"mb1 full sync={w}:h=8"), detail=False) for w in ("local", "savic")
    )
    more = scaled.metrics.peak_memory_bytes.value - plain.metrics.peak_memory_bytes.value
    assert abs(more / (4 * asked[0].num_params) - 1) < 0.05  # and what an allocator takes
    assert scaled.round.part_bytes == 2 * plain.round.part_bytes
    assert read("savic:h=8").text == "savic:h=8"
