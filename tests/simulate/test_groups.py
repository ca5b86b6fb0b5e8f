"""Steps under groups of ranks: what plans with groups of one size take where those are what is formed, and less where
documents differ."""

import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.assign import draws
from meshwright.assign.groups import RankGroup
from meshwright.cost import standard_on
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as parse_plan
from meshwright.simulate import groups
from meshwright.simulate.batches import simulate_batches
from meshwright.simulate.groups import GroupRounds, loads_of, simulate_groups
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse

SKEWED = "batch=4,seq=131072,lengths=lognormal:mean=6000;sigma=1.3"


def asked(words: str, train: str, on: str = "8xh100", model: str = "qwen3-0.6b"):
    cluster = load_cluster(on)
    plan = parse_plan(words).on(cluster.num_devices)
    return plan, load_model(model), cluster, parse(train), standard_on(cluster)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(draws, "MOST", 6)
    monkeypatch.setattr(draws, "LEAST", 6)


@pytest.mark.parametrize(
    "words", ["fsdp mb1", "dp8 zero1 mb1 full", "tp2 dp4 fsdp mb1", "pp2 dp4 zero1 mb1", "pp4 dp2 fsdp mb1 gpipe full"]
)
@pytest.mark.parametrize("method", ["flexsp", "bytescale"])
def test_documents_of_one_length_that_fit_a_rank_are_the_plain_step(words, method):
    # a document for every rank in every round is what data parallelism does
    train = "batch=16,seq=4096,lengths=4096"
    plain = simulate_batches(*asked(words, train))
    found = simulate_groups(*asked(f"{words} groups={method}", train))
    assert found.groups.sizes == {1: 16.0}
    assert found.steps_s == pytest.approx(plain.steps_s, rel=1e-9)


@pytest.mark.parametrize(
    ("words", "size"), [("cp8 ring", 8), ("cp8 ulysses", 8), ("cp8 allgather", 8), ("pp2 cp4 ring", 4)]
)
def test_one_document_for_all_ranks_is_the_plain_step_of_context_parallelism(words, size):
    words, train = f"{words} dp1 zero1 mb1", "batch=4,seq=32768,lengths=32768"
    plain = simulate_batches(*asked(words, train))
    found = simulate_groups(*asked(f"{words} groups=bytescale", train))
    assert found.groups.sizes == {size: 4.0}
    assert found.steps_s == pytest.approx(plain.steps_s, rel=1e-9)


@pytest.mark.parametrize("method", ["flexsp", "zeppelin"])
def test_skewed_lengths_take_less_than_in_groups_of_one_size(method):
    # over two nodes, where every swap of heads among 16 ranks passes the network
    words, on = "cp16 dp1 fsdp mb1 full ulysses", "2x8xa100-80"
    plain = simulate_batches(*asked(words, SKEWED, on))
    found = simulate_groups(*asked(f"{words} groups={method}", SKEWED, on))
    assert found.mean_s < 0.9 * plain.mean_s
    assert found.unequal_s > 0 and len(found.groups.sizes) > 2


@pytest.mark.parametrize("words", ["cp8 dp1 fsdp mb1", "pp2 cp4 dp1 zero1 mb1 full offload=activations long=2"])
def test_programs_that_are_bound_once_are_those_of_each_step(words):
    made = GroupRounds(*asked(f"{words} groups=bytescale", SKEWED))
    loads = [((1, (9000, 700)),), ((2, (20000,)),), ((1, (300,)), (4, (30000, 5000)))]
    for rounds in (2, 5):
        assert made.programs(loads, rounds) == [made.bound(load, rounds).programs for load in loads]


def test_loads_between_priced_ones_are_near_what_all_of_them_take(monkeypatch):
    question = asked("cp16 dp1 fsdp mb1 full ulysses groups=flexsp", SKEWED, "2x8xa100-80")
    some = simulate_groups(*question)
    monkeypatch.setattr(groups, "PRICED", 10**6)
    every = simulate_groups(*question)
    assert some.priced < some.distinct == every.priced
    assert some.steps_s == pytest.approx(every.steps_s, rel=0.02)


