"""The profile of this machine: tables between their points, operators, and host times found again."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.answer.rank_memory import rank_memory
from meshwright.calibrate import here
from meshwright.cli import main
from meshwright.cost.chain import EXTRAPOLATED, Costs
from meshwright.cost.framework import Framework, frameworks
from meshwright.cost.measured import GridTable, MeasuredLink
from meshwright.cost.standard import standard
from meshwright.errors import MeshwrightError
from meshwright.lower.entry import Entry
from meshwright.plan import parse
from meshwright.run import bench
from meshwright.run.bench import operators as bench_operators
from meshwright.run.bench import store as bench_kept
from meshwright.simulate.layer import cost
from meshwright.simulate.step import simulate
from meshwright.spec.architecture import HEAD
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.work import Collective, Elementwise, Gemm, Group, Hop
from tests.calibrate.machines import BYTES, COPIES, FLOPS, MODEL, TRAIN, machine, pass_of


def test_a_table_is_exact_on_its_grid_and_a_power_law_between():
    table = GridTable(axes=((1.0, 4.0, 16.0), (10.0, 1000.0)), seconds=(1.0, 100.0, 2.0, 200.0, 4.0, 400.0))
    for i, x in enumerate((1.0, 4.0, 16.0)):
        for j, y in enumerate((10.0, 1000.0)):
            assert table.at((x, y)) == (pytest.approx(table.seconds[2 * i + j]), True)
    # seconds = x^0.5 y / 10 everywhere
    assert table.at((2.0, 100.0))[0] == pytest.approx(2**0.5 * 10)
    assert table.at((100.0, 100.0))[1] is False


def test_prices_follow_the_tables_and_say_when_they_reach_beyond(at_home):
    here.write(machine([pass_of(bench.FULL.layers[0])]), at_home)
    device = load("2xhere").islands[0].device
    link = MeasuredLink(here.tables(machine()))
    inside = link(Gemm(m=100, n=200, k=300, dtype="fp32"), device)
    assert inside.seconds == pytest.approx(2 * 100 * 200 * 300 / FLOPS, rel=1e-6)
    beyond = link(Gemm(m=100, n=200, k=80_000, dtype="fp32"), device)
    assert beyond.source.endswith(EXTRAPOLATED) and beyond.sigma > inside.sigma
    assert link(Gemm(m=8, n=8, k=8, dtype="bf16"), device) is None  # not measured: the next link's
    assert link(Gemm(m=8, n=8, k=8, dtype="fp32"), load("1xh100").islands[0].device) is None
    three = link(Elementwise(num_bytes=3 * 4096.0, kernels=3), device)
    assert three.seconds == pytest.approx(3 * (1e-6 + 4096 / BYTES), rel=0.02)
    group = Group(size=2, hops=())
    assert link(Collective(op="send", num_bytes=4096.0, group=group), device).seconds == pytest.approx(
        1e-4 + 4096e-9, rel=1e-6
    )
    away = Hop(name="100mbit", members=2, gb_s=0.0125, latency_us=18.0, below=1, topology="fat_tree", scale_out=True)
    assert link(Collective(op="send", num_bytes=4096.0, group=Group(size=2, hops=(away,))), device) is None


def test_an_operator_that_was_timed_costs_what_it_took_and_no_host_time_beside(at_home):
    known = machine()
    costs = Costs(
        Framework(name="x", elementwise_passes=9.0, host_us_per_kernel=1e6), (MeasuredLink(here.tables(known)),)
    )
    device = here._one(known).islands[0].device
    size = 2 * 4.0 * bench.FULL.elements[2]
    priced = costs.price(Elementwise(num_bytes=size, operator="rmsnorm"), device)
    assert priced.seconds == pytest.approx(1e-5 + COPIES * size / BYTES)
    entry = Entry("norm", "compute", Elementwise(num_bytes=size, operator="rmsnorm"), ())
    assert cost([entry], "F", device, costs).seconds == pytest.approx(priced.seconds)
    # what was not timed by name is so many passes over memory, each kernel issued
    unknown = Entry("norm", "compute", Elementwise(num_bytes=size, operator="softmax"), ())
    assert cost([unknown], "F", device, costs).seconds > 9.0


def test_an_operator_that_was_timed_on_a_gpu_is_as_it_runs_and_issued_beside_it(at_home):
    """By hand: 2 ms of the device, whatever its kernels; the host issues 1 x 9 of them, half a millisecond each."""
    known = msgspec.structs.replace(machine(), kind="cuda", cores=1)
    size = 2 * 4.0 * bench.FULL.elements[2]
    took = 1e-5 + COPIES * size / BYTES
    entry = Entry("norm", "compute", Elementwise(num_bytes=size, operator="rmsnorm"), ())
    for each_us, expected in ((0.0, took), (500.0, 4.5e-3)):
        framework = Framework(name="x", elementwise_passes=9.0, host_us_per_kernel=each_us)
        costs = Costs(framework, (MeasuredLink(here.tables(known)),))
        assert cost([entry], "F", here._one(known).islands[0].device, costs).seconds == pytest.approx(expected)
    assert took < 4.5e-3


@pytest.mark.parametrize("gated", [True, False])
def test_operators_are_timed_at_the_bytes_that_lowering_counts(gated):
    """Of a model as wide as the timed operators, with as many tokens, every operator has the bytes of one point."""
    width, tokens = bench_operators.WIDTH, 16
    model = transformer(
        layers=1, hidden=width, heads=4, vocab=bench_operators.VOCAB, ffn=width, gated=gated, max_seq_len=tokens
    )
    train, costs = Train(global_batch=1, seq_len=tokens, dtype="fp32"), Costs()
    found = simulate(parse("dp1 mb1"), model, load("1xh100"), train, costs)
    elements = {
        "rotary": tokens * 8 * bench_operators.HEAD,  # four heads of queries and four of keys
        "gated activation": tokens * 2 * width,
        "loss": tokens * bench_operators.VOCAB,
    }
    seen = set()
    for layer in found.lowered.layer_passes:
        for entry in layer.entries:
            name = getattr(entry.work, "operator", "")
            if not name or name in seen:
                continue
            seen.add(name)
            count = elements.get(name.removesuffix(" backward"), tokens * width)
            point = bench_operators.sizes(name, 4, bench.FULL)[0] / bench.FULL.elements[0] * count
            assert entry.work.num_bytes == pytest.approx(point), name
    own = {"rmsnorm", "rotary", "gated activation"} if gated else {"layernorm", "activation"}
    both = {f"{name}{way}" for name in own | {"residual", "embedding", "loss"} for way in ("", " backward")}
    assert seen == both


def test_a_bias_is_a_kernel_of_its_own_here_and_part_of_the_product_elsewhere(at_home):
    """Read and written once forward, and its gradient read once: the bytes at which the operator is timed."""
    here.write(machine([pass_of(bench.FULL.layers[0])]), at_home)
    device, link = load("2xhere").islands[0].device, MeasuredLink(here.tables(machine()))
    tokens = bench.FULL.elements[2] // bench_operators.WIDTH
    for bias, name in (("added", "bias"), ("summed", "bias backward")):
        sizes = (256, bench_operators.WIDTH, tokens) if bias == "summed" else (tokens, bench_operators.WIDTH, 256)
        product = Gemm(**dict(zip("mnk", sizes, strict=True)), dtype="fp32")
        biased = msgspec.structs.replace(product, bias=bias)
        added = 1e-5 + COPIES * bench_operators.sizes(name, 4, bench.FULL)[2] / BYTES
        assert link(biased, device).seconds == pytest.approx(link(product, device).seconds + added)
        h100 = load("1xh100").islands[0].device
        assert standard().price(biased, h100).seconds == standard().price(product, h100).seconds


@pytest.mark.parametrize("gated", [True, False])
def test_products_have_the_biases_of_their_model(gated):
    model = transformer(layers=1, hidden=64, heads=4, vocab=128, ffn=128, gated=gated, max_seq_len=64)
    found = simulate(parse("dp1 mb1"), model, load("1xh100"), TRAIN, Costs())
    stages = found.lowered.stages
    for unit in {u for composition in stages.compositions for u in composition.units}:
        for entry in (e for which in ("F", "BW") for e in stages.layer_pass(unit, which).entries):
            if isinstance(entry.work, Gemm):
                biased = not gated and unit.kind != HEAD and not entry.name.endswith(" backward")
                what = "summed" if entry.work.accumulate else "added"
                assert entry.work.bias == (what if biased else ""), entry.name


def test_kernels_take_longer_in_a_model_by_the_framework_s_slowdown(at_home):
    here.write(machine([pass_of(bench.FULL.layers[0])]), at_home)
    entry = Entry("product", "compute", Gemm(m=256, n=256, k=256, dtype="fp32"), ())
    for device, times in ((load(on).islands[0].device, 1.25) for on in ("2xhere", "1xh100")):
        links = (MeasuredLink(here.tables(machine())),)
        alone, inside = (
            cost([entry], "F", device, Costs(Framework(name="x", host_us_per_kernel=0.0, kernel_slowdown=s), links))
            for s in (0.0, 0.25)
        )
        assert inside.seconds == pytest.approx(times * alone.seconds)


def test_host_times_that_passes_were_made_with_are_found_again():
    known = Framework(
        name="meshwright-run",
        elementwise_passes=1.0,
        host_us_per_kernel=25.0,
        host_us_per_backward_kernel=11.0,
        host_us_per_collective=0.0,
        host_us_per_pass=400.0,
        kernel_slowdown=0.04,
    )
    empty = machine([pass_of(layer) for layer in bench.FULL.layers])
    link = MeasuredLink(msgspec.structs.replace(here.tables(empty), operators=here.tables(machine()).operators))
    times = here._times(empty, here._one(empty), link, known).reshape(-1, 3)
    found = here.fit(
        machine([pass_of(layer, *t, optimizer=1e-9) for layer, t in zip(bench.FULL.layers, times, strict=True)])
    )
    for name in here.FITTED:
        assert getattr(found.framework, name) == pytest.approx(getattr(known, name), rel=0.01), name
    assert found.mean_error < 0.001


def test_times_to_issue_a_gpu_s_kernels_are_found_though_the_kernels_hide_short_ones(monkeypatch):
    """Passes that issuing bounds, made with 45 and 50 microseconds, on a device that is a thousand times as fast."""
    for law in ("FLOPS", "BYTES"):
        monkeypatch.setitem(globals(), law, globals()[law] * 1e3)
    known = Framework(
        name="meshwright-run", elementwise_passes=here._unfused(here.tables(machine())), host_us_per_kernel=45.0,
        host_us_per_backward_kernel=50.0, host_us_per_collective=0.0, host_us_per_pass=0.0, kernel_slowdown=0.0,
    )  # fmt: skip
    gpu = {"kind": "cuda", "cores": 1}
    empty = msgspec.structs.replace(machine([pass_of(layer) for layer in bench.FULL.layers]), **gpu)
    link = MeasuredLink(msgspec.structs.replace(here.tables(empty), operators=here.tables(machine()).operators))
    times = here._times(empty, here._one(empty), link, known).reshape(-1, 3)
    passes = [pass_of(layer, *t, optimizer=1e-9) for layer, t in zip(bench.FULL.layers, times, strict=True)]
    found = here.fit(msgspec.structs.replace(machine(passes), **gpu))
    assert found.framework.host_us_per_kernel == pytest.approx(45.0, rel=0.02)
    assert found.framework.host_us_per_backward_kernel == pytest.approx(50.0, rel=0.02)


def test_how_sure_a_profile_is_comes_from_models_that_it_was_not_fitted_to():
    """Of models that follow the constants exactly one is made to take three times as long: in sample the fit gives way
    to it, left out it is missed by what it is off."""
    known = Framework(name="x", elementwise_passes=1.0, host_us_per_kernel=300.0, host_us_per_pass=0.0)
    empty = machine([pass_of(layer) for layer in bench.FULL.layers])
    link = MeasuredLink(msgspec.structs.replace(here.tables(empty), operators=here.tables(machine()).operators))
    times = here._times(empty, here._one(empty), link, known).reshape(-1, 3)
    times[0] *= 3
    found = here.fit(
        machine([pass_of(layer, *t, optimizer=1e-9) for layer, t in zip(bench.FULL.layers, times, strict=True)])
    )
    in_sample = float(np.sqrt(np.mean([(p / m - 1) ** 2 for _, m, p in found.rows])))
    # of nine models one is off by two thirds: alone that is 0.667 / 3
    assert found.framework.step_sigma > 0.6 / 3 and in_sample < found.framework.step_sigma
    alone = here.fit(machine([pass_of(bench.FULL.layers[0], *times[0], optimizer=1e-9)]))
    assert "no second model" in alone.framework.source


def contradicted():
    """A machine on which every other model takes six times as long as its kernels."""
    empty = machine([pass_of(layer) for layer in bench.FULL.layers])
    known = Framework(name="x", elementwise_passes=1.0, host_us_per_kernel=30.0, host_us_per_pass=0.0)
    link = MeasuredLink(msgspec.structs.replace(here.tables(empty), operators=here.tables(machine()).operators))
    times = here._times(empty, here._one(empty), link, known).reshape(-1, 3)
    times[::2] *= 6
    passes = [pass_of(layer, *t, optimizer=1e-9) for layer, t in zip(bench.FULL.layers, times.tolist(), strict=True)]
    paces = {"product": [1e-3, 1.2e-3], "copy": [2e-3, 2e-3]}
    return msgspec.structs.replace(machine(passes), pace=paces, others=0.4, made=86400)


def test_a_profile_that_models_left_out_contradict_is_not_written_unless_it_is_kept_anyway(
    at_home, monkeypatch, capsys
):
    begun = []

    def measured(*, file, **_):
        found = bench_kept.KeptParts(file, {"machine": "test"})
        found.part("all", lambda: begun.append(1) or 1)
        return contradicted()

    monkeypatch.setattr(bench, "measure", measured)
    assert main(["calibrate", "--here"]) == 1
    said = capsys.readouterr()
    assert "! not to be believed: the time of models that the fit did not see is off by" in said.out
    assert "the same product and copy took +20% in the slowest round" in said.out
    assert "! other work had the cores for 40% of the time" in said.out
    assert "error[K016]" in said.err and "--anyway" in said.err and str(at_home) in said.err
    assert [f.name for f in at_home.iterdir()] == ["here.part.json"]
    # what was refused is measured anew, or kept as it is
    assert main(["calibrate", "--here"]) == 1 and len(begun) == 2
    assert main(["calibrate", "--here", "--anyway"]) == 0 and len(begun) == 2
    assert {f.name for f in at_home.iterdir()} == {"here.json", "here.toml", "framework.toml"}
    assert frameworks()[here.FRAMEWORK].flagged
    assert main(["calibrate", "--data", str(at_home), "--anyway"]) == 2


def test_a_prediction_of_this_machine_says_when_it_was_measured_and_at_which_pace(at_home):
    known = machine([pass_of(layer) for layer in bench.FULL.layers])
    for made, pace in ((0, {}), (86400, {"product": [1e-3, 1.2e-3], "copy": [2e-3, 2e-3]})):
        here.write(msgspec.structs.replace(known, made=made, pace=pace), at_home)
        found = predict(MODEL, load("1xhere"), TRAIN, parse("dp1 mb1"), detail=False)
        assert any("measurements of this machine, 1970-01-02 00:00 UTC" in w for w in found.warnings) == bool(made)
        assert found.timeline.records.get("pace", {}).get("product", [0]) == ([1.1e-3] if made else [0])
    other = predict(MODEL, load("1xh100"), TRAIN, parse("dp1 mb1"), detail=False)
    assert "pace" not in other.timeline.records


def test_bytes_kept_for_a_backward_and_held_by_a_rank_are_the_measured_ones(at_home):
    empty = machine([pass_of(layer) for layer in bench.FULL.layers])
    cluster, link = here._one(empty), MeasuredLink(here.tables(empty))
    costs = Costs(Framework(name="x"), (link,))
    passes = []
    for layer in bench.FULL.layers:
        run = simulate(bench.plan_of(layer), bench.model_of(layer), cluster, bench.train_of(layer, "fp32"), costs)
        held = rank_memory(run, costs)[0].alive
        passes.append(pass_of(layer, kept_bytes=1.5 * held["activations"] + held["logits"]))
    found = here.write(machine(passes), at_home).framework
    assert found.activation_copies == pytest.approx(1.5, rel=0.01) and found.context_bytes == 3e8
    frameworks.cache_clear()
    written = frameworks()[found.name]
    assert all(getattr(written, name) == getattr(found, name) for name in (*here.FITTED, *here.GIVEN))


def test_a_constant_never_goes_below_nothing():
    slopes = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert here._least_squares(slopes, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])


def test_a_damaged_file_is_refused_with_the_way_to_mend_it(at_home):
    here.write(machine([pass_of(bench.FULL.layers[0])]), at_home)
    (at_home / "here.json").write_text("{")
    from meshwright.cost import measured

    measured.forget()
    with pytest.raises(MeshwrightError, match="calibrate --here"):
        standard().price(Gemm(m=8, n=8, k=8, dtype="fp32"), load("1xhere").islands[0].device)
    # what does not run here is none of its business
    assert standard().price(Gemm(m=8, n=8, k=8), load("1xh100").islands[0].device).seconds > 0
