"""Blocks of parts with residual streams of their own (Kraken): real processes, what is added up, and what waits."""

from __future__ import annotations

import msgspec
import pytest
import torch

from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run import mesh, streams
from meshwright.run.data import Batch
from meshwright.run.equality import EqualityCase, apart
from meshwright.run.published import published_tensors
from meshwright.run.serve.refused import refused
from meshwright.run.settings import Settings
from meshwright.run.streams import StreamsBlock
from meshwright.run.trainer import Trainer
from meshwright.spec.engine_words import EngineWords
from meshwright.spec.model import config, from_config
from meshwright.spec.workload import Train

SMALL = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 67}
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")


def parted(ways: int = 2, **more):
    return from_config(config("gpt2") | SMALL | {"parallel_ways": ways} | more, name=f"{ways} parts")


def trainer(model):
    settings = Settings(precision="float64", lr=0.0)
    return Trainer(model, parse("tp1 mb4").on(1), TRAIN, mesh.alone(), settings=settings)


def batch():
    tokens = torch.randint(0, 67, (4, 17), generator=torch.Generator().manual_seed(3))
    return Batch(tokens, torch.zeros(4, 16, dtype=torch.int32))


@pytest.mark.parametrize(
    ("model", "ranks", "plans"),
    [
        (parted(), 2, ("tp2 mb2", "tp2 mb1 full", "tp2 nosp mb4 selective")),
        (parted(), 4, ("tp2 dp2 mb1", "tp2 fsdp dp2 mb2")),
        (parted(4, n_layer=2), 4, ("tp4 mb2 zero1",)),
    ],
)
def test_parts_on_ranks_of_their_own_train_as_all_do_on_one(model, ranks, plans):
    cases = [EqualityCase(model=model, plan=parse(words).on(ranks), train=TRAIN) for words in plans]
    assert max(found.most for found in apart(cases)) < 1e-9


def test_a_model_holds_the_parameters_that_its_parts_count():
    model = parted()
    found = published_tensors(model)
    assert sum(torch.Size(shape).numel() for shape in found.values()) == model.num_params
    assert "transformer.h.1.streams.1.attn.c_attn.weight" in found


def test_each_stream_takes_what_the_others_mlps_found_in_front_of_its_own():
    model = parted()
    one = trainer(model)
    (stage,) = one.stages.values()
    seen = []
    for layer in stage.layers:
        layer.register_forward_hook(lambda module, given, out: seen.append((given[0], given[1], out)))
    one.step(batch())
    (x, p, state), (again, _, after), (_, _, end) = seen
    part = stage.layers[0].parts
    mixed = [x + one.attention(one.attention_norm(x), p) for one in part]
    found = [one.mlp(one.mlp_norm(m)) for one, m in zip(part, mixed)]
    assert torch.allclose(state[1], torch.stack(found)) and torch.allclose(state[0], torch.stack(mixed) + state[1])
    part = stage.layers[1].parts
    own = [again[0][i] + one.attention(one.attention_norm(again[0][i]), p) for i, one in enumerate(part)]
    mixed = [own[0] + found[1], own[1] + found[0]]
    found = [one.mlp(one.mlp_norm(m)) for one, m in zip(part, mixed)]
    assert torch.allclose(after[0], torch.stack([m + f for m, f in zip(mixed, found)]))
    assert end.shape == x.shape  # all streams as one, for the head


def test_the_sum_is_under_way_while_attention_is_computed_forward_and_backward(monkeypatch):
    said = []

    class Told(streams.SumUnderWay):
        def __init__(self, x, group):
            said.append("begins")
            super().__init__(x, group)

        def wait(self):
            said.append("is there")
            return super().wait()

    monkeypatch.setattr(streams, "SumUnderWay", Told)
    one = trainer(parted(n_layer=2))
    (stage,) = one.stages.values()
    for number, part in enumerate(stage.layers[1].parts):

        def computed(module, given, out, number=number):
            said.append(f"attention {number}")
            out.register_hook(lambda grad: said.append(f"attention {number} back"))
            given[0].register_hook(lambda grad: said.append(f"attention {number} done"))

        part.attention.register_forward_hook(computed)
    one.step(batch())
    assert said[:4] == ["begins", "attention 0", "attention 1", "is there"]
    backward = said[4:]
    assert backward[0] == "begins" and backward[-1] == "is there" and len(backward) == 6


@pytest.mark.parametrize(
    ("words", "said"), [("tp2 pp2", "which all leave a stage"), ("tp2 full recompute_portions=2", "in portions")]
)
def test_pipelines_and_portions_are_refused(words, said):
    found = unexecutable(parse(words).on(parse(words).layout.pp * 2), parted(), TRAIN)
    assert [d.code for d in found] == ["P033"] and said in found[0].message


def test_such_models_are_not_served():
    found = refused(parse("tp2").on(2), parted(), EngineWords())
    assert any("its blocks have several streams" in one.message for one in found)


def test_text_that_is_moved_is_whole_on_every_rank():
    model, train = parted(), msgspec.structs.replace(TRAIN, adversarial=0.05)
    assert unexecutable(parse("tp2").on(2), model, train) == []
    (found,) = apart([EqualityCase(model=model, plan=parse("tp2 mb4").on(2), train=train)])
    assert max(found.loss, found.parameter) < 1e-9


def test_its_block_is_the_executors():
    assert all(isinstance(layer, StreamsBlock) for layer in next(iter(trainer(parted()).stages.values())).layers)
