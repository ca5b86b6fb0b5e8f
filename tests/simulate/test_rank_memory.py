"""What a framework and its allocator hold beside a plan's tensors, by hand."""

import msgspec
import pytest

from meshwright.answer.predict import predict
from meshwright.answer.prediction import GIVEN_BACK
from meshwright.answer.rank_memory import rank_memory
from meshwright.cost import Framework, standard
from meshwright.cost.framework import Defaults
from meshwright.plan import parse
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load
from meshwright.spec.model import transformer
from meshwright.spec.workload import Train

LAYERS, HIDDEN, SEQ, VOCAB = 4, 256, 512, 1024
MODEL = transformer(name="gpt", layers=LAYERS, hidden=HIDDEN, heads=8, vocab=VOCAB)
TRAIN = Train(global_batch=16, seq_len=SEQ)
CLUSTER = load("8xh100")
WIDE = SEQ * HIDDEN * 2  # a microbatch's tokens at full width, bf16
PLAIN = Framework(name="plain", allocator_slack=0.0)
DDP = Defaults(bucket_bytes=25 * 2**20)


def held(words, framework=PLAIN, train=TRAIN, cluster=CLUSTER, model=MODEL):
    plan, costs = parse(words).on(cluster.num_devices), standard(framework)
    return rank_memory(simulate(plan, model, cluster, train, costs), costs)


def test_workspaces_of_products_are_those_of_torch_and_of_transformer_engine():
    """torch lends cuBLAS 4096 KiB twice and 16 KiB eight times, on Hopper 32 MiB; Transformer Engine 4 MiB, 32 MiB from
    Hopper on, for each of the four streams of a mixture's products. They are taken out of the context."""
    moe = transformer(
        name="moe", layers=LAYERS, hidden=HIDDEN, heads=8, vocab=VOCAB, experts=4, top_k=1, moe_ffn=HIDDEN
    )
    before, hopper = 2 * 4096 * 2**10 + 8 * 16 * 2**10, 32 * 2**20
    for whose, cluster, model, num_bytes in (
        ("torch", "8xa100", MODEL, before),
        ("torch", "8xh100", MODEL, hopper),
        ("torch", "8xb200", MODEL, before),
        ("engine", "8xa100", MODEL, before + 4 * 2**20),
        ("engine", "8xh100", MODEL, 2 * hopper),
        ("engine", "8xb200", moe, before + 4 * hopper),
        ("engine", "8xmi300x", MODEL, 0),
        ("", "8xh100", MODEL, 0),
    ):
        framework = msgspec.structs.replace(PLAIN, defaults=Defaults(workspaces=whose))
        (rank,) = held("dp8 mb1", framework, cluster=load(cluster), model=model)
        (plain,) = held("dp8 mb1", cluster=load(cluster), model=model)
        assert rank.alive.get("library workspaces", 0) == num_bytes, (whose, cluster)
        assert rank.alive["framework context"] == PLAIN.context_bytes - num_bytes
        assert rank.peak_bytes == pytest.approx(plain.peak_bytes)


def test_copies_multiply_activations_and_not_the_logits():
    (once,), (twice,) = (
        held("dp8 mb1", msgspec.structs.replace(PLAIN, activation_copies=copies)) for copies in (1.0, 2.0)
    )
    assert once.alive["logits"] == twice.alive["logits"] == 4 * SEQ * VOCAB
    assert twice.alive["activations"] == 2 * once.alive["activations"]


def test_logits_are_on_the_last_stage_and_go_with_its_backward():
    for words in ("dp4 pp2 mb1", "dp4 pp2 mb1 zb-h1"):
        first, last = held(words)
        assert (first.alive["logits"], last.alive["logits"]) == (0.0, 4 * SEQ * VOCAB), words
    found = predict(MODEL, CLUSTER, TRAIN, parse("dp4 pp2 mb1 zb-h1"), costs=standard(PLAIN))
    for trace in found.timeline.memory:
        assert trace.num_bytes[trace.categories.index("logits")][-1] == 0.0


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ("tp2 dp4 mb1", 2),
        ("tp2 dp4 mb1 zero1", 2),
        ("tp8 dp1 mb1", 2),  # no replicas, but 16-bit gradients until they are added to fp32 sums
        ("tp8 dp1 mb1 grads=bf16", 0),  # one sum, in the gradients' own precision
        ("tp2 dp4 mb1 grads=bf16", 2),  # buckets all the same
        ("dp8 mb1 fsdp", 0),  # no DDP
    ],
)
def test_torchs_buckets_are_a_second_copy_of_the_gradients(words, each):
    framework = msgspec.structs.replace(PLAIN, defaults=DDP)
    (rank,), (without,) = held(words, framework), held(words)
    gradients = without.alive["gradients"] / (2 if "grads=bf16" in words else 4)
    assert rank.alive.get("gradient buckets", 0.0) == pytest.approx(each * gradients)
    assert rank.peak_bytes - without.peak_bytes == pytest.approx(each * gradients)


