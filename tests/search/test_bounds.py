"""Bounds where they are tightest: every plan of small regions against everything that bounds it."""

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.cost import load_framework, standard
from meshwright.cost.roofline import contention
from meshwright.plan import parse as plan
from meshwright.search.bounds import CoreScope, compute_seconds, step_seconds
from meshwright.search.columns import spread
from meshwright.search.evaluate import Evaluator
from meshwright.search.exchanges import Exchanges
from meshwright.search.find import find
from meshwright.search.regions import Regions
from meshwright.search.restrict import restricted
from meshwright.search.space import Space, cores, default
from meshwright.search.strategies.exhaustive import Region
from meshwright.simulate.step import simulate
from meshwright.spec import cluster
from meshwright.spec.model import load, transformer
from meshwright.spec.workload import Lora, Train
from tests.random_plans import LLAMA, MIXTURE
from tests.search.small import compared

ONE_LAYER = transformer(layers=1, hidden=2048, heads=16, ffn=8192, vocab=1024, name="one-layer")
WIDE = transformer(layers=12, hidden=2048, heads=16, ffn=8192, vocab=1024, name="wide")
HOST = ("host_us_per_kernel", "host_us_per_collective", "host_us_per_pass", "host_us_per_dispatch")
HOSTLESS = standard(replace(load_framework("fused"), **dict.fromkeys(HOST, 0.0)))
ONE_ORDER = (("tp", "cp", "dp", "pp"),)


def region(model, on, train, **facets):
    """A question of few plans: one order and no context parallelism, unless said."""
    where = cluster.load(on) if isinstance(on, str) else on
    domains = default(model, where, train).domains | {"cp": (1,), "order": ONE_ORDER, "recompute": ("none",)} | facets
    return model, where, train, Space(domains=domains)


def test_a_stage_of_one_block_is_not_slowed_by_exchanges():
    """Lowering cuts a pass where there are several blocks; nothing runs beside one that is whole."""
    train = Train(global_batch=16, seq_len=1024)
    facets = {"tp": (1,), "pp": (2, 4), "mb": (1,), "ep": (1,), "vpp": (3, 6), "zero": (1, 2)}
    question = region(MIXTURE, "16xa100-80", train, schedule=("interleaved", "breadth-first", "hanayo"), **facets)
    found = list(compared(question))
    assert any(one.plan.pipeline.vpp == 6 and one.plan.layout.pp == 2 for one in found)
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_a_model_of_one_block_is_not_slowed_by_exchanges():
    question = region(
        ONE_LAYER, "8xh100", Train(global_batch=64, seq_len=1024), tp=(1,), pp=(1,), mb=(1, 2, 4), zero=(1, 2, 3)
    )
    found = list(compared(question, HOSTLESS))
    assert {one.plan.layout.zero for one in found} == {1, 2, 3}
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_what_the_host_adds_to_a_pass_comes_after_its_first_release():
    """Reductions that take longer than layers wait for each other from the first release of the last backward on; the
    rest of that pass, with the embedding and the host's share, runs meanwhile."""
    mixture = transformer(
        layers=4, hidden=2048, heads=16, ffn=4096, vocab=1024, gated=True, experts=8, top_k=2, name="mixture"
    )
    profile = replace(load_framework("default"), **dict.fromkeys(HOST, 0.0) | {"host_us_per_pass": 3000.0})
    train = Train(global_batch=16, seq_len=512)
    question = region(mixture, "16xa100-80", train, tp=(1, 2), pp=(1, 2), mb=(1,), ep=(1,), zero=(0, 1), vpp=(1,))
    found = list(compared(question, standard(profile)))
    assert not {one.plan.text(): one.over() for one in found if one.over()}


PRECISIONS = {"grads": ("fp32", "bf16"), "master": ("fp32", "none"), "moments": ("fp32", "bf16", "fp8")}


