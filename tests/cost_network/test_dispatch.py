"""Tokens on their way to experts on other nodes, as a framework's own kernels send them."""

import msgspec
import pytest

from meshwright.cost import Framework, standard
from meshwright.cost.exchange import MoeExchange, price
from meshwright.cost.framework import Defaults
from meshwright.errors import MeshwrightError
from meshwright.lower.place import Mesh
from meshwright.plan import parse
from meshwright.simulate.step import simulate
from meshwright.spec import model
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.work import Collective, Routed

TOKENS, HIDDEN, TOP_K, EXPERTS = 4096, 7168, 8, 256


def costs(dispatch):
    return standard(Framework(name=f"dispatch {dispatch}", defaults=Defaults(dispatch=dispatch)))


def exchanged(ep, routed=True, phase="dispatch"):
    """Tokens between the experts' ranks of 8-GPU nodes, and the device."""
    cluster = load(f"{ep}xh100")
    group = Mesh(parse(f"dp{ep} ep{ep}"), cluster).expert_group("ep")
    assert group.size == ep
    tokens = Routed(phase=phase, tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K, experts=EXPERTS) if routed else None
    size = 2.0 * TOKENS * HIDDEN * TOP_K
    return Collective(op="all_to_all", num_bytes=size, group=group, routed=tokens), cluster.islands[0].device


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_between_nodes_they_take_what_the_kernels_were_measured_to(phase):
    work, device = exchanged(64, phase=phase)
    known = MoeExchange(
        phase=phase, tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K, experts=EXPERTS, group=work.group
    )  # fmt: skip
    found = costs("normal").price(work, device)
    assert found == price(known, device, mode="normal")
    # a token goes to 5.3 of 8 nodes and has 8 copies, 7 of 8 of them for other nodes: fewer bytes on the network
    assert found.seconds < costs("").price(work, device).seconds


def test_inside_a_node_and_for_what_are_no_tokens_nothing_changes():
    for work, device in (exchanged(8), exchanged(64, routed=False)):
        assert costs("normal").price(work, device) == costs("").price(work, device)


def test_values_of_32_bits_go_in_an_all_to_all():
    work, device = exchanged(64)
    wide = msgspec.structs.replace(work, num_bytes=2 * work.num_bytes)
    assert costs("normal").price(wide, device) == costs("").price(wide, device)


def test_experts_that_are_one_to_a_node_are_priced():
    cluster = load("256xh100")
    group = Mesh(parse("tp8 dp32 ep32 etp8"), cluster).expert_group("ep")
    assert [hop.scale_out for hop in group.hops if hop.members > 1] == [True] * len(group.hops)
    work, device = exchanged(64)
    apart = msgspec.structs.replace(work, group=group)
    assert 0 < costs("normal").price(apart, device).seconds < costs("").price(apart, device).seconds


def test_few_ranks_exchange_as_before():
    some = standard(Framework(name="from 64", defaults=Defaults(dispatch="normal", dispatch_from=64)))
    for ep, like in ((32, ""), (64, "normal")):
        work, device = exchanged(ep)
        assert some.price(work, device) == costs(like).price(work, device)


def test_a_mode_that_nobody_measured_is_refused():
    work, device = exchanged(64)
    with pytest.raises(MeshwrightError, match="N004"):
        costs("fastest").price(work, device)


def test_a_mixture_is_lowered_to_its_tokens():
    mixture, train = model.load("mixtral-8x7b"), Train(global_batch=16, seq_len=4096)
    run = simulate(parse("dp16 ep8 mb1"), mixture, load("16xh100"), train, costs(""))
    passes = run.lowered.layer_passes
    sent = [e for one in passes for e in one.entries if e.queue == "ep"]
    phases = {(e.name.split()[0], one.which, e.work.routed.phase) for one in passes
              for e in one.entries if e.queue == "ep"}  # fmt: skip
    assert {("dispatch", "F", "dispatch"), ("combine", "F", "combine")} <= phases
    assert {(p, b) for p, which, b in phases if which != "F"} == {("dispatch", "combine"), ("combine", "dispatch")}
    for entry in sent:
        routed = entry.work.routed
        assert routed.tokens * routed.top_k * routed.hidden * 2 == entry.work.num_bytes
        assert (routed.top_k, routed.experts, routed.tokens) == (2, 8, 4096)
        assert msgspec.structs.replace(entry.work, routed=None).op == "all_to_all"


def test_software_that_nobody_names_sends_a_token_once_to_a_node_where_many_ranks_share_the_experts():
    # catalog/frameworks/default.toml: by DeepEP's kernels from 32 ranks of experts on
    for ep, mode in ((64, "normal"), (32, "normal"), (16, "")):
        work, device = exchanged(ep)
        assert standard().price(work, device) == costs(mode).price(work, device)