def test_inputs_are_gathered_into_buffers_of_full_width_whatever_tp_is():
    framework = msgspec.structs.replace(PLAIN, defaults=Defaults(gather_buffers=2))
    for words, tokens in (("tp2 dp4 mb1", 1), ("tp4 dp2 mb2", 2), ("tp2 cp2 dp2 mb1", 0.5)):
        (rank,) = held(words, framework)
        assert rank.alive["gather buffers"] == 2 * tokens * WIDE
    for words in ("dp8 mb1", "tp2 dp4 mb1 nosp"):
        assert "gather buffers" not in held(words, framework)[0].alive


@pytest.mark.parametrize(
    ("words", "each", "layers"),
    [
        ("tp2 dp4 mb1", 4, 3),  # two gathered, two to be summed
        ("tp2 dp4 mb1 nosp", 2, 3),  # two that are summed
        ("tp2 dp2 pp2 mb1", 4, 2),  # a stage has no more layers
        ("tp2 dp4 mb4", 16, 2),  # one microbatch, of four sequences: half of the four layers' tensors
        ("dp8 mb1", 0, 0),  # nothing on another stream
    ],
)
def test_a_host_three_layers_ahead_keeps_their_collectives_tensors(words, each, layers):
    framework = msgspec.structs.replace(PLAIN, ahead_layers=3.0)
    for rank in held(words, framework):
        assert rank.alive.get(GIVEN_BACK, 0.0) == each * layers * WIDE


def test_buffers_in_flight_fill_a_device_and_never_overflow_it():
    device = CLUSTER.islands[0].device
    ahead, alone = msgspec.structs.replace(PLAIN, ahead_layers=1000.0), held("tp8 dp1 mb1 full")[0]
    tight = msgspec.structs.replace(device, memory_bytes=int(alone.peak_bytes) + 3 * WIDE)
    islands = (msgspec.structs.replace(CLUSTER.islands[0], device=tight),)
    (rank,) = held("tp8 dp1 mb1 full", ahead, cluster=msgspec.structs.replace(CLUSTER, islands=islands))
    assert rank.peak_bytes == pytest.approx(rank.capacity_bytes)  # full to the brim
    assert (
        rank.alive[GIVEN_BACK] == rank.headroom_bytes == pytest.approx(3 * WIDE, abs=3.0)
    )  # and as much room as before
    less = msgspec.structs.replace(device, memory_bytes=int(alone.peak_bytes) - WIDE)
    islands = (msgspec.structs.replace(CLUSTER.islands[0], device=less),)
    (rank,) = held("tp8 dp1 mb1 full", ahead, cluster=msgspec.structs.replace(CLUSTER, islands=islands))
    assert GIVEN_BACK not in rank.alive
    assert rank.headroom_bytes == pytest.approx(-WIDE, abs=3.0)


def test_a_framework_that_gathers_matrices_holds_two_of_them_and_not_two_layers():
    """Of the layer next to the embedding (vocabulary * hidden with positions, no matrix to multiply) FSDP gathers all;
    by matrices the two largest are the embedding and the first product of the MLP, and one gradient is whole."""
    by = Defaults(gathers="matrix", loss="in-place")
    layers, matrices = (
        held("dp8 mb1 fsdp", msgspec.structs.replace(PLAIN, defaults=d))[0].alive
        for d in (Defaults(loss="in-place"), by)
    )
    mlp = 4 * HIDDEN * HIDDEN
    table = (VOCAB + 2048) * HIDDEN  # with the positions that are learnt
    assert matrices["gathered parameters"] == 2 * (table + mlp)
    assert layers["gathered parameters"] > matrices["gathered parameters"]
    block = 12 * HIDDEN**2
    assert layers["gradients"] - matrices["gradients"] == pytest.approx(4 * block, rel=0.03)