def test_memory_is_bounded_for_every_precision_of_its_own():
    facets = {"tp": (1, 2), "pp": (1, 2), "mb": (1,), "schedule": ("1f1b", "interleaved"), "vpp": (1, 2)}
    question = region(LLAMA, "8xh100", Train(global_batch=16, seq_len=512), **facets, **PRECISIONS)
    found = list(compared(question, plans=48))
    assert {one.plan.precision.moments for one in found} == {"fp32", "bf16", "fp8"}
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_a_space_with_more_precisions_has_no_slower_best():
    """A dense model whose state is near the memory of its devices: what does not fit in fp32 may fit in bf16."""
    asked = load("llama2-70b"), cluster.load("16xh100"), Train(global_batch=16, seq_len=1024)
    fix = ["schedule=1f1b", "mb=1", "cp=1", "order=tp-cp-dp-pp"]
    both = find(*asked, space=restricted(default(*asked), fix=fix, allow=["moments=bf16"]), top=1)
    fewer = find(*asked, space=restricted(default(*asked), fix=[*fix, "moments=bf16"]), top=1)
    assert both.proven_optimal
    assert both.best[0].prediction.step_time_s <= fewer.best[0].prediction.step_time_s


def test_kernels_are_those_of_the_precision_and_the_loss_of_a_plan():
    """Products in fp8 take half as long, and a fused loss moves less, than what a workload in bf16 has by default."""
    asked = load("llama3-70b"), "64xh100", Train(global_batch=128, seq_len=4096)
    facets = {"tp": (1,), "pp": (1,), "cp": (2,), "mb": (1,), "sp": (True,), "zero": (3,), "shard": (0,)}
    said = {"dtype": ("fp8",), "loss": ("eager", "fused"), "grads": ("fp32", "bf16")}
    found = list(compared(region(*asked, **facets, **said)))
    assert {(one.plan.precision.compute, one.plan.memory.loss) for one in found} == {("fp8", "eager"), ("fp8", "fused")}
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_weight_gradients_are_written_in_the_precision_that_they_are_stored_in():
    asked = load("llama3-8b"), "8xh100", Train(global_batch=16, seq_len=256)
    facets = {"tp": (1,), "pp": (4, 8), "mb": (1,), "schedule": ("1f1b", "zb-h1"), "zero": (0,)}
    found = list(compared(region(*asked, **facets, grads=("bf16", "fp32"))))
    assert {one.plan.precision.grads for one in found} == {"bf16", "fp32"}
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_stages_are_dealt_for_every_inner_part_whose_layers_take_other_times():
    """The head is a fifth of this model, and its loss in one kernel or in several deals other stages."""
    narrow = transformer(layers=12, hidden=1024, heads=16, vocab=50304, name="narrow")
    facets = {"tp": (1,), "pp": (2,), "mb": (1,), "schedule": ("interleaved",), "vpp": (2,), "stages": ("balanced",)}
    said = {"loss": ("eager", "fused"), "recompute": ("full",), "attention": ("unfused",), "zero": (0,)}
    found = list(
        compared(
            region(narrow, "8xmi250x", Train(global_batch=16, seq_len=128), **facets, **said),
            standard(load_framework("fused")),
        )
    )
    assert len({one.plan.layout.stages for one in found}) > 1
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_exchanges_take_nothing_from_processor_cores_that_share_time():
    """`simulate/price.py` slows no pass of a device that is a core; neither does a bound."""
    model, where, train, space = region(
        LLAMA, "8xh100", Train(global_batch=16, seq_len=1024), tp=(1, 2), pp=(1, 2), mb=(1,), schedule=("1f1b",)
    )
    island = where.islands[0]
    assert contention(island.device) > 0
    shared = replace(island.device, name="cores", cores=64)
    assert contention(shared) == 0
    found = list(compared((model, replace(where, islands=(replace(island, device=shared),)), train, space), HOSTLESS))
    assert {one.plan.layout.dp for one in found} >= {2, 4, 8}
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_exchanges_are_priced_as_the_simulator_prices_them():
    """A framework that reaches half of the bandwidth between nodes layer by layer, and sums whole gradients in buckets:
    every exchange of a step, from its own graph."""
    where, train = cluster.load("16xa100-80"), Train(global_batch=16, seq_len=512)
    usual = load_framework("default")
    costs = standard(replace(usual, exchange_share=0.5, defaults=replace(usual.defaults, bucket_bytes=25 * 2**20)))
    around, seen = Exchanges(Evaluator(LLAMA, where, train, costs)), set()
    for said in ("pp2 dp8 zero1 chimera mb1 order=tp-cp-pp-dp", "dp16 zero3 mb1", "dp16 mb1"):
        run = simulate(plan(said), LLAMA, where, train, costs)
        for program, seconds in zip(run.lowered.programs, run.priced.durations.tolist()):
            if program.kind != "pass":
                assert around.price(program) == seconds
                seen.add(program.kind)
    assert seen == {"exchange", "send", "update"}


