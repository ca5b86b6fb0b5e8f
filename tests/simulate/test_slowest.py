"""Devices that wait for one another go at the pace of the slowest of them."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.cost import Costs
from meshwright.cost.framework import Framework
from meshwright.plan import parse
from meshwright.simulate.price import Pricer
from meshwright.simulate.step import simulate
from meshwright.simulate.zoom import zooms
from meshwright.spec.cluster import load, load_device
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=4, hidden=1024, heads=8, ffn=4096, vocab=8192, max_seq_len=1024)
H100 = load_device("h100_sxm")
#: Nothing but kernels: what is left is the devices' own pace.
KERNELS = Framework(
    name="kernels alone",
    elementwise_passes=1.0,
    host_us_per_kernel=0.0,
    host_us_per_collective=0.0,
    host_us_per_pass=0.0,
)


def spread_over(cluster, spread):
    island = cluster.islands[0]
    device = msgspec.structs.replace(island.device, speed_spread=spread)
    return msgspec.structs.replace(cluster, islands=(msgspec.structs.replace(island, device=device),))


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_the_slowest_of_many_is_the_mean_of_drawn_maxima(count):
    drawn = np.random.default_rng(count).standard_normal((4000, count)).max(axis=1)
    expected = 1 + H100.speed_spread * drawn.mean()
    # the mean of 4,000 maxima is known to about 1% of a standard deviation, the approximation to 2%
    assert H100.slowest_of(count) == pytest.approx(expected, abs=0.04 * H100.speed_spread)


def test_one_device_waits_for_none_and_cores_of_a_processor_are_alike():
    assert H100.slowest_of(1) == 1.0
    assert msgspec.structs.replace(H100, speed_spread=0.0).slowest_of(512) == 1.0
    assert msgspec.structs.replace(H100, cores=2).slowest_of(8) == 1.0


def test_every_kernel_of_a_step_takes_what_it_takes_on_the_slowest():
    """Eight replicas whose exchanges hide: the step's kernels alone, 1.5% * 1.43 longer."""
    train, plan = Train(global_batch=8, seq_len=1024), parse("dp8 mb1")
    alike, apart = (
        simulate(plan, MODEL, spread_over(load("8xh100"), s), train, Costs(KERNELS)) for s in (0.0, H100.speed_spread)
    )
    kernels = [i for i, program in enumerate(alike.lowered.programs) if program.kind == "pass"]
    ratio = apart.priced.durations[kernels] / alike.priced.durations[kernels]
    beside = [bool(alike.lowered.programs[i].beside) for i in kernels]
    assert all(r == pytest.approx(H100.slowest_of(8)) for r, b in zip(ratio, beside) if not b)
    assert not all(beside)


def test_a_lone_device_is_predicted_as_its_kernels_were_measured():
    train, plan = Train(global_batch=1, seq_len=1024), parse("dp1 mb1")
    alike, apart = (predict(MODEL, spread_over(load("1xh100"), s), train, plan).step_time_s for s in (0.0, 0.05))
    assert alike == apart


def test_a_zoomed_layer_takes_what_its_pass_takes():
    train, cluster, plan = Train(global_batch=8, seq_len=1024), load("8xh100"), parse("dp8 mb1")
    run = simulate(plan, MODEL, cluster, train, Costs(KERNELS))
    pricer, stages = Pricer(Costs(KERNELS)), run.lowered.stages
    forward, backward = (z for z in zooms(run.lowered, Costs(KERNELS)) if z.name.endswith("a layer"))
    (unit,) = {u for composition in stages.compositions for u in composition.units if u.kind == 0}
    site = run.lowered.programs[0].site
    for zoom, which in ((forward, "F"), (backward, "BW")):
        assert zoom.timeline.makespan_s == pytest.approx(pricer.layer(stages.layer_pass(unit, which), site).seconds)
