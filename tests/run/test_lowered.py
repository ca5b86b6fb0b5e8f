"""Operators in fewer bits than the rest: what they compute, what they cost, how they are measured and chosen."""

import json
import random

import msgspec
import pytest
import torch

from meshwright.answer.predict import predict
from meshwright.answer.rank_memory import rank_memory
from meshwright.assign.raising import raised
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.layers.pieces import Piece
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.plan.lowered import operators, read, written
from meshwright.plan.slices import Portions
from meshwright.run.linear import matmul
from meshwright.run.mesh import alone, build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.variances import measured
from meshwright.simulate.lowering import AS_SHORT, lowered_by
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import small
from tests.run.processes import launch_kept as launch

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
HALF = Train(global_batch=2, seq_len=16, dtype="fp32")
FEW = "bf16:up@0-1+qkv@3"
EXACT = Settings(precision="float64", lr=1e-3)


@pytest.fixture(autouse=True)
def one_thread():
    """Products of 16 bits are small here, and threads that wait for one another make them slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_lowered_product_is_that_of_its_rounded_operands():
    x, w, g = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 8), (6, 8), (5, 6)))
    matmul(x, w, "bf16").backward(g.detach())
    a, b, c = (one.detach().bfloat16() for one in (x, w, g))
    assert torch.equal(matmul(x, w, "bf16"), (a @ b.T).double())
    assert torch.equal(x.grad, (c @ b).double()) and torch.equal(w.grad, (c.T @ a).double())


def gradients(trainer, batch):
    """The gradient of a batch by parameter, whole on this rank."""
    trainer._gradients(trainer.passes(batch))
    return {h.parameter.name: h.gradient.clone() for h in trainer.optimizer.held}


def replica(rank):
    portions = Portions(lowered=("none", FEW))
    trainer = Trainer(
        small.llama(), parse("dp2 mb2"), TRAIN, build(parse("dp2 mb2")), settings=EXACT, portions=portions
    )
    return gradients(trainer, small.batch(TRAIN, 67, 0, 2, rank))


def of_one(words, index):
    plan = parse(f"dp1 mb2 {words}")
    trainer = Trainer(small.llama(), plan, HALF, alone(), settings=EXACT)
    found = gradients(trainer, small.batch(TRAIN, 67, 0, 2, index))
    return found, trainer


def test_replicas_sum_gradients_of_which_one_has_operators_in_fewer_bits():
    got = launch(2, replica)
    (wide, _), (low, _), (other, _) = of_one("", 0), of_one(f"lowered={FEW}", 1), of_one("", 1)
    # each of one process scales by its own half of the batch
    for name, value in got[0].items():
        assert torch.allclose(value, (wide[name] + low[name]) / 2, rtol=1e-12, atol=1e-14)
    assert any(not torch.equal(low[name], other[name]) for name in low)


def test_the_variance_of_an_operator_is_what_the_gradient_moves_by_when_it_alone_is_lowered():
    batch = small.batch(TRAIN, 67, 0, 2, 0)
    wide, trainer = of_one("lowered=bf16:up@0", 0)
    found = measured(trainer, batch)
    plain, _ = of_one("", 0)
    whole = sum(v.square().sum() for v in plain.values())
    for word, layer in (("up", 0), ("down", 3)):
        low, _ = of_one(f"lowered=bf16:{word}@{layer}", 0)
        moved = sum((low[n] - plain[n]).square().sum() for n in plain)
        assert found[word][layer] == pytest.approx(float(moved / whole), rel=1e-9)
    assert {word: len(values) for word, values in found.items()} == dict.fromkeys(("qkv", "out", "up", "down"), 4)
    again = gradients(trainer, batch)  # what is lowered is as before
    assert all(torch.equal(again[n], wide[n]) for n in wide)


def test_a_lowered_product_costs_the_casts_of_its_operands_and_result():
    """Up of 2 x 16 tokens, 32 to 2 x 48 features: operands and result between 4 and 2 bytes, forward and backward."""
    plan = parse("dp1 mb2 lowered=fp16:up@1").on(1)
    stages = Stages(plan, small.llama(), TRAIN, Mesh(plan, load("1xt4")))
    (own,) = set(stages.each)
    first, second = (own.pieces(0, words=words) for words in ((), ("up",)))
    (cast,) = (p for p in second if p.name == "mlp up cast")
    numbers = 32 * 32 + 96 * 32 + 32 * 96
    assert cast.forward.num_bytes == cast.backward.num_bytes == 6 * numbers
    up = {p.name: p for p in second}["mlp up"]
    assert {up.forward.dtype, up.backward.dtype, up.weight.dtype} == {"fp16"} and up.forward.out_bytes == 2
    wide: Piece = {p.name: p for p in first}["mlp up"]
    # the input is kept in half the bytes, and the weight's copy beside it
    assert up.saved == wide.saved / 2 + 96 * 32 * 2
    units = own.compositions[0].units
    names = [[e.name for e in own.layer_pass(u, "F").entries] for u in units if u.is_block]
    assert ["mlp up cast" in some for some in names] == [False, True, False, False]


def test_runs_of_items_are_raised_as_one_after_the_other():
    draw = random.Random(5)
    for _ in range(200):
        costs = [draw.randint(0, 9) for _ in range(draw.randint(0, 12))]
        room, asked = draw.randint(0, 40), []

        def fits(some, costs=costs, room=room, asked=asked):
            asked.append(some)
            return sum(costs[i] for i in some) <= room

        taken, left = set(), room
        for i, cost in enumerate(costs):
            if cost <= left:
                taken.add(i)
                left -= cost
        assert raised(range(len(costs)), fits) == taken


def test_as_few_operators_are_lowered_as_the_step_needs(tmp_path):
    """No operator of the choice can be raised alone: the step would be longer than with all lowered."""
    model = small.llama(layers=3, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=1024, max_seq_len=512)
    cluster, train, costs = load("1xv100-32 + 1xt4"), Train(global_batch=6, seq_len=512, dtype="fp32"), standard()
    file = tmp_path / "found.json"
    values = {word: [layer + weight for layer in range(3)] for weight, word in enumerate(("qkv", "out", "up", "down"))}
    file.write_text(json.dumps({"model": model.name, "variances": values}))
    plan = parse(f"dp2 mb1 shares=4,2 lowered=none,fp16:{file}")
    chosen, how = lowered_by(plan, model, cluster, train, costs)
    text = chosen.kinds.lowered[1]
    some = {(word, layer) for layer in range(3) for word in read(text).of_layer(layer)}
    assert chosen.kinds.lowered[0] == "none" and 0 < len(some) < 12 and how.chosen == (len(some),)
    bound = min(how.wide_s, how.low_s) * (1 + AS_SHORT)
    assert how.step_s <= bound < how.wide_s

    def step_s(some):
        kinds = msgspec.structs.replace(chosen.kinds, lowered=("none", written("fp16", some)))
        return simulate(msgspec.structs.replace(chosen, kinds=kinds), model, cluster, train, costs).step_time_s

    assert all(step_s(some - {one}) > bound for one in some)
    assert how.variance == sum(values[w][i] for w, i in some) / sum(map(sum, values.values()))
    found = predict(model, cluster, train, plan, detail=False)
    assert found.plan == chosen and any("operators are in fewer bits" in line for line in found.cautions)
    with pytest.raises(MeshwrightError, match="has 12 operators, and small has 16"):
        lowered_by(plan, msgspec.structs.replace(small.llama(), name="small"), cluster, train, costs)


def test_operators_stay_lowered_where_a_device_has_no_room_for_what_they_save_wide(tmp_path):
    """The V100's passes are waited for, so that the step asks for none; memory that is too small for that for some."""
    model = small.gpt(layers=3, hidden=1024, heads=8, ffn=4096, vocab=1024, max_seq_len=512)
    cluster, costs = load("1xv100-32 + 1xt4"), standard()
    train = Train(global_batch=20, seq_len=512, dtype="fp32")
    file = tmp_path / "found.json"
    values = {word: [layer + weight for layer in range(3)] for weight, word in enumerate(("qkv", "out", "up", "down"))}
    file.write_text(json.dumps({"model": model.name, "variances": values}))
    plan = parse(f"dp2 mb8 mbs=8,4 shares=2,1 lowered=none,fp16:{file}")

    def needed(run) -> float:
        return rank_memory(run, costs)[1].needed_bytes

    def of(text: str):
        kinds = msgspec.structs.replace(plan.kinds, lowered=("none", text))
        return simulate(msgspec.structs.replace(plan, kinds=kinds), model, cluster, train, costs)

    wide, low = needed(of("none")), needed(of("fp16"))
    assert low < wide
    free, _ = lowered_by(plan, model, cluster, train, costs)
    room = (needed(of(free.kinds.lowered[1])) + low) / 2
    chosen, how = lowered_by(plan, model, cluster, train, costs, lambda run: room - needed(run))
    assert how.wide_over_bytes == pytest.approx(wide - room) and "more than a device has" in how.text
    assert needed(of(chosen.kinds.lowered[1])) <= room < needed(of(free.kinds.lowered[1]))
    nowhere, _ = lowered_by(plan, model, cluster, train, costs, lambda run: -1.0)
    assert nowhere == free  # what nothing fits is chosen by its step