def test_gradients_sharded_over_one_rank_are_reduced_once_a_step():
    """A scope of one rank shards nothing: there are no rounds to scatter after."""
    facets = {"tp": (1,), "pp": (2,), "mb": (1,), "vpp": (2, 3), "zero": (1, 2), "shard": (0, 1, 2)}
    asked = WIDE, "16xt4", Train(global_batch=64, seq_len=128)
    found = list(compared(region(*asked, schedule=("interleaved",), **facets), HOSTLESS))
    assert {(one.plan.layout.zero, one.plan.layout.shard) for one in found} >= {(2, 1), (2, 0)}
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_a_pipeline_that_takes_longer_than_its_paths_does_not_lengthen_a_queue_that_takes_longer_still(monkeypatch):
    """Reductions of every round on a slow fabric: the queue's own sum bounds the step, and the pipeline runs beside."""
    facets = {
        "tp": (1,),
        "pp": (2,),
        "mb": (1,),
        "schedule": ("interleaved",),
        "vpp": (2,),
        "zero": (2,),
        "sp": (True,),
    }
    model, where, train, space = region(WIDE, "16xt4", Train(global_batch=64, seq_len=128), **facets, shard=(0,))
    regions = Regions(Evaluator(model, where, train, HOSTLESS))
    (core,) = cores(space, model, where, train)
    scope = CoreScope.of(space, core, model, where, train)
    costs = regions.costs(core, scope.inners)
    paths_s, least = compute_seconds(regions, scope, costs)
    exchanged = regions.exchanges.exchanged(core, scope.inners, scope.states)
    bound_s, along_s = step_seconds(regions, scope, costs, paths_s, least, exchanged)
    spare = float(bound_s[0, 0, 0] - along_s[0, 0, 0])
    assert spare > 0
    for longer, expected in ((spare / 2, bound_s[0, 0, 0]), (spare * 2, along_s[0, 0, 0] + spare * 2)):
        monkeypatch.setattr(regions, "makespan", lambda *_, longer=longer: paths_s[0, 0] + longer)
        found = Region(scope, costs, bound_s, along_s, paths_s).tightened_s(regions, 0)
        assert found == pytest.approx(float(expected), rel=1e-12)


def test_messages_of_a_node_may_be_slower_than_those_between_nodes():
    """T4s of a node meet on PCIe, where a message takes longer than on the network: a pipeline's first two ranks are
    not its fastest pair. Adapters leave little to exchange, so that little hides between bound and step."""
    train = Train(global_batch=8, seq_len=4096, lora=Lora())
    facets = {"tp": (2,), "pp": (4,), "mb": (1,), "order": (("tp", "cp", "pp", "dp"),), "schedule": ("gpipe",)}
    long = replace(WIDE, max_seq_len=4096, embedding=replace(WIDE.embedding, positions=4096))
    question = region(long, "4x4xt4,nics=4,edr", train, zero=(0,), sp=(True,), vpp=(1,), **facets)
    (one, *_) = found = list(compared(question, HOSTLESS))
    graph = simulate(one.plan, *question[:3], HOSTLESS).lowered
    around = Exchanges(Evaluator(*question[:3], HOSTLESS))
    seconds = [around.price(program) for program in graph.programs if program.kind == "send"]
    assert len(seconds) == 2 and seconds[0] > seconds[1]  # the first ranks' is the slower
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_copies_of_a_stage_are_added_up_in_one_message_where_the_optimizer_is_sharded():
    """nanotron's buckets of 25 MiB are those of replicas that hold all state: under ZeRO-1 there are none."""
    costs = standard(load_framework("nanotron"))
    assert costs.framework.defaults.bucket_bytes
    where = cluster.load("2xp5").reaching({"all_reduce": 20.0})  # where the latency of every message is long
    facets = {"tp": (1,), "pp": (4,), "mb": (1,), "sp": (True,), "schedule": ("bitpipe",), "vpp": (2,)}
    question = region(WIDE, where, Train(global_batch=8, seq_len=128), zero=(0, 1), **facets)
    found = list(compared(question, costs))
    assert {one.plan.layout.zero for one in found} == {0, 1}
    assert not {one.plan.text(): one.over() for one in found if one.over()}


def test_units_of_no_work_bound_nothing():
    none = np.zeros((1, 2))
    with np.errstate(all="raise"):
        assert spread(none, np.ones(2), np.array([4])) == 0
