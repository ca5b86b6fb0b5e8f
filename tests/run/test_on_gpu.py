"""The executor on a GPU, where there is one: against one process on the processor, and ranks against each other through
NCCL, which takes two ranks of one GPU for two hosts when told so."""

import os

import msgspec
import pytest
import torch

from meshwright.plan import parse
from meshwright.run import bench, equality, fp8, launch, loop
from meshwright.run.bench import forward
from meshwright.run.linear import matmul
from meshwright.run.settings import Settings
from meshwright.run.world import World
from meshwright.spec import model
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as workload
from tests.run.served_models import LIMITS, answers, generated, greedy, prompts, published, served
from tests.run.small import llama
from tests.run.test_fp8 import in_float64, operands

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
GPU = torch.device("cuda", 0)
TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32")


def losses(device, precision, plan="mb2", train=TRAIN, **more):
    job = loop.Job(
        model=llama(vocab=257, **more), plan=parse(plan).on(1), train=train, settings=Settings(precision=precision),
        steps=8, quiet=True,
    )  # fmt: skip
    return torch.tensor(loop.train(World(0, 1, 0, 1, "here", device), job)["losses"], dtype=torch.float64)


def test_losses_are_those_of_a_processor():
    """To the rounding of each type."""
    expected = losses(torch.device("cpu"), "float64")
    for precision, tolerance in (("float64", 1e-12), ("fp32", 1e-5), ("bf16", 1e-2)):
        assert ((losses(GPU, precision) - expected).abs() < tolerance * expected).all(), precision


@pytest.mark.parametrize("words", ["offload=activations prefetch=1", "offload=optimizer@0.5+activations@0.5", "full"])
def test_state_in_the_memory_of_the_host_changes_no_loss(words):
    """Under ``offload=optimizer`` the host's processor updates, whose roots and sums are rounded otherwise."""
    plain, moved = losses(GPU, "float64"), losses(GPU, "float64", f"mb2 {words}")
    assert ((plain - moved).abs() < 1e-12 * plain).all()
    plain, moved = losses(GPU, "bf16"), losses(GPU, "bf16", f"mb2 {words}")
    assert ((plain - moved).abs() < 1e-3 * plain).all()


@pytest.mark.parametrize("stored", ["", " params=nf4", " params=nf4-dq", " params=int4", " params=int8"])
def test_adapters_train_on_a_gpu_as_on_a_processor(stored):
    """Also over a base that is stored quantised, in double precision."""
    train = workload("batch=8,seq=16,phase=lora,dtype=fp32")
    expected = losses(torch.device("cpu"), "float64", "mb2" + stored, train, hidden=128, ffn=256)
    found = losses(GPU, "float64", "mb2" + stored, train, hidden=128, ffn=256)
    assert ((found - expected).abs() < 1e-12 * expected).all()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_served_answers_are_those_of_transformers_on_a_processor(family, tmp_path):
    """Greedily in double precision, crowded, so that requests are evicted and computed again, and with guesses."""
    wanted = generated(published(family, tmp_path))
    asked = [greedy(i, prompt, limit) for i, (prompt, limit) in enumerate(zip(prompts(), LIMITS))]
    for words in ("block=4,budget=7,kv_blocks=12,prefix_cache=yes,max_batch=4", "block=4,kv_blocks=100,draft=ngram",
                  "policy=vllm-v0,block=4,kv_blocks=13,preempt=swap,host=1MiB"):  # fmt: skip
        assert answers(served(tmp_path, words, device="cuda"), asked) == wanted, words


def test_a_weight_gradient_in_16_bits_is_summed_in_32():
    """Against float64: far closer than a result that was rounded to 16 bits on the way."""
    left, right = (torch.randn(512, 64, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    held = torch.randn(64, 64, device=GPU)
    expected = held.double() + left.T.double() @ right.double()
    torch.addmm(held, left.T, right, out_dtype=torch.float32, beta=1, out=held)
    assert (held - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < fp8.CAPABILITY, reason="no products of 8 bits"
)
@pytest.mark.parametrize("word", fp8.FORMATS)
def test_products_of_8_bits_are_those_of_rounded_operands_in_float64(word):
    x, w, g = (t.detach().to(GPU).requires_grad_(t.requires_grad) for t in operands(96, 64, 48))
    found = matmul(x, w, word)
    found.backward(g)
    for one, wanted in zip((found, x.grad, w.grad), in_float64(x, w, g, fp8.FORMATS[word]), strict=True):
        assert (one.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def between_two(rank, folder, plans, documents):
    """The largest difference from one process of each plan, into a file."""
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    world = World(rank, 2, rank, 2, f"host{rank}", GPU)
    launch._open(world, 100.0, init_method=f"file://{folder}/store")
    if not documents:
        real = equality._batch
        equality._batch = lambda *given: real(*given)._replace(documents=None)
    cases = tuple(equality.EqualityCase(model=llama(), plan=parse(plan).on(2), train=TRAIN, steps=3) for plan in plans)
    found = equality._compare(world, cases)
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(found))
    launch.leave()


PLANS = ("dp2 zero1", "tp2", "pp2 mb2", "pp2 zb-h1 mb2", "fsdp", "cp2", "cp2 ulysses")


@pytest.mark.slow
@pytest.mark.parametrize("documents", [True, False])
def test_two_ranks_through_nccl_train_as_one_process_does(tmp_path, documents):
    torch.multiprocessing.spawn(between_two, (tmp_path, PLANS, documents), nprocs=2)
    found = msgspec.json.decode((tmp_path / "0.json").read_bytes(), type=list[equality.Apart])
    assert {plan: apart.most for plan, apart in zip(PLANS, found, strict=True) if not apart.most < 1e-9} == {}


@pytest.mark.slow
def test_a_gpu_s_tables_are_of_the_device_alone():
    """A product of few rows takes microseconds there, whatever its host takes to issue it; times grow with the work."""
    scope = msgspec.structs.replace(
        bench.QUICK, name="small", gemm_m=(64.0, 4096.0), gemm_nk=(256.0, 4096.0),
        attention=((8.0,), (256.0, 1024.0), (64.0,)),
        elementwise=(4096.0, 2.0**28), elements=(65536,), layers=bench.QUICK.layers[:2], rounds=1, most_rounds=1,
    )  # fmt: skip
    machine = bench.measure(most_ranks=2, scope=scope)
    seconds = [t.seconds for t in machine.gemm["bf16"]]
    assert machine.kind == "cuda" and seconds[0] < 20e-6 < seconds[-1]
    assert machine.elementwise[0].seconds < 10e-6 < machine.elementwise[1].seconds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports what torch deprecates
def test_iterations_of_serving_are_timed_in_parts():
    """A graph is no slower than its parts, nor than the same kernels issued one by one."""
    shapes = [forward.IterationShape(4, 1, 511), forward.IterationShape(1, 256, 256)]
    world = World(0, 1, 0, 1, "here", GPU)
    rows = forward.iterations(world, model.load("qwen3-0.6b"), shapes, 2, lambda *told: None)
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["linear_s"] < row["whole_s"] < 1.1 * row["eager_s"]
        assert min(row["attention_s"].values()) < row["whole_s"]
