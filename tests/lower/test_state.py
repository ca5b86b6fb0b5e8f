"""Constant memory of a rank: parameters, gradients and optimizer state against hand counts."""

import msgspec
import pytest
from hypothesis import given, settings

from meshwright.layers.kind import Params
from meshwright.lower import lower
from meshwright.lower.bind import Binder
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.lower.state import gathered_bytes, static_bytes
from meshwright.lower.units import Unit
from meshwright.plan import check, parse
from meshwright.spec.architecture import EMBEDDING, HEAD
from meshwright.spec.model import transformer
from meshwright.spec.workload import Lora, Train
from tests.lower.sizes import block_params
from tests.random_plans import GPT, LATENT, LLAMA, MIXTURE, MODELS, legal_plans, of_size, sized

TRAIN = Train(global_batch=64, seq_len=128)
N = 1000.0
ALL = Params(dense=N, trained_dense=N)


def bytes_per_param(words, train=TRAIN, params=ALL):
    held = static_bytes(parse(words), train, params)
    return tuple(held[name] / N for name in ("parameters", "gradients", "optimizer"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # bf16 weights 2, fp32 gradients 4, fp32 master and two moments 12 (Rajbhandari et al. 1910.02054, section 3.1,
        # with gradients kept in fp32 as Megatron-LM does)
        ("dp4", (2, 4, 12)),
        ("dp4 zero1", (2, 4, 12 / 4)),
        ("dp4 zero2", (2, 4 / 4, 12 / 4)),
        ("fsdp dp4", (4 / 4, 4 / 4, 8 / 4)),  # the sharded copy is the master; the working one is gathered
        ("dp4 grads=bf16", (2, 2, 12)),  # the paper's K = 12: 2 + 2 + 12
        ("dp4 fp32", (4, 4, 8)),
        ("dp4 master=none", (2, 4, 8)),
        ("dp4 master=none moments=bf16 grads=bf16", (2, 2, 4)),
        ("dp2 cp2 zero1", (2, 4, 12 / 4)),  # state shards over dp * cp
        ("hsdp2 dp4", (4 / 2, 4 / 2, 8 / 2)),
        ("dp4 zero1 shard2", (2, 4, 12 / 2)),
        ("dp4 pp2 zero2", (2, 4 / 4, 12 / 4)),
        # under a pipeline FSDP's gradients accumulate whole until the last microbatch
        ("dp4 pp2 fsdp", (4 / 4, 4, 8 / 4)),
    ],
)
def test_bytes_per_parameter_are_those_counted_by_hand(words, expected):
    assert bytes_per_param(words) == pytest.approx(expected)


def test_optimizers_keep_their_moments():
    for optimizer, moments in (("adamw", 8), ("lion", 4), ("momentum", 4), ("sgd", 0)):
        train = Train(global_batch=1, seq_len=1, optimizer=optimizer)
        assert bytes_per_param("dp1", train) == (2, 4, 4 + moments)


def test_zero_3_gathers_a_working_copy():
    assert gathered_bytes(parse("fsdp dp4"), ALL, TRAIN) == 2 * N
    assert gathered_bytes(parse("dp4 zero2"), ALL, TRAIN) == 0


def test_a_model_of_7_5_billion_parameters_needs_what_the_zero_paper_says():
    # figure 1 of 1910.02054: Psi = 7.5B, 64 ranks: 120 GB, 31.4, 16.6 and 1.9 GB with gradients in 16 bits
    psi = Params(dense=7.5e9, trained_dense=7.5e9)
    total = lambda words: sum(static_bytes(parse(words + " grads=bf16"), TRAIN, psi).values()) / 1e9  # noqa: E731
    assert total("dp64") == pytest.approx(120.0, abs=0.05)
    assert total("dp64 zero1") == pytest.approx(31.4, abs=0.05)
    assert total("dp64 zero2") == pytest.approx(16.6, abs=0.05)
    # the paper keeps a sharded 16-bit copy beside the master (16 Psi / 64); here the master is the only one (14)
    assert total("fsdp dp64") == pytest.approx(7.5 * 14 / 64)


