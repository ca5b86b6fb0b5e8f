"""Layers with a state on a sequence that is cut: what is handed on, by hand and by LASP (Sun et al. 2404.02882)."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.cost import load_framework, standard
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.plan import check, parse
from meshwright.spec.cluster import load
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import Train
from meshwright.work import Collective, Group, Scan

MAMBA, QWEN = load_model("mamba2-2.7b"), load_model("qwen3.5-27b")
CLUSTER = load("16xh100")


def pieces(words: str, seq: int, model=MAMBA) -> dict:
    plan = parse(words).on(16)
    stages = Stages(plan, model, Train(global_batch=16, seq_len=seq), Mesh(plan, CLUSTER))
    return {piece.name: piece for piece in stages.pieces(0)}


@pytest.mark.parametrize(("model", "cp", "words"), [(MAMBA, 16, "cp16"), (QWEN, 4, "cp4 dp4 ulysses")])
def test_one_state_a_layer_is_handed_on_however_long_the_sequence_is(model, cp, words):
    mixer = model.blocks[0].mixer
    key, value = (mixer.state, mixer.head_dim) if model is MAMBA else (mixer.k_head_dim, mixer.v_head_dim)
    moved = []
    for seq in (8192, 65536):
        found = pieces(f"{words} mb1 scans=handed", seq, model)
        relay = found["state handed on"].forward
        assert relay == found["state handed on"].backward and relay.op == "relay" and relay.group.size == cp
        assert relay.num_bytes == 2 * mixer.heads * key * value  # 16 bits a number
        assert found["mixer edge"].forward.num_bytes == 2 * (mixer.kernel - 1) * mixer.conv_width
        moved.append([p.forward for p in found.values() if isinstance(p.forward, Collective) and p.queue == "cp"])
    # those of layers without attention are the same bytes for a sequence eight times as long
    assert [one.num_bytes for one in moved[0]] == [one.num_bytes for one in moved[1]]


def test_a_ring_passes_keys_values_and_decays_and_works_on_pairs_of_tokens():
    mixer = MAMBA.blocks[0].mixer
    found, seq = pieces("cp16 mb1 scans=ringed", 65536), 65536 // 16
    one = found["states in a ring"]
    keys, values = mixer.groups * mixer.state, mixer.heads * mixer.head_dim
    assert one.exchange.each.num_bytes == 2 * seq * (keys + values + mixer.heads)  # 16 bits a number
    assert one.exchange_back.each.num_bytes == 2 * one.exchange.each.num_bytes
    assert one.ring == 16 and "state handed on" not in found and "ssd scan" not in found
    # the last rank's tokens meet those of fifteen others, and half of the pairs among themselves
    assert one.ring * one.forward.pairs == pytest.approx(seq * (15 * seq + seq / 2))
    assert one.forward.flops == 2 * mixer.heads * (mixer.state + mixer.head_dim) * one.forward.pairs


def test_each_rank_scans_its_tokens_with_all_heads():
    scans = {word: pieces(f"cp16 mb1 scans={word}", 65536)["ssd scan"].forward for word in ("swapped", "handed")}
    assert (scans["swapped"].seq_len, scans["swapped"].heads) == (65536, 80 // 16)
    assert (scans["handed"].seq_len, scans["handed"].heads) == (65536 // 16, 80)
    beside = pieces("cp4 dp4 ulysses mb1 scans=handed", 8192, QWEN)["state reach scan"].forward
    assert isinstance(beside, Scan) and beside.v_dim == beside.k_dim == QWEN.blocks[0].mixer.k_head_dim


def test_a_relay_is_as_many_sends_as_there_are_neighbours():
    """Of the fifteen hops of sixteen ranks on four nodes, three are between nodes and twelve inside of them."""
    costs, mesh = standard(load_framework("fused")), Mesh(parse("cp16").on(16), load("4x4xh100"))
    device = load("4x4xh100").islands[0].device

    def seconds(op: str, group: Group) -> float:
        return costs.price(Collective(op=op, num_bytes=1e6, group=group), device).seconds

    whole = mesh.group("cp")
    inside = Mesh(parse("cp4 dp4").on(16), load("4x4xh100")).group("cp")
    hop, far = seconds("send", inside), seconds("send", whole)
    assert seconds("relay", inside) == pytest.approx(3 * hop, rel=0.05)
    assert seconds("relay", whole) == pytest.approx(12 * hop + 3 * far, rel=0.05)


@pytest.mark.parametrize(
    ("words", "model", "seq", "said"),
    [
        ("cp4 scans=handed", "llama3-8b", 8192, "drop scans="),
        ("cp4 scans=handed", "qwen3.5-27b", 8192, "say ulysses or ring-self-attention"),
        ("cp8 dp1 scans=handed", "mamba2-2.7b", 16, "fewer than the 3"),
        ("cp4 ulysses scans=ringed", "qwen3.5-27b", 8192, "say scans=handed"),
    ],
)
def test_what_hands_no_state_on_is_refused(words, model, seq, said):
    found = check(parse(words).on(8), load_model(model), load("8xh100"), Train(global_batch=8, seq_len=seq))
    assert any(d.code == "P075" and said in f"{d.message} {d.help}" for d in found), found


def test_ranks_that_divide_no_heads_share_a_sequence():
    """80 heads are swapped among as many ranks as divide them, and states are handed on through any number."""
    asked = MAMBA, load("4x8xh100"), Train(global_batch=1, seq_len=65536)
    assert any("cp=32 does not divide" in d.message for d in check(parse("cp32 dp1").on(32), *asked))
    assert mw.predict(*asked, parse("cp32 dp1 mb1 scans=handed full"), detail=False).fits
