"""Measuring this machine: every operator that is timed runs, and a small round becomes a profile that predicts."""

import os

import msgspec
import pytest
import torch

from meshwright.calibrate import here
from meshwright.cost import framework, load_framework, measured, standard
from meshwright.plan import parse
from meshwright.predict import simulate
from meshwright.rank_memory import rank_memory
from meshwright.run import bench, bench_exchange, bench_operators
from meshwright.run.bench_clock import Clock, mean
from meshwright.run.environment import only_cores
from meshwright.run.launch import World, start
from meshwright.spec import cluster
from meshwright.spec.workload import Train

LONE = World(rank=0, size=1, local_rank=0, local_size=1, host="here", device=torch.device("cpu"))


@pytest.mark.parametrize("name", list(bench_operators.benches(torch.device("cpu"), torch.float32)))
def test_an_operator_runs_at_its_smallest_size(name):
    """Forward gives a result for every instance, backward a gradient for every input."""
    some = bench_operators.benches(torch.device("cpu"), torch.float32)[name][0]
    found = some.make()()
    count = round(1 / some.scale)
    assert count == min(bench_operators.MOST, bench_operators.TOGETHER // bench_operators.ELEMENTS[0])
    assert len(found) % count == 0 and all(torch.isfinite(x).all() for x in found)


def test_what_a_forward_keeps_is_counted_once_and_without_parameters():
    """Of four layers of 64 features for 64 tokens: at least what lowering counts to the byte for fused kernels, and at
    most twice that; a microbatch's, not the step's."""
    layer = bench.LAYERS[0]._replace(layers=4)
    model, train = bench.model_of(layer), bench.train_of(layer, "fp32")
    run = simulate(bench.plan_of(layer), model, cluster.load("1xh100"), train, standard())
    lowered = rank_memory(run, standard(), bench.plan_of(layer))[0].alive["activations"]
    kept = bench.TimedModel(Clock(LONE), layer, "fp32").kept_bytes
    assert lowered <= kept <= 2 * lowered
    assert bench.TimedModel(Clock(LONE), layer._replace(layers=8), "fp32").kept_bytes < 2 * kept


@pytest.mark.slow
def test_a_measured_machine_is_one_that_plans_can_be_predicted_for(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    monkeypatch.setattr(bench, "GEMM_M", (16.0, 64.0))
    monkeypatch.setattr(bench, "GEMM_NK", (32.0, 128.0))
    monkeypatch.setattr(bench, "ATTENTION", ((4.0, 16.0), (32.0, 128.0), (16.0, 64.0)))
    monkeypatch.setattr(bench, "ELEMENTWISE", (1024.0, 65536.0))
    monkeypatch.setattr(bench, "LAYERS", bench.LAYERS[:3])
    monkeypatch.setattr(bench, "COLLECTIVE_BYTES", (1024.0, 65536.0))
    monkeypatch.setattr(bench_exchange, "COLLECTIVE_BYTES", (1024.0, 65536.0))
    monkeypatch.setattr(bench, "STAGED_BYTES", (2.0**14, 2.0**16))
    monkeypatch.setattr(bench_exchange, "STAGED_BYTES", (2.0**14, 2.0**16))
    monkeypatch.setattr(bench_operators, "ELEMENTS", (4096, 16384))
    said = []
    machine = bench.measure(device="cpu", most_ranks=2, say=said.append)
    assert msgspec.json.decode(msgspec.json.encode(machine), type=bench.Machine) == machine
    assert all(t.seconds > 0 for many in machine.operators.values() for t in many)
    assert set(machine.collectives) == {f"{op} 2" for op in bench.OPS} and said[-1].endswith("2 processes")
    # torch and what it imports; not a machine's whole memory
    assert 5e7 < machine.base_bytes < machine.memory_bytes
    found = here.write(machine, tmp_path)
    assert found.framework.activation_copies >= 1.0
    try:
        costs = standard(load_framework(here.FRAMEWORK))
        layer = bench.LAYERS[0]
        predicted = simulate(
            parse("dp2 mb1"), bench.model_of(layer), cluster.load("2xhere"),
            Train(global_batch=4, seq_len=layer.seq, dtype="fp32"), costs,
        )  # fmt: skip
        # two microbatches a rank; an exchange costs something
        own = 2 * (machine.passes[0].forward.seconds + machine.passes[0].backward.seconds)
        assert 0.5 * own < predicted.step_time_s < 20 * own
    finally:
        cluster.forget_here()
        measured.forget()
        framework.frameworks.cache_clear()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a system without affinity")
def test_taking_turns_on_a_core_is_measured(monkeypatch):
    monkeypatch.setattr(bench, "LAYERS", bench.LAYERS[1:2])
    monkeypatch.setattr(bench, "REPEATS", 1)
    with only_cores(2):
        found = start(bench._crowding, num_ranks=4, device="cpu")
    assert 0 <= found < 2  # a share; what it is depends on the machine


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a system without affinity")
def test_only_some_cores_are_used_meanwhile():
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError), only_cores(1):
        assert os.sched_getaffinity(0) == {min(before)}
        raise ValueError
    assert os.sched_getaffinity(0) == before


def test_of_repeats_the_slowest_and_the_quickest_fifth_do_not_count():
    """By hand: of five the middle three, in whatever order they came; of fewer all."""
    assert mean([5.0, 1.0, 3.0, 100.0, 4.0]).seconds == 4.0
    assert mean([9.0, 0.1, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 90.0, 900.0]).seconds == 9.0
    assert mean([1.0, 4.0]).seconds == 2.5
