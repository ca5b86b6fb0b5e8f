"""Layers, and head and loss, in portions of the sequence: the operations of the whole, and what is held at a time."""

from __future__ import annotations

import pytest

from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.lower.units import Unit, composition_of, unit_of
from meshwright.plan import check, parse
from meshwright.spec.architecture import HEAD
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as parse_train
from meshwright.work import AttentionCore, Gemm

S, H, KV, F, V = 4096, 512, 128, 1536, 32000  # tokens, hidden, width of keys (and of values), MLP, vocabulary
MODEL = transformer(layers=4, hidden=H, heads=8, kv_heads=2, ffn=F, vocab=V, gated=True, name="small")
CLUSTER = load_cluster("1xh100")


def stages(words: str, model=MODEL, train: Train | None = None) -> Stages:
    plan = parse(words).on(1)
    return Stages(plan, model, train or Train(global_batch=1, seq_len=S), Mesh(plan, CLUSTER))


def flops(found: Stages, unit: Unit, which: str, kind: type, *, again: bool | None = None) -> float:
    entries = found.layer_pass(unit, which).entries
    return sum(e.work.flops for e in entries if isinstance(e.work, kind) and again in (None, e.again))


FULL = unit_of(0, "full")


@pytest.mark.parametrize("count", [2, 3, 7])
def test_portions_attend_to_as_many_pairs_as_the_whole_and_make_keys_and_values_once_more(count):
    whole, parts = stages("full"), stages(f"full recompute_portions={count}")
    for again in (True, False):
        pairs = [flops(one, FULL, "BW", AttentionCore, again=again) for one in (whole, parts)]
        assert pairs[1] == pytest.approx(pairs[0], rel=1e-9)
    products = [flops(one, FULL, "BW", Gemm) for one in (whole, parts)]
    # two operations for each number of the matrices of keys and values and each token
    assert products[1] - products[0] == pytest.approx(2 * S * H * 2 * KV, rel=1e-9)
    assert flops(parts, FULL, "F", Gemm) == flops(whole, FULL, "F", Gemm)


def test_windows_and_documents_have_the_pairs_of_the_whole_too():
    windowed = transformer(layers=2, hidden=H, heads=8, ffn=F, vocab=V, window=700, name="windowed")
    documents = parse_train(f"batch=1,seq={S},lengths=lognormal:mean=900,sigma=1.0,pack=concat")
    for model, train in ((windowed, None), (MODEL, documents)):
        pairs = [
            flops(stages(w, model, train), FULL, "BW", AttentionCore) for w in ("full", "full recompute_portions=4")
        ]
        assert pairs[1] == pytest.approx(pairs[0], rel=2e-3), train


def test_a_layer_in_portions_holds_its_share_and_all_keys_and_values():
    """By hand, 2 bytes a number and token. One portion: what each norm, the products behind them (qkv; up), attention
    (q, k, v), its projection, the activation (two widths) and the MLP's last product read; 4 a head for the softmax.
    The sequence: keys and values, their gradients, and what one portion adds to them; a gradient in and one out."""
    count = 4
    portion = S // count * (2 * (2 * H + 2 * H + (H + 2 * KV) + H + 2 * F + F) + 4 * 8)
    expected = portion + 3 * S * 2 * (2 * KV) + 2 * S * H * 2
    # a forward holds what the activation and the product behind it read, and what comes in and goes out
    forward = S * 2 * (2 * F + F) + 2 * S * H * 2
    found = stages(f"full recompute_portions={count}").unit_activations(FULL)
    assert found.saved == S * H * 2
    assert found.working == max(expected, forward) == forward
    small = stages(f"full recompute_portions={count}", transformer(layers=2, hidden=H, heads=8, ffn=64, vocab=V))
    narrow = S // count * (2 * (2 * H + 2 * H + 3 * H + H + 64 + 64) + 4 * 8)
    assert small.unit_activations(FULL).working == narrow + 3 * S * 2 * (2 * H) + 2 * S * H * 2


def test_scores_are_never_whole_and_computed_once():
    """A token has 4 bytes of probabilities and 8 of gradients for each entry of the vocabulary (the eager loss)."""
    head, found = unit_of(HEAD), stages("full loss_portions=16")
    one = found.unit_activations(head)
    assert one.logits == 0.0 and one.saved == S * H * 2
    assert one.working == pytest.approx(S / 16 * (12 * V + 2 * 2 * H) + 2 * S * H * 2)
    assert found.activations(composition_of((head,))).logits == 0.0
    assert found.layer_pass(head, "F").entries == ()  # the loss comes with the backward
    whole = stages("full")
    both = [sum(flops(one, head, which, Gemm) for which in ("F", "BW")) for one in (whole, found)]
    assert both[0] == both[1]


REFUSED = [
    ("tp2 full recompute_portions=2", "llama3-8b", "nosp"),
    ("cp2 full recompute_portions=2", "llama3-8b", "cp1"),
    ("selective recompute_portions=2", "llama3-8b", "say full"),
    ("full unfused recompute_portions=2", "llama3-8b", "flash"),
    ("full brought=kept recompute_portions=2", "llama3-8b", "drop brought="),
    ("pp2 zb-h1 full recompute_portions=2", "llama3-8b", "1f1b"),
    ("pp2 zb-h1 loss_portions=2", "llama3-8b", "1f1b"),
    ("tp2 nosp full overlap=tp recompute_portions=2", "llama3-8b", "leave tp out"),
    ("full recompute_portions=9000", "llama3-8b", "fewer portions"),
    ("cp4 loss_portions=3000", "llama3-8b", "on 4 ranks"),
    ("full recompute_portions=2", "mixtral-8x7b", "dense MLPs"),
    ("full recompute_portions=2", "deepseek-v2-lite", "latent"),
    ("full recompute_portions=2", "mamba2-2.7b", "state goes on"),
    ("full recompute_portions=2", "bert-base", "see later ones"),
    ("loss_portions=2", "vit-base-patch16", "every token"),
]


@pytest.mark.parametrize(("words", "model", "said"), REFUSED, ids=[f"{c[1]} {c[0]}" for c in REFUSED])
def test_what_has_no_portions_is_refused_with_what_to_say_instead(words, model, said):
    asked = load_model(model), load_cluster("8xh100"), Train(global_batch=64, seq_len=512 if "bert" in model else 8192)
    found = [d for d in check(parse(words).on(8), *asked) if d.code == "P074"]
    assert found and said in "\n".join(f"{d.message} {d.help}" for d in found), found


def test_portions_of_layers_say_that_layers_are_recomputed():
    assert parse("recompute_portions=3") == parse("full recompute_portions=3")
    assert parse("norecompute recompute_portions=3").memory.recompute == "none"