def test_a_frozen_base_has_no_gradient_and_no_optimizer_state():
    train = Train(global_batch=64, seq_len=128, phase="lora", lora=Lora(rank=16, targets=("q", "v", "down")))
    params = block_params(parse("tp1"), LLAMA, train, 0)
    h, kv, ffn = 256, 4 * 32, 512
    adapters = 16 * ((h + h) + (h + kv) + (h + ffn))  # rank * (in + out) of each target
    assert params.trained_dense == adapters
    assert params.dense == LLAMA.block_params(0).total + adapters
    held = static_bytes(parse("dp4"), train, params)
    assert (held["gradients"], held["optimizer"]) == (4 * adapters, 12 * adapters)
    assert held["parameters"] == 2 * params.dense


def test_experts_are_sharded_over_their_own_mesh():
    plan = parse("tp2 dp8 ep4 etp1 zero1")  # 16 ranks: ep 4, so 4 replicas of each expert
    params = block_params(plan, MIXTURE, TRAIN, 1)
    whole = MIXTURE.block_params(1)
    assert params.expert == whole.experts / 4
    assert params.dense == (whole.attention + whole.mlp) / 2 + whole.norm + whole.router
    held = static_bytes(plan, TRAIN, params)
    assert held["optimizer"] == pytest.approx(12 * params.dense / 8 + 12 * params.expert / 4)
    etp = block_params(parse("tp2 dp8 ep4"), MIXTURE, TRAIN, 1)  # without etp1 each expert is split as the rest
    assert etp.expert == whole.experts / 8


def total_params(plan, model, where, train):
    """Parameters of one replica: every rank's own share, the copies of what is replicated over tp counted once."""
    lowered = lower(plan, model, where, train)
    stages, tp = lowered.stages, plan.layout.tp
    whole = 0.0
    for composition in stages.compositions:
        for unit in composition.units:
            params = stages.params(unit)
            one_rank = tensors_on_all(model, unit)
            experts = params.expert * plan.experts.ep * plan.etp
            whole += (params.dense - one_rank) * tp + one_rank + experts
    return whole


def tensors_on_all(model, unit):
    """Parameters that every tensor-parallel rank holds whole: norms, routers, positions, latent down-projections."""
    if unit.kind == EMBEDDING:
        return model.embedding_params - model.vocab * model.hidden
    if unit.kind == HEAD:
        return model.final_norm_params
    parts, a = model.block_params(unit.kind), model.blocks[unit.kind].attention
    latent = a.q_lora_rank + a.kv_lora_rank
    down = model.hidden * (latent + a.rope_head_dim) + latent if a.kv_lora_rank else 0
    return parts.norm + parts.router + down


@settings(max_examples=50)
@given(legal_plans())
def test_the_parameters_of_all_ranks_are_the_models(question):
    model, stages = question.model, lower(*question).stages
    tied_twice = model.vocab * model.hidden if model.tied_embeddings and not stages.ends_meet else 0
    assert total_params(*question) == pytest.approx(model.num_params + tied_twice)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_one_rank_without_parallelism_holds_the_model_and_its_optimizer(model):
    lowered = lower(parse("dp1 mb1"), model, of_size(1), Train(global_batch=1, seq_len=128))
    (held,) = lowered.static_bytes
    assert held == pytest.approx(
        {"parameters": 2 * model.num_params, "gradients": 4 * model.num_params, "optimizer": 12 * model.num_params}
    )


@settings(max_examples=40)
@given(legal_plans())
def test_more_sharding_never_needs_more_constant_memory(question):
    plan, train = question.plan, question.train
    params = Params(dense=100.0, expert=40.0, trained_dense=100.0, trained_expert=40.0)
    sums = []
    for zero in range(4 if plan.layout.pp == 1 else 3):
        layout = msgspec.structs.replace(plan.layout, zero=zero, shard=0)
        sums.append(sum(static_bytes(msgspec.structs.replace(plan, layout=layout), train, params).values()))
    assert sums == sorted(sums, reverse=True)


def exchanged(words, what, model=GPT, train=TRAIN):
    """Bytes by operation that one block exchanges over data parallelism."""
    plan = parse(words)
    where = sized(plan)
    assert check(plan, model, where, train) == []
    mesh = Mesh(plan, where)
    stages = Stages(plan, model, train, mesh)
    kind = len(model.blocks) - 1
    steps = Binder(stages, mesh).steps((Unit(kind, "none"),), what, 0)
    return [(op, size, group.size) for op, size, group in steps]


