"""Two rings around whole rows of scores: what they hold and send by the tables of Li et al. (2105.13120)."""

from __future__ import annotations

from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.plan import parse
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.work import Collective

B, L, Z, A, N = 4, 512, 12, 64, 8  # sequences, tokens, heads, their width, ranks: names of the paper's tables
MODEL = transformer(layers=2, hidden=Z * A, heads=Z, vocab=1024, max_seq_len=L)


def test_a_layer_holds_and_sends_what_the_paper_counts():
    plan = parse(f"cp{N} dp1 mb{B} ring-self-attention").on(N)
    train = Train(global_batch=B, seq_len=L, dropout=True, dtype="fp16")
    stages = Stages(plan, MODEL, train, Mesh(plan, load(f"{N}xp100")))
    pieces = {piece.name: piece for piece in stages.pieces(0)}
    # B Z L^2 / N scores: 2 bytes behind the softmax, 1 of a dropout mask, 2 behind that
    assert pieces["attention softmax"].core_saved == 5 * B * Z * L**2 / N
    rings = [pieces["attention scores"], pieces["attention weighted sum"]]
    sums = [pieces["keys gradient sum"].backward, pieces["values gradient sum"].backward]
    block = B * Z * L // N * A  # numbers of a rank's keys, or of its values
    for piece in rings:
        assert piece.ring == N and piece.exchange == piece.exchange_back
        assert piece.exchange.each.num_bytes == 2 * block and piece.exchange.last is None
    assert all(isinstance(one, Collective) and one.op == "all_reduce" for one in sums)
    # 2 (N - 1) blocks forward and as many backward by messages; a ring's sum of N blocks is 2 (N - 1) of them a rank
    messages = 2 * sum((N - 1) * piece.exchange.each.num_bytes for piece in rings)
    summed = sum(2 * (N - 1) / N * one.num_bytes for one in sums)
    assert messages + summed == 8 * (N - 1) * 2 * block
    # each rank's queries against all keys: 2 B Z L^2 A / N operations a product, one forward and two backward
    done = sum(N * (piece.forward.flops + piece.backward.flops) for piece in rings)
    assert done == 6 * 2 * B * Z * L**2 * A / N


def test_less_is_stored_by_rings_that_merge():
    held = {}
    for word in ("ring", "ring-self-attention"):
        plan = parse(f"cp{N} dp1 mb{B} {word}").on(N)
        stages = Stages(plan, MODEL, Train(global_batch=B, seq_len=L), Mesh(plan, load(f"{N}xp100")))
        held[word] = stages.activations(stages.compositions[0]).saved
    assert held["ring-self-attention"] > held["ring"] + 2 * MODEL.num_layers * B * Z * L**2 / N * 0.9
