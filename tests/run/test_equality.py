"""Whatever the plan, the same training: loss, every gradient and every parameter of one process, in float64."""

from __future__ import annotations

from functools import cache, partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright import schedules
from meshwright.cost import standard
from meshwright.lower import order
from meshwright.plan import check, parse
from meshwright.plan.executable import unexecutable
from meshwright.run.launch import start
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run.processes import launch_kept as launch
from tests.run.small import DIMS, assemble, batch, differences, gpt, llama, train_steps

#: Relative to each tensor's largest element. Summation order differs; 20 steps of AdamW amplify what is left.
TOLERANCE = 1e-9
TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32")
MODELS = {
    "llama": llama,
    "gpt": gpt,
    "tied": partial(llama, tied_embeddings=True),
    "one key-value head": lambda: llama(kv_heads=1, layers=2),
    "normed heads": lambda: llama(qk_norm=True, layers=2),
    "window": lambda: llama(window=6, layers=2),
    "experts": lambda: llama(experts=4, top_k=2, moe_ffn=24, shared_ffn=16, layers=2),
}


#: Those of four layers, of which two are enough where neither a pipeline nor gathering ahead needs more.
DEEP = ("llama", "gpt", "tied")


@cache
def reference(model: str, layers: int, steps: int, documents: bool, train: Train = TRAIN):
    """One process, the whole batch as one microbatch."""
    return launch(1, train_steps, built(model, layers), f"tp1 mb{train.global_batch}", train, steps, documents)


def built(name: str, layers: int):
    return MODELS[name](layers=layers) if name in DEEP else MODELS[name]()


def compare(
    model: str,
    plan: str,
    steps: int = 1,
    documents: bool = False,
    train: Train = TRAIN,
    schedule_params: dict | None = None,
) -> None:
    ranks = parse(plan).layout
    layers = 4 if ranks.pp > 1 or ranks.zero == 3 else 2
    expected = reference(model, layers, steps, documents, train)
    count = ranks.tp * ranks.pp * ranks.cp * max(1, ranks.dp)
    got = launch(count, train_steps, built(model, layers), plan, train, steps, documents, schedule_params)
    for ours, theirs in zip(got[0][0], expected[0][0], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    for which in (1, 2):  # gradients of the first step, parameters after the last
        apart = differences(assemble(got, which), assemble(expected, which))
        worst = max(apart, key=apart.get)
        assert apart[worst] <= TOLERANCE, (plan, worst, apart[worst])


#: Two microbatches of a replica where no pipeline asks for more: gradients are added up, and not often exchanged.
LAYOUTS = [
    "tp1 mb2",
    "dp2 mb2",
    "dp2 zero1 mb2",
    "dp2 zero2 mb2",
    "dp2 zero3 mb2",
    "dp4 zero1 shard2",
    "dp4 zero3 shard2",
    "tp2 mb4",
    "tp2 nosp mb4",
    "tp2 gathered=kept mb4",
    "tp4 mb4",
    "cp2 mb4",
    "cp2 ulysses mb4",
    "cp2 allgather mb4",
    "cp4 mb4",
    "cp4 burstattention mb4",
    "cp4 tokenring zero3 mb4",
    "cp4 ulysses2 mb4",
    "cp4 allgather ulysses2 mb4",
    "pp2",
    "tp2 dp2 zero3 mb2",
    "cp2 zero3 mb4",
    "cp2 tp2 mb4",
    "pp2 dp2 zero2",
    "pp2 dp2 vpp3 interleaved zero2 gather=after",  # six stages of four layers: the embedding and the head alone
    "pp2 dp2 zero2 zb-v vpp2",
    "pp2 dp2 zero2 zb-h1",
    "pp2 dp2 zero3",
    "pp4 full",
    "selective",
    "dp2 zero3 full mb2",
]


@pytest.mark.parametrize("plan", LAYOUTS)
def test_layouts(plan):
    compare("llama", plan, documents=True)


@pytest.mark.parametrize("name", sorted(schedules.families()))
def test_schedules(name):
    family = schedules.get(name)
    vpp = 2 if name in ("interleaved", "breadth-first", "zeropp") else family.default_vpp
    compare("llama", f"pp2 vpp{vpp} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb-v", "chimera", "bitpipe", "dualpipe", "2bp:1f1b"])