def test_a_rank_in_several_groups_has_a_part_of_each_and_waits_for_the_costliest():
    plan, model, cluster, train, costs = asked("cp2 dp2 fsdp mb1 groups=zeppelin", SKEWED, "4xh100")
    made = GroupRounds(plan, model, cluster, train, costs)
    problem = made.problem(np.array([8000, 3000, 500]), made.fitted(np.array([8000, 3000, 500])))
    rounds = ((RankGroup(0, 2, (0,)), RankGroup(0, 1, (2,)), RankGroup(2, 1, (1,))),)
    both = ((2, (8000,)), (1, (500,)))
    assert loads_of(problem, rounds) == [[both, both, ((1, (3000,)),), ()]]
    assert made.stages(both, 1).context().tokens == 8000 // 2 + 500
    assert made.seconds(both) > made.seconds(((2, (8000,)),)) > made.seconds(((2, (4000,)),))


def test_an_answer_says_its_groups_and_sums_to_the_mean():
    plan, model, cluster, train, _ = asked("cp8 dp1 fsdp mb1 full ulysses groups=flexsp", SKEWED)
    found = predict(model, cluster, train, plan)
    said = next(a for a in found.assumptions if a.name == "groups of ranks")
    assert "rounds of a step" in said.value and "groups=flexsp" in said.source
    assert sum(found.attribution.values()) == pytest.approx(found.step_time_s)


def test_plans_whose_groups_cannot_be_formed_are_refused_all_at_once():
    plan, model, cluster, _, _ = asked("pp2 vpp2 cp4 dp1 ulysses2 sync=diloco:h=4 groups=zeppelin", SKEWED)
    with pytest.raises(MeshwrightError) as refused:
        predict(model, cluster, parse("batch=16,seq=16384"), plan)
    said = [d.message for d in refused.value.diagnostics if d.code == "P060"]
    assert len(said) == 4
    assert all(
        any(word in one for one in said) for word in ("sequences are whole", "interleaved", "ulysses2", "same step")
    )


LONG = "cp8 dp1 zero1 mb1 full groups=bytescale long=2 offload=activations"


def test_activations_of_long_documents_alone_are_moved():
    plan, model, cluster, train, costs = asked(LONG, SKEWED)
    made = GroupRounds(plan, model, cluster, train, costs)
    assert made.capacity == 131072 // 8

    def sent_s(load):
        lowered = made.bound(load, 1)
        seconds = made.pricer.all(lowered.programs).durations[lowered.graph.cost_key]
        names = np.array([program.name for program in lowered.programs])[lowered.graph.cost_key]
        return seconds[np.isin(names, groups.LEAVES)].sum()

    assert sent_s(((2, (2 * 16384,)),)) == 0.0  # a rank holds that on its device
    moved = sent_s(((1, (2 * 16384,)),))
    # the inputs of 28 layers of 1,024 wide in bf16 at the rate of the host's link, but of those used at once
    layers, rate = round(moved / (32768 * 1024 * 2 / (cluster.islands[0].node.copies_gb_s * 1e9))), 28
    assert rate - 4 < layers < rate
    assert sent_s(((2, (4 * 16384,)),)) == pytest.approx(moved, rel=1e-9)


def test_long_documents_take_fewer_ranks_and_a_step_remembers_the_room_of_both():
    few, all_moved = (
        predict(*(asked(words, SKEWED)[i] for i in (1, 2, 3, 0)))
        for words in (LONG, LONG.replace("long=2 offload=activations", ""))
    )
    sizes = [next(a.value for a in one.assumptions if a.name == "groups of ranks") for one in (few, all_moved)]
    assert "of 8" in sizes[1] and "of 8" not in sizes[0]
    assert max(r.needed_bytes for r in few.memory) >= max(r.needed_bytes for r in all_moved.memory)
    assert any(tier.tier == "host" for tier in few.tiers)


def test_long_is_refused_where_ranks_hold_no_more():
    for words, why in (
        ("cp8 dp1 fsdp mb1 groups=flexsp long=2 offload=activations", "as few ranks"),
        ("cp8 dp1 fsdp mb1 groups=bytescale long=2", "stay on the device"),
        ("cp8 dp1 fsdp mb1 long=2", "as few ranks"),
    ):
        plan, model, cluster, train, _ = asked(words, SKEWED)
        with pytest.raises(MeshwrightError, match=why) as refused:
            predict(model, cluster, train, plan)
        assert [d.code for d in refused.value.diagnostics] == ["P060"]
