"""Adapters over a frozen base: the same training under every plan, the formats of a quantised base against their own
definitions, and memory as it is predicted."""

from statistics import NormalDist

import pytest
import torch

from meshwright.answer.predict import predict
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run import equality
from meshwright.run.lora.base import PackedMatrix
from meshwright.run.lora.formats import FORMATS, NF4, packed, quantise, tree
from meshwright.run.mesh import alone
from meshwright.run.pieces import Part
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import from_config
from meshwright.spec.workload import parse as work
from tests.run import small
from tests.run.small_families import CONFIGS

DIMS = {
    "layers": 2,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 67,
    "ffn": 256,
    "gated": True,
    "max_seq_len": 64,
}
MODEL = transformer(**DIMS)
#: One key-value head that two ranks share; experts that stay as they are.
SHARED = transformer(**(DIMS | {"kv_heads": 1, "name": "shared"}))
EXPERTS = transformer(**(DIMS | {"experts": 4, "top_k": 2, "moe_ffn": 24, "name": "experts"}))
#: Attention and MLP that enter and leave together.
BESIDE = transformer(**(DIMS | {"parallel": True, "bias": True, "name": "beside"}))
TUNED = "batch=4,seq=16,dtype=fp32,rank=4,targets=all,alpha=8"
#: Queries, keys and values published as one transposed matrix (GPT-2); as one, and gate and up too (Phi-3); latents.
GPT = small.gpt(name="gpt")
PHI3 = from_config(CONFIGS["phi3"] | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, name="phi3")
LATENT, LATENT_2 = (
    from_config(CONFIGS[f"deepseek_{v}"] | {"model_type": f"deepseek_{v}", "architectures": [a]}, name=v)
    for v, a in (("v3", "DeepseekV3ForCausalLM"), ("v2", "DeepseekV2ForCausalLM"))
)
QUANTISED = TUNED.replace("fp32", "bf16")
CASES = [
    *((MODEL, words, TUNED) for words in ("dp2 mb2 zero1", "dp2 mb1 zero2", "pp2 mb1 zb-h1", "cp2 mb2")),
    (SHARED, "tp2 sp mb2 full", TUNED),
    (BESIDE, "tp2 mb2", TUNED),
    (GPT, "tp2 sp mb2", TUNED.replace("all", "q+k+v+up+down")),
    (PHI3, "tp2 mb2", TUNED),
    (PHI3, "fsdp mb1", TUNED),
    (LATENT, "tp2 mb2", TUNED.replace("all", "q+k+o+q_up+kv_up")),
    (LATENT_2, "tp2 sp mb2", TUNED.replace("all", "q+kv_up")),
    (EXPERTS, "dp2 ep2 mb2", TUNED.replace("all", "q+v+o+experts_up+experts_down")),
    (EXPERTS, "pp2 mb1", TUNED.replace("all", "experts_down")),
    *((MODEL, words, f"{TUNED},lora_dropout=0.2") for words in ("tp2 nosp mb2", "fsdp mb1")),
    (MODEL, "tp2 mb2 params=nf4", QUANTISED),
    (MODEL, "fsdp mb1 params=nf4-dq", QUANTISED),
    (MODEL, "tp2 mb2 params=int8", QUANTISED),
    (MODEL, "fsdp mb1 params=int4", QUANTISED),
]


def test_adapters_train_as_in_one_process_under_every_plan_and_over_every_base():
    """Loss, gradients and parameters after three steps in float64: sums in another order. A second factor is zero at
    first, so that the first one's first gradient is: later steps show it."""
    cases = [
        equality.EqualityCase(model=model, plan=parse(words).on(2), train=work(train), steps=3)
        for model, words, train in CASES
    ]
    assert {case[1]: found.most for case, found in zip(CASES, equality.apart(cases)) if not found.most < 1e-9} == {}


def test_adapters_that_are_averaged_after_each_plain_step_are_those_of_one_process():
    """The mean of steps against gradients of parts is a step against the mean gradient, which is below the clipping
    norm here; the base is nobody's to average."""
    train = work(f"{TUNED},optimizer=sgd")
    plans = [parse(words).on(4) for words in ("pp2 dp2 mb1 sync=local:h=1", "tp2 dp2 mb2 sync=local:h=1")]
    for plan in plans:
        assert check(plan, MODEL, load("4xh100"), train) + unexecutable(plan, MODEL, train) == []
    found = equality.apart([equality.EqualityCase(model=MODEL, plan=plan, train=train, steps=2) for plan in plans])
    assert [one.parameter < 1e-11 and one.whole for one in found] == [True, True]


# --- formats ---------------------------------------------------------------------------------------------------------


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    """2305.14314, equation 4 and appendix E: of both halves the means of quantiles next to each other, on an even scale
    from the offset that both ends are left at, over the largest; 8 of one sign, 7 of the other, and 0."""
    end, normal = 0.9677083, NormalDist()

    def half(count):
        return [normal.inv_cdf(end + (0.5 - end) * i / count) for i in range(count)]

    found = sorted([*(-x for x in half(7)), 0.0, *half(8)])
    most = max(found)
    assert [x / most for x in found] == pytest.approx(list(NF4), abs=2e-6)


def test_numbers_of_8_bits_are_a_tree_of_256():
    """2110.02861, section 1.3: by hand, the largest power has 64 middles of steps of 0.9 / 64, the smallest one."""
    book = tree()
    assert len(book) == 256 == len(set(book.tolist()))
    assert book[-1] == 1 and float(book[-2]) == pytest.approx(1 - 0.9 / 128) and 0.0 in book.tolist()
    assert float(book[book > 0].min()) == pytest.approx(0.55e-6)


