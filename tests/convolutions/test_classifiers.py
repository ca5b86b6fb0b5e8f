"""Networks of convolutions: parameters and operations as published, products and bytes by hand, legal plans."""

import re

import numpy as np
import pytest

import meshwright as mw
from meshwright import layers
from meshwright.answer.flops import model_flops
from meshwright.cost.points import point
from meshwright.cost.roofline import gemm_seconds
from meshwright.errors import MeshwrightError
from meshwright.layers.convolution import FeatureMaps, convolved
from meshwright.lower import lower
from meshwright.plan import check
from meshwright.quantity import seconds
from meshwright.search.space import default
from meshwright.spec.convolution import Convolution2d
from meshwright.spec.matrices import num_matrices
from meshwright.work import Elementwise, Gemm

#: torchvision's documentation of its weights: parameters, and thousands of millions of multiplications at 224 x 224.
PUBLISHED = {
    "resnet-18": (11_689_512, 1.814),
    "resnet-34": (21_797_672, 3.664),
    "resnet-50": (25_557_032, 4.089),
    "resnet-101": (44_549_160, 7.801),
    "resnet-152": (60_192_808, 11.514),
    "vgg-16": (138_357_544, 15.470),
}
ON = mw.load_cluster("8xv100")
TRAIN = mw.parse_train("batch=256,image=224,dtype=fp16,optimizer=momentum")


def lowered(plan, model="resnet-50", train=TRAIN, on=ON):
    return lower(mw.parse_plan(plan).on(on.num_devices), mw.load_model(model), on, train)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_multiplications_are_those_that_torchvision_publishes(name):
    params, giga = PUBLISHED[name]
    model = mw.load_model(name)
    assert model.num_params == params
    once = model_flops(model, mw.parse_train("batch=1,image=224")) / 6
    assert once / 1e9 == pytest.approx(giga, abs=6e-3 if name == "vgg-16" else 6e-4)


def test_the_network_of_small_images_is_that_of_the_papers_on_cifar():
    from meshwright.lower.tensors import tensors_of
    from meshwright.papers.checks.codecs import RESNET18, RESNET18_VECTORS

    model = mw.load_model("resnet-18-cifar")
    assert model.num_params == sum(one.size for one in RESNET18) + RESNET18_VECTORS
    stages = lowered("dp8 mb4", "resnet-18-cifar", mw.parse_train("batch=256,image=32,dtype=fp32")).stages
    found = [t for unit in stages.compositions[0].units for some in tensors_of(stages, unit).values() for t in some]
    shapes = [(t.rows, t.columns) for t in RESNET18 for _ in range(t.times)]
    assert sorted((t.rows, t.columns) for t in found) == sorted(shapes)


def test_layers_are_as_many_as_the_name_says():
    # the convolutions of paths and the linear layers, shortcuts aside
    for name in PUBLISHED:
        model = mw.load_model(name)
        shortcuts = sum(
            getattr(part, "shortcut", None) is not None
            for layer in range(model.num_layers)
            for part in model.block(layer).before
        )
        assert num_matrices(model) - shortcuts == int(name.split("-")[1])


def test_maps_shrink_as_strides_say_whatever_the_image():
    model, vgg = mw.load_model("resnet-50"), mw.load_model("vgg-16")
    sides = [round(flow.length(225**2) ** 0.5) for flow in model.flows]
    assert sides == [57, 57, 29, 15, 8]  # padded: rounded up at each of its halvings
    assert [round(flow.length(225**2) ** 0.5) for flow in vgg.flows] == [225, 112, 112, 56, 56, 28, 28, 14, 7]


def test_the_three_products_of_a_convolution_and_their_bytes_by_hand():
    c = lowered("dp8 mb4").stages.context()
    spec = Convolution2d(inputs=64, outputs=128, kernel=3, stride=2)
    piece = convolved(c, "one", spec, FeatureMaps(4, 56, 56))
    forward, back, weight = piece.forward, piece.backward, piece.weight
    assert (forward.m, forward.k, forward.n) == (4 * 28 * 28, 64 * 9, 128)
    assert (weight.m, weight.k, weight.n) == (64 * 9, 4 * 28 * 28, 128)
    assert back.m * back.k * back.n == forward.m * forward.k * forward.n and (back.m, back.n) == (4 * 56 * 56, 64)
    image, made, weights = 4 * 56 * 56 * 64 * 2, 4 * 28 * 28 * 128 * 2, 64 * 9 * 128
    assert forward.num_bytes == pytest.approx(image + made + weights * 2)
    assert back.num_bytes == pytest.approx(made + image + weights * 2 / 4)  # a place meets a quarter of the taps
    assert weight.num_bytes == pytest.approx(image + made + weights * 2 * 4)  # fp32, added to a sum
    assert (piece.saved, piece.gradient) == (image, made)


