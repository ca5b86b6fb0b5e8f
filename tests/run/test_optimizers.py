"""Lion, LAMB and LARS: exact against their formulas on published tensors, under plans that shard them, in float64."""

from functools import cache

import pytest
import torch

from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.layers.kind import Params
from meshwright.lower.state import static_bytes
from meshwright.plan import parse
from meshwright.run.mesh import alone as alone_here
from meshwright.run.mesh import build
from meshwright.run.record import Off, Recorder, install
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.matrices import num_matrices
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import Train
from tests.run import codes, local, small
from tests.run.processes import launch_kept as launch

STEPS = 3
MODELS = {
    "llama": lambda: small.llama(layers=1),
    "tied": lambda: small.llama(layers=2, tied_embeddings=True),
    "experts": lambda: small.llama(layers=1, experts=4, top_k=2, moe_ffn=24, shared_ffn=16),
}


def seen(rank, model, text, train):
    """Losses of some steps; before each and after the last the parameters, and the gradients of each."""
    plan = parse(text)
    plan = plan.on(max(1, plan.layout.num_ranks))
    settings = Settings(precision="float64", lr=1e-2, clip=0.0)
    trainer = Trainer(model, plan, train, build(plan), settings=settings)
    states, gradients, losses = [], [], []

    def parameters():
        trainer.settle()
        found = [p for p in trainer.pieces() if p.key == "param"]
        return [(small.plain(p.parameter), p.start, p.stop, p.values.clone()) for p in found]

    def keep():
        states.append(parameters())
        held = trainer.optimizer.held
        gradients.append([(small.plain(h.parameter), h.start, h.stop, h.gradient.clone()) for h in held])

    trainer.before_update.append(keep)
    dp = trainer.mesh["dp"]
    for step in range(STEPS):
        losses.append(trainer.step(small.batch(train, model.vocab, step, dp.size, dp.index)).loss)
    return losses, gradients, [*states, parameters()]


def train(optimizer):
    return Train(global_batch=8, seq_len=16, dtype="fp32", optimizer=optimizer)


@cache
def alone(model, optimizer):
    return launch(1, seen, MODELS[model](), "tp1 mb8", train(optimizer))


def whole(ranks, which, step):
    return small.assemble([(one[which][step],) for one in ranks], 0)


def lion(w, g, kept, step, decay):
    now = torch.sign(0.9 * kept.get("m", 0) + 0.1 * g)
    kept["m"] = 0.99 * kept.get("m", 0) + 0.01 * g
    return w - 1e-2 * (now + decay * w)


def lamb(w, g, kept, step, decay):
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
    kept["v"] = 0.999 * kept.get("v", 0) + 0.001 * g * g
    mean, square = kept["m"] / (1 - 0.9**step), kept["v"] / (1 - 0.999**step)
    update = mean / (square.sqrt() + 1e-8) + decay * w
    return w - 1e-2 * (w.norm() / update.norm() if w.dim() > 1 else 1) * update


def lars(w, g, kept, step, decay):
    trust = 0.001 * w.norm() / (g.norm() + decay * w.norm()) if w.dim() > 1 else 1
    kept["v"] = 0.9 * kept.get("v", 0) + 1e-2 * trust * (g + decay * w)
    return w - kept["v"]


def adagrad(w, g, kept, step, decay):
    kept["s"] = kept.get("s", 0) + (g + decay * w) ** 2
    return w - 1e-2 * (g + decay * w) / (kept["s"].sqrt() + 1e-10)


FORMULAS = {"lion": lion, "lamb": lamb, "lars": lars, "adagrad": adagrad}


@pytest.mark.parametrize("optimizer", FORMULAS)
def test_each_step_is_the_formula_of_its_paper_on_every_published_tensor(optimizer):
    """Chen et al. 2302.06675 algorithm 2, You et al. 1904.00962 algorithm 2, You et al. 1708.03888 algorithm 1, and
    Duchi et al. 2011 with a diagonal."""
    found = alone("llama", optimizer)
    now, kept = whole(found, 2, 0), {}
    for step in range(STEPS):
        for name, gradient in whole(found, 1, step).items():
            decay = 0.1 if now[name].dim() > 1 else 0.0
            now[name] = FORMULAS[optimizer](now[name], gradient, kept.setdefault(name, {}), step + 1, decay)
        apart = small.differences(whole(found, 2, step + 1), now)
        assert max(apart.values()) < 1e-9, (step, max(apart, key=apart.get))


@pytest.mark.parametrize(
    ["model", "plan", "optimizer"],
    [
        ("llama", "tp2 dp2 zero1 mb1", "lamb"),
        ("llama", "dp2 zero3 mb1", "lars"),
        ("tied", "dp1 pp2 mb1", "lamb"),
        ("experts", "dp2 ep2 mb1", "lamb"),
        ("llama", "dp2 zero1 mb1", "adagrad"),
    ],
)
def test_a_matrix_that_is_cut_or_copied_takes_the_step_of_the_whole(model, plan, optimizer):
    expected = alone(model, optimizer)
    got = launch(parse(plan).layout.num_ranks, seen, MODELS[model](), plan, train(optimizer))
    assert got[0][0] == pytest.approx(expected[0][0], rel=1e-9)
    apart = small.differences(whole(got, 2, STEPS), whole(expected, 2, STEPS))
    assert max(apart.values()) < 1e-9, max(apart, key=apart.get)


