"""U-Nets of latent diffusion: parameters as published, what their layers hand on, and what ranks of an image send."""

import pytest

import meshwright as mw
from meshwright import layers
from meshwright.answer.denoising import predict_denoising
from meshwright.answer.flops import model_flops
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.lower.denoising import denoising_step
from meshwright.spec.denoise import parse
from meshwright.spec.model import config, from_config
from meshwright.work import Collective

COSTS = standard(load_framework("fused"))
#: Two levels, one residual block in each, transformers in the lower: a U-Net whose parts are counted by hand.
SMALL = {
    **config("sd-2-1"),
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "attention_head_dim": [1, 2],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 8,
    "cross_attention_dim": 16,
}


def step_of(plan, model, words="images=1,size=512", on="4xa100-80"):
    cluster = mw.load_cluster(on)
    return denoising_step(mw.parse_plan(plan).on(cluster.num_devices), model, cluster, parse(words).train(model))


def asked(plan, model="sd-2-1", *, on="4xa100-80", words="images=1,size=512,steps=20"):
    return predict_denoising(mw.load_model(model), mw.load_cluster(on), parse(words), mw.parse_plan(plan), costs=COSTS)


@pytest.mark.parametrize(("name", "params"), [("sd-2-1", 865_910_724), ("sdxl", 2_567_463_684)])
def test_parameters_are_those_of_the_published_checkpoints(name, params):
    assert mw.load_model(name).num_params == params


def test_levels_go_down_and_up_again_beside_what_they_left():
    model = from_config(SMALL, name="small")
    parts = [type(part).__name__ for i in range(model.num_layers) for part in model.block(i).before]
    down = ["TimedResidual", "Resampling", "TimedResidual", "MapProjection", "MapProjection"]
    middle = ["TimedResidual", "MapProjection", "MapProjection", "TimedResidual"]
    up = ["TimedResidual", "MapProjection", "MapProjection"] * 2 + ["Resampling"] + ["TimedResidual"] * 2
    assert parts == down + middle + up
    read = [p for i in range(model.num_layers) for p in model.block(i).before if getattr(p, "skip", -1) >= 0]
    # what comes from below, and the widths that the way down left there: 64 and 32, then 32 of the level and the stem
    assert [(p.inputs, p.outputs) for p in read] == [(128, 64), (96, 64), (96, 32), (64, 32)]


def test_a_border_carries_every_map_that_is_still_to_be_read():
    model = from_config(SMALL, name="small")
    middle = next(i for i in range(model.num_layers) if i > 6)
    carried = [model.flows[s] for s in model.carried(middle)]
    # the middle's own, and those of the stem, of the first level and of its halving, and of the second level
    assert [(flow.scale, flow.hidden) for flow in carried] == [(8, 32), (8, 32), (16, 32), (16, 64), (16, 64)]


def test_operations_of_stable_diffusion_are_those_that_are_published():
    # 338.76 GMACs a pass of 64 x 64 latents without the products of attention, of SD 1.5 (Ma et al., 2312.00858, from
    # memory), whose convolutions are the same and whose text is narrower
    model, train = mw.load_model("sd-2-1"), mw.parse_train("batch=1,image=512")
    mixed = sum(
        count * 2 * flow.length(512**2) ** 2 * flow.hidden
        for count, block in zip(model.layers_by_kind, model.blocks)
        for flow in [model.flows[block.stream]]
        if block.attention
    )
    texts = sum(
        count * 2 * 77 * flow.length(512**2) * flow.hidden
        for count, block in zip(model.layers_by_kind, model.blocks)
        for flow in [model.flows[block.stream]]
        if block.cross
    )
    once = model_flops(model, train) / 6 - mixed - texts
    assert once / 1e9 == pytest.approx(338.76, rel=0.01)


def test_ranks_of_an_image_send_rows_sums_and_keys():
    model = mw.load_model("sd-2-1")
    found = [e for one in step_of("cp4 allgather", model).passes for la in one.layers for e in la.entries]
    sent = {e.name: e.work for e in found if isinstance(e.work, Collective)}
    assert sent["latents edges"].num_bytes == 2 * 2 * 64 * 4 * 2  # two rows of 64 places, both rows of guidance, 4 wide
    assert sent["group norm 1 sums"].num_bytes == 2 * 32 * 2 * 4
    assert {e.queue for e in found if isinstance(e.work, Collective)} == {"cp"}
    alone = [e for one in step_of("dp1", model, on="1xa100-80").passes for la in one.layers for e in la.entries]
    assert not any(isinstance(e.work, Collective) for e in alone)


def test_a_rank_has_its_rows_of_every_product():
    model = mw.load_model("sd-2-1")

    def flops(plan, on):
        (one,) = step_of(plan, model, on=on).passes
        return sum(getattr(e.work, "flops", 0.0) for la in one.layers for e in la.entries)

    # all but the products of a step's vectors, which every rank computes
    assert flops("dp1", "1xa100-80") / flops("cp4 allgather", "4xa100-80") == pytest.approx(4, rel=2e-3)


def test_old_rows_are_waited_for_by_nothing():
    waits, stale = asked("cp4 allgather"), asked("cp4 allgather stale=patches")
    assert stale.times.step_s < waits.times.step_s and stale.times.sent_bytes == waits.times.sent_bytes
    assert stale.memory[0].alive["stale keys and values"] > 0


def test_stages_hand_on_what_later_ones_read():
    model = mw.load_model("sd-2-1")
    step = step_of("pp4", model)
    counts = [len(one.layers) for one in step.passes]
    assert sum(counts) == model.num_layers + 2
    moved = [message.moves[0].num_bytes for message in step.onward]
    ends = [sum(counts[: i + 1]) - 1 for i in range(3)]
    for size, border in zip(moved, ends):
        flows = [model.flows[s] for s in model.carried(border)]
        assert size == sum(2 * flow.length(512**2) * flow.hidden * 2 for flow in flows)


@pytest.mark.parametrize(
    ("plan", "words", "code"),
    [
        ("tp2 dp2", "size=512", "P027"),
        ("cp4 allgather", "size=576", "P028"),  # 9 rows in the smallest maps
        ("dp1 cp4 allgather", "size=500", "W019"),
    ],
)
def test_what_does_not_divide_a_u_net_is_refused(plan, words, code):
    with pytest.raises(MeshwrightError) as caught:
        asked(plan, words=words)
    assert code in {one.code for one in caught.value.diagnostics}


@pytest.mark.parametrize("said", [{"resnet_time_scale_shift": "scale_shift"}, {"mid_block_type": None}])
def test_a_configuration_of_another_shape_is_refused(said):
    with pytest.raises(MeshwrightError) as caught:
        from_config({**SMALL, **said}, name="other")
    assert [one.code for one in caught.value.diagnostics] == ["M005"]


def test_a_u_net_is_trained_on_images_and_not_cut_then():
    model, on = mw.load_model("sd-2-1"), mw.load_cluster("8xa100-80")
    train = mw.parse_train("batch=64,image=512")
    assert mw.predict(model, on, train, mw.parse_plan("dp8 mb8 zero1")).images_per_s > 1
    with pytest.raises(MeshwrightError):
        mw.predict(model, on, train, mw.parse_plan("cp2 dp4 mb8"))


def test_every_part_has_its_kind():
    names = {layers.of(part).name for block in mw.load_model("sdxl").blocks for part in block.before}
    assert names == {"timed residual", "map projection", "resampling"}
