"""What an emulated rank is told to do is the lowered graph: walked by a virtual clock it takes the predicted time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.emulate.hosts import Hosts
from meshwright.run.emulate.network import EmulatedLink, Links, emulated, emulated_costs, fit, messages
from meshwright.run.emulate.script import RECEIPT, Script, members, script_of
from meshwright.simulate import engine
from meshwright.simulate.step import simulate
from meshwright.spec import cluster, model
from meshwright.spec.workload import parse as workload

LINK = EmulatedLink(latency_s=3e-4, bytes_s=2.5e7, sigma=0.0)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SCHEDULES = (
    "gpipe", "1f1b", "vpp2 interleaved", "vpp2 breadth-first", "zb-h1", "zb-h2", "vpp2 zb-v", "dualpipe",
    "vpp2 dualpipev", "vpp2 hanayo", "chimera", "vpp2 bitpipe", "vpp2 zeropp", "zb-auto", "zb-1p", "zb-2p", "2bp:1f1b",
)  # fmt: skip
LAYOUTS = (
    "dp4", "dp4 zero1", "dp4 zero2", "dp4 zero3", "dp4 zero1 shard2", "dp4 overlap=none", "dp4 zero3 overlap=none",
    "tp4", "tp4 nosp", "tp2 dp2 overlap=tp,dp,pp", "cp4", "cp2 dp2 zero3", "cp4 ulysses", "cp4 allgather",
    "tp2 pp2", "tp2 pp2 nosp", "cp2 pp2", "pp2 dp2 zero1", "pp4 overlap=none", "pp2 dp2 selective", "tp2 cp2 full",
    "tp4 nosp mb2 overlap=tp:domino", "tp2 pp2 nosp mb2 overlap=tp:domino,pp", "tp4 nosp overlap=tp:ladder",
)  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "config.json"
    file.write_text(json.dumps(LLAMA))
    return model.load(str(file))


def clocked(script: Script) -> float:
    """Seconds until the last op ends: an op starts when its stream is free, what it follows has ended and, for a
    collective, all its ranks have come; messages and rings take what the line of the link says."""
    ends = [[None] * len(ops) for ops in script.ranks]
    cursor = {(r, s): [i for i, op in enumerate(ops) if op.stream == s][::-1]
              for r, ops in enumerate(script.ranks) for s in {op.stream for op in ops}}  # fmt: skip
    free = dict.fromkeys(cursor, 0.0)
    arrived: dict[tuple[int, int, int], float] = {}
    waiting: dict[tuple[int, int], dict[int, float]] = {}
    nth: dict[tuple[int, int], int] = {}

    def ready(r: int, i: int) -> float | None:
        op = script.ranks[r][i]
        times = [ends[r][a] for a in op.after]
        return None if None in times else max([free[r, op.stream], *times])

    moved = True
    while moved:
        moved = False
        for (r, s), left in cursor.items():
            while left and (at := ready(r, left[-1])) is not None:
                i, op = left[-1], script.ranks[r][left[-1]]
                if op.what == "sleep":
                    end = at + op.seconds
                elif op.what == "send":
                    # a receipt is what a blocking send costs above the price of its message: left out here
                    receipt = op.num_bytes == RECEIPT
                    end = at + (0.0 if receipt else LINK.latency_s + op.num_bytes / LINK.bytes_s)
                    arrived[r, op.peer, op.tag] = end
                elif op.what == "recv":
                    if (op.peer, r, op.tag) not in arrived:
                        break
                    end = arrived[op.peer, r, op.tag]
                else:
                    ranks = script.channels[op.channel].ranks
                    key = (op.channel, nth.get((r, op.channel), 0))
                    come = waiting.setdefault(key, {})
                    come[r] = at
                    if len(come) < len(ranks):
                        break
                    end = max(come.values()) + price(op.what, op.num_bytes, len(ranks))
                    nth[r, op.channel] = key[1] + 1
                ends[r][i] = free[r, s] = end
                left.pop()
                moved = True
    assert not any(cursor.values()), "some op never starts"
    return max(end for rank in ends for end in rank)


def price(what: str, num_bytes: int, n: int) -> float:
    """Seconds of a ring of messages, or of an exchange whose messages leave one port together."""
    if what in ("shift", "all_to_all"):
        return LINK.latency_s + num_bytes * (1.0 if what == "shift" else (n - 1) / n) / LINK.bytes_s
    if what == "all_reduce":  # gloo's, in two segments a rank: each pair waits for two ways, or the link is full
        block = num_bytes / (2 * n) / LINK.bytes_s
        pair, rest = 2 * LINK.latency_s + block, block
        if block > 2 * LINK.latency_s:
            pair, rest = 2 * block, 2 * LINK.latency_s
        short = num_bytes <= 8  # goes round once to be added and once to be known
        return 2 * (n - 1) * (LINK.latency_s + num_bytes / LINK.bytes_s) if short else 2 * ((n - 1) * pair + rest)
    return (n - 1) * (LINK.latency_s + num_bytes / n / LINK.bytes_s)


def both(llama, plan: str, train: str) -> tuple[float, Script]:
    """The predicted step, of exchanges that pass each other as on the virtual clock, and the script of a plan on four
    hosts."""
    hosts, links = Hosts(4, 2e8), Links(link=LINK, inside=None)
    devices = cluster.load("4xh100")
    target, costs = emulated(devices, links, hosts), emulated_costs(devices, links, 100.0)
    run = simulate(parse(plan).on(4), llama, target, workload(train), costs)
    _, end = engine.times(run.lowered.graph, run.priced.durations)
    return float(end.max()), script_of(run.lowered, costs)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_a_virtual_clock_takes_the_predicted_time(llama, schedule):
    predicted, script = both(llama, f"pp4 {schedule}", "batch=8,seq=512")
    assert clocked(script) == pytest.approx(predicted, rel=1e-5)


@pytest.mark.parametrize("plan", LAYOUTS)
def test_every_layout_on_a_virtual_clock_takes_the_predicted_time(llama, plan):
    predicted, script = both(llama, plan, "batch=8,seq=512")
    # messages of a fraction of a byte are rounded
    assert clocked(script) == pytest.approx(predicted, rel=1e-5)


@pytest.mark.parametrize("plan", ["dp4 ep4", "tp2 dp2 ep2", "tp2 dp2 ep4 etp1", "dp4 ep2 zero1", "pp2 dp2 ep2 zero1"])
def test_experts_on_a_virtual_clock_take_the_predicted_time(tmp_path, plan):
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | experts | {"architectures": ["MixtralForCausalLM"]}))
    predicted, script = both(model.load(str(file)), plan, "batch=8,seq=512")
    assert clocked(script) == pytest.approx(predicted, rel=1e-5)


@pytest.mark.parametrize("plan", ["pp4", "pp2 dp2 zero1", "pp4 dualpipe", "pp2 tp2"])
def test_tied_embeddings_on_a_virtual_clock_take_the_predicted_time(tmp_path, plan):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
    predicted, script = both(model.load(str(file)), plan, "batch=8,seq=512")
    assert clocked(script) == pytest.approx(predicted, rel=1e-5)


def test_exchanges_inside_layers_are_executed_not_folded(llama):
    _, script = both(llama, "tp4", "batch=4,seq=512")
    gathers = [op for op in script.ranks[0] if op.what == "all_gather"]
    # a layer under sequence parallelism gathers before attention and MLP: forward 2, backward 2 as the scatters' other
    # side, 2 again for weight gradients; embedding and head add their own 1 forward and 2 backward
    assert len(gathers) == 4 * (8 * 6 + 1 + 1 + 1)
    assert {script.channels[op.channel].ranks for op in gathers} == {(0, 1, 2, 3)}


def test_groups_are_the_ranks_along_their_spans():
    # 2 x 2 x 2: strides 1, 2 and 4
    assert members(((1, 2),), 5) == (4, 5)
    assert members(((4, 2),), 5) == (1, 5)
    assert members(((1, 2), (4, 2)), 6) == (2, 3, 6, 7)
    assert members((), 3) == (3,)


def test_unequal_islands_are_refused(llama):
    run = simulate(
        parse("dp2 pp2"), llama, cluster.load("2xh100+2xa100"), workload("batch=8,seq=512"), costs := standard()
    )
    with pytest.raises(MeshwrightError, match="one island"):
        script_of(run.lowered, costs)


def test_the_calibration_finds_the_line_that_messages_follow():
    sizes = [1024, 50_000, 250_000, 1_000_000] * 3
    found = fit(sizes, np.array([2e-4 + (size - 1024) / 2.4e7 for size in sizes]))
    assert found.latency_s == pytest.approx(2e-4)
    assert found.bytes_s == pytest.approx(2.4e7)
    assert found.sigma == pytest.approx(0.0, abs=1e-9)


def test_the_calibration_sends_both_ways_at_once():
    script = messages(1, [1000, 2000], 1e6)
    for ops in script.ranks:
        assert [op.num_bytes for op in ops if op.what == "send"] == [1000, 2000]
        assert [op.num_bytes for op in ops if op.what == "recv"] == [1000, 2000]