def test_operators_are_words_that_round_trip():
    model = small.llama()
    some = {("qkv", 0), ("qkv", 1), ("qkv", 3), ("down", 2)}
    text = written("bf16", some)
    assert text == "bf16:qkv@0-1+qkv@3+down@2" and written("bf16", set()) == "none"
    assert {(w, i) for i in range(4) for w in read(text).of_layer(i)} == some
    assert {(w, i) for i in range(4) for w in read("bf16").of_layer(i)} == set(operators(model))
    plan = parse(f"dp2 lowered=none,{text}")
    assert parse(plan.text()) == plan


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tp2 lowered=bf16", "exchanges of tensor parallelism are of one type"),
        ("lowered=bf16:up@9", "has no layer 9, but 4"),
        ("bf16 lowered=bf16:up@1", "the plan computes in bf16"),
    ],
)
def test_lowered_operators_that_do_not_fit_are_refused(words, said):
    found = check(parse(words).on(2), small.llama(), load("2xh100"), TRAIN)
    assert any(d.code == "P062" and said in d.message and "kinds.lowered" in d.place for d in found)


def test_what_cannot_be_trained_in_fewer_bits_is_said():
    model = small.llama()
    assert unexecutable(parse("lowered=bf16:up@1").on(2), model, TRAIN) == []
    (half,) = unexecutable(parse("lowered=fp16").on(2), model, TRAIN)
    (left,) = unexecutable(parse("lowered=bf16:a.json").on(2), model, TRAIN)
    assert half.code == "P032" and "loss scaling" in half.message and "left to a prediction" in left.message
    with pytest.raises(MeshwrightError, match="names no operators"):
        parse("lowered=bf16:gate@1")