def test_codes_are_two_in_a_byte_the_first_above():
    assert packed(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x12, 0xF0]]


@pytest.mark.parametrize(
    ("name", "step"), [("nf4", 0.1519), ("nf4-dq", 0.16), ("int4", 0.5 * 2 / 15 + 1e-3), ("int8", 0.5 / 127)]
)
def test_a_weight_comes_back_within_half_a_step_of_its_block(name, step):
    """Half the widest step of each grid, over the largest magnitude of the block: 0.1519 is half of 0.6962 to 1."""
    how = FORMATS[name]
    matrix = torch.randn((8, 256), generator=torch.Generator().manual_seed(0))
    found = quantise(matrix, how).restored(how, torch.float32)
    width = how.block or 256
    blocks = matrix.view(8, -1, width)
    far = (found.view_as(blocks) - blocks).abs() / blocks.abs().amax(-1, keepdim=True)
    assert step / 2 < far.max() <= step


def test_weights_of_the_grid_come_back_as_they_were():
    numbers = torch.tensor(NF4)[torch.arange(128) % 16] * torch.tensor([3.0, 0.5]).repeat_interleave(64)
    how = FORMATS["nf4"]
    found = quantise(numbers.view(1, 128), how)
    assert torch.equal(found.restored(how, torch.float32).view(-1), numbers)
    assert found.scales.tolist() == [[3.0, 0.5]]
    zeros = quantise(torch.zeros(1, 64), how)
    assert not zeros.restored(how, torch.float32).any()


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_has_of_a_matrix_what_the_whole_one_has_there(name):
    """Rows 128 to 256 and columns 256 to 512 of 512 x 1024, of which the scales of scales span several rows."""
    whole = torch.randn((512, 1024), generator=torch.Generator().manual_seed(1))
    how = FORMATS[name]
    parts = [Part("w", (512, 1024), (128, 256), (slice(None),))]
    matrix = PackedMatrix("w", (128, 256), parts, name, 0.02)
    matrix.fill(lambda part: whole, alone()["self"])
    assert torch.equal(
        matrix.whole(matrix.codes, matrix.scales, torch.float32),
        quantise(whole, how).restored(how, torch.float32)[128:256, 256:512],
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def held_bytes(trainer):
    """Bytes of everything that a rank keeps between steps, by category."""
    parameters = sum(p.nbytes for stage in trainer.stages.values() for p in [*stage.parameters(), *stage.buffers()])
    state = trainer.optimizer.torch.state
    moments = sum(t.nbytes for one in state.values() for name, t in one.items() if name != "step")
    masters = sum(h.master.nbytes for h in trainer.optimizer.held if h.master.dtype != torch.bfloat16)
    gradients = sum(h.gradient.nbytes for h in trainer.optimizer.held)
    return {"parameters": parameters, "gradients": gradients, "optimizer": masters + moments}


@pytest.mark.parametrize("words", ["mb2", "mb2 params=nf4", "mb2 params=nf4-dq", "mb2 params=int4", "mb2 params=int8"])
def test_a_rank_holds_the_bytes_that_are_predicted(words):
    """In int8 each of the 1,024 rows of a layer has a scale of 4 bytes besides, which of rows of thousands is nothing;
    else all but the scales of so few scales."""
    train = work("batch=4,seq=16,dtype=bf16,rank=4,targets=all")
    plan = parse(words).on(1)
    trainer = Trainer(MODEL, plan, train, alone(), settings=Settings())
    trainer.step(small.batch(train, MODEL.vocab, 0))
    found = predict(MODEL, load("1xa100"), train, plan).memory[0].alive
    rows = 2 * 1024 * 4 if "int8" in words else 0
    for name, count in held_bytes(trainer).items():
        assert count == pytest.approx(found[name] + rows * (name == "parameters"), rel=0.002), name


def test_adapters_of_experts_take_the_bytes_that_are_predicted():
    """4 experts of 24: A of 4 x 128 and B of 48 x 4, A of 4 x 24 and B of 128 x 4, in 2 layers, each number of 14 bytes
    beside the parameter's two: a gradient of 2 or 4, a master and two moments."""
    train = work("batch=4,seq=16,dtype=bf16,rank=4,targets=experts_up+experts_down")
    trainer = Trainer(EXPERTS, parse("mb2").on(1), train, alone(), settings=Settings())
    found, held = predict(EXPERTS, load("1xa100"), train, parse("mb2").on(1)).memory[0].alive, held_bytes(trainer)
    assert {name: found[name] for name in held if name != "optimizer"} == {n: held[n] for n in held if n != "optimizer"}
    assert found["optimizer"] == 12 * 2 * 4 * 4 * (128 + 48 + 24 + 128)


@pytest.mark.parametrize("target", ["q+k+v", "o", "gate+up", "down"])
def test_of_two_ranks_each_holds_the_adapters_that_are_predicted(target):
    """Of a matrix that is split by what it gives the first factor is whole on both, of one that is split by what it
    reads the second: rank x (128 whole + half of the other side) each, 8 bytes of moments and 4 of a master."""
    train = work(f"batch=4,seq=16,dtype=bf16,rank=4,targets={target}")
    halves = {"q+k+v": (64, 32, 32), "o": (64,), "gate+up": (128, 128), "down": (128,)}[target]
    values = 2 * 4 * sum(128 + half for half in halves)
    found = predict(MODEL, load("2xa100"), train, parse("tp2 mb2").on(2)).memory[0].alive
    assert found["optimizer"] == values * 12
