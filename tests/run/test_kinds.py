"""State space, gated delta, encoder and encoder-decoder: the scans against their recurrences, the models against
transformers with the same weights, and every plan that runs against one process in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.nn import functional as F

from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run.encoder import HIDDEN, hidden_tokens
from meshwright.run.mesh import build
from meshwright.run.pair import buckets
from meshwright.run.scans import convolved, forgetting, gated_delta, ssd
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.weights import load_weights
from meshwright.spec.model import load
from meshwright.spec.workload import Train
from tests.run import small_kinds
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, batch, train_steps

TRAIN = Train(global_batch=4, seq_len=24, dtype="fp32")
NAMES = tuple(small_kinds.CONFIGS)
#: As of the plans of decoders (tests/run/test_equality.py).
TOLERANCE = 1e-9


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def documents_of(rows, length):
    """Borders within chunks and at them."""
    out = torch.zeros(rows, length, dtype=torch.int32)
    out[:, 8:], out[0, 13:], out[-1, 14:] = 1, 2, 3
    return out


@pytest.mark.parametrize("cut", [False, True])
def test_a_scan_by_chunks_is_the_recurrence_of_its_paper(cut):
    # h_t = exp(a_t) h_{t-1} + B_t x_t, y_t = C_t h_t (2405.21060, equation 1), token by token
    torch.manual_seed(0)
    b, s, h, p, n = 2, 21, 3, 4, 5
    x, into, off, rate = drawn(b, s, h, p), drawn(b, s, h, n), drawn(b, s, h, n), drawn(b, s, h)
    documents = documents_of(b, s) if cut else None
    y = ssd(x, into, off, forgetting(-rate.exp(), documents), chunk=8)
    state, expected = torch.zeros(b, h, n, p, dtype=torch.float64), []
    for t in range(s):
        if cut and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        state = state * (-rate[:, t].exp()).exp()[..., None, None] + into[:, t].unsqueeze(-1) * x[:, t].unsqueeze(-2)
        expected.append((off[:, t].unsqueeze(-1) * state).sum(-2))
    same(y, torch.stack(expected, 1), (x, into, off, rate))


@pytest.mark.parametrize("cut", [False, True])
def test_the_gated_delta_rule_by_chunks_is_its_recurrence(cut):
    # S_t = exp(a_t) S_{t-1} + beta_t k_t (v_t - (exp(a_t) S_{t-1})^T k_t)^T (2412.06464, equation 10), token by token
    torch.manual_seed(0)
    b, s, h, d, p = 2, 21, 3, 4, 5
    q, v, rate, share = drawn(b, s, h, d), drawn(b, s, h, p), drawn(b, s, h), drawn(b, s, h)
    free = drawn(b, s, h, d)
    k, beta = F.normalize(free, dim=-1), share.sigmoid()
    documents = documents_of(b, s) if cut else None
    o = gated_delta(q, k, v, forgetting(-rate.exp(), documents), beta, chunk=8)
    state, expected = torch.zeros(b, h, d, p, dtype=torch.float64), []
    for t in range(s):
        if cut and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        state = state * (-rate[:, t].exp()).exp()[..., None, None]
        recalled = (k[:, t].unsqueeze(-1) * state).sum(-2)
        state = state + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * (v[:, t] - recalled)).unsqueeze(-2)
        expected.append((q[:, t].unsqueeze(-1) * state).sum(-2))
    same(o, torch.stack(expected, 1), (q, free, v, rate, share))


def same(found, expected, leaves):
    """Equal values, and equal gradients of a sum that weighs them differently."""
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
    ours = torch.autograd.grad((found * weights).sum(), leaves, retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_a_convolution_does_not_look_into_the_document_before():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 21, 6, dtype=torch.float64), torch.randn(6, 1, 4, dtype=torch.float64)
    documents = documents_of(2, 21)
    whole = convolved(x, weight, None, documents)
    for row in range(2):
        for document in documents[row].unique():
            mine = documents[row] == document
            alone = convolved(x[row : row + 1, mine], weight, None, None)
            assert torch.allclose(whole[row, mine], alone[0], rtol=1e-12, atol=1e-14)


def test_every_sequence_hides_the_same_share_of_its_tokens_whoever_asks():
    rows = torch.arange(40).unsqueeze(1) + torch.arange(8).unsqueeze(0) * 40
    hidden = hidden_tokens(rows, seed=1, step=3)
    assert hidden.sum(1).tolist() == [round(HIDDEN * 40)] * 8
    assert torch.equal(hidden[4:], hidden_tokens(rows[:, 4:], seed=1, step=3))
    assert not torch.equal(hidden, hidden_tokens(rows, seed=1, step=4))
    assert len({tuple(row.tolist()) for row in hidden}) == 8


@pytest.mark.parametrize("both_ways", [False, True])
def test_distances_fall_into_the_buckets_of_transformers(both_ways):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    apart = torch.arange(300).unsqueeze(0) - torch.arange(300).unsqueeze(1)
    theirs = t5.T5Attention._relative_position_bucket(apart, bidirectional=both_ways, num_buckets=32, max_distance=128)
    assert torch.equal(buckets(300, 32, both_ways=both_ways, device=torch.device("cpu")), theirs)


@cache
def alone(name):
    """Two steps of one process, the whole batch as one microbatch."""
    return launch(1, train_steps, small_kinds.model(name), "tp1 mb4", TRAIN, 2)


def standing(rank, *asked):
    """A step of a rate of nothing, which changes no weight."""
    return train_steps(rank, *asked, lr=0.0, weight_decay=0.0)


@cache
def started(name):
    """The weights that training begins with."""
    return assemble(launch(1, standing, small_kinds.model(name), "tp1 mb4", TRAIN), 2)


def theirs(name):
    """transformers' model with our first weights, in float64."""
    transformers = pytest.importorskip("transformers")
    config = dict(small_kinds.CONFIGS[name])
    made = getattr(transformers, config["architectures"][0])
    known = made.config_class.from_dict({k: v for k, v in config.items() if k != "architectures"})
    net = made(known).double().eval()
    missing, unexpected = net.load_state_dict(started(name), strict=False)
    tied = ("lm_head.weight", "embed_tokens.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    assert not unexpected and all(key.endswith(tied) for key in missing), (missing, unexpected)
    net.tie_weights()
    return net


def loss_of(name, net):
    """The loss of the first batch by transformers' logits."""
    tokens = batch(TRAIN, 67, 0).tokens
    seen, targets = tokens[:, :-1], tokens[:, 1:]
    rows = torch.arange(TRAIN.seq_len).unsqueeze(1) + torch.arange(TRAIN.global_batch).unsqueeze(0) * TRAIN.seq_len
    hidden = hidden_tokens(rows, 0, 0)
    if name == "bert":
        logits = net(torch.where(hidden, 66, seen)).logits
        return F.cross_entropy(logits[hidden], seen[hidden])
    if name == "t5":
        logits = net(input_ids=torch.where(hidden, 66, seen), decoder_input_ids=seen).logits
    else:
        logits = net(seen, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_transformers(name):
    net = theirs(name)
    loss = loss_of(name, net)
    (ours, _), gradients = alone(name)[0][0][0], assemble(alone(name), 1)
    # transformers computes norms, decays and softmax of these in fp32 whatever the model's type
    assert ours == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    grads = {key: p.grad for key, p in net.named_parameters() if p.grad is not None}
    for key, gradient in gradients.items():
        expected = grads[key]
        assert float((gradient - expected).abs().max() / expected.abs().max().clamp_min(1e-8)) < 2e-3, key


def begun(rank, model, path):
    """The loss of the first batch of a job that begins with published weights."""
    mesh = build(parse("tp1 dp1 mb4"))
    trainer = Trainer(model, parse("tp1 dp1 mb4"), TRAIN, mesh, settings=Settings(precision="float64", lr=0.0))
    load_weights(path, trainer.pieces(), model, mesh["world"])
    trainer.publish()
    return trainer.step(batch(TRAIN, 67, 0)).loss


@pytest.mark.parametrize("name", NAMES)
def test_published_weights_are_read(name, tmp_path):
    net = theirs(name)
    with torch.no_grad():  # weights that no seed of ours makes
        for number, parameter in enumerate(net.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    net.save_pretrained(tmp_path)
    found = launch(1, begun, small_kinds.model(name), str(tmp_path))[0]
    assert found == pytest.approx(loss_of(name, net).item(), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plan", ["dp2 mb1 zero1", "fsdp dp2 mb2", "dp2 mb2 full"])
def test_every_plan_that_runs_trains_as_one_process(name, plan):
    got = launch(2, train_steps, small_kinds.model(name), plan, TRAIN, 2)
    for ours, expected in zip(got[0][0], alone(name)[0][0], strict=True):
        assert ours == pytest.approx(expected, rel=TOLERANCE)
    for which in (1, 2):
        ours, expected = assemble(got, which), assemble(alone(name), which)
        # a key's bias adds as much to every score of a query, so that its gradient is what rounding leaves
        least = 1e-6 * max(float(t.abs().max()) for t in expected.values())
        for key, tensor in expected.items():
            apart = float((ours[key] - tensor).abs().max()) / max(float(tensor.abs().max()), least)
            assert apart <= TOLERANCE, (plan, key, apart)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("bert-base", "tp2 dp4", "tp2 of the bert family is priced and not run"),
        ("t5-base", "pp2 dp4", "pp2 of the t5 family is priced and not run"),
        ("mamba2-2.7b", "cp2 dp4", "cp2 of the mamba2 family is priced and not run"),
        ("qwen3.5-27b", "dp8 selective", "selective recompute of the qwen3_5 family"),
        ("bert-large", "dp8", "its head also tells the next sentence"),
        ("jamba-v0.1", "dp8", "the jamba family is predicted, not trained"),
        ("llava-1.5-7b", "dp8", "the llava family is predicted, not trained"),
        ("clip-vit-large-patch14", "dp8", "the clip family is predicted, not trained"),
    ],
)
def test_what_is_not_run_is_refused_by_name(name, words, said):
    found = unexecutable(parse(words).on(8), load(name), Train(global_batch=64, seq_len=77))
    assert any(said in d.message for d in found), [d.message for d in found]
    assert all(d.place and d.help for d in found)