def test_curves_and_the_roofline_read_the_map_once():
    whole = Gemm(m=100_352, n=64, k=576, dtype="fp16")
    implicit = Gemm(m=100_352, n=64, k=576, dtype="fp16", read=1 / 9)
    assert whole.flops == implicit.flops and gemm_seconds(implicit, ON.islands[0].device) < gemm_seconds(
        whole, ON.islands[0].device
    )
    m, n, k, _, element, out, stored = point(implicit).x
    assert element * m * k + stored * k * n + out * m * n == pytest.approx(implicit.num_bytes)


def test_one_channel_by_itself_takes_its_bytes():
    c = lowered("dp8 mb4").stages.context()
    spec = Convolution2d(inputs=32, outputs=32, kernel=3, groups=32)
    piece = convolved(c, "one", spec, FeatureMaps(4, 14, 14))
    assert piece.forward == piece.weight == Elementwise(num_bytes=2.0 * 4 * 14 * 14 * 32 * 2, fused=True)
    assert spec.num_params == 32 * 9


def test_what_is_kept_is_what_each_convolution_and_each_norm_read():
    # He et al.'s network makes 11.1 million numbers an image behind its convolutions, which are kept twice: as what the
    # next convolution reads and as what its norm read
    found = lowered("dp8 mb1")
    kept = sum(found.stages.unit_activations(unit).saved for unit in found.stages.compositions[0].units)
    assert kept / (2 * 2) == pytest.approx(11.1e6, rel=0.05)


def test_a_block_that_is_recomputed_keeps_the_maps_that_came_in():
    stages = lowered("dp8 mb4 full").stages
    for layer in range(stages.model.num_layers):
        (part,) = stages.model.block(layer).before
        flow = stages.model.flows[part.stream]
        (unit,) = {u for u in stages.compositions[0].units if u.kind == stages.model.pattern[layer]}
        assert stages.unit_activations(unit).saved == 4 * flow.length(224**2) * flow.hidden * 2


def test_a_border_of_the_pipeline_passes_the_maps_behind_it():
    found = lowered("pp4 dp2 mb8")
    ends = np.cumsum([len(some) for some in found.stages.layers])[:-1]
    sizes = {move.num_bytes for one in found.programs if one.kind == "send" for move in one.moves}
    model, expected = found.stages.model, set()
    for layer in ends:
        flow = model.flows[model.block(layer - 1).stream]
        expected.add(8.0 * flow.length(224**2) * flow.hidden * 2)
    assert sizes == expected


def test_gradients_are_summed_for_as_many_bytes_as_there_are_parameters():
    found = lowered("dp8 mb32")
    times = np.bincount(found.graph.cost_key, minlength=len(found.programs))
    sent = [n * m.num_bytes for n, one in zip(times, found.programs) for m in one.moves if m.op == "all_reduce"]
    assert sum(sent) == pytest.approx(25_557_032 * 4, abs=100)  # and the norm


@pytest.mark.parametrize("words", ["zero1", "fsdp", "sync=terngrad", "sync=powersgd:rank=4", "sync=local:h=8", "pp2"])
def test_what_divides_the_work_of_replicas_is_predicted(words):
    assert mw.predict(mw.load_model("resnet-18"), ON, TRAIN, mw.parse_plan(f"mb8 {words}"), detail=False).fits


def test_codes_see_a_convolution_as_outputs_times_taps():
    from meshwright.lower.tensors import tensors_of

    stages = lowered("dp8 mb4", "resnet-18").stages
    shapes = [(t.rows, t.columns) for t in tensors_of(stages, stages.compositions[0].units[0])["dense"]]
    assert shapes == [(64, 3 * 49)]
    count = sum(
        t.size for unit in stages.compositions[0].units for some in tensors_of(stages, unit).values() for t in some
    )
    assert mw.load_model("resnet-18").num_params - count == 2 * 4800 + 1000  # norms of 4,800 channels, and a bias