def test_schedules_with_replicas(name):
    vpp = schedules.get(name).default_vpp
    compare("tied", f"pp2 vpp{vpp} dp2 zero1 {name} full", steps=2)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (model, plan)
        for model in sorted(MODELS)
        for plan in ("tp2 dp2 zero1 mb2", "tp4 mb4", "pp2 zb-h1", "cp2 mb4")
        if not (model == "llama" and plan in LAYOUTS)  # those are test_layouts' own
    ],
)
def test_models(model, plan):
    compare(model, plan, documents=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["tp2 pp2 dp2 zero1 mb2", "cp2 tp2 pp2 mb2", "cp2 tp2 dp2 zero3 mb2", "pp2 chimera dp2 tp2"]
)
def test_products_on_eight_processes(plan):
    compare("llama", plan, documents=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "ep2 dp2 mb2",
        "ep2 dp2 pp2 zero1 mb2",
        "ep2 tp2 etp1 mb4",
        "ep2 tp2 dp2 mb2",
        "ep2 dp4 zero2",
        "ep4 tp2 dp2 etp1 mb2",
    ],
)
def test_experts(plan):
    compare("experts", plan, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["tp2 pp2 mb4", "tp2 dp2 zero1 mb4", "dp2 zero3 mb4", "cp2 zero2 mb8", "pp2 zb-h1 dp2 mb2"]
)
def test_twenty_steps(plan):
    """With no more microbatches than a pipeline needs: that those add up to a step is shown by the layouts."""
    compare("llama", plan, steps=20, documents=True)


@pytest.mark.parametrize("plan", ["tp2 mb4", "cp2 mb4", "pp2 interleaved vpp2", "dp2 zero1 mb2"])
def test_dropout_does_not_depend_on_the_plan(plan):
    train = Train(global_batch=8, seq_len=16, dtype="fp32", dropout=True)
    compare("llama", plan, train=train)
    layers = 4 if "pp2" in plan else 2
    assert reference("llama", layers, 1, False, train)[0][0] != reference("llama", layers, 1, False)[0][0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "momentum"])
def test_optimizers(optimizer):
    compare(
        "llama",
        "tp2 dp2 zero1 mb2",
        steps=3,
        train=Train(global_batch=8, seq_len=16, dtype="fp32", optimizer=optimizer),
    )


@st.composite
def plans(draw) -> str:
    """A legal, executable plan of 2 to 8 ranks."""
    alone = draw(st.sampled_from(("tp", "cp", "pp", "dp")))
    axes = {axis: 1 if axis == alone else draw(st.sampled_from((1, 2))) for axis in ("tp", "cp", "pp", "dp")}
    words = [f"{axis}{n}" for axis, n in axes.items()]
    words.append(draw(st.sampled_from(("", "zero1", "zero2", "zero3"))))
    words.append(draw(st.sampled_from(("", "full", "selective"))))
    words.append(draw(st.sampled_from(("mb1", "mb2"))))
    if axes["cp"] > 1:
        words.append(draw(st.sampled_from(("ring", "ulysses", "allgather"))))
    if axes["pp"] > 1:
        name = draw(st.sampled_from(sorted(schedules.families())))
        words += [name, f"vpp{schedules.get(name).default_vpp}"]
    if axes["tp"] > 1:
        words.append(draw(st.sampled_from(("", "nosp"))))
    return " ".join(filter(None, words))


@pytest.mark.slow
@given(plan=plans(), model=st.sampled_from(("llama", "gpt", "tied")))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_legal_plans(plan, model):
    read = parse(plan)
    found = check(read, MODELS[model](), load(f"{max(1, read.layout.num_ranks)}xh100"), TRAIN)
    found += unexecutable(read, MODELS[model](), TRAIN)
    if not found:
        compare(model, plan)


def test_a_schedule_made_for_given_times_is_run_in_the_order_that_was_simulated():
    """The last of four ranks is slow: the order is another than for equal times, and trains the same."""
    plan, model = parse("pp4 zb-auto mb1").on(4), MODELS["llama"]()
    found = simulate(plan, model, load("4xh100"), TRAIN, standard())
    assert found.schedule_params["t_f"][3] > found.schedule_params["t_f"][1]  # it has the head
    ordered = order(plan, 8, found.schedule_params)
    assert ordered.text() == found.lowered.actions.text() != order(plan, 8, {}).text()
    compare("llama", "pp4 zb-auto mb1", schedule_params=found.schedule_params)


def first_step(world, plan):
    """Loss and gradient norm of the first step in bf16, which no update has touched."""
    train = Train(global_batch=8, seq_len=16, dtype="bf16")
    place = build(parse(plan).on(world.size), device=world.device)
    trainer = Trainer(llama(), parse(plan).on(world.size), train, place, settings=Settings(lr=1e-2))
    dp = trainer.mesh["dp"]
    result = trainer.step(batch(train, DIMS["vocab"], 0, dp.size, dp.index))
    return result.loss, result.grad_norm


def test_sharded_parameters_in_bf16_differ_by_the_order_of_fp32_sums_alone():
    """Both round the same products to bf16 and add them in fp32 (epsilon 1.2e-7); what is left grows in later steps, as
    every plan's does, because Adam's first steps and the rounding of weights are discontinuous."""
    whole, sharded = (start(first_step, plan, num_ranks=2, device="cpu") for plan in ("dp2 mb4", "dp2 mb4 fsdp"))
    assert sharded == pytest.approx(whole, rel=3e-6)
