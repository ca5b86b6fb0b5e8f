"""Every model of the catalog: Megatron-LM's flags describe the same parameters, or the model is refused by name."""

import pytest

from meshwright import catalog
from meshwright.errors import Infeasible
from meshwright.spec.architecture import Model, stack
from meshwright.spec.families.parts import ends
from meshwright.spec.layers import Attention, Block, Dense, Moe
from meshwright.spec.model import load
from meshwright.spec.vectors import FeatureVectors
from tests.export import megatron_arguments
from tests.export.questions import ask, listed
from tests.export.test_megatron import flags

QUESTION = ("8xh100", "batch=64,seq=1024", "dp8 zero1")


def question(name):
    """A question whose sequences the model has."""
    model = load(name)
    flow = model.flows[model.head.stream]
    length = flow.tokens or min(1024, (model.learned_positions and model.max_seq_len) or 1024)
    frames = getattr(model.embedding, "frames", 0)
    film = f",frames={frames}" if frames else ""
    size = "image=256" if any(one.scale for one in model.flows) else f"seq={length}"
    size = f"features={model.embedding.channels}" if isinstance(model.embedding, FeatureVectors) else size
    return ("8xh100", f"batch=64,{size}{film}", "dp8 zero1")


#: Refused, with the reason in their own papers and configurations.
REFUSED = {
    "bloom-7b1": "it puts no norm behind the embedding",
    "falcon-40b": "attention and MLP follow each other",
    "gemma2-9b": "two norms, these 4",
    "gpt-j-6b": "attention and MLP follow each other",
    "llama4-scout": "they do not tile the sequence",
    "minimax-m2": "norms on queries and keys are as wide as a head",
    "mpt-30b": "it has no ALiBi",
    "opt-350m": "its embedding is as wide as its layers",
    "deepseek-v3.2": "no indexer that picks tokens",
}


def number(found, flag, otherwise=0):
    return int(found.get(flag, otherwise))


def attention(found, hidden):
    heads, biased = number(found, "--num-attention-heads"), "--disable-bias-linear" not in found
    common = {"heads": heads, "rotary": True, "qkv_bias": biased or "--add-qkv-bias" in found, "out_bias": biased}
    common["sinks"] = found.get("--softmax-type") == "learnable"
    if "--multi-latent-attention" in found:
        rope, values = number(found, "--qk-pos-emb-head-dim"), number(found, "--v-head-dim")
        ranks = {"q_lora_rank": number(found, "--q-lora-rank"), "kv_lora_rank": number(found, "--kv-lora-rank")}
        width = number(found, "--qk-head-dim") + rope
        return Attention(kv_heads=heads, head_dim=width, v_head_dim=values, rope_head_dim=rope, **ranks, **common)
    width = number(found, "--kv-channels", hidden // heads)
    norms = 2 * width if "--qk-layernorm" in found else 0
    groups = number(found, "--num-query-groups", heads)
    return Attention(kv_heads=groups, head_dim=width, v_head_dim=width, qk_norm_params=norms, **common)


def mlp(found, expert):
    gated, bias = "--swiglu" in found or "--quick-geglu" in found, "--disable-bias-linear" not in found
    shape = {"gated": gated, "activation": "silu" if gated else "gelu", "bias": bias}
    if not expert:
        return Dense(ffn=number(found, "--ffn-hidden-size"), **shape)
    return Moe(
        experts=number(found, "--num-experts"),
        top_k=number(found, "--moe-router-topk"),
        ffn=number(found, "--moe-ffn-hidden-size"),
        shared_ffn=number(found, "--moe-shared-expert-intermediate-size"),
        shared_gate="--moe-shared-expert-gate" in found,
        # routers have a bias that balances, or where linear layers have biases one that is learned
        router_bias="--moe-router-enable-expert-bias" in found or bias,
        **shape,
    )


def described(found):
    """The model that the flags describe."""
    hidden, layers = number(found, "--hidden-size"), number(found, "--num-layers")
    where = listed(found.get("--moe-layer-freq", f"[{int('--num-experts' in found)}]*{layers}"))
    norm = "rmsnorm" if found["--normalization"] == "RMSNorm" else "layernorm"
    blocks, order = stack(
        Block(
            attention=attention(found, hidden),
            mlp=mlp(found, expert),
            norm=norm,
            norms=2,
            norm_vectors=1 if norm == "rmsnorm" else 2,
        )
        for expert in where
    )
    learned = found["--position-embedding-type"] == "learned_absolute"
    embedding, head = ends(
        number(found, "--padded-vocab-size"),
        blocks[0].norm_vectors,
        tied="--untie-embeddings-and-output-weights" not in found,
        learned_positions=number(found, "--max-position-embeddings") if learned else 0,
    )
    return Model(
        name="described",
        family="megatron",
        hidden=hidden,
        embedding=embedding,
        blocks=blocks,
        pattern=order,
        head=head,
        max_seq_len=0,
    )


@pytest.mark.parametrize("name", catalog.names("models"))
def test_the_flags_describe_every_parameter_or_the_model_is_refused(name):
    try:
        found = flags(text := ask("megatron", name, *question(name)).text)
    except Infeasible as error:
        assert {d.place for d in error.diagnostics} == {"model"}
        assert any(REFUSED.get(name, "") in d.message for d in error.diagnostics)
    else:
        assert name not in REFUSED
        megatron_arguments.accepted(text)
        assert described(found).num_params == load(name).num_params


def test_most_of_the_catalog_can_be_exported():
    def exported(name):
        try:
            return bool(ask("megatron", name, *question(name)))
        except Infeasible:
            return False

    names = [name for name in catalog.names("models") if load(name).is_decoder]
    assert sum(map(exported, names)) > len(names) / 2
