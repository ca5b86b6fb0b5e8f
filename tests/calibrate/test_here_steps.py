"""Steps on this machine's profile: ranks that share cores, their collectives, copies and updates."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.calibrate import here
from meshwright.causes import CAUSE
from meshwright.compare import AROUND, compare
from meshwright.cost.chain import Costs
from meshwright.cost.framework import Framework
from meshwright.cost.measured import MeasuredLink
from meshwright.graph import KIND
from meshwright.plan import parse
from meshwright.run import bench
from meshwright.simulate.cores import processor_seconds
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from meshwright.work import Collective, Group, Staging
from tests.calibrate.machines import MODEL, TRAIN, machine, pass_of


def _step(cluster, plan):
    plan = parse(plan)
    costs = Costs(Framework(name="x", host_us_per_pass=0.0), (MeasuredLink(here.tables(machine())),))
    return simulate(plan, MODEL, cluster, TRAIN, costs)


def test_twice_as_many_ranks_as_cores_take_twice_as_long_to_compute(at_home):
    quiet = msgspec.structs.replace(machine([pass_of(layer) for layer in bench.FULL.layers]), comm_slowdown=0.0)
    here.write(quiet, at_home)
    two, four = (_step(load(f"{n}xhere"), f"dp{n} mb1 overlap=none") for n in (2, 4))
    passes = [float((r.end_s - r.start_s)[np.isin(r.lowered.graph.kind, (0, 3))].sum()) for r in (two, four)]
    # half the microbatches a rank, each at half the speed
    assert passes[1] == pytest.approx(passes[0], rel=1e-9)


def _apart(seconds, busy):
    """The machine's collectives with the same time and processor time at every size, from 2 ranks to 4."""

    def table(n):
        return [bench.TimedRepeats(seconds[n], 0.0, busy[n]) for _ in bench.FULL.collective_bytes]

    quiet = machine([pass_of(layer) for layer in bench.FULL.layers])
    return msgspec.structs.replace(quiet, collectives={f"{op} {n}": table(n) for op in bench.OPS for n in (2, 4)})


def test_of_more_ranks_than_cores_a_collective_s_processor_time_came_one_after_the_other(at_home):
    # 2 ranks on 2 cores: 5 ms of which 1 ms works; 4 ranks: 9 ms, of which 3 ms on either of the cores' two ranks
    known = _apart({2: 5e-3, 4: 9e-3}, {2: 1e-3, 4: 3e-3})
    here.write(known, at_home)
    device, link = load("2xhere").islands[0].device, MeasuredLink(here.tables(known))
    for ranks, seconds, wait in ((2, 5e-3, 4e-3), (4, 6e-3, 3e-3)):
        found = link(Collective(op="all_reduce", num_bytes=4096.0, group=Group(size=ranks, hops=())), device)
        assert (found.seconds, found.wait) == (pytest.approx(seconds), pytest.approx(wait))


def test_ranks_that_share_cores_share_the_work_of_collectives_and_not_their_waiting(at_home):
    known = _apart({2: 5e-3, 4: 9e-3}, {2: 1e-3, 4: 3e-3})
    here.write(known, at_home)
    costs = Costs(Framework(name="x", host_us_per_pass=0.0), (MeasuredLink(here.tables(known)),))
    found = simulate(parse("tp2 dp2 mb4 overlap=none"), MODEL, load("4xhere"), TRAIN, costs)
    (forward,) = np.unique(found.lowered.graph.cost_key[found.lowered.graph.kind == 0])
    seconds, wait = found.priced.durations[forward], found.priced.wait[forward]
    # 4 layers with 4 collectives each, and those of the head
    assert wait == pytest.approx(4e-3 * round(wait / 4e-3)) and round(wait / 4e-3) >= 16
    took = (found.end_s - found.start_s)[found.lowered.graph.kind == 0]
    assert took == pytest.approx(wait + 2 * (seconds - wait))


def test_an_exchange_beside_passes_takes_their_cores(at_home):
    """Two ranks on two cores reduce while they compute: together they take all the processor time there is."""
    known = _apart({2: 20e-3, 4: 20e-3}, {2: 20e-3, 4: 20e-3})
    here.write(known, at_home)
    costs = Costs(Framework(name="x", host_us_per_pass=0.0), (MeasuredLink(here.tables(known)),))
    found = simulate(parse("dp2 mb1"), MODEL, load("2xhere"), TRAIN, costs)
    kinds = found.lowered.graph.kind
    beside = (found.end_s - found.start_s)[kinds == 3]  # backwards
    alone = found.priced.durations[found.lowered.graph.cost_key[kinds == 3]]
    assert (beside / alone).max() > 1.5
    assert found.step_time_s == pytest.approx(processor_seconds(found.lowered, found.priced) / 2)


