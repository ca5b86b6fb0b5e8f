"""Multi-headed distillation between real processes: every replica by hand in float64, bytes, checkpoints."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.checkpoint import Meta, identity, save
from meshwright.run.data.corpus import Corpus
from meshwright.run.mesh import alone
from meshwright.run.opened import taught_on
from meshwright.run.published import published_tensors
from meshwright.run.trainer import Trainer
from meshwright.run.weights import export_weights
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.sync.groups import graph
from meshwright.sync.policy import read
from tests.run import local, rounds, taught
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

MODEL = llama(layers=1, hidden=16, heads=2, kv_heads=1, vocab=31, ffn=24)
PAIR, RING = (((1,), (0,)),), (((1, 3), (0, 2), (1, 3), (0, 2)),)
TURNS = ((2,), (0,), (1,)), ((1,), (2,), (0,))  # one place before, then two


@pytest.mark.parametrize(
    ["turns", "words"],
    [
        (PAIR, {"heads": 1, "aux": 1.0, "embed": 0.0, "top": 0}),
        (PAIR, {"heads": 3, "aux": 0.5, "embed": 0.7, "top": 4}),
        (RING, {"heads": 2, "aux": 3.0, "embed": 1.0, "top": 0}),
        (TURNS, {"heads": 2, "aux": 1.0, "embed": 1.0, "top": 0, "graph": "exponential"}),
    ],
)
def test_every_replica_learns_what_neighbours_predict_as_by_hand(turns, words):
    many, last = len(turns[0]), 3
    train = Train(global_batch=2 * many, seq_len=8, dtype="fp32")
    said = ",".join(f"{name}={value}" for name, value in words.items())
    got = launch(many, taught.trained, MODEL, f"dp{many} mb1 sync=mhd:public=0.2,{said}", train, last)
    (wanted,) = launch(1, taught.by_hand, MODEL, train, last, turns, words)
    for (losses, state, _), (seen, theirs, heads) in zip(got, wanted, strict=True):
        for ours, one in zip(losses, seen, strict=True):
            assert ours == pytest.approx(one, rel=1e-10)
        mine = local.whole([state], "param")
        for k, head in enumerate(heads):
            assert torch.allclose(mine.pop(f"taught_heads.{k}.lm_head.weight"), head, rtol=1e-9, atol=1e-12)
        assert max(differences(mine, local.whole([theirs], "param")).values()) <= 1e-9
    ends = [local.whole([state], "param")["model.embed_tokens.weight"] for _, state, _ in got]
    assert not torch.allclose(ends[0], ends[1])


@pytest.mark.parametrize(["met", "top", "embed"], [("ring", 0, 1), ("static-exponential", 3, 0), ("exponential", 0, 0)])
def test_bytes_that_a_rank_sends_are_the_predicted_ones(met, top, embed):
    text, steps = f"dp4 mb1 sync=mhd:public=0.2,graph={met},top={top},embed={embed}", 2
    train = Train(global_batch=8, seq_len=8, dtype="fp32")
    where = parse(text)
    run = simulate(where, MODEL, load("4xh100"), train, standard())
    move, *others = [move for program in run.lowered.programs for move in program.moves]
    assert all((one.num_bytes, one.group.fan) == (move.num_bytes, move.group.fan) for one in others)
    each = 8 * 2 * (3 * (4 + 4) if top else 31 * 4) + 8 * 16 * 4 * embed
    heard = len(graph(met, 4).turns[0][0])
    assert move.num_bytes == each and move.group.fan == heard
    for _, _, sent in launch(4, taught.trained, MODEL, text, train, steps, local.FP32):
        assert sent == [("neighbours", each * heard)] * steps


def test_training_goes_on_from_a_checkpoint_with_the_heads_of_every_replica(tmp_path):
    train = Train(global_batch=4, seq_len=8, dtype="fp32")
    text = "dp2 mb1 sync=mhd:public=0.2,embed=0.5"
    for on, again in launch(2, rounds.resumed, MODEL, text, train, tmp_path, 2):
        assert on[0] == again[0]
        assert [one[:4] for one in on[1]] == [one[:4] for one in again[1]]
        assert all(torch.equal(a[4], b[4]) for a, b in zip(on[1], again[1]))
        assert sum("taught_heads" in one[1][0] for one in on[1]) == 2 * 3  # each with its two moments


def test_published_weights_have_one_head_the_main_or_the_one_that_is_asked_for(tmp_path):
    train = Train(global_batch=1, seq_len=8, dtype="fp32")
    trainer = Trainer(MODEL, parse("mb1 sync=mhd:public=0.2").on(1), train, alone(), settings=local.SETTINGS)
    held = {p.parameter.name: p.values for p in trainer.pieces() if p.key == "param"}
    meta = Meta(step=0, seed=0, model=MODEL.name, model_hash=identity(MODEL), plan="", world=1)
    save(tmp_path, trainer.pieces(), meta, trainer.mesh["world"])
    for head, name in ((0, "lm_head.weight"), (2, "taught_heads.1.lm_head.weight")):
        made = safe_open(export_weights(tmp_path, tmp_path / str(head), head=head) / "model.safetensors", "pt")
        assert set(made.keys()) == set(published_tensors(MODEL))
        assert torch.equal(made.get_tensor("lm_head.weight").view(-1), held[name])
    with pytest.raises(MeshwrightError, match="which has 2 heads besides its own"):
        export_weights(tmp_path, tmp_path / "more", head=3)


def test_the_last_head_stands_where_the_main_one_does_while_it_is_judged():
    train = Train(global_batch=1, seq_len=8, dtype="fp32")
    trainer = Trainer(MODEL, parse("mb1 sync=mhd:public=0.2").on(1), train, alone(), settings=local.SETTINGS)
    head, x = trainer.stages[0].head, torch.randn(8, 1, MODEL.hidden, dtype=torch.float64)
    with trainer.lessons.judged():
        assert torch.allclose(head.logits(x), head.norm(x) @ head.taught[1].T)
    assert torch.allclose(head.logits(x), head.norm(x) @ head.weight.T)


def test_the_last_share_of_a_text_is_public_and_replicas_share_out_the_rest():
    tokens = np.arange(8 * 16 + 1)
    said = {"largest": 200, "seq_len": 16, "global_batch": 2, "boundaries": False}
    corpus = Corpus(tokens=tokens, starts=np.zeros(1, np.int64), **said)
    trainer = SimpleNamespace(
        rounds=SimpleNamespace(policy=read("mhd:public=0.3")), lessons=SimpleNamespace(rows=1, text=None)
    )
    own = taught_on(trainer, corpus)
    seen = [trainer.lessons.text(step).tokens for step in range(2)]
    assert len(own.tokens) == 129 - 38 and sorted(int(one[0, 0]) for one in seen) == [91, 107]  # a row each, in turn
    trainer.rounds.policy = read("mhd:public=0.01")
    with pytest.raises(MeshwrightError, match="no public part"):
        taught_on(trainer, corpus)
