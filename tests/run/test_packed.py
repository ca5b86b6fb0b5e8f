"""Documents packed into rows train as each document alone would: loss and every gradient, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from meshwright.assign.groups import GroupCosts
from meshwright.assign.packing import taken
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as parse_plan
from meshwright.run import data
from meshwright.run.data import tokenizer
from meshwright.run.groups import GroupRows
from meshwright.run.judge import Judge
from meshwright.run.mesh import alone as alone_mesh
from meshwright.run.mesh import build
from meshwright.run.parts import Pass
from meshwright.run.rotary import rotaries
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import parse
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, differences, gpt, llama, plain

#: Relative to each tensor's largest element: sums in another order.
TOLERANCE = 1e-9
VOCAB = 260
MODELS = {
    "llama": lambda: llama(vocab=VOCAB, layers=2),
    "gpt": lambda: gpt(vocab=VOCAB, layers=2),
    "experts": lambda: llama(vocab=VOCAB, layers=2, experts=4, top_k=2, moe_ffn=24, shared_ffn=16),
    "tied": lambda: llama(vocab=VOCAB, layers=2, tied_embeddings=True),
}
#: A token takes half as long again in a group of twice as many ranks.
GROUP_COSTS = GroupCosts(degrees=(1, 2, 4), start_s=(0.1,) * 3, token_s=(1.0, 1.5, 2.25), pair_s=(0.01,) * 3)
PACKS = ("packed", "padded", "balanced")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts of 1 to 40 characters, the longest of them longer than a sequence of 32."""
    base = tmp_path_factory.mktemp("text")
    draw = np.random.default_rng(3)
    texts = ["".join(map(chr, draw.integers(97, 123, n))) for n in draw.integers(1, 41, 80)]
    (base / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return data.build(str(base / "t.jsonl"), tokenizer.Bytes(), base / "cache")


def corpus(folder, pack: str, microbatch: int) -> data.Corpus:
    train = parse(f"batch=8,seq=32,dtype=fp32,pack={pack}")
    return data.load(Path(folder), train, vocab=VOCAB, seed=5, microbatch=microbatch)


def gradients(trainer: Trainer) -> list:
    return [(plain(h.parameter), h.start, h.stop, h.gradient.clone().double()) for h in trainer.optimizer.held]


def packed_step(rank: int, model, words: str, folder: str, pack: str):
    """One process's loss, norm, trained tokens and gradients of step 2."""
    plan = parse_plan(words)
    layout = plan.layout
    plan = plan.on(layout.tp * layout.pp * layout.cp * max(1, layout.dp))
    mesh, train = build(plan), parse(f"batch=8,seq=32,dtype=fp32,pack={pack}")
    said = {"settings": Settings(precision="float64", lr=1e-3), "group_costs": GROUP_COSTS}
    trainer = Trainer(model, plan, train, mesh, **said)
    seen: list = []
    trainer.before_update.append(lambda: seen.extend(gradients(trainer)))
    text = data.load(Path(folder), train, vocab=VOCAB, seed=5, microbatch=plan.pipeline.microbatch)
    whole = trainer.groups is not None
    result = trainer.step(text.batch(2) if whole else text.batch(2, mesh["dp"].index, plan.layout.dp))
    return (result.loss, result.grad_norm, result.num_tokens), seen


def alone(rank: int, model, folder: str, pack: str, microbatch: int):
    """The same documents one after the other, each by itself from position 0, in one process."""
    text = corpus(folder, pack, microbatch)
    batch = text.batch(2)
    documents = []
    for tokens, numbers, targets in zip(batch.tokens, batch.documents, batch.targets):
        for number in numbers.unique():
            mine = numbers == number
            if (targets[mine] >= 0).any():
                documents.append((tokens[:-1][mine], targets[mine]))
    train = parse(f"batch={len(documents)},seq=32,dtype=fp32")
    plan = parse_plan("mb1").on(1)
    trainer = Trainer(model, plan, train, build(plan), settings=Settings(precision="float64"))
    passes, count = [], sum(int((targets >= 0).sum()) for _, targets in documents)
    for tokens, targets in documents:
        places = torch.arange(len(tokens))
        passes.append(
            Pass(
                tokens=tokens[None],
                targets=targets[None],
                positions=places,
                documents=None,
                **rotaries(places, trainer.model, trainer.types.compute),
                rows=places[:, None],
                scale=1.0 / count,
            )
        )
    for exchange in trainer.exchanges:
        exchange.reset()
    loss = trainer.pipeline.run(passes)
    for exchange in trainer.exchanges:
        exchange.finish()
    return (float(loss), count), gradients(trainer)


def compare(model: str, plan: str, pack: str, folder) -> None:
    layout = parse_plan(plan)
    (loss, count), wanted = alone_of(model, folder, pack, layout.pipeline.microbatch)
    ranks = layout.layout.tp * layout.layout.pp * layout.layout.cp * max(1, layout.layout.dp)
    got = launch(ranks, packed_step, MODELS[model](), plan, str(folder), pack)
    assert got[0][0][0] == pytest.approx(loss, rel=TOLERANCE)
    assert got[0][0][2] == count
    apart = differences(assemble(got, 1), assemble([(None, wanted)], 1))
    assert max(apart.values()) <= TOLERANCE, (plan, pack, apart)


def alone_of(model: str, folder, pack: str, microbatch: int):
    (found,) = launch(1, alone, MODELS[model](), str(folder), pack, microbatch)
    return found


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_packed_rows_train_as_a_loop_over_documents(model, pack, folder):
    compare(model, "mb2", pack, folder)


@pytest.mark.parametrize(
    ("model", "plan", "pack"),
    [
        ("llama", "dp2 zero1 mb2", "balanced"),
        ("gpt", "tp2 mb2", "packed"),
        ("llama", "pp2 dp2 mb2", "reordered"),
        ("llama", "cp2 ring mb2", "packed"),
        ("gpt", "cp2 ulysses mb1", "padded"),
        ("experts", "ep2 dp2 zero1 mb2", "packed"),
        ("tied", "fsdp dp2 mb1 full", "packed"),
    ],
)
def test_packed_rows_train_alike_under_every_axis(model, plan, pack, folder):
    compare(model, plan, pack, folder)


@pytest.mark.parametrize(
    ("model", "plan", "pack", "sizes"),
    [
        ("llama", "cp4 dp1 fsdp mb1 ring groups=flexsp", "packed", {1, 2, 4}),
        ("gpt", "cp2 dp2 fsdp mb1 ulysses groups=bytescale", "balanced", {1, 2}),
        ("llama", "cp2 dp2 fsdp mb1 ring groups=zeppelin full", "packed", {1, 2, 4}),
        ("experts", "tp2 cp2 dp1 fsdp mb1 allgather groups=bytescale selective", "padded", {1, 2}),
        ("tied", "cp2 dp2 zero1 mb1 ring groups=flexsp", "packed", {1, 2}),
        ("llama", "cp4 dp1 zero1 mb1 ring groups=bytescale long=2 offload=activations:nvme", "packed", {2}),
        ("gpt", "pp2 cp2 dp1 fsdp mb1 ring groups=bytescale long=2 offload=activations:nvme", "padded", {1}),
        ("llama", "pp2 cp2 dp1 fsdp mb1 ring groups=bytescale", "padded", {2}),
        ("experts", "pp2 tp2 cp2 dp1 zero1 mb1 ring groups=flexsp", "packed", {1, 2}),
        ("gpt", "pp2 cp2 dp1 fsdp mb1 ulysses groups=flexsp gpipe full", "balanced", {1, 2}),
        ("tied", "pp2 cp2 dp2 zero1 mb1 allgather groups=zeppelin zb-h1", "packed", {1, 2, 4}),
    ],
)
def test_documents_train_alike_in_groups_that_are_formed_for_the_batch(model, plan, pack, sizes, folder):
    said = parse_plan(plan)
    found = GroupRows(said, MODELS[model](), parse(f"batch=8,seq=32,pack={pack}"), alone_mesh(), GROUP_COSTS)
    formed = found.formed(corpus(folder, pack, 1).batch(2), ranks=said.layout.dp * said.layout.cp)
    assert set(formed.degrees) == sizes and len(formed.rounds) > 1
    compare(model, plan, pack, folder)


def moved_in_groups(rank: int, words: str, folder: str, hidden_from: int):
    """Tokens of the rows of a step, and whether each was moved; and how many tensors went to drives in it."""
    plan, train = parse_plan(words).on(2), parse("batch=8,seq=32,dtype=fp32,pack=padded")
    costs = msgspec.structs.replace(GROUP_COSTS, hidden_from=hidden_from)
    said = {"settings": Settings(precision="float64"), "group_costs": costs}
    trainer = Trainer(MODELS["llama"](), plan, train, build(plan), **said)
    batch = data.load(Path(folder), train, vocab=VOCAB, seed=5, microbatch=1).batch(2)
    rows = [(p.tokens.shape[1], p.moves) for p in trainer.passes(batch)]
    sent, write = [], trainer.away.drives.write
    trainer.away.drives.write = lambda slot, buffer, **said: (sent.append(slot), write(slot, buffer, **said))[1]
    trainer.step(batch)
    return rows, len(sent)


def test_activations_go_to_drives_in_rows_of_long_documents_alone(folder):
    words = "cp2 dp1 zero1 mb1 ring groups=bytescale long=2 prefetch=1 offload=activations:nvme"
    for rows, sent in launch(2, moved_in_groups, words, str(folder), 24):
        assert {moves for _, moves in rows} == {True, False}
        assert all(moves == (tokens > 16) for tokens, moves in rows)  # what a rank holds in groups of cp
        assert sent > 0
    for rows, sent in launch(2, moved_in_groups, words, str(folder), 33):  # none is long enough to hide the way
        assert not any(moves for _, moves in rows) and max(tokens for tokens, _ in rows) <= 16
        assert sent == 0


def judged_in_groups(rank: int, words: str, folder: str):
    """The loss of held-out documents, and the mean of steps on them that change nothing."""
    plan, train = parse_plan(words).on(2), parse("batch=8,seq=32,dtype=fp32,pack=packed")
    said = {"settings": Settings(precision="float64", lr=0.0, weight_decay=0.0), "group_costs": GROUP_COSTS}
    trainer = Trainer(MODELS["llama"](), plan, train, build(plan), **said)
    text = data.load(Path(folder), train, vocab=VOCAB, seed=5, microbatch=1)
    judge = Judge(trainer, data.held_out(text, 0.4)[1])
    found = judge.loss()
    steps = [trainer.step(judge.held.batch(i)).loss for i in range(judge.batches)]
    return found, sum(steps) / len(steps), len(steps)


def test_groups_that_are_formed_for_the_batch_judge_what_they_train(folder):
    for found, steps, count in launch(2, judged_in_groups, "cp2 dp1 mb1 ring groups=flexsp", str(folder)):
        assert count > 1 and found == pytest.approx(steps, rel=1e-12)


@pytest.mark.parametrize("pack", [*PACKS, "reordered"])
def test_a_row_says_tokens_targets_positions_and_documents(pack, folder):
    text = corpus(folder, pack, 2)
    stream = text.tokens.tolist()
    seen = []
    for step in range(4):
        whole = text.batch(step)
        width = 64 if pack == "balanced" else 32
        assert whole.tokens.shape == (4 if pack == "balanced" else 8, width + 1)
        assert whole.num_targets == int((whole.targets >= 0).sum())
        halves = [text.batch(step, i, 2) for i in range(2)]
        back = np.argsort(np.concatenate([taken(len(whole.tokens), i, 2, pack, text.rows.at_once) for i in range(2)]))
        alone = np.argsort(taken(len(whole.tokens), 0, 1, pack, text.rows.at_once))
        for field in ("tokens", "targets", "positions", "documents"):
            assert torch.equal(torch.cat([getattr(h, field) for h in halves])[back], getattr(whole, field)[alone])
        for tokens, targets, positions, documents in zip(*whole[:1], whole.targets, whole.positions, whole.documents):
            for number in documents.unique():
                mine = documents == number
                if not (targets[mine] >= 0).any():
                    continue
                inside = tokens[:-1][mine].tolist()
                assert positions[mine].tolist() == list(range(len(inside)))
                last = int(targets[mine][-1])
                assert targets[mine][:-1].tolist() == inside[1:]
                assert (inside[-1] == 256) == (last == -1)  # nothing is learnt behind a document's end
                seen.append((inside, last))
    assert all(_within(inside + ([last] if last >= 0 else []), stream) for inside, last in seen[:20])


def _within(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole)))


def test_every_document_is_trained_once_an_epoch(folder):
    text = corpus(folder, "packed", 2)
    rows = data.sequences(np.arange(text.num_sequences), text.rows.num_groups, text.seed)
    assert sorted(rows.tolist()) == list(range(text.num_sequences))
    assert text.rows.laid.filled.sum() == len(text.tokens)


def test_a_text_too_short_for_a_packed_step_is_refused(folder):
    with pytest.raises(MeshwrightError, match="D005"):
        data.load(folder, parse("batch=512,seq=64,pack=padded"), vocab=VOCAB)