def test_fully_sharded_parameters_cost_their_copies_and_are_not_overlapped_on_a_processor(at_home):
    known = machine([pass_of(layer) for layer in bench.FULL.layers])
    here.write(known, at_home)
    link = MeasuredLink(here.tables(known))
    bare = Framework(name="x", host_us_per_pass=0.0, host_us_per_kernel=0.0, host_us_per_collective=0.0)
    costs = Costs(bare, (link,))
    whole, sharded = (simulate(parse(f"dp2 {z} mb1"), MODEL, load("2xhere"), TRAIN, costs) for z in ("zero2", "zero3"))
    host = sharded.priced.parts[:, CAUSE["host"]]
    key = sharded.lowered.graph.cost_key[sharded.lowered.graph.kind == 0][1]  # a layer in the middle
    sizes = {p.moves[0].num_bytes for p in sharded.lowered.programs if p.name == "all_gather"}
    device = load("2xhere").islands[0].device
    copies = [link(Staging(what="gather", num_bytes=size), device).seconds for size in sizes]
    assert host[key] == pytest.approx(min(copies))  # of a layer alone, with no table beside it
    passes_of_whole = whole.lowered.graph.cost_key[whole.lowered.graph.kind != KIND["optimizer"]]
    assert host[key] > 0 == whole.priced.parts[passes_of_whole, CAUSE["host"]].max()
    graph = sharded.lowered.graph
    gathers = graph.kind == KIND["all_gather"]
    passes = np.isin(graph.kind, (0, 3))
    for start, end in zip(sharded.start_s[gathers], sharded.end_s[gathers]):
        assert not ((sharded.start_s[passes] < end - 1e-9) & (sharded.end_s[passes] > start + 1e-9)).any()


def test_the_update_and_what_surrounds_it_are_priced_apart_and_a_run_s_update_is_laid_beside_the_first(at_home):
    """By hand: an update of 30 ms in a task of 50, of which a run records 25 ms as its update: 20% too long."""
    passes = [pass_of(layer, step=12.05, optimizer=0.03) for layer in bench.FULL.layers]  # 20 ms are between
    known = machine(passes)
    here.write(known, at_home)
    costs = Costs(
        Framework(name="x", host_us_per_pass=0.0, host_us_per_kernel=0.0), (MeasuredLink(here.tables(known)),)
    )
    layer = bench.FULL.layers[4]
    found = predict(
        bench.model_of(layer), load("1xhere"), bench.train_of(layer, "fp32"), bench.plan_of(layer), costs=costs
    )
    key = found.timeline.cost_key[found.timeline.kind == KIND["optimizer"]]
    assert found.timeline.parts["optimizer"][key] == pytest.approx(0.03)
    assert found.timeline.parts["host"][key] == pytest.approx(0.02)
    ends = found.timeline.end_s.copy()
    ends[found.timeline.kind == KIND["optimizer"]] -= 0.025
    who = msgspec.structs.replace(found.identity, source="measured")
    rows = {r.name: r for r in compare(found, msgspec.structs.replace(found.timeline, end_s=ends, identity=who)).kinds}
    assert rows["optimizer"].error == pytest.approx(0.2)
    assert (rows[AROUND].matched, rows[AROUND].unmatched_predicted_s) == (0, pytest.approx(0.02))
    # two predictions have both parts, and are laid beside each other whole
    assert AROUND not in {r.name for r in compare(found, found.timeline).kinds}


def test_a_rank_that_waits_leaves_its_core_to_the_others(at_home):
    """Two cores for four stages: a lone microbatch is in one stage at a time, so that it takes no longer."""
    here.write(machine([pass_of(layer) for layer in bench.FULL.layers]), at_home)
    alone = Train(global_batch=1, seq_len=64, dtype="fp32")
    costs = Costs(Framework(name="x", host_us_per_pass=0.0), (MeasuredLink(here.tables(machine())),))
    crowded = simulate(parse("pp4 dp1 mb1"), MODEL, load("4xhere"), alone, costs)
    island = load("4xhere").islands[0]
    quad = msgspec.structs.replace(island.device, cores=4)
    roomy = msgspec.structs.replace(load("4xhere"), islands=(msgspec.structs.replace(island, device=quad),))
    spacious = simulate(parse("pp4 dp1 mb1"), MODEL, roomy, alone, costs)
    last = [r.end_s[np.isin(r.lowered.graph.kind, (0, 3))].max() for r in (crowded, spacious)]
    assert last[0] == pytest.approx(last[1], rel=1e-9)
