"""Exchanges that meet on a port share it: against hand calculations, and never faster than passing each other."""

import json

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.cost import load_framework, standard
from meshwright.graph import KIND
from meshwright.plan import parse
from meshwright.search.evaluate import Evaluator
from meshwright.simulate import ports
from meshwright.simulate.step import simulate
from meshwright.spec import cluster, model
from meshwright.spec.workload import parse as workload

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "config.json"
    file.write_text(json.dumps(LLAMA))
    return model.load(str(file))


def both(llama, plan: str, *, train: str = "batch=64,seq=2048", on: str = "64xh100"):
    """In-order and shared times of a plan, one rank a node so that every exchange leaves through the NIC."""
    devices = cluster.load(on)
    costs = standard()
    run = simulate(parse(plan).on(devices.num_devices), llama, devices, workload(train), costs)
    return run, ports.times(run.lowered, costs)


@pytest.mark.parametrize("plan", ["dp64 overlap=none", "pp8 gpipe dp8 zero1", "tp8", "tp8 nosp", "pp8 gpipe tp8"])
def test_exchanges_that_never_meet_take_what_the_in_order_engine_says(llama, plan):
    run, (_, end) = both(llama, plan, on="8xh100" if plan.startswith("tp8") else "64xh100")
    assert end.max() == pytest.approx(run.end_s.max(), rel=1e-6)


@pytest.mark.parametrize(
    "plan",
    ["dp64 zero3", "dp64 zero3 overlap=none", "pp8 dp8 zero1", "pp4 vpp2 interleaved dp16", "cp8 dp8", "tp2 cp4 dp8",
     "pp4 vpp2 zb-v dp16 zero1", "pp8 dualpipe dp8", "cp2 pp2 dp16 ulysses"],
)  # fmt: skip
def test_sharing_ports_never_makes_a_task_earlier(llama, plan):
    run, (start, end) = both(llama, plan, train="batch=128,seq=2048")
    assert (start <= end).all()
    assert end.max() >= run.end_s.max() * (1 - 1e-9)


def test_gathers_and_reductions_of_sharded_parameters_share_the_port(llama):
    # on links a thousand times slower a step of sharded parameters is what its port carries: gathers forward and
    # backward and reductions one after another, where the in-order engine runs the backward's beside each other
    # (a stack of fused kernels, so that the host adds little to either)
    devices, costs = cluster.load("8xh100"), standard(load_framework("fused"))
    island = devices.islands[0]
    slow = tuple(msgspec.structs.replace(level, gb_s=level.gb_s / 1000) for level in island.levels)
    devices = msgspec.structs.replace(devices, islands=(msgspec.structs.replace(island, levels=slow),))
    run = simulate(parse("dp8 zero3"), llama, devices, workload("batch=8,seq=2048"), costs)
    _, end = ports.times(run.lowered, costs)
    graph = run.lowered.graph
    seconds = run.priced.durations[graph.cost_key]
    exchanged = seconds[np.isin(graph.kind, [KIND["all_gather"], KIND["reduce_scatter"]])].sum()
    assert 0.99 * exchanged <= end.max() <= 1.1 * exchanged  # latencies pass each other
    assert run.end_s.max() < 0.8 * exchanged


def test_passes_are_cut_at_the_exchanges_inside_them_without_losing_time(llama):
    devices, costs = cluster.load("8xh100"), standard()
    lowered = simulate(parse("tp8").on(8), llama, devices, workload("batch=8,seq=2048"), costs).lowered
    for program in (p for p in lowered.programs if p.kind == "pass"):
        site = program.site
        entries = [e for layer in program.layers for e in layer.entries]
        nodes = ports.cut(costs, program)
        kernels = site.straggling * sum(
            costs.price(e.work, site.device).seconds for e in entries if e.queue == "compute"
        )
        assert sum(n.seconds for n in nodes) == pytest.approx(kernels)
        assert [n.work for n in nodes if n.work] == [e.work for e in entries if e.queue != "compute"]


def test_a_cluster_that_shares_ports_is_predicted_so_and_still_adds_up(llama):
    """The same cluster with and without: the prediction is that of its engine, and its parts sum to the step. Kernels
    are fused: a host that issues many leaves ports idle for longer than exchanges meet."""
    where, train = cluster.load("4xh100"), workload("batch=16,seq=2048")
    (island,) = where.islands

    def linked(shared: bool):
        levels = tuple(msgspec.structs.replace(v, gb_s=5.0, shared_ports=shared) for v in island.levels)
        return msgspec.structs.replace(where, islands=(msgspec.structs.replace(island, levels=levels),))

    where, sharing = linked(False), linked(True)
    plan = parse("dp4 zero3 mb1").on(4)
    costs = standard(load_framework("fused"))
    apart, found = (predict(llama, c, train, plan, costs=costs, detail=False) for c in (where, sharing))
    run = simulate(plan, llama, sharing, train, costs)
    assert found.step_time_s == ports.times(run.lowered, costs)[1].max() > apart.step_time_s
    assert sum(found.attribution.values()) == pytest.approx(found.step_time_s, rel=1e-9)
    low, high = found.step_time_interval_s
    assert low <= found.step_time_s <= high and high - low < 2 * found.step_time_s
    assert Evaluator(llama, sharing, train, costs)(plan).step_time_s == pytest.approx(found.step_time_s)
