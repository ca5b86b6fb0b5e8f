"""Kinds of layers beside attention and MLP: what they are made of, by hand, and how plans split them."""

import msgspec
import pytest

from meshwright import layers, predict
from meshwright.answer.flops import model_flops
from meshwright.cost import load_framework, standard, standard_on
from meshwright.lower import lower
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.plan import check, parse
from meshwright.spec import cluster
from meshwright.spec import layers as parts
from meshwright.spec.model import load
from meshwright.spec.workload import Train
from meshwright.work import AttentionCore, Collective, Convolution, Elementwise, Gemm, Scan
from tests.lower.sizes import context

WHERE = cluster.load("8xh100")
MAMBA2, NEXT, T5, CLIP, LLAVA = map(
    load, ("mamba2-2.7b", "qwen3-next-80b-a3b", "t5-base", "clip-vit-large-patch14", "llava-1.5-7b")
)
TRAIN = Train(global_batch=16, seq_len=1024)


def pieces(model, words, kind=0, train=TRAIN):
    """The pieces of a kind of block."""
    block = model.blocks[kind]
    return layers.of(block).pieces(context(parse(words), model, train).at(block.stream), block)


def works(found, kind):
    return [p.forward for p in found if isinstance(p.forward, kind)]


def held(model, words, kind=0):
    """Parameters of a block on one rank."""
    block = model.blocks[kind]
    found = layers.of(block).params(block, context(parse(words), model, TRAIN))
    tp = parse(words).layout.tp
    return found.split / tp + found.whole + found.extra


def test_a_mamba2_layer_is_two_products_a_convolution_and_a_scan():
    # 80 heads of 64 on a width of 2560, one group of 128 states: gate and inputs 5120 each, both maps, 80 step sizes
    found = pieces(MAMBA2, "dp8 mb2")
    into, out = works(found, Gemm)
    assert (into.m, into.n, into.k) == (2 * 1024, 2 * 5120 + 2 * 128 + 80, 2560)
    assert (out.n, out.k) == (2560, 5120)
    (convolution,) = works(found, Convolution)
    assert (convolution.channels, convolution.kernel) == (5120 + 256, 4)
    (scan,) = works(found, Scan)
    assert (scan.heads, scan.groups, scan.k_dim, scan.v_dim, scan.chunk) == (80, 1, 128, 64, 256)


def test_a_mamba2_layer_convolves_again_for_its_backward_and_lays_rows_together_where_there_are_several():
    """Its kernel keeps what goes into the convolution, and not what comes out (mamba_split_conv1d_scan_combined). Of
    two rows of 1024 tokens, 2 x 5120 + 2 x 128 + 80 numbers a token are copied in front of it and 5120 behind it, read
    and written in two bytes each, where the sequence is the first dim."""
    found = {p.name: p for p in pieces(MAMBA2, "dp8 mb2")}
    assert found["mixer convolution again"].backward == found["mixer convolution"].forward
    together, apart = found["mixer rows together"], found["mixer rows apart"]
    assert together.forward == together.backward and together.forward.num_bytes == 2 * 2 * 2048 * 10576
    assert apart.forward.num_bytes == 2 * 2 * 2048 * 5120
    assert not {"mixer rows together", "mixer rows apart"} & {p.name for p in pieces(MAMBA2, "dp8 mb1")}
    device = WHERE.islands[0].device
    first, others = standard(load_framework("megatron-bridge")), standard(load_framework("torchtitan"))
    copied = first.price(together.forward, device)
    assert copied.seconds == first.price(Elementwise(num_bytes=2 * 2 * 2048 * 10576, fused=True), device).seconds
    assert others.price(together.forward, device).seconds == 0.0


def test_tensor_parallelism_splits_heads_and_repeats_the_maps_of_one_group():
    (scan,) = works(pieces(MAMBA2, "tp4 nosp mb1"), Scan)
    assert (scan.heads, scan.groups) == (20, 1)
    # both maps of the one group, 2 x 128 rows of the projection and their taps and biases, on every rank
    repeated = 2 * 128 * (2560 + 4 + 1)
    block = MAMBA2.blocks[0]
    split = block.mixer.num_params(2560)
    assert held(MAMBA2, "tp4 nosp") == pytest.approx((split - repeated) / 4 + repeated + 2560)


