"""Local steps in shared scales: as by hand in float64, with their bytes, memory and checkpoints."""

from collections import Counter

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.mesh import alone
from meshwright.run.scaled import Scaled
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.model import from_config
from meshwright.spec.workload import Train
from meshwright.sync.policy import read
from meshwright.sync.record import SharedScales
from tests.run import local, rounds, small
from tests.run.processes import launch_kept as launch
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


CURVED = "dp2 mb2 sync=savic:h=1,of=curvature,apart=1e-5,least=0.01"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def curved(rank):
    """The first parameters of a rank, its signs in the first step, and its scales after it."""
    trainer = local.begun(from_config(CONFIG, name="small"), CURVED, TRAIN, SETTINGS)
    first = local.state(trainer)
    signs = [
        ("signs", small.plain(h.parameter), h.start, h.stop, trainer.curvature.signs(0, h.parameter.name, h.master))
        for h in trainer.optimizer.held
    ]
    local.steps(trainer, 0, 1)
    return first, signs, local.state(trainer)


def by_double_backward(values, signs, index):
    """v * (H v) of a replica's first batch, by transformers and torch's second derivatives."""
    transformers = pytest.importorskip("transformers")
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, attn_implementation="eager")).double()
    net.load_state_dict(values)
    tokens = small.batch(TRAIN, 67, 0, 2, index).tokens
    logits = net(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    names, held = zip(*net.named_parameters())
    slopes = torch.autograd.grad(loss, held, create_graph=True)
    along = sum((slope * signs[name]).sum() for name, slope in zip(names, slopes))
    return {name: signs[name] * one for name, one in zip(names, torch.autograd.grad(along, held))}


def test_scales_of_curvature_are_the_mean_of_products_with_the_hessian():
    got = launch(2, curved)
    products = [
        by_double_backward(local.whole([first], "param"), local.whole([signs], "signs"), index)
        for index, (first, signs, _) in enumerate(got)
    ]
    assert any(not torch.equal(a[-1], b[-1]) for a, b in zip(got[0][1], got[1][1]))  # each its own signs
    for _, _, after in got:
        scales = local.whole([after], "scale")
        for name, one in scales.items():
            expected = (products[0][name] + products[1][name]) / 2
            assert torch.allclose(one, expected, rtol=1e-5, atol=5e-6), name


def test_steps_in_scales_of_curvature_are_over_magnitudes_and_a_round_has_two_passes_more():
    scaling = SharedScales(beta=0.9, least=0.5, apart=1e-3)
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    one = Scaled([{"params": [weight]}], 0.1, 1, scaling)
    one.state[weight]["scale"] = torch.zeros(3)
    for curvature in ([-2.0, 4.0, 0.1], [1.0, 1.0, 1.0]):
        weight.grad, one.curvature = torch.ones(3), {weight: torch.tensor(curvature)}
        one.step()
    # a plain step, and one over 2, 4, and the least; b is 0 and then 0.9 (1 - 0.9) / (1 - 0.81)
    assert torch.allclose(weight, torch.tensor([0.9 - 0.05, 0.9 - 0.025, 0.9 - 0.2]))
    b = 0.9 * (1 - 0.9) / (1 - 0.81)
    assert torch.allclose(one.state[weight]["scale"], b * torch.tensor([-2.0, 4, 0.1]) + 1 - b)
    asked = mw.load_model("llama3.2-1b"), load("4x1xh100,10gbe"), mw.parse_train("batch=4,seq=4096,optimizer=sgd")
    squares, curved, alone = (
        mw.predict(*asked[:1], where, train, mw.parse_plan(words), detail=False).step_time_s
        for where, train, words in (
            (asked[1], asked[2], "mb1 full sync=savic:h=8"),
            (asked[1], asked[2], "mb1 full sync=savic:h=8,of=curvature"),
            (load("1x1xh100"), mw.parse_train("batch=1,seq=4096,optimizer=sgd"), "mb1 full"),
        )
    )
    assert abs((curved - squares) / (2 / 8 * alone) - 1) < 0.02
    with pytest.raises(MeshwrightError) as refused:
        mw.predict(*asked[:1], load("4xh100"), asked[2], mw.parse_plan("tp2 dp2 mb1 sync=savic:h=8,of=curvature"))
    assert any("of=squares" in one.help for one in refused.value.diagnostics)