@pytest.mark.parametrize(
    ("plan", "words", "place"),
    [
        ("tp2 dp4", "dtype=fp16", "plan.layout.tp = 2"),
        ("cp2 dp4", "dtype=fp16", "plan.layout.cp = 2"),
        ("dp8", "dtype=fp8", "--train dtype=fp8"),
        ("dp8 fp8", "dtype=fp16", "plan.precision.compute = fp8"),
        ("dp8", "phase=lora", "--train phase=lora"),
    ],
)
def test_what_does_not_divide_convolutions_is_refused_where_it_was_said(plan, words, place):
    train = mw.parse_train(f"batch=256,image=224,{words}")
    found = check(mw.parse_plan(plan), mw.load_model("resnet-50"), ON, train)
    assert found and all(one.code in ("P027", "P028") and one.help for one in found)
    assert place in [one.place for one in found]
    assert not check(mw.parse_plan("pp2 dp4"), mw.load_model("resnet-50"), ON, TRAIN)


def test_a_workload_of_images_says_their_side_and_reads_back():
    assert TRAIN.seq_len == 224**2 and TRAIN.tokens_per_step == 256 and mw.parse_train(TRAIN.text()) == TRAIN
    with pytest.raises(MeshwrightError, match="W002"):
        mw.parse_train("batch=8,image=224,seq=197")
    seq = mw.parse_train("batch=8,seq=197")
    (found,) = check(mw.parse_plan("dp8"), mw.load_model("resnet-50"), ON, seq)
    assert found.code == "W009" and "image=224" in found.help
    assert any(one.code == "W009" for one in check(mw.parse_plan("dp8"), mw.load_model("vit-base-patch16"), ON, TRAIN))
    assert any(one.code == "W009" for one in check(mw.parse_plan("dp8"), mw.load_model("vgg-16"), ON, small()))


def small():
    return mw.parse_train("batch=8,image=16")


def test_rates_of_an_answer_count_images():
    found = mw.predict(mw.load_model("resnet-50"), ON, TRAIN, mw.parse_plan("dp8 mb32"))
    assert found.images_per_s == pytest.approx(256 / found.step_time_s)
    assert found.tokens_per_s_per_gpu == pytest.approx(found.images_per_s / 8)
    assert "images/s/GPU" in repr(found) and found.to_json()["images_per_s"] == found.images_per_s
    assert {"convolutions", "image", "input"} <= {one.name for one in found.assumptions}


def test_compiled_norms_move_less_and_everything_else_as_much():
    plain, fast = (lowered(f"dp8 mb4{word}").stages for word in ("", " compile=yes"))
    kinds = range(-2, len(plain.model.blocks))
    for kind in kinds:
        a, b = (stages.pieces(kind) for stages in (plain, fast))
        assert [p.forward for p in a if isinstance(p.forward, Gemm)] == [
            p.forward for p in b if isinstance(p.forward, Gemm)
        ]
    moved = [
        sum(p.forward.num_bytes for k in kinds for p in s.pieces(k) if isinstance(p.forward, Elementwise))
        for s in (plain, fast)
    ]
    assert moved[1] < moved[0]


def test_every_kind_of_a_network_of_convolutions_has_its_record():
    model = mw.load_model("resnet-50")
    assert {layers.of(layer).name for _, layer in model.all_layers} == {"image stem", "block", "image classifier"}


def test_a_microbatch_of_one_image_is_cautioned_against_with_the_step_of_a_better_one():
    model = mw.load_model("resnet-50")
    one, all_at_once = (mw.predict(model, ON, TRAIN, mw.parse_plan(plan)) for plan in ("dp8", "dp8 mb32"))
    took = f"with mb32 in the plan a step takes {seconds(all_at_once.step_time_s)}, not {seconds(one.step_time_s)}"
    assert any(took in caution for caution in one.cautions)
    assert not any("one image at a time" in caution for caution in all_at_once.cautions)
    # of more images than memory has room for, as many as it has
    large = mw.predict(model, ON, mw.parse_train("batch=4096,image=1024"), mw.parse_plan("dp8"))
    (said,) = (caution for caution in large.cautions if "one image at a time" in caution)
    size = int(re.search(r"with mb(\d+)", said)[1])
    fits = [
        mw.predict(model, ON, large.train, mw.parse_plan(f"dp8 mb{n}"), detail=False).fits for n in (size, 2 * size)
    ]
    assert fits == [True, False]


def test_a_search_puts_more_images_together_than_sequences():
    space = default(mw.load_model("resnet-50"), ON, mw.parse_train("batch=2048,image=224"))
    assert max(space["mb"]) == 512
    assert max(default(mw.load_model("gpt2"), ON, mw.parse_train("batch=2048,seq=2048"))["mb"]) == 32