def test_context_parallelism_swaps_heads_for_tokens_around_a_scan_of_whole_sequences():
    found = pieces(NEXT, "cp4 dp2 mb1")
    (scan,) = works(found, Scan)
    assert (scan.seq_len, scan.heads, scan.groups) == (1024, 32 // 4, 16 // 4)
    there, back = [p.forward for p in found if isinstance(p.forward, Collective) and p.queue == "cp"]
    # 256 tokens of a rank: queries and keys of 16 heads of 128, values of 32, two numbers a head; values back
    assert there.num_bytes == 256 * (2 * 2048 + 4096 + 2 * 32) * 2 and there.op == "all_to_all"
    assert back.num_bytes == 256 * 4096 * 2


def test_experts_in_a_latent_space_are_sent_less_and_are_narrower():
    """Nemotron 3 Super: 22 of 512 experts a token, 4096 wide outside and 1024 inside."""
    model = load("nemotron-3-super-120b-a12b")
    kind = next(k for k, block in enumerate(model.blocks) if isinstance(block.mlp, parts.Moe))
    found = {p.name: p for p in pieces(model, "dp8 ep8 mb1", kind)}
    for exchange in ("dispatch all-to-all", "combine all-to-all"):
        assert found[exchange].forward.num_bytes == 1024 * 22 * 1024 * 2
        assert found[exchange].forward.routed.hidden == 1024
    assert (found["experts up"].forward.n, found["experts up"].forward.k) == (2688, 1024)
    into, out = found["latent in"].forward, found["latent out"].forward
    assert [(into.m, into.n, into.k), (out.m, out.n, out.k)] == [(1024, 1024, 4096), (1024, 4096, 1024)]
    assert found["latent in"].saved == 0 and found["latent out"].saved == 1024 * 1024 * 2
    # router with a number an expert, both ways and the norm are whole on every rank; shared experts are split
    whole = 512 * (4096 + 1) + 2 * 4096 * 1024 + 4096
    assert held(model, "tp4 ep4 dp2 etp1", kind) == whole + 2 * 4096 * 5376 / 4


def test_the_state_of_a_scan_does_not_grow_and_the_cache_of_attention_does():
    linear, full = NEXT.blocks
    kept = layers.of(linear).state(linear)
    assert (kept.per_token, kept.constant) == (0, 32 * 128 * 128 + 8192 * 3)
    assert layers.of(full).state(full).per_token == 2 * 2 * 256


def test_a_gated_attention_projects_twice_the_queries_and_scales_its_output():
    found = pieces(NEXT, "dp8 mb1", kind=1)
    qkv = next(p.forward for p in found if p.name == "qkv")
    assert qkv.n == 2 * 16 * 256 + 2 * 2 * 256
    assert [p.name for p in found].index("attention gate") < [p.name for p in found].index("attention out")


def test_cross_attention_reads_the_keys_of_all_encoder_tokens():
    decoder = T5.pattern[-1]
    own, cross = works(pieces(T5, "dp8 mb4", kind=decoder), AttentionCore)
    assert own.pairs == 1024 * 1025 / 2
    assert (cross.batch, cross.q_len, cross.kv_len, cross.pairs) == (4, 1024, 1024, 1024.0**2)
    (encoder,) = works(pieces(T5, "dp8 mb4", kind=0), AttentionCore)
    assert encoder.pairs == 1024.0**2


def test_images_have_as_many_tokens_as_patches_whatever_the_sequence():
    (core,) = works(pieces(CLIP, "dp8 mb8", train=Train(global_batch=64, seq_len=77)), AttentionCore)
    assert (core.batch, core.q_len, core.pairs) == (8, 257, 257.0**2)
    texts = CLIP.pattern[-1]
    (core,) = works(pieces(CLIP, "dp8 mb8", kind=texts, train=Train(global_batch=64, seq_len=77)), AttentionCore)
    assert (core.q_len, core.pairs) == (77, 77 * 78 / 2)


def test_operations_of_a_text_and_image_model_count_each_stream_by_its_own_tokens():
    # LLaVA by hand, 6 a parameter and token: 577 image tokens through tower and bridge, 2048 in the text model; scores
    # 12 x pairs x width a layer as if every pair counted
    train = Train(global_batch=2, seq_len=2048)
    vision = 24 * (4 * 1024**2 + 2 * 1024 * 4096 + 4 * 1024 + 4096 + 1024 + 4 * 1024)
    patches = 3 * 14 * 14 * 1024 + 2 * 1024
    bridge = 2 * 1024 + 1025 * 4096 + 4097 * 4096
    text = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096 + 32064 * 4096
    scores = 12 * (24 * 577**2 * 1024 + 32 * 2048**2 * 4096)
    once = 6 * (577 * (vision + patches + bridge) + 2048 * text) + scores
    assert model_flops(LLAVA, train) == pytest.approx(2 * once)


def test_what_later_stages_read_passes_every_border():
    # T5 base: twelve encoder layers, then twelve of the decoder, which all read the encoder's last states
    assert [T5.carried(layer) for layer in (1, 12, 13, 23)] == [(0,), (0,), (0, 1), (0, 1)]
    assert [LLAVA.carried(layer) for layer in (1, 24, 25)] == [(0,), (0,), (1,)]


def test_a_pipeline_of_encoder_and_decoder_sends_both():
    plan = parse("pp2 dp4 mb4").on(8)
    late = parse("pp2 dp4 mb4 stages=18,6").on(8)
    train = Train(global_batch=64, seq_len=512)

    def message(plan):
        lowered = lower(plan, T5, WHERE, train)
        return {m.num_bytes for p in lowered.programs if p.kind == "send" for m in p.moves}

    one = 4 * 512 * 768 * 2.0
    assert message(plan) == {one} and message(late) == {2 * one}


def test_shared_blocks_are_counted_once_and_work_everywhere():
    zamba = load("zamba2-2.7b")
    places = [b.before[0] for b in map(zamba.block, range(zamba.num_layers)) if b.before]
    assert [p.borrows for p in places] == [False, False] + [True] * 7
    once = places[0].shared_params(2560)
    assert places[0].num_params(2560) - places[-1].num_params(2560) == once
    # 6 operations for each use of the shared weights: more than the model's parameters say
    train = Train(global_batch=1, seq_len=128)
    assert model_flops(zamba, train) > 6 * 128 * (zamba.num_params + 7 * once)


@pytest.mark.parametrize("name", ["mamba2-2.7b", "nemotron-h-56b", "jamba-v0.1", "t5-large", "bert-large"])
def test_more_tensor_parallel_ranks_hold_less_and_together_at_least_the_model(name):
    model = load(name)
    for words in ("tp2", "tp4"):
        plan = parse(words).on(8)
        stages = Stages(plan, model, TRAIN, Mesh(plan, WHERE))
        (composition,) = stages.compositions
        params = stages.total_params(composition.units)
        total = plan.layout.tp * (params.dense + params.expert)
        assert model.num_params <= total * (1 + 1e-9)
        assert total < 1.2 * model.num_params


@pytest.mark.parametrize("name", ["mamba-codestral-7b", "zamba2-2.7b", "t5-v1.1-xxl", "bert-large", "llava-1.5-7b"])
@pytest.mark.parametrize("words", ["fsdp full", "tp2 dp4 zero1 selective", "tp4 dp2 zero2"])
def test_predictions_of_new_kinds_hold_together(name, words):
    model = load(name)
    train = Train(global_batch=32, seq_len=512 if "bert" in name else 1024)
    plan = parse(words if "llava" not in name else f"{words} nosp").on(8)
    assert not check(plan, model, WHERE, train)
    found = predict(model, WHERE, train, plan, detail=False)
    low, high = found.step_time_interval_s
    assert found.bound_s <= low <= found.step_time_s <= high
    assert sum(found.attribution.values()) == pytest.approx(found.step_time_s)
    assert 0 < found.mfu < 1


def test_a_scan_that_nobody_measured_is_less_sure_than_attention_and_half_as_sure_as_what_was_measured():
    carried, measured, device = standard_on(WHERE), standard_on(WHERE, "fused"), WHERE.islands[0].device
    (scan,) = works(pieces(MAMBA2, "dp8 mb2"), Scan)
    (core,) = works(pieces(NEXT, "dp8 mb2", kind=1), AttentionCore)
    assert "carried to h100_sxm" in carried.price(core, device).source
    assert "fitted: h100_sxm" in measured.price(core, device).source
    assert carried.price(scan, device).sigma > carried.price(core, device).sigma
    assert measured.price(scan, device).sigma >= 2 * measured.price(core, device).sigma


def test_a_kind_without_a_record_is_named():
    class Unknown(msgspec.Struct, frozen=True):
        size: int

    with pytest.raises(Exception, match=r"M009.*no kind of layer has the record Unknown"):
        layers.of(Unknown(1))


def test_norms_stand_where_each_family_has_them_and_collectives_land_on_their_first_reader():
    def order(model, words="tp2 dp4"):
        found = [p for p in pieces(model, words) if p.name.endswith(("norm", "residual")) or p.joins]
        return [p.name for p in found], {p.name: p.lands for p in found if p.lands}

    two = parts.Block(**{f: getattr(load("llama3-8b").blocks[0], f) for f in ("attention", "mlp")})
    lines = {
        4: ["attention norm", "attention gather", "attention scatter", "attention post-norm", "attention residual"],
        2: ["attention gather", "attention scatter", "attention post-norm", "attention residual"],
    }
    for norms, after in ((4, False), (2, True)):  # Gemma 2's and OLMo 2's
        block = msgspec.structs.replace(two, norms=norms, norm_after=after)
        names, lands = order(msgspec.structs.replace(load("llama3-8b"), blocks=(block,)))
        assert names == lines[norms] + [name.replace("attention", "mlp") for name in lines[norms]]
        assert lands["attention post-norm"] == lands["mlp post-norm"] == "forward"
        assert lands["attention norm" if norms == 4 else "attention residual"] == "backward"
    assert order(load("gemma2-9b"))[0] == lines[4] + [name.replace("attention", "mlp") for name in lines[4]]


def test_a_sandwich_moves_and_keeps_two_hidden_states_more_a_layer():
    # Gemma 2 9B, 3584 wide, 2 sequences of 1024 tokens in 16 bits: each norm reads and writes one, and keeps one
    size = 2 * 1024 * 3584 * 2
    found = [p for p in pieces(load("gemma2-9b"), "dp8 mb2") if p.name.endswith("norm")]
    assert [(p.forward.num_bytes, p.backward.num_bytes, p.saved) for p in found] == [(2 * size, 3 * size, size)] * 4