@pytest.mark.parametrize("model", [small.gpt(layers=1), small.llama(experts=4, top_k=2, moe_ffn=24, shared_ffn=16)])
def test_the_norms_on_the_wire_are_two_numbers_for_each_matrix(model):
    (count, sent), _ = launch(2, measured, model)
    assert count == num_matrices(model)
    work = Train(global_batch=8, seq_len=16, dtype="fp32", optimizer="lamb")
    lowered = simulate(parse("dp1 tp2"), model, load("2xh100"), work, standard()).lowered
    assert ("all_reduce", sent) in {(m.op, m.num_bytes) for p in lowered.programs for m in p.moves}
    assert sent == 16 * count


def measured(rank, model):
    """The matrices of a job of two ranks, and the bytes of the exchange of their norms."""
    trainer = local.begun(model, "dp1 tp2", train("lamb"))
    recorder = Recorder(rank=rank, device=torch.device("cpu"), warmup=0, keep=1)
    install(recorder)
    local.steps(trainer, 0, 1)
    install(Off())
    labels = [recorder.recording().labels[i] for i in recorder.recording().label.tolist()]
    (sent,) = {one.num_bytes for one in labels if one.queue == "dp" and one.num_bytes}
    return len(trainer.optimizer.torch.matrices.names), sent


@pytest.mark.parametrize("optimizer", ["lamb", "adagrad"])
def test_training_goes_on_from_a_checkpoint_of_the_optimizer(optimizer, tmp_path):
    for on, again, *_ in launch(
        2, codes.resumed, small.llama(layers=1), "dp2 zero1 mb1", train(optimizer), tmp_path, 1
    ):
        assert on == again


def test_a_step_waits_for_norms_of_matrices_and_lion_keeps_half_of_adams_moments():
    """llama3-8b over two tensor-parallel groups: LAMB reads its state twice; a moment is 4 bytes a parameter."""
    found, model = {}, load_model("llama3-8b")
    for optimizer in ("adamw", "lion", "lamb"):
        work = Train(global_batch=64, seq_len=4096, optimizer=optimizer)
        found[optimizer] = simulate(parse("tp8 dp2 mb1"), model, load("16xh100"), work, standard())
    state = {name: run.lowered.static_bytes[0]["optimizer"] for name, run in found.items()}
    assert state["adamw"] - state["lion"] == pytest.approx(4 * model.num_params / 8, rel=1e-3)
    times = {name: run.end_s.max() for name, run in found.items()}
    assert times["lion"] < times["adamw"] < times["lamb"]


def test_a_learning_rate_follows_the_batch_after_a_warm_up_from_that_of_the_small_one():
    """Goyal et al. 1706.02677: 0.1 at a minibatch of 256 is 3.2 at 8192, reached in equal steps from 0.1 on."""
    many = Settings(lr=0.1, warmup=5).scaled("linear", 8192, 256)
    rates = [many.lr_at(step) for step in range(7)]
    assert rates == pytest.approx([0.72, 1.34, 1.96, 2.58, 3.2, 3.2, 3.2])
    assert Settings(lr=0.1).scaled("sqrt", 1024, 256).lr_at(0) == pytest.approx(0.2)
    assert Settings(lr=0.1, warmup=4).scaled("linear", 64, 256).lr_at(0) == pytest.approx(0.025)


@pytest.mark.parametrize("words", ["tp1 mb8", "tp1 mb8 master=none", "tp1 mb8 master=none moments=bf16"])
def test_moments_and_masters_are_held_in_the_bytes_that_are_predicted(words):
    model, plan = small.llama(layers=1), parse(words).on(1)
    one = Train(global_batch=8, seq_len=16, dtype="bf16")
    trainer = Trainer(model, plan, one, alone_here(), settings=Settings(lr=1e-2, clip=0.0))
    before = {h.parameter.name: h.master.clone() for h in trainer.optimizer.held}
    gradients: dict[str, torch.Tensor] = {}
    trainer.before_update.append(
        lambda: gradients.update((h.parameter.name, h.gradient.clone()) for h in trainer.optimizer.held)
    )
    trainer.step(small.batch(one, model.vocab, 0))
    trainer.settle()
    apart = sum(p.values.nbytes for p in trainer.pieces() if p.key != "param" or plan.precision.master == "fp32")
    params = Params(dense=model.num_params, expert=0.0, trained_dense=model.num_params)
    assert apart == static_bytes(plan, one, params)["optimizer"]
    if words.endswith("none"):  # the first update of AdamW in fp32, rounded to 16 bits
        for held in trainer.optimizer.held:
            wide = torch.nn.Parameter(before[held.parameter.name].float())
            wide.grad = gradients[held.parameter.name].float()
            decay = 0.1 if held.decays else 0.0
            # fused as the trainer's is: torch's two orders of the sum differ by a bit where weight and update cancel
            torch.optim.AdamW([wide], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, fused=True).step()
            assert torch.equal(held.master, wide.detach().bfloat16())
