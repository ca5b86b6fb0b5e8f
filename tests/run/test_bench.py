"""Measuring this machine: every operator that is timed runs, and a small round becomes a profile that predicts."""

import os
import time

import msgspec
import pytest
import torch

from meshwright.answer.rank_memory import rank_memory
from meshwright.calibrate import here
from meshwright.cost import framework, load_framework, measured, standard
from meshwright.plan import parse
from meshwright.run import bench, environment
from meshwright.run.bench import operators as bench_operators
from meshwright.run.bench import pace
from meshwright.run.bench import store as bench_kept
from meshwright.run.bench.clock import BenchClock, mean
from meshwright.run.environment import only_cores
from meshwright.run.launch import start
from meshwright.run.world import World
from meshwright.simulate.step import simulate
from meshwright.spec import cluster
from meshwright.spec.workload import Train

LONE = World(rank=0, size=1, local_rank=0, local_size=1, host="here", device=torch.device("cpu"))


@pytest.mark.parametrize("name", list(bench_operators.benches(torch.device("cpu"), torch.float32, bench.FULL)))
def test_an_operator_runs_at_its_smallest_size(name):
    """Forward gives a result for every instance, backward a gradient for every input."""
    some = bench_operators.benches(torch.device("cpu"), torch.float32, bench.FULL)[name][0]
    found = some.make()()
    count = round(1 / some.scale)
    assert count == min(bench.FULL.most_instances, bench.FULL.together // bench.FULL.elements[0])
    assert len(found) % count == 0 and all(torch.isfinite(x).all() for x in found)


def test_what_a_forward_keeps_is_counted_once_and_without_parameters():
    """Of four layers of 64 features for 64 tokens: at least what lowering counts to the byte for fused kernels, and at
    most twice that; a microbatch's, not the step's."""
    layer = bench.FULL.layers[0]._replace(layers=4)
    model, train = bench.model_of(layer), bench.train_of(layer, "fp32")
    run = simulate(bench.plan_of(layer), model, cluster.load("1xh100"), train, standard())
    lowered = rank_memory(run, standard())[0].alive["activations"]
    kept = bench.TimedModel(BenchClock(LONE), layer, "fp32").kept_bytes
    assert lowered <= kept <= 2 * lowered
    assert bench.TimedModel(BenchClock(LONE), layer._replace(layers=8), "fp32").kept_bytes < 2 * kept


SMALL = msgspec.structs.replace(
    bench.QUICK,
    name="small",
    gemm_m=(16.0, 64.0),
    gemm_nk=(32.0, 128.0),
    attention=((4.0, 16.0), (32.0, 128.0), (16.0, 64.0)),
    elementwise=(1024.0, 65536.0),
    elements=(4096, 16384),
    layers=bench.FULL.layers[:3],
    collective_bytes=(1024.0, 65536.0),
    staged_bytes=(2.0**14, 2.0**16),
    rounds=1,
    most_rounds=2,
    # how near its times are is not what is tested
    span_s=2e-3,
    pool_bytes=1 << 20,
    together=1 << 17,
    most_instances=16,
    exchange_calls=(2, 1),
)


@pytest.mark.slow
def test_a_measured_machine_is_one_that_plans_can_be_predicted_for_and_an_interrupted_one_goes_on(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    part, said = tmp_path / "part.json", []
    real = bench.start

    def interrupted(function, *args, **more):
        if function is bench.staging:
            raise KeyboardInterrupt
        return real(function, *args, **more)

    monkeypatch.setattr(bench, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.measure(device="cpu", most_ranks=2, scope=SMALL, file=part)
    before = bench_kept.num_kept(part)
    assert before >= 2  # a round and the memory of a rank
    begun = []

    def counted(function, *args, **more):
        begun.append(function)
        return real(function, *args, **more)

    monkeypatch.setattr(bench, "start", counted)
    machine = bench.measure(
        device="cpu", most_ranks=2, scope=SMALL, file=part, progress=lambda *told: said.append(told)
    )
    assert bench._base not in begun and begun[-2:] == [bench.staging, bench.collectives]
    assert msgspec.json.decode(msgspec.json.encode(machine), type=bench.Machine) == machine
    assert all(t.seconds > 0 for many in machine.operators.values() for t in many)
    assert set(machine.collectives) == {f"{op} 2" for op in bench.OPS}
    # torch and what it imports; not a machine's whole memory
    assert 5e7 < machine.base_bytes < machine.memory_bytes
    step_s, found = stepped(machine, tmp_path, monkeypatch)
    assert found.framework.activation_copies >= 1.0
    # what is predicted is made of what was measured: where everything took twice as long, a step does too
    slower = msgspec.convert(doubled(msgspec.to_builtins(machine)), bench.Machine)
    assert stepped(slower, tmp_path / "slower", monkeypatch)[0] == pytest.approx(2 * step_s, rel=0.1)


def stepped(machine, folder, monkeypatch):
    """The predicted step of two ranks on a machine with these measurements, and what was written of it."""
    monkeypatch.setenv("MESHWRIGHT_HOME", str(folder))
    # other tests share the cores with what is measured: whether its fit is to be believed is not what is tested
    found = here.write(machine, folder, anyway=True)
    layer = SMALL.layers[0]
    try:
        run = simulate(
            parse("dp2 mb1"), bench.model_of(layer), cluster.load("2xhere"),
            Train(global_batch=4, seq_len=layer.seq, dtype="fp32"), standard(load_framework(here.FRAMEWORK)),
        )  # fmt: skip
        return run.step_time_s, found
    finally:
        cluster.forget_here()
        measured.forget()
        framework.frameworks.cache_clear()


def doubled(value):
    """Plain values with every measured time twice as long."""
    if isinstance(value, dict):
        timed = {"seconds", "spread"} <= value.keys()
        return {k: 2 * v if timed and k in ("seconds", "busy") else doubled(v) for k, v in value.items()}
    return [doubled(v) for v in value] if isinstance(value, list | tuple) else value


def test_what_is_kept_of_another_machine_or_of_other_sizes_is_measured_anew(tmp_path):
    file = tmp_path / "part.json"
    assert bench_kept.KeptParts(file, {"cores": 2, "scope": SMALL}).part("a", lambda: {"x": (1.0,)}) == {"x": [1.0]}
    again = bench_kept.KeptParts(file, {"cores": 2, "scope": SMALL})
    assert again.part("a", lambda: pytest.fail("measured again")) == {"x": [1.0]}
    assert bench_kept.KeptParts(file, {"cores": 4, "scope": SMALL}).part("a", lambda: 5) == 5
    file.write_text("{")  # damaged
    assert bench_kept.KeptParts(file, {}).part("a", lambda: 6) == 6 and bench_kept.num_kept(file) == 1
    bench_kept.forget(file)
    assert bench_kept.num_kept(file) == 0 and not file.exists()


def test_a_part_that_cannot_be_kept_is_measured_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    assert bench_kept.KeptParts(tmp_path / "file" / "part.json", {}).part("a", lambda: 5) == 5


def rounds_of(*seconds, steps=()):
    """Rounds of one benchmark a column, and one model."""
    models = steps or [[1.0, 1.0]] * len(seconds)
    return [
        {"seconds": {"gemm fp32": list(row)}, "models": [{"seconds": {"step": step}, "kept_bytes": 0.0}]}
        for row, step in zip(seconds, models, strict=True)
    ]


def test_what_spreads_is_gone_through_again_and_the_rest_is_not():
    """By hand, of a scope that lets 5% be: 1.00 and 1.04 agree, 1.0 and 1.2 do not."""
    scope = msgspec.structs.replace(SMALL, spread=0.05, layers=SMALL.layers[:1])
    found = rounds_of((1.00, 1.0, None), (1.04, 1.2, 3.0))
    assert bench._unsettled(found, scope) == {"gemm fp32": [1], bench.MODELS: []}
    assert bench._timed(found)["gemm"]["fp32"][2].seconds == 3.0
    apart = rounds_of((1.0,), (1.0,), steps=[[1.0, 1.0], [1.3, 1.3]])
    assert bench._unsettled(apart, scope)[bench.MODELS] == [0]


def test_rounds_end_when_all_is_settled_or_patience_does(monkeypatch):
    asked, now = [], iter([0.0, 5.0, 20.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(bench, "start", lambda function, scope, wanted, *rest, **more: asked.append(wanted) or {
        "seconds": {"gemm fp32": [float(len(asked))]}, "models": []})  # fmt: skip
    patient = msgspec.structs.replace(SMALL, layers=(), rounds=2, most_rounds=9, patience_s=15.0)
    bench._rounds(bench_kept.KeptParts(None, {}), patient, bench._silent, 1, "cpu")
    assert asked == [None, None, {"gemm fp32": [0], bench.MODELS: []}]  # the fourth would begin 20 s after the first


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a system without affinity")
def test_taking_turns_on_a_core_is_measured(monkeypatch):
    monkeypatch.setattr(bench, "FULL", msgspec.structs.replace(bench.FULL, layers=bench.FULL.layers[1:2]))
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
    """By hand: of five the middle three, in whatever order they came; of three and four those in the middle; of two
    both."""
    assert mean([5.0, 1.0, 3.0, 100.0, 4.0]).seconds == 4.0
    assert mean([9.0, 0.1, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 90.0, 900.0]).seconds == 9.0
    assert mean([1.0, 100.0, 2.0]).seconds == 2.0
    assert mean([1.0, 100.0, 2.0, 4.0]).seconds == 3.0
    assert mean([1.0, 4.0]).seconds == 2.5


def test_a_quick_measurement_has_the_sizes_of_a_small_model_and_fewer_of_all():
    """The demo's: 256 features, 704 in the feed-forward, heads of 32, 128 tokens, messages up to its gradients."""
    quick, full = bench.QUICK, bench.FULL
    assert min(quick.gemm_nk) <= 128 and max(quick.gemm_nk) >= 704 and max(quick.gemm_m) >= 8 * 128
    assert all(min(axis) <= n <= max(axis) for axis, n in zip(quick.attention, (8 * 8, 128, 32), strict=True))
    assert max(quick.collective_bytes) >= 4 * 3.2e6 and quick.rounds < full.rounds
    sizes = [len(scope.gemm_m) * len(scope.gemm_nk) ** 2 for scope in (quick, full)]
    assert sizes[0] < sizes[1] / 2 and len(quick.layers) < len(full.layers)


def test_a_gpu_is_measured_at_the_sizes_of_large_models_and_a_processor_at_those_of_small_ones():
    assert bench.scope.on_kind(bench.FULL, "cpu") is bench.FULL
    assert bench.scope.on_kind(SMALL, "cuda") is SMALL
    for scope in (bench.FULL, bench.QUICK):
        gpu = bench.scope.on_kind(scope, "cuda")
        assert gpu.name == scope.name and max(gpu.gemm_nk) == 14336.0  # Llama-3-8B's MLP
        assert any(layer.hidden == 4096 for layer in gpu.layers)


def test_what_products_lose_beside_an_exchange_is_a_share(monkeypatch):
    monkeypatch.setattr(bench, "REPEATS", 2)
    found = start(bench._slowdown, num_ranks=2, device="cpu")
    assert 0.0 <= found <= 1.0
    assert bench._slowdown(LONE) == 0.0  # nobody to exchange with


def test_the_reference_probe_times_a_product_and_a_copy_on_a_thread_each_in_about_a_second(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    begun, seen = time.perf_counter(), []
    real = pace.start

    def counted(function, *args, **more):
        seen.append((environment.num_threads(), more["num_ranks"]))
        return real(function, *args, **more)

    monkeypatch.setattr(pace, "start", counted)
    found = pace.now("cpu", 1)
    assert set(found) == {"product", "copy", "share"} and all(value > 0 for value in found.values())
    assert found["share"] <= 1.05 and time.perf_counter() - begun < 10
    assert seen == [(1, 1)] and environment.num_threads() == 2
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "x"), monkeypatch.setenv("MASTER_PORT", "1")
    assert pace.now("cpu", 1) is None  # a launcher's process starts no others
