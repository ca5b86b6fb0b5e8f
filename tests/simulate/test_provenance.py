"""The sources a prediction names are those of the prices it is made of."""

import pytest

from meshwright.answer.predict import predict
from meshwright.answer.provenance import usual_words
from meshwright.cost import Costs, load_framework, standard
from meshwright.plan import parse
from meshwright.spec import cluster, model
from meshwright.spec.workload import Lengths, Train
from meshwright.work import Gemm

TRAIN = Train(global_batch=64, seq_len=4096)


def assumed(on, plan, costs):
    answer = predict(model.load("llama3-8b"), cluster.load(on), TRAIN, parse(plan), costs=costs, detail=False)
    return {a.name: a for a in answer.assumptions}


def test_products_priced_by_a_curve_name_it():
    costs = standard()
    found = assumed("8xh100", "fsdp", costs)["h100_sxm: matrix products"]
    # the gate and up projection of a microbatch of one sequence
    one = costs.price(Gemm(m=4096, n=28672, k=4096), cluster.load_device("h100_sxm"))
    assert found.source.split(";")[0] == one.source
    assert found.source.startswith("fitted: h100_sxm gemm bf16")


def test_what_was_measured_is_confirmed_and_what_lies_beyond_is_flagged_with_its_share():
    inside = assumed("16xh100", "fsdp tp2", standard())["h100_sxm: matrix products"]
    beyond = assumed("8xh100", "fsdp mb8", standard())["h100_sxm: matrix products"]
    assert (inside.flagged, beyond.flagged) == (False, True)
    assert "extrapolated from other shapes or devices" in beyond.source


def test_without_curves_the_published_fraction_is_named_and_no_profile():
    found = assumed("16xh100", "fsdp tp2", Costs())
    assert found["h100_sxm: matrix products"].source.startswith("92% of the best published")
    assert not [name for name in found if name.startswith("collectives over")]


def test_the_share_of_peak_is_that_of_the_products_priced():
    def half(work, device):
        if isinstance(work, Gemm):
            flops = device.peak_flops["bf16"]
            return Costs().price(work, device)._replace(seconds=2 * work.flops / flops, source="a table")
        return None

    found = assumed("8xh100", "fsdp", Costs(links=(half,)))["h100_sxm: matrix products"]
    assert (found.value, found.source) == ("50% of peak for this plan's shapes", "a table")


def test_curves_carried_from_another_device_are_flagged():
    def carried(work, device):
        if isinstance(work, Gemm):
            return Costs().price(work, device)._replace(source="fitted: other gemm, carried to this one")
        return None

    assert assumed("8xh100", "fsdp", Costs(links=(carried,)))["h100_sxm: matrix products"].flagged


def test_collectives_name_the_profile_and_the_rate_of_the_largest_buffer():
    costs = standard()
    found = assumed("8xh100", "tp2 fsdp", costs)["collectives over nvlink"]
    assert "nvlink4 profile" in found.source
    op, size, ranks = found.value.split(" of ")[0], float(found.value.split()[2]), int(found.value.split()[5])
    hop = cluster.load("8xh100").islands[0].levels[0]
    assert op in ("all_gather", "reduce_scatter", "all_reduce")
    assert ranks in (2, 4)
    # two directions at most: a ring's rank sends and receives at the links' rate
    assert 0.1 * hop.gb_s < float(found.value.split()[-2]) < 2 * hop.gb_s
    assert size > 1


@pytest.mark.parametrize(
    ("framework", "words", "added"),
    [
        ("nanotron", "tp2 dp4", ["loss=copied"]),
        ("nanotron", "tp2 dp4 loss=fused", []),
        ("megatron-lm", "tp2 dp4", ["unfused", "loss=in-place"]),
        ("megatron-lm", "tp2 dp4 unfused loss=in-place", []),
        ("torchtitan", "tp2 dp4 fsdp", ["gathered=kept"]),
        ("torchtitan", "dp8 fsdp", []),  # nothing is gathered over one rank
        ("megatron-bridge", "dp8 loss=in-place", ["grads=bf16"]),
        ("default", "tp2 dp4", ["loss=in-place"]),  # what uncertain memory is held against
        ("default", "tp2 dp4 loss=in-place", []),
        ("fused", "tp2 dp4", []),
    ],
)
def test_what_a_framework_does_and_a_plan_does_not_say_is_told(framework, words, added):
    profile, plan = load_framework(framework), parse(words)
    assert usual_words(profile, plan) == added
    assert usual_words(profile, parse(" ".join([words, *added]))) == []  # and they are words of a plan
    found = predict(model.load("llama3-8b"), cluster.load("8xh100"), TRAIN, plan, costs=standard(profile), detail=False)
    told = [text for text in found.warnings if "by default, and the plan does not say so" in text]
    assert [all(word in text for word in added) for text in told] == [True] * bool(added)


def cautions(on, train, plan="fsdp full"):
    return predict(model.load("llama3-8b"), cluster.load(on), train, parse(plan), detail=False).cautions


@pytest.mark.parametrize(
    ("on", "dtype", "said"),
    [("8xa100", "fp8", "a100_80gb_sxm has no fp8 matrix units: products are priced at its bf16 rate"),
     ("8xv100", "bf16", "v100_16gb has no bf16 matrix units: products are priced at its fp16 rate")],
)  # fmt: skip
def test_a_precision_the_device_lacks_is_said_beside_the_answer(on, dtype, said):
    assert said in cautions(on, Train(global_batch=8, seq_len=4096, dtype=dtype))


def test_a_sequence_beyond_rotary_positions_and_a_step_of_days_are_said_beside_the_answer():
    assert not cautions("8xh100", Train(global_batch=8, seq_len=8192))
    (beyond,) = cautions("8xh100", Train(global_batch=8, seq_len=16384))
    assert "16,384 tokens are beyond the 8,192 positions that llama3-8b" in beyond
    packed = Train(global_batch=8, seq_len=16384, lengths=Lengths((4096,), (1.0,)))
    assert not cautions("8xh100", packed)
    assert any("one step takes" in c and "days" in c for c in cautions("8xh100", Train(global_batch=8, seq_len=2**25)))


def test_a_network_nobody_named_is_an_assumption_and_for_part_of_a_node_a_warning():
    def answer(on):
        return predict(model.load("llama3-8b"), cluster.load(on), TRAIN, parse("fsdp"), detail=False)

    whole, part, said = answer("16xh100"), answer("4x4xa100"), answer("4x4xa100,ib200,nics=4")
    links = {a.name: a for a in part.assumptions}["rail links"]
    assert links.flagged and "no network is said, say one such as 4x4xa100,25gbe" in links.source
    assert any("4x4xa100 names no network: 4 ports of 200 Gbit/s a node are assumed" in w for w in part.warnings)
    assert not any("names no network" in w for w in (*whole.warnings, *said.warnings))
    assert not {a.name: a for a in said.assumptions}["ib200 links"].source.startswith("assumed")


def test_links_of_every_island_and_between_them_are_assumptions():
    joined = predict(
        model.load("llama3-8b"), cluster.load("8xh100,ib400 + 8xa100,25gbe"), TRAIN, parse("fsdp"), detail=False
    )
    names = [a.name for a in joined.assumptions]
    assert {"h100_sxm nvlink links", "a100_80gb_sxm nvlink links", "25gbe between islands"} <= set(names)
