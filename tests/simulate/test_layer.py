"""The lowest zoom level: a pass over one layer, timed by hand."""

import msgspec
import pytest
from hypothesis import given, settings

from meshwright.answer.predict import predict
from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs
from meshwright.cost.chain import Estimate
from meshwright.cost.framework import Defaults, Framework
from meshwright.cost.roofline import contention
from meshwright.graph import QUEUES
from meshwright.lower.entry import Entry
from meshwright.plan import parse
from meshwright.simulate.layer import cost
from meshwright.spec.cluster import load_device
from meshwright.spec.workload import Train
from meshwright.work import Collective, Elementwise, Gemm, Group, GroupedGemm
from tests.random_plans import CLUSTERS, LLAMA, legal_plans

H100 = load_device("h100")
GROUP = Group(size=2, hops=())
#: Long enough that issuing kernels never bounds a pass.
SECONDS = {"gemm": 2.0, "elementwise": 1.0, "collective": 3.0}
GEMM, KERNEL = Gemm(m=1, n=1, k=1), Elementwise(num_bytes=1.0, fused=True)
GATHER = Collective(op="all_gather", num_bytes=1.0, group=GROUP)


def given_times(work, device):
    name = {Gemm: "gemm", Elementwise: "elementwise", Collective: "collective"}[type(work)]
    cause = "network" if name == "collective" else name
    return Estimate(SECONDS[name], cause, "given", 0.0)


COSTS = Costs(links=(given_times,))


def parts(*entries):
    """Seconds by cause of a pass: entries are (queue, work, what it waits for, repeated?)."""
    program = [Entry(f"{i}", q, work, after, again) for i, (q, work, after, again) in enumerate(entries)]
    found = cost(program, "F", H100, COSTS)
    return {name: value for name, value in zip(PRICED, found.parts.tolist()) if value}


def test_a_collective_between_two_kernels_is_exposed_whole():
    found = parts(("compute", GEMM, (), False), ("tp", GATHER, (0,), False), ("compute", KERNEL, (1,), False))
    assert found == {"gemm": 2.0, "tp": 3.0, "elementwise": 1.0}


def test_a_collective_beside_a_kernel_is_exposed_by_its_rest_and_takes_some_sms():
    # 3 s beside 2 s: 1 s exposed, and the 2 s it hides behind are slowed by the SMs it occupies
    found = parts(("compute", GEMM, (), False), ("ep", GATHER, (), False), ("compute", KERNEL, (0, 1), False))
    assert found == pytest.approx({"gemm": 2.0, "ep": 1.0 + 2.0 * contention(H100), "elementwise": 1.0})


def test_a_collective_after_the_last_kernel_is_exposed():
    assert parts(("compute", GEMM, (), False), ("tp", GATHER, (0,), False)) == {"gemm": 2.0, "tp": 3.0}


def test_what_is_repeated_is_recompute():
    found = parts(("compute", GEMM, (), True), ("compute", KERNEL, (0,), True), ("compute", GEMM, (1,), False))
    assert found == {"recompute": 3.0, "gemm": 2.0}


def test_a_pass_of_nothing_takes_no_time():
    assert parts() == {}


def test_many_small_kernels_are_bound_by_the_host():
    fast = Costs(links=(lambda work, device: Estimate(1e-9, "elementwise", "given", 0.0),))
    program = [Entry(str(i), "compute", KERNEL, (i - 1,) if i else (), False) for i in range(100)]
    found = cost(program, "F", H100, fast)
    issue = 100 * fast.framework.host_us_per_kernel * 1e-6
    assert found.seconds == pytest.approx(issue)
    assert found.parts[CAUSE["host"]] == pytest.approx(issue - 100e-9)


def test_a_pass_that_is_a_cuda_graph_costs_the_host_one_launch_but_not_one_with_experts():
    """A thousand kernels of no time are issued in 2.5 us; where experts' products are among them, one by one, 10 us
    each, and the product's call for its one expert in 5 us more."""
    given = Framework(name="graphed", host_us_per_kernel=10.0, defaults=Defaults(graphs=True))
    costs = Costs(given, links=(lambda work, device: Estimate(0.0, "gemm", "given", 0.0),))
    entries = [Entry(f"{i}", "compute", GEMM, (), False) for i in range(1000)]
    assert cost(entries, "F", H100, costs).parts[CAUSE["host"]] == pytest.approx(2.5e-6)
    experts = Entry("experts up", "compute", GroupedGemm(groups=1, rows=1, n=1, k=1), (), False)
    assert cost([*entries, experts], "F", H100, costs).parts[CAUSE["host"]] == pytest.approx(1001 * 10e-6 + 5e-6)


def test_a_backward_s_kernels_take_the_host_as_long_as_was_told_and_repeated_ones_as_in_a_forward():
    told = Framework(name="x", host_us_per_kernel=40.0, host_us_per_backward_kernel=10.0)
    quick = Costs(told, links=(lambda work, device: Estimate(0.0, "elementwise", "given", 0.0),))
    one = [Entry("one", "compute", Elementwise(num_bytes=1.0, fused=True), (), False)]
    again = [one[0]._replace(again=True)]
    for program, which, us in ((one, "F", 40), (one, "BW", 10), (one, "W", 10), (again, "BW", 40)):
        assert cost(program, which, H100, quick).seconds == pytest.approx(us * 1e-6)
    untold = Costs(msgspec.structs.replace(told, host_us_per_backward_kernel=None), links=quick._links)
    assert cost(one, "BW", H100, untold).seconds == pytest.approx(40e-6)
    assert cost(one, "BW", H100, quick.faster("host", 2.0)).seconds == pytest.approx(5e-6)


@settings(max_examples=20)
@given(legal_plans())
def test_ten_percent_more_of_one_thing_makes_a_step_at_most_that_much_faster(question):
    plan, model, where, train = question
    found = predict(model, where, train, plan)
    assert found.sensitivities == tuple(sorted(found.sensitivities, key=lambda s: s.change))
    for one in found.sensitivities:
        assert 1 / 1.1 - 1 - 1e-9 <= one.change <= 1e-9, one


def test_there_is_a_zoom_for_every_kind_of_unit_and_pass():
    train = Train(global_batch=64, seq_len=2048)
    for words, passes in (("tp4 dp16 mb1", 2), ("tp4 pp4 dp4 zb-h1 mb1", 3)):
        found = predict(LLAMA, CLUSTERS["64xh100"], train, parse(words))
        assert len({zoom.name for zoom in found.zooms}) == len(found.zooms) == 3 * passes  # embedding, layer, head
        for zoom in found.zooms:
            assert zoom.timeline.makespan_s > 0
            assert {QUEUES[q] for q in zoom.timeline.queue} <= {"compute", "tp"}
