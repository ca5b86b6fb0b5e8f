"""Selection biases follow the loads of the global batch: by hand on one process, and the same on several."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import meshwright.run.moe
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.model import from_config
from meshwright.spec.workload import Train
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, batch, differences, train_steps
from tests.run.small_families import CONFIGS

RATE = 2**-7  # of the size of what scores differ by, so that choices follow and do not turn round
TOLERANCE = 1e-9
CONFIG = CONFIGS["deepseek_v3"] | {"model_type": "deepseek_v3", "num_hidden_layers": 4}
MODEL = from_config(CONFIG, name="small")  # a dense layer and three mixtures of 8 experts
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32", bias_rate=RATE)


@cache
def one_process():
    return launch(1, train_steps, MODEL, "tp1 mb4", TRAIN, 2)


def _by_hand(rank: int):
    """The biases after each of two steps, and what tokens chose in each by mixture."""
    real, chosen = meshwright.run.moe.route, {}

    def watched(tokens, router, *rest):
        out = real(tokens, router, *rest)
        chosen.setdefault(router.info.name, []).append(out[2].tolist())
        return out

    plan = parse("tp1 mb4").on(1)
    trainer = Trainer(MODEL, plan, TRAIN, build(plan), settings=Settings(precision="float64"))
    biases = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshwright.run.moe, "route", watched)
        for step in range(2):
            trainer.step(batch(TRAIN, MODEL.vocab, step))
            biases.append([m.bias.tolist() for m in trainer.routers])
    return biases, list(chosen.values())


def test_experts_chosen_more_often_than_the_mean_are_lowered_by_the_rate_and_others_raised():
    biases, chosen = launch(1, _by_hand)[0]
    for mixture in range(3):
        expected = np.zeros(8)
        for step in range(2):
            loads = [sum(row.count(expert) for row in chosen[mixture][step]) for expert in range(8)]
            assert sum(loads) == 4 * 16 * 3
            expected += [RATE * ((load < 24) - (load > 24)) for load in loads]
            assert biases[step][mixture] == expected.tolist()
        assert np.any(biases[0][mixture])


@pytest.mark.parametrize(
    "words",
    ["tp2 dp2 ep4 etp1 zero2 mb1 full", "pp2 dualpipe mb1", "tp2 nosp duplicates=sent mb2"],
)
def test_biases_and_all_else_are_those_of_one_process(words):
    layout = parse(words).layout
    count = layout.tp * layout.pp * max(1, layout.dp)
    plan = parse(words).on(count)
    assert check(plan, MODEL, load(f"{count}xh100"), TRAIN) == []
    assert unexecutable(plan, MODEL, TRAIN) == []
    got, expected = launch(count, train_steps, MODEL, words, TRAIN, 2), one_process()
    for ours, theirs in zip(got[0][0], expected[0][0]):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    whole = assemble(expected, 2)  # the pieces that checkpoints hold
    assert max(differences(assemble(got, 2), whole).values()) < TOLERANCE
    assert [bool(v.any()) for k, v in whole.items() if "correction_bias" in k] == [True] * 3
