"""Ranks on processor cores share those of their own node, and no others do."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.cost import standard
from meshwright.graph import KIND
from meshwright.plan import parse
from meshwright.simulate.cores import crowded, hosts
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=4, hidden=256, heads=8, kv_heads=4, vocab=2048, ffn=704, gated=True)
TRAIN = Train(global_batch=24, seq_len=128, dtype="bf16")


def cluster(text, *cores):
    """A cluster of H100s; the devices of an island with `cores` are those of its nodes."""
    found = load(text)
    islands = [
        msgspec.structs.replace(i, device=msgspec.structs.replace(i.device, name=f"core {n}", cores=n)) if n else i
        for i, n in zip(found.islands, cores, strict=True)
    ]
    return msgspec.structs.replace(found, islands=tuple(islands))


def stretched(plan, on):
    """How many times their duration alone the forwards of each rank class take."""
    found = simulate(parse(plan), MODEL, on, TRAIN, standard())
    graph, priced = found.lowered.graph, found.priced
    assert not priced.wait[graph.cost_key[graph.kind == KIND["F"]]].any()
    out = {}
    for task in np.flatnonzero(graph.kind == KIND["F"]):
        rank = graph.streams.ranks[graph.streams.rank[graph.member[graph.member_ptr[task]]]]
        alone = priced.durations[graph.cost_key[task]]
        out.setdefault(rank, []).append((found.end_s[task] - found.start_s[task]) / alone)
    return {rank.name: shares for rank, shares in out.items()}, found.lowered


@pytest.mark.parametrize("first", ["cores", "gpus"])
def test_only_the_ranks_that_are_on_cores_share_them_wherever_their_island_is(first):
    # one stage is four ranks on two cores, the other four GPUs
    two = cluster("4xh100 + 4xh100", *((2, 0) if first == "cores" else (0, 2)))
    found, lowered = stretched("pp2 dp4 mb6 gpipe overlap=none", two)
    assert crowded(lowered)
    on_cores, on_gpus = (found[name] for name in sorted(found, reverse=first == "gpus"))
    # nothing but the forwards runs while they do: the shares are exact
    assert on_cores == pytest.approx([2.0] * len(on_cores))
    assert on_gpus == pytest.approx([1.0] * len(on_gpus))


def test_a_node_that_is_half_empty_lends_no_cores_to_another():
    # eight ranks on four cores and four on as many: twelve on eight would take 1.5 times as long
    found, lowered = stretched("dp12 mb1 overlap=none", cluster("16xh100", 4))
    assert [(h.cores, len(h.ranks)) for h in hosts(lowered.mesh)] == [(4, 8), (4, 4)]
    assert found["rank 0"] == pytest.approx([2.0] * len(found["rank 0"]))


def test_more_cores_than_ranks_are_no_crowd():
    for cores, full in ((8, True), (9, False)):
        _, lowered = stretched("dp8 mb3", cluster("8xh100", cores))
        assert crowded(lowered) is full
    assert not crowded(stretched("dp8 mb3", load("8xh100"))[1])


@pytest.mark.parametrize(("ranks", "times"), [("4xh100", 1.0), ("8xh100", 2.0 * 1.1), ("16xh100", 4.0 * 1.2)])
def test_what_takes_turns_on_a_core_takes_longer_for_every_doubling(ranks, times):
    on = cluster(ranks, 4)
    (island,) = on.islands
    # one node of as many devices as there are ranks
    device = msgspec.structs.replace(island.device, crowding=0.1)
    node = msgspec.structs.replace(island.node, devices=island.num_devices)
    on = msgspec.structs.replace(on, islands=(msgspec.structs.replace(island, device=device, node=node),))
    found, lowered = stretched(f"dp{island.num_devices} mb1 overlap=none", on)
    assert [len(h.ranks) for h in hosts(lowered.mesh)] == [island.num_devices]
    assert found["rank 0"] == pytest.approx([times] * len(found["rank 0"]))
    train = msgspec.structs.replace(TRAIN, global_batch=48)
    whole = predict(MODEL, on, train, parse(f"dp{island.num_devices} mb1"), costs=standard())
    assert sum(whole.attribution.values()) == pytest.approx(whole.step_time_s)