def test_gradients_are_all_reduced_or_scattered_in_their_precision():
    block = GPT.block_params(0).total
    assert exchanged("dp8", "reduce") == [("all_reduce", 4.0 * block, 8)]
    assert exchanged("dp8 grads=bf16", "reduce") == [("all_reduce", 2.0 * block, 8)]
    assert exchanged("dp8 zero1", "reduce") == [("reduce_scatter", 4.0 * block, 8)]
    assert exchanged("dp8 zero1", "gather") == [("all_gather", 2.0 * block, 8)]
    assert exchanged("cp2 dp4 zero1", "reduce") == [("reduce_scatter", 4.0 * block, 8)]


def test_a_hybrid_scope_scatters_inside_and_sums_outside():
    block = GPT.block_params(0).total
    assert exchanged("hsdp4 dp8", "reduce") == [("reduce_scatter", 4.0 * block, 4), ("all_reduce", 4.0 * block / 4, 2)]
    assert exchanged("hsdp4 dp8", "gather") == [("all_gather", 2.0 * block, 4)]


def test_experts_are_exchanged_over_their_replicas_only():
    params = MIXTURE.block_params(1)
    dense = params.total - params.experts
    assert exchanged("dp8 ep4", "reduce", MIXTURE) == [
        ("all_reduce", 4.0 * dense, 8),
        ("all_reduce", 4.0 * params.experts / 4, 2),
    ]
    assert exchanged("dp8 ep8", "reduce", MIXTURE) == [("all_reduce", 4.0 * dense, 8)]


def test_a_frozen_base_exchanges_its_adapters_only():
    train = Train(global_batch=64, seq_len=128, phase="lora", lora=Lora(rank=4, targets=("q",)))
    assert exchanged("dp8", "reduce", LLAMA, train) == [("all_reduce", 4.0 * 4 * (256 + 256), 8)]


def test_latent_down_projections_are_whole_on_every_rank():
    a = LATENT.blocks[-1].attention
    one, four = (block_params(parse(f"tp{t} etp1"), LATENT, TRAIN, len(LATENT.blocks) - 1) for t in (1, 4))
    down = LATENT.hidden * (a.kv_lora_rank + a.rope_head_dim) + a.kv_lora_rank
    parts = LATENT.block_params(len(LATENT.blocks) - 1)
    split = one.dense - parts.norm - parts.router - down
    assert four.dense == pytest.approx(split / 4 + parts.norm + parts.router + down)


def test_a_tied_table_is_held_by_both_ends_of_a_pipeline():
    model = transformer(layers=4, hidden=64, heads=4, vocab=512, max_seq_len=64)
    lowered = lower(parse("pp2 dp1 mb1"), model, of_size(2), Train(global_batch=4, seq_len=64))
    first, last = lowered.static_bytes
    blocks = 2 * model.block_params(0).total
    assert first["parameters"] == 2 * (blocks + model.embedding_params)
    assert last["parameters"] == 2 * (blocks + model.final_norm_params + 512 * 64)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev", "dualpipe", "chimera", "bitpipe", "hanayo"])
def test_a_rank_with_both_ends_of_the_pipeline_holds_a_tied_table_once(schedule):
    model = transformer(layers=8, hidden=64, heads=4, vocab=4096, max_seq_len=64)
    plan = parse(f"pp4 dp1 {schedule} mb1")
    lowered = lower(plan, model, of_size(4), Train(global_batch=8, seq_len=64))
    table = 4096 * 64
    copies = [rank["parameters"] // (2 * table) for rank in lowered.static_bytes]
    ends = {r for s in (0, -1) for r in lowered.actions.stage_ranks[s]}
    assert copies == [1 if r in ends else 0 for r in range(4)]


def test_more_ranks_than_key_value_heads_hold_a_whole_one_each():
    # Llama-like: 8 query and 4 key-value heads of 32 over tp 8: queries and output an eighth, keys and values a quarter
    h, ffn, d = 256, 512, 32
    per_rank = (2 * h * h + 3 * h * ffn) / 8 + 2 * h * d + 2 * h
    assert block_params(parse("tp8"), LLAMA, TRAIN, 0).dense == per_rank
    assert block_params(parse("tp4"), LLAMA, TRAIN, 0).dense == (2 * h * h + 3 * h * ffn) / 4 + 2 * h * d + 2 * h
